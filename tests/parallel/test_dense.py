"""The dense part's options, alone and together: bf16, recomputed layers, accumulation, units, over mixed meshes."""

from dataclasses import replace

import pytest

import gemctl.parallel.dense as parallel_dense
import gemctl.plan.dense as plan_dense
from gemctl.mesh.topology import Topology
from tests.parallel.any_layout import Case, Trained, assert_same, compare, optimizer_for, reference, run, train
from tests.parallel.test_traffic import Sent, count_all, planned
from tests.support.world import run_world

MESHES = [Topology(4, 2, 2, 2, 1, 4, 4), Topology(4, 1, 4, 2, 2, 2, 4), Topology(4, 1, 4, 4, 1, 4, 4)]


def cases(**options: object) -> list[Case]:
    return [Case(mesh, optimizer=optimizer_for(mesh), global_batch=13, **options) for mesh in MESHES]  # type: ignore[arg-type]


@pytest.mark.slow
def test_recomputed_layers_and_micro_batches_change_nothing() -> None:
    chosen = cases(recompute="layers", layers=2, accumulate=2)
    for case, found in zip(chosen, compare(4, chosen), strict=True):
        assert_same(case, found)


def test_recomputing_is_bit_equal() -> None:
    chosen = cases(layers=2)[:1]
    again = [replace(case, recompute="layers") for case in chosen]
    for kept, made_anew in zip(*(run(4, some) for some in (chosen, again)), strict=True):
        assert kept.losses == made_anew.losses and kept.norms == made_anew.norms
        assert all(kept.state[name].equal(tensor) for name, tensor in made_anew.state.items())


def distance(found: Trained, exact: Trained) -> float:
    """Of all dense weights together, relative."""
    names = [name for name in exact.state if name.startswith("dense.")]
    apart = sum(float((found.state[name] - exact.state[name]).square().sum()) for name in names)
    return float((apart / sum(float(exact.state[name].square().sum()) for name in names)) ** 0.5)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bf16_is_as_exact_on_every_mesh_as_in_one_process(accumulate: int) -> None:
    """Against fp32. A wrong factor in a gradient would show in the norm: rounding moves it by about 1%."""
    chosen = cases(precision="bf16", accumulate=accumulate)
    for case, found in zip(chosen, run(4, chosen), strict=True):
        exact, single = reference(replace(case, precision="fp32")), reference(case)
        for a, b in zip(exact.losses, found.losses, strict=True):
            assert a != b and abs(a - b) <= 2e-3 * a
        for a, b in zip(exact.norms, found.norms, strict=True):
            assert abs(a - b) <= 2e-2 * a
        assert distance(found, exact) <= 2 * distance(single, exact)


def in_small_units(chosen: list[Case], parameters: int) -> tuple[list[Trained], list[Sent]]:
    parallel_dense.UNIT_PARAMETERS = parameters  # in this forked rank alone
    return [train(case) for case in chosen], count_all(chosen)


def test_layers_that_are_units_of_their_own_train_alike_and_send_what_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = [cases(layers=2, recompute="layers")[0], cases(layers=2)[1]]
    found, sent = run_world(4, in_small_units, chosen, 100)[0]
    for case, trained in zip(chosen, found, strict=True):
        one = reference(case)
        for a, b in zip(one.losses + one.norms, trained.losses + trained.norms, strict=True):
            assert abs(a - b) <= 1e-5 * a
    monkeypatch.setattr(plan_dense, "UNIT_PARAMETERS", 100)
    for case, counted in zip(chosen, sent, strict=True):
        dense = {key: both for key, both in planned(case).items() if not key[0].startswith("mp_")}
        assert sum(axis == "dp_shard" for axis, _ in dense) == 2 and dense["dp_shard", "all-gather"][0] > 5
        assert {key: counted[key] for key in dense} == dense
