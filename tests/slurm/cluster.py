"""A real SLURM cluster on this machine, from Debian's packages: four nodes behind two leaf switches, and a login host.

    with Cluster(folder, accounting=True) as cluster:
        cluster.run("srun", "--nodes=4", "hostname")

                 ┌─ leaf1 ── n1, n3
    login ─ spine                        the login host runs munged, slurmctld and, with accounting, slurmdbd
                 └─ leaf2 ── n2, n4      on MariaDB; so the order of the names is not the order of the network

The login host is a process that sleeps in a PID, mount, network and UTS namespace of its own; all else runs in its PID
namespace. When it dies the kernel kills every process of the cluster, and with them go all networks, so nothing can be
left over however a test ends. A node is such a sleeping process too, with a network, a host name and an /etc/hosts of
its own: everything on it can be killed, and its cable taken out. Needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from gemctl import process
from tests.slurm import settings
from tests.slurm.settings import NODES
from tests.support.waiting import wait_for

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "slurmdbd", "mariadbd", "mysql_install_db", "ip", "unshare")
SLEEP = "trap '' CHLD; exec sleep infinity"  # children whose parent has died are reaped at once
CALL = 120.0  # seconds that a client's call may take
UP = 60.0  # seconds for a daemon or all nodes to be up
POLL = 0.05


def missing() -> str | None:
    """Why no cluster can be brought up here; None if one can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"not there: {', '.join(absent)} (.ci/run installs them)"
    tried = subprocess.run(["unshare", "--pid", "--net", "--uts", "--mount", "--fork", "true"], check=False)
    return None if tried.returncode == 0 else "no namespaces: needs root"


class Host:
    """A sleeping process and the namespaces that it holds. `pid` is its number outside."""

    def __init__(self, log: Path, enter: list[str], flags: list[str], before: str) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*enter, "unshare", *flags, "sh", "-c", before + SLEEP],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=partial(process.die_with_parent, os.getpid()),  # noqa: PLW1509 (no thread runs yet)
            )  # fmt: skip
        wait_for(lambda: self._sleeper() is not None, UP, "a host")
        self.pid = self._sleeper() or 0

    def _sleeper(self) -> int | None:
        """The process that has become `sleep`: this one's, or its child's where a PID namespace was entered."""
        candidates = [self._process.pid]
        for pid in candidates:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
                    return pid
                candidates += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return None

    @property
    def enter(self) -> list[str]:
        """What, put before a command, runs it on this host."""
        return ["nsenter", f"--target={self.pid}", "--pid", "--mount", "--net", "--uts", "--"]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()


