"""The Triton kernels of jagged attention, softmax or an activation, shared by jagged_flash_attention and gdpa.

Three kernels, each over the tiles of gemctl/kernels/schedule.py, one program a tile and head: `forward_kernel` and
`grad_q_kernel` own rows of queries and loop over keys, `grad_kv_kernel` owns rows of keys and loops over queries. So
every output has one owner: no atomics, and two runs are equal bit for bit.

Rows behind a sequence's end are loaded as zeros. An activation maps their score 0 to 0, so without causal or window
its scores are not masked. Softmax masks the last block of keys: with the padding's 0 for a peak, a short row's weights
would not be 1 at most but something below, which bfloat16 rounds. In the backward padding multiplies zeros. With causal
or window, blocks that are seen in part are masked too. Masked blocks are visited first.

A query that sees no key, or only keys with a bias of −inf, has an LSE of −inf, output 0 and gradients 0.

`KIND` is "softmax" or an activation. Names end in the side that they lie on; `shift` = len_k − len_q puts a query at
its key position.
"""

import triton
import triton.language as tl

from gemctl.kernels.schedule import span
from gemctl.kernels.triton_scores import LN_2, LOG2_E, act, slope


@triton.jit
def load_rows(
    base: tl.tensor, stride: tl.tensor, rows: tl.tensor, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """[ROWS, BLOCK_D] from `base` on, zero beyond `rows` rows and D columns."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = row < rows
    if D != BLOCK_D:
        mask = mask & (column < D)
    return tl.load(base + row * stride + column, mask=mask, other=0.0)


@triton.jit
def store_rows(
    base: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    values: tl.tensor,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Writes the first `rows` rows and D columns of [ROWS, BLOCK_D], in the dtype of `base`."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = row < rows
    if D != BLOCK_D:
        mask = mask & (column < D)
    tl.store(base + row * stride + column, values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def full_span(first, last, shift, behind, ahead, length, low, high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the positions low … high−1 that rows first … last−1 see, where the blocks begin and end that all see whole.

    Both are multiples of BLOCK; where there is no such block both are `high`.
    """
    full_low = tl.maximum(tl.cdiv(tl.maximum(last - 1 + shift - behind, 0), BLOCK) * BLOCK, low // BLOCK * BLOCK)
    full_high = tl.maximum(tl.minimum(first + shift + ahead + 1, length), 0) // BLOCK * BLOCK
    some = full_high > full_low
    return tl.where(some, full_low, high), tl.where(some, full_high, high)


@triton.jit
def partial_block(index, low, full_low, full_high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the index-th block begins that is seen in part: those before the full ones, then those behind them."""
    before = tl.cdiv(full_low - low // BLOCK * BLOCK, BLOCK)
    return tl.where(index < before, low // BLOCK * BLOCK + index * BLOCK, full_high + (index - before) * BLOCK)


@triton.jit
def partial_blocks(low, high, full_low, full_high, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many blocks are seen in part."""
    return tl.cdiv(full_low - low // BLOCK * BLOCK, BLOCK) + tl.cdiv(high - full_high, BLOCK)


@triton.jit
def load_bias(  # type: ignore[no-untyped-def]
    bias, row_stride, key_stride, row0, key0, row, key, len_q, len_k, bias_rows, bias_keys
):
    """The bias of the pairs (row0 + row, key0 + key) in float32: 0 beyond the sequence, NaN where it is too short.

    (To raise, the host would have to wait for the lengths.)
    """
    base = bias + tl.cast(row0, tl.int64) * row_stride + tl.cast(key0, tl.int64) * key_stride
    real = (row < len_q - row0) & (key < len_k - key0)
    there = (row < bias_rows - row0) & (key < bias_keys - key0)
    value = tl.load(base + row * row_stride + key * key_stride, mask=real & there, other=0.0).to(tl.float32)
    return tl.where(real & (there == 0), float("nan"), value)


@triton.jit
def load_lse(pointer, mask):  # type: ignore[no-untyped-def]
    """LSE in units of log 2; inf, from which no score weighs anything, behind the end and where nothing is seen."""
    lse = tl.load(pointer, mask=mask, other=float("inf"))
    return LOG2_E * tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def sees(row, key, shift, behind, ahead, len_k):  # type: ignore[no-untyped-def]
    """Whether the query sees the key."""
    back = row + shift - key
    return (back <= behind) & (back >= -ahead) & (key < len_k)


@triton.jit
def _forward_block(  # type: ignore[no-untyped-def]
    acc, total, peak, q, K, V, k_stride, v_stride, start, row0, shift, behind, ahead, len_q, len_k,
    BIAS, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys to the output, the row sums and the row peaks (in units of log 2) of a tile."""
    k = load_rows(K + tl.cast(start, tl.int64) * k_stride, k_stride, len_k - start, BN, D, BLOCK_D)
    v = load_rows(V + tl.cast(start, tl.int64) * v_stride, v_stride, len_k - start, BN, D, BLOCK_D)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    row = tl.arange(0, q.shape[0])[:, None]
    key = tl.arange(0, BN)[None, :]
    if MASKED:
        seen = sees(row0 + row, start + key, shift, behind, ahead, len_k)
    if KIND == "softmax":
        if BIASED:
            bias = load_bias(
                BIAS, bias_stride_q, bias_stride_k, row0, start, row, key, len_q, len_k, bias_rows, bias_keys
            )
            scores = scores * scale + bias * LOG2_E
            factor = 1.0
        else:
            factor = scale
        if MASKED:
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        # A row that has seen nothing yet, or only biases of −inf, keeps the peak −inf, from which nothing may be
        # subtracted.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED or BIASED else new_peak
        weights = tl.exp2(scores * factor - safe[:, None])
        rescale = tl.exp2(peak - safe)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        peak = new_peak
    else:
        weights = act(scores * scale, KIND, FAST)
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, peak


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, LSE, BIAS, ORDER, Q_OFFSETS, K_OFFSETS,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, bias_head, bias_stride_q, bias_stride_k,
    bias_rows, bias_keys, heads, group, scale, post_scale, behind, ahead,
    KIND: tl.constexpr, FAST: tl.constexpr, POSITIONAL: tl.constexpr, BROADCAST: tl.constexpr, BIASED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [N, heads, D] and, for softmax, LSE [N, heads] of BM query rows and one head."""
    item = tl.load(ORDER + tl.program_id(0) // heads)
    head = (tl.program_id(0) % heads).to(tl.int64)
    if item < 0:
        return
    b = item >> 32
    row0 = (item & 0x7FFFFFFF).to(tl.int32) * BM
    first_q = tl.load(Q_OFFSETS + b)
    first_k = tl.load(K_OFFSETS + b)
    len_q = (tl.load(Q_OFFSETS + b + 1) - first_q).to(tl.int32)
    len_k = (tl.load(K_OFFSETS + b + 1) - first_k).to(tl.int32)
    q_base = Q + head * q_head + row0.to(tl.int64) * q_stride
    if not BROADCAST:
        q_base += first_q * q_stride
    k_base = K + head // group * k_head + first_k * k_stride
    v_base = V + head // group * v_head + first_k * v_stride
    bias_base = BIAS + head * bias_head
    rows = tl.minimum(len_q - row0, BM)
    row = row0 + tl.arange(0, BM)
    shift = len_k - len_q
    q = load_rows(q_base, q_stride, rows, BM, D, BLOCK_D)
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    total = tl.zeros([BM], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    low = 0
    high = len_k
    full_low = 0
    full_high = len_k
    if POSITIONAL:
        low, high = span(row0, row0 + rows, shift, behind, ahead, len_k)
        full_low, full_high = full_span(row0, row0 + rows, shift, behind, ahead, len_k, low, high, BN)
    elif KIND == "softmax":
        full_high = len_k // BN * BN
    if POSITIONAL or KIND == "softmax":
        for index in range(0, partial_blocks(low, high, full_low, full_high, BN)):
            start = partial_block(index, low, full_low, full_high, BN)
            acc, total, peak = _forward_block(
                acc, total, peak, q, k_base, v_base, k_stride, v_stride, start, row0, shift, behind, ahead,
                len_q, len_k, bias_base, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
                KIND, FAST, BIASED, True, D, BLOCK_D, BN, PRECISION,
            )  # fmt: skip
    for start in range(full_low, full_high, BN):
        acc, total, peak = _forward_block(
            acc, total, peak, q, k_base, v_base, k_stride, v_stride, start, row0, shift, behind, ahead, len_q, len_k,
            bias_base, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
            KIND, FAST, BIASED, False, D, BLOCK_D, BN, PRECISION,
        )  # fmt: skip
    out_base = OUT + ((first_q + row0) * heads + head) * D
    if KIND == "softmax":
        acc = acc * tl.where(total != 0, 1.0 / total, 0.0)[:, None]
        lse = LN_2 * (peak + tl.log2(total))
        tl.store(LSE + (first_q + row) * heads + head, lse, mask=row < len_q)
    else:
        acc = acc * post_scale
    store_rows(out_base, heads * D, rows, acc, BM, D, BLOCK_D)


@triton.jit
def _grad_scores(  # type: ignore[no-untyped-def]
    scores, grad_weights, lse, delta, seen, scale, KIND: tl.constexpr, FAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(weights, gradient of the scaled scores) of one block; lse and delta broadcast against the scores.

    Softmax: `scores` are scaled, in units of log 2. A score above its LSE is a padded key's, or rounding.
    """
    if KIND == "softmax":
        weights = tl.exp2(tl.minimum(scores - lse, 0.0))
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
        grad = weights * (grad_weights - delta)
    else:
        x = scores * scale
        weights = act(x, KIND, FAST)
        grad = slope(x, KIND, FAST) * grad_weights
        if MASKED:
            weights = tl.where(seen, weights, 0.0)
            grad = tl.where(seen, grad, 0.0)
    return weights, grad


@triton.jit
def _grad_q_block(  # type: ignore[no-untyped-def]
    acc, q, grad, lse, delta, K, V, k_stride, v_stride, start, row0, shift, behind, ahead, len_q, len_k,
    BIAS, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys to the gradient of a tile of queries."""
    k = load_rows(K + tl.cast(start, tl.int64) * k_stride, k_stride, len_k - start, BN, D, BLOCK_D)
    v = load_rows(V + tl.cast(start, tl.int64) * v_stride, v_stride, len_k - start, BN, D, BLOCK_D)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    row = tl.arange(0, q.shape[0])[:, None]
    key = tl.arange(0, BN)[None, :]
    seen = sees(row0 + row, start + key, shift, behind, ahead, len_k) if MASKED else 0
    if KIND == "softmax":
        scores = scores * scale
    if BIASED:
        scores += LOG2_E * load_bias(
            BIAS, bias_stride_q, bias_stride_k, row0, start, row, key, len_q, len_k, bias_rows, bias_keys
        )
    _, grad_scores = _grad_scores(scores, grad_weights, lse[:, None], delta[:, None], seen, scale, KIND, FAST, MASKED)
    return tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=PRECISION)


@triton.jit
def grad_q_kernel(  # type: ignore[no-untyped-def]
    Q, K, V, GRAD, OUT, LSE, DELTA, GRAD_Q, BIAS, ORDER, Q_OFFSETS, K_OFFSETS,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head,
    bias_head, bias_stride_q, bias_stride_k,
    bias_rows, bias_keys, heads, group, scale, grad_scale, behind, ahead,
    KIND: tl.constexpr, FAST: tl.constexpr, POSITIONAL: tl.constexpr, BROADCAST: tl.constexpr, BIASED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient [N, heads, D] of BM query rows and one head; for softmax also DELTA [N, heads] = Σ grad · out."""
    item = tl.load(ORDER + tl.program_id(0) // heads)
    head = (tl.program_id(0) % heads).to(tl.int64)
    if item < 0:
        return
    b = item >> 32
    row0 = (item & 0x7FFFFFFF).to(tl.int32) * BM
    first_q = tl.load(Q_OFFSETS + b)
    first_k = tl.load(K_OFFSETS + b)
    len_q = (tl.load(Q_OFFSETS + b + 1) - first_q).to(tl.int32)
    len_k = (tl.load(K_OFFSETS + b + 1) - first_k).to(tl.int32)
    q_base = Q + head * q_head + row0.to(tl.int64) * q_stride
    if not BROADCAST:
        q_base += first_q * q_stride
    k_base = K + head // group * k_head + first_k * k_stride
    v_base = V + head // group * v_head + first_k * v_stride
    bias_base = BIAS + head * bias_head
    rows = tl.minimum(len_q - row0, BM)
    row = row0 + tl.arange(0, BM)
    shift = len_k - len_q
    out_base = (first_q + row0) * heads + head  # of contiguous [N, heads]
    q = load_rows(q_base, q_stride, rows, BM, D, BLOCK_D)
    grad_base = GRAD + (first_q + row0) * grad_stride + head * grad_head
    grad = load_rows(grad_base, grad_stride, rows, BM, D, BLOCK_D)
    lse = tl.zeros([BM], tl.float32)
    delta = tl.zeros([BM], tl.float32)
    if KIND == "softmax":
        out = load_rows(OUT + out_base * D, heads * D, rows, BM, D, BLOCK_D)
        delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
        tl.store(DELTA + (first_q + row) * heads + head, delta, mask=row < len_q)
        lse = load_lse(LSE + (first_q + row) * heads + head, row < len_q)
    acc = tl.zeros([BM, BLOCK_D], tl.float32)
    full_low = 0
    full_high = len_k
    if POSITIONAL:
        low, high = span(row0, row0 + rows, shift, behind, ahead, len_k)
        full_low, full_high = full_span(row0, row0 + rows, shift, behind, ahead, len_k, low, high, BN)
        for index in range(0, partial_blocks(low, high, full_low, full_high, BN)):
            start = partial_block(index, low, full_low, full_high, BN)
            acc = _grad_q_block(
                acc, q, grad, lse, delta, k_base, v_base, k_stride, v_stride, start, row0, shift, behind, ahead,
                len_q, len_k, bias_base, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
                KIND, FAST, BIASED, True, D, BLOCK_D, BN, PRECISION,
            )  # fmt: skip
    for start in range(full_low, full_high, BN):
        acc = _grad_q_block(
            acc, q, grad, lse, delta, k_base, v_base, k_stride, v_stride, start, row0, shift, behind, ahead,
            len_q, len_k, bias_base, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
            KIND, FAST, BIASED, False, D, BLOCK_D, BN, PRECISION,
        )  # fmt: skip
    store_rows(GRAD_Q + out_base * D, heads * D, rows, acc * grad_scale, BM, D, BLOCK_D)


@triton.jit
def _grad_kv_block(  # type: ignore[no-untyped-def]
    grad_k, grad_v, k, v, Q, GRAD, LSE, DELTA, q_stride, grad_stride, heads, start, key0, shift, behind, ahead,
    len_q, len_k, BIAS, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, BIASED: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one block of queries to the gradients of a tile of keys; all products are transposed, [keys, queries]."""
    q = load_rows(Q + tl.cast(start, tl.int64) * q_stride, q_stride, len_q - start, BM, D, BLOCK_D)
    grad = load_rows(GRAD + tl.cast(start, tl.int64) * grad_stride, grad_stride, len_q - start, BM, D, BLOCK_D)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    lse = tl.zeros([BM], tl.float32)
    delta = tl.zeros([BM], tl.float32)
    if KIND == "softmax":
        saved = tl.arange(0, BM)
        base = tl.cast(start, tl.int64) * heads
        lse = load_lse(LSE + base + saved * heads, saved < len_q - start)
        delta = tl.load(DELTA + base + saved * heads, mask=saved < len_q - start, other=0.0)
        scores = scores * scale
    row = tl.arange(0, BM)[None, :]
    key = tl.arange(0, k.shape[0])[:, None]
    if BIASED:
        scores += LOG2_E * load_bias(
            BIAS, bias_stride_q, bias_stride_k, start, key0, row, key, len_q, len_k, bias_rows, bias_keys
        )
    seen = sees(start + row, key0 + key, shift, behind, ahead, len_k) if MASKED else 0
    grad_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    weights, grad_scores = _grad_scores(
        scores, grad_weights, lse[None, :], delta[None, :], seen, scale, KIND, FAST, MASKED
    )
    grad_v = tl.dot(weights.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
    grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def grad_kv_kernel(  # type: ignore[no-untyped-def]
    Q, K, V, GRAD, LSE, DELTA, GRAD_K, GRAD_V, BIAS, ORDER, Q_OFFSETS, K_OFFSETS,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head,
    bias_head, bias_stride_q, bias_stride_k,
    bias_rows, bias_keys, key_heads, group, scale, grad_scale, post_scale, behind, ahead,
    KIND: tl.constexpr, FAST: tl.constexpr, POSITIONAL: tl.constexpr, BROADCAST: tl.constexpr, BIASED: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients [N, key_heads, D] of BN rows of keys and values and one of their heads, over its query heads."""
    item = tl.load(ORDER + tl.program_id(0) // key_heads)
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    if item < 0:
        return
    b = item >> 32
    key0 = (item & 0x7FFFFFFF).to(tl.int32) * BN
    first_q = tl.load(Q_OFFSETS + b)
    first_k = tl.load(K_OFFSETS + b)
    len_q = (tl.load(Q_OFFSETS + b + 1) - first_q).to(tl.int32)
    len_k = (tl.load(K_OFFSETS + b + 1) - first_k).to(tl.int32)
    keys = tl.minimum(len_k - key0, BN)
    shift = len_k - len_q
    heads = key_heads * group
    k = load_rows(K + key_head * k_head + (first_k + key0) * k_stride, k_stride, keys, BN, D, BLOCK_D)
    v = load_rows(V + key_head * v_head + (first_k + key0) * v_stride, v_stride, keys, BN, D, BLOCK_D)
    grad_k = tl.zeros([BN, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BN, BLOCK_D], tl.float32)
    # From the keys' side the rows run the other way: a key sees queries `ahead` back and `behind` forward.
    low, high = span(key0, key0 + keys, -shift, ahead, behind, len_q)
    full_low, full_high = full_span(key0, key0 + keys, -shift, ahead, behind, len_q, low, high, BM)
    if not POSITIONAL:
        full_low = 0
        full_high = len_q
    for member in range(0, group):
        head = key_head * group + member
        q_base = Q + head * q_head
        if not BROADCAST:
            q_base += first_q * q_stride
        grad_base = GRAD + head * grad_head + first_q * grad_stride
        lse_base = LSE + first_q * heads + head
        delta_base = DELTA + first_q * heads + head
        bias_base = BIAS + head * bias_head
        if POSITIONAL:
            for index in range(0, partial_blocks(low, high, full_low, full_high, BM)):
                start = partial_block(index, low, full_low, full_high, BM)
                grad_k, grad_v = _grad_kv_block(
                    grad_k, grad_v, k, v, q_base, grad_base, lse_base, delta_base, q_stride, grad_stride, heads, start,
                    key0, shift, behind, ahead, len_q, len_k,
                    bias_base, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
                    KIND, FAST, BIASED, True, D, BLOCK_D, BM, PRECISION,
                )  # fmt: skip
        for start in range(full_low, full_high, BM):
            grad_k, grad_v = _grad_kv_block(
                grad_k, grad_v, k, v, q_base, grad_base, lse_base, delta_base, q_stride, grad_stride, heads, start,
                key0, shift, behind, ahead, len_q, len_k,
                bias_base, bias_stride_q, bias_stride_k, bias_rows, bias_keys, scale,
                KIND, FAST, BIASED, False, D, BLOCK_D, BM, PRECISION,
            )  # fmt: skip
    base = ((first_k + key0) * key_heads + key_head) * D
    store_rows(GRAD_K + base, key_heads * D, keys, grad_k * grad_scale, BN, D, BLOCK_D)
    store_rows(GRAD_V + base, key_heads * D, keys, grad_v * post_scale, BN, D, BLOCK_D)


@triton.jit(do_not_specialize=["batch"])
def grad_bias_kernel(  # type: ignore[no-untyped-def]
    Q, K, V, GRAD, LSE, DELTA, GRAD_BIAS, BIAS, Q_OFFSETS, K_OFFSETS,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, grad_stride, grad_head,
    bias_head, bias_stride_q, bias_stride_k,
    bias_rows, bias_keys, heads, group, scale, behind, ahead, batch,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient [heads, bias_rows, bias_keys] (contiguous) of one tile of the bias: the batch's sum, row by row."""
    tiles = tl.cdiv(bias_rows, BM) * tl.cdiv(bias_keys, BN)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    row0 = tl.program_id(0) % tiles // tl.cdiv(bias_keys, BN) * BM
    key0 = tl.program_id(0) % tiles % tl.cdiv(bias_keys, BN) * BN
    row = row0 + tl.arange(0, BM)
    key = key0 + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for b in range(0, batch):
        first_q = tl.load(Q_OFFSETS + b)
        first_k = tl.load(K_OFFSETS + b)
        len_q = (tl.load(Q_OFFSETS + b + 1) - first_q).to(tl.int32)
        len_k = (tl.load(K_OFFSETS + b + 1) - first_k).to(tl.int32)
        low, high = span(row0, tl.minimum(row0 + BM, len_q), len_k - len_q, behind, ahead, len_k)
        if (row0 < len_q) & (key0 < high) & (key0 + BN > low):
            q = load_rows(Q + head * q_head + (first_q + row0) * q_stride, q_stride, len_q - row0, BM, D, BLOCK_D)
            k = load_rows(K + head // group * k_head + (first_k + key0) * k_stride, k_stride, len_k - key0, BN, D, BLOCK_D)  # fmt: skip # noqa: E501
            v = load_rows(V + head // group * v_head + (first_k + key0) * v_stride, v_stride, len_k - key0, BN, D, BLOCK_D)  # fmt: skip # noqa: E501
            grad = load_rows(GRAD + head * grad_head + (first_q + row0) * grad_stride, grad_stride, len_q - row0, BM, D, BLOCK_D)  # fmt: skip # noqa: E501
            saved = (first_q + row) * heads + head
            lse = load_lse(LSE + saved, row < len_q)
            delta = tl.load(DELTA + saved, mask=row < len_q, other=0.0)
            scores = scale * tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores += LOG2_E * load_bias(
                BIAS + head * bias_head, bias_stride_q, bias_stride_k, row0, key0,
                tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], len_q, len_k, bias_rows, bias_keys,
            )  # fmt: skip
            grad_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            seen = sees(row[:, None], key[None, :], len_k - len_q, behind, ahead, len_k)
            _, grad_scores = _grad_scores(
                scores, grad_weights, lse[:, None], delta[:, None], seen, scale, "softmax", False, True
            )
            acc += grad_scores
    mask = (row[:, None] < bias_rows) & (key[None, :] < bias_keys)
    place = row[:, None].to(tl.int64) * bias_keys + key[None, :]
    tl.store(GRAD_BIAS + head * bias_rows * bias_keys + place, acc.to(GRAD_BIAS.dtype.element_ty), mask=mask)
