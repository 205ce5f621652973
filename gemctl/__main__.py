"""Where the program begins: `gemctl`, and `python -m gemctl`.

An interrupt counts from the first import on, and SIGTERM is one too: what was begun is cleaned up, and the exit code is
130, or 143 after SIGTERM. Only a run's supervisor takes them otherwise, to save first (gemctl/recover/supervisor.py).
"""

import sys


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def main() -> int:
    """Runs the command line of this process; returns the exit code."""
    try:
        import signal  # takes several milliseconds

        signal.signal(signal.SIGTERM, _terminated)
        from gemctl import startup

        startup.prepare()
        from gemctl import cli

        return cli.main()
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("interrupted\n")
        return 143 if isinstance(interrupt, Terminated) else 130


def _terminated(number: int, frame: object) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
