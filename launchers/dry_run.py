"""What would be launched, before it is: the value of `gemctl train --dry-run`."""

from dataclasses import dataclass
from typing import Any

from gemctl.plan.build import Plan
from gemctl.run.warm_start import WarmStart


@dataclass
class DryRun:
    """`plan` and launch `request` of a first submission; `form`: the request in the scheduler's own form, if it has one
    (a batch script, say); what the run would start from."""

    plan: Plan
    request: dict[str, Any]
    form: str | None
    warm_start: WarmStart | None
