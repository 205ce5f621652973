"""What the plan must know of the rows: how many, in row groups of what size, and how long the lists are on average.

Read from the Parquet footers (no row is read). Where the data is not there yet, histories count as full and a multi-
valued feature as one id: the plan then says that it assumed so.

    gemctl plan experiment=main        # shows the mean lengths and where they come from
"""

from dataclasses import dataclass
from typing import Any

from gemctl.config.schema import DataConfig
from gemctl.data.files import DataPath, find_files, shown
from gemctl.errors import InputError
from gemctl.specs.data import FeatureSpec

ROW_GROUP = 20_000  # rows per group that `gemctl data import` and `synth` write
MAX_FILES = 16  # footers read; more files are sampled evenly


@dataclass(frozen=True)
class DataFacts:
    """`mean_events` by sequence, after the cut to its max_length; `mean_ids` by multi-valued categorical feature."""

    source: str  # "Parquet footers" or what was assumed
    group_rows: int  # rows of the largest row group
    groups: int | None  # row groups of the whole data set; None: unknown
    mean_events: dict[str, float]
    mean_ids: dict[str, float]


def data_facts(data: DataConfig, spec: FeatureSpec) -> DataFacts:
    """The facts of `data.train`; never fails: what cannot be read is assumed (reading it is the loader's job)."""
    facts = _from_footers(data.train, spec)
    if facts is None:
        groups = -(-data.synthetic.rows // ROW_GROUP) if data.synthetic else None
        full = {sequence.name: float(sequence.max_length) for sequence in spec.sequences}
        single = {feature.name: 1.0 for feature in spec.categorical if feature.multi}
        source = f"assumed: {shown(data.train)} is not there, every history is full"
        facts = DataFacts(source, ROW_GROUP, groups, full, single)
    if data.histories == "empty":
        facts = DataFacts(
            facts.source, facts.group_rows, facts.groups, dict.fromkeys(facts.mean_events, 0.0), facts.mean_ids
        )
    return facts


def _from_footers(url: DataPath, spec: FeatureSpec) -> DataFacts | None:
    try:
        footers, share = _footers(url)
    except (InputError, OSError, ValueError):  # not there or not Parquet: pyarrow's errors are ValueErrors
        return None
    groups = [footer.row_group(number) for footer in footers for number in range(footer.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    if rows == 0:
        return None

    def mean(column: str) -> float:
        # An empty list counts as one value in a footer, so this bounds the mean from above.
        counts = [_values(footer, column) for footer in footers]
        return 1.0 if None in counts else sum(filter(None, counts)) / rows

    events = {s.name: min(mean(s.timestamps), float(s.max_length)) for s in spec.sequences}
    ids = {feature.name: mean(feature.column or feature.name) for feature in spec.categorical if feature.multi}
    largest = max(group.num_rows for group in groups)
    return DataFacts("Parquet footers", largest, round(len(groups) / share), events, ids)


def _footers(url: DataPath) -> tuple[list[Any], float]:
    """Footers of up to MAX_FILES files, and the share of all files that they are."""
    from pyarrow import parquet

    files = find_files(url).files
    chosen = files[:: max(1, -(-len(files) // MAX_FILES))]
    read = [parquet.read_metadata(one.path if one.local else one.filesystem.open(one.path)) for one in chosen]
    return read, len(chosen) / len(files)


def _values(footer: Any, column: str) -> int | None:
    """Values in a column, those of a list one by one; None where there is no such column."""
    position = 0
    for field in footer.schema.to_arrow_schema():  # a leaf's path does not tell: names may have dots
        if field.name == column:
            groups = (footer.row_group(number) for number in range(footer.num_row_groups))
            return sum(group.column(position).num_values for group in groups)
        position += _leaves(field.type)
    return None


def _leaves(type_: Any) -> int:
    """Parquet columns that a column of this Arrow type is stored in."""
    return sum(_leaves(type_.field(index).type) for index in range(type_.num_fields)) or 1
