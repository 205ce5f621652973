"""What others build on: rows that do not see each other, gradients for every parameter, init rules, the lookups."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemctl.data.batch import Batch
from gemctl.model.embeddings import Embedded, gather, kjt_inputs
from gemctl.model.gem import DenseModel, GemModel
from gemctl.model.init import InitRule, init_rules
from gemctl.specs.feature_spec import TAKEN
from tests.model.cases import (
    ALL,
    CASES,
    LENGTHS,
    NANO,
    SEVERAL,
    Case,
    cast,
    model_logits,
    random_batch,
    random_dense,
    random_embedded,
)
from tests.support.small import SPEC

SOME = {name: ALL[name] for name in ALL if len(ALL[name].lengths) == len(LENGTHS)}
EMPTY = {"no event": (0, 0, 0), "no row": ()}


@pytest.mark.parametrize("case", SOME.values(), ids=SOME.keys())
def test_a_rows_logits_do_not_depend_on_its_batch(case: Case) -> None:
    """Up to float64's rounding, which moves with the order of sums in a larger matrix product."""
    batch = random_batch(case.spec, case.lengths)
    dense, embedded = random_dense(case), random_embedded(case.spec, batch, case.model.dim)
    together = model_logits(dense, batch, embedded)
    every_row = [(i, i + 1) for i in range(len(batch))]
    for cuts in (every_row, [(0, 3), (3, 3), (3, len(batch))]):
        parts = [model_logits(dense, batch.slice(i, j), embedded.slice(batch, i, j)) for i, j in cuts]
        torch.testing.assert_close(torch.cat(parts), together, rtol=1e-12, atol=1e-12)


def test_slices_of_embeddings_are_views_of_their_rows() -> None:
    batch = random_batch(SEVERAL, (2, 0, 3, 1))
    embedded = random_embedded(SEVERAL, batch, 8)
    part = embedded.slice(batch, 1, 3)
    assert part.categorical.keys() == embedded.categorical.keys()
    assert part.events.keys() == embedded.events.keys()
    for name, rows in part.categorical.items():
        assert torch.equal(rows, embedded.categorical[name][1:3])
    assert torch.equal(part.events["history.item"], embedded.events["history.item"][2:5])
    assert torch.equal(part.events["clicks.page"], embedded.events["clicks.page"][1:4])  # lengths 1, 3, 0, 2
    sum(x.sum() for x in part.tensors()).backward()  # type: ignore[union-attr]
    assert embedded.events["history.item"].grad is not None
    assert embedded.events["history.item"].grad.sum() == 3 * 8


def test_detached_embeddings_are_leaves_with_the_same_values() -> None:
    embedded = random_embedded(SPEC, random_batch(SPEC, (2, 1)), 8)
    categorical = {name: 2 * rows for name, rows in embedded.categorical.items()}
    doubled = Embedded(categorical, {name: 2 * rows for name, rows in embedded.events.items()})
    for before, leaf in zip(doubled.tensors(), doubled.detached().tensors(), strict=True):
        assert torch.equal(before, leaf)
        assert leaf.is_leaf and leaf.requires_grad and not before.is_leaf


