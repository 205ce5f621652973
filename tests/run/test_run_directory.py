"""Run directories: identity, how a user names one, formats, ownership by the highest attempt, beats and requests."""

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from gemctl.errors import InputError
from gemctl.run import requests
from gemctl.run.attempt import Attempt, Base, Heartbeat, claim, watch_beat
from gemctl.run.directory import RunDir, find, folder_of
from gemctl.run.files import ROOM, JsonLog, LogTail, create_json, numbered, read_json, read_log, read_text


@dataclass
class Box:
    values: dict[str, int]


def _claim(run: RunDir, number: int, owner: str | None = None, heartbeat: float = 0.02) -> Attempt:
    return claim(run.path, number, nodes=1, ranks_per_node=2, heartbeat=heartbeat, owner=owner)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(str(tmp_path / "runs"), "gem", ["gemctl", "train"])


def test_identity_is_written_once(run: RunDir) -> None:
    info = RunDir.open(run.path).info()
    assert (info["run_id"], info["name"], info["command"]) == (run.path.name, "gem", ["gemctl", "train"])
    assert info["versions"]["torch"].split(".")[0] == "2"
    assert json.loads((run.path / "run.json").read_text())["format"] == 1
    with pytest.raises(FileExistsError):
        create_json(run.path / "run.json", {})


