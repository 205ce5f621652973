"""Layers timed alone: every model's FLOPs belong to modules that are summed; inputs are those of a whole forward."""

from dataclasses import asdict

import torch

from gemctl.bench import layers
from gemctl.bench.layers import LOSS, _calls, _leaves, time_modules
from gemctl.config.compose import from_yaml, to_yaml
from gemctl.config.schema import Config, DataConfig, LauncherConfig, TrainConfig
from gemctl.model.events import Events
from gemctl.report.layers import from_json
from gemctl.specs.count import module_flops
from tests.model.cases import ALL, cast, model_logits, random_batch, random_dense, random_embedded
from tests.support.small import SPEC, small_config
from tests.support.world import run_world


def coverage() -> dict[str, tuple[float, float, bool]]:
    """FLOPs of all modules and of those summed, and whether all took time, by case."""
    torch.manual_seed(0)
    found = {}
    for name, case in ALL.items():
        if not case.lengths:
            continue
        batch = cast(random_batch(case.spec, case.lengths), torch.float32)
        dense = random_dense(case, torch.float32)
        times = time_modules(dense, case.spec, [batch], case.model.dim, 1)
        lengths = {key: events.offsets.diff().numpy() for key, events in batch.sequences.items()}
        flops = {key: float(own) for key, own in module_flops(case.model, case.spec, len(batch), lengths).items()}
        summed = sum(layers._within(flops, key) for key in times.summed)
        timed = all(times.forward[key] > 0 and times.backward[key] > 0 for key in times.summed)
        found[name] = (sum(flops.values()), summed, timed and LOSS in times.summed and times.together > 0)
    return found


def test_all_flops_of_every_model_belong_to_the_rows_that_are_summed() -> None:
    for name, (every, summed, timed) in run_world(1, coverage)[0].items():
        assert summed == every and timed, name


def test_a_module_alone_gives_what_it_gave_in_the_whole() -> None:
    case = ALL["interformer"]
    batch = random_batch(case.spec, case.lengths)
    dense = random_dense(case)
    calls = _calls(dense, case.spec, batch, case.model.dim)
    assert {"tokens", "events.history", "layers.0", "layers.1", "heads", LOSS} <= calls.keys()
    x, histories, _ = calls["layers.0"]()
    again, more, _ = calls["layers.0"]()
    assert torch.equal(x, again) and torch.equal(histories["history"].values, more["history"].values)
    assert x.requires_grad and len(x) == len(case.lengths)
    embedded = random_embedded(case.spec, batch, case.model.dim)
    assert model_logits(dense, batch, embedded).shape == calls["heads"]().shape


def test_leaves_are_cut_off_and_keep_what_needed_a_gradient() -> None:
    values = torch.randn(3, 2, requires_grad=True) * 2
    events = Events(values, torch.tensor([0, 3]), torch.arange(3), torch.ones(3), 3)
    copy = _leaves((events, {"x": values}))
    assert copy[0].values.is_leaf and copy[0].values.requires_grad and not copy[0].ages.requires_grad
    assert copy[1]["x"].grad_fn is None and copy[0].max_length == 3


def measured(text: str) -> dict[str, object]:
    return asdict(layers.measure(from_yaml(text, "config.yaml"), SPEC))


def test_two_ranks_at_once_without_data() -> None:
    """Lengths are the plan's where the rows are not there: full histories."""
    small = small_config()
    config = Config(
        data=DataConfig("nowhere.yaml", "nowhere.parquet"),
        train=TrainConfig(global_batch=12, accumulate=2),
        model=small.model,
        launcher=LauncherConfig(ranks_per_node=2),
    )
    found = from_json(run_world(1, measured, to_yaml(config), gloo=False)[0])
    assert found.subject["ranks"] == 2 and found.rows == 3 * layers.BATCHES and found.events == 9 * found.rows
    assert "assumed" in found.lengths
    lengths = {"history": torch.full((found.rows,), 9).numpy()}
    assert found.flops == 3 * sum(module_flops(small.model, SPEC, found.rows, lengths).values())
    assert 0 < found.local_mfu < 1 and found.seconds > 0
