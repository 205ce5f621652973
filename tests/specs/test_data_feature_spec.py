"""A feature spec is read strictly: every problem at once, with its line and the nearest legal name."""

from pathlib import Path

import pytest

from gemctl.errors import InputError
from gemctl.specs.feature_spec import load, parse

GOOD = """\
name: shop
timestamp: time
tables:
  - {name: item, rows: 100}
  - {name: tag, rows: 10, ids: hash}
categorical:
  - {name: item, table: item}
  - {name: tags, table: tag, multi: true}
sequences:
  - name: clicks
    timestamps: times
    ids: [{name: item, table: item, column: clicked}]
labels:
  - {name: click}
"""


def problems(text: str) -> list[str]:
    with pytest.raises(InputError) as error:
        parse(text, "s.yaml")
    return error.value.problems


def test_a_good_spec_loads(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(GOOD)
    spec = load(tmp_path / "spec.yaml")
    assert [table.name for table in spec.tables] == ["item", "tag"]
    assert (spec.sequence_tables(), spec.pooled_tables()) == (["item"], ["tag"])
    assert spec.sequences[0].max_length == 10_000


def test_schema_problems_come_all_at_once_with_their_lines() -> None:
    text = GOOD.replace("rows: 100", "rows: '100'").replace("multi: true", "mutli: true").replace("name: shop\n", "")
    assert problems(text) == [
        "s.yaml:1: name: this key is required",
        's.yaml:3: tables.0.rows: must be an integer ≥ 2, not "100"',
        "s.yaml:7: categorical.1.mutli: unknown key; did you mean multi?",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("rows: 100", "rows: 1", "tables.0.rows: must be an integer ≥ 2, not 1"),
        ("ids: hash", "ids: hahs", 'tables.1.ids: must be vocab or hash, not "hahs"'),
        ("- {name: click}", "- click", "labels.0: must be a mapping with the keys name, column, mask"),
        ("timestamp: time", "timestamp: 3", "timestamp: must be a string or null, not 3"),
        ("multi: true", "multi: 1", "categorical.1.multi: must be true or false, not 1"),
    ],
)
def test_a_wrong_value_is_told_as_in_the_configuration(old: str, new: str, expected: str) -> None:
    (problem,) = problems(GOOD.replace(old, new))
    assert f": {expected}" in problem


def test_an_unknown_key_at_the_top_offers_the_nearest() -> None:
    assert problems(GOOD + "wieght: w\n") == ["s.yaml:15: wieght: unknown key; did you mean weight?"]


def test_a_key_set_twice_is_refused() -> None:
    assert problems(GOOD + "name: other\n") == ["s.yaml:15: name: given twice, first on line 1"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "name: item, table: item}",
            "name: item, table: itme}",
            "s.yaml:7: categorical.0.table: no table 'itme'; did you mean",
        ),
        ("timestamp: time\n", "", "timestamp: this key is required (the row's time)"),
        ("name: tag, rows: 10", "name: item, rows: 10", "tables.1.name: 'item': a table of this name exists already"),
        ("name: tags, table", "name: item, table", "categorical.1.name: 'item': a feature of this name exists already"),
        ("  - {name: click}", "  - {name: item}", "s.yaml:7: categorical.0: column 'item' is a label's (labels.0)"),
        ("table: tag, multi", "table: item, multi", "can't share table 'item' with a sequence"),
        ("table: tag, multi", "table: item, multi", "s.yaml:5: tables.1: no feature uses table 'tag'"),
        ("  - {name: click}", "  []", "labels: at least one task is needed"),
        ("[{name: item, table: item, column: clicked}]", "[]", "sequences.0.ids: at least one id feature is needed"),
        ("name: tags", "name: a.b", "'.' and '/' are not allowed in names"),
        ("name: clicks", "name: items", "s.yaml:10: sequences.0.name: 'items' is a reserved name in PyTorch"),
        ("name: tag, rows", "name: type, rows", "s.yaml:5: tables.1.name: 'type' is a reserved name in PyTorch"),
    ],
)
def test_cross_checks(old: str, new: str, expected: str) -> None:
    assert GOOD.count(old) == 1
    assert any(expected in problem for problem in problems(GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "s.yaml:1: a feature spec is a mapping"),
        ("a: [", "s.yaml:2: not YAML"),
        ("a: !!int x", "s.yaml:1: a: 'x' is not a valid int"),
        (GOOD + "format: 2\n", "s.yaml:15: format 2: this gemctl reads format 1"),
    ],
)
def test_what_is_no_spec_is_one_clear_problem(text: str, expected: str) -> None:
    found = problems(text)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_sequences_alone_are_refused() -> None:
    start, stop = GOOD.index("categorical:"), GOOD.index("sequences:")
    text = (GOOD[:start] + GOOD[stop:]).replace("  - {name: tag, rows: 10, ids: hash}\n", "")
    assert problems(text) == [
        "s.yaml:1: no feature besides the sequences: name the candidate, say, under categorical, dense or domain"
    ]
    assert parse(text + "domain: {column: surface, count: 2}\n", "s.yaml").domain


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.yaml: the feature spec can't be read"):
        load(tmp_path / "gone.yaml")
