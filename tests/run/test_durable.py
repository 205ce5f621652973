"""Files and folders of a run on disks that lose power and on file servers that answer twice, refuse links or hiccup."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemctl import durable
from gemctl.durable import create, has_links, make_folders, read
from gemctl.errors import InputError
from gemctl.run import directory, requests
from gemctl.run.attempt import Heartbeat, claim, watch_beat
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, create_json, last_line, read_json, read_log, read_whole


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(str(tmp_path), "demo", [])


def refuse(number: int) -> Callable[..., None]:
    def refused(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refused


def answered_twice(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The file server does it, loses its answer, and is asked again."""
    real = getattr(os, name)

    def twice(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, name, twice)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_link_that_was_made_though_the_server_says_that_the_name_is_taken_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered_twice(monkeypatch, "link")
    create_json(tmp_path / "manifest.json", {"step": 3})
    assert read_json(tmp_path / "manifest.json") == {"step": 3}
    assert left(tmp_path) == {"manifest.json"}


def test_a_name_that_another_file_has_is_taken_with_the_same_content_too(tmp_path: Path) -> None:
    create(tmp_path / "a", "same")
    with pytest.raises(FileExistsError):
        create(tmp_path / "a", "same")
    assert left(tmp_path) == {"a"}


def test_an_attempt_whose_folder_was_made_though_the_server_says_that_it_is_there_is_ours(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered_twice(monkeypatch, "mkdir")
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=2, heartbeat=1.0, owner="me")
    assert attempt.claim().owner == "me"


