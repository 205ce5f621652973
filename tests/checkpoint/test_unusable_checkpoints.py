"""Unreadable checkpoints are not deleted, and a run with checkpoints never starts from zero unless told to."""

import errno
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemctl import durable
from gemctl.checkpoint.retention import prune, remove_half_written, surely_dead
from gemctl.cli import main
from gemctl.config.schema import RecoverConfig
from gemctl.errors import InputError
from gemctl.recover.context import Prepared
from gemctl.recover.supervisor import run_attempts
from gemctl.report.status import status
from gemctl.run import manifest
from gemctl.run.attempt import Attempt, Base, claim
from gemctl.run.base import from_scratch, newest_verified
from gemctl.run.checkpoints import unusable
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, or_unreadable
from gemctl.run.manifest import checkpoints
from tests.support.saved_run import words as words_of
from tests.support.small_run import publish_step

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "PAUSES", (0.0, 0.0))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Attempt 1 has saved steps 2 and 4 and has ended."""
    made = RunDir.create(str(tmp_path), "saved", ["test"])
    saved(attempt(made, 1, Base(None, 0)), made, 2, 4)
    made.attempt(1).write_end("failed")
    return made


def attempt(run: RunDir, number: int, base: Base) -> Attempt:
    made = claim(run.path, number, nodes=1, ranks_per_node=1, heartbeat=0.01)
    made.write_base(base)
    return made


def saved(attempt: Attempt, run: RunDir, *steps: int) -> None:
    """Checkpoints at `steps`, as left by saves."""
    log = JsonLog(attempt.saves)
    for step in steps:
        publish_step(run, attempt.number, step)
        log.write({"event": "saved", "step": step})
    log.close()


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def newer_format(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))


def refused(monkeypatch: pytest.MonkeyPatch, path: Path, number: int, times: int = 1 << 30) -> list[int]:
    """From now on reading `path` fails `times` times; counts the reads."""
    count = [0]
    system: dict[str, Any] = {"open": os.open, "lstat": Path.lstat}

    def refuse(name: str, asked: Path, *rest: Any, **how: Any) -> Any:
        if asked == path:
            count[0] += 1
            if count[0] <= times:
                raise OSError(number, os.strerror(number), str(path))
        return system[name](asked, *rest, **how)

    monkeypatch.setattr(os, "open", functools.partial(refuse, "open"))
    monkeypatch.setattr(Path, "lstat", lambda asked: refuse("lstat", asked))
    return count


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["manifest.json", "data"])
def test_what_the_system_refuses_to_read_is_neither_passed_over_nor_deleted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    path = run.checkpoints / "step_4.a1" / name
    count = refused(monkeypatch, path, number)
    with pytest.raises(InputError) as error:
        newest_verified(run)
    said = str(error.value)
    assert f"step_4.a1/{name}: {os.strerror(number)}" in said.replace("step_4.a1: ", "step_4.a1/")
    assert "to resume from step 2 without it, move step_4.a1 out of" in said and "--from-scratch" in said
    assert count[0] == (1 if number == errno.EACCES else 3), "only what may pass is tried again"
    own = attempt(run, 2, Base("step_2.a1", 2))
    saved(own, run, 3, 6)
    prune(run, own, 1)
    assert names(run) == ["step_4.a1", "step_6.a2"]


def test_a_transient_error_is_tried_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch, run.checkpoints / "step_4.a1/manifest.json", errno.ESTALE, times=2)
    choice = newest_verified(run)
    assert choice.checkpoint is not None and (choice.checkpoint.step, choice.passed_over) == (4, [])


def test_a_newer_format_stops_the_run_and_stays(run: RunDir) -> None:
    newer_format(run.checkpoints / "step_4.a1")
    with pytest.raises(InputError, match="format 2 is newer than this gemctl reads"):
        newest_verified(run)
    own = attempt(run, 2, Base("step_2.a1", 2))
    saved(own, run, 3, 6)
    assert [path.name for path in prune(run, own, 1)] == ["step_3.a2", "step_2.a1"]
    assert names(run) == ["step_4.a1", "step_6.a2"]


def test_what_is_unreadable_takes_no_place_of_those_that_are_kept(run: RunDir) -> None:
    newer_format(run.checkpoints / "step_4.a1")
    saved(run.attempt(1), run, 6)
    assert prune(run, run.attempt(1), 2) == []
    assert names(run) == ["step_2.a1", "step_4.a1", "step_6.a1"]


def test_the_older_one_that_could_be_taken_is_named(run: RunDir) -> None:
    saved(run.attempt(1), run, 6)
    newer_format(run.checkpoints / "step_6.a1")
    with pytest.raises(InputError, match=r"to resume from step 4 without it, move step_6\.a1 out of"):
        newest_verified(run)


def test_declining_all_that_is_whole_is_no_start_from_zero(run: RunDir) -> None:
    """As after roll-backs from each of them."""
    with pytest.raises(InputError, match=r"step_2\.a1: was not finite"):
        newest_verified(run, declined=lambda found: "was not finite")
    choice = newest_verified(run, declined=lambda found: "was not finite" if found.step == 4 else None)
    assert choice.checkpoint is not None and choice.checkpoint.step == 2
    assert choice.left_alone == [], "it is whole, so that retention may have it once it is void"


def test_from_scratch_leaves_alone_what_was_published_and_says_why(run: RunDir) -> None:
    newer_format(run.checkpoints / "step_4.a1")
    (run.checkpoints / "step_5.a1").mkdir()
    choice = from_scratch(run)
    assert choice.left_alone == ["step_4.a1", "step_2.a1"]
    assert "format 2 is newer" in choice.passed_over[0]
    assert choice.passed_over[1] == f"{run.checkpoints}/step_2.a1: left alone, as step 0 was asked for"
    _empty(run)
    assert from_scratch(run).left_alone == []


def test_a_damaged_one_is_passed_over_and_kept(run: RunDir) -> None:
    (run.checkpoints / "step_4.a1/data").unlink()
    choice = newest_verified(run)
    assert choice.checkpoint is not None and choice.checkpoint.step == 2
    assert choice.passed_over == [f"{run.checkpoints}/step_4.a1/data: is missing"]
    own = attempt(run, 2, Base("step_2.a1", 2, left_alone=choice.left_alone))
    saved(own, run, 6)
    (run.checkpoints / "step_4.a1/data").write_text("step 4")  # restored too late
    prune(run, own, 1)
    assert names(run) == ["step_4.a1", "step_6.a2"]


def test_what_a_takeover_made_void_goes_once_a_newer_one_is_complete(run: RunDir) -> None:
    own = attempt(run, 2, Base("step_2.a1", 2))
    assert remove_half_written(run, own) == []
    assert names(run) == ["step_2.a1", "step_4.a1"]
    saved(own, run, 3)
    assert [path.name for path in prune(run, own, 3)] == ["step_4.a1"]


def test_a_manifest_that_is_lost_is_damage_and_no_unfinished_save(run: RunDir) -> None:
    (run.checkpoints / "step_4.a1/manifest.json").unlink()
    (run.checkpoints / "step_5.a1").mkdir()
    found = {one.path.name: one.state for one in checkpoints(run)}
    assert found == {"step_5.a1": "unfinished", "step_4.a1": "damaged", "step_2.a1": "valid"}
    own = attempt(run, 2, Base("step_2.a1", 2, left_alone=["step_4.a1"]))
    assert [path.name for path in remove_half_written(run, own)] == ["step_5.a1"]
    assert names(run) == ["step_2.a1", "step_4.a1"]


def test_nothing_goes_before_the_owner_has_completed_a_checkpoint(run: RunDir) -> None:
    own = attempt(run, 2, Base("step_2.a1", 2))
    assert prune(run, own, 1) == []
    assert names(run) == ["step_2.a1", "step_4.a1"]


def test_half_written_ones_stay_while_their_attempt_may_live(run: RunDir) -> None:
    second = attempt(run, 2, Base("step_4.a1", 4))  # claimed by this process
    (run.checkpoints / "step_6.a2").mkdir()
    third = attempt(run, 3, Base("step_4.a1", 4))
    assert remove_half_written(run, third) == []
    second.claim_file.write_text("{")
    assert remove_half_written(run, third) == [], "who it was cannot be read"
    second.write_end("killed")
    assert [path.name for path in remove_half_written(run, third)] == ["step_6.a2"]


def test_only_an_end_or_processes_that_are_gone_prove_death(run: RunDir) -> None:
    second = attempt(run, 2, Base("step_4.a1", 4))
    assert surely_dead(run.attempt(1)) and not surely_dead(second)

    def claimed(**facts: object) -> bool:
        written = {**json.loads(second.claim_file.read_text()), **facts}
        second.claim_file.unlink()
        second.claim_file.write_text(json.dumps(written))
        return surely_dead(Attempt(second.path))  # rereads its files

    gone = 1 << 22  # above every pid
    assert claimed(pid=gone)
    assert not claimed(host="elsewhere")
    assert claimed(host=socket.gethostname())
    assert not claimed(nodes=2)
    assert claimed(nodes=1)
    log = JsonLog(second.agent_log(0))
    log.write({"event": "rank", "rank": 0, "pid": os.getpid()})
    log.close()
    assert not surely_dead(Attempt(second.path)), "one of its ranks lives"
    second.claim_file.unlink()
    assert not surely_dead(Attempt(second.path)), "nobody knows whose it is"


def test_a_deletion_that_was_cut_short_is_finished_and_was_no_damage(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    assert [path.name for path in prune(run, run.attempt(1), 1)] == ["step_2.a1"]
    assert names(run) == ["step_2.a1.deleted", "step_4.a1"]
    assert [(Path(one.path).name, one.reasons) for one in unusable(run)] == [
        ("step_2.a1.deleted", ["its deletion was interrupted"])
    ]
    assert [one.path.name for one in checkpoints(run)] == ["step_4.a1"]
    monkeypatch.undo()
    remove_half_written(run, run.attempt(1))
    assert names(run) == ["step_4.a1"]


def _gone(run: RunDir) -> None:
    run.checkpoints.rename(run.path / "elsewhere")


def _empty(run: RunDir) -> None:
    _gone(run)
    run.checkpoints.mkdir()


def _unmounted(run: RunDir) -> None:
    _gone(run)
    run.checkpoints.symlink_to(run.path / "disk")


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (_gone, "step_4.a1: does not exist, though"),
        (_empty, "step_4.a1: does not exist, though"),
        (_unmounted, "disk, which is not there (is its disk mounted?)"),
    ],
)
def test_a_run_whose_records_know_of_checkpoints_does_not_start_from_zero(
    run: RunDir, lose: Callable[[RunDir], None], said: str
) -> None:
    lose(run)
    with pytest.raises(InputError) as error:
        newest_verified(run)
    assert said in str(error.value)
    assert said in (status(run).unusable or "")


def test_a_run_without_any_checkpoint_starts_from_zero(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path), "new", ["test"])
    attempt(run, 1, Base(None, 0))
    (run.checkpoints / "step_2.a1").mkdir()
    choice = newest_verified(run)
    assert (choice.checkpoint, choice.left_alone) == (None, [])
    assert choice.passed_over == [f"{run.checkpoints}/step_2.a1: unfinished: it has no manifest.json"]


def test_a_wrong_hash_is_believed_at_the_second_look(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    real, wrong = manifest.describe_file, [1]

    def once(path: Path) -> manifest.StoredFile:
        found = real(path)
        if wrong:
            wrong.pop()
            return manifest.StoredFile(found.bytes, "0" * 64)
        return found

    monkeypatch.setattr(manifest, "describe_file", once)
    choice = newest_verified(run)
    assert choice.checkpoint is not None and choice.checkpoint.step == 4 and wrong == []


def test_a_dangling_link_is_not_an_absent_file(tmp_path: Path) -> None:
    link = tmp_path / "shard"
    with pytest.raises(FileNotFoundError):
        or_unreadable(link, link.read_bytes)
    link.symlink_to(tmp_path / "disk/shard")
    with pytest.raises(InputError, match="is its disk mounted"):
        or_unreadable(link, link.read_bytes)


class NoAgents:
    """Agents that start and do nothing."""

    def __init__(self) -> None:
        self.submitted: list[int] = []

    def start(self, attempt: Attempt) -> None:
        pass

    def submit(self, attempt: Attempt) -> None:
        self.submitted.append(attempt.number)
        raise KeyboardInterrupt  # nothing more to test

    def ended(self) -> dict[int, str]:
        return {}

    def kill(self) -> list[int]:
        return []


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def follow(self, attempt: Attempt) -> None:
        pass


def supervised(run: RunDir, base: Base | None = None) -> Notes:
    """Runs the next attempt up to the point where its agents start."""
    number, notes = len(run.attempts()) + 1, Notes()
    prepared = Prepared("{}", "{}", 1, 1, first=number, base=base)
    with pytest.raises(KeyboardInterrupt):
        run_attempts(run, number, prepared, RecoverConfig(), NoAgents(), notes)
    return notes


def test_the_supervisor_ends_the_run_rather_than_start_it_from_zero(run: RunDir) -> None:
    for step in (2, 4):
        (run.checkpoints / f"step_{step}.a1/data").unlink()
    with pytest.raises(InputError) as error:
        run_attempts(run, 2, Prepared("{}", "{}", 1, 1, first=2), RecoverConfig(), NoAgents(), Notes())
    assert error.value.exit_code == 2
    assert "step_4.a1/data: is missing" in str(error.value) and "step_2.a1/data: is missing" in str(error.value)
    assert str(error.value).startswith(f"run {run.run_id} has published checkpoints, and none of them can be used:\n")
    assert str(error.value).count("gemctl resume") == 1 and "--from-scratch" in str(error.value)
    end = run.attempt(2).end()
    assert end is not None and (end["outcome"], end["again"], end["cause"]["kind"]) == ("failed", False, "checkpoint")
    assert not run.attempt(2).base_file.exists(), "so it makes no checkpoint void"
    assert names(run) == ["step_2.a1", "step_4.a1"]


def test_told_so_the_supervisor_starts_from_zero_and_all_stays(run: RunDir) -> None:
    newer_format(run.checkpoints / "step_4.a1")
    choice = from_scratch(run)
    assert choice.left_alone == ["step_4.a1", "step_2.a1"]
    supervised(run, Base(None, 0, left_alone=choice.left_alone))
    assert run.attempt(2).base() == Base(None, 0, [], ["step_2.a1", "step_4.a1"])
    supervised(run)  # the next attempt needs no confirmation
    assert run.attempt(3).base() == Base(None, 0)
    saved(run.attempt(3), run, 1, 5)
    prune(run, run.attempt(3), 1)
    assert names(run) == ["step_2.a1", "step_4.a1", "step_5.a3"]


def test_an_attempt_that_died_before_its_base_leaves_the_order_to_the_next(run: RunDir) -> None:
    newer_format(run.checkpoints / "step_4.a1")
    told = Base(None, 0, left_alone=["step_4.a1", "step_2.a1"])
    claim(run.path, 2, nodes=1, ranks_per_node=1, heartbeat=0.01)
    prepared = Prepared("{}", "{}", 1, 1, first=2, base=told)
    with pytest.raises(KeyboardInterrupt):
        run_attempts(run, 3, prepared, RecoverConfig(), NoAgents(), Notes())
    assert run.attempt(3).base().checkpoint is None


def test_the_supervisor_falls_back_from_damage_and_says_so(run: RunDir) -> None:
    (run.checkpoints / "step_4.a1/data").write_text("cut")
    notes = supervised(run)
    assert run.attempt(2).base() == Base("step_2.a1", 2, [], ["step_4.a1"])
    assert any("step_4.a1/data: 3 bytes, its manifest says 6" in note for note in notes.notes)


def test_status_list_and_eval_say_that_the_newest_cannot_be_used(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    newer_format(run.checkpoints / "step_4.a1")
    found = status(run)
    assert found.checkpoint == "step_2.a1" and "format 2 is newer" in (found.unusable or "")
    for words in (
        ["eval", str(run.path)],
        ["eval", str(run.path), "--checkpoint", "4"],
        ["checkpoint", "export", str(run.path), str(run.path.parents[2] / "out")],
    ):
        assert main(words) == 2
        assert "format 2 is newer" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run.path)]) == 1
    said = capsys.readouterr().out
    assert "step_4.a1: not usable\n" in said and "step_2.a1: intact" in said
    newer_format(run.checkpoints / "step_2.a1")
    assert main(["list", "--root", str(run.path.parent.parent)]) == 0
    assert "unusable" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_of_another_format_goes_on_only_when_told_and_loses_nothing(tmp_path: Path) -> None:
    """With the real commands: refused, then from scratch; what remains is only deleted by prune."""
    small = ["launcher.ranks_per_node=1", "topology.dp_replicate=1", "topology.dp_shard=1", "checkpoint.keep=1"]

    def gemctl(*command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "gemctl", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    job = [word for word in words_of(tmp_path) if not word.startswith("train.steps=")]
    done = gemctl("train", *job, *small, "train.steps=2")
    assert done.returncode == 0, done.stderr
    made = RunDir(next(tmp_path.glob("runs/saved/*")))
    newer_format(made.checkpoints / "step_2.a1")
    refused = gemctl("resume", str(made.path), "train.steps=3")
    assert refused.returncode == 2 and refused.stderr.count("error:") == 1, refused.stderr
    assert "format 2 is newer" in refused.stderr and "--from-scratch" in refused.stderr
    assert len(made.attempts()) == 1 and names(made) == ["step_2.a1"]
    done = gemctl("resume", str(made.path), "train.steps=3", "--from-scratch")
    assert done.returncode == 0, done.stderr
    assert names(made) == ["step_2.a1", "step_3.a2"]
    assert gemctl("checkpoint", "prune", str(made.path), "--unusable").returncode == 0
    assert names(made) == ["step_3.a2"]


def test_pruning_the_unusable_says_what_and_why_and_only_then_deletes(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    newer_format(run.checkpoints / "step_4.a1")
    saved(run.attempt(1), run, 6, 8)
    (run.checkpoints / "step_6.a1/data").write_text("STEP 6")
    (run.checkpoints / "step_9.a1").mkdir()
    words = ["checkpoint", "prune", str(run.path), "--unusable"]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("would delete:\n") and "step_8.a1" not in said and "step_2.a1" not in said
    for reason in ("format 2 is newer", "step_6.a1/data: damaged", "unfinished: it has no manifest.json"):
        assert reason in said
    assert len(names(run)) == 5 == len(unusable(run)) + 2
    assert main(words) == 0
    assert names(run) == ["step_2.a1", "step_8.a1"]
    assert main(words) == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert main(words[:-1]) == 2, "--unusable has to be said"


def test_pruning_is_refused_while_an_attempt_may_live(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(run, 2, Base("step_4.a1", 4))
    newer_format(run.checkpoints / "step_4.a1")
    monkeypatch.setattr("gemctl.launch.liveness.watch_beat", lambda attempt: 0.1)
    assert main(["checkpoint", "prune", str(run.path), "--unusable"]) == 2
    assert names(run) == ["step_2.a1", "step_4.a1"]
