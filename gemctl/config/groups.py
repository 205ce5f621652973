"""The config groups: their choices, and Hydra's composition of the chosen files.

    gemctl train data=ml100k precision=bf16 --config-dir my_configs

`configs/` has a folder per group; a user's `--config-dir` adds choices. An experiment (package _global_) chooses
groups and overrides their values.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gemctl import paths
from gemctl.config.keys import GROUPS
from gemctl.errors import InputError
from gemctl.specs.yaml_file import KeyPath, YamlFile, read
from gemctl.suggest import did_you_mean

BUILT_IN = Path(__file__).resolve().parent.parent / "configs"
Choices = tuple[tuple[str, str], ...]


class Groups:
    """The built-in groups with those of `config_dir`. InputError if that is not a folder of groups."""

    def __init__(self, config_dir: str | None = None) -> None:
        self.config_dir = config_dir
        if config_dir is not None:
            _check(Path(config_dir))

    def choices(self, group: str) -> list[str]:
        """The choices of a group, sorted."""
        folders = [BUILT_IN, *([Path(self.config_dir)] if self.config_dir else [])]
        return sorted(file.stem for folder in folders for file in (folder / group).glob("*.yaml"))

    def wrong_choice(self, group: str, value: Any) -> str | None:
        """Why there is no choice `group=value`; None if there is."""
        known = self.choices(group)
        if str(value) in known and not isinstance(value, (list, dict)):
            return None
        near = did_you_mean(str(value), known) or f" (choices: {', '.join(known)})"
        return f"group {group} has no choice {str(value)!r}{near}"

    def compose(self, choices: dict[str, str]) -> dict[str, Any]:
        """Hydra's composition as plain data, with unresolved interpolations. Raises InputError."""
        return self._compose(choices)[0]

    def chosen(self, choices: dict[str, str]) -> dict[str, str]:
        """The final choice of every group, including the experiment's choices. Raises InputError."""
        return self._compose(choices)[1]

    def files(self, choices: dict[str, str]) -> list[tuple[KeyPath, YamlFile]]:
        """The chosen files, the last applied first, each with the path where its keys belong."""
        chosen = self.chosen(choices)
        files: list[tuple[KeyPath, YamlFile]] = []
        for group in reversed(GROUPS):
            place: KeyPath = () if group == "experiment" else (group,)
            files.append((place, read(str(self._file(group, chosen[group])))))
        return files

    def _file(self, group: str, choice: str) -> Path:
        own = Path(self.config_dir or BUILT_IN) / group / f"{choice}.yaml"
        return own if own.exists() else BUILT_IN / group / f"{choice}.yaml"

    def _compose(self, choices: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
        key = tuple(sorted(choices.items()))
        if self.config_dir is None:
            return copy.deepcopy(_compose_built_in(key))
        return _compose(key, self.config_dir)


def _check(folder: Path) -> None:
    if not paths.is_dir(folder):
        raise InputError(f"--config-dir {folder}: no such folder")
    own = [file for group in GROUPS for file in sorted((folder / group).glob("*.yaml"))]
    if not own:
        raise InputError(f"--config-dir {folder}: contains no GROUP/CHOICE.yaml (groups: {', '.join(GROUPS)})")
    taken = [file for file in own if (BUILT_IN / file.relative_to(folder)).exists()]
    if taken:
        raise InputError([f"{file}: a built-in choice has this name: rename it" for file in taken])
    # Hydra reads these files too, and expands every alias.
    oversized = [file for file in (read(str(path)) for path in sorted(folder.rglob("*.yaml"))) if file.oversized]
    if oversized:
        raise InputError([problem for file in oversized for problem in file.problems])


@functools.cache
def _compose_built_in(choices: Choices) -> tuple[dict[str, Any], dict[str, str]]:
    return _compose(choices, None)


def _compose(choices: Choices, config_dir: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The composed data, and the final choice of every group."""
    overrides = [f"{group}={_quoted(choice)}" for group, choice in choices]
    if config_dir is not None:
        overrides.append(f"hydra.searchpath=[{_quoted(f'file://{Path(config_dir).resolve()}')}]")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(BUILT_IN.resolve()), version_base="1.3"):
            composed = compose("config", overrides=overrides, return_hydra_config=True)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{mark.name}:{mark.line + 1}" if mark else str(config_dir)
        raise InputError(f"{place}: not YAML: {getattr(error, 'problem', error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        chosen = " ".join(f"{group}={choice}" for group, choice in choices)
        raise InputError(f"{chosen}: {' '.join(str(error).split())}") from error
    chosen_all = OmegaConf.to_container(composed.hydra.runtime.choices)
    data = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(data, dict) and isinstance(chosen_all, dict)
    data.pop("hydra")
    return data, chosen_all


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
