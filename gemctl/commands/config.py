"""`gemctl config export`: a full standalone configuration that composes to the same one.

gemctl config export experiment=ml100k -o ml100k.yaml && gemctl train ml100k.yaml
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from gemctl.commands.configured import add_configuration, composed
from gemctl.errors import InputError

HELP = "Export a configuration."


@dataclass
class Exported:
    """A configuration as YAML, and the file that now holds it (None: none was asked for)."""

    yaml: str
    file: str | None


def arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    summary = "write the whole configuration as one YAML file that needs no groups"
    export = commands.add_parser("export", help=summary, description=summary)
    add_configuration(export)
    export.add_argument("-o", "--out", metavar="OUT", help="file to write; default: standard output")


def run(args: argparse.Namespace) -> Exported:
    from gemctl.config.compose import to_yaml

    text = to_yaml(composed(args))
    if args.out is not None:
        try:
            Path(args.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"-o {args.out}: cannot be written: {error.strerror}") from error
    return Exported(text, args.out)
