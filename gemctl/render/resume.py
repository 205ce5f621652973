"""What a resume will do, in the terminal."""

from pathlib import Path
from typing import Any

from gemctl.launch.preflight import Preflight
from gemctl.units import binary


def preflight(value: Preflight) -> Any:
    """Where it goes on; a table of what is loaded; then what was passed over, is changed, and is lost or cut."""
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    none = "--from-scratch" if value.left_alone else "no checkpoint"
    start = f"from {value.checkpoint} (step {value.step})" if value.checkpoint else f"from the start ({none})"
    ranks = f"{value.ranks_before} → {value.ranks}" if value.ranks_before not in {None, value.ranks} else value.ranks
    run = Path(value.run)
    head = f"resume {run.parent.name}/{run.name}\nattempt {value.attempt} {start} to step {value.steps}, ranks: {ranks}"
    table = Table()
    for name in ("loaded", "tensors", "size", "checked", "lay on", "will lie on", ""):
        table.add_column(name, justify="right" if name in {"tensors", "size", "checked"} else "left", overflow="fold")
    for load in value.loads:
        figures = (str(load.objects), binary(load.bytes), str(load.checked))
        table.add_row(load.kind, *figures, load.before, load.after, "moved" if load.moved else "as it lay")
    lines = [f"passed over: {reason}" for reason in value.passed_over]
    for change in value.changes:
        what, *details = change.lines()
        lines += [f"changed: {what} ({change.rule.reason})", *(f"changed: {detail}" for detail in details)]
    lines += [f"lost: {what}" for what in value.lost]
    lines += value.cut
    lines += [f"note: {note}" for note in value.notes]
    parts: list[Any] = [head, *([table] if value.loads else []), *([_text("\n".join(lines))] if lines else [])]
    return Group(*parts)


def _text(lines: str) -> Any:
    from rich.text import Text  # noqa: PLC0415

    return Text(lines)
