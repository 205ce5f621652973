"""What a warm start takes over, in the terminal."""

from gemctl.run.manifest import kind_of
from gemctl.run.warm_start import WarmStart


def warm_start(value: WarmStart) -> str:
    """Counts by kind, then every tensor that is not taken, with why."""
    kinds = [kind_of(name) for name in value.loaded]
    counts = ", ".join(f"{kind} {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
    lines = [f"warm start from {value.checkpoint} (step {value.step}): {len(value.loaded)} tensors ({counts})"]
    lines += [f"  not found, keeps its initial values: {name}" for name in value.not_found]
    lines += [
        f"  shape differs, keeps its initial values: {one.name} is {one.theirs} there and {one.ours} here"
        for one in value.shape_differs
    ]
    lines += [f"  only in the checkpoint, not used: {name}" for name in value.unused]
    return "\n".join(lines)
