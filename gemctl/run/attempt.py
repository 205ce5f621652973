"""One attempt at a run. Whoever creates its folder owns the run, as long as no attempt with a higher number exists.

    attempts/<n>/
      claim.json      who, where, with how many ranks; which requests came before it
      secret          its agents and ranks recognise each other by it; only the user can read it
      meeting.json    the port where agents of several hosts meet, if the intended one was in use
      base.json       the checkpoint it starts from
      heartbeat       changes while the attempt is alive; heartbeat-<node>: while the agent of another host is
      config.yaml plan.json mesh.json request.json
      spec.yaml inputs.json   what its ranks read (gemctl/run/inputs.py)
      agent-<node>.jsonl ranks/<rank>.jsonl   records of the processes (gemctl/run/rank_records.py)
      ledger.jsonl metrics.jsonl tb/ logs/
      loaded.json     which tensors were loaded at its start
      saves.jsonl     the outcome of each save
      rolled_back.json  why it dropped its steps since the last checkpoint, if it did (gemctl/run/base.py)
      kill.json       the supervisor's order to kill all ranks
      end.json        how it ended; missing if no process survived to write it

The folder is created by mkdir, which succeeds for one process only, and nothing is rewritten to take or keep the run: a
process that was suspended for an hour finds a higher folder when it wakes up, and knows that it owns nothing any more.
"""

import contextlib
import json
import os
import secrets
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from gemctl.durable import exists, read, retried, sync_folder
from gemctl.errors import GemctlError, InputError
from gemctl.run.files import Record, create_json, is_whole, read_json, read_whole

PATIENCE = 5.0  # seconds, at least, without a heartbeat after which an attempt counts as dead
LAST_BEAT = 2.0  # seconds to wait for the heartbeat's thread, which may be waiting for an unreachable host
MOST_BEAT = 4096
SECRET_BYTES = 32
OTHERS = stat.S_IRWXG | stat.S_IRWXO
BEAT_BYTES = 64  # each heartbeat overwrites the last one in a single write


def may_go_on(end: dict[str, Any]) -> bool:
    """False if the run has ended for good with this end of an attempt. Whether a preempted job is started again, only
    its scheduler knows."""
    return bool(end.get("again")) or end.get("kind") == "preemption"


@dataclass(frozen=True)
class Claim:
    """Who created the attempt. Attempts served by the same agents have the same `owner`."""

    owner: str
    host: str
    pid: int
    time: float
    nodes: int
    ranks_per_node: int
    heartbeat: float  # seconds between heartbeats
    first_request: int  # requests with lower numbers are for earlier attempts

    @property
    def patience(self) -> float:
        """Seconds without a heartbeat after which the attempt counts as dead: ten heartbeats, at least 5 s."""
        return max(PATIENCE, 10 * self.heartbeat)


@dataclass(frozen=True)
class Base:
    """What the attempt starts from. Checkpoints of earlier attempts at later steps are void from then on."""

    checkpoint: str | None  # name of its folder in checkpoints/; None: step 0
    step: int  # steps completed in it
    passed_over: list[int] = field(default_factory=list)  # later steps (from 0) whose batches are skipped
    left_alone: list[str] = field(
        default_factory=list
    )  # published checkpoints that it does not use; never deleted by gemctl


