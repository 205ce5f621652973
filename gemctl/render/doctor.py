"""The table of `gemctl doctor`."""

from rich.table import Table
from rich.text import Text

from gemctl.cluster.checks import Doctor

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(value: Doctor) -> Table:
    """One row a check; what to do stands under what was found."""
    table = Table("check", "", "found", box=None, pad_edge=False)
    for check in value.checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style=STYLES[check.status])
        table.add_row(check.name, Text(check.status, style=STYLES[check.status]), found)
    return table
