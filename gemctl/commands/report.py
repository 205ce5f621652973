"""`gemctl report`: what a run reached and where its time went; with --diff, two runs side by side.

gemctl report RUN --html report.html
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl import paths

if TYPE_CHECKING:
    from gemctl.report.compare import Diff
    from gemctl.report.report import Report

HELP = "Say what a run reached and where its time went."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")
    parser.add_argument("--html", metavar="FILE", help="also write it as one HTML file")
    parser.add_argument("--diff", metavar="RUN", help="a second run to compare with")


def run(args: argparse.Namespace) -> "Report | Diff":
    from gemctl.report.compare import compare
    from gemctl.report.report import Report, build
    from gemctl.run.directory import find

    if args.html is not None:
        paths.refuse_there("--html", args.html, replaceable=b"<!doctype html>")  # an older report
    first = find(args.run, args.root)
    value = build(first) if args.diff is None else compare(first, find(args.diff, args.root))
    if args.html is not None:
        from gemctl.render.page import diff_html, report_html

        page = report_html(value) if isinstance(value, Report) else diff_html(value)
        with paths.writing(f"--html {args.html}"):
            Path(args.html).write_text(page, encoding="utf-8", errors="backslashreplace")
    return value
