"""How the agents of an attempt meet: each reports its host, the mesh is placed once, every agent learns its position.

    rendezvous = Rendezvous(node=2, nodes=4, store="n1:29400", aborted=…)
    place = rendezvous.meet(attempt)          # on every host; place.node_rank is the host's number in the mesh

Node 0's agent runs the store for as long as it lives; the launch request names its address. If the port is taken, node
0 uses another one and records it in the run directory. A server is trusted only after it has returned a value signed
with the attempt's secret (gemctl/ranks/store.py), and so is every value read from it later. Once the agents have met,
the first one in the mesh opens a second store, a new one for each attempt: in a used one, ranks would read the
addresses of dead ranks. An attempt on one host needs no store to meet in.
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
from gemctl.run.mesh import write_mesh

JOIN_SECONDS = 120.0  # for all hosts to arrive: schedulers start them one after the other, and images are pulled
SLICE = 0.5  # seconds of waiting between checks for an abort
POLL = 0.05
PROOF_SECONDS = 5.0  # for a server to prove that it is the store: node 0 writes the proof as soon as it opens it
PROOF_KEY = "keeper"
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915


class MeetingError(GemctlError):
    """Agents did not find each other; the message names the hosts and the reason."""


class AbortedError(GemctlError):
    """The attempt was ordered to end before its hosts had met."""


@dataclass(frozen=True)
class Report:
    """An agent's report of its host. `slots`: ranks; `topology`: address in the network; `address`: IP address at which
    others reach it; `store`: IP address at which it reaches node 0."""

    host: str
    slots: int
    topology: str
    address: str
    store: str


@dataclass(frozen=True)
class Place:
    """This host's position in the mesh, the IP address at which others reach it, and the endpoint of the attempt's
    store. `server`: that store, on the host that runs it."""

    node_rank: int
    address: str
    store: str
    server: Any


class Rendezvous:
    """Where the agents of one owner meet, for all its attempts. `aborted()`: the attempt was ordered to end."""

    def __init__(self, node: int, nodes: int, store: str | None, aborted: Callable[[], bool]) -> None:
        self.node, self.nodes, self._aborted = node, nodes, aborted
        self._endpoint = store
        self._store: Any = None
        self._beats: Any = None  # a second connection, as each serves one call at a time
        self._own, self._peer = LOOPBACK, LOOPBACK

    def meet(self, attempt: Attempt) -> Place:
        """Waits until all hosts have reported.

        Raises MeetingError, InputError (the mesh cannot be placed on the hosts), or AbortedError.
        """
        from torch.distributed import DistError  # noqa: PLC0415

        from gemctl.ranks.store import LocalStore  # noqa: PLC0415

        slots = attempt.claim().ranks_per_node
        if self.nodes == 1:
            _lay(attempt, [Report(socket.gethostname(), slots, env.topology_address(), LOOPBACK, LOOPBACK)])
            server = LocalStore()
            return Place(0, LOOPBACK, server.endpoint, server)
        try:
            self._connect(attempt)
            mine = Report(socket.gethostname(), slots, env.topology_address(), self._own, self._peer)
            return self._meet(attempt, mine)
        except DistError as error:
            raise MeetingError(f"{self._me()} has lost the store of node 0: {_first_line(error)}") from None

    def _meet(self, attempt: Attempt, mine: Report) -> Place:
        from gemctl.ranks.store import StoreServer  # noqa: PLC0415

        self._write(attempt, f"report/{self.node}", asdict(mine))
        if self.node == 0:
            self._assign_places(attempt)
        place = self._read(attempt, f"place/{self.node}", 2 * JOIN_SECONDS, "its position in the mesh")
        rank, address = place["rank"], place["address"]
        server = None
        if rank == 0:
            server = StoreServer(address)
            self._write(attempt, "ranks", {"store": server.endpoint})
        ranks = self._read(attempt, "ranks", JOIN_SECONDS, "the store of the ranks")
        return Place(rank, address, ranks["store"], server)

    def reach(self) -> bool:
        """Waits for an answer from node 0's store, however long it takes; False once that is gone."""
        if self._beats is None:
            return True
        from torch.distributed import DistError  # noqa: PLC0415

        try:
            self._beats.add("beats", 1)
        except DistError:
            return False
        return True

    def _assign_places(self, attempt: Attempt) -> None:
        """Places the mesh on all reported hosts, and writes every agent's position."""
        reports = self._reports(attempt)
        order = {host.name: rank for rank, host in enumerate(_lay(attempt, reports).hosts)}
        # Only the others know how to reach node 0: on node 0 itself, its name may resolve to the loopback.
        addresses = [reports[1].store, *(report.address for report in reports[1:])]
        for node, report in enumerate(reports):
            self._write(attempt, f"place/{node}", {"rank": order[report.host], "address": addresses[node]})

    def _reports(self, attempt: Attempt) -> list[Report]:
        keys = [_key(attempt, f"report/{node}") for node in range(self.nodes)]
        seconds = 1.5 * JOIN_SECONDS  # a host that cannot join reports why first
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            self._check_abort()
            if time.monotonic() > deadline:
                missing = [str(node) for node, key in enumerate(keys) if not self._store.check([key])]
                listed = ", ".join(missing[:LISTED] + ["…"] * (len(missing) > LISTED))
                joined = f"{self.nodes - len(missing)} of {self.nodes} hosts"
                raise MeetingError(f"{joined} joined within {seconds:.0f} s; no agent on nodes {listed}")
            time.sleep(POLL)
        return [Report(**json.loads(self._store.get(key))) for key in keys]

    def _write(self, attempt: Attempt, key: str, value: dict[str, Any]) -> None:
        self._store.set(_key(attempt, key), json.dumps(value))

    def _read(self, attempt: Attempt, key: str, seconds: float, what: str) -> dict[str, Any]:
        from torch.distributed import DistStoreError  # noqa: PLC0415

        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._check_abort()
            with contextlib.suppress(DistStoreError):  # not written yet
                self._store.wait([_key(attempt, key)], timedelta(seconds=SLICE))
                value: dict[str, Any] = json.loads(self._store.get(_key(attempt, key)))
                return value
        raise MeetingError(f"{self._me()} did not receive {what} within {seconds:.0f} s")

    def _check_abort(self) -> None:
        if self._aborted():
            raise AbortedError("the attempt was ordered to end before its hosts had met")

    def _connect(self, attempt: Attempt) -> None:
        if self._store is not None:
            return
        if self._endpoint is None:
            raise MeetingError(f"{self._me()}: an attempt of {self.nodes} hosts needs a store to meet in")
        host, port = _parse(self._endpoint)
        if self.node == 0:
            self._open_store(host, port, attempt)
        else:
            self._find_store(host, port, attempt)

    def _open_store(self, host: str, port: int, attempt: Attempt) -> None:
        """Opens the store, on the next free port, and records the port for the others."""
        from gemctl.ranks.store import StoreServer, connect  # noqa: PLC0415

        server = StoreServer(_own_address(host), port)
        self._store = connect(f"{server.address or LOOPBACK}:{server.port}", attempt)
        self._store.set(PROOF_KEY, attempt.path.name)
        if server.port != port:
            create_json(attempt.meeting, {"port": server.port})

    def _find_store(self, host: str, port: int, attempt: Attempt) -> None:
        """Waits for the store, and learns this host's and node 0's address from the connection."""
        from torch.distributed import DistError  # noqa: PLC0415

        from gemctl.ranks.store import ForgedError, StoreError  # noqa: PLC0415

        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            self._check_abort()
            actual = read_json(attempt.meeting)["port"] if attempt.meeting.exists() else port
            try:
                with socket.create_connection((host, actual), timeout=SLICE) as connection:
                    self._own, self._peer = connection.getsockname()[0], connection.getpeername()[0]
                self._join_store(f"{self._peer}:{actual}", attempt)
                return
            except (socket.gaierror, UnicodeError) as error:  # the latter: not a valid name
                why = f"its name does not resolve: {getattr(error, 'strerror', error)}"
            except OSError as error:
                why = str(error.strerror or error)
            except (StoreError, ForgedError, DistError):
                why = "the server there does not know the attempt's secret"
            if time.monotonic() > deadline:
                store = f"the store of node 0 at {host}:{actual} was not reached within {JOIN_SECONDS:.0f} s"
                raise MeetingError(f"{self._me()}: {store}: {why}")
            time.sleep(POLL)

    def _join_store(self, endpoint: str, attempt: Attempt) -> None:
        """Connects to the store at `endpoint`, if it is the attempt's."""
        from gemctl.ranks.store import connect  # noqa: PLC0415

        store = connect(endpoint, attempt, PROOF_SECONDS)
        store.wait([PROOF_KEY], timedelta(seconds=PROOF_SECONDS))
        store.get(PROOF_KEY)
        self._store, self._beats = store, connect(endpoint, attempt, PROOF_SECONDS)

    def _me(self) -> str:
        return f"node {self.node} (host {socket.gethostname()})"


def _lay(attempt: Attempt, reports: list[Report]) -> Mesh:
    return write_mesh(attempt, [HostReport(report.host, report.slots, report.topology) for report in reports])


def _key(attempt: Attempt, name: str) -> str:
    return f"attempt {attempt.number}/{name}"


def _parse(store: str) -> tuple[str, int]:
    host, _, port = store.rpartition(":")
    if not host or not port.isdigit():
        raise MeetingError(f"--store {store}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _own_address(host: str) -> str:
    """The address at which node 0 listens: the one of this host that `host` resolves to. If that is only the loopback,
    as a host's own name often does, the address of the interface that the user chose for gloo, else "" (all addresses).
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
