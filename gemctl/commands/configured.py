"""The configuration of a command's words: [FILE.yaml] [GROUP=CHOICE …] [KEY=VALUE …]."""

import argparse

from gemctl import paths
from gemctl.config.compose import BadConfig, compose
from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.plan.job import further_problems


def composed(args: argparse.Namespace) -> Config:
    """The configuration that the arguments describe. Raises InputError with all problems."""
    files = [word for word in args.words if is_file(word)]
    if len(files) > 1:
        raise InputError(f"{' '.join(files)}: more than one file; a file's `defaults:` list can choose groups")
    try:
        return compose(files[0] if files else None, [word for word in args.words if word not in files], args.config_dir)
    except BadConfig as bad:
        raise InputError(bad.problems + further_problems(bad)) from None


def is_file(word: str) -> bool:
    """True for a word that names a YAML file: an existing file, or a YAML name that can't be an override."""
    yaml = word.endswith((".yaml", ".yml"))
    return paths.is_file(word) if "=" in word else yaml or paths.is_file(word)
