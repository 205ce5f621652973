"""The look of the tables that commands show."""

from rich.table import Table


def titled(title: str, *columns: str, left: int = 1) -> Table:
    """A table without lines whose first `left` columns are names, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table
