"""Reads RecBole's atomic files: tab-separated values with a header of `name:type` cells.

    log = read("ml-100k/")      # ml-100k.inter, and .user and .item if they exist

Types are `token` and `float`, and `token_seq` and `float_seq` (values separated by spaces). The first two token
columns of the `.inter` file are the user and the item; the first column of `.user` and `.item` is their key.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from gemctl.errors import InputError
from gemctl.suggest import did_you_mean

KINDS = ("token", "float", "token_seq", "float_seq")
_TIME_NAMES = ("timestamp", "time", "date")


@dataclass(frozen=True)
class AtomicFile:
    """`columns` by name (tokens and sequences as strings; empty cells are null) and their `kinds`."""

    path: Path
    kinds: dict[str, str]
    columns: dict[str, Any]

    @property
    def key(self) -> str:
        """Name of the first column."""
        return next(iter(self.kinds))


@dataclass(frozen=True)
class RawLog:
    """The files of a data set. `user`, `item` and `time` are columns of `inter`."""

    name: str
    inter: AtomicFile
    user: str
    item: str
    time: str
    users: AtomicFile | None
    items: AtomicFile | None


def read(source: str | Path) -> RawLog:
    """The data set in folder `source` (or whose `.inter` file is `source`). Raises InputError with all problems."""
    inter_path = _find(Path(source))
    user, item, time = _roles(inter_path)
    inter = _read_file(inter_path)
    problems = [
        f"{inter_path}: column {name!r}: {inter.columns[name].null_count} empty cells; every row needs a value"
        for name in (user, item, time)
        if inter.columns[name].null_count
    ]
    if odd := np.count_nonzero(~np.isfinite(inter.columns[time].drop_null().to_numpy(zero_copy_only=False))):
        problems.append(f"{inter_path}: column {time!r}: {odd} times are not finite numbers")
    users, items = (_side_file(inter_path, suffix) for suffix in (".user", ".item"))
    for side in (users, items):
        if side is not None and len(pc.unique(side.columns[side.key])) < len(side.columns[side.key]):
            problems.append(f"{side.path}: column {side.key!r}: two lines have the same {side.key!r}")
    if problems:
        raise InputError(problems)
    return RawLog(inter_path.stem, inter, user, item, time, users, items)


def _roles(inter: Path) -> tuple[str, str, str]:
    """Names of the user, item and time columns."""
    kinds = _header(inter)
    tokens = [name for name, kind in kinds.items() if kind == "token"]
    times = [name for name in _TIME_NAMES if kinds.get(name) == "float"]
    problems = []
    if len(tokens) < 2:
        problems.append(f"{inter}:1: needs two token columns, the user and the item; has {', '.join(tokens) or 'none'}")
    if not times:
        has = ", ".join(f"{name}:{kind}" for name, kind in kinds.items())
        problems.append(f"{inter}:1: no column timestamp:float, time:float or date:float; has {has}")
    if problems:
        raise InputError(problems)
    return tokens[0], tokens[1], times[0]


def numbers(column: Any) -> np.ndarray | None:
    """A token column as float64 (null → NaN) if all its values are numbers, else None."""
    try:
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        return None


def _find(source: Path) -> Path:
    if source.suffix == ".inter" and source.is_file():
        return source
    if not source.is_dir():
        raise InputError(f"{source}: no such folder (expected a folder with one *.inter file, or the file itself)")
    found = sorted(source.glob("*.inter"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise InputError(f"{source}: expected one *.inter file (RecBole atomic files), found: {names}")
    return found[0]


def _side_file(inter: Path, suffix: str) -> AtomicFile | None:
    path = inter.with_suffix(suffix)
    return _read_file(path) if path.is_file() else None


def _read_file(path: Path) -> AtomicFile:
    kinds = _header(path)
    types = {name: pa.float64() if kind == "float" else pa.string() for name, kind in kinds.items()}
    try:
        table = csv.read_csv(
            path,
            csv.ReadOptions(column_names=list(kinds), skip_rows=1),
            csv.ParseOptions(delimiter="\t", quote_char=False),
            csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""]),
        )
    except pa.ArrowInvalid as error:
        raise InputError(_first_fault(path, kinds) or f"{path}: {error}") from error
    if table.num_rows == 0:
        raise InputError(f"{path}: no rows")
    return AtomicFile(path, kinds, {name: table[name].combine_chunks() for name in kinds})


def _first_fault(path: Path, kinds: dict[str, str]) -> str | None:
    """A message about the first malformed line, if it can be found."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for number, line in enumerate(file, 1):
            cells = line.rstrip("\r\n").split("\t")
            if number == 1 or cells == [""]:
                continue
            if len(cells) != len(kinds):
                return f"{path}:{number}: {len(cells)} cells, but the header has {len(kinds)}"
            for (name, kind), cell in zip(kinds.items(), cells, strict=True):
                if kind == "float" and cell and not _is_number(cell):
                    return f"{path}:{number}: column {name!r}: {cell!r:.80} is not a number"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # Python allows it between digits


def _header(path: Path) -> dict[str, str]:
    try:
        with path.open(encoding="utf-8") as file:
            cells = file.readline().rstrip("\r\n").split("\t")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text: {error}") from error
    kinds: dict[str, str] = {}
    problems = []
    for cell in cells:
        name, _, kind = cell.partition(":")
        if kind not in KINDS or not name:
            hint = did_you_mean(kind, KINDS) or f" (types: {', '.join(KINDS)})"
            problems.append(f"{path}:1: header cell {cell!r} is not name:type{hint}")
        elif name in kinds:
            problems.append(f"{path}:1: column {name!r} occurs twice")
        kinds[name] = kind
    if problems:
        raise InputError(problems)
    return kinds
