"""The agent, one per host: imports torch and the worker once, forks the ranks of each attempt, and records their exits.

    python -m gemctl.ranks.agent RUN --attempt 1 --node 0                          # started by the launcher
    python -m gemctl.ranks.agent RUN --attempt 1 --node 1 --store n1:29400         # one of several; node 0 is on n1

Agents of several hosts meet first and place the mesh on the hosts (gemctl/ranks/rendezvous.py): a host's ranks follow
from its position in the mesh. GEMCTL_TOPOLOGY_ADDRESS is a host's address in the network, such as "spine.leaf1.n2".

torchrun's own `elastic_launch` forks the ranks and gives them their rendezvous; nothing before the fork may open a
collective, CUDA or an OpenMP region. SIGTERM and SIGINT to the agent become a stop request, which the ranks agree on at
the end of a step, so a save may take as long as it needs (the `torchrun` program kills after 30 s). After a failed
attempt the agent waits for the next one of the same owner, which then starts without the imports. When a rank fails,
its agent orders all agents, through the run directory, to kill theirs.

No process is left behind: ranks are killed when the agent dies, the agent when its parent dies, and both when another
process has taken over the run.
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
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemctl import env, process, startup
from gemctl.config.compose import from_yaml
from gemctl.durable import exists
from gemctl.errors import GemctlError
from gemctl.ranks.monitor import RankMonitor, forks_registered
from gemctl.ranks.rendezvous import LOOPBACK, AbortedError, Place, Rendezvous, interface_of
from gemctl.run import rank_records, requests
from gemctl.run.access import written_as
from gemctl.run.attempt import Attempt, Heartbeat
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, read_text

Work = Callable[[str, int], None]

# What the ranks import; the worker imports the rest of gemctl.
PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torchrec",
    "gemctl.ranks.worker",
)
CLAIM_GRACE = 2.0  # seconds between the creation of an attempt's folder and its claim.json
POLL = 0.02


class Agent:
    """Serves the attempts of one owner, one after the other. `work(run path, attempt number)` is a rank's main.

    `store`: HOST:PORT of the store in which the agents of several hosts meet; node 0's agent runs it.
    """

    def __init__(self, run: RunDir, attempt: Attempt, node: int, store: str | None = None) -> None:
        self.run, self.attempt, self.node = run, attempt, node
        claim = attempt.claim()
        self.owner, self.nodes = claim.owner, claim.nodes
        self._rendezvous = Rendezvous(node, claim.nodes, store, self._aborted)
        self._monitor: RankMonitor | None = None
        self._log = self._open_log()

    def take_signals(self) -> None:
        """Makes SIGTERM and SIGINT stop requests."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def preload(self) -> Work:
        """Imports everything that ranks need; returns the worker's main function."""
        start = time.monotonic()
        gc.disable()  # imports create little garbage, and collecting it takes long
        for name in PRELOAD:
            importlib.import_module(name)
        _warm_up_config(self.attempt)
        gc.freeze()  # keeps the ranks' collectors off pages that they share
        gc.enable()
        self._log.write({"event": "ready", "time": time.time(), "seconds": time.monotonic() - start})
        work: Work = importlib.import_module("gemctl.ranks.worker").main
        return work

    def serve(self, work: Work) -> int:
        """Runs attempts until one succeeds, or no further one is wanted; returns the exit code."""
        # torchrun's agent looks up its host's full name at every event, and uses it for nothing: where the name service
        # does not answer, that takes seconds each time.
        socket.getfqdn = lambda name="": name or socket.gethostname()
        while True:
            beat = self.attempt.claim().heartbeat
            with Heartbeat(self.attempt, beat, self._superseded, self.node, self._rendezvous.reach):
                if not self._wait_for(self.attempt.request):
                    return 0
                succeeded = self._run_attempt(work)
            if succeeded or not self._next_attempt():
                return 0 if succeeded else 1

    def _run_attempt(self, work: Work) -> bool:
        try:
            place = self._rendezvous.meet(self.attempt)
        except AbortedError:
            return self._finish(False)
        except (GemctlError, OSError) as error:
            self.failed(error)
            return self._finish(False)
        _use_interface(place.address)
        succeeded = self._run_ranks(work, place)
        if place.server is not None:
            place.server.close()
        return succeeded

    def _run_ranks(self, work: Work, place: Place) -> bool:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
        from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

        os.environ["GEMCTL_STORE"] = place.store
        monitor = self._monitor = RankMonitor(self.attempt, self.node, self._log)
        monitor.start()
        target = elastic_launch(self._launch_config(place), _rank)
        try:
            with forks_registered(monitor.registry):
                # The run is given as a Path, as torchrun expands macros in strings.
                target(work, self.run.path, self.attempt.number, os.getpid(), monitor.registry)
        except ChildFailedError as error:
            for rank, failure in error.failures.items():
                monitor.add_failure(rank, failure.pid, failure.exitcode)
            return self._finish(False)
        except Exception as error:
            monitor.kill()
            self.failed(error)
            return self._finish(False)
        return self._finish(True)

    def failed(self, error: BaseException) -> None:
        """Records a failure of the agent itself."""
        self._log.write(
            {"event": "error", "time": time.time(), "message": f"{type(error).__name__}: {error}"}, last=True
        )

    def _finish(self, succeeded: bool) -> bool:
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        if not succeeded and self.nodes > 1:
            with contextlib.suppress(OSError):  # disk full: the supervisor kills the others
                self.attempt.order_kill(f"node {self.node} ({socket.gethostname()}) has failed")
        self._log.write({"event": "end", "ok": succeeded, "time": time.time()}, last=True)
        return succeeded

    def _aborted(self) -> bool:
        stopped = any(request.kind == "stop" for request in requests.pending(self.run, self.attempt))
        return stopped or exists(self.attempt.kill_order)

    def _launch_config(self, place: Place) -> Any:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs  # noqa: PLC0415
        from torch.distributed.launcher.api import LaunchConfig  # noqa: PLC0415

        from gemctl.ranks.store import BACKEND  # noqa: PLC0415

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
        """Waits until the owner has prepared another attempt; False if the agent is told to exit instead."""
        following = self.run.attempt(self.attempt.number + 1)
        if not self._wait_for(following.request) or following.claim().owner != self.owner:
            return False
        self.attempt = following
        _redirect_output(following.agent_output(self.node))
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
        """Called when a higher attempt exists. If it is another owner's, exits at once; the ranks die with it."""
        higher = self.run.last_attempt()
        deadline = time.monotonic() + CLAIM_GRACE
        while higher is not None and not higher.claimed and time.monotonic() < deadline:
            time.sleep(POLL)
        if higher is None or not higher.claimed or higher.claim().owner != self.owner:
            self._log.write({"event": "superseded", "time": time.time()}, last=True)
            os._exit(1)


