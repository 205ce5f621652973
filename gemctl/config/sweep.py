"""Sweeps: overrides with several values, as the command lines of single runs.

expand(["optim.dense.lr=1e-3,2e-3", "run.seed=range(0,3)", "train.steps=50"])      # six lists of three overrides
"""

import itertools
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def expand(texts: Sequence[str]) -> list[list[str]]:
    """Every combination of the values, the last override's changing fastest. What is not of Hydra's grammar stays."""
    return [list(chosen) for chosen in itertools.product(*map(_values, texts))]


def _values(text: str) -> list[str]:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return [text]
    if not override.is_sweep_override():
        return [text]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
