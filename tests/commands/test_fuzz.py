"""Fuzzed command lines: the JSON Schema says valid ⇔ `gemctl train --dry-run` exits 0; else 2, with the edit named.

The generator, its oracle and what they leave out are in tests/commands/command_lines.py.
"""

import contextlib
import io
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from gemctl.cli import main
from gemctl.config.compose import put_all
from gemctl.config.overrides import Setting
from gemctl.specs.yaml_file import dump
from tests.commands.command_lines import CONFIGS, Generator, Line, Schema, one_edit_apart, valid

SPEC = """
name: ml100k
tables: [{name: user, rows: 10}]
categorical: [{name: user, table: user}]
labels: [{name: click}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that data=ml100k names."""
    names = yaml.safe_load((CONFIGS / "data/ml100k.yaml").read_text(encoding="utf-8"))
    (tmp_path / names["spec"]).parent.mkdir(parents=True)
    (tmp_path / names["spec"]).write_text(SPEC, encoding="utf-8")
    for part in ("train", "eval"):
        pq.write_table(pa.table({"user": [1, 2], "click": [0, 1]}), tmp_path / names[part])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(line: Line, shown: str = "--json") -> list[str]:
    """The command line; its FILE.yaml is written to the working directory. JSON is shown faster than tables."""
    words = [word.shown() for word in line.words]
    if line.file:
        data: dict[str, Any] = {}
        put_all(data, [Setting(tuple(key.split(".")), value, "") for key, value in line.file.items()])
        Path("my.yaml").write_text(dump(data), encoding="utf-8")
        words.insert(len(words) // 2, "my.yaml")
    return ["train", *words, "--dry-run", *filter(None, [shown])]


def run(words: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a command line in this process."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        return main(words), errors.getvalue()


def check(line: Line, code: int, errors: str, schema: Schema, seen: Counter[str]) -> None:
    """Asserts what the module's first line says, and counts the kinds of lines."""
    shown = f"{arguments(line)}: exit {code}\n{errors}"
    if valid(line, schema):
        seen["valid"] += 1
        assert code == 0, shown
        return
    assert code == 2, shown
    edit = line.edit
    assert edit is not None, shown
    seen[edit.edited] += 1
    assert edit.shown() in errors, shown
    if edit.edited == "key":
        offers = re.findall(r"did you mean ([^?]*)\?", errors)
        assert len(offers) == 1, shown
        offered = re.split(", | or ", offers[0])
        equally_near = [key for key in [*schema.keys, "experiment"] if one_edit_apart(edit.key, key)]
        seen["ambiguous"] += len(equally_near) > 1
        assert edit.original in (offered if len(equally_near) > 1 else offered[:1]), shown


def fuzz(count: int, seed: int) -> Counter[str]:
    generator = Generator(seed)
    seen: Counter[str] = Counter()
    for number in range(count):
        line = generator.line(edit=number % 2 == 1)
        code, errors = run(arguments(line, shown="--json" if number % 10 else ""))
        check(line, code, errors, generator.schema, seen)
    return seen


def test_the_schema_says_what_is_valid_on_200_lines(folder: Path) -> None:
    assert fuzz(200, seed=1)["valid"] >= 100


@pytest.mark.slow
@pytest.mark.timeout(400)  # 35 s of one free core
def test_the_schema_says_what_is_valid_on_2000_lines(folder: Path) -> None:
    seen = fuzz(2000, seed=2)
    assert seen["valid"] >= 1000
    for kind in ("key", "group", "form", "twice", "choice", "value", "type", "range"):
        assert seen[kind] >= 10, seen
    assert seen["ambiguous"] <= 0.05 * seen["key"], seen


@pytest.mark.slow
def test_as_processes_of_their_own(folder: Path) -> None:
    generator = Generator(seed=3)
    seen: Counter[str] = Counter()
    for number in range(20):
        line = generator.line(edit=number % 2 == 1)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "gemctl", *arguments(line)], capture_output=True, text=True, check=False
        )
        check(line, done.returncode, done.stderr, generator.schema, seen)
    assert 0 < seen["valid"] < 20
