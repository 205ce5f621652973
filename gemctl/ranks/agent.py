"""The agent, one a host: imports torch and the worker once, forks the ranks of an attempt and records their ends.

    python -m gemctl.ranks.agent RUN --attempt 1 --node 0                          # started by the launcher
    python -m gemctl.ranks.agent RUN --attempt 1 --node 1 --store n1:29400         # one of several: node 0 is on n1

Agents of several hosts meet first, and lay the mesh over them (gemctl/ranks/rendezvous.py): a host's ranks follow
from its place in the mesh. GEMCTL_TOPOLOGY_ADDRESS says where a host lies in the network, as in "spine.leaf1.n2".

The ranks are forked by torchrun's own `elastic_launch`, which gives them their rendezvous; nothing before the fork may
open a collective, CUDA or an OpenMP region. SIGTERM and SIGINT to the agent become a stop request, which the ranks
agree on at the end of a step, so a save may take as long as it needs (the `torchrun` program kills after 30 s). After a
failed attempt the agent waits for the next one of the same owner, which then starts without the imports. A rank that
fails on one host ends all: its agent orders it through the run directory.

Nothing survives: ranks are killed when the agent dies, the agent when its parent dies, and both when another process
has taken the run.
"""

import argparse
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gemctl import env, process, startup
from gemctl.config.compose import from_yaml
from gemctl.durable import exists
from gemctl.errors import GemctlError
from gemctl.ranks import memory
from gemctl.ranks.rendezvous import LOOPBACK, AbortedError, Place, Rendezvous, interface_of
from gemctl.run import requests, stages
from gemctl.run.access import written_as
from gemctl.run.attempt import Attempt, Heartbeat
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, read_text
from gemctl.run.output import OutputTimes

Work = Callable[[str, int], None]

# What the ranks need; the worker brings the rest of gemctl with it.
PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torchrec",
    "gemctl.ranks.worker",
)
PEER_GRACE = 0.3  # seconds in which the other ranks may say what they saw before they are killed
STACK_GRACE = 0.5  # seconds for dumping stacks
CLAIM_GRACE = 2.0  # seconds from the making of an attempt's folder to its claim.json
POLL = 0.02


