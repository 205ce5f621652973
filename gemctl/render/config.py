"""Configurations in the terminal: as YAML."""

from gemctl.commands.config import Exported
from gemctl.config.compose import to_yaml
from gemctl.config.schema import Config


def config(value: Config) -> str:
    """All keys of a configuration."""
    return to_yaml(value).rstrip("\n")


def exported(value: Exported) -> str:
    """The YAML itself, or where it lies."""
    return f"wrote {value.file}: gemctl train {value.file}" if value.file else value.yaml.rstrip("\n")
