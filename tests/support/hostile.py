"""A folder full of what must not run: modules named as those that gemctl imports, programs named as those it calls.

plant(folder)    # …
ran(folder)      # names of those that were run
"""

from pathlib import Path

MODULES = ("random", "json", "argparse", "logging", "fcntl", "yaml", "numpy", "torch", "torchrec", "torchx", "gemctl")
PROGRAMS = ("nvidia-smi", "git", "squeue")
MARK = "ran"


def plant(folder: Path) -> None:
    """Makes them; each leaves a mark in `folder` when it is run, and fails."""
    for name in MODULES:
        mark = folder / f"{name}.{MARK}"
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nraise SystemExit('the wrong {name}')\n")
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\ntouch '{folder / name}.{MARK}'\nexit 1\n")
        (folder / name).chmod(0o755)


def ran(folder: Path) -> list[str]:
    """Which of them were run."""
    return sorted(path.stem for path in folder.glob(f"*.{MARK}"))
