"""Configurations in the terminal: as YAML."""

from gemctl.config.compose import to_yaml
from gemctl.config.schema import Config


def config(value: Config) -> str:
    """All keys of a configuration."""
    return to_yaml(value).rstrip("\n")