def test_of_two_that_find_the_same_attempt_folder_one_gets_it(run: RunDir) -> None:
    won: list[str] = []
    lost: list[str] = []

    def take(owner: str) -> None:
        try:
            claim(run.path, 1, nodes=1, ranks_per_node=2, heartbeat=1.0, owner=owner)
            won.append(owner)
        except InputError as error:
            assert "attempt 1 was started by another process just now" in str(error)
            lost.append(owner)

    threads = [threading.Thread(target=take, args=(f"owner {at}",)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(lost) == 7
    assert run.attempt(1).claim().owner == won[0]


def test_a_request_filed_over_a_server_that_answers_twice_is_filed_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered_twice(monkeypatch, "link")
    assert requests.file(run, "save").number == 1
    assert requests.file(run, "stop").number == 2
    assert left(run.requests) == {"1.json", "2.json"}


@pytest.mark.parametrize("number", sorted(durable.NO_LINKS))
def test_without_hard_links_a_file_is_created_exclusively_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", refuse(number))
    create(tmp_path / "a", "first")
    with pytest.raises(FileExistsError):
        create(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"
    assert left(tmp_path) == {"a"}
    assert not has_links(tmp_path)


def test_without_hard_links_one_of_many_writers_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    won: list[str] = []

    def write(text: str) -> None:
        try:
            create(tmp_path / "a", text)
            won.append(text)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=write, args=(f"writer {at}",)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [(tmp_path / "a").read_text()]
    assert left(tmp_path) == {"a"}


def test_without_hard_links_what_a_dead_writer_has_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    monkeypatch.setattr(durable, "CLAIM_SECONDS", 0.05)
    (tmp_path / ".a.claim").touch()
    with pytest.raises(OSError, match=r"a process died while creating this file; delete \.a\.claim beside it"):
        create(tmp_path / "a", "text")
    assert left(tmp_path) == {".a.claim"}


def test_another_refusal_of_a_link_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device") as raised:
        create(tmp_path / "a", "text")
    assert raised.value.filename == str(tmp_path / "a")
    assert left(tmp_path) == set()


@pytest.mark.parametrize("number", sorted(durable.TRANSIENT))
def test_a_read_that_a_server_refuses_once_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    create(tmp_path / "a", "text")
    real, tried = os.open, []

    def once(path: Path, flags: int) -> int:
        tried.append(path)
        if len(tried) == 1:
            raise OSError(number, os.strerror(number))
        return real(path, flags)

    monkeypatch.setattr(os, "open", once)
    assert read(tmp_path / "a") == b"text"
    assert len(tried) == 2


def test_a_read_that_is_refused_for_good_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refuse(errno.EIO))
    monkeypatch.setattr(durable, "PAUSES", (0.0,))
    with pytest.raises(OSError, match="Input/output error"):
        read(tmp_path / "a")


def test_folders_are_made_with_their_parents_and_may_be_there(tmp_path: Path) -> None:
    make_folders(tmp_path / "a/b/c")
    make_folders(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
    create(tmp_path / "file", "")
    with pytest.raises(NotADirectoryError):
        make_folders(tmp_path / "file")


@pytest.mark.parametrize("tail", [b'{"step": 3', b"\0" * 700, b'{"step"\0\0\0', b"\0" * 100_000])
def test_what_a_power_loss_leaves_at_the_end_of_a_log_is_neither_read_nor_kept(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLog(path)
    log.write({"step": 1})
    log.write({"step": 2}, last=True)
    log.close()
    with path.open("ab") as file:
        file.write(tail)
    assert read_log(path) == [{"step": 1}, {"step": 2}]
    assert last_line(path) == {"step": 2}
    log = JsonLog(path)
    log.write({"step": 3})
    log.close()
    assert read_log(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


@pytest.mark.parametrize("torn", [b"\0" * 40, b'{"step": \0\0\0', b'\0\0"step": 2}'])
def test_lines_that_a_power_loss_has_torn_in_the_middle_are_passed_over(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn + b'\n{"step": 3}\n')
    assert read_log(path) == [{"step": 1}, {"step": 3}]
    path.write_bytes(b'{"step": 1}\n' + torn + b"\n")
    assert last_line(path) == {"step": 1}


def test_a_line_that_follows_zeros_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'\0\0\0{"step": 3}\n')
    assert read_log(path) == [{"step": 3}]


def test_a_line_of_a_log_that_was_never_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\nhello\n')
    with pytest.raises(InputError, match=r"log\.jsonl:2: not JSON"):
        read_log(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 30, b'{"format": 1, "st', b'{"format": 1}\0\0'])
def test_a_file_that_a_power_loss_has_emptied_or_cut_counts_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "claim.json"
    path.write_bytes(content)
    assert read_whole(path) is None
    with pytest.raises(InputError, match=r"claim\.json: (empty|not JSON)"):
        read_json(path)


def test_a_file_of_a_newer_gemctl_is_not_taken_for_none(tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    path.write_text('{"format": 2}')
    with pytest.raises(InputError, match="newer"):
        read_whole(path)


def test_a_run_whose_folder_was_made_though_the_server_says_that_it_is_there_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    answered_twice(monkeypatch, "mkdir")
    run = RunDir.create(str(tmp_path), "demo", [])
    assert left(tmp_path / "demo") == {run.run_id}
    assert run.info()["run_id"] == run.run_id


def test_two_runs_that_draw_one_id_get_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["same", "same", "other"])
    monkeypatch.setattr(directory, "new_run_id", lambda: next(drawn))
    first, second = (RunDir.create(str(tmp_path), "demo", [word]) for word in ("a", "b"))
    assert (first.run_id, second.run_id) == ("same", "other")
    assert (first.info()["command"], second.info()["command"]) == (["a"], ["b"])


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_what_living_processes_ask_again_and_again_may_be_refused_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=2, heartbeat=0.02)
    requests.file(run, "stop")
    refused = dict.fromkeys(("stat", "listdir", "open", "scandir"), 1)

    def once(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if refused[name]:
                refused[name] -= 1
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        return call

    for name in refused:
        monkeypatch.setattr(os, name, once(name))
    assert attempt.owns_run()
    assert [one.kind for one in requests.pending(run, attempt)] == ["stop"]
    assert refused["listdir"] == refused["stat"] == refused["open"] == 0
    refused["open"] = 1
    assert b'"beat": 0' in attempt.beat()


def test_a_beat_that_cannot_be_written_is_not_the_last(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=2, heartbeat=0.02)
    real, left = os.pwrite, [3]

    def refused_thrice(*args: Any) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", refused_thrice)
    with Heartbeat(attempt, 0.02):
        assert watch_beat(attempt) is not None


def test_a_file_system_that_cannot_fsync_folders_is_used_and_one_that_fails_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    durable.sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as raised:
        durable.sync_folder(tmp_path)
    assert raised.value.filename == str(tmp_path)
