"""`gemctl plan`: the mesh, every table's shards and every byte of a configuration, before anything is started.

gemctl plan topology=fsdp launcher.ranks_per_node=8
"""

import argparse
from typing import TYPE_CHECKING

from gemctl.commands.configured import add_configuration, composed, note_files, planned

if TYPE_CHECKING:
    from gemctl.plan.build import Plan

HELP = "Show the mesh, the table shards and every byte of a configuration, and start nothing."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_configuration(parser)


def run(args: argparse.Namespace) -> "Plan":
    config = composed(args)
    note_files(config.data)
    return planned(config)
