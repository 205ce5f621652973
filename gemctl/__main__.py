"""The program's entry point: `gemctl`, and `python -m gemctl`.

Ctrl-C and SIGTERM are handled from the first import on: unfinished files are cleaned up, and the exit code is 130, or
143 after SIGTERM. Only a run's supervisor handles them differently, to save first (gemctl/recover/supervisor.py).
"""

import os
import sys


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


def main() -> int:
    """Runs the command line of this process; returns the exit code."""
    try:
        _leave_current_folder()
        import signal  # noqa: PLC0415

        signal.signal(signal.SIGTERM, _terminated)
        from gemctl import startup  # noqa: PLC0415

        startup.prepare()
        from gemctl import cli  # noqa: PLC0415

        return cli.main()
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("interrupted\n")
        return 143 if isinstance(interrupt, Terminated) else 130


def _leave_current_folder() -> None:
    """Removes the current folder from the module path, so that no `random.py` in it is imported in place of Python's.

    `python -m` puts it there, and so does an empty entry of PYTHONPATH (`PYTHONPATH=$PYTHONPATH:/mine` where it was
    unset). A folder that PYTHONPATH names stays.
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
    put = len(entries) + (not sys.flags.safe_path)  # at most this many precede Python's own
    sys.path[:put] = [entry for entry in sys.path[:put] if os.path.realpath(entry) != here]
    if given:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)  # for processes started from here


def _terminated(number: int, frame: object) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
