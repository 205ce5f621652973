"""Whole runs with a small worker: the real supervisor, agent and `elastic_launch`, forked from the preloaded server.

    ends = run_world(1, supervise_all, [Case(str(tmp_path), inject="kill:rank=1,step=3")], gloo=False)[0]

A case of several nodes has an agent for each, with a host name of its own, all on the loopback of this machine. The
worker checks its place in the mesh, joins gloo and goes through the stages of the real one: it checks the checkpoint
that it starts from, agrees on stop requests by an all-reduce, publishes checkpoints and leaves. Only the model, the
data and the launcher's process start are missing.
"""

import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gemctl.ranks.rendezvous
import gemctl.run.attempt
from gemctl import env, process
from gemctl.config.schema import BudgetsConfig, RecoverConfig
from gemctl.errors import GemctlError, InputError
from gemctl.launchers.api import Agents
from gemctl.mesh.topology import Topology
from gemctl.ranks.agent import Agent
from gemctl.recover.context import Prepared
from gemctl.recover.records import Records
from gemctl.recover.supervisor import run_attempts
from gemctl.run import requests
from gemctl.run.attempt import Attempt, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import create_json, read_log
from gemctl.run.manifest import Manifest, RunFacts, describe_file, folder_name, publish, verify
from gemctl.run.mesh import read_mesh
from gemctl.run.rank_records import Stage, StageRecorder

RANKS = 3
STEPS = 6
STEP_SECONDS = 0.02


def no_budgets() -> BudgetsConfig:
    """One attempt, however it ends."""
    return BudgetsConfig(preemption=0, time_limit=0, crash=0)


@dataclass(frozen=True)
class Job:
    """What the worker does: `steps` of STEP_SECONDS each, and a checkpoint after `every` of them (0: only at the end),
    which takes `save_seconds`; before step `eval_at` an evaluation of a second (0: none)."""

    steps: int = STEPS
    every: int = 0
    save_seconds: float = 0.0
    eval_at: int = 0


Fault = Literal[
    "",
    "linger",  # rank 1 is stopped (SIGSTOP) when its work is done
    "misplace",  # every rank takes its host for another one
    "memory",  # rank 1 allocates a gigabyte at step 3, beyond its limit: RLIMIT_AS, or that of Case.cgroup
    "block",  # rank 1 cannot open its output file, so it exits before it is registered
    "broken",  # the agent of node 1 fails before it has imported everything
    "absent",  # the agent of node 1 is never started
]


@dataclass(frozen=True)
class Disturb:
    """`what`, one of DISTURBANCES, happens once rank 0 is at step `at` (-1: in build), in `stage` if one is given.

    `grace`: seconds after which SIGKILL follows; 0: never.
    """

    what: str
    at: int = 2
    stage: str = ""
    grace: float = 0.0


@dataclass(frozen=True)
class Case:
    """One run below `root`, with one fault at most that is built in, or planted (`inject`), or comes from outside."""

    root: str
    inject: str = ""  # GEMCTL_INJECT
    fault: Fault = ""
    disturb: Disturb | None = None
    watchdog: float = 60.0
    budgets: BudgetsConfig = field(default_factory=no_budgets)
    job: Job = field(default_factory=Job)
    nodes: int = 1
    ranks_per_node: int = 0  # 0: RANKS on one host, two on each of several
    hosts: tuple[str, ...] = ("n10", "n2")  # by node; the mesh has n2 first
    store: str = ""  # HOST:PORT where the agents meet; "": a free port
    cgroup: str = ""  # of the agent

    @property
    def local(self) -> int:
        """Ranks of each host."""
        return self.ranks_per_node or (RANKS if self.nodes == 1 else 2)


@dataclass(frozen=True)
class Ended:
    """How a case ended. `seconds`: from the last sign of any rank to the end of everything."""

    run: str
    error: str | None
    message: str
    exit_code: int
    seconds: float
    left: list[int]
    cause: dict[str, Any] | None
    notes: list[str]

    @property
    def run_dir(self) -> RunDir:
        return RunDir.open(self.run)


