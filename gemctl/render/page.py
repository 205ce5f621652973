"""A report, or two side by side, as one self-contained HTML page: the tables of the terminal, and the NE curve.

gemctl report RUN --html report.html
"""

import html
from collections.abc import Iterator
from typing import Any

from gemctl.render.report import diff_sections, sections
from gemctl.render.sections import Section
from gemctl.report.compare import Diff
from gemctl.report.report import Report
from gemctl.terminal import shown

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c1e21; }
table { border-collapse: collapse; } td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #bbb; font-weight: 600; }
.figures { font-variant-numeric: tabular-nums; text-align: right; }
p { color: #666; margin: .3rem 0 0; font-size: 13px; } h2 { margin: 1.8rem 0 .4rem; font-size: 1.1rem; }
.bar { background: #4477aa; height: .8rem; } .track { width: 18rem; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e4e6eb; } p { color: #999; } }
"""


def report_html(value: Report) -> str:
    """A report as an HTML page that loads no other file."""
    return _page(_title(value), sections(value), _chart(value))


def diff_html(value: Diff) -> str:
    """Two runs side by side, as such a page."""
    return _page(" and ".join(map(_title, value.runs)), diff_sections(value), "")


def _title(value: Report) -> str:
    return f"{value.run['name']}/{value.run['run_id']}"


def _page(title: str, tables: list[Section], chart: str) -> str:
    body = "".join(_html_section(section) for section in tables)
    return shown(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>{body}{chart}</body></html>\n"
    )


def _html_section(section: Section) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in section.columns) if any(section.columns) else ""
    rows = []
    for index, row in enumerate(section.rows):
        cells = "".join(
            f"<td{' class=figures' if section.is_figures(column) else ''}>{html.escape(cell)}</td>"
            for column, cell in enumerate(row)
        )
        if section.bars:
            cells += f'<td class="track"><div class="bar" style="width:{100 * section.bars[index]:.1f}%"></div></td>'
        rows.append(f"<tr>{cells}</tr>")
    note = f"<p>{html.escape(section.note)}</p>" if section.note else ""
    return f"<h2>{html.escape(section.title)}</h2><table><tr>{head}</tr>{''.join(rows)}</table>{note}"


def _chart(value: Report) -> str:
    """NE of each task over the steps (training intervals), as inline SVG."""
    train = [line for line in value.curve if line["kind"] == "train"]
    drawn = [(task, list(_points(train, task))) for task in value.tasks]
    drawn = [(task, points) for task, points in drawn if len(points) > 1]
    if not drawn:
        return ""
    steps = [step for _, points in drawn for step, _ in points]
    values = [ne for _, points in drawn for _, ne in points]
    low, high = min(values), max(values)
    lines = []
    for index, (task, points) in enumerate(drawn):
        colour = ("#4477aa", "#ee6677", "#228833", "#ccbb44")[index % 4]
        path = " ".join(
            f"{60 + 620 * (step - min(steps)) / max(1, max(steps) - min(steps)):.1f},"
            f"{20 + 200 * (high - ne) / max(1e-9, high - low):.1f}"
            for step, ne in points
        )
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        lines.append(f'<text x="690" y="{30 + 18 * index}" fill="{colour}">{html.escape(task)}</text>')
    labels = f'<text x="0" y="25">{high:.3f}</text><text x="0" y="225">{low:.3f}</text>'
    labels += f'<text x="60" y="245">step {min(steps)}</text><text x="620" y="245">{max(steps)}</text>'
    return (
        "<h2>NE while training</h2>"
        f'<svg viewBox="0 0 800 250" width="100%" font-size="13" fill="currentColor">{labels}{"".join(lines)}</svg>'
    )


def _points(lines: list[dict[str, Any]], task: str) -> Iterator[tuple[int, float]]:
    for line in lines:
        ne = line["tasks"].get(task, {}).get("ne")
        if ne is not None:
            yield line["step"], ne
