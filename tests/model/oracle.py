"""The models written from the published formulas, padded and masked, in float64: what gemctl/model/ must compute.

    oracle = Oracle(dict(dense.named_parameters()), model, spec)
    oracle(batch, categorical, events)      # logits [B, tasks], differentiable
    oracle.work                             # multiply-adds of that call by module: "layers.0.interaction" and so on

One file on plain tensor arithmetic. Of gemctl it reads the configuration's dataclasses and the batch's fields, no
function; parameters are taken by their names in the dense part. It works out for itself which block a layer has.

    X [B, n, d] tokens     S [B, L, w] one history, oldest event first, mask [B, L] True where an event is real
    LN: mean 0, variance 1     MLP: linear layers with exact GELU between     σ: logistic     ‖: side by side

    tokens        X = LN(categorical ‖ MLP(floats) ‖ domain's row)
    events        S = Σ ids + W [floats ‖ log(1 + age/scale)/4 by scale ‖ log(1 + place)/2 ‖ e^(−place/τ), τ = 1 3 9 27]
                  + b; place: 0 for the newest event
    merge         s_p = MLP(z_p ⊙ MLP_mask(z_p)), z_p: the events at place p of all histories, zeros where there is none
    each layer    X_sum = Gate(C X);  first layer: S = [X_sum ‖ S] if any summary reads CLS tokens, then S A
      kunlun      S += act(LN(S) K(x)ᵀ/√d_h) V(x)/√hidden by head, x = flatten(X_sum) or C flatten(X_sum);  S += MHA(S)
      interformer S += LN(S) f(x), f(x) = K(x)ᵀ V(x)/√(w·rank);  S += MHA(S);  without residual both replace S
      hstu        U, V, Q, K = SiLU(LN(S) W);  S += (LN(SiLU(QKᵀ/√d_h)V/scale) ⊙ U) W_o, causal
      MHA         softmax(QKᵀ/√d_h) V W_o of LN(S): all, ±window, causal, or blocks of 64; q, k normed, then rotated
      pma, hsp    P = softmax(E K(LN(S))ᵀ/√d_h) S;  hsp: E normed, then Σ_r Z_r P W_r
      last_k, cls the newest k events, newest first, zeros beyond; the CLS tokens
      summary     H = LN([parts] A), then Gate
      interaction reads [X ‖ every H] or [X_sum ‖ every H]; LN(core + R·reads) for wukong, experts, dhen, own blocks,
                  LN(core) for mlp, dot, dcnv2, token_mixer; R is the identity where the numbers of tokens agree
      token_mixer M + W₂ᵗ GELU(W₁ᵗ M_t + b₁ᵗ) + b₂ᵗ, M = LN(Z + mix(Z)), Z: R·reads as wide tokens
    logits        of each task, MLP(flatten(X)) at the row's domain

Work is counted where the formulas multiply matrices: once for each real event or row and each number of the matrix,
and 2·w for each pair of a query and a key that it sees (scores, then values). Masked and padded entries count nothing;
X(XᵀY) counts as two products with Y, also where it is computed as (XXᵀ)Y.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gemctl.data.batch import Batch
from gemctl.specs.data import FeatureSpec, SequenceSpec
from gemctl.specs.interaction import (
    CustomSpec,
    DcnSpec,
    DhenSpec,
    DotSpec,
    MlpSpec,
    TokenMixerSpec,
    WukongExpertsSpec,
    WukongSpec,
)
from gemctl.specs.model import LayerSpec, ModelConfig
from gemctl.specs.sequence import (
    BlockAttentionSpec,
    ClsSpec,
    GatedSpec,
    HspSpec,
    HstuSpec,
    InterFormerSpec,
    LastSpec,
    PmaSpec,
)

BLOCK = 64
EPSILON = 1e-6

Own = Callable[["Oracle", str, str, Tensor], Tensor]
"""A block of the user's own: (oracle, the interaction's name, the block's prefix in it, X) → its tokens."""


@dataclass(frozen=True)
class History:
    """One history, padded at the end. `heads` are its attention's; the first `cls` of every row are CLS tokens."""

    s: Tensor
    mask: Tensor
    age: Tensor
    heads: int = 0
    cls: int = 0

    @property
    def place(self) -> Tensor:
        """[B, L]: 0 for the newest event, negative where there is none."""
        return self.mask.sum(1, keepdim=True) - 1 - torch.arange(self.mask.shape[1])