@pytest.mark.parametrize("root", ["file", "file/below", "/proc/gemctl"])
def test_folder_that_takes_no_runs_is_bad_input(root: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run\.root .*(file|gemctl).*: cannot be written: "):
        folder_of(str(tmp_path / root), "gem")


def test_run_is_found_by_path_id_and_unique_prefix(run: RunDir) -> None:
    root = str(run.path.parent.parent)
    other = run.path.parent.parent / "other" / "zzz-1"
    other.mkdir(parents=True)
    create_json(other / "run.json", {"run_id": "zzz-1"})
    for reference in (str(run.path), run.run_id, run.run_id[:10]):
        assert find(reference, root).path == run.path
    (other.parent / "zzz-12").mkdir()
    create_json(other.parent / "zzz-12" / "run.json", {"run_id": "zzz-12"})
    assert find("zzz-1", root).path == other  # a whole id, though another begins with it
    with pytest.raises(InputError, match=r"matches 2 runs.*zzz-1, zzz-12"):
        find("zz", root)
    with pytest.raises(InputError, match=f"no such run: .* in {root} .*{run.run_id}"):
        find("nothing", root)
    with pytest.raises(InputError, match="other: is the name of zzz-1, zzz-12; name a run by its id"):
        find("other", root)
    (run.path.parent.parent / "other" / "zzz-12" / "run.json").unlink()
    for reference in ("", "n" * 300):
        with pytest.raises(InputError):
            find(reference, root)
    with pytest.raises(InputError, match=r"run\.json is missing"):
        RunDir.open(run.path.parent)


def test_a_run_whose_attempts_were_deleted_has_none(run: RunDir) -> None:
    (run.path / "attempts").rmdir()
    assert run.attempts() == [] and run.last_attempt() is None
    (run.path / "attempts").touch()
    with pytest.raises(InputError, match="attempts: Not a directory"):
        run.attempts()


def test_newer_format_is_refused_by_name_and_missing_format_is_read(run: RunDir) -> None:
    path = run.path / "x.json"
    path.write_text('{"format": 2, "a": 1}')
    with pytest.raises(InputError, match=r"x\.json: format 2 is newer than this gemctl reads \(up to 1\)"):
        read_json(path)
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    path.write_text("[1]")
    with pytest.raises(InputError, match="JSON object"):
        read_json(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_json(path)


def test_log_tail_leaves_an_unfinished_line(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "log.jsonl")
    assert tail.new() == []
    log = JsonLog(tail.path)
    log.write({"a": 1})
    with tail.path.open("a") as file:
        file.write('{"format": 1, "a"')
    assert tail.new() == [{"a": 1}]
    with tail.path.open("a") as file:
        file.write(": 2}\n")
    assert tail.new() == [{"a": 2}]
    assert read_log(tail.path) == [{"a": 1}, {"a": 2}]


def test_full_disk_still_takes_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = JsonLog(tmp_path / "log.jsonl")
    log.write({"a": "x"})
    assert (tmp_path / "log.jsonl").stat().st_blocks * 512 >= ROOM  # on the disk already

    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("gemctl.run.files._keep", full)
    with pytest.raises(OSError, match=r"log\.jsonl"):
        log.write({"a": "x" * 2 * ROOM})
    log.write({"a": "y"}, last=True)
    assert read_log(tmp_path / "log.jsonl") == [{"a": "x"}, {"a": "y"}]


def test_bad_line_of_a_log_is_named(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "log.jsonl")
    JsonLog(tail.path).write({"a": 1})
    tail.new()
    for bad in (b"{]", b"7", b"\xff"):
        with tail.path.open("ab") as file:
            file.write(bad + b"\n")
        with pytest.raises(InputError, match=r"log\.jsonl:2: (not JSON|a JSON object)"):
            tail.new()
        os.truncate(tail.path, tail.path.stat().st_size - len(bad) - 1)


def _race(
    path: Path, number: int, start: "multiprocessing.synchronize.Event", won: "multiprocessing.Queue[int]"
) -> None:
    start.wait()
    try:
        claim(path, number, nodes=1, ranks_per_node=1, heartbeat=1.0)
        won.put(os.getpid())
    except InputError:
        won.put(0)


def test_only_one_of_many_takes_the_run(run: RunDir) -> None:
    context = multiprocessing.get_context("fork")
    start, won = context.Event(), context.Queue()
    racers = [context.Process(target=_race, args=(run.path, 1, start, won)) for _ in range(8)]
    for racer in racers:
        racer.start()
    start.set()
    winners = [pid for pid in (won.get(timeout=10) for _ in racers) if pid]
    for racer in racers:
        racer.join()
    assert len(winners) == 1
    assert run.attempt(1).claim().pid == winners[0]


def test_highest_attempt_owns_the_run_and_a_woken_process_knows(run: RunDir) -> None:
    first = _claim(run, 1)
    told = threading.Event()
    with Heartbeat(first, 0.02, told.set):
        assert first.owns_run()
        second = _claim(run, 2)
        assert told.wait(2)
        assert not first.owns_run()
        beat = first.beat()
        time.sleep(0.1)
        assert first.beat() == beat  # it has stopped beating
    assert second.owns_run()
    assert [attempt.number for attempt in run.attempts()] == [1, 2]


def test_base_and_end_are_written_once(run: RunDir) -> None:
    attempt = _claim(run, 1)
    attempt.write_base(Base("step_3.a1", 3))
    attempt.write_end("failed", step=4)
    assert attempt.base() == Base("step_3.a1", 3)
    assert (attempt.end() or {})["outcome"] == "failed"
    with pytest.raises(FileExistsError):
        attempt.write_base(Base(None, 0))
    with pytest.raises(FileExistsError):
        attempt.write_end("finished")


def test_beat_is_watched_on_the_readers_clock(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = _claim(run, 1)
    with Heartbeat(attempt, 0.02):
        seconds = watch_beat(attempt)
        assert seconds is not None
        assert seconds < 1
    os.utime(attempt.heartbeat, (time.time() + 3600,) * 2)  # a writer whose clock is an hour ahead
    monkeypatch.setattr("gemctl.run.attempt.Claim.patience", 0.2)
    assert watch_beat(attempt) is None


def test_ended_attempt_is_dead_at_once(run: RunDir) -> None:
    attempt = _claim(run, 1, heartbeat=100.0)
    attempt.write_end("finished", step=1)
    start = time.monotonic()
    assert watch_beat(attempt) is None
    assert time.monotonic() - start < 1


def test_requests_are_numbered_and_belong_to_the_attempt_they_were_filed_in(run: RunDir) -> None:
    first = _claim(run, 1)
    assert requests.pending(run, first) == []
    save, stop = requests.file(run, "save"), requests.file(run, "stop")
    assert (save.number, stop.number) == (1, 2)
    assert requests.pending(run, first) == [save, stop]
    assert requests.pending(run, first, after=1) == [stop]
    second = _claim(run, 2)
    assert requests.pending(run, second) == []
    third = requests.file(run, "stop")
    assert requests.pending(run, second) == [third]


def _file_many(run: RunDir) -> None:
    for _ in range(20):
        requests.file(run, "save")


def test_requests_filed_at_once_all_count(run: RunDir) -> None:
    attempt = _claim(run, 1)
    context = multiprocessing.get_context("fork")
    filers = [context.Process(target=_file_many, args=(run,)) for _ in range(4)]
    for filer in filers:
        filer.start()
    for filer in filers:
        filer.join()
    assert [request.number for request in requests.pending(run, attempt)] == list(range(1, 81))


def test_beats_of_a_stopped_process_take_nothing_back(run: RunDir) -> None:
    """A process that is stopped, overtaken and woken up beats in its own folder at most once more."""
    first = _claim(run, 1)
    context = multiprocessing.get_context("fork")
    beating = context.Process(target=_beat_for_ever, args=(first,))
    beating.start()
    assert watch_beat(first) is not None
    os.kill(beating.pid or 0, signal.SIGSTOP)
    second = _claim(run, 2)
    os.kill(beating.pid or 0, signal.SIGCONT)
    beating.join(timeout=5)
    assert beating.exitcode == 0
    assert second.owns_run()
    assert second.claim().pid == os.getpid()


def _beat_for_ever(attempt: Attempt) -> None:
    done = threading.Event()
    with Heartbeat(attempt, 0.02, done.set):
        done.wait()


def test_foreign_and_missing_keys_name_file_and_line(run: RunDir) -> None:
    """What is no record of gemctl's is refused by its place, wherever it is first looked into, also deeper down."""
    log = run.supervisor_log
    log.write_text('{"format": 1, "event": "attempt"}\n{"hello": 1, "deeper": {"a": 1}}\n')
    line = read_log(log)[1]
    with pytest.raises(InputError, match=r"supervisor\.jsonl:2: event is missing"):
        line["event"]
    with pytest.raises(InputError, match=r"supervisor\.jsonl:2: b is missing"):
        line["deeper"]["b"]
    assert asdict(Box(line["deeper"])) == {"values": {"a": 1}}
    attempt = _claim(run, 1)
    attempt.base_file.write_text('{"step": 1, "stpe": 1}')
    with pytest.raises(InputError) as refused:
        attempt.base()
    assert sorted(problem.rpartition("base.json: ")[2] for problem in refused.value.problems) == [
        "checkpoint is missing", "stpe is unknown to this gemctl",
    ]  # fmt: skip


def test_line_that_was_cut_is_not_joined_with_the_next(tmp_path: Path) -> None:
    """A host that dies in a write leaves half a line; a writer that comes back must not lose its own first one."""
    path = tmp_path / "supervisor.jsonl"
    JsonLog(path).write({"n": 1})
    with path.open("a") as file:
        file.write('{"format": 1, "n"')
    JsonLog(path).write({"n": 2})
    assert [line["n"] for line in read_log(path)] == [1, 2]
    path.write_text('{"form')
    JsonLog(path).write({"n": 3})
    assert [line["n"] for line in read_log(path)] == [3]


def test_folders_that_are_no_attempts_are_passed_by(run: RunDir) -> None:
    _claim(run, 1)
    for name in ("x", "²", "1.old"):  # a superscript is a digit, and no number
        (run.path / "attempts" / name).mkdir()
    assert [attempt.number for attempt in run.attempts()] == [1]
    assert run.attempt(1).owns_run()


def test_configuration_that_is_gone_or_no_text_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(InputError, match=r"config\.yaml: No such file"):
        read_text(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"config\.yaml: not UTF-8 text"):
        read_text(path)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("2", "format 2 is newer than this gemctl reads"),
        ("null", "format: None is not a number"),
        ('"x"', "format: x is"),
    ],
)
def test_only_a_higher_format_asks_for_a_newer_gemctl(written: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(f'{{"format": {written}, "name": "x"}}')
    with pytest.raises(InputError, match=said) as refused:
        read_json(path)
    assert ("upgrade" in str(refused.value)) == (written == "2")


def test_only_plain_digits_number_an_attempt(tmp_path: Path) -> None:
    for name in ("1", "2", "٣", "x"):
        (tmp_path / name).mkdir()
    assert numbered(tmp_path) == [1, 2]
