"""How kernels are started, on stand-ins for Triton's kernels and for tensors on a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemctl.kernels import triton_launch
from gemctl.kernels.triton_launch import FAR_ROWS, Tiling, launch, rows

TILING = Tiling(64, 32, 4, 2)


class Kernel:
    """Notes what Triton would do: a launch that looks at every argument, or a direct one of what it compiled."""

    def __init__(self) -> None:
        self.fn = object()
        self.looked: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def start(*args: Any, num_warps: int, num_stages: int) -> Any:
            self.looked.append((grid, num_warps, num_stages, *args))
            return SimpleNamespace(run=self.run, function="function", packed_metadata="metadata")

        return start

    def run(self, *args: Any) -> None:
        self.direct.append(args)


def on_gpu(address: int, dtype: torch.dtype = torch.bfloat16, index: int = 0) -> Any:
    class Fake(torch.Tensor):
        def data_ptr(self) -> int:
            return address

        def get_device(self) -> int:
            return index

    return torch.zeros(1, dtype=dtype).as_subclass(Fake)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)

    def device(index: int) -> Any:
        current[0] = index
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    return Kernel()


def test_a_compiled_kernel_is_started_directly(kernel: Kernel) -> None:
    x = on_gpu(32)
    launch(kernel, 3, TILING, (x, x), (8, 0.5), (64, "relu"), (17,))
    assert kernel.looked == [((3,), 4, 2, x, x, 8, 0.5, 17, 64, "relu")]
    launch(kernel, 5, TILING, (x, on_gpu(48)), (8, 0.5), (64, "relu"), (18,))
    head = (5, 1, 1, 1000, "function", "metadata", None, None, None)
    assert kernel.direct == [(*head, 32, 48, 8, 0.5, 18, 64, "relu")]
    assert len(kernel.looked) == 1


@pytest.mark.parametrize(
    ("tensors", "numbers", "constants", "tiling"),
    [
        ((on_gpu(32, torch.float16),), (8,), (64,), TILING),
        ((on_gpu(32),), (1,), (64,), TILING),
        ((on_gpu(32),), (8,), (32,), TILING),
        ((on_gpu(32),), (8,), (64,), TILING._replace(warps=8)),
        ((on_gpu(32, index=1),), (8,), (64,), TILING),
    ],
)
def test_what_a_kernel_is_specialised_for_is_looked_at_again(
    kernel: Kernel, tensors: Any, numbers: Any, constants: Any, tiling: Tiling
) -> None:
    launch(kernel, 1, TILING, (on_gpu(32),), (8,), (64,))
    launch(kernel, 1, tiling, tensors, numbers, constants)
    assert (len(kernel.looked), len(kernel.direct)) == (2, 0)


def test_tensors_that_are_not_aligned_are_looked_at_each_time(kernel: Kernel) -> None:
    for tensors in ((on_gpu(32), on_gpu(34)), (on_gpu(32), on_gpu(32)), (on_gpu(34), on_gpu(32))):
        launch(kernel, 1, TILING, tensors, (8,), (64,))
    assert (len(kernel.looked), len(kernel.direct)) == (3, 0)


def test_nothing_is_started_for_no_program(kernel: Kernel) -> None:
    launch(kernel, 0, TILING, (on_gpu(32),), (8,), (64,))
    assert (kernel.looked, kernel.direct) == ([], [])


def test_compiled_kernels_do_not_pile_up(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "MOST_COMPILED", 2)
    for scale in (0.1, 0.2, 0.3):
        launch(kernel, 1, TILING, (on_gpu(32),), (scale,), (64,))
    assert len(triton_launch._compiled) == 1


def test_rows_that_32_bits_cannot_reach_are_copied() -> None:
    near, far, turned = (
        torch.empty_strided((2, 1, 8), stride, device="meta")
        for stride in ((FAR_ROWS - 8, 8, 1), (FAR_ROWS, 8, 1), (8, 8, 2))
    )
    assert rows(near) is near
    assert rows(far).stride() == rows(turned).stride() == (8, 8, 1)
    assert 128 * FAR_ROWS == 2**31
