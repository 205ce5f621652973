"""The key-value store in which agents and ranks meet, kept by a process of its own, and torchrun's rendezvous on it.

A store's server looks up the name of whoever connects, under locks of the C library. An agent that kept it would fork
its ranks in such a moment now and then, and the rank, born with a lock that nobody will ever release, would hang at its
own first connection. So the server lives in a child that forks nothing, and dies with its agent.
"""

import os
import signal
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from gemctl.errors import GemctlError
from gemctl.run import process

LOOPBACK = "127.0.0.1"
SECONDS = 120.0  # that a call may take
BACKEND = "gemctl"  # torchrun's name for this rendezvous


class StoreError(GemctlError):
    """A store that cannot be opened or reached; the message says which and why."""


class StoreServer:
    """A TCPStore on `port` (0: a free one) of every interface of this host, for as long as this process lives."""

    def __init__(self, port: int = 0) -> None:
        reader, writer = os.pipe()
        keeper_of = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reader)
            _keep(keeper_of, port, writer)
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as pipe:
            told = pipe.read()
        if not told.isdigit():
            self.close()
            raise StoreError(f"no store on port {port} of {os.uname().nodename}: {told or 'its process has died'}")
        self.port = int(told)

    def close(self) -> None:
        """Ends it; whoever still asks it gets an error."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _keep(agent: int, port: int, pipe: int) -> None:
    """What the child does: serves, and says on `pipe` on which port, or why not. It does not return."""
    process.die_with_parent(agent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the agent's to take
    try:
        store = TCPStore(LOOPBACK, port, None, True, timedelta(seconds=SECONDS), wait_for_workers=False)
        os.write(pipe, str(store.port).encode())
    except BaseException as error:
        os.write(pipe, _first_line(error).encode())
        os._exit(1)
    os.close(pipe)
    while True:
        signal.pause()


def connect(host: str, port: int) -> Any:
    """A connection to the store at `host`:`port`; it serves one call at a time."""
    try:
        return TCPStore(host, port, None, False, timedelta(seconds=SECONDS), wait_for_workers=False)
    except DistNetworkError as error:
        raise StoreError(f"no store at {host}:{port}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


class SeatedRendezvous(RendezvousHandler):
    """Every agent knows its number already, and the store is there: nothing is left to agree on."""

    def __init__(self, host: str, port: int, rank: int, nodes: int, run_id: str) -> None:
        self.host, self.port, self.rank, self.nodes, self.run_id = host, port, rank, nodes, run_id

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self.run_id, connect(self.host, self.port))
        return RendezvousInfo(store, self.rank, self.nodes, RendezvousStoreInfo(self.host, self.port))

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
    host, _, port = parameters.endpoint.rpartition(":")
    rank = int(parameters.config["rank"])
    return SeatedRendezvous(host.strip("[]"), int(port), rank, parameters.max_nodes, parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _create)
