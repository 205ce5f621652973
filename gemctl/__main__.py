"""Where the program begins: `gemctl`, and `python -m gemctl`.

An interrupt counts from the first import on, and SIGTERM is one too: what was begun is cleaned up, and the exit code is
130, or 143 after SIGTERM. Only a run's supervisor takes them otherwise, to save first (gemctl/recover/supervisor.py).
"""

import os
import sys


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def main() -> int:
    """Runs the command line of this process; returns the exit code."""
    try:
        _leave_current_folder()
        import signal  # takes several milliseconds

        signal.signal(signal.SIGTERM, _terminated)
        from gemctl import startup

        startup.prepare()
        from gemctl import cli

        return cli.main()
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("interrupted\n")
        return 143 if isinstance(interrupt, Terminated) else 130


def _leave_current_folder() -> None:
    """Takes the current folder off the module path, so that no `random.py` in it is imported in place of Python's own.

    `python -m` puts it there, and so does an empty entry of PYTHONPATH (`PYTHONPATH=$PYTHONPATH:/mine` where it was
    unset). One that PYTHONPATH names stays.
    """
    given = os.environ.get("PYTHONPATH", "")
    entries = given.split(os.pathsep)
    named = [entry for entry in entries if entry]
    try:
        here = os.getcwd()  # noqa: PTH109 (pathlib takes several milliseconds)
    except OSError:  # it has been deleted
        return
    if here in map(os.path.realpath, named):
        return
    put = len(entries) + (not sys.flags.safe_path)  # at most so many were put in front of Python's own
    sys.path[:put] = [entry for entry in sys.path[:put] if os.path.realpath(entry) != here]
    if given:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)  # of the processes that are started from here


def _terminated(number: int, frame: object) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