class RankMonitor:
    """Watches one attempt's ranks from a thread: records pid and end of each, ends the others when one has failed.

    torchrun's agent reports one failed rank, and not always the first; this record has all of them in order. It only
    looks: reaping is left to torchrun's agent, which takes a rank that another thread has reaped for a failed one.
    """

    def __init__(self, attempt: Attempt, node: int, log: JsonLog) -> None:
        self._attempt, self._log = attempt, log
        self._output = OutputTimes(attempt, node)
        self._reader, self.registry = os.pipe()  # each rank writes "rank pid" into it, UNNAMED as it is forked
        os.set_blocking(self._reader, False)
        self._ranks: dict[int, int] = {}  # pid → rank
        self._unnamed: set[int] = set()
        self._oom_kills = memory.oom_kills()
        self._ended: set[int] = set()
        self._recorded: set[int] = set()
        self._killed: set[int] = set()
        self._kill_at: float | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Records what is left to record; all ranks have ended."""
        self._done.set()
        self._thread.join()
        self._look()
        self._output.close()
        os.close(self._reader)
        os.close(self.registry)

    def add_failure(self, rank: int, pid: int, code: int) -> None:
        """An end that torchrun's agent saw; recorded unless this monitor saw it too."""
        if pid not in self._recorded:
            self._record(rank, pid, code)

    def kill(self) -> None:
        """Kills every rank that still runs."""
        for pid in [*self._ranks, *self._unnamed]:
            if pid not in self._ended:
                self._killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._done.wait(POLL):
            self._look()
            if self._kill_at is None and exists(self._attempt.kill_order):
                self._dump_stacks()
                self._kill_at = time.monotonic()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self.kill()

    def _look(self) -> None:
        self._register()
        self._look_at_unnamed()
        self._output.look(self._ranks.values())
        for pid, rank in self._ranks.items():
            if pid in self._ended:
                continue
            try:
                code = process.exit_code(pid)
            except ChildProcessError:  # torchrun's agent was faster; `add_failure` has the code if it is not 0
                self._ended.add(pid)
                if not stages.finished(self._attempt, rank):
                    self._end_peers()
                continue
            if code is not None:
                self._record(rank, pid, code)
                if code != 0:
                    self._end_peers()

    def _look_at_unnamed(self) -> None:
        """Which rank one was that has ended so soon, torchrun's agent tells when all have ended."""
        for pid in self._unnamed - self._ended:
            try:
                ended = process.exit_code(pid) is not None
            except ChildProcessError:
                ended = True
            if ended:
                self._ended.add(pid)
                self._end_peers()

    def _end_peers(self) -> None:
        """One rank has failed: the others may say what they saw, and are killed then."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + PEER_GRACE

    def _register(self) -> None:
        try:
            lines = os.read(self._reader, 1 << 16).decode().split("\n")
        except BlockingIOError:
            return
        for rank, pid in (map(int, line.split()) for line in lines if line):
            if rank == UNNAMED:
                self._unnamed.add(pid)
                continue
            self._unnamed.discard(pid)
            self._ranks[pid] = rank
            self._log.write({"event": "rank", "rank": rank, "pid": pid, "time": time.time()})

    def _record(self, rank: int, pid: int, code: int) -> None:
        self._ended.add(pid)
        self._recorded.add(pid)
        end = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": signal.Signals(-code).name}
        killed = code == -signal.SIGKILL and pid in self._killed
        line = {"event": "exit", "rank": rank, "pid": pid, "time": time.time(), "killed": killed, **end}
        if code == -signal.SIGKILL and not killed and (kills := memory.oom_kills()) > self._oom_kills:
            line["out_of_memory"], self._oom_kills = True, kills
        self._log.write(line, last=True)

    def _dump_stacks(self) -> None:
        living = {pid: rank for pid, rank in self._ranks.items() if pid not in self._ended}
        for pid in living:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and torchrun's agent has reaped it, just now
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_GRACE
        files = [self._attempt.rank_stack(rank) for rank in living.values()]
        while time.monotonic() < deadline and not all(file.stat().st_size for file in files):
            time.sleep(POLL)
        time.sleep(POLL)  # a stack is written in several pieces


UNNAMED = -1
_registry: int | None = None  # of the ranks that are being forked


def _tell_of_fork() -> None:
    global _registry  # noqa: PLW0603 (a fork hook has no arguments)
    if _registry is not None:
        os.write(_registry, f"{UNNAMED} {os.getpid()}\n".encode())
        _registry = None


os.register_at_fork(after_in_child=_tell_of_fork)


@contextlib.contextmanager
def _telling(registry: int) -> Iterator[None]:
    """Every process that is forked within it says so as the first thing it does."""
    global _registry  # noqa: PLW0603
    _registry = registry
    try:
        yield
    finally:
        _registry = None


class Agent:
    """Serves the attempts of one owner, one after the other. `work(run path, attempt number)` is what a rank does.

    `store`: where the agents of several hosts meet, HOST:PORT; the one of node 0 keeps it.
    """

    def __init__(self, run: RunDir, attempt: Attempt, node: int, store: str | None = None) -> None:
        self.run, self.attempt, self.node = run, attempt, node
        claim = attempt.claim()
        self.owner, self.nodes = claim.owner, claim.nodes
        self._rendezvous = Rendezvous(node, claim.nodes, store, self._aborted)
        self._monitor: RankMonitor | None = None
        self._log = self._open_log()

    def take_signals(self) -> None:
        """From now on SIGTERM and SIGINT are stop requests."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def preload(self) -> Work:
        """Imports all that ranks need; returns the worker's main function."""
        start = time.monotonic()
        gc.disable()  # imports make hardly any garbage, and looking for it takes long
        for name in PRELOAD:
            importlib.import_module(name)
        _read_once(self.attempt)
        gc.freeze()  # keeps the collectors of the ranks off the pages that they share
        gc.enable()
        self._log.write({"event": "ready", "time": time.time(), "seconds": time.monotonic() - start})
        work: Work = importlib.import_module("gemctl.ranks.worker").main
        return work

    def serve(self, work: Work) -> int:
        """Runs attempts until one ends well, or nobody wants another; returns the exit code."""
        # torchrun's agent asks the name service for its host's full name at every event, which it reports to nobody:
        # where that does not answer, seconds each time.
        socket.getfqdn = lambda name="": name or socket.gethostname()
        while True:
            beat = self.attempt.claim().heartbeat
            with Heartbeat(self.attempt, beat, self._superseded, self.node, self._rendezvous.reach):
                if not self._wait_for(self.attempt.request):
                    return 0
                well = self._run_attempt(work)
            if well or not self._next_attempt():
                return 0 if well else 1

    def _run_attempt(self, work: Work) -> bool:
        try:
            place = self._rendezvous.meet(self.attempt)
        except AbortedError:
            return self._ended(False)
        except (GemctlError, OSError) as error:
            self.failed(error)
            return self._ended(False)
        _use_interface(place.address)
        well = self._run_ranks(work, place)
        if place.kept is not None:
            place.kept.close()
        return well

    def _run_ranks(self, work: Work, place: Place) -> bool:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        os.environ["GEMCTL_STORE"] = place.store
        monitor = self._monitor = RankMonitor(self.attempt, self.node, self._log)
        monitor.start()
        target = elastic_launch(self._launch_config(place), _rank)
        try:
            with _telling(monitor.registry):  # a Path, as torchrun looks for macros in strings
                target(work, self.run.path, self.attempt.number, os.getpid(), monitor.registry)
        except ChildFailedError as error:
            for rank, failure in error.failures.items():
                monitor.add_failure(rank, failure.pid, failure.exitcode)
            return self._ended(False)
        except Exception as error:
            monitor.kill()
            self.failed(error)
            return self._ended(False)
        return self._ended(True)

    def failed(self, error: BaseException) -> None:
        """Records that the agent itself failed."""
        self._log.write(
            {"event": "error", "time": time.time(), "message": f"{type(error).__name__}: {error}"}, last=True
        )

    def _ended(self, well: bool) -> bool:
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        if not well and self.nodes > 1:
            with contextlib.suppress(OSError):  # a full disk: the supervisor ends the others
                self.attempt.order_kill(f"node {self.node} ({socket.gethostname()}) has failed")
        self._log.write({"event": "end", "ok": well, "time": time.time()}, last=True)
        return well

    def _aborted(self) -> bool:
        stop = any(wish.kind == "stop" for wish in requests.pending(self.run, self.attempt))
        return stop or exists(self.attempt.kill_order)

    def _launch_config(self, place: Place) -> Any:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        from gemctl.ranks.store import BACKEND

        claim = self.attempt.claim()
        return LaunchConfig(
            min_nodes=claim.nodes,
            max_nodes=claim.nodes,
            nproc_per_node=claim.ranks_per_node,
            run_id=f"{self.run.run_id}-a{self.attempt.number}",
            rdzv_backend=BACKEND,
            rdzv_endpoint=place.store,
            rdzv_configs={"rank": place.node_rank, "attempt": str(self.attempt.path)},
            local_addr=place.address,
            max_restarts=0,
            monitor_interval=0.05,
            start_method="fork",
            signals_to_handle="SIGQUIT",
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        )

    def _next_attempt(self) -> bool:
        """Waits until the owner has prepared another attempt; False if the agent is told to end instead."""
        following = self.run.attempt(self.attempt.number + 1)
        if not self._wait_for(following.request) or following.claim().owner != self.owner:
            return False
        self.attempt = following
        _write_to(following.agent_output(self.node))
        self._log.close()
        self._log = self._open_log()
        return True

    def _wait_for(self, file: Path) -> bool:
        """Waits for the file; False if a stop request comes first."""
        while not exists(file):
            if requests.pending(self.run, self.attempt):
                return False
            time.sleep(POLL / 2)
        return True

    def _open_log(self) -> JsonLog:
        log = JsonLog(self.attempt.agent_log(self.node))
        log.write({"event": "agent", "pid": os.getpid(), "host": socket.gethostname(), "time": time.time()})
        return log

    def _on_signal(self, number: int, frame: object) -> None:
        if not requests.pending(self.run, self.attempt):
            requests.file(self.run, "stop", signal.Signals(number).name)

    def _superseded(self) -> None:
        """A higher attempt exists. If it is not our owner's, end at once; the ranks die with their parent."""
        higher = self.run.last_attempt()
        deadline = time.monotonic() + CLAIM_GRACE
        while higher is not None and not higher.claimed and time.monotonic() < deadline:
            time.sleep(POLL)
        if higher is None or not higher.claimed or higher.claim().owner != self.owner:
            self._log.write({"event": "superseded", "time": time.time()}, last=True)
            os._exit(1)


