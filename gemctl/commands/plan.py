"""`gemctl plan`: the mesh, every table's shards and every byte of a configuration, before anything is started.

gemctl plan topology=fsdp launcher.ranks_per_node=8
"""

import argparse

from gemctl.commands.configured import composed
from gemctl.plan.build import Plan
from gemctl.plan.job import file_notes, planned
from gemctl.terminal import note


def run(args: argparse.Namespace) -> Plan:
    config = composed(args)
    for line in file_notes(config.data):
        note(line)
    return planned(config)
