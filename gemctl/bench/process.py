"""What a measuring process of `gemctl bench` does around its measurement; commands import no torch, so they start one.

sys.exit(write_result(CONFIG.yaml, RESULT.json, lambda config, spec: measure(config, spec)))
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gemctl.commands.configured import spec_of
from gemctl.config.compose import from_yaml
from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.run.files import create_json
from gemctl.specs.data import FeatureSpec


def write_result(config_file: str, result: str, measure: Callable[[Config, FeatureSpec], Any]) -> int:
    """Writes the dataclass that `measure` returns, or what was wrong with the input; returns the exit code."""
    try:
        config = from_yaml(Path(config_file).read_text(encoding="utf-8"), config_file)
        found = measure(config, spec_of(config))
    except InputError as error:
        create_json(Path(result), {"problems": error.problems})
        return error.exit_code
    create_json(Path(result), asdict(found))
    return 0
