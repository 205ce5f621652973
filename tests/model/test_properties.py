"""What equality with an oracle does not show: what one row, one event, one table row may and may not touch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemctl.data.batch import Batch, EventSequence
from gemctl.model.embeddings import Embedded, Tables, gather, kjt_inputs
from gemctl.model.events import Events
from gemctl.model.gem import DenseModel
from gemctl.specs.data import FeatureSpec
from gemctl.specs.interaction import WukongSpec
from gemctl.specs.model import LayerSpec, MaskNetSpec
from gemctl.specs.sequence import BlockAttentionSpec, HstuSpec, JaggedAttentionSpec, KunlunSpec, SequenceBlockSpec
from tests.model.cases import LENGTHS, SEVERAL, Case, layers, model_logits, random_batch, random_dense, random_embedded
from tests.model.options import OPTIONS, PRESETS, twin
from tests.support.small import SPEC

OTHERS = ("merged", "hstu, rote", "blocks after CLS")
SOME = {name: replace(twin(name), lengths=tuple(LENGTHS)) for name in PRESETS} | {
    name: OPTIONS[name] for name in OTHERS
}
each = pytest.mark.parametrize("case", SOME.values(), ids=SOME.keys())


def made(case: Case) -> tuple[DenseModel, Batch, Embedded]:
    batch = random_batch(case.spec, case.lengths)
    return random_dense(case), batch, random_embedded(case.spec, batch, case.model.dim)


def reordered(batch: Batch, embedded: Embedded, spec: FeatureSpec, order: list[int]) -> tuple[Batch, Embedded]:
    """The same rows in another order."""

    def events(values: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([values[offsets[row] : offsets[row + 1]] for row in order])

    sequences, moved = {}, dict(embedded.events)
    for s in spec.sequences:
        old = batch.sequences[s.name]
        lengths = old.offsets.diff()[order]
        sequences[s.name] = EventSequence(
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            {name: events(ids, old.offsets) for name, ids in old.ids.items()},
            {name: events(floats, old.offsets) for name, floats in old.floats.items()},
            events(old.ages, old.offsets),
            old.max_length,
        )
        for feature in s.ids:
            moved[f"{s.name}.{feature.name}"] = events(embedded.events[f"{s.name}.{feature.name}"], old.offsets)
    new = replace(batch, dense=batch.dense[order], domain=batch.domain[order], sequences=sequences)
    return new, Embedded({name: rows[order] for name, rows in embedded.categorical.items()}, moved)


@each
def test_rows_may_come_in_any_order(case: Case) -> None:
    dense, batch, embedded = made(case)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(4)).tolist()
    assert order != sorted(order)
    found = model_logits(dense, *reordered(batch, embedded, case.spec, order))
    torch.testing.assert_close(found, model_logits(dense, batch, embedded)[order], rtol=1e-12, atol=1e-12)


@each
def test_a_poisoned_row_stays_alone(case: Case) -> None:
    """NaN in all that one row has: the others' logits and their embeddings' gradients do not change."""
    dense, batch, embedded = made(case)
    poisoned, keep = 3, [row for row in range(len(batch)) if row != 3]
    assert case.lengths[poisoned] > 1
    found = []
    for value in (None, torch.nan):
        own, ids = poison(batch, embedded, poisoned, value)
        logits = dense(own, ids)
        logits[keep].sum().backward()
        found.append((logits[keep].detach(), rows_of_others(batch, ids, poisoned)))
        assert bool(logits[poisoned].isnan().all()) == (value is not None)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    for name, gradient in found[1][1].items():
        torch.testing.assert_close(gradient, found[0][1][name], rtol=0, atol=0, msg=name)
        assert gradient.isfinite().all()


def poison(batch: Batch, embedded: Embedded, row: int, value: float | None) -> tuple[Batch, Embedded]:
    """Copies with `value` in every float and embedding of the row; None: plain copies."""
    leaves = embedded.detached()
    copy = Embedded(
        {name: rows.detach().clone() for name, rows in leaves.categorical.items()},
        {name: rows.detach().clone() for name, rows in leaves.events.items()},
    )
    sequences, dense = {}, batch.dense.clone()
    for name, old in batch.sequences.items():
        own = slice(int(old.offsets[row]), int(old.offsets[row + 1]))
        floats = {key: x.clone() for key, x in old.floats.items()}
        if value is not None:
            for x in [*floats.values(), *(x for key, x in copy.events.items() if key.startswith(f"{name}."))]:
                x[own] = value
        sequences[name] = replace(old, floats=floats)
    if value is not None:
        for x in [dense, *copy.categorical.values()]:
            x[row] = value
    for x in copy.tensors():
        x.requires_grad_()
    return replace(batch, dense=dense, sequences=sequences), copy


def rows_of_others(batch: Batch, embedded: Embedded, row: int) -> dict[str, Tensor]:
    """The embeddings' gradients without that row's."""
    found = {}
    for name, rows in embedded.categorical.items():
        assert rows.grad is not None
        found[name] = torch.cat([rows.grad[:row], rows.grad[row + 1 :]])
    for name, rows in embedded.events.items():
        assert rows.grad is not None
        first, last = batch.sequences[name.split(".")[0]].offsets[row : row + 2].tolist()
        found[name] = torch.cat([rows.grad[:first], rows.grad[last:]])
    return found


def test_table_rows_that_no_id_names_do_not_count() -> None:
    """NaN in them: no logit and no gradient of another row sees it."""
    case = Case(layers(LayerSpec()), SEVERAL)
    dense, batch, _ = made(case)
    tables = Tables(case.spec, case.model.dim)
    draw = torch.Generator().manual_seed(5)
    used: dict[str, set[int]] = {name.split(".")[-2]: set() for name, _ in tables.named_parameters()}
    for feature in case.spec.categorical:
        used[feature.table] |= set(batch.categorical[feature.name].values.tolist())
    for s in case.spec.sequences:
        for one in s.ids:
            used[one.table] |= set(batch.sequences[s.name].ids[one.name].tolist())
    unused = {name: [row for row in range(rows) if row not in used[name]] for name, rows in sizes(case.spec).items()}
    assert sum(map(len, unused.values())) > 5
    with torch.no_grad():
        for name, weight in tables.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw))
            weight[unused[name.split(".")[-2]]] = torch.nan
    pooled, sequence = kjt_inputs(batch, case.spec, len(batch) + 2)
    assert tables.pooled is not None and tables.sequence is not None
    embedded = gather(batch, case.spec, tables.pooled(pooled), tables.sequence(sequence))
    logits = dense.float()(replace(batch, dense=batch.dense.float(), sequences=single(batch)), embedded)
    logits.sum().backward()
    assert logits.isfinite().all()
    for name, weight in tables.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert not weight.grad[unused[name.split(".")[-2]]].any(), name


def sizes(spec: FeatureSpec) -> dict[str, int]:
    return {table.name: table.rows for table in spec.tables}


def single(batch: Batch) -> dict[str, EventSequence]:
    return {
        name: replace(s, ages=s.ages.float(), floats={key: x.float() for key, x in s.floats.items()})
        for name, s in batch.sequences.items()
    }


CAUSAL: dict[str, SequenceBlockSpec] = {
    "softmax": KunlunSpec(attention=JaggedAttentionSpec(causal=True, position="rote", qk_norm=True)),
    "window": KunlunSpec(attention=JaggedAttentionSpec(causal=True, window=3)),
    "hstu": HstuSpec(position="rope"),
    "hstu, window": HstuSpec(window=2),
}
FREE: dict[str, SequenceBlockSpec] = {
    "softmax": KunlunSpec(attention=JaggedAttentionSpec()),
    "window": KunlunSpec(attention=JaggedAttentionSpec(window=3)),
    "blocks": KunlunSpec(attention=BlockAttentionSpec()),
}


def touched(block: SequenceBlockSpec, changed: int) -> list[int]:
    """Events of a row of 9 that a change of event `changed` reaches, after three layers of the block.

    X_sum does not reach them: every layer's interaction reads summaries, so X_sum is held at a constant.
    """
    case = Case(layers(LayerSpec(repeat=3, sequence=block, interaction=WukongSpec(hidden=[4]))), SPEC, (4, 9, 1))
    dense, batch, embedded = made(case)
    outputs = []
    for shift in (0.0, 1.0):
        events = {name: rows.detach().clone() for name, rows in embedded.events.items()}
        for rows in events.values():
            rows[4 + changed] += shift * torch.arange(8)  # a constant would be normed away
        history = dense.events["history"](batch.sequences["history"], Embedded({}, events))
        x_sum = torch.ones(3, 4, 8, dtype=torch.float64)
        for number in range(3):
            history = dense.get_submodule(f"layers.{number}.sequence.history")(history, x_sum)
        assert isinstance(history, Events)
        outputs.append(history.values[4:13])
    return (outputs[1] - outputs[0]).abs().amax(1).gt(1e-13).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("block", CAUSAL.values(), ids=CAUSAL.keys())
def test_no_event_sees_a_later_one_where_causal(block: SequenceBlockSpec) -> None:
    reached = touched(block, 4)
    assert min(reached) == 4
    assert len(reached) > 3


@pytest.mark.parametrize("block", FREE.values(), ids=FREE.keys())
def test_events_see_later_ones_where_not_causal(block: SequenceBlockSpec) -> None:
    assert min(touched(block, 4)) == 0


def test_a_window_reaches_as_far_as_its_layers_carry_it() -> None:
    near = KunlunSpec(attention=JaggedAttentionSpec(window=1))
    assert touched(near, 4) == [1, 2, 3, 4, 5, 6, 7]  # one event a layer, three layers
    own = KunlunSpec(attention=JaggedAttentionSpec(window=0))
    assert touched(own, 4) == [4]


@each
def test_every_parameter_learns_from_some_row(case: Case) -> None:
    """Each tensor's gradient is there and is no mere rounding noise."""
    dense, batch, embedded = made(case)
    weights = torch.randn(len(batch), len(case.spec.labels), generator=torch.Generator().manual_seed(3))
    (model_logits(dense, batch, embedded) * weights).sum().backward()
    for name, parameter in dense.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 1e-9, name
    for name, rows in [*embedded.categorical.items(), *embedded.events.items()]:
        assert rows.grad is not None and rows.grad.ne(0).any(1).all(), name


