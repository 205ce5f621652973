"""Names of the mesh's axes, and of the group families that they make.

gemctl plan experiment=synthetic        # draws the groups of every axis, host by host
"""

from enum import StrEnum


class Axis(StrEnum):
    """One way to spread work. Dense: the first two, with `ep` re-carving `dp_shard`; tables: the last two."""

    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    EP = "ep"
    MP_REPLICATE = "mp_replicate"
    MP_SHARD = "mp_shard"


EXPERT_SHARD = "expert_shard"
"""Group family over which experts' parameters are sharded: `dp_shard` less its `ep` part (dp_shard / ep ranks)."""
WORLD = "world"
"""Family of one group, all ranks: what they agree on in each step."""
