"""Results of `gemctl data` in the terminal."""

from rich.console import Group
from rich.table import Table

from gemctl.data.drafting import Draft
from gemctl.data.importing import Imported
from gemctl.data.synthetic import SyntheticLog
from gemctl.specs.yaml_file import printable


def imported(value: Imported) -> Group:
    """Rows per part, tables, label rates, and what was left out."""
    parts = Table(title=f"{value.folder}: a Parquet file per part, spec.yaml, vocabularies.json", title_justify="left")
    for name in value.rows:
        parts.add_column(f"{name} rows", justify="right")
    parts.add_row(*(f"{rows:,}" for rows in value.rows.values()))
    tables = Table()
    tables.add_column("table")
    tables.add_column("rows", justify="right")
    for name, rows in value.tables.items():
        tables.add_row(name, f"{rows:,}")
    labels = ", ".join(f"{name} {share:.1%}" for name, share in value.labels.items())
    return Group(parts, tables, f"labels (positive rate in the training part): {labels}", *value.notes)


def synthetic_log(value: SyntheticLog) -> str:
    """The files and the size of the synthetic log."""
    settings = ", ".join(f"{name} {number:,}" for name, number in value.settings.items())
    files = "\n".join(f"{role:<6}{path}" for role, path in value.files.items())
    return f"{files}\n{settings}; written in {value.seconds:.1f} s"


def draft(value: Draft) -> str:
    """The draft itself, or the file that has it and the columns it leaves out."""
    if value.path is None:
        return value.text.rstrip("\n")
    left_out = "".join(
        f"\n  left out {printable(name)}: {printable(reason)}" for name, reason in value.undecided.items()
    )
    return f"{value.path}: drafted from the first {value.rows_seen:,} rows; review it before training{left_out}"
