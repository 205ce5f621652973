"""The store's server is a process of its own: an agent that forks its ranks must have no thread that holds C locks."""

from collections.abc import Callable
from pathlib import Path

from tests.world import run_world


def test_store_is_served_by_a_child_that_ends_with_it() -> None:
    assert run_world(1, _serve, gloo=False) == [(0, "value", True, True)]


def _serve() -> tuple[int, str, bool, bool]:
    from gemctl.store import StoreError, StoreServer, connect

    threads = _threads()
    server = StoreServer()
    store = connect("127.0.0.1", server.port)
    store.set("key", "value")
    new_threads = _threads() - threads
    value = store.get("key").decode()
    taken = _fails(lambda: StoreServer(server.port), StoreError)
    server.close()
    return new_threads, value, taken, _fails(lambda: store.get("key"), Exception)


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _fails(action: Callable[[], object], error: type[Exception]) -> bool:
    try:
        action()
    except error:
        return True
    return False
