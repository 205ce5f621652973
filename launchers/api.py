"""What a launcher offers, and which there are: a module of launchers/ with the functions of `Launcher`.

launcher.kind picks it; a new scheduler is one more module here and one more name in LAUNCHERS.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from gemctl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchx.specs import AppDef

    from gemctl.config.schema import Config
    from gemctl.run.attempt import Attempt
    from gemctl.run.directory import RunDir
    from gemctl.run.submission import Job, Submission

LAUNCHERS = {"local": "gemctl.launchers.local", "slurm": "gemctl.launchers.slurm"}


class Agents(Protocol):
    """The agents that serve the attempts of one run."""

    def start(self, attempt: "Attempt") -> None: ...
    def submit(self, attempt: "Attempt") -> None: ...
    def ended(self) -> dict[int, str]: ...  # node → how its agent ended
    def kill(self) -> list[int]: ...


class Launcher(Protocol):
    """What a module of launchers/ offers. Every call of a scheduler's client ends after a time-out."""

    IN_PROCESS: bool  # the supervisor of a run in the foreground is the command's own process

    def check(self, config: "Config") -> None:
        """InputError for what it cannot launch anywhere."""

    def check_here(self, config: "Config") -> None:
        """InputError where this machine, now, cannot launch it."""

    def form(self, app: "AppDef", config: "Config", submission: Path) -> str | None:
        """The scheduler's own form of the request, which the folder `submission` will hold; None if it has none."""

    def start(self, run: "RunDir", submission: "Submission", config: "Config") -> None:
        """Has `gemctl supervise` started for the submission, apart from this process, and writes submitted.json."""

    def jobs(self, submissions: "Sequence[Submission]") -> "list[Job | None]":
        """What became of what `start` started for each, by one question to a scheduler; None where nothing was."""

    def cancel(self, submission: "Submission") -> None:
        """Takes a job that waits out of its queue."""

    def bring_back(self, config: "Config", why: "Literal['due', 'lost', 'told']") -> bool:
        """Has the scheduler start this process, the supervisor, again in another job: as the time is up (`due`), as it
        has lost hosts, or, where it was told to end, if its hosts are taken away just now. False if it does not."""

    def takes_over(self, submission: "Submission") -> bool:
        """True where the scheduler has started this process in place of an earlier supervisor of the submission, which
        it has ended: an attempt that still beats is out of its reach, and not to be waited for."""

    def agents(self, run: "RunDir", config: "Config") -> "Agents":
        """What starts the agents of the run's attempts, in the supervisor's process."""


def launcher_of(kind: str) -> Launcher:
    """The launcher of a launcher.kind. InputError for one that this gemctl does not have."""
    if kind not in LAUNCHERS:
        raise InputError(f"launcher.kind={kind}: unknown to this gemctl (it has {', '.join(LAUNCHERS)})")
    return cast("Launcher", importlib.import_module(LAUNCHERS[kind]))
