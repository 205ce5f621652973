"""Every tensor of a checkpoint, by name and shape, without torch: what a load needs, before any rank is started.

    saved_state(config, spec)      # {"dense.heads.tasks.0.0.weight": (64, 384), "optim.dense.….exp_avg": …, …}

A test compares it with the state of the real model and optimizers.
"""

from gemctl.config.schema import Config
from gemctl.specs.count import Shape, parameters
from gemctl.specs.data import FeatureSpec


def saved_state(config: Config, spec: FeatureSpec) -> dict[str, Shape]:
    """Parameters, AdamW's two moments of each dense one, and row-wise AdaGrad's number for each row of a table."""
    found: dict[str, Shape] = {}
    for name, shape in parameters(config.model, spec):
        found[name] = shape
        if name.startswith("dense."):
            found |= {f"optim.{name}.{slot}": shape for slot in ("exp_avg", "exp_avg_sq")}
        elif config.optim.tables.kind == "rowwise_adagrad":
            found[f"optim.{name}.momentum1"] = shape[:1]
    return found