def work(run_path: str, number: int) -> None:
    """The small worker."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from gemctl.failpoints import failpoint  # noqa: PLC0415
    from gemctl.ranks.store import of_ranks  # noqa: PLC0415

    run = RunDir.open(run_path)
    attempt = run.attempt(number)
    rank, asked = int(os.environ["RANK"]), json.loads(attempt.config.read_text())
    stages = StageRecorder(attempt, rank)
    if asked["fault"] == "misplace":
        socket.gethostname = lambda: "elsewhere"
    read_mesh(attempt).check_place(rank, env.world_size(), socket.gethostname(), env.local_rank())

    def enter(stage: Stage, step: int | None) -> None:
        stages.enter(stage, step)
        failpoint(stage, step)

    def save(step: int) -> None:
        enter("save", step)
        time.sleep(asked["save_seconds"])
        dist.barrier()
        if rank == 0:
            publish_step(run, number, step)

    dist.init_process_group("gloo", **of_ranks(attempt))
    enter("build", None)
    dist.barrier()
    base = attempt.base()
    if base.checkpoint is not None:
        enter("load", base.step)
        if faults := verify(run.checkpoints / base.checkpoint):
            raise InputError(faults)
    done, stopped = base.step, False
    while done < asked["steps"] and not stopped:
        if asked["eval_at"] and done == asked["eval_at"]:
            for _ in range(20):
                enter("eval", done)
                time.sleep(0.05)
        enter("step", done)
        if asked["fault"] == "memory" and (rank, done) == (1, 3):
            _take_memory(limited=not asked["cgroup"])
        time.sleep(STEP_SECONDS)
        flag = torch.tensor([float(rank == 0 and _stop_requested(run, attempt))])
        dist.all_reduce(flag)
        done, stopped = done + 1, bool(flag)
        if asked["every"] and done % asked["every"] == 0 and done < asked["steps"] and not stopped:
            save(done)
    save(done)
    enter("close", done)
    dist.barrier()
    dist.destroy_process_group()
    stages.finish("stopped" if stopped else "finished", done)
    if rank == 1 and asked["fault"] == "linger":
        os.kill(os.getpid(), signal.SIGSTOP)


def _stop_requested(run: RunDir, attempt: Attempt) -> bool:
    return any(wish.kind == "stop" for wish in requests.pending(run, attempt))


def _take_memory(limited: bool) -> None:
    if limited:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    bytearray(1 << 30)


def publish_step(run: RunDir, attempt: int, step: int) -> None:
    """A checkpoint of one small file."""
    folder = run.checkpoints / folder_name(step, attempt)
    folder.mkdir()
    data = folder / "data"
    data.write_text(f"step {step}")
    facts = RunFacts(RANKS, {}, [], "", "", 0, {})
    publish(folder, Manifest(step, attempt, facts, {}, {}, {data.name: describe_file(data)}))


class AgentProcesses:
    """What a launcher does with agents that are this process's children; how they start is a subclass's."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.pids: dict[int, int] = {}  # node → agent

    def submit(self, attempt: Attempt) -> None:
        create_json(attempt.request, {})

    def ended(self) -> dict[int, str]:
        ends = {node: process.how_ended(pid) for node, pid in self.pids.items()}
        return {node: how for node, how in ends.items() if how is not None}

    def kill(self) -> list[int]:
        for pid in self.pids.values():
            if process.running(pid):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.pids = {}
        return process.wait_until_gone(pids(self.run), 3)


