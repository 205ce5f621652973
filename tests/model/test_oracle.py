"""The model against the padded float64 oracle: logits, the gradient of every parameter and embedding, and the work."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from gemctl.data.batch import Batch
from gemctl.model.embeddings import Embedded
from gemctl.model.gem import DenseModel
from gemctl.specs.count import module_flops
from gemctl.specs.model import ModelConfig
from tests.model.cases import CASES, MORE, Case, cast, model_logits, random_batch, random_dense, random_embedded
from tests.model.options import OPTIONS, PRESETS, preset, twin
from tests.model.oracle import Oracle
from tests.model.own_block import KIND, squares
from tests.model.shrink import MOST_REPEATS, shrunk

OWN = {KIND: squares}
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass
class Found:
    """Logits and gradients of one case by the model and the oracle on the same float32 numbers; the oracle's work.

    `rounding`: relative errors of the formulas themselves in float32, in which some gradients nearly cancel.
    """

    model: dict[torch.dtype, dict[str, Tensor]]
    oracle: dict[str, Tensor]
    rounding: dict[str, float]
    work: dict[str, int]
    batch: Batch


def computed(case: Case) -> Found:
    """The model and the oracle in both types."""
    batch = cast(random_batch(case.spec, case.lengths), torch.float32)
    dense = random_dense(case, torch.float32)
    embedded = random_embedded(case.spec, batch, case.model.dim, torch.float32)
    found = {torch.float32: both(model_logits(dense, batch, embedded), dense, embedded)}
    single = both(expected(case, dense)(batch, embedded.categorical, embedded.events), dense, embedded)
    dense.double()
    batch, embedded = cast(batch, torch.float64), doubled(embedded)
    found[torch.float64] = both(model_logits(dense, batch, embedded), dense, embedded)
    oracle = expected(case, dense)
    wanted = both(oracle(batch, embedded.categorical, embedded.events), dense, embedded)
    rounding = {name: relative_error(single[name], value) for name, value in wanted.items()}
    return Found(found, wanted, rounding, dict(oracle.work), batch)


def expected(case: Case, dense: DenseModel) -> Oracle:
    return Oracle(dict(dense.named_parameters()), case.model, case.spec, OWN)


def both(logits: Tensor, dense: DenseModel, embedded: Embedded) -> dict[str, Tensor]:
    return {"logits": logits.detach(), **gradients(logits, dense, embedded)}


def gradients(logits: Tensor, dense: DenseModel, embedded: Embedded) -> dict[str, Tensor]:
    """Of a fixed random combination of the logits, by parameter and embedding."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = {**dict(dense.named_parameters()), **embedded.categorical, **embedded.events}
    found = torch.autograd.grad((logits * weights.to(logits.dtype)).sum(), list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def doubled(embedded: Embedded) -> Embedded:
    def leaves(rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: leaf.detach().double().requires_grad_() for name, leaf in rows.items()}

    return Embedded(leaves(embedded.categorical), leaves(embedded.events))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    difference, size = (found.double() - wanted).norm().item(), wanted.norm().item()
    return difference / size if size else difference


def check(case: Case) -> None:
    found = computed(case)
    assert found.oracle["logits"].shape == (len(case.lengths), len(case.spec.labels))
    for dtype, bound in BOUNDS.items():
        errors = {name: relative_error(found.model[dtype][name], wanted) for name, wanted in found.oracle.items()}
        bounds = {name: bound if dtype == torch.float64 else max(bound, 3 * found.rounding[name]) for name in errors}
        assert not {name: error for name, error in errors.items() if not error <= bounds[name]}, dtype
    lengths = {name: sequence.offsets.diff().numpy() for name, sequence in found.batch.sequences.items()}
    counted = module_flops(case.model, case.spec, len(found.batch), lengths)
    assert counted == {name: 2 * found.work.get(name, 0) for name in counted}
    assert found.work.keys() <= counted.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_small_twin_equals_the_oracle(name: str) -> None:
    check(twin(name))


@pytest.mark.parametrize("case", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_equals_the_oracle(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE.values(), ids=MORE.keys())
def test_more_mixed_cases_equal_the_oracle(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_case_equals_the_oracle(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("name", PRESETS)
def test_a_small_twin_differs_in_sizes_alone(name: str) -> None:
    """Word for word the preset, but for its numbers; a number that is not set stays so, and a list keeps its length."""
    model = preset(name)
    assert kinds(shrunk(model)) == kinds(model)


def kinds(value: Any) -> Any:
    """`value` without its sizes; `repeat` is kept as far as the twin keeps it."""
    if isinstance(value, list):
        return [kinds(item) for item in value]
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    if isinstance(value, int) and not isinstance(value, bool):
        return "a size"
    if not is_dataclass(value):
        return value
    found = {one.name: kinds(getattr(value, one.name)) for one in fields(value)}
    if "repeat" in found:
        found["repeat"] = min(value.repeat, MOST_REPEATS)  # type: ignore[union-attr]
    return type(value).__name__, found


def test_every_choice_that_the_schema_offers_is_compared() -> None:
    """A kind, a flag, an activation, a gate, a parity, a value that may be null, a scale that is not the default."""
    assert offered(ModelConfig) - set().union(*(chosen(case.model) for case in OPTIONS.values())) == set()


def chosen(value: Any) -> set[tuple[str, str, Any]]:
    """(spec, field, value) of every field below `value`; a size counts as "set"."""
    if isinstance(value, list | dict):
        return set().union(*(chosen(item) for item in (value.values() if isinstance(value, dict) else value)))
    found: set[tuple[str, str, Any]] = set()
    if is_dataclass(value):
        made: Any = type(value)
        for one in fields(value):
            inner = getattr(value, one.name)
            found |= chosen(inner) | {(type(value).__name__, one.name, None if inner is None else "set")}
            if isinstance(inner, str | bool):
                found.add((type(value).__name__, one.name, inner))
            numbers = inner if isinstance(inner, list) else [inner]
            if isinstance(numbers[0] if numbers else None, float) and inner != getattr(made(), one.name):
                found.add((type(value).__name__, one.name, "a scale"))
    return found


def offered(hint: Any, where: tuple[str, str] = ("", "")) -> set[tuple[str, str, Any]]:
    """(spec, field, value) of every choice that the annotation `hint` offers, and of those below it."""
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return set().union(*(offered(inner, (hint.__name__, name)) for name, inner in hints.items()))  # type: ignore[union-attr]
    if get_origin(hint) is Literal:
        return {(*where, value) for value in get_args(hint)}
    if hint is bool:
        return {(*where, True), (*where, False)}
    if hint is float:
        return {(*where, "a scale")}
    found = set().union(*(offered(inner, where) for inner in get_args(hint)))
    return found | ({(*where, None), (*where, "set")} if type(None) in get_args(hint) else set())
