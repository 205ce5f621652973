"""The Triton kernels in the interpreter against the definitions in float64, poisoned and between guard zones."""

import pytest
import torch

from tests.kernels import interpreted
from tests.support.world import run_world


def test_each_op() -> None:
    assert run_world(1, interpreted.failures, "fast", torch.float32, gloo=False) == [[]]


def test_scores_far_below_zero_fall_back_to_masks() -> None:
    """Subtracting the padding from the row sum alone would leave nothing of them."""
    ((float32, float16),) = run_world(1, interpreted.scores_far_below_zero, gloo=False)
    assert float32 <= 1e-5
    assert float16 <= 5e-3


def test_what_the_host_does_not_check_gives_nan() -> None:
    assert run_world(1, interpreted.short_tables, gloo=False) == [[True, True]]


def test_a_bias_may_hide_keys() -> None:
    assert run_world(1, interpreted.hiding_bias, gloo=False) == [[]]


def test_bfloat16_is_refused_in_the_interpreter() -> None:
    (reason,) = run_world(1, interpreted.bfloat16_is_refused, gloo=False)
    assert reason == "Triton's interpreter multiplies bfloat16 matrices wrongly"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("cases", "dtype"), [("slow", torch.float32), ("some", torch.float16)])
def test_every_branch(cases: str, dtype: torch.dtype) -> None:
    """Two processes, each with every other case."""
    assert run_world(2, interpreted.failures_of_rank, cases, dtype, timeout=360, gloo=False) == [[], []]
