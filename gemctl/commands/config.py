"""`gemctl config export`: a full standalone configuration that composes to the same one.

gemctl config export experiment=ml100k -o ml100k.yaml && gemctl train ml100k.yaml
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl import paths
from gemctl.commands.configured import add_configuration, composed

if TYPE_CHECKING:
    from gemctl.config.schema import Config

HELP = "Export a configuration."


def arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = commands.add_parser(
        "export",
        help="write the whole configuration as one YAML file that needs no groups",
        description="Write the whole configuration as one YAML file that needs no groups.",
    )
    add_configuration(export)
    export.add_argument("-o", "--out", metavar="OUT", help="file to write; default: standard output")


def run(args: argparse.Namespace) -> "Config | str":
    from gemctl.config.compose import to_yaml

    config = composed(args)
    if args.out is None:
        return config
    paths.refuse_there("-o", args.out)
    with paths.writing(f"-o {args.out}"):
        Path(args.out).write_text(to_yaml(config), encoding="utf-8")
    return f"wrote {args.out}: gemctl train {paths.word(args.out)}"
