"""Embedding tables, and the lookups from a jagged batch to what the dense part reads.

    lookup:  pooled, sequence = kjt_inputs(batch, spec, padded_rows)
             embedded = gather(batch, spec, tables.pooled(pooled), tables.sequence(sequence))

A table that an event sequence uses is looked up unpooled (`EmbeddingCollection`), every other one pooled
(`EmbeddingBagCollection`), so no table is in both. The two halves are functions instead of a forward, because the
tables may be sharded, updated inside backward, and looked up once for several micro-batches of the dense part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)

from gemctl.data.batch import Batch, Jagged
from gemctl.model.init import InitRule
from gemctl.specs.data import FeatureSpec


class Tables(nn.Module):
    """One table of width `dim` per `TableSpec`; `pooled` and `sequence` are None if no table is of that kind."""

    def __init__(self, spec: FeatureSpec, dim: int) -> None:
        super().__init__()
        self.init_bound = dim**-0.5
        rows = {table.name: table.rows for table in spec.tables}
        self.pooled = self.sequence = None
        if names := spec.pooled_tables():
            bags = [EmbeddingBagConfig(rows[n], dim, name=n, feature_names=features_of(spec, n)) for n in names]
            self.pooled = EmbeddingBagCollection(tables=bags, device=torch.get_default_device())
        if names := spec.sequence_tables():
            tables = [EmbeddingConfig(rows[n], dim, name=n, feature_names=features_of(spec, n)) for n in names]
            self.sequence = EmbeddingCollection(tables=tables, device=torch.get_default_device())

    def init_rules(self) -> dict[str, InitRule]:
        return {name: InitRule("uniform", self.init_bound) for name, _ in self.named_parameters()}


def features_of(spec: FeatureSpec, table: str) -> list[str]:
    """Features that look up `table`: categorical ones by name, those of events as "sequence.feature"."""
    categorical = [feature.name for feature in spec.categorical if feature.table == table]
    events = [f"{s.name}.{feature.name}" for s in spec.sequences for feature in s.ids if feature.table == table]
    return categorical + events


@dataclass
class Embedded:
    """Looked-up embeddings of a batch: `categorical` [B, dim] by feature, `events` [ΣL, dim] by "sequence.feature"."""

    categorical: dict[str, Tensor]
    events: dict[str, Tensor]

    def tensors(self) -> list[Tensor]:
        """All embeddings in a fixed order."""
        return [*self.categorical.values(), *self.events.values()]

    def detached(self) -> "Embedded":
        """Leaves with the same values, which accumulate the gradients of micro-batches."""
        return Embedded(
            {name: rows.detach().requires_grad_() for name, rows in self.categorical.items()},
            {name: rows.detach().requires_grad_() for name, rows in self.events.items()},
        )

    def slice(self, batch: Batch, start: int, stop: int) -> "Embedded":
        """Views for rows start … stop−1 of `batch`, the batch that was looked up."""
        events = {}
        for name, rows in self.events.items():
            offsets = batch.sequences[name.split(".")[0]].offsets
            events[name] = rows[int(offsets[start]) : int(offsets[stop])]
        return Embedded({name: rows[start:stop] for name, rows in self.categorical.items()}, events)


def kjt_inputs(
    batch: Batch, spec: FeatureSpec, padded_rows: int
) -> tuple[KeyedJaggedTensor | None, KeyedJaggedTensor | None]:
    """Ids for the pooled and the sequence tables, `padded_rows` ≥ len(batch) rows; rows past the batch are empty."""
    return tuple(  # type: ignore[return-value]
        _kjt({name: _ids(batch, name) for table in tables for name in features_of(spec, table)}, padded_rows)
        for tables in (spec.pooled_tables(), spec.sequence_tables())
    )


def _ids(batch: Batch, feature: str) -> Jagged:
    if feature in batch.categorical:
        return batch.categorical[feature]
    sequence, _, name = feature.partition(".")
    return Jagged(batch.sequences[sequence].ids[name], batch.sequences[sequence].offsets)


def _kjt(ids: dict[str, Jagged], padded_rows: int) -> KeyedJaggedTensor | None:
    if not ids:
        return None
    lengths = torch.zeros(len(ids), padded_rows, dtype=torch.int64, device=next(iter(ids.values())).values.device)
    for row, jagged in zip(lengths, ids.values(), strict=True):
        row[: jagged.offsets.numel() - 1] = jagged.offsets.diff()
    values = torch.cat([jagged.values for jagged in ids.values()])
    return KeyedJaggedTensor(keys=list(ids), values=values, lengths=lengths.view(-1), stride=padded_rows)


def gather(
    batch: Batch, spec: FeatureSpec, pooled: KeyedTensor | None, sequence: dict[str, JaggedTensor] | None
) -> Embedded:
    """The tables' outputs for the rows of `batch`, rows past it dropped."""
    unpooled = set(spec.sequence_tables())
    categorical, rows = {}, len(batch)
    for feature in spec.categorical:
        if feature.table not in unpooled:
            categorical[feature.name] = pooled[feature.name][:rows]  # type: ignore[index]
        else:  # one id per row, so one embedding (specs do not allow multi-valued features here)
            categorical[feature.name] = sequence[feature.name].values()  # type: ignore[index]
    names = [f"{s.name}.{feature.name}" for s in spec.sequences for feature in s.ids]
    return Embedded(categorical, {name: sequence[name].values() for name in names})  # type: ignore[index]