def _read_once(attempt: Attempt) -> None:
    """The first reading of a configuration makes its checker, which costs each rank 0.1 s if it is not there."""
    if attempt.config.exists():
        with contextlib.suppress(GemctlError):  # theirs to say
            from_yaml(read_text(attempt.config), str(attempt.config))


def _use_interface(address: str) -> None:
    """Has gloo and NCCL listen at the interface by which the hosts have met, unless the user chose one; on one host it
    is the loopback in any case."""
    name, chosen = interface_of(address), address != LOOPBACK
    if name is None:
        return
    if not (chosen and env.gloo_interface()):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    if not (chosen and env.nccl_interface()):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # this one alone, not all that begin so
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")  # NCCL's status service answers whoever asks its port


def _rank(work: Work, run_path: Path, number: int, agent: int, registry: int) -> None:
    """What a forked rank runs: ends with the agent, writes to its own log, and leaves a record if it fails."""
    process.die_with_parent(agent)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for quiet in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # schedulers send these to every process; they are the agent's to take
        signal.signal(quiet, signal.SIG_IGN)
    rank, attempt = env.rank(), RunDir(run_path).attempt(number)
    os.environ["GEMCTL_ATTEMPT"] = str(number)
    try:
        _prepare(attempt, rank)
        os.write(registry, f"{rank} {os.getpid()}\n".encode())
        work(str(run_path), number)
    except BaseException as error:
        try:
            stages.fail_unrecorded(attempt, rank, error)
            traceback.print_exc()
            _flush()
        finally:
            os._exit(1)  # no clean-up that might wait for the other ranks
    _flush()


