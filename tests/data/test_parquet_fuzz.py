"""The reader on random Parquet data sets: the rows of an oracle in plain Python, or a refusal with place and reason.

Play a case again: python -c "from tests.data.test_parquet_fuzz import play; play(SEED)"
"""

import itertools
import json
import tempfile
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from gemctl.config.schema import DataConfig
from gemctl.data.batch import Batch
from gemctl.data.loader import Loader, eval_batches
from gemctl.errors import InputError
from gemctl.plan.job import check_data
from gemctl.specs.data import FeatureSpec
from tests.data import parquet_oracle as oracle
from tests.data.parquet_cases import Case
from tests.data.parquet_oracle import IDS, File, Refusal, Violation, list_item, refusal, rows_of, uses
from tests.data.parquet_types import CLOCKS, INTEGERS, NUMBERS, STRINGS


def play(seed: int, read: set[tuple[frozenset[str], str]] | None = None) -> str:
    """Makes a case, has it read, and compares: "rows", or what it was rightly refused for. `read` gets the kinds that a
    role takes and the type that a column had in it, where the rows came."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(seed, Path(folder))
        try:
            outcome = _play(case, Path(folder))
        except Exception as error:
            raise AssertionError(f"case of seed {seed}: {type(error).__name__}: {error}") from error
    if read is not None and outcome == "rows":
        for file in case.train + case.eval:
            for use in uses(case.spec, case.histories):
                kind = file.table.schema.field(use.column).type
                read.add((frozenset(use.kinds), str((use.many and list_item(kind)) or kind)))
    return outcome


def _play(case: Case, folder: Path) -> str:
    data = DataConfig(
        spec=str(folder / "spec.json"),
        train=str(folder / "train"),
        eval=str(folder / "eval") if case.eval else None,
        histories="keep" if case.histories else "empty",
        window=2,
        prefetch=0,
    )
    (folder / "spec.json").write_text(json.dumps(asdict(case.spec)))
    wanted = refusal(case.spec, case.train + case.eval, case.histories)
    no_rows = [files for files in (case.train, case.eval) if files and not sum(f.table.num_rows for f in files)]
    try:
        check_data(data)
    except InputError as error:
        problems = [problem for problem in error.problems if not problem.endswith(": no rows")]
        assert len(error.problems) - len(problems) <= len(no_rows), problems
        assert bool(problems) == bool(wanted), (problems, wanted)
        if wanted:
            _check_refusal(problems, wanted)
            return "columns"
        return "no rows"
    assert not wanted, wanted
    assert not no_rows
    return _check_rows(case, data)


def _check_refusal(problems: list[str], wanted: Refusal) -> None:
    """Every problem is one that the oracle knows, and every one it knows is said."""
    left = set(wanted.lone)
    groups = dict(enumerate(wanted.groups))
    for problem in problems:
        if " but column " not in problem:
            named = {(path, name) for path, name in wanted.lone if problem.startswith(path) and f" {name!r}" in problem}
            assert named and (" needs " in problem or "needed as" in problem or "rename all but one" in problem), (
                problem,
                wanted,
            )
            left -= named
            continue
        mine, other = problem.split(" but column ", 1)
        known = [
            index
            for index, sorts in enumerate(wanted.groups)
            for sort, columns in sorts.items()
            if any(mine.startswith(path) and f" {name!r}" in mine for path, name in columns)
            and any(
                other.startswith(f"{name!r} of {path} ") or (other.startswith(f"{name!r} is") and mine.startswith(path))
                for group, members in sorts.items()
                if group != sort
                for path, name in members
            )
        ]
        assert known, (problem, wanted)
        for index in known:
            groups.pop(index, None)
    # training data that are refused by themselves are not compared with evaluation data
    assert not left and (not groups or wanted.lone or len(groups) < len(wanted.groups)), (left, groups)


def _check_rows(case: Case, data: DataConfig) -> str:
    """Both data sets as evaluation reads them, and the first one shuffled, as training does."""
    outcomes = set()
    for files, path in ((case.train, data.train), (case.eval, data.eval)):
        if files and path:
            outcomes.add(_check_files(case, files, replace(data, train=path, eval=path)))
    return "values" if "values" in outcomes else "rows"


def _check_files(case: Case, files: list[File], data: DataConfig) -> str:
    rows: list[dict[str, Any]] = []
    rng = np.random.default_rng(case.seed)
    batch = int(rng.choice([1, 7, 1000]))
    for file in files:
        for group, table in enumerate(file.groups()):
            found, violations = rows_of(table, case.spec, case.histories)
            if violations:
                _check_violations(case, data, file, group, rows, violations, batch)
                return "values"
            rows += found
    world = int(rng.choice([1, 2]))
    ranks = [eval_batches(data, case.spec, global_batch=batch, rank=rank, world=world) for rank in range(world)]
    numbers = []
    for parts in zip(*ranks, strict=True):
        for part in parts:
            _check_batch(part, case.spec, [rows[number] for number in part.rows])
            numbers += part.rows.tolist()
    assert numbers == list(range(len(rows)))
    if case.seed % 3 == 0:
        loader = Loader(data, case.spec, global_batch=10, seed=case.seed, rank=0, world=1)
        for _, (_, part) in zip(range(3), loader, strict=False):
            _check_batch(part, case.spec, [rows[number] for number in part.rows])
        loader.close()
    return "rows"


def _check_violations(
    case: Case,
    data: DataConfig,
    file: File,
    group: int,
    before: list[dict[str, Any]],
    violations: list[Violation],
    size: int,
) -> None:
    """What lies before the row group is read; the group itself is refused for just these reasons."""
    batches = eval_batches(data, case.spec, global_batch=size, rank=0, world=1)
    for first in range(0, len(before) // size * size, size):
        _check_batch(next(batches), case.spec, before[first : first + size])
    try:
        next(batches)
    except InputError as error:
        problems = error.problems
    else:
        raise AssertionError(f"not refused: {violations}")
    misaligned = {v.sequence for v in violations if v.reason == "have different lengths"}
    left = [
        v for v in violations if v.sequence not in misaligned or v.reason == "have different lengths" or not v.sequence
    ]
    for problem in problems:
        place, _, text = problem.removeprefix(f"{file.path}: row group {group}, row ").partition(": ")
        match = [v for v in violations if _says(text, v) and place == str(v.row)]
        assert match, (problem, violations)
        left = [v for v in left if v not in match]
    assert not left, (left, problems)


def _says(text: str, violation: Violation) -> bool:
    return violation.column in text and violation.reason in text


def _check_batch(batch: Batch, spec: FeatureSpec, rows: list[dict[str, Any]]) -> None:
    assert len(batch) == len(rows)
    last = {table.name: table.rows - 1 for table in spec.tables}
    unknown = dict.fromkeys(last, 0)

    def check_ids(values: torch.Tensor, offsets: torch.Tensor, wanted: list[list[int]], table: str) -> None:
        assert values.dtype == offsets.dtype == torch.int64
        assert offsets.tolist() == [0, *itertools.accumulate(map(len, wanted))]
        assert values.tolist() == [one for row in wanted for one in row]
        unknown[table] += values.tolist().count(last[table])

    for f in spec.categorical:
        jagged = batch.categorical[f.name]
        check_ids(jagged.values, jagged.offsets, [row[f.name] for row in rows], f.table)
    for s in spec.sequences:
        events, wanted = batch.sequences[s.name], [row["sequences"][s.name] for row in rows]
        for event in s.ids:
            check_ids(events.ids[event.name], events.offsets, [row[event.name] for row in wanted], event.table)
        _check_floats(events.ages, [age for row in wanted for age in row["ages"]])
        for dense in s.floats:
            _check_floats(events.floats[dense.name], [one for row in wanted for one in row[f"float {dense.name}"]])
        assert events.max_length == max((len(row["ages"]) for row in wanted), default=0)
    assert batch.unknown_ids == unknown
    _check_floats(batch.dense.flatten(), [value for row in rows for value in row["dense"]])
    _check_floats(batch.labels.flatten(), [value for row in rows for value, _ in row["labels"]])
    _check_floats(batch.label_mask.flatten(), [counts for row in rows for _, counts in row["labels"]])
    _check_floats(batch.weight, [row["weight"] for row in rows])
    _check_floats(batch.true_probability, [row["true_probability"] for row in rows])
    assert batch.domain.dtype == torch.int64
    assert batch.domain.tolist() == [row["domain"] for row in rows]


def _check_floats(found: torch.Tensor, wanted: list[float]) -> None:
    """Equal but for the rounding of a float32."""
    assert found.dtype == torch.float32
    got, exact = found.double().numpy(), np.array(wanted, np.float64)
    assert got.shape == exact.shape
    same = (np.abs(got - exact) <= 1e-15 + 2e-7 * np.abs(exact)) | (np.isnan(got) & np.isnan(exact))
    assert same.all(), (got[~same], exact[~same])


def test_the_reader_gives_what_plain_python_gives_or_refuses_it_in_100_cases() -> None:
    seen = Counter(play(seed) for seed in range(100))
    assert seen["rows"] >= 50 and seen["columns"] >= 10 and seen["values"] >= 2, seen


@pytest.mark.slow
@pytest.mark.timeout(600)  # 45 s of one free core
def test_the_reader_gives_what_plain_python_gives_or_refuses_it_in_2000_cases() -> None:
    read: set[tuple[frozenset[str], str]] = set()
    seen = Counter(play(seed, read) for seed in range(1000, 3000))
    assert seen["rows"] >= 1100 and seen["columns"] >= 300 and seen["values"] >= 100, seen
    times = [kind for clock in CLOCKS for kind in clock]
    legal = {"vocab": INTEGERS, "hash": INTEGERS + STRINGS, "numbers": NUMBERS, "times": times}
    for role, kinds in {**IDS, "numbers": oracle.NUMBERS, "times": oracle.TIMES}.items():
        assert {str(kind) for kind in [*legal[role], pa.null()]} == {name for roles, name in read if roles == kinds}
