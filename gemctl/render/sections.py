"""Titled tables of strings: reports, evaluations and benchmarks as Rich tables here, as HTML in page.py."""

import re
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

FIGURE = re.compile(r"(× |[+−-])?\d[\d.,]*( ?[%\w]+)?$|–$")


@dataclass
class Section:
    """A titled table. `columns` may all be empty, for a table without a header; `note` is shown below it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    bars: list[float] | None = None  # a share from 0 to 1 per row, drawn in an additional last column

    def is_figures(self, column: int) -> bool:
        """True for a column of numbers, which is right-aligned."""
        return bool(self.columns[column]) and all(FIGURE.match(row[column]) for row in self.rows)


def rich(sections: list[Section]) -> Group:
    """The sections for a terminal."""
    parts: list[RenderableType] = []
    for section in sections:
        table = Table(box=None, pad_edge=False, show_header=any(section.columns))
        for index, name in enumerate(section.columns):
            table.add_column(name, justify="right" if section.is_figures(index) else "left", overflow="fold")
        if section.bars:
            table.add_column("")
        for index, row in enumerate(section.rows):
            bar = ["█" * round(30 * section.bars[index])] if section.bars else []
            table.add_row(*(Text(cell) for cell in row), *bar)
        parts += [Text(section.title, style="bold"), table]
        parts += [Text(section.note, style="dim"), Text("")] if section.note else [Text("")]
    return Group(*parts)
