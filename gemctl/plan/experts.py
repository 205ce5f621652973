"""The modules of experts of a model: their names and the tokens that `ep` moves for them.

gemctl plan experiment=gem_xl        # "gathered expert inputs"
"""

from dataclasses import dataclass

from gemctl.specs.data import FeatureSpec
from gemctl.specs.layout import layout
from gemctl.specs.model import ModelConfig


@dataclass(frozen=True)
class ExpertModule:
    """Tokens of one row that it reads and makes. The first `early` of `inputs` are there when its layer begins."""

    name: str
    inputs: int
    early: int
    outputs: int


def expert_modules(model: ModelConfig, spec: FeatureSpec) -> list[ExpertModule]:
    """All of them, by their names in the dense part, in the order in which they run."""
    return [
        ExpertModule(
            f"layers.{index}.interaction.members.{number}",
            layer.reads,
            layer.x_sum if layer.spec.reads == "x_sum" else layer.inputs,
            core.tokens,
        )
        for index, layer in enumerate(layout(model, spec).layers)
        for number, core in enumerate(layer.spec.interaction.cores())
        if core.stacked_experts
    ]
