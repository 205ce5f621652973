"""`gemctl report`: what a run reached and where its time went; with --diff, two runs side by side.

gemctl report RUN --html report.html
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl import paths
from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.run.compare import Diff
    from gemctl.run.report import Report

HELP = "Say what a run reached and where its time went."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")
    parser.add_argument("--html", metavar="FILE", help="also write the report as one HTML file")
    parser.add_argument("--diff", metavar="RUN", help="a second run to compare with")


def run(args: argparse.Namespace) -> "Report | Diff":
    from gemctl.run.compare import compare
    from gemctl.run.directory import find
    from gemctl.run.report import build

    first = find(args.run, args.root)
    if args.diff is not None:
        if args.html is not None:
            raise InputError("--html shows one run; leave --diff out")
        return compare(first, find(args.diff, args.root))
    value = build(first)
    if args.html is not None:
        from gemctl.render.page import report_html

        with paths.writing(f"--html {args.html}"):
            Path(args.html).write_text(report_html(value), encoding="utf-8")
    return value
