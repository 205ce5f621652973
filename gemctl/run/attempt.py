"""One attempt at a run: who made its folder owns the run, for as long as no higher one exists.

    attempts/<n>/
      claim.json      who, where, with how many ranks; which requests were there before
      secret          its agents and ranks recognise each other by it; only the user can read it
      meeting.json    the port at which agents of several hosts meet, if the one meant was taken
      base.json       the checkpoint it starts from
      heartbeat       changes while the attempt lives; heartbeat-<node>: while the agent of another host does
      config.yaml plan.json mesh.json request.json
      spec.yaml inputs.json   what its ranks read (gemctl/run/inputs.py)
      agent-<node>.jsonl ranks/<rank>.jsonl   what became of the processes (gemctl/run/rank_records.py)
      ledger.jsonl metrics.jsonl tb/ logs/
      loaded.json     what was loaded at its start, counted and checked
      saves.jsonl     what became of each save
      rolled_back.json  why it gave up its steps since the last checkpoint, if it did (gemctl/run/base.py)
      kill.json       the supervisor's order to end all ranks at once
      end.json        how it ended; missing if nobody lived to write it

The folder is made by mkdir, which only one can win, and nothing is rewritten to take or keep the run: a process that
was stopped for an hour and wakes up finds a higher folder and knows that it owns nothing any more.
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

from gemctl.durable import exists, read, steadily, sync_folder
from gemctl.errors import GemctlError, InputError
from gemctl.run.files import Record, create_json, is_whole, read_json, read_whole

PATIENCE = 5.0  # seconds, at least, without a beat after which an attempt counts as dead
LAST_BEAT = 2.0  # seconds that the end of the beating may wait for a host that is not reached
MOST_BEAT = 4096
SECRET_BYTES = 32
OTHERS = stat.S_IRWXG | stat.S_IRWXO
BEAT_BYTES = 64  # every beat is written over the last one in a single write


def may_go_on(end: dict[str, Any]) -> bool:
    """False if the run has ended for good with this end of an attempt. Whether a job that was ended is started again,
    only its scheduler can tell."""
    return bool(end.get("again")) or end.get("kind") == "preemption"


@dataclass(frozen=True)
class Claim:
    """Who made the attempt. Attempts that the same agents serve have the same `owner`."""

    owner: str
    host: str
    pid: int
    time: float
    nodes: int
    ranks_per_node: int
    heartbeat: float  # seconds between beats
    first_request: int  # requests with lower numbers were meant for earlier attempts

    @property
    def patience(self) -> float:
        """Seconds without a beat after which the attempt counts as dead: ten beats, at least 5 s."""
        return max(PATIENCE, 10 * self.heartbeat)


@dataclass(frozen=True)
class Base:
    """What the attempt starts from. Checkpoints of earlier attempts at later steps are void from then on."""

    checkpoint: str | None  # its folder's name below checkpoints/; None: from the start
    step: int  # steps that are done in it
    passed_over: list[int] = field(default_factory=list)  # later steps whose batches are not looked at (from 0)
    left_alone: list[str] = field(default_factory=list)  # published checkpoints that it goes on without: kept


class _Named:
    """The path of a folder's file, made when asked for: a list of runs reads few files of many folders."""

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
        """What an agent beats in; that of node 0 speaks for the attempt."""
        return self.heartbeat if node == 0 else self.path / f"heartbeat-{node}"

    def agent_output(self, node: int) -> Path:
        """What the agent that began with this attempt wrote to stdout and stderr."""
        return self.logs / f"agent-{node}.log"

    def rank_log(self, rank: int) -> Path:
        """The rank's own record: stages and exceptions, JSON lines."""
        return self.ranks / f"{rank}.jsonl"

    def rank_output(self, rank: int) -> Path:
        """What the rank's process wrote to stdout and stderr."""
        return self.logs / f"rank-{rank}.log"

    def output_times(self, node: int) -> Path:
        """When the output files of the host's ranks grew (gemctl/run/rank_records.py)."""
        return self.logs / f"times-{node}.jsonl"

    def rank_stack(self, rank: int) -> Path:
        """Where the rank dumps its stack when asked to."""
        return self.logs / f"rank-{rank}.stack"

    def in_run(self, path: Path) -> str:
        """One of the attempt's files as the run's records name it, from the run's directory: that may be moved."""
        return str(path.relative_to(self.path.parent.parent))

    @property
    def claimed(self) -> bool:
        """False for a moment after the folder is made, and for ever if its maker or its host's power died then."""
        return self._once(self.claim_file) is not None

    def _once(self, path: Path) -> Record | None:
        """What is in a file that is written once and then kept as it is; None if it is not there, or cut."""
        if path not in self._read and (found := read_whole(path)) is not None:
            self._read[path] = found
        return self._read.get(path)

    @property
    def configured(self) -> bool:
        """Whether it got as far as its configuration, and no power loss has taken it."""
        return is_whole(self.config)

    @property
    def patience(self) -> float:
        """As its claim says; the shortest if it has none."""
        return self.claim().patience if self.claimed else PATIENCE

    def claim(self) -> Claim:
        return Claim(**(self._once(self.claim_file) or read_json(self.claim_file)).fields(Claim))

    def base(self) -> Base:
        return Base(**read_json(self.base_file).fields(Base))

    def started_from(self) -> Base | None:
        """As `base`; None where it has not come to say so, or a power loss has cut what it said."""
        base = self._once(self.base_file)
        return None if base is None else Base(**base.fields(Base))

    def write_base(self, base: Base) -> None:
        create_json(self.base_file, asdict(base))

    def owns_run(self) -> bool:
        """False once a higher attempt exists: what this one still writes is void."""
        names = steadily(lambda: os.listdir(self.path.parent))  # noqa: PTH208 (speed)
        return not any(name.isascii() and name.isdecimal() and int(name) > self.number for name in names)

    def beat(self, node: int = 0) -> bytes:
        """The present beat of an agent; only whether it changes has a meaning."""
        try:
            return read(self.agent_beat(node), MOST_BEAT)
        except FileNotFoundError:
            return b""

    def end(self) -> dict[str, Any] | None:
        """How the attempt ended: `outcome` (finished, stopped, preempted, killed, failed), `step`, steps `saved`, the
        budget (`kind`) that it costs, the `signal` that stopped it, the `cause`. None: it did not say.
        """
        return self._once(self.end_file)

    def write_end(self, outcome: str, **facts: Any) -> None:
        create_json(self.end_file, {"outcome": outcome, "time": time.time(), **facts})

    def order_kill(self, reason: str) -> None:
        """Tells every agent of the attempt to dump its ranks' stacks and to kill them."""
        with contextlib.suppress(FileExistsError):  # several may order it, for one reason
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
    """Makes attempt `number` and so takes the run. InputError if another process was faster.

    `number` is one more than the last attempt that the caller knew and found dead: so of two that take over the same
    dead attempt only one can win. `first_request`: the first that its owner has not
    seen; None: that comes from now on.
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
    with contextlib.suppress(FileExistsError):  # a faster one's, or ours and a file server says so: the claim decides
        attempt.path.mkdir()
    sync_folder(attempt.path.parent)
    attempt.logs.mkdir(exist_ok=True)
    attempt.ranks.mkdir(exist_ok=True)
    create_secret(attempt.secret)  # before the claim: what is claimed can be met in
    try:
        create_json(attempt.claim_file, claim)  # puts the folders beside it on disk too
    except FileExistsError:
        raise InputError(f"{run_path.name}: attempt {number} was started by another process just now") from None
    _write_beat(attempt.heartbeat, 0)  # after the claim: what beats can be asked who it is
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
        raise GemctlError(f"{path}: the attempt's secret is cut")
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
    """Beats in the attempt's folder from a thread of its own: `with Heartbeat(attempt, seconds): …`.

    It ends by itself once a higher attempt owns the run, after calling `superseded`. `node`: whose beat it is. Before
    each beat it calls `reach`, so that a host which does not get to the others falls silent: False ends the beating.
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
            with contextlib.suppress(OSError):  # the next one may be taken; if none is, others take the run
                _write_beat(self._file, count)


def watch_beat(attempt: Attempt) -> float | None:
    """Seconds until the attempt's next beat, or None if it has ended or does not beat within its patience: it is dead.

    Only this process's own monotonic clock counts, as the writer may live on a host whose clock differs.
    """
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
