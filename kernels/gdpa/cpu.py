"""GDPA of jagged sequences on CPU: batched matrix products on groups of equal lengths, in pieces that fit the cache.

Groups: gemctl/kernels/buckets.py; row tiles of windows and causal sequences: gemctl/kernels/visibility.py. A piece's
scores stay below `SCORES` elements, so that the passes of the activation run in the L2 cache and memory stays small
for any length. bfloat16 and float16 inputs are computed in float32. All loops and sums have one fixed order: two runs
are equal bit for bit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gemctl.kernels import buckets
from gemctl.kernels.gdpa.activation import ACTIVATIONS, LEAKY_SLOPE, Activation
from gemctl.kernels.jagged import check_offsets, compute_dtype, expand_heads, reduce_heads
from gemctl.kernels.visibility import Tile, tile_hidden, tiles

SCORES = 1 << 16  # float32: 256 KiB
MIN_ROWS = 32  # of a piece, however long the keys: products of fewer rows are slow
GELU_SLOPE = 2 * (2 / torch.pi) ** 0.5  # gelu_approx(x) = x · sigmoid(GELU_SLOPE · (x + GELU_CUBE · x³))
GELU_CUBE = 0.044715


class _Piece(NamedTuple):
    """Matrices first … last−1 of a group, a tile's rows and keys; `hidden` [rows, keys] where a key is not seen."""

    first: int
    last: int
    tile: Tile
    hidden: Tensor | None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    schedule: list[Tensor],
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Output [ΣLq, H, D], or [B·S, H, D] where q_offsets is None and q [S, H, D] belongs to every row."""
    queries, plan = _prepare(q, k, q_offsets, k_offsets, causal or window is not None)
    heads, dtype = q.shape[1], compute_dtype(q.dtype)
    rows_q, rows_k, rows_v = (expand_heads(x, heads).flatten(0, 1) for x in (queries, k, v))
    output = rows_q.new_empty(rows_q.shape)
    for group, q_part, k_part in zip(plan.groups, plan.q.parts(heads), plan.k.parts(heads), strict=True):
        dense_q = _dense(rows_q, q_part, dtype, pre_scale)
        dense_k, dense_v = _dense(rows_k, k_part, dtype), _dense(rows_v, k_part, dtype, fill=0)
        dense_output = torch.zeros_like(dense_q)
        for piece in _pieces(group, heads, causal, window):
            scores = torch.bmm(_rows(dense_q, piece), _keys(dense_k, piece).mT)
            if piece.hidden is not None:
                scores.masked_fill_(piece.hidden, 0)
            torch.bmm(_act(activation, scores), _keys(dense_v, piece), out=_rows(dense_output, piece))
        q_part.scatter(output, _scaled(dense_output, post_scale).flatten(0, 1).to(q.dtype))
    return output.view(queries.shape)


def backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    schedule: list[Tensor],
    activation: str,
    pre_scale: float,
    post_scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    queries, plan = _prepare(q, k, q_offsets, k_offsets, causal or window is not None)
    heads, dtype = q.shape[1], compute_dtype(q.dtype)
    rows_q, rows_k, rows_v, rows_grad = (expand_heads(x, heads).flatten(0, 1) for x in (queries, k, v, grad_output))
    grad_q, grad_k, grad_v = (x.new_empty(x.shape, dtype=dtype) for x in (rows_q, rows_k, rows_v))
    for group, q_part, k_part in zip(plan.groups, plan.q.parts(heads), plan.k.parts(heads), strict=True):
        dense_q = _dense(rows_q, q_part, dtype, pre_scale)
        dense_k, dense_v = _dense(rows_k, k_part, dtype), _dense(rows_v, k_part, dtype, fill=0)
        dense_grad = _dense(rows_grad, q_part, dtype, post_scale, fill=0)
        grads = torch.zeros_like(dense_q), torch.zeros_like(dense_k), torch.zeros_like(dense_v)
        for piece in _pieces(group, heads, causal, window):
            _piece_backward(piece, activation, dense_q, dense_grad, dense_k, dense_v, *grads)
        q_part.scatter(grad_q, _scaled(grads[0], pre_scale).flatten(0, 1))
        k_part.scatter(grad_k, grads[1].flatten(0, 1))
        k_part.scatter(grad_v, grads[2].flatten(0, 1))
    grad_queries = grad_q.view(queries.shape)
    if q_offsets is None:
        grad_queries = grad_queries.view(k_offsets.shape[0] - 1, *q.shape).sum(0)
    grad_keys, grad_values = (reduce_heads(x.view(-1, heads, k.shape[2]), k.shape[1]) for x in (grad_k, grad_v))
    return grad_queries.to(q.dtype), grad_keys.to(q.dtype), grad_values.to(q.dtype)


def _piece_backward(
    piece: _Piece,
    activation: str,
    dense_q: Tensor,
    dense_grad: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    """Adds one piece's part to the gradients of a group, [matrices, length, D] each."""
    q, grad, k = _rows(dense_q, piece), _rows(dense_grad, piece), _keys(dense_k, piece)
    scores, grad_weights = torch.bmm(q, k.mT), torch.bmm(grad, _keys(dense_v, piece).mT)
    if piece.hidden is not None:
        scores.masked_fill_(piece.hidden, 0)
        grad_weights.masked_fill_(piece.hidden, 0)
    weights, grad_scores = _act_backward(activation, scores, grad_weights)
    torch.bmm(grad_scores, k, out=_rows(grad_q, piece))
    _keys(grad_k, piece).baddbmm_(grad_scores.mT, q)
    _keys(grad_v, piece).baddbmm_(weights.mT, grad)


