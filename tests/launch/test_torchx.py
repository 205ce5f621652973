"""What TorchX finds once gemctl is installed."""

import importlib.metadata

from torchx.schedulers import DEFAULT_SCHEDULER_MODULES, get_scheduler_factories


def test_torchx_keeps_its_own_schedulers_beside_ours() -> None:
    found = get_scheduler_factories()
    assert set(DEFAULT_SCHEDULER_MODULES) < set(found)
    registered = {entry.name: entry.value for entry in importlib.metadata.entry_points(group="torchx.schedulers")}
    for name, module in DEFAULT_SCHEDULER_MODULES.items():
        assert registered[name] == f"{module}:create_scheduler"


def test_our_schedulers_load() -> None:
    ours = [entry for entry in importlib.metadata.entry_points(group="torchx.schedulers") if "gemctl" in entry.value]
    assert [entry.name for entry in ours] == ["gemctl_slurm"]
    for entry in ours:
        scheduler = entry.load()("session")
        assert scheduler.backend == entry.name
