"""Checkpoints in the terminal: lists, faults, differences, exports. Lines are as long as their names: none is cut."""

from gemctl.run.checkpoints import Comparison, Difference, Exported, Listed, Listing, Pruned, Verified
from gemctl.run.manifest import folder_name
from gemctl.units import DASH, binary, count


def listing(value: Listing) -> str:
    """One line a checkpoint, newest first; then the folders that do not count."""
    lines = [f"checkpoints of {value.run}"]
    if value.checkpoints:
        lines += columns(
            [["checkpoint", "ranks", "tensors", "size"], *map(_listed, value.checkpoints)], figures={1, 2, 3}
        )
        lines.append("sizes are right; gemctl checkpoint verify reads the files and compares their hashes")
    else:
        lines.append("none yet")
    if value.others:
        lines += ["no checkpoints:", *(f"  {one.name}  {one.flaw}" for one in value.others)]
    return "\n".join(lines)


def _listed(one: Listed) -> list[str]:
    own = folder_name(one.step, one.attempt)
    return [
        one.name if one.name == own else f"{one.name} (it holds {own})",
        count(one.world),
        count(one.tensors),
        binary(one.bytes),
    ]


def pruned(value: Pruned) -> str:
    """Each folder with its reasons, and what could not be deleted."""
    if not value.folders:
        return f"{value.run}: every checkpoint folder can be used; nothing to delete"
    lines = ["would delete:" if value.dry_run else "deleted:"]
    for one in value.folders:
        lines += [f"  {one.path} ({binary(one.bytes)})", *(f"    {reason}" for reason in one.reasons)]
    return "\n".join([*lines, *(f"cannot be deleted: {problem}" for problem in value.failed)])


def verified(value: Verified) -> str:
    """Each checkpoint with `whole`, or its faults."""
    lines = []
    for path, faults in value.faults.items():
        lines += [
            f"{path}: {'cannot be used' if faults else 'whole, every hash matches'}",
            *(f"  {fault}" for fault in faults),
        ]
    return "\n".join(lines)


def comparison(value: Comparison) -> str:
    """A table of what differs, with a summary; or one line."""
    heads = [f"A  {value.a} (step {value.step_a})", f"B  {value.b} (step {value.step_b})"]
    if not value.differences:
        return "\n".join([*heads, f"no difference: {value.objects} tensors are the same bit for bit"])
    names = ["object", "differs in", "elements", "max |A − B|", "relative to max |A|", "A", "B"]
    table = columns([names, *map(_row, value.differences)], figures={2, 3, 4})
    summary = (
        f"{len(value.differences)} differences; the values of {value.compared} of {value.objects} tensors were compared"
    )
    return "\n".join([*heads, *table, summary])


def _row(item: Difference) -> list[str]:
    figures = [DASH if figure is None else f"{figure:.3g}" for figure in (item.max_abs, item.max_rel)]
    return [item.key, item.what, count(item.elements), *figures, item.a, item.b]


def exported(value: Exported) -> str:
    """What was written where."""
    head = f"{value.checkpoint} (step {value.step}): {value.tensors} tensors, {binary(value.bytes)}, in {value.target}"
    return "\n".join([head, *(f"  {file}" for file in value.files)])


def columns(rows: list[list[str]], figures: set[int]) -> list[str]:
    """Lines with aligned columns; those in `figures` are right-aligned. Nothing is cut, wrapped or split."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if at in figures else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
