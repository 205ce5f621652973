"""What would be launched, before it is: the value of `gemctl train --dry-run`."""

from dataclasses import dataclass
from typing import Any

from gemctl.plan.build import Plan


@dataclass
class DryRun:
    """`plan` and the launch `request` of a first attempt, as the launcher would get it."""

    plan: Plan
    request: dict[str, Any]
