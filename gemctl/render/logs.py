"""Log lines in the terminal, as they come, or one JSON object a line."""

import json
import sys
from collections.abc import Iterable
from datetime import datetime

from gemctl.launch.progress import measured
from gemctl.render.show import plain
from gemctl.report.logs import Line
from gemctl.terminal import shown


def write(lines: Iterable[Line | str], as_json: bool) -> None:
    """Writes each line at once; plain strings say how an attempt or the run ended."""
    for line in lines:
        if line == "":
            continue
        if isinstance(line, Line):
            text = json.dumps(plain(line)) if as_json else _line(line)
        else:
            text = json.dumps({"conclusion": line.strip()}) if as_json else line
        sys.stdout.write(shown(text) + "\n")
        sys.stdout.flush()


def _line(line: Line) -> str:
    host = "" if line.host is None else f" {line.host}"
    text = line.text if line.record is None else measured(line.record)
    return f"{_time(line.time)} {line.source}{host} | {text}"


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "–" * 23
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S.%f}"[:-3]
