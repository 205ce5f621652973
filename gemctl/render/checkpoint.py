"""Checkpoints as text: lists, verification, differences, exports, and what a resume or a warm start loads from one.

Plain lines are as long as the names in them: nothing is cut or wrapped.
"""

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gemctl.launch.preflight import Preflight
from gemctl.run.checkpoints import Comparison, Difference, Exported, Listed, Listing, Pruned, Verified
from gemctl.run.manifest import folder_name, kind_of
from gemctl.run.warm_start import WarmStart
from gemctl.units import DASH, binary, count


def listing(value: Listing) -> str:
    """One line per checkpoint, newest first; then the folders that are not valid checkpoints."""
    lines = [f"checkpoints of {value.run}"]
    if value.checkpoints:
        lines += _columns(
            [["checkpoint", "ranks", "tensors", "size"], *map(_listed, value.checkpoints)], figures={1, 2, 3}
        )
        lines.append("file sizes match; gemctl checkpoint verify also compares the hashes of all files")
    else:
        lines.append("none yet")
    if value.others:
        lines += ["not usable:", *(f"  {one.name}  {one.flaw}" for one in value.others)]
    return "\n".join(lines)


def _listed(one: Listed) -> list[str]:
    own = folder_name(one.step, one.attempt)
    return [
        one.name if one.name == own else f"{one.name} (contains {own})",
        count(one.world),
        count(one.tensors),
        binary(one.bytes),
    ]


def pruned(value: Pruned) -> str:
    """Each folder with its reasons, and what could not be deleted."""
    if not value.folders:
        return f"{value.run}: every checkpoint folder is usable; nothing to delete"
    lines = ["would delete:" if value.dry_run else "deleted:"]
    for one in value.folders:
        lines += [f"  {one.path} ({binary(one.bytes)})", *(f"    {reason}" for reason in one.reasons)]
    return "\n".join([*lines, *(f"cannot delete: {problem}" for problem in value.failed)])


def verified(value: Verified) -> str:
    """Each checkpoint with its problems, or `intact`."""
    lines = []
    for path, faults in value.faults.items():
        lines += [
            f"{path}: {'not usable' if faults else 'intact, every hash matches'}",
            *(f"  {fault}" for fault in faults),
        ]
    return "\n".join(lines)


def comparison(value: Comparison) -> str:
    """A table of what differs, with a summary; or one line."""
    heads = [f"A  {value.a} (step {value.step_a})", f"B  {value.b} (step {value.step_b})"]
    if not value.differences:
        return "\n".join([*heads, f"no difference: all {value.objects} tensors are bit-identical"])
    names = ["object", "differs in", "elements", "max |A − B|", "relative to max |A|", "A", "B"]
    table = _columns([names, *map(_difference, value.differences)], figures={2, 3, 4})
    summary = f"{len(value.differences)} differences; values of {value.compared} of {value.objects} tensors compared"
    return "\n".join([*heads, *table, summary])


def _difference(item: Difference) -> list[str]:
    figures = [DASH if figure is None else f"{figure:.3g}" for figure in (item.max_abs, item.max_rel)]
    return [item.key, item.what, count(item.elements), *figures, item.a, item.b]


def exported(value: Exported) -> str:
    """What was written, and where."""
    head = f"{value.checkpoint} (step {value.step}): {value.tensors} tensors, {binary(value.bytes)}, in {value.target}"
    return "\n".join([head, *(f"  {file}" for file in value.files)])


def preflight(value: Preflight) -> Group:
    """Where a run resumes; what it loads; then the checkpoints passed over, and what is changed, lost or cut."""
    none = "--from-scratch" if value.left_alone else "no checkpoint"
    start = f"from {value.checkpoint} (step {value.step})" if value.checkpoint else f"from the start ({none})"
    ranks = f"{value.ranks_before} → {value.ranks}" if value.ranks_before not in {None, value.ranks} else value.ranks
    run = Path(value.run)
    head = f"resume {run.parent.name}/{run.name}\nattempt {value.attempt} {start} to step {value.steps}, ranks: {ranks}"
    table = Table()
    for name in ("loaded", "tensors", "size", "checked", "layout when saved", "layout now", ""):
        table.add_column(name, justify="right" if name in {"tensors", "size", "checked"} else "left", overflow="fold")
    for load in value.loads:
        figures = (str(load.objects), binary(load.bytes), str(load.checked))
        table.add_row(load.kind, *figures, load.before, load.after, "moved" if load.moved else "as saved")
    lines = [f"passed over: {reason}" for reason in value.passed_over]
    for change in value.changes:
        what, *details = change.lines()
        lines += [f"changed: {what} ({change.rule.reason})", *(f"changed: {detail}" for detail in details)]
    lines += [f"lost: {what}" for what in value.lost]
    lines += value.cut
    lines += [f"note: {note}" for note in value.notes]
    parts: list[RenderableType] = [head]
    parts += [table] if value.loads else []
    parts += [Text("\n".join(lines))] if lines else []
    return Group(*parts)


def warm_start(value: WarmStart) -> str:
    """Counts by kind, then every tensor that is not loaded, with the reason."""
    kinds = [kind_of(name) for name in value.loaded]
    counts = ", ".join(f"{kind} {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
    lines = [f"warm start from {value.checkpoint} (step {value.step}): {len(value.loaded)} tensors ({counts})"]
    lines += [f"  not in the checkpoint, keeps its initial values: {name}" for name in value.not_found]
    lines += [
        f"  shape differs, keeps its initial values: {one.name} is {one.theirs} there and {one.ours} here"
        for one in value.shape_differs
    ]
    lines += [f"  only in the checkpoint, not used: {name}" for name in value.unused]
    return "\n".join(lines)


def _columns(rows: list[list[str]], figures: set[int]) -> list[str]:
    """Lines with aligned columns; those in `figures` are right-aligned."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if at in figures else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
