"""What a process needs of its surroundings, made good where it is missing: open standard streams, a user name, a home.

    startup.prepare()      # first thing in main()

Containers run as numbers without a passwd entry, cron jobs and daemons without a terminal or with closed streams, batch
systems under locales that cannot write "×". None of that may stop a training, and the libraries that ask for a user or
a home (torch, Triton, TorchX) get the same answers as gemctl, by the environment.
"""

import codecs
import io
import os
import sys
from typing import Any, TextIO

PLAIN_ERRORS = "gemctl.plain"
# What stands for characters that an encoding lacks; others are escaped.
PLAIN = {
    "×": "x", "·": "*", "–": "-", "−": "-", "—": "-", "…": "...", "→": "->", "█": "#", "≈": "~", "≤": "<=", "≥": ">=",
    "Σ": "sum", "√": "sqrt ", "⌈": "ceil(", "⌉": ")", "²": "^2", "³": "^3", "µ": "u",
}  # fmt: skip


class Output(io.FileIO):
    """Standard output: what cannot be written is an OSError that says so, once. What comes after it goes nowhere, so
    the interpreter's last flush does not fail again."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _open_null(self.fileno())
            raise OSError(error.errno, error.strerror, "standard output") from None


class Messages(io.FileIO):
    """Standard error: where nobody reads it any more (the terminal was closed, the reader of the pipe has gone, the
    disk is full), nothing is said, and the run goes on."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError:
            _open_null(self.fileno())
            return len(data)


def prepare() -> None:
    """Makes good what this process's surroundings lack."""
    _open_closed()
    codecs.register_error(PLAIN_ERRORS, plain)
    sys.stdout = _stream(sys.stdout, 1, Output)
    sys.stderr = _stream(sys.stderr, 2, Messages)
    if not {"USER", "HOME"} <= os.environ.keys():
        from gemctl import env

        os.environ.setdefault("USER", env.user())
        os.environ.setdefault("HOME", str(env.home()))


def write_utf8() -> None:
    """What this process says from now on goes to a file of a run, which is UTF-8 whatever the locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors=PLAIN_ERRORS)


def plain(error: UnicodeError) -> tuple[str, int]:
    """The codec error handler that writes plain characters for those that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain_character, error.object[error.start : error.end])), error.end


def _plain_character(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a path that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode("ascii")


def _open_closed() -> None:
    """A standard stream that is closed leads nowhere: its number must not become that of another file."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _open_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def _stream(stream: TextIO | None, fd: int, kind: type[io.FileIO]) -> TextIO:
    """The standard stream `stream` (None: it was closed), written through `kind`."""
    if stream is not None and not (isinstance(stream, io.TextIOWrapper) and stream.fileno() == fd):
        return stream  # whoever put it there wants it
    encoding = stream.encoding if stream is not None else "utf-8"
    raw = io.BufferedWriter(kind(fd, "w", closefd=False))
    lines = fd == 2 or (stream is not None and stream.line_buffering)
    through = stream is not None and stream.write_through
    return io.TextIOWrapper(raw, encoding, PLAIN_ERRORS, line_buffering=lines, write_through=through)
