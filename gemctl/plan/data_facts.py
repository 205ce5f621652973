"""What the plan needs to know about the data: rows, row groups and the mean lengths of lists.

Read from the Parquet footers (no row is read). If the data does not exist yet, the plan assumes full histories and one
id per multi-valued feature, and says so.

    gemctl plan experiment=synthetic        # shows the mean lengths and where they come from
"""

from dataclasses import dataclass, replace
from typing import Any

from gemctl.config.schema import DataConfig
from gemctl.data.columns import column_uses
from gemctl.data.files import DataPath, find_files, shown
from gemctl.data.parquet import leaves, read_values
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
    largest_read: int = 0  # values of the needed columns in the largest row group, before any cut; 0: unknown


def data_facts(data: DataConfig, spec: FeatureSpec) -> DataFacts:
    """The facts of `data.train`. Never fails: what cannot be read is assumed (the loader will report it)."""
    facts = _from_footers(data, spec)
    if facts is None:
        groups = -(-data.synthetic.rows // ROW_GROUP) if data.synthetic else None
        full = {sequence.name: float(sequence.max_length) for sequence in spec.sequences}
        single = {feature.name: 1.0 for feature in spec.categorical if feature.multi}
        source = f"assumed: {shown(data.train)} does not exist, every history is full"
        facts = DataFacts(source, ROW_GROUP, groups, full, single)
    if data.histories == "empty":
        facts = replace(facts, mean_events=dict.fromkeys(facts.mean_events, 0.0))
    return facts


def _from_footers(data: DataConfig, spec: FeatureSpec) -> DataFacts | None:
    try:
        footers, share = _footers(data.train)
    except (InputError, OSError, ValueError):  # missing or not Parquet: pyarrow's errors are ValueErrors
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
    needed = [use.column for use in column_uses(spec, histories=data.histories == "keep")]
    read = max(values for footer in footers for values in read_values(footer, needed) or [0])
    return DataFacts("Parquet footers", largest, round(len(groups) / share), events, ids, read)


def _footers(url: DataPath) -> tuple[list[Any], float]:
    """Footers of up to MAX_FILES files, and their share of all files."""
    from pyarrow import parquet  # noqa: PLC0415

    files = find_files(url).files
    chosen = files[:: max(1, -(-len(files) // MAX_FILES))]
    read = [parquet.read_metadata(one.path if one.local else one.filesystem.open(one.path)) for one in chosen]
    return read, len(chosen) / len(files)


def _values(footer: Any, column: str) -> int | None:
    """Values in a column, counting each element of a list; None if there is no such column."""
    where = leaves(footer.schema.to_arrow_schema(), footer.num_columns).get(column)
    if where is None:
        return None
    return sum(footer.row_group(number).column(where).num_values for number in range(footer.num_row_groups))