def _warm_up_config(attempt: Attempt) -> None:
    """Builds the configuration's validator before the fork; each rank would spend 0.1 s on it."""
    if attempt.config.exists():
        with contextlib.suppress(GemctlError):  # the ranks report it
            from_yaml(read_text(attempt.config), str(attempt.config))


def _use_interface(address: str) -> None:
    """Makes gloo and NCCL listen on the interface through which the hosts have met, unless the user chose one; on a
    single host always on the loopback."""
    name, chosen = interface_of(address), address != LOOPBACK
    if name is None:
        return
    if not (chosen and env.gloo_interface()):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    if not (chosen and env.nccl_interface()):
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # exactly this one, not every name with this prefix
    os.environ.setdefault("NCCL_RAS_ENABLE", "0")  # NCCL's status service answers anybody


def _rank(work: Work, run_path: Path, attempt_number: int, agent: int, registry: int) -> None:
    """The main function of a forked rank: it dies with the agent, writes to its own log, and records its failure."""
    process.die_with_parent(agent)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT):  # schedulers send them to every process; the agent handles them
        signal.signal(number, signal.SIG_IGN)
    rank, attempt = env.rank(), RunDir(run_path).attempt(attempt_number)
    os.environ["GEMCTL_ATTEMPT"] = str(attempt_number)
    try:
        _prepare(attempt, rank)
        os.write(registry, f"{rank} {os.getpid()}\n".encode())
        work(str(run_path), attempt_number)
    except BaseException as error:
        try:
            rank_records.fail_unrecorded(attempt, rank, error)
            traceback.print_exc()
            _flush()
        finally:
            os._exit(1)  # skips clean-up that might wait for the other ranks
    _flush()


def _prepare(attempt: Attempt, rank: int) -> None:
    """Redirects output to the rank's own file, and makes SIGUSR1 dump its stack."""
    _redirect_output(attempt.rank_output(rank))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that each line's time is right
    # For as long as the process lives: a rank that has returned may still be asked for its stack.
    faulthandler.register(signal.SIGUSR1, file=attempt.rank_stack(rank).open("wb"), all_threads=True)
    # torch's warnings about its own calls would be the last output of ranks that are killed.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _redirect_output(path: Path) -> None:
    """Redirects this process's stdout and stderr to `path`."""
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
    parser.add_argument("--attempt", type=int, required=True, help="number of the first attempt to serve")
    parser.add_argument("--node", type=int, required=True, help="number of this host in the attempt")
    parser.add_argument("--store", metavar="HOST:PORT", help="where agents of several hosts meet; node 0 runs it")
    args = parser.parse_args(argv)
    startup.prepare()
    env.keep_compiled_code_private()
    run = RunDir.open(args.run)
    with written_as(run.path):  # inherited by the ranks, which are forked here
        return _serve(run, run.attempt(args.attempt), args.node, args.store)


def _serve(run: RunDir, attempt: Attempt, node: int, store: str | None) -> int:
    claim = attempt.claim()
    process.die_with_parent(os.getppid())
    if claim.host == socket.gethostname() and not process.running(claim.pid):
        return 1  # the supervisor that started this agent is already dead
    _redirect_output(attempt.agent_output(node))
    if any(option.startswith("error") for option in sys.warnoptions):
        warnings.simplefilter("default")  # warnings of libraries must not end a run
    agent = Agent(run, attempt, node, store)
    agent.take_signals()
    try:
        return agent.serve(agent.preload())
    except BaseException as error:
        agent.failed(error)
        raise


if __name__ == "__main__":
    sys.exit(main())
