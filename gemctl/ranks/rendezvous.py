"""How the agents of an attempt meet: each reports its host, the mesh is laid once, every agent is told its place in it.

    rendezvous = Rendezvous(node=2, nodes=4, store="n1:29400", aborted=…)
    place = rendezvous.meet(attempt)          # on every host; place.node_rank is the host's number in the mesh

The agent of node 0 keeps the store for as long as it lives; the request of the launcher names it. Where its port is
taken, node 0 takes another one and says so in the run directory. Whatever answers there is believed only once it has
shown a value that is signed with the attempt's secret (gemctl/ranks/store.py), as is all that is read from it later.
Where the agents have met, the one that is first in the mesh opens a second store, a new one for each attempt: in one
that was used before, ranks would read the addresses of dead ones. An attempt on one host needs no store to meet in.
"""

import contextlib
import fcntl
import ipaddress
import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from gemctl import env
from gemctl.errors import GemctlError
from gemctl.mesh.groups import LISTED, HostReport, Mesh
from gemctl.run.attempt import Attempt
from gemctl.run.files import create_json, read_json
from gemctl.run.laid import lay_attempt

JOIN_SECONDS = 120.0  # for all hosts to be there: schedulers start them one after the other, and images are pulled
SLICE = 0.5  # seconds of waiting between looks at whether it is still wanted
POLL = 0.05
PROOF_SECONDS = 5.0  # for what answers to show that it is the store: node 0 writes that as soon as it has opened it
KEEPER = "keeper"
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915


class MeetingError(GemctlError):
    """Agents that do not find each other; the message names hosts and why."""


class AbortedError(GemctlError):
    """Nobody waits for the meeting any more: the attempt is ordered to end."""


@dataclass(frozen=True)
class Report:
    """What an agent says of its host. `address`: by which others reach it; `store`: by which it reaches node 0."""

    host: str
    slots: int
    topology: str
    address: str
    store: str


@dataclass(frozen=True)
class Place:
    """Where this host is in the mesh and by which address others reach it, and the store of the attempt's ranks. Who
    has `kept` keeps it."""

    node_rank: int
    address: str
    store: str
    kept: Any


