"""The key-value stores in which agents and ranks meet, and torchrun's rendezvous on top of one.

On one host the store is an anonymous file of the agent, which the forked ranks inherit: nothing listens, and no other
user can open it. Several hosts meet in a TCPStore, at an address through which they reach each other. Anybody who
reaches its port can write to it, so values, including those of c10d, are signed with the attempt's secret; values
written by others are rejected (docs/security.md).

A TCPStore's server looks up the name of each client while it holds locks of the C library. If the agent ran the server
itself, it would sometimes fork a rank at that moment, and the rank, which inherits a lock that nobody will release,
would hang at its first connection. So the server runs in a child that forks nothing, and dies with its agent.
"""

import errno
import hashlib
import hmac
import os
import signal
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, FileStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from gemctl import env, process
from gemctl.errors import GemctlError
from gemctl.run.attempt import Attempt, read_secret

LOOPBACK = "127.0.0.1"
SECONDS = 120.0  # that a call may take
PORTS = 64  # tried in turn if one is taken
RANKS_WAIT = timedelta(minutes=30)  # for each other, as torch's own default has it
BACKEND = "gemctl"  # torchrun's name for this rendezvous


class StoreError(GemctlError):
    """A store that cannot be opened or reached; the message says which and why."""


class ForgedError(GemctlError):
    """A value that was not written with the attempt's secret."""


class LocalStore:
    """The store of one host. `endpoint`: its argument for `connect`, in this process and in those forked from it."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("gemctl-store", os.MFD_CLOEXEC)
        self.endpoint = f"/proc/self/fd/{self._fd}"

    def close(self) -> None:
        os.close(self._fd)


class StoreServer:
    """A TCPStore at `address` ("": every address of this host), for as long as this process lives.

    `port`: 0 for any free port; if another one is taken, one of the next. `endpoint`: its argument for `connect`.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        self._pid = 0
        listening = _listen(address, port)
        self.address, self.port = address, int(listening.getsockname()[1])
        self.endpoint = f"{address}:{self.port}"
        reader, writer = os.pipe()
        agent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reader)
            _serve(agent, listening, address or LOOPBACK, writer)
        os.close(writer)
        listening.close()
        with os.fdopen(reader, encoding="utf-8") as pipe:
            failure = pipe.read()
        if failure:
            self.close()
            raise StoreError(f"no store at {self.endpoint} of {socket.gethostname()}: {failure}")

    def close(self) -> None:
        """Ends the server; its clients get errors."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wanted = range(port, min(port + PORTS, 1 << 16)) if port else [0]
    for number in wanted:
        try:
            return socket.create_server((address, number), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or number == wanted[-1]:
                where = f"{address or 'any address'}:{port}" + (f" to {number}" if number != port else "")
                raise StoreError(f"no store at {where} of {socket.gethostname()}: {error.strerror}") from None
    raise AssertionError


def _serve(agent: int, listening: socket.socket, address: str, pipe: int) -> None:
    """The child: serves, or writes to `pipe` why it cannot. Does not return."""
    process.die_with_parent(agent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the agent handles them
    try:
        port, wait = listening.getsockname()[1], timedelta(seconds=SECONDS)
        store = TCPStore(  # noqa: F841 (serves while it lives)
            address, port, None, True, wait, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    except BaseException as error:
        os.write(pipe, _first_line(error).encode())
        os._exit(1)
    os.close(pipe)
    while True:
        signal.pause()


_alive: list[Store] = []  # torch holds only the C++ half of a store written in Python


class SignedStore(Store):
    """A store in which every value is signed, together with its name, by `key`.

    Counters (`add`) and the set of names are not signed: an outsider can make a run fail, but not feed it values.
    """

    def __init__(self, inner: Any, key: bytes, where: str) -> None:
        super().__init__()
        self._inner, self._key, self._where = inner, key, where

    def set(self, name: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(name, self._signature(name, data) + data)

    def get(self, name: str) -> bytes:
        raw = bytes(self._inner.get(name))
        signature, data = raw[:SIGNATURE], raw[SIGNATURE:]
        if not hmac.compare_digest(signature, self._signature(name, data)):
            raise ForgedError(f"the value of {name!r} in the store at {self._where} was not written by this run")
        return data

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        return [self.get(name) for name in names]

    def multi_set(self, names: Sequence[str], values: Sequence[str | bytes]) -> None:
        for name, value in zip(names, values, strict=True):
            self.set(name, value)

    def add(self, name: str, amount: int) -> int:
        return int(self._inner.add(name, amount))

    def check(self, names: Sequence[str]) -> bool:
        return bool(self._inner.check(list(names)))

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(list(names), *([] if timeout is None else [timeout]))

    def delete_key(self, name: str) -> bool:
        return bool(self._inner.delete_key(name))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._inner.timeout
        return timeout

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> "SignedStore":
        """NCCL calls it for each group that it splits off another."""
        copy = SignedStore(self._inner.clone(), self._key, self._where)
        _alive.append(copy)
        return copy

    def _signature(self, name: str, data: bytes) -> bytes:
        head = name.encode()
        return hmac.digest(self._key, len(head).to_bytes(4) + head + data, hashlib.sha256)


SIGNATURE = hashlib.sha256().digest_size


def connect(endpoint: str, attempt: Attempt, seconds: float = SECONDS) -> Store:
    """A connection to the attempt's store at `endpoint`; it serves one call at a time. StoreError if it fails."""
    if endpoint.startswith("/"):
        return FileStore(endpoint, -1)
    key = read_secret(attempt.secret)
    host, _, port = endpoint.rpartition(":")
    try:
        store = TCPStore(host, int(port), None, False, timedelta(seconds=seconds), wait_for_workers=False)
    except DistError as error:
        raise StoreError(f"no store at {endpoint}: {_first_line(error)}") from None
    store.set_timeout(timedelta(seconds=SECONDS))
    return SignedStore(store, key, endpoint)


def of_ranks(attempt: Attempt) -> dict[str, Any]:
    """Arguments of `init_process_group` that make the attempt's ranks meet in its store; none in a rank that no agent
    has started, as torchrun provides a store for it."""
    endpoint = env.store()
    if endpoint is None:
        return {}
    store = connect(endpoint, attempt)
    store.set_timeout(RANKS_WAIT)
    _alive.append(store)
    return {"store": store, "rank": env.rank(), "world_size": env.world_size()}


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


class StaticRendezvous(RendezvousHandler):
    """Every agent knows its rank already, and the store is open: nothing is left to agree on."""

    def __init__(self, endpoint: str, attempt: Attempt, rank: int, nodes: int, run_id: str) -> None:
        self.endpoint, self.attempt, self.rank, self.nodes, self.run_id = endpoint, attempt, rank, nodes, run_id

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = connect(self.endpoint, self.attempt)
        # Ranks get no address from torchrun: they read GEMCTL_STORE.
        return RendezvousInfo(PrefixStore(self.run_id, self._store), self.rank, self.nodes, RendezvousStoreInfo("", 0))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    rank, attempt = int(parameters.config["rank"]), Attempt(Path(parameters.config["attempt"]))
    return StaticRendezvous(parameters.endpoint, attempt, rank, parameters.max_nodes, parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _create)
