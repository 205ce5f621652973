"""The command line itself: help, exit codes, unknown words, what gets imported, where output goes."""

import argparse
import errno
import importlib.util
import json
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gemctl import cli
from gemctl.cluster import software
from gemctl.config.compose import compose, to_yaml
from gemctl.errors import DoesNotFit, GemctlError, InputError, Interrupted
from gemctl.reference import EXIT_CODES, reference
from gemctl.render.show import RENDERERS, plain


def python(code: str) -> Any:
    """The JSON that `code` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    heavy = ["torch", "pydantic", "hydra", "omegaconf", "yaml", "rich", "numpy", "pyarrow", "dataclasses"]
    code = (
        "import contextlib, io, json, sys; from gemctl.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out: code = main(['--help'])\n"
        f"print(json.dumps([code, out.getvalue(), [name for name in {heavy} if name in sys.modules]]))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, text, imported = python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (code, imported) == (0, [])
    assert all(name in text for name in cli.COMMANDS)
    # Processor time, so that a busy machine does not count: nothing waits here.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_help_of_a_command_and_a_mistyped_option_import_no_command() -> None:
    heavy = ["torch", "pydantic", "hydra", "omegaconf", "yaml", "rich", "numpy", "pyarrow", "dataclasses"]
    code = (
        "import contextlib, io, json, sys; from gemctl.cli import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "    codes = [[main([name, '--help']), main([name, '--no-such-option'])] for name in COMMANDS]\n"
        f"loaded = [name for name in {heavy} if name in sys.modules]\n"
        "loaded += [name for name in COMMANDS if f'gemctl.commands.{name}' in sys.modules]\n"
        "print(json.dumps([codes, loaded]))"
    )
    codes, loaded = python(code)
    assert ({tuple(pair) for pair in codes}, loaded) == ({(0, 2)}, [])


def test_bad_input_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("train:\n  stepz: 3\n", encoding="utf-8")
    file = str(tmp_path / "my.yaml")
    code = (
        "import contextlib, io, json, sys; from gemctl.cli import main\n"
        "with contextlib.redirect_stderr(io.StringIO()) as err: "
        f"code = main(['train', {file!r}, 'model.dimm=3', 'train.lr=1', 'train.steps=x', 'run.seed=1', 'run.seed=2'])\n"
        "print(json.dumps([code, err.getvalue().splitlines(), [n for n in sys.modules if n.startswith('torch')]]))"
    )
    code, lines, torch = python(code)
    assert (code, torch) == (2, [])
    assert len(lines) == 5
    assert lines[0] == f"error: {file}:2: unknown key 'train.stepz'; did you mean train.steps?"


def test_no_torch_free_module_reaches_torch_on_the_way_to_a_dry_run() -> None:
    code = (
        "import contextlib, io, json, os, sys, tempfile; from gemctl.cli import main\n"
        "os.chdir(tempfile.mkdtemp())\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out: code = main(['train', '--dry-run', '--json'])\n"
        "print(json.dumps([code, json.loads(out.getvalue()), [n for n in sys.modules if n.split('.')[0] == 'torch']]))"
    )
    code, shown, torch = python(code)
    assert (code, torch) == (0, [])
    assert shown["plan"]["topology"]["world_size"] == 4
    (role,) = shown["request"]["roles"]
    assert role["args"][:3] == ["-P", "-m", "gemctl.ranks.agent"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "error: 'trian': unknown command; did you mean train?\n"),
        (["train", "--dryrun"], "error: --dryrun: unknown argument; did you mean --dry-run?\n"),
        (["train", "--config-dri=x"], "error: --config-dri=x: unknown argument; did you mean --config-dir?\n"),
        (["train", "--config-dir"], "error: gemctl train: argument --config-dir: expected one argument"),
        (["train", "--cfg", "--dry-run"], "error: gemctl train: argument --dry-run: not allowed with argument --cfg"),
        (["config", "exprot"], "error: gemctl config: 'exprot': unknown ACTION; did you mean export?\n"),
        (["config"], "error: gemctl config: the following arguments are required: ACTION"),
        (["config", "export", "--ouut", "x"], "error: --ouut: unknown argument; did you mean --out?\n"),
        (["bench", "model", "--run=x"], "error: --run=x: unknown argument\n"),
        (["bench", "layers", "--rnu=x"], "error: --rnu=x: unknown argument; did you mean --run?\n"),
        (["train", "a.yaml", "b.yaml"], "error: a.yaml b.yaml: more than one file"),
        (
            ["eval", "x", "--checkpoint", "abc"],
            "error: gemctl eval: argument --checkpoint: must be an integer, not",
        ),
        (
            ["data", "synth", "--eval-rows", "0"],
            "error: --eval-rows: must be an integer ≥ 1, not 0\n",
        ),
        (["list", "--root", "/nowhere"], "error: --root /nowhere: no such folder"),
        (["resume", ""], "error: RUN '': name a run by its path, its id or a prefix of the id\n"),
        (["train", "nowhere.yaml"], "error: nowhere.yaml: cannot be read: No such file or directory\n"),
    ],
)
def test_wrong_words_exit_2_with_the_nearest_right_one(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(expected)


@pytest.mark.parametrize(("code", "reason"), [(errno.EISDIR, "Is a directory"), (errno.ENOTDIR, "Not a directory")])
def test_what_lies_in_a_files_place_is_named(
    code: int, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(words: list[str]) -> int:
        raise OSError(code, reason, "run/attempts/1/agent-0.jsonl")

    monkeypatch.setattr(cli, "_dispatch", refused)
    assert cli.main(["report", "run"]) == 1
    assert capsys.readouterr().err == f"error: run/attempts/1/agent-0.jsonl: {reason}\n"


def test_options_may_stand_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "train.steps=3", "--cfg", "model.dim=64", "--json", "run.name=x"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == plain(compose(None, ["train.steps=3", "model.dim=64", "run.name=x"]))


def test_cfg_and_export_print_what_composes_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=ml100k", "train.steps=9"]
    assert cli.main(["train", *words, "--cfg"]) == 0
    printed = capsys.readouterr().out
    assert printed == to_yaml(compose(None, words))
    out = tmp_path / "out.yaml"
    assert cli.main(["config", "export", *words, "-o", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == printed
    capsys.readouterr()
    assert cli.main(["config", "export", str(out)]) == 0
    assert capsys.readouterr().out == printed
    assert cli.main(["config", "export", "-o", str(tmp_path / "no/out.yaml")]) == 2


@dataclass
class Value:
    number: float


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (InputError(["a: wrong", "b: wrong too"]), 2, "error: a: wrong\nerror: b: wrong too\n"),
        (GemctlError("rank 1 died"), 1, "error: rank 1 died\n"),
        (DoesNotFit("too large"), 3, "error: too large\n"),
        (Interrupted("stopped"), 130, "stopped\n"),
        (Interrupted("told to end", 143), 143, "told to end\n"),
        (OSError(28, "full", "/x/y"), 1, "error: /x/y: No space left on device\n"),
        (OSError(30, "read-only", "/x/y"), 1, "error: /x/y: Read-only file system\n"),
        (OSError(27, "limit", "/x/y"), 1, "error: /x/y: File too large\n"),
        (OSError(122, "quota", "/x/y"), 1, "error: /x/y: Disk quota exceeded\n"),
    ],
)
def test_exit_codes(
    raised: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise raised

    monkeypatch.setattr("gemctl.commands.config.run", fail)
    assert cli.main(["config", "export"]) == code
    assert capsys.readouterr().err == message
    assert code in EXIT_CODES and str(code) in cli.EPILOG


def test_train_refuses_builds_that_do_not_fit_together_before_it_makes_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = software.Builds("2.13.0+cpu", "cpu", "1.8.0", "cuda", "1.8.0")
    monkeypatch.setattr(software, "builds", lambda: mixed)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "cluster.memory_gb=1000"]) == 1
    assert "FBGEMM 1.8.0 a CUDA build" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: argparse.Namespace) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("gemctl.commands.config.run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["config", "export"])


def test_no_command_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("usage: gemctl")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(importlib.import_module(f"gemctl.commands.{name}").run)
    assert cli.main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: gemctl {name}")
    for leaf in cli.parser_of(name).leaves():
        assert "--json" in leaf.format_help()


def test_every_renderer_and_its_class_exist() -> None:
    for value, render in RENDERERS.items():
        module, name = value.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), name), value
        module, name = render.split(":")
        assert hasattr(importlib.import_module(module), name), render


def test_json_has_no_nan() -> None:
    value = {"a": [Value(float("nan")), Value(1.5)], "b": (Path("x/y"), float("inf")), 3: None}
    assert plain(value) == {"a": [{"number": None}, {"number": 1.5}], "b": ["x/y", None], "3": None}


def test_the_reference_is_up_to_date() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/reference.md"
    assert page.read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_the_reference_says_what_every_key_means() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data", "synth", "FILE/x", "--rows", "10", "--eval-rows", "1"], "FILE/x/train.parquet: cannot be written: "),
        (["config", "export", "-o", "FILE/x"], "-o FILE/x: cannot be written: "),
        (["config", "export", "-o", "FOLDER"], "-o FOLDER: cannot be written: Is a directory"),
        (["train", "--json", "run.root=FILE/x", "data.synthetic.rows=10", "data.synthetic.eval_rows=10",
          "data.train=FOLDER/t", "data.eval=FOLDER/e", "data.spec=FOLDER/s"], "run.root FILE/x: cannot be written: "),
        (["train", "--json", "data.train=FILE/x", "data.eval=null", "data.spec=FOLDER/s2",
          "data.synthetic.rows=10"], "FILE/x: cannot be written: "),
        (["train", "data.train=LONG", "--json", "data.spec=FOLDER/s2", "data.eval=null", "data.synthetic.rows=10"],
         "LONG: cannot be written: File name too long"),
        (["plan", "LONG"], "LONG: neither KEY=VALUE nor a YAML file"),
        (["report", "LONG"], "LONG: no such run"),
    ],
)  # fmt: skip
def test_paths_that_cannot_be_are_one_line(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    names = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path), "LONG": "n" * 300}

    def named(text: str) -> str:
        for name, path in names.items():
            text = text.replace(name, path)
        return text

    assert cli.main([named(word) for word in words]) == 2
    problems = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(problems) == 1 and problems[0].startswith(f"error: {named(expected)}"), problems
    assert not list(tmp_path.glob(".*"))


def test_gpus_that_are_not_there_are_missed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gemctl.launchers.local.find_gpus", lambda: [])
    assert cli.main(["train", "cluster=cuda"]) == 2
    assert "cluster.device=cuda" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_data_commands_replace_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n1\t2\t3\n")
    mine = [tmp_path / name for name in ("train.parquet", "spec.yaml")]
    for path in mine:
        path.write_text("mine")
    expected = [f"error: {path}: exists already; name another folder, or delete it" for path in mine]
    for words in (["synth", str(tmp_path), "--rows", "10"], ["import", str(tmp_path / "tiny.inter"), str(tmp_path)]):
        assert cli.main(["data", *words]) == 2
        assert capsys.readouterr().err.splitlines() == expected
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def test_outputs_replace_no_file_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, report, empty = (tmp_path / name for name in ("mine.yaml", "old.html", "empty"))
    mine.write_text("name: clicks\n")
    report.write_text("<!doctype html><html>")
    empty.touch()
    for words, option in ((["config", "export"], "-o"), (["report", "no-run", "--root", str(tmp_path)], "--html")):
        assert cli.main([*words, option, str(mine)]) == 2
        problem = f"error: {mine}: exists already; give another name with {option}, or delete it\n"
        assert capsys.readouterr().err == problem
    assert mine.read_text() == "name: clicks\n"
    assert cli.main(["config", "export", "-o", str(empty)]) == 0
    assert cli.main(["report", "no-run", "--root", str(tmp_path), "--html", str(report)]) == 2
    assert "no such run" in capsys.readouterr().err, "an older report may be replaced"
