"""The baseline of `gemctl bench model`: the same model on padded histories, with PyTorch's attention.

    with padded(dense):
        logits = dense(pad(batch), pad_embedded(batch, embedded))

Parameters and results are those of the jagged model; a test compares both in float64. In the context every module that
uses lengths runs its padded version: values are [B · L, width] with L = `max_length` positions per row, the events
first, while `offsets` remain those of the real events. Softmax attention is `scaled_dot_product_attention` with one
mask per batch, GDPA is two batched products. Lookups are jagged, as TorchRec's are in any model; their outputs are
padded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemctl.data.batch import Batch, EventSequence
from gemctl.kernels.block_attention.rotary import rotate
from gemctl.kernels.gdpa.activation import ACTIVATIONS, Activation
from gemctl.model import gem, tokens
from gemctl.model.attention import BlockAttention, JaggedAttention, SiluAttention, rotated, rotation_tables
from gemctl.model.embeddings import Embedded
from gemctl.model.events import Events, MaskNet
from gemctl.model.layers import layer_norm
from gemctl.model.sequence import PersonalisedFFN
from gemctl.model.summary import ClsTokens, HierarchicalPooling, LastEvents, PooledAttention, SeedAttention
from gemctl.specs.sequence import BLOCK_SIZE

HIDDEN = -1e9
"""Added to the scores of masked keys: −inf would give NaN in rows where all keys are masked, such as padding."""


def pad(batch: Batch) -> Batch:
    """`batch` with ages and floats of events as [B · L], zero where there is no event; the rest is unchanged."""
    return replace(batch, sequences={name: _pad_sequence(events) for name, events in batch.sequences.items()})


def pad_embedded(batch: Batch, embedded: Embedded) -> Embedded:
    """Looked-up events of the jagged batch as [B · L, dim], differentiable."""
    sources = {name: batch.sequences[name.split(".")[0]] for name in embedded.events}
    events = {
        name: _spread(rows, sources[name].offsets, sources[name].max_length) for name, rows in embedded.events.items()
    }
    return Embedded(embedded.categorical, events)


@contextmanager
def padded(dense: nn.Module) -> Iterator[None]:
    """Makes `dense`, a `DenseModel`, take padded batches and embeddings."""
    changed = [module for module in dense.modules() if type(module) in _PADDED]
    before = gem.prepend, tokens.places
    try:
        for module in changed:
            module.forward = MethodType(_PADDED[type(module)], module)
        gem.prepend, tokens.places = _prepend, _places
        yield
    finally:
        gem.prepend, tokens.places = before
        for module in changed:
            del module.forward
        _masks.clear()


def _pad_sequence(events: EventSequence) -> EventSequence:
    offsets, longest = events.offsets, events.max_length
    floats = {name: _spread(values, offsets, longest) for name, values in events.floats.items()}
    return replace(events, floats=floats, ages=_spread(events.ages, offsets, longest))


def _spread(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """[ΣL, …] → [B · longest, …], zero where there is no event."""
    rows = len(offsets) - 1
    row = torch.arange(rows, device=values.device).repeat_interleave(offsets.diff(), output_size=len(values))
    to = torch.arange(len(values), device=values.device) - offsets[row] + row * longest
    return values.new_zeros(rows * longest, *values.shape[1:]).index_copy(0, to, values)


def _shape(events: Events) -> tuple[int, int]:
    """(rows, positions per row)."""
    return len(events.offsets) - 1, events.max_length


def _places(offsets: Tensor, events: int) -> Tensor:
    """Each position's distance from the newest event of its row, int64 [events]; 0 where there is no event."""
    position = torch.arange(events // max(1, len(offsets) - 1), device=offsets.device)
    return (offsets.diff()[:, None] - 1 - position).clamp(min=0).flatten()


def _prepend(cls_BCD: Tensor, events: Events) -> Events:
    (rows, longest), count = _shape(events), cls_BCD.shape[1]
    values = torch.cat([cls_BCD, events.values.view(rows, longest, cls_BCD.shape[2])], dim=1).flatten(0, 1)
    ages = F.pad(events.ages.view(rows, longest), (count, 0)).flatten()
    offsets = events.offsets + count * torch.arange(rows + 1, device=events.offsets.device)
    return Events(values, offsets, _places(offsets, len(values)), ages, longest + count, count)


# Keyed by what they depend on. Each entry keeps its offsets alive, so that their id is not reused.
_masks: dict[Any, tuple[Tensor, Tensor]] = {}


def _mask(events: Events, causal: bool = False, window: int | None = None, every: int | None = None) -> Tensor:
    """What is added to the scores: [B, 1, 1 or L, L], or by block [B · blocks, 1, 1, every]; cached."""
    key = id(events.offsets), causal, window, every
    if key not in _masks:
        if len(_masks) > 16:
            _masks.clear()
        _masks[key] = events.offsets, _make_mask(events, causal, window, every)
    return _masks[key][1]


def _make_mask(events: Events, causal: bool, window: int | None, every: int | None) -> Tensor:
    wide = events.max_length if every is None else -(-events.max_length // every) * every
    position = torch.arange(wide, device=events.offsets.device)
    hidden = (position >= events.offsets.diff()[:, None])[:, None, None]
    if every is not None:
        hidden = hidden.reshape(-1, 1, 1, every)
    distance = position[:, None] - position
    if causal:
        hidden = hidden | (distance < 0)
    if window is not None:
        hidden = hidden | (distance.abs() > window)
    return torch.zeros_like(hidden, dtype=events.values.dtype).masked_fill_(hidden, HIDDEN)


def _heads(x: Tensor, rows: int, count: int, heads: int) -> Tensor:
    """[B · count, H · d or H, d] → [B, H, count, d]."""
    return x.view(rows, count, heads, x.shape[1:].numel() // heads).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """[B, H, n, d] → [B · n, H · d]."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


def _jagged_attention(self: JaggedAttention, events: Events) -> Tensor:
    spec, shape = self.spec, _shape(events)
    q, k, v = self.project(events)
    q, k = rotated(q, k, events, spec.position, spec.rote_scale)
    q, k, v = (_heads(x, *shape, self.heads) for x in (q, k, v))
    mask = _mask(events, spec.causal, spec.window)
    return self.output(_flat(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


def _block_attention(self: BlockAttention, events: Events) -> Tensor:
    """Rows that blocks do not fill are padded further."""
    q, k, v = self.project(events)
    (rows, longest), (_, heads, width) = _shape(events), q.shape
    if self.spec.rope:
        cos, sin = (table.repeat(rows, 1) for table in rotation_tables(events, width))
        q, k, v = (rotate(x, cos, sin) for x in (q, k, v))
    more = -longest % BLOCK_SIZE

    def blocks(x: Tensor) -> Tensor:
        wide = F.pad(x.view(rows, longest, heads, width), (0, 0, 0, 0, 0, more)) if more else x
        return wide.reshape(-1, BLOCK_SIZE, heads, width).transpose(1, 2)

    seen = F.scaled_dot_product_attention(blocks(q), blocks(k), blocks(v), attn_mask=_mask(events, every=BLOCK_SIZE))
    return self.output(seen.transpose(1, 2).reshape(rows, longest + more, heads * width)[:, :longest].flatten(0, 1))


def _ffn(self: PersonalisedFFN, events: Events, x_sum: Tensor) -> Tensor:
    (rows, longest), own = _shape(events), events.values.shape[1]
    x, width = x_sum.flatten(1), own // self.heads
    k, v = (make(x).view(rows * self.hidden, own) for make in (self.keys, self.values))
    q = _heads(layer_norm(events.values), rows, longest, self.heads)
    k, v = (_heads(y, rows, self.hidden, self.heads) for y in (k, v))
    weights = ACTIVATIONS[Activation(self.activation)](q @ (k * width**-0.5).mT)
    return _flat(weights @ (v * self.hidden**-0.5))


def _silu_attention(self: SiluAttention, events: Events) -> Tensor:
    spec, shape = self.spec, _shape(events)
    width = events.values.shape[1] // self.heads
    made = F.silu(self.gate_values_queries_keys(layer_norm(events.values)))
    u, v, q, k = made.view(-1, 4, self.heads, width).unbind(1)
    q, k = rotated(q, k, events, spec.position, spec.rote_scale)
    q, k, v = (_heads(x, *shape, self.heads) for x in (q * width**-0.5, k, v / spec.length_scale))
    weights = F.silu(q @ k.mT) * (_mask(events, causal=True, window=spec.window) == 0)
    return self.output(layer_norm(_flat(weights @ v)) * u.flatten(1))


def _seeds(self: SeedAttention, events: Events) -> Tensor:
    rows, _ = shape = _shape(events)
    seeds = layer_norm(self.seeds) if self.norm_seeds else self.seeds
    k = _heads(self.keys(layer_norm(events.values)), *shape, self.heads)
    v = _heads(events.values, *shape, self.heads)
    q = _heads(seeds, 1, len(seeds), self.heads).expand(rows, -1, -1, -1)
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=_mask(events)).transpose(1, 2).flatten(2)
    return seen * (events.offsets.diff() > 0)[:, None, None]


def _hierarchical(self: HierarchicalPooling, events: Events) -> Tensor:
    z_BRTD = self.tokens(_seeds(self, events)).unflatten(1, (self.rank, -1))
    return self.widths(z_BRTD.transpose(1, 2).flatten(2))


def _last(self: LastEvents, events: Events) -> Tensor:
    rows, longest = _shape(events)
    lengths = events.offsets.diff()[:, None]
    back = torch.arange(self.tokens, device=lengths.device)
    index = (lengths - 1 - back).clamp(min=0)[:, :, None].expand(-1, -1, events.values.shape[1])
    if longest == 0:
        return events.values.new_zeros(index.shape)
    newest = events.values.view(rows, longest, index.shape[2]).gather(1, index)
    return newest * (back < lengths - events.cls)[:, :, None]


def _cls(self: ClsTokens, events: Events) -> Tensor:
    return events.values.view(*_shape(events), events.values.shape[1])[:, : events.cls]


def _merge(self: MaskNet, histories: Mapping[str, Events]) -> Events:
    parts = list(histories.values())
    lengths = torch.stack([part.offsets.diff() for part in parts]).amax(0)
    rows, longest = len(lengths), max(part.max_length for part in parts)
    columns, age = [], parts[0].ages.new_full((rows, longest), torch.inf)
    for part in parts:  # shifted right, so that the newest events of a row are aligned
        position = torch.arange(longest, device=lengths.device) - (lengths - part.offsets.diff())[:, None]
        exists = (position >= 0) & (position < part.offsets.diff()[:, None])
        index = position.clamp(0, max(0, part.max_length - 1))
        wide = F.pad(
            part.values.view(rows, part.max_length, part.values.shape[1]), (0, 0, 0, longest - part.max_length)
        )
        columns.append(wide.gather(1, index[:, :, None].expand_as(wide)) * exists[:, :, None])
        ages = F.pad(part.ages.view(rows, part.max_length), (0, longest - part.max_length)).gather(1, index)
        age = torch.minimum(age, ages.masked_fill(~exists, torch.inf))
    z = torch.cat(columns, dim=2).flatten(0, 1)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    age = age.masked_fill(age.isinf(), 0).flatten()
    return Events(self.mlp(z * self.mask(z)), offsets, _places(offsets, rows * longest), age, longest)


_PADDED: dict[type[nn.Module], Callable[..., Any]] = {
    JaggedAttention: _jagged_attention,
    BlockAttention: _block_attention,
    SiluAttention: _silu_attention,
    PersonalisedFFN: _ffn,
    PooledAttention: _seeds,
    HierarchicalPooling: _hierarchical,
    LastEvents: _last,
    ClsTokens: _cls,
    MaskNet: _merge,
}