def _prepare(attempt: Attempt, rank: int) -> None:
    """Output goes to the rank's own file, and SIGUSR1 dumps its stack."""
    _write_to(attempt.rank_output(rank))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a line's time is when it was said
    # Stays registered for as long as the process lives: a rank that has returned may still be asked for its stack.
    faulthandler.register(signal.SIGUSR1, file=attempt.rank_stack(rank).open("wb"), all_threads=True)
    # What torch says of torch's own calls would be the last words of ranks that are killed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _write_to(path: Path) -> None:
    """From now on what this process writes to stdout and stderr goes to `path`."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    startup.write_utf8()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gemctl.ranks.agent", description=__doc__)
    parser.add_argument("run", help="run directory")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt to begin with")
    parser.add_argument("--node", type=int, required=True, help="number of this host in the attempt")
    parser.add_argument("--store", metavar="HOST:PORT", help="where agents of several hosts meet; node 0 keeps it")
    args = parser.parse_args(argv)
    startup.prepare()
    env.keep_compiled_code_private()
    run = RunDir.open(args.run)
    with written_as(run.path):  # the ranks, which are forked here, have it from here
        return _serve(run, run.attempt(args.attempt), args.node, args.store)


def _serve(run: RunDir, attempt: Attempt, node: int, store: str | None) -> int:
    claim = attempt.claim()
    process.die_with_parent(os.getppid())
    if claim.host == socket.gethostname() and not process.running(claim.pid):
        return 1  # whoever started this agent is dead already
    _write_to(attempt.agent_output(node))
    if any(option.startswith("error") for option in sys.warnoptions):
        warnings.simplefilter("default")  # what libraries warn of ends no run
    agent = Agent(run, attempt, node, store)
    agent.take_signals()
    try:
        return agent.serve(agent.preload())
    except BaseException as error:
        agent.failed(error)
        raise


if __name__ == "__main__":
    sys.exit(main())
