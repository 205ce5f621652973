"""Tiers of the network: a fast domain (an NVLink host or rack; one machine), a zone, and the links between zones.

gemctl plan experiment=synthetic        # the tier of every axis
"""

from enum import StrEnum


class Tier(StrEnum):
    """Where a group's traffic runs, fastest first."""

    NONE = "none"  # a group of one rank
    FAST = "fast domain"
    ZONE = "zone"
    CROSS_ZONE = "cross-zone"


def tier_of(first: int, last: int, ranks_per_domain: int, domains_per_zone: int | None = None) -> Tier:
    """The slowest tier inside a group from rank `first` to `last`; ranks fill domains, and those zones, in order.

    `domains_per_zone` None: all domains lie in one zone.
    """
    if first == last:
        return Tier.NONE
    near, far = first // ranks_per_domain, last // ranks_per_domain
    if near == far:
        return Tier.FAST
    if domains_per_zone is None or near // domains_per_zone == far // domains_per_zone:
        return Tier.ZONE
    return Tier.CROSS_ZONE
