"""What an error proposes can be pasted: it is taken, and is what was typed."""

import re
import shlex
from pathlib import Path

import pytest

from gemctl.config.compose import compose
from gemctl.config.keys import all_keys
from gemctl.errors import InputError
from gemctl.specs import feature_spec
from gemctl.specs.json_schema import choices, options

BASE = ["experiment=synthetic"]
PROPOSED = re.compile(r"(?:as a string|as strings|quote it|write|\(a list is):? ((?:[^\s']|'[^']*')+?)\)?$")
OFFERED = re.compile(r"did you mean (.+)\?$")


def problems(*overrides: str, file: str | None = None) -> list[str]:
    try:
        compose(file, [*BASE, *overrides])
    except InputError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.name=1e5", "must be a string that matches {pattern}, not 1e5; as a string: run.name='\"1e5\"'"),
        ("run.name=true", "must be a string that matches {pattern}, not true; as a string: run.name='\"true\"'"),
        ("run.name=0x10_0", None),  # a string as it is
        ("run.name=-5", "must be a string that matches {pattern}, not -5"),
        ("train.nan=false", "must be skip or stop, not false"),
        ("train.nan=Stop", 'must be skip or stop, not "Stop"; did you mean stop?'),
        ("data.order=1e3", "must be time or shuffled, not 1e3"),
        ("topology.dp_shard=TRUE", "must be an integer ≥ 1 or auto, not TRUE"),
        ("data.eval=1_0", "each a non-empty string or null, not 1_0; as a string: data.eval='\"1_0\"'"),
        ("data.train=[a,1e5,'b c']", "as strings: data.train='[\"a\",\"1e5\",\"b c\"]'"),
        ("data.train=a,1", "(a list is data.train='[\"a\",\"1\"]')"),
        ("optim.dense.betas=1,2", "several values: use -m for a sweep over them"),
        ("checkpoint.warm_start={source: 1_0}", "must be a non-empty string, not 1_0; as a string: "
         "checkpoint.warm_start.source='\"1_0\"'"),
        ("topology.tables={user: 1e5}", "must be row_wise, table_wise or table_row_wise, not 1e5"),
        ("run.root=a(1", "quote it: run.root='\"a(1\"'"),
        ("run.root=it's", "quote it: run.root='\"it'\"'\"'s\"'"),
        ("train.steps=a(1", None),
        ("data.train=logs/dt=1", "quote it: data.train='\"logs/dt=1\"'"),
        ("data.train=[logs/dt=1,b.pq]", "quote it: data.train='[\"logs/dt=1\",\"b.pq\"]'"),
        ("+train.steps=3", "keys cannot be added: write train.steps=3"),
        ("optim.dense.betas=0.9,0.99", "(a list is optim.dense.betas='[0.9,0.99]')"),
        ("train.steps=1,2", "several values: use -m for a sweep over them"),
    ],
)  # fmt: skip
def test_a_cure_is_what_was_typed_and_legal(override: str, expected: str | None) -> None:
    found = problems(override)
    if expected is None:
        assert all("quote" not in problem and "as a string" not in problem for problem in found)
        return
    expected = expected.replace("{pattern}", "^[A-Za-z0-9][A-Za-z0-9._-]*$")
    assert len(found) == 1 and found[0].startswith(f"{override}: ") and found[0].endswith(expected), found


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))])
def test_every_cure_for_every_key_is_taken(part: int) -> None:
    """Wrong values of all kinds at every key: what is proposed is parsed as a shell does and must be taken there."""
    cures = 0
    for key, node in list(all_keys().items())[part::4]:
        if any(option.get("type") == "object" for option in options(node)):
            continue
        near = [word[:-1] + "x" for word in choices(node) if isinstance(word, str) and len(word) > 2]
        wrong = ["1e5", "true", "off", "-1", "010", "1.50", "a(1", "it's", "[1e5]", "[a,true]", "1,2", *near]
        for text in [f"{key}={value}" for value in wrong] + [f"+{key}=1"]:
            for problem in problems(text):
                assert len(problem) < 2000 and "…" not in problem, problem
                proposed = [match.group(1)] if (match := PROPOSED.search(problem)) else []
                words = OFFERED.search(problem)
                proposed += [f"{key}={word}" for word in re.split(r", | or ", words.group(1))] if words else []
                for cure in proposed:
                    inside = cure.startswith('"')  # a value in a list, to be put in its place there
                    pasted = text.replace(cure.strip('"'), cure, 1) if inside else shlex.split(cure)[0]
                    if text.startswith("+"):
                        assert pasted == text[1:]
                        continue
                    again = [one for one in problems(pasted) if one.startswith(f"{pasted}: ")]
                    assert again == [], (problem, again)
                    cures += 1
    assert cures > 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run:\n  name: 1e5\n", "my.yaml:2: run.name: must be a string that matches"),
        ("train:\n  nan: off\n", "my.yaml:2: train.nan: must be skip or stop, not off"),
        ("train.nan: off\n", "my.yaml:1: key 'train.nan': in YAML write it nested, as train: {nan: off}"),
    ],
)
def test_a_file_is_quoted_as_it_was_written(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(text)
    (problem,) = problems(file=str(tmp_path / "my.yaml"))
    assert expected in problem and "100000" not in problem and "False" not in problem
    if "1e5" in text:
        assert problem.endswith("not 1e5; as a string: run.name='\"1e5\"'")
        assert problems('run.name="1e5"', file=str(tmp_path / "my.yaml")) == []


def test_a_specs_name_is_quoted_as_it_was_written() -> None:
    with pytest.raises(InputError) as caught:
        feature_spec.parse("{name: s, tables: [], dense: [{name: 1e5}], labels: [{name: off}]}", "s")
    assert caught.value.problems == [
        's:1: labels.0.name: must be a string, not off; as a string: "off"',
        's:1: dense.0.name: must be a string, not 1e5; as a string: "1e5"',
    ]


def test_a_value_that_cannot_be_read_is_not_said_to_be_missing() -> None:
    with pytest.raises(InputError) as caught:
        compose(None, ["experiment=parquet", "data.spec=s.yaml", "data.train=logs/dt=1"])
    assert len(caught.value.problems) == 1


def test_what_is_too_deep_or_too_long_for_the_grammar_is_one_line() -> None:
    for value in ("[" * 1200 + "]" * 1200, "9" * 6000):
        (problem,) = problems(f"train.steps={value}")
        assert problem.startswith("train.steps=") and problem.rpartition("invalid value")[2]