class Oracle:
    """Logits of one model over its parameters `state`; `own` says what the user's blocks compute, by their kind."""

    def __init__(
        self, state: Mapping[str, Tensor], model: ModelConfig, spec: FeatureSpec, own: Mapping[str, Own] | None = None
    ) -> None:
        self.state, self.model, self.spec, self.own = state, model, spec, own or {}
        self.work: Counter[str] = Counter()
        self.layers = [layer for layer in model.layers for _ in range(layer.repeat)]

    def __call__(self, batch: Batch, categorical: Mapping[str, Tensor], events: Mapping[str, Tensor]) -> Tensor:
        """[B, tasks]. `categorical` [B, d] by feature and `events` [ΣL, d] by "sequence.feature": looked-up rows."""
        self.work.clear()
        x = self.tokens(batch, categorical)
        histories = self.merged({s.name: self.encoded(s, batch, events) for s in self.spec.sequences})
        read: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x_sum = self.x_sum(index, layer, x)
            for name in histories:
                histories[name] = self.advanced(name, index, histories[name], x_sum)
                if self.makes_summary(name, index):
                    read[name] = self.summary(f"layers.{index}.summary.{name}", layer, name, histories[name])
            tokens = torch.cat([x_sum if layer.reads == "x_sum" else x, *read.values()], 1)
            x = self.interaction(f"layers.{index}.interaction", layer.interaction, tokens)
        flat = x.flatten(1)
        domain = batch.domain if self.spec.domain else torch.zeros_like(batch.rows)
        heads = [self.mlp(f"heads.tasks.{task}", "", flat) for task in range(len(self.spec.labels))]
        return torch.stack([head[torch.arange(len(batch)), domain] for head in heads], 1)

    # Which blocks there are

    def makes_summary(self, name: str, index: int) -> bool:
        """CompSkip: layers of its parity make a summary, and the first; beyond an event type's depth none does."""
        skip = self.layers[index].comp_skip
        return index < self.depth(name) and (index == 0 or skip is None or skip == parity(index))

    def block_counts(self, name: str, index: int) -> bool:
        """A layer's block is worth having if a summary is made of it or of something after it."""
        return any(self.makes_summary(name, later) for later in range(index, len(self.layers)))

    def depth(self, name: str) -> int:
        personal = self.model.event_types.get(name)
        return min(personal.depth or len(self.layers), len(self.layers)) if personal else len(self.layers)

    # What goes in

    def tokens(self, batch: Batch, categorical: Mapping[str, Tensor]) -> Tensor:
        found = [categorical[feature.name] for feature in self.spec.categorical]
        if self.spec.dense:
            found.append(self.mlp("tokens.dense", "", batch.dense))
        if self.spec.domain:
            found.append(self.state["tokens.domain.weight"][batch.domain])
        return norm(torch.stack(found, 1))

    def encoded(self, sequence: SequenceSpec, batch: Batch, events: Mapping[str, Tensor]) -> History:
        raw = batch.sequences[sequence.name]
        mask = mask_of(raw.offsets)
        age = pad(raw.ages, raw.offsets)
        history = History(age, mask, age)
        place = history.place.clamp(min=0).to(age.dtype)
        columns = [pad(raw.floats[feature.name], raw.offsets) for feature in sequence.floats]
        columns += [torch.log(1 + age / scale) / 4 for scale in self.model.age_scales]
        columns += [torch.log(1 + place) / 2, *(torch.exp(-place / tau) for tau in (1, 3, 9, 27))]
        s = self.linear(f"events.{sequence.name}", "linear", torch.stack(columns, 2), mask)
        for feature in sequence.ids:
            s = s + pad(events[f"{sequence.name}.{feature.name}"], raw.offsets)
        return replace(history, s=s)

    def merged(self, histories: dict[str, History]) -> dict[str, History]:
        """InterFormer's MaskNet over all of them, side by side from the newest event back; as old as the youngest."""
        if self.model.merge is None or not histories:
            return {name: self.personal(name, history) for name, history in histories.items()}
        lengths = torch.stack([history.mask.sum(1) for history in histories.values()]).amax(0)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        mask = mask_of(offsets)
        beside, ages = [], []
        for history in histories.values():
            column = torch.arange(mask.shape[1]) + (history.mask.sum(1) - lengths)[:, None]  # where its event stands
            exists = mask & (column >= 0)
            row, at = exists.nonzero(as_tuple=True)[0], column[exists]
            beside.append(put(exists, history.s[row, at]))
            ages.append(torch.where(exists, put(exists, history.age[row, at]), torch.inf))
        z = torch.cat(beside, 2)
        z = z * self.mlp("merge", "mask", z, mask)
        age = torch.where(mask, torch.stack(ages).amin(0), 0)
        return {"merged": self.personal("merged", History(self.mlp("merge", "mlp", z, mask), mask, age))}

    def personal(self, name: str, history: History) -> History:
        personal = self.model.event_types.get(name)
        return replace(history, heads=(personal and personal.heads) or self.model.heads)

    def entered(self, name: str, history: History, x_sum: Tensor) -> History:
        """CLS tokens before the oldest event, then the history's own width."""
        if any(isinstance(part, ClsSpec) for layer in self.layers for part in parts(layer.summary)):
            rows, count = x_sum.shape[:2]
            s = torch.cat([x_sum, history.s], 1)
            mask = torch.cat([torch.ones(rows, count, dtype=torch.bool), history.mask], 1)
            age = torch.cat([history.age.new_zeros(rows, count), history.age], 1)
            history = replace(history, s=s, mask=mask, age=age, cls=count)
        personal = self.model.event_types.get(name)
        if personal is not None and personal.dim is not None and personal.dim != self.model.dim:
            s = self.product(f"layers.0.adapters.{name}", "weight", history.s, history.mask)
            history = replace(history, s=s)
        return history

    def x_sum(self, index: int, layer: LayerSpec, x: Tensor) -> Tensor:
        """Empty where nothing reads it."""
        name = f"layers.{index}.x_sum"
        if f"{name}.compression.weight" not in self.state:
            return x[:, :0]
        return self.gate(name, layer.x_sum_gate, self.mix(name, "compression.weight", x))

    # Sequence blocks

    def advanced(self, name: str, index: int, history: History, x_sum: Tensor) -> History:
        if index == 0:
            history = self.entered(name, history, x_sum)
        if not self.block_counts(name, index):
            return history
        return self.block(f"layers.{index}.sequence.{name}", index, name, history, x_sum)

    def block(self, name: str, index: int, own: str, history: History, x_sum: Tensor) -> History:
        layer, s = self.layers[index], history.s
        spec, personal = layer.sequence, self.model.event_types.get(own)
        asked = personal.window if personal else None
        if isinstance(spec, HstuSpec):
            window = spec.window if asked is None else asked
            return replace(history, s=s + self.hstu(f"{name}.attention", spec, window, history))
        residual = True
        if isinstance(spec, InterFormerSpec):
            residual = spec.residual
            made = self.row_matrix(f"{name}.ffn", spec.ffn_rank, history, x_sum)
        else:
            made = self.personalised(f"{name}.ffn", spec.activation, spec.ffn_hidden, history, x_sum)
        s = s + made if residual else made
        if layer.comp_skip == parity(index):
            return replace(history, s=s)
        history = replace(history, s=s)
        made = self.attention(f"{name}.attention", spec.attention, asked, history)
        return replace(history, s=s + made if residual else made)

    def personalised(self, name: str, activation: str, hidden: int, history: History, x_sum: Tensor) -> Tensor:
        """Kunlun's GDPA: a two-layer network whose weights belong to the row, act(S W₁(x)) W₂(x) by head."""
        keys, values, q = self.keys_values(name, hidden, history, x_sum)
        outputs = []
        for head in heads_of(q, history.heads):
            scores = torch.einsum("blw,bkw->blk", q[..., head], keys[..., head]) / math.sqrt(head.stop - head.start)
            weights = activated(activation, scores) / math.sqrt(hidden)
            outputs.append(torch.einsum("blk,bkw->blw", weights, values[..., head]))
        return torch.cat(outputs, 2)

    def row_matrix(self, name: str, rank: int, history: History, x_sum: Tensor) -> Tensor:
        """InterFormer's PFFN: each event times the row's own matrix f(x) [w, w], here of rank `rank`."""
        keys, values, normed = self.keys_values(name, rank, history, x_sum)
        matrix = torch.einsum("bkv,bkw->bvw", keys, values) / math.sqrt(normed.shape[2] * rank)
        return torch.einsum("blv,bvw->blw", normed, matrix)

    def keys_values(self, name: str, hidden: int, history: History, x_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width, flat = history.s.shape[2], x_sum.flatten(1)
        if f"{name}.code.weight" in self.state:
            flat = self.product(name, "code.weight", flat)
        self.pairs(name, width, history.mask[:, :, None].expand(-1, -1, hidden))
        keys = self.linear(name, "keys", flat).unflatten(1, (hidden, width))
        return keys, self.product(name, "values.weight", flat).unflatten(1, (hidden, width)), norm(history.s)

    def attention(self, name: str, spec: Any, window: int | None, history: History) -> Tensor:
        """Softmax attention, its output projected."""
        width = history.s.shape[2]
        made = self.product(name, "queries_keys_values.weight", norm(history.s), history.mask)
        q, k, v = made[..., :width], made[..., width : 2 * width], made[..., 2 * width :]
        if spec.qk_norm:
            q, k = rms_norm_heads(q, history.heads), rms_norm_heads(k, history.heads)
        column = torch.arange(history.mask.shape[1])
        if isinstance(spec, BlockAttentionSpec):
            sees = column[:, None] // BLOCK == column // BLOCK
            if spec.rope:
                q, k, v = (rotated(x, column.expand_as(history.mask), history.heads) for x in (q, k, v))
        else:
            sees = visible(column, spec.window if window is None else window, spec.causal)
            q, k = self.positioned(spec, q, k, history)
        seen = self.softmax(name, q, k, v, history.heads, history.mask[:, :, None] & sees & history.mask[:, None])
        return self.product(name, "output.weight", seen, history.mask)

    def hstu(self, name: str, spec: HstuSpec, window: int | None, history: History) -> Tensor:
        width = history.s.shape[2]
        made = silu(self.product(name, "gate_values_queries_keys.weight", norm(history.s), history.mask))
        u, v, q, k = (made[..., i * width : (i + 1) * width] for i in range(4))
        q, k = self.positioned(spec, q, k, history)
        sees = history.mask[:, :, None] & visible(torch.arange(history.mask.shape[1]), window, causal=True)
        sees = sees & history.mask[:, None]
        self.pairs(name, width, sees)
        outputs = []
        for head in heads_of(q, history.heads):
            scores = torch.einsum("bqw,bkw->bqk", q[..., head], k[..., head]) / math.sqrt(head.stop - head.start)
            outputs.append((silu(scores) * sees / spec.length_scale) @ v[..., head])
        return self.product(name, "output.weight", norm(torch.cat(outputs, 2)) * u, history.mask)

    def positioned(self, spec: Any, q: Tensor, k: Tensor, history: History) -> tuple[Tensor, Tensor]:
        if spec.position == "none":
            return q, k
        time = history.place.to(q.dtype)
        if spec.position == "rote":
            time = time + torch.log(1 + history.age / spec.rote_scale)
        return rotated(q, time, history.heads), rotated(k, time, history.heads)

    def softmax(self, name: str, q: Tensor, k: Tensor, v: Tensor, heads: int, sees: Tensor) -> Tensor:
        """softmax(QKᵀ/√d_h) V over what `sees` [B, Lq, Lk] shows, by head; 0 where a query sees nothing."""
        self.pairs(name, q.shape[2], sees)
        outputs = []
        for head in heads_of(q, heads):
            scores = torch.einsum("bqw,bkw->bqk", q[..., head], k[..., head]) / math.sqrt(head.stop - head.start)
            scores = torch.where(sees, scores, -torch.inf)
            top = scores.detach().amax(2, keepdim=True) if scores.shape[2] else 0
            top = torch.where(torch.isinf(top), 0, top) if isinstance(top, Tensor) else 0
            weights = torch.exp(torch.where(sees, scores - top, -torch.inf))
            total = weights.sum(2, keepdim=True)
            outputs.append((weights / torch.where(total > 0, total, 1)) @ v[..., head])
        return torch.cat(outputs, 2)

    # Summaries

    def summary(self, name: str, layer: LayerSpec, own: str, history: History) -> Tensor:
        personal = self.model.event_types.get(own)
        tokens = personal.tokens if personal else None
        made = [
            self.part(f"parts.{number}", name, part, tokens, history)
            for number, part in enumerate(parts(layer.summary))
        ]
        together = torch.cat(made, 1)
        if together.shape[2] != self.model.dim:
            together = self.product(name, "adapter.weight", together)
        gate = layer.summary.gate if isinstance(layer.summary, GatedSpec) else "none"
        return self.gate(name, gate, norm(together))

    def part(self, prefix: str, name: str, part: Any, asked: int | None, history: History) -> Tensor:
        if isinstance(part, ClsSpec):
            return history.s[:, : history.cls]
        tokens = asked or part.tokens
        if isinstance(part, LastSpec):
            rows = [s[m][cls:].flip(0)[:tokens] for s, m, cls in per_row(history)]
            filled = [torch.cat([row, row.new_zeros(tokens - len(row), row.shape[1])]) for row in rows]
            return torch.stack(filled) if filled else history.s.new_zeros(0, tokens, history.s.shape[2])
        assert isinstance(part, PmaSpec | HspSpec)
        seeds = self.state[f"{name}.{prefix}.seeds"]
        seeds = norm(seeds) if isinstance(part, HspSpec) else seeds
        keys = self.product(name, f"{prefix}.keys.weight", norm(history.s), history.mask)
        sees = history.mask[:, None].expand(-1, len(seeds), -1)
        q = seeds.expand(len(history.s), *seeds.shape)
        pooled = self.softmax(name, q, keys, history.s, history.heads, sees)
        return self.kronecker(name, prefix, part.rank, tokens, pooled) if isinstance(part, HspSpec) else pooled

    def kronecker(self, name: str, prefix: str, rank: int, tokens: int, pooled: Tensor) -> Tensor:
        """Kunlun's SumKronLinear Σ_r Z_r P W_r: Z_r [tokens, seeds], W_r [w, w]."""
        rows, seeds, width = pooled.shape
        z = self.state[f"{name}.{prefix}.tokens.weight"].unflatten(0, (rank, tokens))
        w = self.state[f"{name}.{prefix}.widths.weight"].unflatten(1, (rank, width))
        self.work[name] += rows * rank * tokens * width * (seeds + width)
        return torch.einsum("rts,bsi,ori->bto", z, pooled, w)

    def gate(self, name: str, kind: str, z: Tensor) -> Tensor:
        if kind == "none":
            return z
        made = self.mlp(name, "gate.mlp", z)
        return sigmoid(z * made) if kind == "literal" else z * sigmoid(made)

    # Interactions

    def interaction(self, name: str, spec: Any, x: Tensor) -> Tensor:
        cores = spec.members if isinstance(spec, DhenSpec) else [spec]
        made = torch.cat([self.core(f"members.{i}", name, core, x) for i, core in enumerate(cores)], 1)
        if isinstance(spec, MlpSpec | DotSpec | DcnSpec | TokenMixerSpec):
            return norm(made)
        shortcut = x if made.shape[1] == x.shape[1] else self.mix(name, "residual.weight", x)
        return norm(made + shortcut)

    def core(self, prefix: str, name: str, spec: Any, x: Tensor) -> Tensor:
        rows, tokens, dim = x.shape
        if isinstance(spec, WukongSpec):
            return self.wukong(prefix, name, spec, x)
        if isinstance(spec, WukongExpertsSpec):
            return self.experts(prefix, name, spec, x)
        if isinstance(spec, CustomSpec):
            return self.own[spec.kind](self, name, prefix, x)
        if isinstance(spec, TokenMixerSpec):
            return self.token_mixer(prefix, name, spec, x)
        flat = features = x.flatten(1)
        if isinstance(spec, DotSpec):
            self.work[name] += rows * tokens * tokens * dim
            products = [
                (x[:, i] * x[:, j]).sum(1) / math.sqrt(dim) for i in range(tokens) for j in range(i + 1, tokens)
            ]
            features = torch.cat([flat, torch.stack(products, 1)], 1) if products else flat
        elif isinstance(spec, DcnSpec):
            for cross in range(spec.crosses):
                down = self.product(name, f"{prefix}.crosses.{cross}.down.weight", features)
                features = flat * self.linear(name, f"{prefix}.crosses.{cross}.up", down) + features
        return self.mlp(name, f"{prefix}.mlp", features).unflatten(1, (spec.tokens, dim))

    def wukong(self, prefix: str, name: str, spec: WukongSpec, x: Tensor) -> Tensor:
        """FMB ‖ LCB, with FM(X) = (XXᵀ)Y."""
        rows, tokens, dim = x.shape
        if spec.fm == "attentive":
            compressed = self.mix(name, f"{prefix}.columns.compression.weight", x)
            y = self.mlp(name, f"{prefix}.columns.mlp", compressed.flatten(1)).unflatten(1, (tokens, spec.rank))
        else:
            y = self.state[f"{name}.{prefix}.columns.weight"].expand(rows, tokens, spec.rank)
        self.work[name] += 2 * rows * tokens * spec.rank * dim
        products = torch.einsum("bnd,bmd,bmk->bnk", x, x, y).flatten(1)
        fm = self.mlp(name, f"{prefix}.fm_mlp", norm(products)).unflatten(1, (spec.fm_tokens, dim))
        return torch.cat([fm, self.mix(name, f"{prefix}.compression.weight", x)], 1)

    def experts(self, prefix: str, name: str, spec: WukongExpertsSpec, x: Tensor) -> Tensor:
        """Expert e has tokens e·w … e·w + w − 1 modulo n, w = ⌈n/E⌉; Σ_e M_e LN(FMB ‖ LCB + shortcut)."""
        rows, tokens, dim = x.shape
        part = math.ceil(tokens / spec.experts)
        total = torch.zeros(rows, spec.tokens, dim, dtype=x.dtype)
        for expert in range(spec.experts):
            own = torch.stack([x[:, (expert * part + i) % tokens] for i in range(part)], 1)
            stacked = {key: self.state[f"{name}.{prefix}.{key}"][expert] for key in self.stacked(f"{name}.{prefix}.")}
            self.work[name] += 2 * rows * part * spec.rank * dim
            hidden = norm(torch.einsum("bnd,bmd,mk->bnk", own, own, stacked["fm_columns"]).flatten(1))
            for number in range(len(spec.hidden) + 1):
                weight, bias = stacked[f"fm_mlp.{number}.weight"], stacked[f"fm_mlp.{number}.bias"]
                self.work[name] += rows * weight.numel()
                hidden = (gelu(hidden) if number else hidden) @ weight.T + bias
            made = torch.cat(
                [hidden.unflatten(1, (spec.fm_tokens, dim)), self.mixed(name, stacked["compression"], own)], 1
            )
            shortcut = self.mixed(name, stacked["residual"], own) if made.shape[1] != part else own
            total = total + self.mixed(name, stacked["merge"], norm(made + shortcut))
        return total

    def token_mixer(self, prefix: str, name: str, spec: TokenMixerSpec, x: Tensor) -> Tensor:
        """New token t is part t of each wide token; then each token's own two layers."""
        z = x if x.shape[1] == spec.tokens else self.mix(name, f"{prefix}.entry.weight", x)
        count, width = spec.tokens // spec.group, spec.group * x.shape[2]
        wide = [z[:, t * spec.group : (t + 1) * spec.group].flatten(1) for t in range(count)]
        part = width // count
        made = []
        for t in range(count):
            m = norm(wide[t] + torch.cat([token[:, t * part : (t + 1) * part] for token in wide], 1))
            hidden = gelu(self.own_linear(name, f"{prefix}.up", m, t, spec.hidden))
            made.append(m + self.own_linear(name, f"{prefix}.down", hidden, t, width))
        return torch.cat(made, 1).unflatten(1, (spec.tokens, x.shape[2]))

    def own_linear(self, name: str, prefix: str, x: Tensor, token: int, outputs: int) -> Tensor:
        """The linear layer of one token, of those stacked."""
        rows = slice(token * outputs, (token + 1) * outputs)
        weight, bias = (self.state[f"{name}.{prefix}.{kind}"][rows] for kind in ("weight", "bias"))
        self.work[name] += len(x) * weight.numel()
        return x @ weight.T + bias

    def stacked(self, prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in self.state if name.startswith(prefix)]

    # Products, counted

    def product(self, name: str, weight: str, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x Wᵀ; `mask` tells which of x's vectors are real."""
        matrix = self.state[f"{name}.{weight}"]
        vectors = math.prod(x.shape[:-1]) if mask is None else int(mask.sum())
        self.work[name] += vectors * matrix.numel()
        return x @ matrix.T

    def linear(self, name: str, prefix: str, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.product(name, f"{prefix}.weight", x, mask) + self.state[f"{name}.{prefix}.bias"]

    def mlp(self, name: str, prefix: str, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Linear layers 0, 2, 4, …"""
        start, number = f"{prefix}." if prefix else "", 0
        while True:
            x = self.linear(name, f"{start}{number}", x, mask)
            number += 2
            if f"{name}.{start}{number}.weight" not in self.state:
                return x
            x = gelu(x)

    def mix(self, name: str, weight: str, x: Tensor) -> Tensor:
        return self.mixed(name, self.state[f"{name}.{weight}"], x)

    def mixed(self, name: str, matrix: Tensor, x: Tensor) -> Tensor:
        """W X: tokens mixed, [B, n, d] → [B, outputs, d]."""
        self.work[name] += x.shape[0] * x.shape[2] * matrix.numel()
        return torch.einsum("on,bnd->bod", matrix, x)

    def pairs(self, name: str, width: int, sees: Tensor) -> None:
        self.work[name] += 2 * width * int(sees.sum())


def parity(index: int) -> str:
    return "odd" if index % 2 else "even"


def parts(summary: Any) -> list[Any]:
    return summary.parts if isinstance(summary, GatedSpec) else [summary]


def per_row(history: History) -> list[tuple[Tensor, Tensor, int]]:
    return [(s, mask, history.cls) for s, mask in zip(history.s, history.mask, strict=True)]


def heads_of(x: Tensor, heads: int) -> list[slice]:
    width = x.shape[-1] // heads
    return [slice(head * width, (head + 1) * width) for head in range(heads)]


def visible(column: Tensor, window: int | None, causal: bool) -> Tensor:
    """Bool [L, L]: True where the query of a row sees the key of a column."""
    ahead = column - column[:, None]
    sees = torch.ones_like(ahead, dtype=torch.bool) if window is None else ahead.abs() <= window
    return sees & (ahead <= 0) if causal else sees


def rotated(x: Tensor, time: Tensor, heads: int) -> Tensor:
    """Pairs (2i, 2i+1) of every head as complex numbers, times e^(iθt), θ = 10000^(−2i/d_h); time [B, L]."""
    width = x.shape[2] // heads
    turn = torch.stack([time.to(x.dtype) * 10000.0 ** (-2 * i / width) for i in range(width // 2)], 2)
    pairs = torch.view_as_complex(x.unflatten(2, (heads, width // 2, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(turn), turn)[:, :, None]
    return torch.view_as_real(turned).flatten(2)


def rms_norm_heads(x: Tensor, heads: int) -> Tensor:
    split = x.unflatten(2, (heads, -1))
    return (split / torch.sqrt((split * split).mean(-1, keepdim=True) + EPSILON)).flatten(2)


def norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPSILON)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def activated(kind: str, x: Tensor) -> Tensor:
    positive = torch.where(x > 0, x, 0)
    return {
        "identity": lambda: x,
        "gelu": lambda: gelu(x),
        "gelu_approx": lambda: gelu_tanh(x),
        "fast_gelu": lambda: gelu_tanh(x),
        "relu": lambda: positive,
        "relu_square": lambda: positive * positive,
        "leaky_relu": lambda: torch.where(x > 0, x, 0.01 * x),
        "silu": lambda: silu(x),
        "hardswish": lambda: x * torch.clamp(x + 3, 0, 6) / 6,
    }[kind]()


def mask_of(offsets: Tensor) -> Tensor:
    """Bool [B, L]: True where row b has an event."""
    lengths = offsets[1:] - offsets[:-1]
    longest = int(lengths.max()) if len(lengths) else 0
    return torch.arange(longest) < lengths[:, None]


def pad(values: Tensor, offsets: Tensor) -> Tensor:
    """[ΣL, …] → [B, L, …]."""
    return put(mask_of(offsets), values)


def put(mask: Tensor, values: Tensor) -> Tensor:
    """`values` [number of Trues, …] at the Trues of `mask` [B, L], row by row; zeros elsewhere."""
    index = mask.flatten().nonzero()[:, 0]
    flat = torch.zeros(mask.numel(), *values.shape[1:], dtype=values.dtype)
    return flat.index_put((index,), values).unflatten(0, mask.shape)
