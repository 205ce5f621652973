"""`gemctl config export`: a full standalone configuration that composes to the same one.

gemctl config export experiment=ml100k -o ml100k.yaml && gemctl train ml100k.yaml
"""

import argparse
from pathlib import Path

from gemctl import paths
from gemctl.commands.configured import composed
from gemctl.config.compose import to_yaml
from gemctl.config.schema import Config


def run(args: argparse.Namespace) -> Config | str:
    config = composed(args)
    if args.out is None:
        return config
    paths.refuse_there("-o", args.out)
    with paths.writing(f"-o {args.out}"):
        Path(args.out).write_text(to_yaml(config), encoding="utf-8")
    return f"wrote {args.out}: gemctl train {paths.word(args.out)}"
