"""Other users of the host, against whole runs: what they write is refused, their store is not joined, and nothing of a
run listens where they could reach more than they must.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, TCPStore

from gemctl import process
from gemctl.ranks.rendezvous import Rendezvous
from gemctl.recover.records import Records
from gemctl.run.directory import RunDir
from gemctl.run.files import read_json
from tests.ranks.test_store import NOBODY
from tests.support import small_run
from tests.support.listeners import listening
from tests.support.small_run import Case, Ended, free_port, only_run, supervise, supervise_all
from tests.support.world import run_world

LIE = json.dumps({"rank": 0, "address": "127.0.0.1", "host": "127.0.0.1", "port": 1, "store": "127.0.0.1:1"})


def _stranger(work: Callable[[], None]) -> int:
    """Another user's process that does `work` for as long as this one lives."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            process.die_with_parent(parent)
            work()
        finally:
            os._exit(0)
    return pid


def write_into_the_store(root: str) -> Ended:
    """A stranger is at the meeting first and says who everybody is, over and over."""
    port, keep, (told, tell) = free_port(), Rendezvous._open_store, os.pipe()

    def lie() -> None:
        store: Any = None
        while True:
            try:
                store = store or TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1), wait_for_workers=False)
                for key in ("place/1", "report/1", "ranks"):
                    store.set(f"attempt 1/{key}", LIE)
                os.write(tell, b"x")
            except DistError:
                store = None
            time.sleep(0.001)

    def keep_slowly(*arguments: Any) -> None:
        keep(*arguments)
        os.read(told, 1)

    Rendezvous._open_store = keep_slowly  # type: ignore[method-assign,assignment]  # in forked agents
    pid = _stranger(lie)
    try:
        return supervise(Case(root, nodes=2, store=f"127.0.0.1:{port}"))
    finally:
        os.kill(pid, signal.SIGKILL)


def test_agents_reject_values_that_another_user_writes_into_their_store(tmp_path: Path) -> None:
    (end,) = run_world(1, write_into_the_store, str(tmp_path), gloo=False)
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert "was not written by this run" in end.message
    assert list(end.run_dir.attempt(1).ranks.iterdir()) == []


def keep_a_store_first(root: str) -> tuple[Ended, int]:
    """A stranger has taken the port at which the agents were to meet, with a store that has an answer to everything."""
    port = free_port()

    def keep() -> None:
        store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
        for key in ("keeper", "attempt 1/place/1", "attempt 1/ranks"):
            store.set(key, LIE)
        signal.pause()

    pid = _stranger(keep)
    try:
        while not any(one.port == port for one in listening(pid)):
            time.sleep(0.01)
        return supervise(Case(root, nodes=2, store=f"127.0.0.1:{port}")), port
    finally:
        os.kill(pid, signal.SIGKILL)


def test_agents_use_another_port_if_another_user_has_taken_theirs(tmp_path: Path) -> None:
    ((end, port),) = run_world(1, keep_a_store_first, str(tmp_path), gloo=False)
    assert (end.error, end.left) == (None, []), end.message
    told = read_json(end.run_dir.attempt(1).meeting)["port"]
    assert port < told < port + 64


def list_listeners(roots: list[str]) -> list[list[tuple[str, str]]]:
    """Who listens where, in the middle of a run on one host and of one on two."""

    def look(run: RunDir, records: Records) -> None:
        ranks = {rank.pid for rank in records.ranks}
        found = [("rank" if one.pid in ranks else "other", one.address) for one in listening(os.getpid())]
        (run.path / "listeners.json").write_text(json.dumps(found))

    small_run.DISTURBANCES["look"] = look
    supervise_all(
        [Case(root, nodes=nodes, disturb=small_run.Disturb("look")) for nodes, root in enumerate(roots, start=1)]
    )
    return [json.loads((only_run(Path(root)).path / "listeners.json").read_text()) for root in roots]


def test_every_listening_socket_is_known(tmp_path: Path) -> None:
    """gloo's own socket on each rank and, with several hosts, the two stores: where the agents meet, and the ranks'."""
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
    ((one, two),) = run_world(1, list_listeners, list(map(str, roots)), gloo=False)
    assert {tuple(each) for each in one} == {("rank", "127.0.0.1")}
    assert {tuple(each) for each in two} == {("rank", "127.0.0.1"), ("other", "127.0.0.1")}
    assert [each[0] for each in two].count("other") == 2
