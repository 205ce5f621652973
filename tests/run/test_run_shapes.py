"""Damaged files of a run: whatever their values are, a command says which file and key is wrong, or does its work."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemctl.cli import main
from gemctl.errors import InputError
from gemctl.run.attempt import Attempt, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, read_json, read_log
from gemctl.run.shapes import problems

WRONG: list[Any] = [3, -1, 10**30, 1e300, "x", "", [], [1], {}, {"a": 1}, None, True, [None], ["x"], float("nan")]
STEPS = 3


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("end.json", {"outcome": 3}, "outcome=3: must be one of failed, finished, killed, preempted, stopped"),
        ("end.json", {"step": "three"}, "step='three': must be an integer or null"),
        ("end.json", {"step": True}, "step=True: must be an integer or null"),
        ("end.json", {"cause": {"lines": "x"}}, "cause.lines='x': must be a list"),
        ("end.json", {"time": 1e300}, "time=1e+300: must be a time"),
        ("end.json", {"saved": 10**30}, f"saved={10**30}: must be an integer"),
        ("claim.json", {"heartbeat": float("nan")}, "heartbeat=nan: must be a number"),
        ("base.json", {"passed_over": [1, "2"]}, "passed_over[1]='2': must be an integer"),
        ("run.json", {"git": {"commit": 3, "changed": True}}, "git.commit=3: must be a string or null"),
        ("run.json", {"versions": {"torch": 2}}, "versions.torch=2: must be a string"),
        ("run.json", {"git": 3}, "git=3: must be an object or null"),
        ("plan.json", {"classes": {"listed": 3}}, "classes.listed=3: must be a list"),
        ("inputs.json", {"train": [{"files": []}]}, "train[0].files=[]: must be a list that is not empty"),
        ("ledger.jsonl", {"parts": {"log": [1, 2]}}, "parts.log=[1, 2]: must be a list of 4"),
        ("ledger.jsonl", {"traffic": {"sent": [["a", "b", "c", 1]]}}, "traffic.sent[0][2]='c': must be a number"),
        ("ledger.jsonl", {"traffic": {"sent": [["a"]]}}, "traffic.sent[0]=['a']: must be a list of 4"),
        ("requests/1.json", {"kind": None}, "kind=None: must be a string"),
        ("ranks/0.jsonl", {"stage": 3}, "stage=3: must be a string"),
        ("agent-0.jsonl", {"pid": "1"}, "pid='1': must be an integer"),
    ],
)
def test_value_of_another_type_is_named(name: str, value: dict[str, Any], told: str) -> None:
    assert problems("FILE", Path(name), value) == [f"FILE: {told}"]


def test_long_values_are_shortened() -> None:
    (told,) = problems("FILE", Path("end.json"), {"step": "x" * 1000})
    assert len(told) < 120


def test_all_problems_of_a_file_are_told_and_other_keys_are_let_be(tmp_path: Path) -> None:
    (tmp_path / "end.json").write_text('{"format": 1, "step": "a", "saved": "b", "time": 0, "later": {"x": 1}}')
    with pytest.raises(InputError) as caught:
        read_json(tmp_path / "end.json")
    assert sorted(caught.value.problems) == [
        f"{tmp_path}/end.json: saved='b': must be an integer",
        f"{tmp_path}/end.json: step='a': must be an integer or null",
    ]


def test_line_of_a_log_is_named(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "metrics.jsonl")
    log.write({"kind": "train", "step": 1})
    log.write({"kind": "train", "step": [2]})
    with pytest.raises(InputError, match=r"metrics.jsonl:2: step=\[2\]: must be an integer"):
        read_log(tmp_path / "metrics.jsonl")


def test_what_gemctl_writes_itself_is_read(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path), "name", ["gemctl", "train"])
    attempt: Attempt = claim(run.path, 1, nodes=1, ranks_per_node=2, heartbeat=1.0)
    attempt.write_end("failed", step=None, saved=0, kind=None, again=False, refusal=None)
    end = attempt.end()
    assert end is not None and end["outcome"] == "failed"
    assert run.info()["name"] == "name" and attempt.claim().nodes == 1


# ---- every key of every file of a real run


def _keys(value: Any, key: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of an object all keys, nested ones too; of a list those of its first item."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, item in items:
        yield (*key, name)
        yield from _keys(item, (*key, name))


def _damaged(line: str, key: tuple[Any, ...], dice: random.Random) -> str:
    """The line with one key of a wrong type, without it, or with another one beside it."""
    value = json.loads(line)
    holder = value
    for name in key[:-1]:
        holder = holder[name]
    match dice.randrange(len(WRONG) + 2):
        case 0:
            del holder[key[-1]]
        case 1 if isinstance(holder, dict):
            holder["another"] = 3
        case which:
            holder[key[-1]] = WRONG[which - 2]
    return json.dumps(value)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_damage_of_a_finished_run_is_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = [
        "data.synthetic.users=50", "data.synthetic.items=200", "data.synthetic.rows=3000",
        "data.synthetic.eval_rows=50", "train.global_batch=16", f"train.steps={STEPS}", "train.log_every=1",
        "model.dim=8", "launcher.ranks_per_node=1",
        "topology.dp_replicate=1", "topology.dp_shard=1",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "gemctl", "train", *job], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").glob("*/*")
    commands = [
        ["list", "--root", str(tmp_path / "runs")], ["status", str(run)], ["report", str(run)], ["logs", str(run)],
        ["resume", str(run), f"train.steps={2 * STEPS}", "--dry-run"],
    ]  # fmt: skip
    dice, refused, tried = random.Random(0), 0, 0
    for file in sorted(path for path in run.rglob("*.json*") if "checkpoints" not in path.parts):
        text = file.read_text(encoding="utf-8")
        lines = text.splitlines() if file.suffix == ".jsonl" else [text]
        first = {
            (json.loads(line).get("event"), key): at for at, line in enumerate(lines) for key in _keys(json.loads(line))
        }
        for (_, key), at in first.items():
            damaged = [*lines[:at], _damaged(lines[at], key, dice), *lines[at + 1 :]]
            file.write_text("\n".join(damaged) + "\n", encoding="utf-8")
            for command in dice.sample(commands, 1):
                tried += 1
                try:
                    refused += main(command) != 0
                except Exception as error:
                    raise AssertionError(
                        f"{command[0]}: {file.relative_to(run)}: {key}: {damaged[at][:300]}"
                    ) from error
        file.write_text(text, encoding="utf-8")
        capsys.readouterr()
    assert refused > tried / 20
