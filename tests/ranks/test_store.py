"""The stores in which agents and ranks meet: which process runs them, where they listen, which values they accept."""

import gc
import os
import socket
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from gemctl import process
from gemctl.errors import GemctlError
from gemctl.ranks.store import ForgedError, LocalStore, StoreServer, connect
from gemctl.run.attempt import Attempt, claim, create_secret, read_secret
from gemctl.run.directory import RunDir
from tests.support.world import run_world

NOBODY = 65534


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    run = RunDir.create(str(tmp_path), "small", ["test"])
    return claim(run.path, 1, nodes=2, ranks_per_node=1, heartbeat=0.1)


def test_store_is_served_by_a_child_that_ends_with_it(attempt: Attempt) -> None:
    assert run_world(1, _serve, attempt, gloo=False) == [(0, b"value", True, ["127.0.0.1"], True)]


def _serve(attempt: Attempt) -> tuple[int, bytes, bool, list[str], bool]:
    """A server in the agent itself would be a thread that may hold C locks when ranks are forked."""
    threads = _threads()
    server = StoreServer("127.0.0.1")
    store = connect(server.endpoint, attempt)
    store.set("key", "value")
    new_threads = _threads() - threads
    value = store.get("key")
    other = StoreServer("127.0.0.1", server.port)  # the next port, as this one is taken
    addresses = _listening(server.port)
    server.close()
    return new_threads, value, 0 < other.port - server.port < 64, addresses, _fails(lambda: store.get("key"), Exception)


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _listening(port: int) -> list[str]:
    """The addresses (IPv4; IPv6 as hexadecimal digits) at which this network namespace listens on `port`."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.append(socket.inet_ntoa(bytes.fromhex(address)[::-1]) if len(address) == 8 else address)
    return found


def _fails(action: Callable[[], object], error: type[Exception]) -> bool:
    try:
        action()
    except error:
        return True
    return False


def test_values_of_other_users_are_rejected(attempt: Attempt) -> None:
    assert run_world(1, _believe, attempt, gloo=False) == [
        {
            "own": b"1",
            "forged": True,
            "moved": True,
            "short": True,
            "other attempt's": True,
            "copied": b"2",
            "several": True,
        }
    ]


def _believe(attempt: Attempt) -> dict[str, Any]:
    """Another user of this host changes values in the store."""
    server = StoreServer("127.0.0.1")
    store = connect(server.endpoint, attempt)
    for name in ("own", "forged", "moved", "short"):
        store.set(name, "1")
    run = RunDir(attempt.path.parent.parent)
    connect(server.endpoint, claim(run.path, 2, nodes=2, ranks_per_node=1, heartbeat=0.1)).set("other attempt's", "1")

    def attack() -> None:
        plain = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=5), wait_for_workers=False)
        plain.set("forged", "x" * 40)
        plain.set("moved", plain.get("own"))  # type: ignore[arg-type]
        plain.set("short", "")

    as_nobody(attack)
    found: dict[str, Any] = {"own": store.get("own")}
    for name in ("forged", "moved", "short", "other attempt's"):
        found[name] = _fails(lambda name=name: store.get(name), ForgedError)  # type: ignore[misc]
    copy = PrefixStore("group", PrefixStore("a", store).clone()).clone()  # type: ignore[attr-defined]  # as NCCL does
    gc.collect()
    copy.set("own", "2")
    found["copied"] = copy.get("own")
    found["several"] = _fails(lambda: store.multi_get(["own", "forged"]), ForgedError)
    return found


def as_nobody(work: Callable[[], None]) -> None:
    """Runs `work` in a fork of this process, as another user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_store_of_one_host_is_open_to_forks_of_its_agent_alone(attempt: Attempt) -> None:
    assert run_world(1, _local, attempt, gloo=False) == [(b"value", True, b"value")]


def _local(attempt: Attempt) -> tuple[bytes, bool, bytes]:
    kept = LocalStore()
    mine = connect(kept.endpoint, attempt)
    pid = os.fork()
    if pid == 0:
        connect(kept.endpoint, attempt).set("key", "value")
        os._exit(0)
    os.waitpid(pid, 0)
    seen = kept.endpoint.replace("self", str(os.getpid()))
    code = f"import os; os.setuid({NOBODY}); open({seen!r}, 'r+')"
    stranger = subprocess.run(process.python("-c", code), capture_output=True, text=True, check=False)
    before = mine.get("key")
    return before, "Permission denied" in stranger.stderr, mine.get("key")


def test_only_the_user_can_read_the_secret(attempt: Attempt, tmp_path: Path) -> None:
    assert (attempt.secret.stat().st_mode & 0o777, len(read_secret(attempt.secret))) == (0o600, 32)
    create_secret(attempt.secret)  # again
    kept = read_secret(attempt.secret)
    assert kept == read_secret(attempt.secret) != b""
    (tmp_path / "link").symlink_to(attempt.secret)
    for path, mode, text, told in (
        (attempt.secret, 0o640, None, "lets others read"),
        (attempt.secret, 0o604, None, "lets others read"),
        (attempt.secret, 0o600, "ab", "is truncated"),
        (attempt.secret, 0o600, "no", "cannot be read"),
        (tmp_path / "link", 0o600, None, "cannot be read"),
        (tmp_path / "none", 0o600, None, "cannot be read"),
    ):
        attempt.secret.chmod(mode)
        if text is not None:
            attempt.secret.write_text(text)
        with pytest.raises(GemctlError, match=told):
            read_secret(path)
