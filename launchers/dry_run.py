"""What would be launched, before it is: the value of `gemctl train --dry-run`."""

from dataclasses import dataclass
from typing import Any

from gemctl.plan.build import Plan
from gemctl.run.warm_start import WarmStart


@dataclass
class DryRun:
    """`plan` and the launch `request` of a first attempt, as the launcher would get it; what it would start from."""

    plan: Plan
    request: dict[str, Any]
    warm_start: WarmStart | None
