"""The tile tables of a batch: what its kernels, forward and backward, have to do, longest first.

`tile_tables` is an op like the others, so that a compiled graph computes the tables on the device, once for all layers
with the same offsets and options, and hands them on as ordinary tensors, in a CUDA graph too. Eager calls get those
made before for the same offsets (`kept` in gemctl/kernels/jagged.py). Which tables a backend wants its module says;
gemctl/kernels/schedule.py makes them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemctl.kernels import dispatch
from gemctl.kernels.jagged import kept
from gemctl.kernels.library import Op

LONG = 768  # mean length from which sequences count as long


class Table(NamedTuple):
    """The tiles of one kernel: `short` rows of one sequence, `long` rows where sequences are long on average.

    `of_keys`: rows of keys, not of queries. Rows see `behind` positions back and `ahead` forward on the other side; a
    tile's length is the blocks it sees there or, without `pairs`, its number of rows.
    """

    of_keys: bool
    short: int
    long: int
    behind: int
    ahead: int
    pairs: bool = True

    def height(self, tokens: int, batch: int) -> int:
        """Rows of a tile, of `batch` sequences with `tokens` rows in all."""
        return self.long if is_long(tokens, batch) else self.short

    def length(self, q_tokens: int, k_tokens: int, batch: int) -> int:
        """Items of the table, enough for either height: symbolic sizes must not be asked which one is taken.

        One more, so that a compiled graph need not ask either whether there are 0 or 1, which PyTorch treats apart.
        """
        return slots(k_tokens if self.of_keys else q_tokens, min(self.short, self.long), batch) + 1


def is_long(tokens: int, batch: int) -> bool:
    """Whether `batch` sequences with `tokens` rows in all count as long."""
    return tokens >= LONG * batch


def slots(tokens: int, height: int, batch: int) -> int:
    """The most tiles of `height` rows that `batch` sequences with `tokens` rows can have."""
    return tokens // height + batch


def tile_tables(
    op: str,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    q_tokens: int,
    k_tokens: int,
    dtype: torch.dtype,
    head_dim: int,
    size: int = 0,
    causal: bool = False,
    window: int | None = None,
    biased: bool = False,
) -> list[Tensor]:
    """The tables that `op` reads on a batch, each int64: sequence << 32 | tile, then −1; none on the CPU.

    Of each the first `slots` for the height that is taken are written.

    q_offsets: None where all rows have the same q_tokens / B queries; their offsets are then the last of the list, if
    a table needs them. size: `block_size` of block attention; seeds times query heads of a key head of pooling.
    """
    options = op, q_tokens, k_tokens, dtype, head_dim, size, causal, window, biased, dispatch.named()

    def make() -> list[Tensor]:
        found: list[Tensor] = _tile_tables(k_offsets, q_offsets, *options)
        return found

    return kept(options, make, k_offsets, q_offsets)


def _kernel(
    k_offsets: Tensor,
    q_offsets: Tensor | None,
    op: str,
    q_tokens: int,
    k_tokens: int,
    dtype: torch.dtype,
    head_dim: int,
    size: int,
    causal: bool,
    window: int | None,
    biased: bool,
    backend: str | None,
) -> list[Tensor]:
    tables = _wanted(op, k_offsets.device, dtype, head_dim, backend, (size, causal, window, biased))
    if not tables:
        return []
    from gemctl.kernels import schedule  # noqa: PLC0415

    if not _wants_offsets(tables, q_offsets):
        return schedule.build(tables, k_offsets if q_offsets is None else q_offsets, k_offsets, q_tokens, k_tokens)
    batch = k_offsets.shape[0] - 1
    q_offsets = torch.arange(batch + 1, device=k_offsets.device) * (q_tokens // max(1, batch))
    return [*schedule.build(tables, q_offsets, k_offsets, q_tokens, k_tokens), q_offsets]


def _fake(
    k_offsets: Tensor,
    q_offsets: Tensor | None,
    op: str,
    q_tokens: int,
    k_tokens: int,
    dtype: torch.dtype,
    head_dim: int,
    size: int,
    causal: bool,
    window: int | None,
    biased: bool,
    backend: str | None,
) -> list[Tensor]:
    if k_offsets.is_meta:  # no kernel runs there
        return []
    # A head's dimension is a constant of the kernels, so a graph has one, too.
    tables = _wanted(op, k_offsets.device, dtype, int(head_dim), backend, (size, causal, window, biased))
    batch = k_offsets.shape[0] - 1
    found = [k_offsets.new_empty(table.length(q_tokens, k_tokens, batch)) for table in tables]
    return [*found, k_offsets.new_empty(batch + 1)] if _wants_offsets(tables, q_offsets) else found


def _wanted(
    op: str, device: torch.device, dtype: torch.dtype, head_dim: int, backend: str | None, options: tuple[Any, ...]
) -> tuple[Table, ...]:
    module = dispatch.load(op, device, dtype, head_dim, backend)
    found: tuple[Table, ...] = module.tables(dtype, device, *options) if hasattr(module, "tables") else ()
    return found


def _wants_offsets(tables: tuple[Table, ...], q_offsets: Tensor | None) -> bool:
    return q_offsets is None and any(table.pairs for table in tables)


_tile_tables = Op("tile_tables", _kernel, _fake)
