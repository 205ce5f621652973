"""Every socket at which a process or one that descends from it listens: TCP, and named or abstract Unix ones.

listening(pid)      # [Listening(pid=…, address="127.0.0.1", port=40123), …]
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LISTEN, ACCEPTS = "0A", 0x10000


@dataclass(frozen=True)
class Listening:
    """`port` is 0 for a Unix socket, whose path is the address."""

    pid: int
    address: str
    port: int


def listening(pid: int) -> list[Listening]:
    tables = _tables()
    return [Listening(one, *tables[inode]) for one in family(pid) for inode in _sockets(one) if inode in tables]


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def _sockets(pid: int) -> Iterator[str]:
    """Inodes."""
    with suppress(OSError):
        for fd in list(Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(OSError):
                kind, _, inode = os.readlink(fd).partition(":")  # noqa: PTH115 (a Path drops the brackets' meaning)
                if kind == "socket":
                    yield inode.strip("[]")


def _tables() -> dict[str, tuple[str, int]]:
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                address, _, port = fields[1].partition(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                found[fields[9]] = (socket.inet_ntop(family, b"".join(words)), int(port, 16))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & ACCEPTS:
            found[fields[6]] = (fields[7] if len(fields) > 7 else "unnamed", 0)
    return found
