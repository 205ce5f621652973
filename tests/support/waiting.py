"""Waiting for what another process does."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL = 0.02


def wait_for(found: Callable[[], T], seconds: float = 80, what: str | Callable[[], str] = "what was waited for") -> T:
    """The first true value that `found` returns. AssertionError after `seconds`; `what` says what did not come."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL)
    return value
