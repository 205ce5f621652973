"""Repairs a process's surroundings: closed standard streams, locales without Unicode, a missing user name or home.

    startup.prepare()      # first thing in main()

Containers run under user ids without a passwd entry, cron jobs and daemons with closed streams, batch systems under
locales that cannot encode "×". None of that may stop a training run. Libraries that look up the user or the home
(torch, Triton, TorchX) get the same answers as gemctl, through the environment.
"""

import codecs
import io
import os
import sys
from typing import Any, TextIO

PLAIN_ERRORS = "gemctl.plain"
# Replacements for characters that an encoding lacks; all others are escaped.
PLAIN = {
    "×": "x", "·": "*", "–": "-", "−": "-", "—": "-", "…": "...", "→": "->", "█": "#", "≈": "~", "≤": "<=", "≥": ">=",
    "Σ": "sum", "√": "sqrt ", "⌈": "ceil(", "⌉": ")", "²": "^2", "³": "^3", "µ": "u",
}  # fmt: skip


class Output(io.FileIO):
    """Standard output: a failed write raises an OSError that names it, once. Later output is discarded, so that the
    interpreter's final flush does not fail again."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _open_null(self.fileno())
            raise OSError(error.errno, error.strerror, "standard output") from None


class Messages(io.FileIO):
    """Standard error: if it cannot be written any more (closed terminal or pipe, full disk), messages are discarded and
    the run continues."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError:
            _open_null(self.fileno())
            return len(data)


def prepare() -> None:
    """Opens closed streams, makes output encodable, and sets USER and HOME."""
    _open_closed()
    codecs.register_error(PLAIN_ERRORS, plain)
    sys.stdout = _stream(sys.stdout, 1, Output)
    sys.stderr = _stream(sys.stderr, 2, Messages)
    if not {"USER", "HOME"} <= os.environ.keys():
        from gemctl import env  # noqa: PLC0415

        os.environ.setdefault("USER", env.user())
        os.environ.setdefault("HOME", str(env.home()))


def write_utf8() -> None:
    """Makes stdout and stderr UTF-8 whatever the locale: they are files of a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors=PLAIN_ERRORS)


def plain(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler that replaces characters that an encoding lacks by plain ones."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain_character, error.object[error.start : error.end])), error.end


def _plain_character(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a path that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode("ascii")


def _open_closed() -> None:
    """Opens /dev/null in place of closed standard streams, so that no other file gets their descriptors."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _open_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def _stream(stream: TextIO | None, fd: int, kind: type[io.FileIO]) -> TextIO:
    """The standard stream `stream` (None if it was closed), written through `kind`."""
    if stream is not None and not (isinstance(stream, io.TextIOWrapper) and stream.fileno() == fd):
        return stream  # a deliberate replacement
    encoding = stream.encoding if stream is not None else "utf-8"
    raw = io.BufferedWriter(kind(fd, "w", closefd=False))
    lines = fd == 2 or (stream is not None and stream.line_buffering)
    through = stream is not None and stream.write_through
    return io.TextIOWrapper(raw, encoding, PLAIN_ERRORS, line_buffering=lines, write_through=through)
