"""What two checkpoints differ in, as `gemctl checkpoint diff` shows it and `gemctl.checkpoint.diff` finds it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One object (or `position.<key>`) that is not the same.

    `what`: missing in A, missing in B, shape, dtype, value. For `value` of tensors: how many `elements` differ in any
    bit, the largest |A − B|, and that over the largest |A| (NaN if one is NaN). `a` and `b`: the two shapes, dtypes
    or JSON values.
    """

    key: str
    what: str
    a: str = ""
    b: str = ""
    elements: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints' folders. `objects`: keys in either; `compared`: those whose values were set side by side."""

    a: str
    b: str
    step_a: int
    step_b: int
    objects: int
    compared: int
    differences: list[Difference]

    @property
    def exit_code(self) -> int:
        """1 if anything differs."""
        return 1 if self.differences else 0