class _Named:
    """A path in the folder, created on access: listing runs reads few files of many folders."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, kind: type) -> Path:
        return Path(folder.path, self._name)


class Attempt:
    """The files of one attempt; its folder exists."""

    claim_file = _Named("claim.json")
    secret = _Named("secret")
    meeting = _Named("meeting.json")
    base_file = _Named("base.json")
    heartbeat = _Named("heartbeat")
    config = _Named("config.yaml")
    plan = _Named("plan.json")
    mesh = _Named("mesh.json")
    request = _Named("request.json")
    ledger = _Named("ledger.jsonl")
    metrics = _Named("metrics.jsonl")
    rollup = _Named("rollup.jsonl")
    loaded = _Named("loaded.json")
    saves = _Named("saves.jsonl")
    rolled_back = _Named("rolled_back.json")
    tensorboard = _Named("tb")
    logs = _Named("logs")
    ranks = _Named("ranks")
    kill_order = _Named("kill.json")
    end_file = _Named("end.json")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.name)
        self._read: dict[Path, Record] = {}

    def agent_log(self, node: int) -> Path:
        return self.path / f"agent-{node}.jsonl"

    def agent_beat(self, node: int) -> Path:
        """The agent's heartbeat file; that of node 0 is the attempt's."""
        return self.heartbeat if node == 0 else self.path / f"heartbeat-{node}"

    def agent_output(self, node: int) -> Path:
        """stdout and stderr of the agent that started with this attempt."""
        return self.logs / f"agent-{node}.log"

    def rank_log(self, rank: int) -> Path:
        """The rank's own record: stages and exceptions, as JSON lines."""
        return self.ranks / f"{rank}.jsonl"

    def rank_output(self, rank: int) -> Path:
        """stdout and stderr of the rank's process."""
        return self.logs / f"rank-{rank}.log"

    def output_times(self, node: int) -> Path:
        """When the output files of the host's ranks grew (gemctl/run/rank_records.py)."""
        return self.logs / f"times-{node}.jsonl"

    def rank_stack(self, rank: int) -> Path:
        """Where the rank dumps its stack on SIGUSR1."""
        return self.logs / f"rank-{rank}.stack"

    def in_run(self, path: Path) -> str:
        """One of the attempt's files, relative to the run directory, which may be moved."""
        return str(path.relative_to(self.path.parent.parent))

    @property
    def claimed(self) -> bool:
        """False for a moment after the folder is created, and forever if its creator or the power failed then."""
        return self._once(self.claim_file) is not None

    def _once(self, path: Path) -> Record | None:
        """The contents of a file that is written once; None if it is missing or truncated."""
        if path not in self._read and (found := read_whole(path)) is not None:
            self._read[path] = found
        return self._read.get(path)

    @property
    def configured(self) -> bool:
        """Whether its configuration was written and survived a possible power loss."""
        return is_whole(self.config)

    @property
    def patience(self) -> float:
        """As in its claim; the shortest if it has none."""
        return self.claim().patience if self.claimed else PATIENCE

    def claim(self) -> Claim:
        return Claim(**(self._once(self.claim_file) or read_json(self.claim_file)).fields(Claim))

    def base(self) -> Base:
        return Base(**read_json(self.base_file).fields(Base))

    def started_from(self) -> Base | None:
        """As `base`; None if it has not been written, or a power loss truncated it."""
        base = self._once(self.base_file)
        return None if base is None else Base(**base.fields(Base))

    def write_base(self, base: Base) -> None:
        create_json(self.base_file, asdict(base))

    def owns_run(self) -> bool:
        """False once a higher attempt exists: what this one writes from then on is void."""
        names = retried(lambda: os.listdir(self.path.parent))  # noqa: PTH208 (speed)
        return not any(name.isascii() and name.isdecimal() and int(name) > self.number for name in names)

    def beat(self, node: int = 0) -> bytes:
        """The agent's current heartbeat; only whether it changes is meaningful."""
        try:
            return read(self.agent_beat(node), MOST_BEAT)
        except FileNotFoundError:
            return b""

    def end(self) -> dict[str, Any] | None:
        """How the attempt ended: `outcome` (finished, stopped, preempted, killed, failed), `step`, steps `saved`, the
        budget (`kind`) that it is charged to, the `signal` that stopped it, the `cause`. None if it has no end record.
        """
        return self._once(self.end_file)

    def write_end(self, outcome: str, **facts: Any) -> None:
        create_json(self.end_file, {"outcome": outcome, "time": time.time(), **facts})

    def order_kill(self, reason: str) -> None:
        """Orders every agent of the attempt to dump its ranks' stacks and to kill them."""
        with contextlib.suppress(FileExistsError):  # agents and supervisor may order it at once
            create_json(self.kill_order, {"reason": reason, "time": time.time()})