class Cluster:
    """A cluster whose files lie in `folder`; up for as long as the `with` block lasts."""

    def __init__(self, folder: Path, accounting: bool) -> None:
        self.folder, self.accounting = folder, accounting
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(folder / "etc/slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }

    def __enter__(self) -> Self:
        settings.write(self.folder, self.accounting)
        log, flags = (
            self.folder / "log/login.log",
            ["--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--uts"],
        )
        self.login = Host(log, [], flags, "hostname login; ")
        try:
            self._bring_up()
        except BaseException:
            self.login.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.login.end()

    def _bring_up(self) -> None:
        self._network()
        self.must("munged", *settings.munged(self.folder))
        if self.accounting:
            self._accounting()
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        wait_for(lambda: self.states() == dict.fromkeys(NODES, "idle"), UP, f"all nodes: {self.folder}/log")

    def _network(self) -> None:
        self._ip("link set lo up", "link add spine type bridge", "link set spine up",
                 f"addr add {settings.LOGIN}/24 dev spine")  # fmt: skip
        for leaf in sorted({leaf for leaf, _ in NODES.values()}):
            self._ip(
                f"link add {leaf} type bridge", f"link set {leaf} up",
                f"link add up-{leaf} type veth peer name down-{leaf}",
                f"link set up-{leaf} master {leaf} up", f"link set down-{leaf} master spine up",
            )  # fmt: skip
        hosts = f"mount --bind {self.folder}/etc/hosts /etc/hosts; "
        self.nodes: dict[str, Host] = {}
        for name, (leaf, address) in NODES.items():
            before = f"hostname {name}; {hosts}"
            node = self.nodes[name] = Host(
                self.folder / f"log/{name}.log", self.login.enter, ["--net", "--uts", "--mount"], before
            )
            self._ip(
                f"link add port-{name} type veth peer name eth0 netns {node.pid}",
                f"link set port-{name} master {leaf} up",
            )
            self._ip(f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up", host=node)
        self.must("mount", "--bind", f"{self.folder}/etc/hosts", "/etc/hosts")

    def _accounting(self) -> None:
        self.must(*settings.database_install(self.folder))
        self.background("database", *settings.database(self.folder))
        query = ["mariadb", "--no-defaults", "-S", str(self.folder / "run/mysql.sock"), "-e"]
        wait_for(lambda: self.run(*query, "select 1").returncode == 0, UP, "the database")
        self.must(*query, settings.GRANTS)
        self.must("slurmdbd")
        wait_for(lambda: self.run("sacctmgr", "-n", "list", "cluster").returncode == 0, UP, "slurmdbd")

    # ---- what runs where

    def run(self, *command: str, node: str | None = None, **more: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command on the login host, or on a node; `more`: environment variables."""
        try:
            return subprocess.run(
                [*self._host(node).enter, *command],
                env={**self.environment, **more}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=CALL, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer within {CALL:.0f} s")

    def must(self, *command: str, node: str | None = None) -> str:
        """Runs a command that must not fail; returns what it wrote."""
        done = self.run(*command, node=node)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start(self, *command: str, folder: Path, **more: str) -> "subprocess.Popen[str]":
        """Starts a command on the login host, in `folder`."""
        return subprocess.Popen(
            [*self.login.enter, "env", f"--chdir={folder}", *command],
            env={**self.environment, **more}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def background(self, name: str, *command: str) -> None:
        """Starts a daemon that stays in the foreground, on the login host."""
        with (self.folder / "log" / f"{name}.log").open("wb") as log:
            subprocess.Popen(
                [*self.login.enter, *command], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _host(self, node: str | None) -> Host:
        return self.login if node is None else self.nodes[node]

    def _ip(self, *commands: str, host: Host | None = None) -> None:
        """Configures the network of a host; process numbers in the commands are those outside."""
        enter = ["nsenter", f"--target={(host or self.login).pid}", "--net", "--"]
        subprocess.run(
            [*enter, "ip", "-batch", "-"], input="\n".join(commands), text=True, check=True, capture_output=True
        )

    # ---- what happens to it

    def start_controller(self) -> None:
        self.must("slurmctld")
        wait_for(lambda: "UP" in self.run("scontrol", "ping").stdout, UP, "slurmctld")

    def kill_controller(self) -> None:
        """Kills slurmctld once its state on disk, written some seconds late, holds the jobs as they are now.

        One that comes back to older state has never heard of a job that runs, and gives its id to the next one, which
        the nodes then refuse to launch.
        """
        mark = f"saved-{time.monotonic_ns()}"
        for job in self.must("squeue", "-h", "-o", "%i").split():
            self.must("scontrol", "update", f"JobId={job}", f"AdminComment={mark}")
            wait_for(lambda: mark.encode() in (self.folder / "state/job_state").read_bytes(), UP, "the saved state")
        os.kill(self._daemon("slurmctld"), signal.SIGKILL)

    def start_node(self, name: str) -> None:
        self.must("slurmd", "-N", name, node=name)

    def pids(self, name: str) -> list[int]:
        """All processes on a node, by their numbers outside."""
        own = self._network_of(self.nodes[name].pid)
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in numbers if pid != self.nodes[name].pid and self._network_of(pid) == own]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to all processes on a node."""
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, name: str) -> None:
        """Kills all processes on a node, as if its power had failed."""
        self.cut(name)  # a node without power closes no connection
        while self.pids(name):
            self.signal(name, signal.SIGKILL)
            time.sleep(POLL)

    def cut(self, name: str) -> None:
        """Takes the cable out of a node."""
        self._ip(f"link set port-{name} down")

    def connect(self, name: str) -> None:
        self._ip(f"link set port-{name} up")

    def loopback(self, name: str, up: bool) -> None:
        """Takes a node's loopback away, or gives it back."""
        self._ip(f"link set lo {'up' if up else 'down'}", host=self.nodes[name])

    def heal(self) -> None:
        """Ends all jobs and has every node up again, whatever was done to it."""
        self.run("scancel", "--full", "--signal=KILL", "--user=root")
        self.run("scancel", "--user=root")
        for name in NODES:
            self.connect(name)
            if not any(_comm(pid) == "slurmd" for pid in self.pids(name)):
                self.start_node(name)
        wait_for(self._healed, 2 * UP, "all nodes again")
        self.must("scontrol", "reconfigure")  # counts anew what is free: SLURM 22.05 may have lost count with a node
        wait_for(self._healed, 2 * UP, "all nodes again")

    def _healed(self) -> bool:
        for name, state in self.states().items():
            if state.startswith(("down", "drain")):
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        return self.states() == dict.fromkeys(NODES, "idle") and not self.must("squeue", "-h")

    def states(self) -> dict[str, str]:
        """Every node's state as SLURM sees it."""
        lines = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").stdout.split("\n")
        return dict(line.split() for line in lines if line)

    def _daemon(self, name: str) -> int:
        """The number outside of a daemon that wrote its number inside to a file."""
        inside = (self.folder / "run" / f"{name}.pid").read_text().strip()
        for path in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                text = path.read_text()
                numbers = next(line.split()[1:] for line in text.split("\n") if line.startswith("NSpid:"))
                if numbers[1:] == [inside] and text.startswith(f"Name:\t{name}"):
                    return int(path.parent.name)
        raise ProcessLookupError(name)

    @staticmethod
    def _network_of(pid: int) -> str | None:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/{pid}/ns/net")  # noqa: PTH115 (a name, not a path)
        return None


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
