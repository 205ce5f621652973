"""`gemctl report`: what a run achieved and where its time went; with --diff, two runs side by side.

gemctl report RUN --html report.html
"""

import argparse
from pathlib import Path

from gemctl import paths
from gemctl.render.page import diff_html, report_html
from gemctl.report.compare import Diff, compare
from gemctl.report.report import Report, build
from gemctl.run.directory import find


def run(args: argparse.Namespace) -> Report | Diff:
    if args.html is not None:
        paths.refuse_there("--html", args.html, replaceable=b"<!doctype html>")  # an older report
    first = find(args.run, args.root)
    value = build(first) if args.diff is None else compare(first, find(args.diff, args.root))
    if args.html is not None:
        page = report_html(value) if isinstance(value, Report) else diff_html(value)
        with paths.writing(f"--html {args.html}"):
            Path(args.html).write_text(page, encoding="utf-8", errors="backslashreplace")
    return value
