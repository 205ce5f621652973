"""What users and signals ask of a running run: files that are created once, seen by rank 0 and agreed by all ranks.

gemctl stop RUN       # files a stop request; the ranks save and exit at the end of their step
"""

import os
import socket
import time
from dataclasses import dataclass
from typing import Literal

from gemctl.durable import exists
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from gemctl.run.files import create_json, read_whole

Kind = Literal["stop", "kill", "save"]  # kill: end at once


@dataclass(frozen=True)
class Request:
    """`signal`: the name of the one that it stands for; None: somebody asked."""

    number: int
    kind: Kind
    signal: str | None = None

    @property
    def ends(self) -> bool:
        """True if it ends the run, now or at the end of its step."""
        return self.kind != "save"


@dataclass(frozen=True)
class StopFiled:
    """A request to end the run in `run`. `attempt`: the one that runs; None: it is between two, or has made none yet.

    `outcome`: asked; ordered (to end at once); ended (at once); withdrawn: `job` was taken out of its queue.
    """

    run: str
    attempt: int | None
    request: int
    outcome: Literal["asked", "ordered", "ended", "withdrawn"]
    job: str | None = None


def file(run: RunDir, kind: Kind, signal: str | None = None) -> Request:
    """Files a request to the run's present attempt; several that file at the same moment get numbers of their own."""
    number = 1
    while True:
        path = run.requests / f"{number}.json"
        try:
            if not exists(path):
                create_json(path, {"kind": kind, "signal": signal, "time": time.time(), **_writer()})
                return Request(number, kind, signal)
        except FileExistsError:
            pass
        number += 1


def _writer() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def pending(run: RunDir, attempt: Attempt, after: int = 0) -> list[Request]:
    """Requests to this attempt with numbers above `after`, in order; costs one look where there is none.

    Requests from before the attempt are not its own. A caller that has dealt with some passes the last number.
    """
    return filed(run, max(after + 1, _first(attempt)))


def filed(run: RunDir, first: int) -> list[Request]:
    """Requests with numbers from `first` on, in order."""
    number, found = first, []
    while exists(path := run.requests / f"{number}.json"):
        if (line := read_whole(path)) is not None:  # else it was never on disk, and whoever filed it is gone
            found.append(Request(number, line["kind"], line.get("signal")))
        number += 1
    return found


_first_request: dict[str, int] = {}


def _first(attempt: Attempt) -> int:
    key = str(attempt.path)
    if key not in _first_request:
        _first_request[key] = attempt.claim().first_request
    return _first_request[key]
