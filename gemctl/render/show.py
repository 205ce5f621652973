"""Shows the value that a command returns: as JSON, or by the render function of its class.

    gemctl plan --json

A render function takes the value and returns a string, a Rich renderable, or a list of them. RENDERERS has names, not
objects, so that only the modules that are needed get imported.
"""

import dataclasses
import enum
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemctl.credentials import masked
from gemctl.terminal import console, shown

RENDERERS = {
    "gemctl.bench.results.KernelBench": "gemctl.render.bench:kernels",
    "gemctl.cluster.checks.Doctor": "gemctl.render.status:doctor",
    "gemctl.config.schema.Config": "gemctl.render.plan:config",
    "gemctl.data.drafting.Draft": "gemctl.render.data:draft",
    "gemctl.data.importing.Imported": "gemctl.render.data:imported",
    "gemctl.data.synthetic.SyntheticLog": "gemctl.render.data:synthetic_log",
    "gemctl.launch.preflight.Preflight": "gemctl.render.checkpoint:preflight",
    "gemctl.launch.submit.DryRun": "gemctl.render.plan:dry_run",
    "gemctl.plan.build.Plan": "gemctl.render.plan:plan",
    "gemctl.report.compare.Diff": "gemctl.render.report:diff",
    "gemctl.report.layers.Layers": "gemctl.render.bench:layers",
    "gemctl.bench.results.ModelBench": "gemctl.render.bench:model",
    "gemctl.report.report.Report": "gemctl.render.report:report",
    "gemctl.report.report.Evaluation": "gemctl.render.report:evaluation",
    "gemctl.report.status.RunList": "gemctl.render.status:run_list",
    "gemctl.report.status.RunStatus": "gemctl.render.status:run_status",
    "gemctl.run.checkpoints.Comparison": "gemctl.render.checkpoint:comparison",
    "gemctl.run.checkpoints.Exported": "gemctl.render.checkpoint:exported",
    "gemctl.run.checkpoints.Listing": "gemctl.render.checkpoint:listing",
    "gemctl.run.checkpoints.Pruned": "gemctl.render.checkpoint:pruned",
    "gemctl.run.checkpoints.Verified": "gemctl.render.checkpoint:verified",
    "gemctl.run.requests.StopFiled": "gemctl.render.status:stop_filed",
    "gemctl.run.submission.Detached": "gemctl.render.status:detached",
    "gemctl.run.submission.Sweep": "gemctl.render.status:sweep",
    "gemctl.run.warm_start.WarmStart": "gemctl.render.checkpoint:warm_start",
}


def show(value: object, as_json: bool = False) -> None:
    """Writes `value` to standard output."""
    shown = json.dumps(plain(value), indent=2) if as_json else rendered(value)
    for part in shown if isinstance(shown, list) else [shown]:
        _print(part)
    sys.stdout.flush()  # a failed write is reported before the command does anything else


def _print(part: Any) -> None:
    """Strings unwrapped, so that they can be copied; the rest in the terminal's width."""
    if isinstance(part, str):
        print(shown(part))
        return
    console(sys.stdout, None if sys.stdout.isatty() else 120).print(part)


def rendered(value: object) -> Any:
    """What the value's render function returns; a string is shown as it is."""
    if isinstance(value, str):
        return value
    path = RENDERERS[f"{type(value).__module__}.{type(value).__qualname__}"]
    module, name = path.split(":")
    render: Callable[[object], Any] = getattr(importlib.import_module(module), name)
    return render(value)


def plain(value: Any) -> Any:
    """`value` as JSON data: dataclasses as objects, NaN and infinities as null, paths as strings, and credentials
    in URLs masked."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, enum.Enum):
        return plain(value.value)
    return masked(str(value)) if isinstance(value, (str, Path)) else value
