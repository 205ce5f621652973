"""YAML that would take a machine's memory, stack or time is refused with its line, wherever gemctl reads YAML."""

import re
import time
from pathlib import Path

import pytest

from gemctl.config.compose import compose, from_yaml
from gemctl.errors import InputError
from gemctl.specs import feature_spec, yaml_file

LAUGHS = "a: &a [l, l, l, l, l, l, l, l, l, l]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 20)}], own_{name}: 1}}\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MANY = r"more than [\d,]+ values, aliases counted in full"
NESTED = "more than 64 levels of lists and mappings"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LAUGHS, rf"f\.yaml:1: refused: {MANY}"),
        ("x:\n" + "- " * 3000, rf"f\.yaml:2: refused: {NESTED}"),
        ("x: 1\ny: " + "{a: " * 3000, rf"f\.yaml:2: refused: {NESTED}"),
        ("x: " + "[" * 100_000, r"f\.yaml:1: not YAML: exceeded maximum nesting depth"),
        ("x: '" + "x" * yaml_file.MOST_CHARACTERS + "'", r"f\.yaml:1: refused: more than 16,777,216 characters"),
        ("x:\n  rows: 0x" + "f" * 2_000_000, r"f\.yaml:2: x\.rows: a number of 2,000,002 digits"),
        ("rows: " + "9" * 2_000_000, r"f\.yaml:1: rows: a number of 2,000,000 digits"),
        ("rows: 1" + ":10" * 700_000, r"f\.yaml:1: rows: a number of 2,100,001 digits"),
        ("x: 1\nrows: !!int many", r"f\.yaml:2: rows: 'many' is not a valid int"),
        ("rows: !!bool perhaps", r"f\.yaml:1: rows: 'perhaps' is not a valid bool"),
        ("x: 1\n? [a, b]\n: 2", r"f\.yaml:2: \?: a key must be a string: quote it"),
        ("x: {<<: 3}", r"f\.yaml:1: x: << takes a mapping or a list of mappings"),
        ("x: &x [1, *x]", r"f\.yaml:1: x\.1: contains itself"),
    ],
)  # fmt: skip
def test_what_is_too_large_or_no_value_is_refused_with_its_line(text: str, expected: str, tmp_path: Path) -> None:
    start = time.monotonic()
    file = yaml_file.parse(text, "f.yaml")
    assert time.monotonic() - start < 30
    assert len(file.problems) == 1 and re.match(expected, file.problems[0]), file.problems
    (tmp_path / "f.yaml").write_text(text, encoding="utf-8")
    for read in (lambda: feature_spec.parse(text, "f.yaml"), lambda: from_yaml(text, "f.yaml"),
                 lambda: compose(str(tmp_path / "f.yaml"), [])):  # fmt: skip
        with pytest.raises(InputError) as caught:
            read()
        assert all(len(problem) < 1000 for problem in caught.value.problems)


def test_merges_of_merges_stay_small_and_keep_their_meaning() -> None:
    file = yaml_file.parse(MERGES, "f.yaml")
    assert not file.problems
    assert file.data["i"] == {"x": 1, "y": 2} | {f"own_{name}": 1 for name in "bcdefghi"}
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], x: 5}\nd: &d {<<: *d, v: 6}"
    data = yaml_file.parse(text, "f.yaml").data
    assert (data["c"], data["d"]) == ({"x": 5, "y": 2, "z": 4}, {"v": 6})


@pytest.fixture(autouse=True)
def fewer_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests reach the limit sooner."""
    monkeypatch.setattr(yaml_file, "MOST_VALUES", 20_000)


def test_hydra_is_given_no_file_that_it_would_expand(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mine.yaml").write_text(LAUGHS)
    (folder / "other.yaml").write_text("order: time\n")
    with pytest.raises(InputError) as caught:
        compose(None, ["data=other"], str(tmp_path))
    (problem,) = caught.value.problems
    assert re.fullmatch(rf"{folder}/mine\.yaml:1: refused: {MANY}", problem)


def test_references_that_double_each_other_are_refused(tmp_path: Path) -> None:
    """2^40 characters out of 41 lines; loops are told as before."""
    lines = ["ten letters", *(f"${{checkpoint.warm_start.include.{index}}}" * 2 for index in range(40))]
    text = "checkpoint:\n  warm_start:\n    source: a\n    include:\n" + "".join(f'    - "{line}"\n' for line in lines)
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        compose(str(tmp_path / "my.yaml"), ["experiment=synthetic"])
    (problem,) = caught.value.problems
    expected = r"my\.yaml:\d+: checkpoint\.warm_start\.include.*in \$\{…\}: resolves to more than 16,384"
    assert re.search(expected, problem)
    with pytest.raises(InputError, match="refers to itself"):
        compose(None, ["experiment=synthetic", "run.name=${run.root}", "run.root=${run.name}"])


SPEC = """
{name: s, tables: [{name: u, rows: 5}], domain: {column: d, count: 3}, timestamp: time, labels: [{name: y}],
 sequences: [{name: h, timestamps: t, max_length: 9, ids: [{name: i, table: u}]}]}
"""


@pytest.mark.parametrize(("key", "given"), [("rows", 5), ("count", 3), ("max_length", 9)])
def test_integers_of_a_spec_stay_below_2_to_the_63(key: str, given: int) -> None:
    feature_spec.parse(SPEC.replace(f"{key}: {given}", f"{key}: {2**63 - 1}"), "s")
    for wrong in (2**63, 2**64, 10**300):
        text = SPEC.replace(f"{key}: {given}", f"{key}: {wrong}")
        with pytest.raises(InputError, match=rf"{key}: must be an integer ≥ \d below 2\^63, not {str(wrong)[:50]}"):
            feature_spec.parse(text, "s")


def test_a_string_of_any_characters_is_written_as_it_is_read() -> None:
    texts = [
        "1e5", "1_000", "yes", "null", "~", "", "a b", "日本", "\n", "\r", "\t", "\x85", "\u2028", "\ufeff", "\x7f",
        "\x00", "😀", "\U000e0001", "\xa0", "'", '"', "\\", "\\n", "#", "a: b", "- a", "%", "@", "=", "<<", "²", "-",
        "-1", ".5", "0b1",
    ]  # fmt: skip
    for text in texts:
        written = feature_spec.scalar(text)
        file = yaml_file.parse(f"{{k: {written}, l: [{written}]}}", "s")
        assert file.data == {"k": text, "l": [text]}, (text, file.problems)
        assert len(written.splitlines()) == 1
