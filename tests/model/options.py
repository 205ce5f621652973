"""Cases for the oracle: every preset's small twin, and every option of the schema."""

from dataclasses import replace

from gemctl.config.compose import compose
from gemctl.config.groups import Groups
from gemctl.specs.data import DenseSpec, EventIdSpec, FeatureSpec, SequenceSpec
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
from gemctl.specs.model import EventTypeSpec, LayerSpec, MaskNetSpec, ModelConfig
from gemctl.specs.sequence import (
    Activation,
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
from tests.model.cases import LENGTHS, LONG, SEVERAL, TABULAR, Case, layers
from tests.model.own_block import KIND
from tests.model.shrink import shrunk
from tests.support.small import SPEC

IMPRESSIONS = replace(  # the names of gem_xl's event types, in small
    SEVERAL,
    sequences=[
        *SEVERAL.sequences[:1],
        SequenceSpec("impressions", [EventIdSpec("page", "page")], "impressions_time", [DenseSpec("value")]),
    ],
)
PRESETS: list[str] = Groups().choices("model")

WUKONG = WukongSpec(fm_tokens=3, lc_tokens=2, rank=3, hidden=[6])
ATTENTIVE = replace(WUKONG, fm="attentive", fm_compression=3, fm_hidden=[5])
HSP = HspSpec(seeds=5, tokens=3, rank=2)
ALL_PARTS = [ClsSpec(), HSP, PmaSpec(tokens=2), LastSpec(tokens=3)]


def preset(name: str) -> ModelConfig:
    """As `model=name` composes it."""
    return compose(None, [f"model={name}"]).model


def spec_of(name: str) -> FeatureSpec:
    """A small feature spec that the preset fits."""
    return IMPRESSIONS if preset(name).event_types else SEVERAL


def twin(name: str) -> Case:
    """The preset's small twin; one history beyond one block of 64 events where something attends in blocks."""
    model = shrunk(preset(name))
    attentions = [getattr(layer.sequence, "attention", None) for layer in model.layers]
    if any(isinstance(attention, BlockAttentionSpec) for attention in attentions):
        assert not model.event_types
        return Case(model, SPEC, tuple(LONG))
    return Case(model, spec_of(name), tuple(LENGTHS))


def kunlun(activation: Activation = "gelu_approx", **attention: object) -> KunlunSpec:
    return KunlunSpec(ffn_hidden=5, activation=activation, attention=JaggedAttentionSpec(**attention))  # type: ignore[arg-type]


def gated(*, gate: str) -> GatedSpec:
    return GatedSpec(parts=ALL_PARTS, gate=gate)  # type: ignore[arg-type]


def activations(*kinds: Activation) -> ModelConfig:
    return layers(*(LayerSpec(interaction=WUKONG, sequence=kunlun(kind), summary=PmaSpec(tokens=2)) for kind in kinds))


BASE = LayerSpec(repeat=2, x_sum=3, interaction=WUKONG, sequence=kunlun(), summary=PmaSpec(tokens=2))
SKIP = replace(BASE, repeat=4, summary=HSP, sequence=kunlun(window=2, position="rote", qk_norm=True))
CLS_BLOCKS = replace(BASE, sequence=KunlunSpec(attention=BlockAttentionSpec(rope=True)), summary=gated(gate="none"))
PERSONAL = {
    "history": EventTypeSpec(dim=12, heads=3, tokens=4, window=1),
    "clicks": EventTypeSpec(depth=1, window=0),
    "buys": EventTypeSpec(dim=4, heads=2),
}
NO_RESIDUAL = InterFormerSpec(  # a window, or all events of a row come so close that its pooling's gradient cancels
    ffn_rank=5, residual=False, attention=JaggedAttentionSpec(window=1)
)
OWN = CustomSpec(KIND, {"tokens": 3})

OPTIONS = {
    "activations 1": Case(activations("identity", "gelu", "fast_gelu"), SPEC),
    "activations 2": Case(activations("relu", "relu_square", "leaky_relu"), SPEC),
    "activations 3": Case(activations("silu", "hardswish"), SPEC),
    "literal gates": Case(layers(replace(BASE, x_sum_gate="literal", summary=gated(gate="literal"))), SPEC),
    "scaled gates": Case(layers(replace(BASE, x_sum_gate="scaled", summary=gated(gate="scaled"))), SPEC),
    "CompSkip, even": Case(layers(replace(SKIP, comp_skip="even")), SPEC),
    "CompSkip, odd": Case(layers(replace(SKIP, comp_skip="odd")), SPEC),
    "causal": Case(layers(replace(BASE, sequence=kunlun(causal=True))), SPEC),
    "causal window": Case(layers(replace(BASE, sequence=kunlun(causal=True, window=3, position="rope"))), SPEC),
    "rope": Case(layers(replace(BASE, sequence=kunlun(position="rope"))), SPEC),
    "rote": Case(layers(replace(BASE, sequence=kunlun(position="rote", rote_scale=700.0))), SPEC),
    "qk_norm": Case(layers(replace(BASE, sequence=kunlun(qk_norm=True))), SPEC),
    "blocks after CLS": Case(layers(CLS_BLOCKS), SPEC, tuple(LONG)),
    "blocks, qk_norm": Case(
        layers(replace(BASE, reads="x_sum", sequence=KunlunSpec(attention=BlockAttentionSpec(qk_norm=True)))),
        SPEC,
        tuple(LONG),
    ),
    "attentive": Case(layers(replace(BASE, interaction=ATTENTIVE)), SPEC),
    "last_k": Case(layers(replace(BASE, summary=LastSpec(tokens=4))), SPEC),
    "cls": Case(layers(replace(BASE, summary=ClsSpec())), SEVERAL),
    "cls before hstu": Case(layers(replace(BASE, sequence=HstuSpec(), summary=ClsSpec())), SPEC),
    "hstu, rope": Case(layers(replace(BASE, sequence=HstuSpec(position="rope"))), SPEC),
    "hstu, rote": Case(
        layers(replace(BASE, sequence=HstuSpec(position="rote", rote_scale=50.0, length_scale=9.0, window=3))), SPEC
    ),
    "any row's matrix": Case(layers(replace(BASE, sequence=InterFormerSpec(ffn_rank=8))), SPEC),
    "no residual": Case(layers(replace(BASE, sequence=NO_RESIDUAL)), SPEC),
    "merged": Case(
        replace(layers(replace(SKIP, comp_skip="even", summary=gated(gate="scaled"))), merge=MaskNetSpec(hidden=7)),
        SEVERAL,
    ),
    "merged, personal": Case(
        replace(
            layers(replace(BASE, sequence=kunlun(position="rote"))),
            merge=MaskNetSpec(hidden=7),
            event_types={"merged": EventTypeSpec(dim=12, heads=3, depth=1)},
        ),
        SEVERAL,
    ),
    "personal": Case(replace(layers(BASE), event_types=PERSONAL), SEVERAL),
    "personal, gated": Case(
        replace(layers(replace(BASE, summary=gated(gate="literal"))), event_types=PERSONAL), SEVERAL
    ),
    "personal, hstu": Case(replace(layers(replace(BASE, sequence=HstuSpec())), event_types=PERSONAL), SEVERAL),
    "personal, CompSkip": Case(
        replace(layers(replace(SKIP, comp_skip="even")), event_types={"clicks": EventTypeSpec(depth=3, heads=1)}),
        SEVERAL,
    ),
    "generator of low rank": Case(
        layers(replace(BASE, sequence=replace(kunlun(), generator_rank=3))), replace(SPEC, domain=None)
    ),
    "token mixer": Case(layers(replace(BASE, interaction=TokenMixerSpec(tokens=4, hidden=5))), SPEC),
    "wide token mixer, no histories": Case(
        layers(replace(BASE, interaction=TokenMixerSpec(tokens=8, group=2, hidden=6))), TABULAR
    ),
    "own block": Case(layers(replace(BASE, interaction=OWN)), SPEC),
    "ensemble": Case(
        layers(
            replace(
                BASE,
                interaction=DhenSpec(
                    members=[
                        ATTENTIVE,
                        OWN,
                        WukongExpertsSpec(experts=3, tokens=4, fm_tokens=2, lc_tokens=1, rank=3, hidden=[4, 5]),
                        MlpSpec(tokens=1, hidden=[4]),
                        DotSpec(tokens=2, hidden=[]),
                        DcnSpec(tokens=2, hidden=[5], crosses=3, rank=3),
                        TokenMixerSpec(tokens=4, group=2, hidden=3),
                    ]
                ),
            )
        ),
        SPEC,
    ),
    "scales": Case(replace(layers(BASE), age_scales=[2.0, 500.0]), SPEC),
    "mixed": Case(
        layers(
            replace(SKIP, repeat=1, comp_skip="odd"),
            replace(BASE, repeat=1, sequence=HstuSpec(window=2), interaction=MlpSpec(tokens=4, hidden=[5])),
            replace(BASE, repeat=1, sequence=InterFormerSpec(ffn_rank=3), interaction=DotSpec(tokens=3, hidden=[5])),
        ),
        SEVERAL,
    ),
}
