"""The mesh of a plan in the terminal: each axis's groups, and the groups of every host; long lists by their pattern.

gemctl plan experiment=synthetic
"""

from itertools import pairwise

import numpy as np
from rich.table import Table

from gemctl.mesh.groups import AxisGroups, Ranks, groups
from gemctl.mesh.topology import Topology
from gemctl.render.tables import titled
from gemctl.units import plural

HOSTS, LISTED, PAIRS = 8, 4, 2
"""Most hosts that are drawn (else the first ones and the last), numbers of a list, and lists of an axis."""


def axes(found: list[AxisGroups]) -> Table:
    """The axes of degree > 1: their groups, and on how many hosts one lies; those of degree 1 in one line."""
    table = titled("mesh: the groups of every axis", "axis", "degree", "groups")
    table.add_column("ranks of a group", justify="left", overflow="fold")
    table.add_column("one lies on", justify="left")
    for item in found:
        if item.degree > 1:
            lists = [f"[{pattern(item.ranks(group))}]" for group in range(min(item.groups, PAIRS))]
            lists += [] if item.groups <= PAIRS + 1 else ["…"]
            lists += [] if item.groups <= PAIRS else [f"[{pattern(item.ranks(item.groups - 1))}]"]
            table.add_row(item.axis, f"{item.degree:,}", f"{item.groups:,}", " ".join(lists), _hosts(item))
    if ones := ", ".join(item.axis for item in found if item.degree == 1):
        table.add_row(ones, "1")
    return table


def hosts(topology: Topology, found: list[AxisGroups]) -> Table:
    """Every host's ranks, and the numbers of the groups that it has a part in."""
    shown = [item for item in found if item.degree > 1]
    table = titled("the groups of every host", "host", "ranks", *(item.axis for item in shown), left=99)
    count = -(-topology.world_size // topology.ranks_per_node)
    numbers = {item.axis: _group_of(groups(topology)[item.axis]) for item in shown}
    for host in range(count):
        if count > HOSTS and LISTED <= host < count - 1:
            if host == LISTED:
                table.add_row(f"… {count - LISTED - 1:,} more")
            continue
        first, stop = host * topology.ranks_per_node, min((host + 1) * topology.ranks_per_node, topology.world_size)
        cells = (pattern(sorted(set(number[first:stop].tolist()))) for number in numbers.values())
        table.add_row(f"host{host}", pattern(list(range(first, stop))), *cells)
    return table


def pattern(numbers: list[int]) -> str:
    """Ascending numbers in few words: "0–7", "0, 8, … 120", or the first ones and how many more."""
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    even = all(after - before == step for before, after in pairwise(numbers))
    if even and step == 1:
        return f"{numbers[0]}–{numbers[-1]}"
    if len(numbers) <= LISTED:
        return ", ".join(map(str, numbers))
    if even:
        return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    return ", ".join(map(str, numbers[: LISTED - 1])) + f", … ({len(numbers)})"


def _hosts(item: AxisGroups) -> str:
    fewest, most = item.hosts
    return plural(most, "host") if fewest == most else f"{fewest} to {plural(most, 'host')}"


def _group_of(rows: Ranks) -> Ranks:
    """int64 [world]: the number of each rank's group."""
    found = np.empty(rows.size, np.int64)
    found[rows] = np.arange(len(rows))[:, None]
    return found
