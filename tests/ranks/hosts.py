"""Simulated hosts on this machine, each with a network and a host name of its own, behind two leaf switches.

    n1, n2 ── leaf1 ── spine ── leaf2 ── n3, n10          uplinks can be made slow, a host can be cut off

The process that makes a `Network` moves into a network namespace of its own, which holds the switches (bridges); every
host is a process forked from it, in another one. None has a name outside, so all vanish with their processes, however
those end. Needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN), and `ip` and `tc` of iproute2.
"""

import ctypes
import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from gemctl import process
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from tests.support.small_run import AgentProcesses

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
PORT = 29400
BURST = "burst 256kb latency 50ms"


@dataclass(frozen=True)
class SimulatedHost:
    name: str
    leaf: int

    @property
    def topology(self) -> str:
        return f"spine.leaf{self.leaf}.{self.name}"


HOSTS = (SimulatedHost("n1", 1), SimulatedHost("n10", 2), SimulatedHost("n2", 1), SimulatedHost("n3", 2))
"""In the order of their names, as a scheduler that sorts them would start them."""


def missing() -> str | None:
    """Why hosts cannot be simulated here; None if they can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not there: install iproute2"
    pid = os.fork()
    if pid == 0:
        try:
            _unshare(CLONE_NEWNET | CLONE_NEWUTS)
            _ip("link add veth0 type veth peer name veth1", "link add br0 type bridge")
            _tc(f"qdisc replace dev veth0 root tbf rate 100mbit {BURST}")
        except (OSError, subprocess.CalledProcessError):
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return None if status == 0 else "no network namespaces with tbf shaping: needs root with CAP_SYS_ADMIN"


class Network:
    """The switches; the calling process lives among them from now on."""

    def __init__(self) -> None:
        process.die_with_parent(os.getppid())
        _unshare(CLONE_NEWNET)
        _ip("link add spine type bridge", "link set spine up")
        for leaf in (1, 2):
            _ip(
                f"link add leaf{leaf} type bridge", f"link set leaf{leaf} up",
                f"link add up{leaf} type veth peer name down{leaf}",
                f"link set up{leaf} master leaf{leaf} up", f"link set down{leaf} master spine up",
            )  # fmt: skip

    def shape(self, rate: str | None) -> None:
        """Gives the uplinks a rate ("100mbit") in both directions, or takes it away."""
        for link in ("up1", "up2", "down1", "down2"):
            _tc(f"qdisc replace dev {link} root tbf rate {rate} {BURST}" if rate else f"qdisc del dev {link} root")

    def cut(self, node: int) -> None:
        """Takes the cable out of a host."""
        _ip(f"link set port{node} down")

    def enter(self, node: int, serve: Callable[[], int]) -> int:
        """Forks a process that becomes host `node` and runs `serve` there; returns its number."""
        (ready, isolated), (go, connected) = os.pipe(), os.pipe()
        owner, host = os.getpid(), HOSTS[node]
        pid = os.fork()
        if pid == 0:
            try:
                process.die_with_parent(owner)
                os.setsid()
                _unshare(CLONE_NEWNET | CLONE_NEWUTS)
                socket.sethostname(host.name)
                os.write(isolated, b"x")
                os.read(go, 1)
                _ip(f"addr add {address(node)}/24 dev eth0", "link set eth0 up", "link set lo up")
                os._exit(serve())
            finally:
                os._exit(1)
        os.close(isolated)  # so that a child that fails is not waited for
        os.close(go)
        os.read(ready, 1)
        _ip(
            f"link add port{node} type veth peer name eth0 netns {pid}",
            f"link set port{node} master leaf{host.leaf} up",
        )
        os.write(connected, b"x")
        os.close(ready)
        os.close(connected)
        return pid


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


class NetworkAgents(AgentProcesses):
    """A launcher of one agent on every simulated host: `serve(attempt, node, store)` is what runs there."""

    def __init__(self, run: RunDir, network: Network, serve: Callable[[Attempt, int, str], int]) -> None:
        super().__init__(run)
        self.network, self.serve = network, serve

    def start(self, attempt: Attempt) -> None:
        store = f"{address(0)}:{PORT}"
        for node in range(len(HOSTS)):
            self.pids[node] = self.network.enter(node, functools.partial(self._agent, attempt, node, store))

    def _agent(self, attempt: Attempt, node: int, store: str) -> int:
        log = os.open(attempt.agent_output(node), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the interface is the agent's to find
        return self.serve(attempt, node, store)


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*commands: str) -> None:
    text = "\n".join(commands)
    subprocess.run(["ip", "-batch", "-"], input=text, text=True, check=True, capture_output=True, timeout=20)


def _tc(command: str) -> None:
    subprocess.run(["tc", *command.split()], check=True, capture_output=True, timeout=20)
