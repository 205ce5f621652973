"""The hardware that the planner knows: GPUs with their memory, peaks and links, and the tiers of a network.

Sources: NVIDIA's data sheets for H100, H200 (SXM), HGX B200 and GB200 NVL72. Rates are dense (no sparsity), NVLink is
one direction (half of the advertised sum), and each GPU has one 400 Gb/s ConnectX-7, as in NVIDIA's reference hosts.
"""

from dataclasses import dataclass
from enum import StrEnum

GB, GIB = 10**9, 1 << 30
TERA = 10**12


@dataclass(frozen=True)
class Gpu:
    """Bytes, FLOP/s and bytes/s of one GPU. `domain`: number of GPUs connected by NVLink."""

    name: str
    memory: int
    memory_bandwidth: float
    bf16: float
    fp8: float
    nvlink: float
    nic: float
    domain: int


CATALOGUE = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 80 * GB, 3.35 * TERA, 989.4 * TERA, 1978.9 * TERA, 450 * GB, 50 * GB, 8),
        Gpu("H200", 141 * GB, 4.8 * TERA, 989.4 * TERA, 1978.9 * TERA, 450 * GB, 50 * GB, 8),
        Gpu("B200", 180 * GB, 7.7 * TERA, 2250 * TERA, 4500 * TERA, 900 * GB, 50 * GB, 8),
        Gpu("GB200", 186 * GB, 8.0 * TERA, 2500 * TERA, 5000 * TERA, 900 * GB, 50 * GB, 72),
    )
}


def find(name: str) -> Gpu | None:
    """The GPU for a name as nvidia-smi prints it ("NVIDIA H200"), or None."""
    words = name.upper().replace("-", " ").split()
    return next((gpu for gpu in CATALOGUE.values() if gpu.name in words), None)


class Tier(StrEnum):
    """The slowest link that a group's traffic uses, fastest first. A fast domain is one host or NVLink rack."""

    NONE = "none"  # a group of one rank
    FAST = "fast domain"
    ZONE = "zone"
    CROSS_ZONE = "cross-zone"


def tier_of(first: int, last: int, ranks_per_domain: int, domains_per_zone: int | None = None) -> Tier:
    """The slowest tier within a group from rank `first` to `last`. Ranks fill domains in order, and domains fill zones.

    `domains_per_zone` None: all domains are in one zone.
    """
    if first == last:
        return Tier.NONE
    near, far = first // ranks_per_domain, last // ranks_per_domain
    if near == far:
        return Tier.FAST
    if domains_per_zone is None or near // domains_per_zone == far // domains_per_zone:
        return Tier.ZONE
    return Tier.CROSS_ZONE
