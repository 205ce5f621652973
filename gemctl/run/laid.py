"""The mesh of an attempt: laid once over the hosts that have reported, and read by every rank (mesh.json).

lay_attempt(attempt, [HostReport("n1", 2, "spine.leaf1.n1"), …])      # one process, before the ranks start
read_mesh(attempt).check_place(rank, world, host, local_rank)         # every rank
"""

from collections.abc import Sequence

from gemctl.mesh.groups import HostReport, Mesh, lay
from gemctl.mesh.topology import Topology
from gemctl.run.attempt import Attempt
from gemctl.run.files import create_json, read_json


def lay_attempt(attempt: Attempt, hosts: Sequence[HostReport]) -> Mesh:
    """Lays the plan's topology over `hosts` and writes mesh.json. InputError where they are not what was planned."""
    mesh = lay(Topology(**read_json(attempt.plan)["topology"].fields(Topology)), hosts)
    create_json(attempt.mesh, mesh.to_json())
    return mesh


def read_mesh(attempt: Attempt) -> Mesh:
    """The mesh that was laid for the attempt."""
    return Mesh.from_json(read_json(attempt.mesh))
