"""Commands as another user, without any capability, so that file modes count.

    done = run_as(User(2001, 3000), ["gemctl", "status", "…"], umask=0o077, cwd=folder)

Needs root. The Python installation may lie where nobody else gets to (/root): then it is mounted into a private mount
namespace in which everyone does.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemctl import paths

# $1: the installation, or nothing; $2: the umask of the command; then what runs it
ENTER = """
umask 022
if [ -n "$1" ]; then
  hold=$(mktemp -d)
  mount --bind "$1" "$hold"
  mount -t tmpfs -o mode=755 none "/$(echo "$1" | cut -d/ -f2)"
  mkdir -p "$1"
  mount --bind "$hold" "$1"
  umount "$hold" && rmdir "$hold"
fi
umask "$2"
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class User:
    """`group`: the primary one, which new files get; `groups`: the others."""

    uid: int
    group: int
    groups: tuple[int, ...] = ()


def run_as(user: User, command: Sequence[str], *, umask: int, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Runs `python -m command…` below a home folder of its own in `cwd`."""
    home = cwd / f"home-{user.uid}"
    if not paths.exists(home):
        home.mkdir()
        os.chown(home, user.uid, user.group)
    groups = f"--groups={','.join(map(str, user.groups))}" if user.groups else "--clear-groups"
    return subprocess.run(
        [
            "unshare", "--mount", "bash", "-e", "-c", ENTER, "enter", _out_of_reach(), f"{umask:03o}",
            "setpriv", f"--reuid={user.uid}", f"--regid={user.group}", groups, "--bounding-set=-all",
            "--inh-caps=-all", sys.executable, "-m", *command,
        ],
        cwd=cwd, capture_output=True, text=True, check=False,
        env={**os.environ, "HOME": str(home), "USER": f"u{user.uid}", "LOGNAME": f"u{user.uid}"},
    )  # fmt: skip


def _out_of_reach() -> str:
    """The Python installation if a folder above it is closed to others, else nothing."""
    prefix = Path(sys.base_prefix)
    closed = [folder for folder in prefix.parents if not folder.stat().st_mode & 0o001]
    return str(prefix) if closed else ""
