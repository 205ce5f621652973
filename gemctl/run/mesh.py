"""The mesh of an attempt (mesh.json): computed once from the hosts that have reported, and read by every rank.

write_mesh(attempt, [HostReport("n1", 2, "spine.leaf1.n1"), …])      # one process, before the ranks start
read_mesh(attempt).check_place(rank, world, host, local_rank)         # every rank
"""

from collections.abc import Sequence

from gemctl.mesh.groups import HostReport, Mesh, place_on_hosts
from gemctl.mesh.topology import Topology
from gemctl.run.attempt import Attempt
from gemctl.run.files import create_json, read_json


def write_mesh(attempt: Attempt, hosts: Sequence[HostReport]) -> Mesh:
    """Assigns the ranks of the plan's topology to `hosts` and writes mesh.json. InputError where the hosts are not
    those that were planned for."""
    mesh = place_on_hosts(Topology(**read_json(attempt.plan)["topology"].fields(Topology)), hosts)
    create_json(attempt.mesh, mesh.to_json())
    return mesh


def read_mesh(attempt: Attempt) -> Mesh:
    """The attempt's mesh."""
    return Mesh.from_json(read_json(attempt.mesh))
