"""The Hopper kernels without a Hopper GPU: tiles against brute force, descriptors, what runs where, compilation."""

import os
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from gemctl import env
from gemctl.errors import InputError
from gemctl.kernels import dispatch
from gemctl.kernels.gdpa.activation import Activation
from gemctl.kernels.hopper import support
from gemctl.kernels.tables import Table
from gemctl.kernels.triton_launch import FAR
from gemctl.kernels.visibility import visible
from tests.kernels import cases, hopper_compile, interpreted
from tests.support.world import run_world

SHARED_MEMORY = 227 << 10  # bytes a block may have on sm_90
HEIGHT, BLOCK = 8, 4
LENGTHS = [0, 1, 4, 5, 11, 16, 21]
REACHES: list[tuple[bool, int | None]] = [(False, None), (True, None), (False, 0), (False, 3), (True, 5), (False, 12)]


def tile_faults() -> list[str]:
    """Where a tile's blocks are not those that it sees."""
    from tests.kernels.hopper_tiles import visited  # noqa: PLC0415

    faults, most = [], -(-max(LENGTHS) // BLOCK)
    for causal, window in REACHES:
        behind = FAR if window is None else window
        ahead = 0 if causal else behind
        tiles = [
            (len_q, len_k, first) for len_q, len_k in product(LENGTHS, LENGTHS) for first in range(0, len_q, HEIGHT)
        ]
        rows = [(first, min(first + HEIGHT, len_q), len_k - len_q, len_k) for len_q, len_k, first in tiles]
        starts, blocks, partly = visited(rows, behind, ahead, BLOCK, most)
        for (len_q, len_k, first), start, count, some in zip(tiles, starts, blocks, partly, strict=True):
            name = f"{len_q} queries from {first} on, {len_k} keys, causal={causal}, window={window}"
            seen = visible(len_q, len_k, causal, window)[first : first + HEIGHT]
            keys = seen.any(0).nonzero().flatten().tolist()
            wanted = (keys[0] // BLOCK, keys[-1] // BLOCK - keys[0] // BLOCK + 1) if keys else (start // BLOCK, 1)
            if (start / BLOCK, count) != wanted:
                faults.append(f"{name}: {count} blocks from {start} on")
            for index in range(count):
                back = [
                    row + len_k - len_q - (start + index * BLOCK + key)
                    for row in range(first, min(first + HEIGHT, len_q))
                    for key in range(BLOCK)
                ]
                hidden = any(x > behind or x < -ahead for x in back)
                if some[index] != hidden:
                    faults.append(f"{name}: block {index} is seen in part: {some[index]}")
    return faults


Tiles = tuple[list[str], list[list[int]], dict[bool, list[list[list[int]]]]]


def tiles_interpreted() -> Tiles:
    """Faults of what tiles visit; the places of 5 programs in 4 turns; the first rows of items, paired or not."""
    interpreted.start()
    from tests.kernels.hopper_tiles import first_rows, places  # noqa: PLC0415

    return tile_faults(), places(5, 4).tolist(), {x: first_rows(64, HEIGHT, x).tolist() for x in (False, True)}


@pytest.fixture(scope="module")
def tiles() -> Tiles:
    found: Tiles = run_world(1, tiles_interpreted, gloo=False)[0]
    return found


@pytest.mark.parametrize("paired", [False, True])
def test_items_hold_every_tile_once(paired: bool, tiles: Tiles) -> None:
    for length, items in enumerate(tiles[2][paired]):
        numbers = [first // HEIGHT for first in range(0, length, HEIGHT)]
        held = [[row // HEIGHT for row in item if row != length][: 1 + paired] for item in items]
        held = held[: -(-length // (HEIGHT * (1 + paired)))]  # the items that a schedule has
        assert sorted(tile for item in held for tile in item) == numbers
        if paired:  # a tile visits so many blocks of keys as its number, and one
            assert {sum(item) for item in held if len(item) == 2} <= {len(numbers) - 1}


def test_tiles_visit_the_blocks_that_they_see_and_no_other(tiles: Tiles) -> None:
    assert tiles[0] == []


def test_programs_take_every_place_once_to_and_fro(tiles: Tiles) -> None:
    found = tiles[1]
    assert found[:2] == [[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]]
    assert sorted(place for turn in found for place in turn) == list(range(20))


@pytest.mark.parametrize(("start", "end"), [(0, 70), (70, 70), (1000, 1064), (2**31 - 2**17, 2**31 - 2**17 + 9)])
def test_a_descriptor_ends_where_the_sequence_ends(start: int, end: int) -> None:
    from gemctl.kernels.hopper import ragged  # noqa: PLC0415

    x = torch.zeros(4, 6, 64, dtype=torch.bfloat16)[:, :3]
    source = ragged.descriptor(x, 64)
    assert source.block_shape == [1, 1, 64, 64]
    for row, column in product((-1, 0, end - start - 1, end - start, 63), (0, 64)):
        at = [1 << 30, end, (1 << 30) - (end - start) + row, column]
        address = sum(place * stride for place, stride in zip(at, source.strides, strict=True)) * 2 % 2**64
        assert address == ((start + row) * 6 * 64 + column) * 2 % 2**64
        inside = all(0 <= place < size for place, size in zip(at, source.shape, strict=True))
        assert inside == (row < end - start)


def test_packed_copies_only_what_a_descriptor_cannot_describe() -> None:
    from gemctl.kernels.hopper.ragged import packed  # noqa: PLC0415

    x = torch.randn(10, 4, 64).bfloat16()
    fused = torch.randn(10, 4 * 64 * 3).bfloat16()[:, 256:512].view(10, 4, 64)
    for fits in (x, x[2:], x[:, 1:3], fused):
        assert packed(fits) is fits
    for other in (x.transpose(0, 1).contiguous().transpose(0, 1), x[:1].expand(10, 4, 64), x.flatten()[1:-255].view(-1, 4, 64), x[:, ::2]):  # fmt: skip # noqa: E501
        copy = packed(other)
        assert copy is not other
        assert torch.equal(copy, other)
        assert copy.stride() == (copy.shape[1] * 64, 64, 1)
        assert copy.data_ptr() % 16 == 0


def test_what_the_kernels_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, bf16 = torch.device("cuda", 0), torch.bfloat16
    assert support.refusal("pooled_attention", gpu, bf16, 64) == "has no kernels for pooled_attention"
    assert support.refusal("gdpa", torch.device("cpu"), bf16, 64) == "needs tensors on a Hopper GPU (sm_90), not on cpu"
    monkeypatch.setattr(support, "_is_hopper", lambda index: True)
    monkeypatch.setattr(support, "_triton_version", lambda: "3.6.0")
    assert support.refusal("gdpa", gpu, bf16, 64) is None
    assert support.refusal("gdpa", gpu, bf16, 96) == "needs a head_dim of 64 or 128, not 96"
    assert support.refusal("gdpa", gpu, torch.float16, 64) == "needs bfloat16, not float16"
    monkeypatch.setattr(support, "_triton_version", lambda: "3.7.1")
    assert support.refusal("gdpa", gpu, bf16, 128) == "is written for triton 3.6.x, not 3.7.1"


def test_a_bias_takes_the_portable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    flash: Any = import_module("gemctl.kernels.jagged_flash_attention.hopper")
    rows, bias = cases.offsets([2, 1]), torch.zeros(2, 2, 2)
    q = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    none: list[torch.Tensor] = []
    both, options = (q, q, q, rows, rows, none), (0.1, False, None, bias)

    class Portable:
        def forward(self, *args: Any) -> str:
            return "forward"

        def backward(self, *args: Any) -> str:
            return "backward"

    loaded = []

    def load(op: str, device: torch.device, dtype: torch.dtype, head_dim: int, name: str | None) -> Any:
        loaded.append((op, name))
        return Portable()

    monkeypatch.setattr(dispatch, "load", load)
    wanted = torch.bfloat16, torch.device("cpu"), 0, True, None
    portable: Any = import_module("gemctl.kernels.jagged_flash_attention.triton")
    assert flash.tables(*wanted, True) == portable.tables(*wanted, True)
    assert flash.tables(*wanted, False) == (Table(False, 256, 256, FAR, FAR), Table(True, 256, 256, FAR, FAR))
    assert flash.forward(*both, *options) == "forward"
    assert flash.backward(q, q, torch.zeros(3, 2), *both, *options, True) == "backward"
    assert loaded == [("jagged_flash_attention", "triton")] * 2
    with (
        dispatch.use("hopper"),
        pytest.raises(InputError, match="run this call of jagged_flash_attention: it has a bias"),
    ):
        flash.forward(*both, *options)


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_scales_are_made_positive(scale: float) -> None:
    host: Any = import_module("gemctl.kernels.hopper.host")
    q, k = torch.randn(3, 1, 4), torch.randn(4, 1, 4)
    turned, positive = host.positive(q, scale)
    assert positive > 0
    assert torch.equal(positive * torch.einsum("qhd,khd->qk", turned, k), scale * torch.einsum("qhd,khd->qk", q, k))


@pytest.mark.parametrize(("options", "items"), [({}, 270 // 128 + 2), ({"causal": True}, 270 // 256 + 2)])
def test_launches_have_a_place_for_every_item_and_head(options: dict[str, Any], items: int) -> None:
    for kind, keys in (("softmax", 128), ("silu", 64)):  # two sequences of 270 rows in all, two heads
        forward, *grads = hopper_compile.launches(partial(hopper_compile.run, kind, 64, options))
        assert [launch[1] for launch in (forward, *grads)] == [items * 2] * 3
        assert [rows for _, rows in forward[3]] == [64, keys, keys, 64]
        assert forward[5]["BLOCK"] == keys
        assert forward[5]["LOADED"] == (keys == 64)
        for launch, of_keys in zip(grads, (False, True), strict=True):
            _, _, _, described, numbers, constants = launch
            assert [rows for _, rows in described] == [64] * 6
            far = FAR, FAR if not options else 0
            assert numbers[-2:] == (far[::-1] if of_keys else far)
            assert constants["OF_KEYS"] == of_keys


def compile_share(folder: str, variants: list[Any]) -> list[tuple[str, int, str]]:
    """(variant and kernel, bytes of shared memory, what ptxas says) of this rank's share."""
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/{env.rank()}"
    return [
        (f"{variant} {name}", shared, said)
        for variant in variants[env.rank() :: env.world_size()]
        for name, shared, said in hopper_compile.report(*variant)
    ]


def check_compiled(found: list[tuple[str, int, str]]) -> None:
    for name, shared, said in found:
        assert shared <= SHARED_MEMORY, name
        of_keys = "grad_kernel" in name
        # Without this warning the products of a round are in flight together. (ptxas gives it for two kinds of keys.)
        assert ("wgmma" not in said) or (of_keys and "ident" in name) or (of_keys and "leaky" in name), (
            f"{name}: {said}"
        )
        assert hopper_compile.spilled(said) <= (512 if of_keys else 0), f"{name}: {said}"


def test_compiles_for_hopper(tmp_path: Path) -> None:
    (found,) = run_world(1, compile_share, str(tmp_path), [("relu", 64, {})], timeout=100, gloo=False)
    assert len(found) == 3
    check_compiled(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_variant_compiles_for_hopper(tmp_path: Path) -> None:
    variants: list[Any] = [(str(kind), 128, {"causal": number % 2 == 0}) for number, kind in enumerate(Activation)]
    variants += [("softmax", head, options) for head in (64, 128) for options in ({}, {"causal": True})]
    variants += [("fast_gelu", 128, {"broadcast": True}), ("fast_gelu", 64, {"window": 9})]
    shares = run_world(2, compile_share, str(tmp_path), variants, timeout=840, gloo=False)
    found = [kernel for share in shares for kernel in share]
    assert len(found) == 3 * len(variants)
    check_compiled(found)
