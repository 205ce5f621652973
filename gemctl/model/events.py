"""Event histories in the layers: jagged values with their places and ages, CLS tokens, MaskNet.

    CLS        S_b = [X_sum,1 … X_sum,c, s_1 … s_L]: the row's X_sum tokens precede its oldest event
    MaskNet    s_j = MLP(z_j ⊙ MLP_mask(z_j)),  z_j = [S¹_j ‖ S²_j ‖ …]       (InterFormer, arXiv 2411.09852)

Merged histories are aligned at the newest event; where one is shorter, its part of z_j is zero, so the merged history
is as long as the row's longest one. A merged event is as old as its youngest event. The outer MLP ends with the paper's
linear compression to one width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from gemctl.model.layers import MLP


@dataclass
class Events:
    """One history of B rows in the stack: `values` [N, width], `offsets` int64 [B+1], oldest event first.

    `place` int64 [N]: 0 for the newest event; `ages` [N]: row time − event time, 0 for CLS tokens. `max_length`: the
    longest of the rows. The first `cls` tokens of every row are CLS tokens.
    """

    values: Tensor
    offsets: Tensor
    place: Tensor
    ages: Tensor
    max_length: int
    cls: int = 0

    def of(self, values: Tensor) -> "Events":
        """The same events with other values."""
        return Events(values, self.offsets, self.place, self.ages, self.max_length, self.cls)


# FSDP2 finds the tensors of a unit's inputs and outputs by PyTorch's pytrees and hooks its gather before the unit's
# backward and the reduction after it onto them. An unregistered class would hide its values from both.
register_pytree_node(
    Events,
    lambda events: ([events.values, events.offsets, events.place, events.ages], (events.max_length, events.cls)),
    lambda tensors, numbers: Events(*tensors, *numbers),
)


def places(offsets: Tensor, events: int) -> Tensor:
    """int64 [events]: each event's place in its history, counted back from the newest event, 0."""
    ends = torch.repeat_interleave(offsets[1:], offsets.diff(), output_size=events)
    return ends - 1 - torch.arange(events, device=offsets.device)


def prepend(cls_BCD: Tensor, events: Events) -> Events:
    """`events` with C CLS tokens before each row's oldest event."""
    rows, count, width = cls_BCD.shape
    total = len(events.values)
    rows_before = torch.arange(rows + 1, device=events.offsets.device)
    offsets = events.offsets + count * rows_before
    row = torch.repeat_interleave(rows_before[:-1], events.offsets.diff(), output_size=total)
    to = torch.arange(total, device=row.device) + count * (row + 1)
    first = (offsets[:-1, None] + torch.arange(count, device=row.device)).flatten()
    values = events.values.new_zeros(total + rows * count, width)
    values = values.index_copy(0, to, events.values).index_copy(0, first, cls_BCD.reshape(-1, width))
    ages = events.ages.new_zeros(len(values)).index_copy(0, to, events.ages)
    longest = events.max_length + count if rows else 0
    return Events(values, offsets, places(offsets, len(values)), ages, longest, count)


class MaskNet(nn.Module):
    """Several histories of width dim → one of width dim, as above."""

    def __init__(self, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.mask = MLP(count * dim, [hidden], count * dim)
        self.mlp = MLP(count * dim, [hidden], dim)

    def forward(self, histories: Mapping[str, Events]) -> Events:
        parts = list(histories.values())
        longest = torch.stack([part.offsets.diff() for part in parts]).amax(0)
        offsets = torch.cat([longest.new_zeros(1), longest.cumsum(0)])
        total = int(offsets[-1])
        columns, age = [], parts[0].ages.new_full((total,), torch.inf)
        for part in parts:
            ends = torch.repeat_interleave(offsets[1:], part.offsets.diff(), output_size=len(part.values))
            to = ends - 1 - part.place
            columns.append(part.values.new_zeros(total, part.values.shape[1]).index_copy(0, to, part.values))
            age = torch.minimum(age, torch.full_like(age, torch.inf).index_copy(0, to, part.ages))
        z = torch.cat(columns, dim=1)
        values = self.mlp(z * self.mask(z))
        return Events(values, offsets, places(offsets, total), age, max(part.max_length for part in parts))