class ForkedAgents(AgentProcesses):
    """A fork in place of a new Python process, whose ranks run `worker`."""

    worker: Callable[[str, int], None] = staticmethod(work)

    def __init__(self, run: RunDir, case: Case) -> None:
        super().__init__(run)
        self.case = case

    def start(self, attempt: Attempt) -> None:
        supervisor, store = os.getpid(), self.case.store or f"127.0.0.1:{free_port()}"
        for node in range(1 if self.case.fault == "absent" else self.case.nodes):
            pid = os.fork()
            if pid == 0:
                os._exit(self._agent(attempt, node, store, supervisor))
            self.pids[node] = pid

    def _agent(self, attempt: Attempt, node: int, store: str, supervisor: int) -> int:
        os.setsid()
        log = os.open(attempt.agent_output(node), os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        process.die_with_parent(supervisor)
        if self.case.cgroup:
            (Path(self.case.cgroup) / "cgroup.procs").write_text(str(os.getpid()))
        if self.case.fault == "block":
            attempt.rank_output(1).mkdir()
        if self.case.nodes > 1:
            name = self.case.hosts[node]
            socket.gethostname = lambda: name
            os.environ["GEMCTL_TOPOLOGY_ADDRESS"] = f"spine.leaf1.{name}"
        agent = Agent(self.run, attempt, node, store if self.case.nodes > 1 else None)
        agent.take_signals()
        if self.case.fault == "broken" and node == 1:
            agent.failed(ImportError("no module"))
            return 1
        return agent.serve(self.worker)

    def ended(self) -> dict[int, str]:
        return super().ended() if self.pids else {0: "it was killed"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def topology(case: Case) -> Topology:
    """All ranks in one group of either side."""
    world = case.nodes * case.local
    return Topology(world, 1, world, 1, 1, world, case.local)


def agent_lines(run: RunDir) -> list[dict[str, Any]]:
    """What all agents have said, attempt by attempt, node by node."""
    attempts = [attempt for attempt in run.attempts() if attempt.claimed]
    nodes = range(attempts[0].claim().nodes) if attempts else range(0)
    return [line for attempt in attempts for node in nodes for line in read_log(attempt.agent_log(node))]


def pids(run: RunDir) -> list[int]:
    """Every process that the run's agents have named."""
    return [line["pid"] for line in agent_lines(run) if line["event"] in {"agent", "rank"}]


def agent_pid(run: RunDir, node: int) -> int:
    """The agent of a node in the first attempt."""
    return int(read_log(run.attempt(1).agent_log(node))[0]["pid"])


class Disturbing:
    """A follower that disturbs the run once rank 0 has reached a step."""

    def __init__(self, case: Case, run: RunDir) -> None:
        self.disturb, self.run = case.disturb, run
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def follow(self, attempt: Attempt) -> None:
        if self.disturb is None:
            return
        records = Records(attempt)
        records.update()
        rank = records.ranks[0]
        reached = rank.stage != "start" and (-1 if rank.step is None else rank.step) >= self.disturb.at
        if reached and self.disturb.stage in {"", rank.stage}:
            disturb, self.disturb = self.disturb, None
            DISTURBANCES[disturb.what](self.run, records)
            if disturb.grace:
                threading.Timer(disturb.grace, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _interrupt(run: RunDir, records: Records) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _terminate(run: RunDir, records: Records) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _terminate_twice(run: RunDir, records: Records) -> None:
    _terminate(run, records)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _time_up(run: RunDir, records: Records) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def _interrupt_twice(run: RunDir, records: Records) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)


def _kill_agent(run: RunDir, records: Records) -> None:
    os.kill(agent_pid(run, 0), signal.SIGKILL)


def _kill_agent_1(run: RunDir, records: Records) -> None:
    os.kill(agent_pid(run, 1), signal.SIGKILL)


def _stop_agent(run: RunDir, records: Records) -> None:
    os.kill(agent_pid(run, 0), signal.SIGSTOP)


def _stop_host_1(run: RunDir, records: Records) -> None:
    """As a host whose power fails: nothing there moves any more, and no connection is closed."""
    ranks = [line["pid"] for line in read_log(run.attempt(1).agent_log(1)) if line["event"] == "rank"]
    for pid in [agent_pid(run, 1), *ranks]:
        os.kill(pid, signal.SIGSTOP)


def _file_stop(run: RunDir, records: Records) -> None:
    requests.file(run, "stop")


def _file_kill(run: RunDir, records: Records) -> None:
    requests.file(run, "kill")


def _damage(run: RunDir, records: Records) -> None:
    """A bit of the newest checkpoint flips, and a rank dies."""
    data = max(run.checkpoints.glob("*/data"), key=lambda path: path.stat().st_mtime)
    data.write_bytes(b"S" + data.read_bytes()[1:])
    os.kill(records.ranks[1].pid or 0, signal.SIGKILL)


def _kill_self(run: RunDir, records: Records) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_rank(run: RunDir, records: Records) -> None:
    os.kill(records.ranks[1].pid or 0, signal.SIGSTOP)


def _take_over(run: RunDir, records: Records) -> None:
    agent = agent_pid(run, 0)
    claim(run.path, records.attempt.number + 1, nodes=1, ranks_per_node=RANKS, heartbeat=0.1)
    process.wait_until_gone([agent], 3)  # it sees that by itself, not only through its supervisor


def _fill_disk(run: RunDir, records: Records) -> None:
    def full(path: Path, value: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    gemctl.run.attempt.create_json = full


DISTURBANCES: dict[str, Callable[[RunDir, Records], None]] = {
    "interrupt": _interrupt,
    "interrupt_twice": _interrupt_twice,
    "terminate": _terminate,
    "terminate_twice": _terminate_twice,
    "time_up": _time_up,
    "kill_agent": _kill_agent,
    "kill_agent_1": _kill_agent_1,
    "stop_agent": _stop_agent,
    "stop_host_1": _stop_host_1,
    "file_stop": _file_stop,
    "file_kill": _file_kill,
    "damage": _damage,
    "kill_self": _kill_self,
    "stop_rank": _stop_rank,
    "take_over": _take_over,
    "fill_disk": _fill_disk,
}


def supervise(case: Case) -> Ended:
    """Runs one case to its end, in this process's main thread; one whose run is there is brought back."""
    found = [RunDir.open(path) for path in Path(case.root).glob("small/*")]
    run = found[0] if found else RunDir.create(case.root, "small", ["test"])
    return supervise_with(case, run, ForkedAgents(run, case))


def supervise_with(case: Case, run: RunDir, agents: Agents) -> Ended:
    """The same with a launcher of one's own."""
    if case.inject:
        os.environ["GEMCTL_INJECT"] = case.inject
    gemctl.ranks.rendezvous.JOIN_SECONDS = 1.0 if case.fault == "absent" else 30.0
    follower = Disturbing(case, run)
    plan = json.dumps({"topology": dataclasses.asdict(topology(case))})
    asked = {**dataclasses.asdict(case.job), "fault": case.fault, "cgroup": case.cgroup}
    prepared = Prepared(json.dumps(asked), plan, case.nodes, case.local)
    recover = RecoverConfig(heartbeat=0.1, watchdog=case.watchdog, budgets=case.budgets)
    error: GemctlError | None = None
    try:
        run_attempts(run, len(run.attempts()) + 1, prepared, recover, agents, follower)
    except GemctlError as caught:
        error = caught
    return _ended(run, error, follower.notes)


def _ended(run: RunDir, error: GemctlError | None, notes: list[str]) -> Ended:
    attempts = run.attempts()
    signs = [read_log(log)[-1:] for attempt in attempts for log in attempt.ranks.glob("*.jsonl")]
    last = max((line["time"] for lines in signs for line in lines), default=time.time())
    end = attempts[-1].end() or {}
    kind = None if error is None else type(error).__name__
    left = [pid for pid in pids(run) if process.running(pid)]
    code = 0 if error is None else error.exit_code
    return Ended(str(run.path), kind, str(error or ""), code, time.time() - last, left, end.get("cause"), notes)


def supervise_all(cases: list[Case]) -> list[Ended | None]:
    """Runs all cases at once, each in a process of its own; None for one whose process was killed."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in cases]
    children = [context.Process(target=_send, args=(case, pipe)) for case, (_, pipe) in zip(cases, pipes, strict=True)]
    for child, (_, theirs) in zip(children, pipes, strict=True):
        child.start()
        theirs.close()
    ends = [_receive(ours) for ours, _ in pipes]
    for child in children:
        child.join()
    return ends


def _send(case: Case, pipe: Any) -> None:
    process.die_with_parent(os.getppid())
    pipe.send(supervise(case))


def _receive(pipe: Any) -> Ended | None:
    try:
        ended: Ended = pipe.recv()
    except EOFError:
        return None
    return ended


def only_run(root: Path) -> RunDir:
    """The one run below `root`."""
    (path,) = root.glob("small/*")
    return RunDir.open(path)
