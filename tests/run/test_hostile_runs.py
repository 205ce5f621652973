"""Run directories that somebody made, or damaged, to do harm: told in a line, at once, and without their code."""

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemctl.cli import main
from gemctl.config.compose import from_yaml, to_yaml
from gemctl.durable import open_file
from gemctl.errors import InputError
from gemctl.run.directory import RunDir
from gemctl.run.files import MOST_LINE, LogTail, read_json
from gemctl.specs.interaction import CustomSpec
from tests.support.saved_run import saved_run

LOOKING = [["status"], ["report"], ["logs", "--merged"], ["checkpoint", "list"], ["checkpoint", "verify"]]
FILES = [
    "run.json", "supervisor.jsonl", "attempts/1/claim.json", "attempts/1/base.json", "attempts/1/heartbeat",
    "attempts/1/config.yaml", "attempts/1/metrics.jsonl", "attempts/1/ledger.jsonl", "attempts/1/end.json",
    "attempts/1/ranks/0.jsonl", "attempts/1/logs/rank-0.log", "attempts/1/saves.jsonl", "attempts/1/loaded.json",
    "attempts/1/rolled_back.json", "attempts/1/agent-0.jsonl", "attempts/1/agent-0.log", "requests/1.json",
    "submissions/1/request.json", "checkpoints/step_4.a1/manifest.json", "attempts/1/inputs.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return saved_run(tmp_path_factory.mktemp("hostile"), steps=[2, 4], reached=5)


@pytest.fixture
def run(saved: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(saved.path, tmp_path / "runs" / "gem" / saved.run_id)))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Half a gigabyte more than this process has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)  # of no blocks


def _deep(path: Path) -> None:
    path.write_text('{"format": 1, "a": ' + "[" * 300_000 + "]" * 300_000 + "}\n", encoding="ascii")


def _long_line(path: Path) -> None:
    path.write_bytes(b'{"a": "' + b"x" * (MOST_LINE + 5) + b'"}\n')


SLOWER: list[Callable[[Path], None]] = [_loop, _device, _huge, _deep, _long_line]


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("plant", [_fifo, *(pytest.param(plant, marks=pytest.mark.slow) for plant in SLOWER)])
def test_no_file_makes_a_command_hang_fill_the_memory_or_break(
    run: RunDir, plant: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """With each of the run's files in turn."""
    slow, broken = [], []
    for name in FILES:
        if plant is _huge and name.endswith(".log"):
            continue  # what a process has printed is shown, however much it is
        path = run.path / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        plant(path)
        for words in [*LOOKING, ["list", "--root", str(run.path.parent.parent)]]:
            start = time.monotonic()
            try:
                code = main(words if words[0] == "list" else [*words, str(run.path)])
            except Exception as error:  # what a user would see as a traceback
                broken.append((name, words, repr(error)[:200]))
                continue
            said = capsys.readouterr()
            if code not in {0, 1, 2} or len(said.err) > 5000:
                broken.append((name, words, f"{code}: {said.err[:200]}"))
            if (seconds := time.monotonic() - start) > 5:
                slow.append((name, words, seconds))
        path.unlink()
        if kept is not None:
            path.write_bytes(kept)
        elif path.parent.name in {"1", "submissions"} and path.parent.parent.name == "submissions":
            shutil.rmtree(path.parent)
    assert (broken, slow) == ([], [])


@pytest.mark.parametrize("name", ["attempts/1", "submissions/1"])
def test_a_part_of_a_run_that_is_a_link_is_not_followed(
    run: RunDir, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.path / name
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path)
    assert main(["status", str(run.path)]) == 2
    assert capsys.readouterr().err == f"error: {path}: a symbolic link, where a folder of the run belongs\n"


def test_a_checkpoint_that_is_a_link_does_not_count(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    link = run.checkpoints / "step_9.a1"
    link.symlink_to(run.checkpoints / "step_4.a1")
    assert main(["checkpoint", "list", str(run.path)]) == 0
    _, _, others = capsys.readouterr().out.partition("not usable:")
    assert "step_9.a1  a symbolic link: it is not this run's" in others


def test_a_long_log_is_read_in_parts_and_a_line_that_never_ends_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = b'{"a": "' + b"x" * (MOST_LINE // 3) + b'"}\n'
    log.write_bytes(line * 7)
    tail = LogTail(log)
    assert len(tail.new()) == 7 and tail.new() == []
    with log.open("ab") as file:
        file.write(line + b"y" * (MOST_LINE + 1))
    with pytest.raises(InputError, match=r"log\.jsonl:9: a line of more than 16777216 bytes"):
        tail.new()


def test_a_run_whose_identity_is_cut_is_reported(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "run.json").write_text('{"format": 1, "run', encoding="ascii")
    for words in LOOKING[:3]:
        assert main([*words, str(run.path)]) == 0
        assert run.run_id in capsys.readouterr().out or words[0] == "logs"


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match="not a regular file but a FIFO"):
        read_json(tmp_path / "fifo")
    with pytest.raises(InputError, match="but a device"):
        open_file(Path("/dev/zero"))
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
    (tmp_path / "link").symlink_to(Path(__file__))
    with open_file(tmp_path / "link") as file:
        assert file.read(3) == b'"""'
    with pytest.raises(InputError, match="not a regular file"):
        open_file(tmp_path / "link", follow=False)


def test_modules_that_a_run_names_are_told_before_they_are_imported_and_not_by_looking(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    mark = tmp_path / "mark"
    (tmp_path / "planted_specs.py").write_text(f"open({str(mark)!r}, 'w')\nraise ImportError('planted')\n")
    config = run.attempt(1).config
    named = from_yaml(config.read_text(encoding="utf-8"), "config.yaml")
    named.model.layers[0].interaction = CustomSpec("planted_specs.Gated", {})
    config.write_text(to_yaml(named), encoding="utf-8")
    for words in LOOKING:
        main([*words, str(run.path)])
        assert not mark.exists(), words
    capsys.readouterr()
    assert main(["resume", str(run.path), "--dry-run"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"{run.run_id}: its configuration imports these modules here: planted_specs"
    assert "importing planted_specs raises ImportError" in told[1]
    assert mark.exists() and "planted_specs" not in sys.modules