@pytest.mark.parametrize("lengths", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.parametrize("case", SOME.values(), ids=SOME.keys())
def test_every_parameter_gets_a_gradient_from_nothing(case: Case, lengths: tuple[int, ...]) -> None:
    batch = cast(random_batch(case.spec, lengths), torch.float32)
    model = initialised(GemModel(case.model, case.spec))
    logits = model.dense(batch, looked_up(model, case, batch, padded_rows=len(batch) + 2))
    assert logits.shape == (len(lengths), len(case.spec.labels))
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert lengths or not parameter.grad.any(), name


@pytest.mark.parametrize("case", SOME.values(), ids=SOME.keys())
def test_every_entry_of_every_parameter_matters(case: Case) -> None:
    """An entry whose gradient is always zero (a key's bias under softmax, say) would be moved by rounding noise alone.

    Noise is below 1e-15 of the largest gradient here; the smallest true ones are far above 1e-12 of it.
    """
    batch = random_batch(case.spec, case.lengths)
    dense, embedded = random_dense(case), random_embedded(case.spec, batch, case.model.dim)
    weights = torch.randn(len(batch), len(case.spec.labels), generator=torch.Generator().manual_seed(3))
    (model_logits(dense, batch, embedded) * weights).sum().backward()
    sizes = {name: parameter.grad.abs() for name, parameter in dense.named_parameters() if parameter.grad is not None}
    largest = max(float(size.max()) for size in sizes.values())
    assert not [name for name, size in sizes.items() if not (size > 1e-12 * largest).all()]


@pytest.mark.parametrize("case_id", ALL)
def test_init_rules_are_those_of_the_parameters(case_id: str) -> None:
    case = ALL[case_id]
    with torch.device("meta"):
        model = GemModel(case.model, case.spec)
    rules = init_rules(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert rules.keys() == shapes.keys()
    for name, rule in rules.items():
        if name.endswith("bias"):
            assert rule == InitRule("zeros"), name
        elif name.endswith(("ffn.values.weight", "attention.output.weight")) and "no residual" not in case_id:
            assert rule == InitRule("zeros"), name  # every residual branch starts as the identity
        else:
            bound = 1.0 if name.endswith("seeds") else fan_in(name, shapes[name]) ** -0.5
            assert rule == InitRule("uniform", bound), name
    assert {f"dense.{name}": rule for name, rule in init_rules(model.dense).items()}.items() <= rules.items()


def fan_in(name: str, shape: torch.Size) -> int:
    """Numbers that one output sums: a table's width stands for it, as a row is what the next layer sums over."""
    if len(shape) == 3:  # stacked by expert
        return {"fm_columns": shape[1], "merge": shape[0] * shape[2]}.get(name.rpartition(".")[2], shape[2])
    return shape[0] if name.endswith("columns.weight") else shape[1]


def test_a_parameter_without_a_rule_is_an_error() -> None:
    dense = DenseModel(NANO, SPEC)
    dense.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(TypeError, match="extra"):
        init_rules(dense)


@pytest.mark.parametrize("lengths", [(2, 0, 3, 1), (0, 0), ()], ids=["jagged", "no event", "no row"])
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("name", ["several sequences", "no sequence", "ids of one table", "no table"])
def test_lookups_are_plain_indexing(name: str, lengths: tuple[int, ...], more: int) -> None:
    """Also where rows past the batch are looked up, as sharded tables need the same number on every rank."""
    case = CASES[name]
    batch = cast(random_batch(case.spec, lengths), torch.float32)
    model = initialised(GemModel(case.model, case.spec))
    found = looked_up(model, case, batch, padded_rows=max(1, len(batch) + more))
    weights = {key.split(".")[-2]: value.detach() for key, value in model.tables.named_parameters()}
    assert list(found.categorical) == [feature.name for feature in case.spec.categorical]
    for feature in case.spec.categorical:
        rows = weights[feature.table][batch.categorical[feature.name].values]
        counts = batch.categorical[feature.name].offsets.diff().tolist()
        sums = [part.sum(0) for part in rows.split(counts)]
        wanted = torch.stack(sums) if sums else rows[:0]
        torch.testing.assert_close(found.categorical[feature.name], wanted, rtol=1e-6, atol=1e-6)
    wanted_events = {
        f"{s.name}.{f.name}": weights[f.table][batch.sequences[s.name].ids[f.name]]
        for s in case.spec.sequences
        for f in s.ids
    }
    assert found.events.keys() == wanted_events.keys()
    for key, rows in wanted_events.items():
        assert torch.equal(found.events[key], rows)


def looked_up(model: GemModel, case: Case, batch: Batch, padded_rows: int) -> Embedded:
    pooled, sequence = kjt_inputs(batch, case.spec, padded_rows)
    for ids in (pooled, sequence):
        assert ids is None or ids.stride() == padded_rows
    tables = model.tables
    return gather(
        batch,
        case.spec,
        tables.pooled(pooled) if tables.pooled is not None else None,
        tables.sequence(sequence) if tables.sequence is not None else None,
    )


def initialised(model: GemModel) -> GemModel:
    """Uniform numbers within each rule's bound."""
    draw = torch.Generator().manual_seed(5)
    rules = init_rules(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise: Tensor = 2 * torch.rand(parameter.shape, generator=draw) - 1
            parameter.copy_(noise * rules[name].bound)
    return model


def test_names_that_the_model_cannot_take_are_refused_by_the_spec() -> None:
    """A sequence's modules and a table live in a ModuleDict, where the names of its own members are taken."""
    members = {name for name in dir(torch.nn.ModuleDict()) if not name.startswith("_")}
    assert members - TAKEN == set()
    named = replace(SPEC, sequences=[replace(SPEC.sequences[0], name="items")])
    with pytest.raises(KeyError, match="items"):
        DenseModel(NANO, named)