class Rendezvous:
    """The meeting place of one owner's agents, for all its attempts. `aborted()`: nobody waits for it any more."""

    def __init__(self, node: int, nodes: int, store: str | None, aborted: Callable[[], bool]) -> None:
        self.node, self.nodes, self._aborted = node, nodes, aborted
        self._endpoint = store
        self._store: Any = None
        self._beats: Any = None  # a connection of its own, as each serves one call at a time
        self._own, self._peer = LOOPBACK, LOOPBACK

    def meet(self, attempt: Attempt) -> Place:
        """Waits until all hosts are there.

        Raises MeetingError, InputError (hosts that the mesh cannot be laid over), or AbortedError.
        """
        from torch.distributed import DistError

        from gemctl.ranks.store import LocalStore

        slots = attempt.claim().ranks_per_node
        if self.nodes == 1:
            _lay(attempt, [Report(socket.gethostname(), slots, env.topology_address(), LOOPBACK, LOOPBACK)])
            kept = LocalStore()
            return Place(0, LOOPBACK, kept.place, kept)
        try:
            self._connect(attempt)
            mine = Report(socket.gethostname(), slots, env.topology_address(), self._own, self._peer)
            return self._meet(attempt, mine)
        except DistError as error:
            raise MeetingError(f"{self._me()} has lost the store of node 0: {_first_line(error)}") from None

    def _meet(self, attempt: Attempt, mine: Report) -> Place:
        from gemctl.ranks.store import StoreServer

        self._post(attempt, f"report/{self.node}", asdict(mine))
        if self.node == 0:
            self._seat(attempt)
        told = self._read(attempt, f"place/{self.node}", 2 * JOIN_SECONDS, "its place in the mesh")
        rank, address = told["rank"], told["address"]
        kept = None
        if rank == 0:
            kept = StoreServer(address)
            self._post(attempt, "ranks", {"store": kept.place})
        ranks = self._read(attempt, "ranks", JOIN_SECONDS, "the store of the ranks")
        return Place(rank, address, ranks["store"], kept)

    def reach(self) -> bool:
        """Asks the agent of node 0 for a sign, for as long as it takes; False once it has gone."""
        if self._beats is None:
            return True
        from torch.distributed import DistError

        try:
            self._beats.add("beats", 1)
        except DistError:
            return False
        return True

    def _seat(self, attempt: Attempt) -> None:
        """Lays the mesh over all reports, and tells every agent its place."""
        reports = self._reports(attempt)
        order = {host.name: rank for rank, host in enumerate(_lay(attempt, reports).hosts)}
        # How node 0 is reached is for the others to say: its own name may mean its loopback on itself.
        addresses = [reports[1].store, *(report.address for report in reports[1:])]
        for node, report in enumerate(reports):
            place = {"rank": order[report.host], "address": addresses[node]}
            self._post(attempt, f"place/{node}", place)

    def _reports(self, attempt: Attempt) -> list[Report]:
        keys = [_key(attempt, f"report/{node}") for node in range(self.nodes)]
        seconds = 1.5 * JOIN_SECONDS  # what keeps another host away is its own to say first
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            self._check_wanted()
            if time.monotonic() > deadline:
                missing = [str(node) for node, key in enumerate(keys) if not self._store.check([key])]
                raise MeetingError(
                    f"{self.nodes - len(missing)} of {self.nodes} hosts came within {seconds:.0f} s; no agent of nodes "
                    + ", ".join(missing[:LISTED] + ["…"] * (len(missing) > LISTED))
                )
            time.sleep(POLL)
        return [Report(**json.loads(self._store.get(key))) for key in keys]

    def _post(self, attempt: Attempt, key: str, value: dict[str, Any]) -> None:
        self._store.set(_key(attempt, key), json.dumps(value))

    def _read(self, attempt: Attempt, key: str, seconds: float, what: str) -> dict[str, Any]:
        from torch.distributed import DistStoreError

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._check_wanted()
            with contextlib.suppress(DistStoreError):  # not yet there
                self._store.wait([_key(attempt, key)], timedelta(seconds=SLICE))
                value: dict[str, Any] = json.loads(self._store.get(_key(attempt, key)))
                return value
        raise MeetingError(f"{self._me()} was not told {what} within {seconds:.0f} s")

    def _check_wanted(self) -> None:
        if self._aborted():
            raise AbortedError("the attempt was ordered to end before its hosts had met")

    def _connect(self, attempt: Attempt) -> None:
        if self._store is not None:
            return
        if self._endpoint is None:
            raise MeetingError(f"{self._me()}: an attempt of {self.nodes} hosts needs the store that they meet in")
        host, port = _parse(self._endpoint)
        if self.node == 0:
            self._keep(host, port, attempt)
        else:
            self._find(host, port, attempt)

    def _keep(self, host: str, port: int, attempt: Attempt) -> None:
        """Opens the store, at the next port that is free, and tells the others which one that is."""
        from gemctl.ranks.store import StoreServer, connect

        server = StoreServer(_own_address(host), port)
        self._store = connect(f"{server.address or LOOPBACK}:{server.port}", attempt)
        self._store.set(KEEPER, attempt.path.name)
        if server.port != port:
            create_json(attempt.meeting, {"port": server.port})

    def _find(self, host: str, port: int, attempt: Attempt) -> None:
        """Waits for the store, and learns the addresses of this host and of node 0's on the way there."""
        from torch.distributed import DistError

        from gemctl.ranks.store import ForgedError, StoreError

        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            self._check_wanted()
            told = read_json(attempt.meeting)["port"] if attempt.meeting.exists() else port
            try:
                with socket.create_connection((host, told), timeout=SLICE) as connection:
                    self._own, self._peer = connection.getsockname()[0], connection.getpeername()[0]
                self._enter(f"{self._peer}:{told}", attempt)
                return
            except (socket.gaierror, UnicodeError) as error:  # the latter: no name at all
                why = f"its name does not resolve: {getattr(error, 'strerror', error)}"
            except OSError as error:
                why = str(error.strerror or error)
            except (StoreError, ForgedError, DistError):
                why = "what answers there does not know the attempt's secret"
            if time.monotonic() > deadline:
                store = f"the store of node 0 at {host}:{told} was not reached within {JOIN_SECONDS:.0f} s"
                raise MeetingError(f"{self._me()}: {store}: {why}")
            time.sleep(POLL)

    def _enter(self, place: str, attempt: Attempt) -> None:
        """Connects to the store at `place`, if it is the attempt's."""
        from gemctl.ranks.store import connect

        store = connect(place, attempt, PROOF_SECONDS)
        store.wait([KEEPER], timedelta(seconds=PROOF_SECONDS))
        store.get(KEEPER)
        self._store, self._beats = store, connect(place, attempt, PROOF_SECONDS)

    def _me(self) -> str:
        return f"node {self.node} (host {socket.gethostname()})"


def _lay(attempt: Attempt, reports: list[Report]) -> Mesh:
    return lay_attempt(attempt, [HostReport(report.host, report.slots, report.topology) for report in reports])


def _key(attempt: Attempt, name: str) -> str:
    return f"attempt {attempt.number}/{name}"


def _parse(store: str) -> tuple[str, int]:
    host, _, port = store.rpartition(":")
    if not host or not port.isdigit():
        raise MeetingError(f"--store {store}: HOST:PORT was expected")
    return host.strip("[]"), int(port)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _own_address(host: str) -> str:
    """Where node 0 listens: the address of this host that `host` means. "" (all of them) where its own name does not
    say: on itself it often means the loopback. Then the interface that the user chose for gloo has the address.
    """
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        found = []
    mine = [address for address in found if _is_own(address)]
    beyond = [address for address in mine if not ipaddress.ip_address(address).is_loopback]
    if beyond or host in {*mine, "localhost"}:
        return [*beyond, *mine][0]
    chosen = env.gloo_interface()
    return (chosen and _address_of(chosen)) or ""


def _is_own(address: str) -> bool:
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        return False
    return True


def _address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface of this machine, or None (Linux)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return None


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has `address` (IPv4), or None (Linux)."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)
