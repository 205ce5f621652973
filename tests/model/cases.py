"""Models and feature specs that between them use every part, and random jagged batches for any spec."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gemctl.data.batch import Batch, EventSequence, Jagged
from gemctl.model.embeddings import Embedded
from gemctl.model.gem import DenseModel
from gemctl.specs.data import CategoricalSpec, DenseSpec, EventIdSpec, FeatureSpec, LabelSpec, SequenceSpec, TableSpec
from gemctl.specs.interaction import DcnSpec, DhenSpec, DotSpec, MlpSpec, WukongExpertsSpec, WukongSpec
from gemctl.specs.model import EventTypeSpec, LayerSpec, MaskNetSpec, ModelConfig
from gemctl.specs.sequence import (
    BlockAttentionSpec,
    ClsSpec,
    GatedSpec,
    HspSpec,
    HstuSpec,
    InterFormerSpec,
    JaggedAttentionSpec,
    KunlunSpec,
    LastSpec,
    PmaSpec,
)
from tests.support.small import SPEC

LENGTHS = [5, 0, 1, 9, 2, 0, 7]
LONG = [70, 0, 1, 130, 64, 65, 3]  # around the edges of blocks of 64 events

CLICKS = SequenceSpec(
    "clicks",
    [EventIdSpec("page", "page"), EventIdSpec("user", "user")],
    "click_time",
    [DenseSpec("dwell"), DenseSpec("depth")],
)
SEVERAL = replace(  # three histories; "item" and "user" are shared by candidates and events
    SPEC,
    tables=[*SPEC.tables, TableSpec("page", 11)],
    sequences=[*SPEC.sequences, CLICKS, SequenceSpec("buys", [EventIdSpec("item", "item")], "buy_time")],
)
PLAIN = FeatureSpec(
    name="plain",
    tables=[TableSpec("item", 41)],
    categorical=[CategoricalSpec("candidate", "item"), CategoricalSpec("last", "item")],
    sequences=[SequenceSpec("history", [EventIdSpec("item", "item")], "history_time")],
    labels=[LabelSpec("click")],
    timestamp="time",
)
TABULAR = replace(SPEC, sequences=[])
FLOATS = replace(SPEC, tables=[], categorical=[], sequences=[])

NANO = ModelConfig()
SMALL = ModelConfig(dim=8)
DEEP = ModelConfig(
    dim=12,
    heads=3,
    layers=[
        LayerSpec(
            repeat=3,
            x_sum=3,
            interaction=WukongSpec(fm_tokens=3, lc_tokens=2, rank=5, hidden=[7, 6]),
            sequence=KunlunSpec(ffn_hidden=5),
            summary=PmaSpec(tokens=2),
        )
    ],
    head_hidden=[],
)
TWICE = replace(SMALL, layers=[LayerSpec(repeat=2)])
WINDOW = replace(SMALL, layers=[LayerSpec(repeat=2, sequence=KunlunSpec(attention=JaggedAttentionSpec(window=2)))])
BLOCKS = replace(SMALL, layers=[LayerSpec(repeat=2, sequence=KunlunSpec(attention=BlockAttentionSpec()))])


def layers(*specs: LayerSpec) -> ModelConfig:
    return ModelConfig(dim=8, layers=list(specs), head_hidden=[5])


SMALL_WUKONG = WukongSpec(fm_tokens=3, lc_tokens=2, rank=3, hidden=[6])
PARTS = GatedSpec(parts=[ClsSpec(), PmaSpec(tokens=2), LastSpec(tokens=3)])
COMP_SKIP = LayerSpec(
    repeat=4,
    x_sum=3,
    comp_skip="even",
    reads="x_sum",
    interaction=SMALL_WUKONG,
    sequence=KunlunSpec(ffn_hidden=3, attention=JaggedAttentionSpec(window=3, position="rote", qk_norm=True)),
    summary=HspSpec(seeds=5, tokens=2, rank=2),
)
INTERFORMER = LayerSpec(
    repeat=2,
    x_sum=2,
    x_sum_gate="literal",
    interaction=DotSpec(tokens=3, hidden=[5]),
    sequence=InterFormerSpec(ffn_rank=5, attention=JaggedAttentionSpec(position="rope", causal=True)),
    summary=PARTS,
)
HSTU = LayerSpec(
    repeat=2, interaction=SMALL_WUKONG, sequence=HstuSpec(position="rope", window=4), summary=LastSpec(tokens=2)
)


@dataclass(frozen=True)
class Case:
    """A model on a spec, and the lengths of every history of its batch (of a second sequence: in reverse, …)."""

    model: ModelConfig
    spec: FeatureSpec
    lengths: tuple[int, ...] = tuple(LENGTHS)


CASES = {
    "gem_nano": Case(NANO, SPEC),
    "three layers": Case(DEEP, SPEC),
    "window": Case(WINDOW, SPEC),
    "blocks": Case(BLOCKS, SPEC, tuple(LONG)),
    "several sequences": Case(TWICE, SEVERAL),
    "no sequence": Case(TWICE, TABULAR),  # its second layer has an identity as shortcut
    "no dense": Case(DEEP, replace(SPEC, dense=[])),
    "no domain": Case(SMALL, replace(SPEC, domain=None)),
    "ids of one table": Case(SMALL, PLAIN),
    "no table": Case(SMALL, FLOATS),
    "short histories": Case(SMALL, SPEC, (0, 1, 1, 0)),
    "no event": Case(SMALL, SPEC, (0, 0)),
    "no row": Case(TWICE, SEVERAL, ()),
}
MORE = {
    "CompSkip, even": Case(layers(COMP_SKIP), SEVERAL),
    "CompSkip, odd": Case(layers(replace(COMP_SKIP, comp_skip="odd", repeat=3)), SPEC),
    "interformer": Case(replace(layers(INTERFORMER), dim=16), SEVERAL),  # at 8 its gradients cancel too much for fp32
    "interformer, no residual": Case(
        layers(
            replace(
                INTERFORMER,
                x_sum_gate="scaled",
                sequence=InterFormerSpec(ffn_rank=5, residual=False, attention=JaggedAttentionSpec(position="rope")),
                summary=replace(PARTS, gate="scaled"),
            )
        ),
        SPEC,
    ),
    "hstu": Case(layers(HSTU), SEVERAL),
    "rotary blocks": Case(
        layers(LayerSpec(sequence=KunlunSpec(attention=BlockAttentionSpec(rope=True, qk_norm=True)))), SPEC, tuple(LONG)
    ),
    "event types": Case(
        replace(
            layers(replace(COMP_SKIP, comp_skip=None)),
            event_types={
                "history": EventTypeSpec(dim=12, heads=3, tokens=3, depth=2, window=1),
                "clicks": EventTypeSpec(dim=4, heads=1),
            },
        ),
        SEVERAL,
    ),
    "event types with CLS": Case(
        replace(layers(INTERFORMER), event_types={"history": EventTypeSpec(dim=12, depth=1)}), SEVERAL
    ),
    "merged": Case(replace(layers(INTERFORMER), merge=MaskNetSpec(hidden=7)), SEVERAL),
    "merged one": Case(replace(SMALL, merge=MaskNetSpec(hidden=3)), SPEC),
    "dhen": Case(
        layers(
            LayerSpec(
                repeat=2,
                interaction=DhenSpec(
                    members=[
                        replace(SMALL_WUKONG, fm="attentive", fm_compression=3, fm_hidden=[5]),
                        DcnSpec(tokens=2, hidden=[5], crosses=2, rank=3),
                        MlpSpec(tokens=1, hidden=[4]),
                        WukongExpertsSpec(experts=3, tokens=4, fm_tokens=2, lc_tokens=1, rank=2, hidden=[4]),
                    ]
                ),
            )
        ),
        SPEC,
    ),
    "experts": Case(
        layers(
            LayerSpec(
                repeat=2,
                interaction=WukongExpertsSpec(experts=2, tokens=6, fm_tokens=2, lc_tokens=2, rank=3, hidden=[4]),
            )
        ),
        SPEC,
    ),
    "mlp and dcnv2": Case(
        layers(
            LayerSpec(interaction=MlpSpec(tokens=3, hidden=[])),
            LayerSpec(interaction=DcnSpec(tokens=2, hidden=[5], crosses=1, rank=2), reads="x_sum"),
        ),
        SPEC,
    ),
    "one token": Case(layers(LayerSpec(interaction=DotSpec(tokens=1, hidden=[3]))), replace(FLOATS, domain=None)),
    "mixed, no row": Case(layers(INTERFORMER, replace(COMP_SKIP, repeat=1)), SEVERAL, ()),
    "mixed, no event": Case(layers(INTERFORMER, replace(COMP_SKIP, repeat=1), HSTU), SEVERAL, (0, 0)),
}
ALL = CASES | MORE


def random_batch(spec: FeatureSpec, lengths: tuple[int, ...], seed: int = 0) -> Batch:
    """One row per entry of `lengths`; floats are float64 (the formulas' precision; `cast` makes others)."""
    draw = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    sizes = {table.name: table.rows for table in spec.tables}

    def ids(table: str, count: int) -> Tensor:
        return torch.randint(sizes[table], (count,), generator=draw)

    def floats(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    categorical = {}
    for feature in spec.categorical:
        counts = torch.randint(4, (rows,), generator=draw) if feature.multi else torch.ones(rows, dtype=torch.int64)
        categorical[feature.name] = Jagged(ids(feature.table, int(counts.sum())), _offsets(counts))
    sequences = {}
    for number, sequence in enumerate(spec.sequences):
        own = torch.tensor(lengths[:: 1 if number % 2 == 0 else -1], dtype=torch.int64)
        events = int(own.sum())
        sequences[sequence.name] = EventSequence(
            _offsets(own),
            {feature.name: ids(feature.table, events) for feature in sequence.ids},
            {feature.name: floats(events) for feature in sequence.floats},
            floats(events) * 1e4,
            max([*lengths, 0]),
        )
    return Batch(
        rows=torch.arange(rows),
        categorical=categorical,
        dense=floats(rows, len(spec.dense)),
        sequences=sequences,
        labels=floats(rows, len(spec.labels)).round(),
        label_mask=torch.ones(rows, len(spec.labels)),
        weight=floats(rows),
        domain=torch.arange(rows) % (spec.domain.count if spec.domain else 1),
        true_probability=torch.full((rows,), float("nan")),
        unknown_ids={},
    )


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with the model's inputs in `dtype`."""
    sequences = {
        name: replace(s, floats={key: x.to(dtype) for key, x in s.floats.items()}, ages=s.ages.to(dtype))
        for name, s in batch.sequences.items()
    }
    return replace(batch, dense=batch.dense.to(dtype), sequences=sequences)


def random_embedded(spec: FeatureSpec, batch: Batch, dim: int, dtype: torch.dtype = torch.float64) -> Embedded:
    """Leaves in place of looked-up embeddings, standard normal."""
    draw = torch.Generator().manual_seed(1)

    def rows(count: int) -> Tensor:
        return torch.randn(count, dim, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()

    categorical = {feature.name: rows(len(batch)) for feature in spec.categorical}
    events = {
        f"{s.name}.{feature.name}": rows(len(batch.sequences[s.name].ages)) for s in spec.sequences for feature in s.ids
    }
    return Embedded(categorical, events)


def random_dense(case: Case, dtype: torch.dtype = torch.float64) -> DenseModel:
    """The dense part with random numbers in every parameter, biases too, of about the size that init gives."""
    draw = torch.Generator().manual_seed(2)
    dense = DenseModel(case.model, case.spec).to(dtype)
    with torch.no_grad():
        for parameter in dense.parameters():
            values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(values / parameter.shape[-1] ** 0.5)
    return dense


def model_logits(dense: DenseModel, batch: Batch, embedded: Embedded) -> Tensor:
    """Logits in the model's own dtype: its forward ends with float32 for the loss."""
    kept: list[Tensor] = []
    hook = dense.heads.register_forward_hook(lambda module, inputs, output: kept.append(output))
    result = dense(batch, embedded)
    hook.remove()
    assert result.dtype == torch.float32
    assert torch.equal(result, kept[0].float())
    return kept[0]


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