def claim(
    run_path: Path,
    number: int,
    *,
    nodes: int,
    ranks_per_node: int,
    heartbeat: float,
    owner: str | None = None,
    first_request: int | None = None,
) -> Attempt:
    """Creates attempt `number` and so takes the run. InputError if another process was faster.

    `number` is one more than that of the last attempt that the caller knows, which is dead: so of two processes that
    take over the same dead attempt only one can win. `first_request`: the first that its owner has not handled; None:
    the next that is filed.
    """
    attempt = Attempt(run_path / "attempts" / str(number))
    claim = {
        "owner": owner or uuid.uuid4().hex,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "heartbeat": heartbeat,
        "first_request": first_request or 1 + sum(1 for _ in (run_path / "requests").glob("*.json")),
    }
    with contextlib.suppress(FileExistsError):  # another process's, or ours if a file server retried: the claim decides
        attempt.path.mkdir()
    sync_folder(attempt.path.parent)
    attempt.logs.mkdir(exist_ok=True)
    attempt.ranks.mkdir(exist_ok=True)
    create_secret(attempt.secret)  # before the claim, so that agents of a claimed attempt can read it
    try:
        create_json(attempt.claim_file, claim)  # syncs the folders beside it too
    except FileExistsError:
        raise InputError(f"{run_path.name}: attempt {number} was started by another process just now") from None
    _write_beat(attempt.heartbeat, 0)  # after the claim, so that the owner of a heartbeat is known
    return attempt


def create_secret(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, secrets.token_bytes(SECRET_BYTES).hex().encode())
        finally:
            os.close(fd)


def read_secret(path: Path) -> bytes:
    """The attempt's secret, 32 bytes, by which agents and ranks recognise each other (gemctl/ranks/store.py). Only the
    user may read it, even in a run that a group shares: a colleague who resumes makes an attempt with a secret of its
    own. GemctlError if it cannot be read, or others can read it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mode, text = os.fstat(fd).st_mode, os.read(fd, 2 * SECRET_BYTES + 1)
        finally:
            os.close(fd)
        secret = bytes.fromhex(text.decode("ascii"))
    except (OSError, ValueError) as error:
        raise GemctlError(f"{path}: the attempt's secret cannot be read: {error}") from None
    if len(secret) != SECRET_BYTES:
        raise GemctlError(f"{path}: the attempt's secret is truncated")
    if mode & OTHERS:
        raise GemctlError(
            f"{path}: mode {stat.S_IMODE(mode):04o} lets others read the attempt's secret, with which they could join "
            "the run: run.root must lie on a file system that keeps the modes of files"
        )
    return secret


def _write_beat(path: Path, count: int) -> None:
    text = json.dumps({"format": 1, "beat": count}).ljust(BEAT_BYTES - 1) + "\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(fd, text.encode(), 0)
    finally:
        os.close(fd)


class Heartbeat:
    """Writes the heartbeat of `node`'s agent from a thread: `with Heartbeat(attempt, seconds): …`.

    It stops once a higher attempt owns the run, after calling `superseded`. Before each beat it calls `reach`, and
    stops if that returns False, so that a host that cannot reach the others falls silent.
    """

    def __init__(
        self,
        attempt: Attempt,
        seconds: float,
        superseded: Callable[[], None] | None = None,
        node: int = 0,
        reach: Callable[[], bool] = lambda: True,
    ) -> None:
        self._attempt, self._seconds, self._superseded = attempt, seconds, superseded
        self._file, self._reach = attempt.agent_beat(node), reach
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(LAST_BEAT)

    def _run(self) -> None:
        count = 0
        while not self._done.wait(self._seconds):
            if not self._attempt.owns_run():
                if self._superseded is not None:
                    self._superseded()
                return
            if not self._reach():
                return
            count += 1
            with contextlib.suppress(OSError):  # the next may succeed; if none does, the attempt counts as dead
                _write_beat(self._file, count)


def watch_beat(attempt: Attempt) -> float | None:
    """Seconds until the attempt's next heartbeat; None if it has ended, or has no heartbeat within its patience: it is
    dead. Measured by this process's monotonic clock, since the clock of the writer's host may differ."""
    if exists(attempt.end_file):
        return None
    patience = attempt.patience
    start, first = time.monotonic(), attempt.beat()
    while time.monotonic() - start < patience:
        if exists(attempt.end_file):
            return None
        if attempt.beat() != first:
            return time.monotonic() - start
        time.sleep(0.02)
    return None
