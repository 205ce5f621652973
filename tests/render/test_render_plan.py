"""The mesh tables of `gemctl plan`: abbreviated, and short for any number of hosts."""

import io

from rich.console import Console
from rich.table import Table

from gemctl.mesh.groups import axis_groups
from gemctl.mesh.topology import Topology
from gemctl.render.plan import axes, hosts


def drawn(table: Table) -> list[str]:
    """Its lines, with single spaces, without the title."""
    file = io.StringIO()
    Console(file=file, width=120).print(table)
    return [" ".join(line.split()) for line in file.getvalue().splitlines()][1:]


def test_every_axis_and_every_host_of_a_small_mesh() -> None:
    topology = Topology(8, 2, 4, 2, 4, 2, 2)
    found = axis_groups(topology)
    assert drawn(axes(found)) == [
        "axis degree groups ranks of each group a group spans",
        "dp_replicate 2 4 [0, 4] [1, 5] … [3, 7] 2 hosts",
        "dp_shard 4 2 [0–3] [4–7] 2 hosts",
        "expert_shard 2 4 [0, 2] [1, 3] … [5, 7] 2 hosts",
        "ep 2 4 [0–1] [2–3] … [6–7] 1 host",
        "mp_replicate 4 2 [0, 2, 4, 6] [1, 3, 5, 7] 4 hosts",
        "mp_shard 2 4 [0–1] [2–3] … [6–7] 1 host",
    ]
    assert drawn(hosts(topology, found)) == [
        "host ranks dp_replicate dp_shard expert_shard ep mp_replicate mp_shard",
        "host0 0–1 0–1 0 0–1 0 0–1 0",
        "host1 2–3 2–3 0 0–1 1 0–1 1",
        "host2 4–5 0–1 1 2–3 2 0–1 2",
        "host3 6–7 2–3 1 2–3 3 0–1 3",
    ]


def test_thousands_of_hosts_are_as_short() -> None:
    topology = Topology(16384, 32, 512, 1, 128, 128, 8)
    lines = drawn(hosts(topology, axis_groups(topology)))
    assert [line.split()[0] for line in lines] == ["host", "host0", "host1", "host2", "host3", "…", "host2047"]
    assert lines[5] == "… 2,043 more"
    assert lines[6] == "host2047 16376–16383 504–511 31 120–127 127"


def test_axes_of_degree_one_are_one_line() -> None:
    found = axis_groups(Topology(1, 1, 1, 1, 1, 1, 1))
    assert drawn(axes(found))[1:] == ["dp_replicate, dp_shard, ep, mp_replicate, mp_shard 1"]
