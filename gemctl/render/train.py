"""What `gemctl train --dry-run` would launch, in the terminal."""

import shlex
from typing import Any

from gemctl.launch.submit import DryRun
from gemctl.render.show import rendered


def dry_run(value: DryRun) -> Any:
    """The plan, then one block for each role of the request, then the scheduler's own form whole."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    roles = value.request["roles"]
    warm = [Text(rendered(value.warm_start))] if value.warm_start is not None else []
    form = [] if value.form is None else ["", value.form.rstrip()]
    lines = ["", *(line for role in roles for line in _role(role)), *form]
    return [Group(rendered(value.plan), *warm), "\n".join(lines)]


def _role(role: dict[str, Any]) -> list[str]:
    environment = [f"    {name}={shlex.quote(text)}" for name, text in sorted(role["env"].items())]
    command = shlex.join([role["entrypoint"], *role["args"]])
    return [f"would launch {role['num_replicas']} × {role['name']}:", *environment, f"    {command}"]
