"""What Parquet footers say of the memory that reading takes, before a value is read.

    read_values(footer, ["user", "seen_item"])      # by row group: values of these columns as they lie in the file

A file of a few kilobytes may hold hundreds of millions of values: runs of one value cost nothing there. A row group is
read whole, and cut to a sequence's `max_length` after that.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as pt

READ_BYTES = 32
"""Of a value while its row group is read and decoded, at most: measured with lists of ids and times (31)."""


def read_values(footer: Any, columns: Iterable[str]) -> list[int]:
    """Values of the columns in each row group, with those of columns that pyarrow reads beside them (`item.views` where
    `item` is asked for, as it may be a part of it)."""
    wanted = set(columns)
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    read = [index for index, path in enumerate(paths) if any(prefix in wanted for prefix in _prefixes(path))]
    groups = (footer.row_group(number) for number in range(footer.num_row_groups))
    return [sum(group.column(index).num_values for index in read) for group in groups]


def leaves(schema: Any, count: int) -> dict[str, int]:
    """Of each field of the Arrow schema that has one Parquet column (of `count`), the column's number. Names would not
    do: the path `item.views` may be that of a field of this name, or of a part of `item`."""
    sizes = [_leaf_count(field.type) for field in schema]
    if sum(sizes) != count:
        return {}
    starts = np.cumsum([0, *sizes])
    names = schema.names
    return {name: int(starts[i]) for i, name in enumerate(names) if sizes[i] == 1 and names.count(name) == 1}


def _leaf_count(kind: Any) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _leaf_count(kind.storage_type)
    if pt.is_dictionary(kind):
        return _leaf_count(kind.value_type)
    return sum(_leaf_count(kind.field(index).type) for index in range(kind.num_fields)) if kind.num_fields else 1


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
