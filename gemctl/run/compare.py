"""Two runs side by side: what was asked differently, and both reports.

gemctl report RUN --diff RUN
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from gemctl.errors import InputError
from gemctl.run.directory import RunDir
from gemctl.run.report import Report, build


@dataclass
class Setting:
    """A configuration key whose values differ between two runs, as YAML has them."""

    key: str
    first: str
    second: str


@dataclass
class Diff:
    """Two runs' reports, and the settings in which their last attempts differ."""

    runs: list[Report]
    settings: list[Setting]


def compare(first: RunDir, second: RunDir) -> Diff:
    """Reads both runs."""
    flat = [_settings(run) for run in (first, second)]
    keys = [key for key in dict.fromkeys([*flat[0], *flat[1]]) if flat[0].get(key) != flat[1].get(key)]
    settings = [Setting(key, flat[0].get(key, ""), flat[1].get(key, "")) for key in keys]
    return Diff([build(first), build(second)], settings)


def _settings(run: RunDir) -> dict[str, str]:
    """The last attempt's configuration with dotted keys; entries of a list of mappings are numbered from 0."""
    from gemctl.config.compose import from_yaml

    attempt = run.last_attempt()
    if attempt is None or not attempt.config.exists():
        raise InputError(f"{run.path}: no attempt was made yet, so there is nothing to compare")

    flat: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                walk(item, f"{path}.{index}")
        else:
            flat[path] = value if isinstance(value, str) else json.dumps(value)

    walk(asdict(from_yaml(attempt.config.read_text(), str(attempt.config))), "")
    return flat