@pytest.mark.parametrize("lengths", [(), (0, 0), (1,)], ids=["no row", "no event", "one event"])
@each
def test_few_rows_and_events_are_legal(case: Case, lengths: tuple[int, ...]) -> None:
    dense, batch, embedded = made(Case(case.model, case.spec, lengths))
    logits = model_logits(dense, batch, embedded)
    assert logits.shape == (len(lengths), len(case.spec.labels))
    assert logits.isfinite().all()
    logits.sum().backward()
    for name, parameter in dense.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert lengths or not parameter.grad.any(), name


def test_merged_histories_may_be_of_any_lengths() -> None:
    """One history empty where the other is not: the merged one is as long as the longer."""
    model = replace(layers(LayerSpec()), merge=MaskNetSpec(hidden=5))
    dense, batch, embedded = made(Case(model, SEVERAL, tuple(LENGTHS)))
    kept: list[Events] = []
    assert dense.merge is not None
    dense.merge.register_forward_hook(lambda module, inputs, output: kept.append(output))
    dense(batch, embedded)
    lengths = torch.stack([s.offsets.diff() for s in batch.sequences.values()])
    assert torch.equal(kept[0].offsets.diff(), lengths.amax(0))
    assert (lengths.amin(0) == 0).any() and (lengths.amax(0) > lengths.amin(0)).any()
