"""Where the program begins: `gemctl`, and `python -m gemctl`.

An interrupt counts from the first import on, and SIGTERM is one too: what was begun is cleaned up, and the exit code is
130. Only `gemctl train` and `gemctl resume` take them otherwise, to save first (gemctl/recover/supervisor.py).
"""

import sys


def main() -> int:
    """Runs the command line of this process; returns the exit code."""
    try:
        import signal  # takes several milliseconds

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        from gemctl import cli

        return cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
