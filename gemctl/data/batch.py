"""One rank's rows of one global batch, jagged: values and offsets, without padding."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Jagged:
    """`values` [N], `offsets` int64 [B+1]; row b owns values[offsets[b]:offsets[b+1]]."""

    values: Tensor
    offsets: Tensor

    def rows(self, start: int, stop: int) -> "Jagged":
        """Rows start … stop−1."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)


@dataclass
class EventSequence:
    """Aligned events of B rows, oldest first.

    `offsets` int64 [B+1]; `ids` int64 [ΣL] and `floats` float32 [ΣL] by feature name; `ages` float32 [ΣL]:
    row time − event time, ≥ 0, in the unit of the data's timestamps.
    """

    offsets: Tensor
    ids: dict[str, Tensor]
    floats: dict[str, Tensor]
    ages: Tensor
    max_length: int  # events of the longest row, 0 without any

    def rows(self, start: int, stop: int) -> "EventSequence":
        """The events of rows start … stop−1."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        offsets = self.offsets[start : stop + 1] - first
        longest = int(offsets.diff().max()) if stop > start else 0
        return EventSequence(
            offsets,
            {name: ids[first:last] for name, ids in self.ids.items()},
            {name: floats[first:last] for name, floats in self.floats.items()},
            self.ages[first:last],
            longest,
        )


@dataclass
class Batch:
    """B rows (B may be 0). Ids are table rows: the reader has mapped unknown and hashed ids.

    `rows` int64 [B]: row numbers in the data set · `dense` float32 [B, F] · `labels`, `label_mask` float32 [B, T] ·
    `weight` float32 [B] · `domain` int64 [B] · `true_probability` float32 [B], NaN where unknown ·
    `unknown_ids`: ids outside a vocabulary, by table.
    """

    rows: Tensor
    categorical: dict[str, Jagged]
    dense: Tensor
    sequences: dict[str, EventSequence]
    labels: Tensor
    label_mask: Tensor
    weight: Tensor
    domain: Tensor
    true_probability: Tensor
    unknown_ids: dict[str, int]

    def __len__(self) -> int:
        return self.rows.numel()

    def tokens(self) -> int:
        """Number of events in all sequences."""
        return sum(sequence.ages.numel() for sequence in self.sequences.values())

    def slice(self, start: int, stop: int) -> "Batch":
        """Rows start … stop−1 as a separate batch (a micro-batch)."""
        cut = slice(start, stop)
        return Batch(
            self.rows[cut],
            {name: jagged.rows(start, stop) for name, jagged in self.categorical.items()},
            self.dense[cut],
            {name: sequence.rows(start, stop) for name, sequence in self.sequences.items()},
            self.labels[cut],
            self.label_mask[cut],
            self.weight[cut],
            self.domain[cut],
            self.true_probability[cut],
            {},
        )

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`."""

        def move(jagged: Jagged) -> Jagged:
            return Jagged(jagged.values.to(device), jagged.offsets.to(device))

        def move_sequence(sequence: EventSequence) -> EventSequence:
            return EventSequence(
                sequence.offsets.to(device),
                {name: ids.to(device) for name, ids in sequence.ids.items()},
                {name: floats.to(device) for name, floats in sequence.floats.items()},
                sequence.ages.to(device),
                sequence.max_length,
            )

        return Batch(
            self.rows.to(device),
            {name: move(jagged) for name, jagged in self.categorical.items()},
            self.dense.to(device),
            {name: move_sequence(sequence) for name, sequence in self.sequences.items()},
            self.labels.to(device),
            self.label_mask.to(device),
            self.weight.to(device),
            self.domain.to(device),
            self.true_probability.to(device),
            self.unknown_ids,
        )
