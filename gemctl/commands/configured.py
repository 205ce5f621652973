"""The arguments that every command with a configuration takes: [FILE.yaml] [GROUP=CHOICE …] [KEY=VALUE …]."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.config.schema import Config


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Adds the positional words and --config-dir."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE.yaml | GROUP=CHOICE | KEY=VALUE",
        help="one file of your own, group choices and values; docs/reference.md lists all of them, "
        "`gemctl train --cfg` prints what they come to",
    )
    parser.add_argument("--config-dir", metavar="DIR", help="folder with more choices, as DIR/GROUP/CHOICE.yaml")


def composed(args: argparse.Namespace) -> "Config":
    """The configuration that the arguments ask for. Raises InputError with all problems."""
    from gemctl.config.compose import compose

    files = [word for word in args.words if is_file(word)]
    if len(files) > 1:
        raise InputError(f"{' '.join(files)}: more than one file; a file's `defaults:` list can choose groups")
    return compose(files[0] if files else None, [word for word in args.words if word not in files], args.config_dir)


def is_file(word: str) -> bool:
    """True for a word that names a YAML file: an existing file, or a YAML name that can't be an override."""
    yaml = word.endswith((".yaml", ".yml"))
    return Path(word).is_file() if "=" in word else yaml or Path(word).is_file()
