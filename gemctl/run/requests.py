"""Requests to a running run, by users and signals: files that are created once, read by rank 0 and agreed on by all
ranks.

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

Kind = Literal["stop", "kill", "save"]  # kill: without saving


@dataclass(frozen=True)
class Request:
    """`signal`: name of the signal that it stands for; None: a user filed it."""

    number: int
    kind: Kind
    signal: str | None = None

    @property
    def ends(self) -> bool:
        """True if it ends the run, at once or at the end of its step."""
        return self.kind != "save"


@dataclass(frozen=True)
class StopFiled:
    """A request to end the run in `run`. `attempt`: the running one; None: between two attempts, or before the first.

    `outcome`: asked (to stop); ordered (to be killed); ended (killed); withdrawn: `job` was removed from its queue.
    """

    run: str
    attempt: int | None
    request: int
    outcome: Literal["asked", "ordered", "ended", "withdrawn"]
    job: str | None = None


def file(run: RunDir, kind: Kind, signal: str | None = None) -> Request:
    """Files a request to the run's current attempt. Processes that file at the same time get different numbers."""
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
    """Requests to this attempt with numbers above `after`, in order; one file lookup if there are none.

    Requests filed before the attempt started are not included. A caller that has handled some passes the last number.
    """
    return filed(run, max(after + 1, _first(attempt)))


def filed(run: RunDir, first: int) -> list[Request]:
    """Requests with numbers from `first` on, in order."""
    number, found = first, []
    while exists(path := run.requests / f"{number}.json"):
        if (line := read_whole(path)) is not None:  # else a power loss truncated it before its writer returned
            found.append(Request(number, line["kind"], line.get("signal")))
        number += 1
    return found


_first_request: dict[str, int] = {}


def _first(attempt: Attempt) -> int:
    key = str(attempt.path)
    if key not in _first_request:
        _first_request[key] = attempt.claim().first_request
    return _first_request[key]
