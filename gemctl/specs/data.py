"""What the columns of a data set mean: the feature spec, read from YAML, torch-free.

    gemctl data spec FILE.parquet      # writes a draft spec with a comment per guess

A *table* is one embedding table. Every id feature names its table; features that name the same table share it.
A table that any event sequence uses is looked up unpooled ("sequence"), every other one pooled ("pooled").
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from gemctl.specs.limits import FORBID, INT64_MAX, Positive


@dataclass(frozen=True)
class TableSpec:
    """One embedding table with `rows` rows.

    `ids: vocab`: integers; 0 … rows−2 are rows; every other id is unknown, shares the last row and is counted.
    `ids: hash`: integers or strings, of one kind in all of the table's columns; an id's row is its 64-bit hash modulo
    rows−1; a missing id (null) takes the last row and is counted.
    """

    __pydantic_config__ = FORBID
    name: str
    rows: Annotated[int, Field(ge=2, le=INT64_MAX)]
    ids: Literal["vocab", "hash"] = "vocab"


@dataclass(frozen=True)
class CategoricalSpec:
    """One id per row, or with `multi` a list of ids per row, sum-pooled."""

    __pydantic_config__ = FORBID
    name: str
    table: str
    column: str | None = None  # default: the feature's name
    multi: bool = False


@dataclass(frozen=True)
class DenseSpec:
    """One float per row; `log` applies sign(x)·log(1+|x|). Missing values become 0."""

    __pydantic_config__ = FORBID
    name: str
    column: str | None = None
    log: bool = False


@dataclass(frozen=True)
class EventIdSpec:
    """A list of ids per row, aligned with the other lists of its sequence."""

    __pydantic_config__ = FORBID
    name: str
    table: str
    column: str | None = None


@dataclass(frozen=True)
class SequenceSpec:
    """An event history: aligned lists, oldest event first. Only the last `max_length` events are read."""

    __pydantic_config__ = FORBID
    name: str
    ids: list[EventIdSpec]
    timestamps: str  # list column; the same clock as the spec's `timestamp`
    floats: list[DenseSpec] = field(default_factory=list)
    max_length: Positive = 10_000


@dataclass(frozen=True)
class LabelSpec:
    """A 0/1 label of one task. Rows whose `mask` column is 0 or null, or whose label is null, do not count for it."""

    __pydantic_config__ = FORBID
    name: str
    column: str | None = None
    mask: str | None = None


@dataclass(frozen=True)
class DomainSpec:
    """An integer column 0 … count−1: the domain (surface, market) that a row belongs to."""

    __pydantic_config__ = FORBID
    column: str
    count: Positive


@dataclass(frozen=True)
class FeatureSpec:
    """Columns and roles of one data set. The order of the labels is the order of the tasks everywhere.

    `timestamp`: the row's time; `weight`: its weight in losses and metrics; `true_probability`: the true probability of
    the first label, if it is known, as in synthetic data: reports then show the best possible NE.
    """

    __pydantic_config__ = FORBID
    name: str
    tables: list[TableSpec]
    labels: list[LabelSpec]
    categorical: list[CategoricalSpec] = field(default_factory=list)
    dense: list[DenseSpec] = field(default_factory=list)
    sequences: list[SequenceSpec] = field(default_factory=list)
    timestamp: str | None = None  # row time; needed when there are sequences
    domain: DomainSpec | None = None
    weight: str | None = None
    true_probability: str | None = None  # of the first task, if the generator of the log is known
    format: Literal[1] = 1

    def sequence_tables(self) -> list[str]:
        """Names of the tables that are looked up unpooled, in the spec's order."""
        used = {feature.table for sequence in self.sequences for feature in sequence.ids}
        return [table.name for table in self.tables if table.name in used]

    def pooled_tables(self) -> list[str]:
        """Names of the tables that are looked up pooled, in the spec's order."""
        unpooled = set(self.sequence_tables())
        return [table.name for table in self.tables if table.name not in unpooled]