def _prepare(
    q: Tensor, k: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, positional: bool
) -> tuple[Tensor, buckets.Plan]:
    """q with a copy for each row where it is shared, and the groups."""
    if q_offsets is None:
        batch = k_offsets.shape[0] - 1
        q_offsets = torch.arange(batch + 1) * q.shape[0]
        q = q.repeat(batch, 1, 1)
    check_offsets("gdpa", q_offsets=(q_offsets, q.shape[0]), k_offsets=(k_offsets, k.shape[0]))
    # Padding needs no mask: a padded key has v = 0, a padded query's gradient is 0.
    return q, buckets.plan(q_offsets, k_offsets, buckets.JOIN_SCORES // q.shape[1], positional)


def _dense(
    rows: Tensor, part: buckets.Part, dtype: torch.dtype, scale: float = 1.0, fill: float | None = None
) -> Tensor:
    """A group's rows of [N·H, D], scaled, as [matrices, length, D] in the compute dtype."""
    gathered = part.gather(rows, fill)
    return _scaled(gathered.to(dtype), scale).view(part.batch, part.length, gathered.shape[1])


def _scaled(x: Tensor, scale: float) -> Tensor:
    """x · scale, in place."""
    return x if scale == 1 else x.mul_(scale)


def _pieces(group: buckets.Group, heads: int, causal: bool, window: int | None) -> Iterator[_Piece]:
    """A group's visible pairs in pieces of at most `SCORES` scores (or one matrix of `MIN_ROWS` rows)."""
    len_q, len_k, matrices = group.len_q, group.len_k, group.batch * heads
    for tile in tiles(len_q, len_k, causal, window, matrices, max(MIN_ROWS, SCORES // max(1, len_k))):
        hidden = tile_hidden(tile, len_q, len_k, causal, window)
        step = max(1, SCORES // ((tile.row1 - tile.row0) * (tile.key1 - tile.key0)))
        for first in range(0, matrices, step):
            yield _Piece(first, min(first + step, matrices), tile, hidden)


def _rows(x: Tensor, piece: _Piece) -> Tensor:
    return _cut(x, piece.first, piece.last, piece.tile.row0, piece.tile.row1)


def _keys(x: Tensor, piece: _Piece) -> Tensor:
    return _cut(x, piece.first, piece.last, piece.tile.key0, piece.tile.key1)


def _cut(x: Tensor, first: int, last: int, start: int, stop: int) -> Tensor:
    """x[first:last, start:stop]; x itself where that is all."""
    return x if (last - first, stop - start) == x.shape[:2] else x[first:last, start:stop]


def _act(activation: str, scores: Tensor) -> Tensor:
    """act(scores); may overwrite them."""
    if activation in {Activation.GELU_APPROX, Activation.FAST_GELU}:
        return _gelu_sigmoid(scores, scores * scores).mul_(scores)
    return ACTIVATIONS[Activation(activation)](scores)


def _gelu_sigmoid(scores: Tensor, squares: Tensor) -> Tensor:
    """(1 + tanh(u)) / 2 = sigmoid(2u), which is 2 to 3 times faster than PyTorch's tanh form on CPU."""
    return torch.mul(squares, GELU_SLOPE * GELU_CUBE).add_(GELU_SLOPE).mul_(scores).sigmoid_()


def _act_backward(activation: str, scores: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(act(scores), act'(scores) · grad); may overwrite both inputs."""
    aten = torch.ops.aten
    match Activation(activation):
        case Activation.IDENTITY:
            return scores, grad
        case Activation.GELU:
            return aten.gelu(scores), aten.gelu_backward(grad, scores)
        case Activation.GELU_APPROX | Activation.FAST_GELU:
            squares = scores * scores
            sigmoid = _gelu_sigmoid(scores, squares)
            weights = scores.mul_(sigmoid)
            inner = squares.mul_(3 * GELU_SLOPE * GELU_CUBE).add_(GELU_SLOPE)
            slope = torch.addcmul(weights, weights, sigmoid, value=-1).mul_(inner).add_(sigmoid)
            return weights, slope.mul_(grad)
        case Activation.RELU:
            return scores.relu(), aten.threshold_backward(grad, scores, 0)
        case Activation.RELU_SQUARE:
            positive = scores.relu_()
            return positive.square(), grad.mul_(positive).mul_(2)
        case Activation.LEAKY_RELU:
            slope = aten.leaky_relu_backward(grad, scores, LEAKY_SLOPE, False)
            return aten.leaky_relu(scores, LEAKY_SLOPE), slope
        case Activation.SILU:
            return aten.silu(scores), aten.silu_backward(grad, scores)
        case Activation.HARDSWISH:
            return aten.hardswish(scores), aten.hardswish_backward(grad, scores)
