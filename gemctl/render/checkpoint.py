"""Checkpoints in the terminal: lists, faults, differences."""

from typing import Any

from gemctl.render.units import DASH, binary, count
from gemctl.run.checkpoints import Comparison, Difference, Listing, Verified


def listing(value: Listing) -> Any:
    """One line a checkpoint folder, newest first."""
    from rich.table import Table

    table = Table(title=f"checkpoints of {value.run}", title_justify="left")
    for name in ("checkpoint", "ranks", "tensors", "size", "state"):
        table.add_column(name, justify="right" if name in {"ranks", "tensors", "size"} else "left", overflow="fold")
    for item in value.checkpoints:
        table.add_row(item.name, count(item.world), count(item.tensors), binary(item.bytes), item.flaw or "valid")
    return table if value.checkpoints else f"{value.run}: no checkpoint yet"


def verified(value: Verified) -> str:
    """Each checkpoint with `whole`, or its faults."""
    lines = []
    for path, faults in value.faults.items():
        lines += [
            f"{path}: {'damaged' if faults else 'whole, every hash matches'}",
            *(f"  {fault}" for fault in faults),
        ]
    return "\n".join(lines)


def comparison(value: Comparison) -> Any:
    """A table of what differs, with a summary; or one line."""
    from rich.console import Group
    from rich.table import Table

    heads = [f"A  {value.a} (step {value.step_a})", f"B  {value.b} (step {value.step_b})"]
    if not value.differences:
        return "\n".join([*heads, f"no difference: {value.objects} tensors are the same bit for bit"])
    table = Table()
    for name in ("object", "differs in", "elements", "max |A − B|", "relative to max |A|", "A", "B"):
        table.add_column(
            name, justify="right" if name in {"elements", "max |A − B|", "relative to max |A|"} else "left"
        )
    for item in value.differences:
        table.add_row(*_row(item))
    summary = (
        f"{len(value.differences)} differences; the values of {value.compared} of {value.objects} tensors were compared"
    )
    return Group(*heads, table, summary)


def _row(item: Difference) -> list[str]:
    figures = [DASH if figure is None else f"{figure:.3g}" for figure in (item.max_abs, item.max_rel)]
    return [item.key, item.what, count(item.elements), *figures, item.a, item.b]
