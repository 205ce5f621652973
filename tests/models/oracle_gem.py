"""The GEM model written from the published formulas, padded and masked: what gemctl/model/ must compute.

One file on plain tensor arithmetic, sharing no code with gemctl/model/ or gemctl/kernels/. It reads its parameters by
name from a state dict of the dense part, in any floating dtype (float64 in the tests), and autograd differentiates it.

    X: non-sequence tokens [B, n, d]      S: events [B, L, d], oldest first      m: 1 where an event is real [B, L]

    tokens        X = LN(categorical ‖ MLP(floats) ‖ domain), S = Σ ids + W [floats ‖ ages ‖ places] + b, where
                  ages = log(1 + age/scale)/4 by scale, places = log(1 + place)/2 ‖ e^(−place/τ), τ = 1, 3, 9, 27
    each layer    S ← S + GDPA(LN(S), K(CX), V(CX)),  act(QKᵀ/√d_h) V / √hidden     InterFormer's PFFN as GDPA
                  S ← S + MHA(LN(S)) within what an event may see                   InterFormer, Kunlun
                  P = LN(softmax(seeds · K(LN(S))ᵀ/√d_h) S)                         InterFormer's PMA
                  X ← LN(concat(FMB([X ‖ P]), LCB([X ‖ P])) + R [X ‖ P])            Wukong
    logits        of each task, MLP(flatten(X)) at the row's domain
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gemctl.data.batch import Batch, EventSequence
from gemctl.specs.data import FeatureSpec, SequenceSpec
from gemctl.specs.model import ModelConfig
from gemctl.specs.sequence import BlockAttentionSpec, KunlunSpec

State = dict[str, Tensor]
BLOCK = 64
HIDDEN_SCORE = -1e30


def logits(
    state: State,
    model: ModelConfig,
    spec: FeatureSpec,
    batch: Batch,
    categorical: dict[str, Tensor],
    events: dict[str, Tensor],
) -> Tensor:
    """[B, tasks]. `categorical` [B, d] by feature and `events` [ΣL, d] by "sequence.feature": looked-up embeddings."""
    x = _tokens(state, spec, batch, categorical)
    histories = {s.name: _events(state, model, s, batch.sequences[s.name], events) for s in spec.sequences}
    masks = {name: _mask(history.offsets) for name, history in batch.sequences.items()}
    for layer, spec_of_layer in enumerate(spec_ for spec_ in model.layers for _ in range(spec_.repeat)):
        parts = [x]
        block = spec_of_layer.sequence
        assert isinstance(block, KunlunSpec)
        x_sum = x
        if masks:
            x_sum = torch.einsum("cn,bnd->bcd", state[f"layers.{layer}.x_sum.compression.weight"], x)
        for name, mask in masks.items():
            s = histories[name]
            s = s + _personalised(state, f"layers.{layer}.sequence.{name}.ffn", model, block, s, x_sum)
            s = s + _attention(state, f"layers.{layer}.sequence.{name}.attention", model, block, s, mask)
            histories[name] = s
            parts.append(_pool(state, f"layers.{layer}.summary.{name}", model, s, mask))
        x = _wukong(state, f"layers.{layer}.interaction", model, torch.cat(parts, 1))
    flat = x.reshape(x.shape[0], x.shape[1] * x.shape[2])
    tasks = [_mlp(state, f"heads.tasks.{task}", flat) for task in range(len(spec.labels))]
    domain = batch.domain if spec.domain else torch.zeros_like(batch.rows)
    return torch.stack([output[torch.arange(len(batch)), domain] for output in tasks], 1)


def _tokens(state: State, spec: FeatureSpec, batch: Batch, categorical: dict[str, Tensor]) -> Tensor:
    tokens = [categorical[feature.name] for feature in spec.categorical]
    if spec.dense:
        tokens.append(_mlp(state, "tokens.dense", batch.dense))
    if spec.domain:
        one_hot = torch.eye(spec.domain.count, dtype=batch.dense.dtype)[batch.domain]
        tokens.append(one_hot @ state["tokens.domain.weight"])
    return _norm(torch.stack(tokens, 1))


def _events(
    state: State, model: ModelConfig, spec: SequenceSpec, history: EventSequence, events: dict[str, Tensor]
) -> Tensor:
    pad: Callable[[Tensor], Tensor] = lambda values: _pad(values, history.offsets)  # noqa: E731
    mask = _mask(history.offsets)
    length = mask.sum(1, keepdim=True)
    place = (length - 1 - torch.arange(mask.shape[1])).clamp(min=0).to(history.ages.dtype)
    columns = [pad(history.floats[feature.name]) for feature in spec.floats]
    columns += [torch.log(1 + pad(history.ages) / scale) / 4 for scale in model.age_scales]
    columns += [torch.log(1 + place) / 2, *(torch.exp(-place / tau) for tau in (1, 3, 9, 27))]
    ids = sum(pad(events[f"{spec.name}.{feature.name}"]) for feature in spec.ids)
    weight, bias = (state[f"events.{spec.name}.linear.{kind}"] for kind in ("weight", "bias"))
    return ids + torch.stack(columns, 2) @ weight.T + bias


def _personalised(state: State, name: str, model: ModelConfig, block: KunlunSpec, s: Tensor, x_sum: Tensor) -> Tensor:
    """GDPA: act(S W₁(x)) W₂(x), head by head; no softmax, so padding needs no mask (it is never read)."""
    hidden, width = block.ffn_hidden, model.dim // model.heads
    flat = x_sum.reshape(x_sum.shape[0], x_sum.shape[1] * model.dim)
    keys = flat @ state[f"{name}.keys.weight"].T + state[f"{name}.keys.bias"]
    values = flat @ state[f"{name}.values.weight"].T
    q, outputs = _norm(s), []
    for head in range(model.heads):
        columns = slice(head * width, (head + 1) * width)
        k, v = (part.reshape(-1, hidden, model.dim)[:, :, columns] for part in (keys, values))
        scores = _gelu_tanh(torch.einsum("bld,bkd->blk", q[:, :, columns], k) / math.sqrt(width))
        outputs.append(torch.einsum("blk,bkd->bld", scores, v) / math.sqrt(hidden))
    return torch.cat(outputs, 2)


def _attention(state: State, name: str, model: ModelConfig, block: KunlunSpec, s: Tensor, mask: Tensor) -> Tensor:
    place = torch.arange(mask.shape[1])
    distance = (place[:, None] - place[None, :]).abs()
    sees = torch.ones_like(distance, dtype=torch.bool)
    if isinstance(block.attention, BlockAttentionSpec):
        sees = place[:, None] // BLOCK == place[None, :] // BLOCK
    elif block.attention.window is not None:
        sees = distance <= block.attention.window
    three = _norm(s) @ state[f"{name}.queries_keys_values.weight"].T
    q, k, v = three[..., : model.dim], three[..., model.dim : 2 * model.dim], three[..., 2 * model.dim :]
    return _heads(q, k, v, model, sees & mask[:, None, :]) @ state[f"{name}.output.weight"].T


def _pool(state: State, name: str, model: ModelConfig, s: Tensor, mask: Tensor) -> Tensor:
    seeds = state[f"{name}.parts.0.seeds"]
    keys = _norm(s) @ state[f"{name}.parts.0.keys.weight"].T
    q = seeds.expand(s.shape[0], *seeds.shape)
    sees = mask[:, None, :].expand(-1, seeds.shape[0], -1)
    return _norm(_heads(q, keys, s, model, sees))


def _heads(q: Tensor, k: Tensor, v: Tensor, model: ModelConfig, sees: Tensor) -> Tensor:
    """softmax(QKᵀ/√d_h) V over the keys that a query sees [B, Lq, Lk], head by head; 0 where it sees none."""
    width, outputs = model.dim // model.heads, []
    for head in range(model.heads):
        columns = slice(head * width, (head + 1) * width)
        scores = torch.einsum("bqd,bkd->bqk", q[..., columns], k[..., columns]) / math.sqrt(width)
        scores = torch.where(sees, scores, torch.full_like(scores, HIDDEN_SCORE))
        if scores.shape[2]:
            scores = scores - scores.amax(2, keepdim=True).detach()
        weights = torch.exp(scores) * sees
        total = weights.sum(2, keepdim=True)
        outputs.append((weights / torch.where(total > 0, total, torch.ones_like(total))) @ v[..., columns])
    return torch.cat(outputs, 2)


def _wukong(state: State, name: str, model: ModelConfig, x: Tensor) -> Tensor:
    """FM(X) = X (XᵀY); the shortcut is X itself where the numbers of tokens agree."""
    rows, tokens, dim = x.shape
    products = torch.einsum("bnd,bmd,mk->bnk", x, x, state[f"{name}.members.0.columns.weight"])
    fm = _mlp(state, f"{name}.members.0.fm_mlp", _norm(products.reshape(rows, tokens * products.shape[2])))
    lc = torch.einsum("on,bnd->bod", state[f"{name}.members.0.compression.weight"], x)
    together = torch.cat([fm.reshape(rows, fm.shape[1] // dim, dim), lc], 1)
    mixed = f"{name}.residual.weight"
    shortcut = torch.einsum("on,bnd->bod", state[mixed], x) if mixed in state else x
    return _norm(together + shortcut)


def _mlp(state: State, name: str, x: Tensor) -> Tensor:
    """Linear layers 0, 2, 4, … with exact GELU between them."""
    number = 0
    while True:
        x = x @ state[f"{name}.{number}.weight"].T + state[f"{name}.{number}.bias"]
        number += 2
        if f"{name}.{number}.weight" not in state:
            return x
        x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-6)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _mask(offsets: Tensor) -> Tensor:
    """Bool [B, L]: True where row b has an event."""
    lengths = offsets[1:] - offsets[:-1]
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.arange(longest)[None, :] < lengths[:, None]


def _pad(values: Tensor, offsets: Tensor) -> Tensor:
    """[ΣL, …] → [B, L, …], zeros where a row has no event."""
    mask = _mask(offsets)
    place = (offsets[:-1, None] + torch.arange(mask.shape[1])[None, :])[mask]
    padded = torch.zeros(*mask.shape, *values.shape[1:], dtype=values.dtype)
    return padded.masked_scatter(mask.reshape(*mask.shape, *[1] * (values.dim() - 1)), values[place])
