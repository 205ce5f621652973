"""Names the ranks that the others wait for, and what that costs, from the clocks that are there.

    stragglers = Stragglers(ledger, rank, world)
    sent = stragglers.due()                     # every EVERY steps the flag all-reduce carries a row of each rank
    stragglers.judge(step, received)
    stragglers.named(), stragglers.take()       # on rank 0: those just found; what each has cost since the last call

A rank's own time is all that it does not spend where ranks meet: its compute, its wait for data, its logging, what no
clock covers. A straggler has RATIO times the own time of the others, at least, in two windows of EVERY steps one after
the other, and the others wait for it: what each rank spends in a part in which ranks meet beyond the rank with least
is waiting. That is shared out among the stragglers by how much longer they take, and is no more than that for each
rank that waits.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from gemctl.mesh.topology import CLOCKS_EVERY
from gemctl.train.ledger import PARTS, STARTUP, Ledger

EVERY = CLOCKS_EVERY  # steps of a window
RATIO = 1.5
SHARE = 0.05  # of the rank-seconds, that has to be lost
FORGET = 4  # windows after its last slow one; a rank that is named later is named anew

MEET = ("tables_forward", "flag_wait", "exposed_communication", "tables_backward", "tables_sync", "optimizer")
ASIDE = (*STARTUP, "checkpoint_stall", "eval", "peak")  # of no step
OWN = (*(name for name in PARTS if name not in (*MEET, *ASIDE)), "unaccounted")
COLUMNS = (*OWN, *MEET)


@dataclass(frozen=True)
class Straggler:
    """`ratio`: its own time over the others' (the lower median); `part`: in which it takes longest beyond theirs;
    `share`: of the window's rank-seconds that was lost to it; `step`: steps done with the window's last.
    """

    rank: int
    step: int
    ratio: float
    part: str
    share: float


@dataclass
class Loss:
    """What a straggler has cost since it was last asked: rank-seconds, of the windows of so many steps."""

    rank: int
    lost: float = 0.0
    steps: int = 0
    own: float = 0.0  # its own seconds
    others: float = 0.0  # the others' median
    part: str = ""


class Stragglers:
    """One rank's side of it; rank 0 judges."""

    def __init__(self, ledger: Ledger, rank: int, world: int) -> None:
        self.ledger, self.rank, self.world = ledger, rank, world
        self._mark: dict[str, float] | None = None
        self._steps = 0
        self._slow = Counter[int]()  # windows in a row
        self._clean = Counter[int]()  # windows since it was last slow, of those that were named
        self._pending: dict[int, Loss] = {}  # of ranks slow in one window, so far
        self._losses: dict[int, Loss] = {}
        self._named: list[Straggler] = []

    def due(self) -> Tensor:
        """What this rank has to tell in this step: [world · columns] (float64) with its own row filled, or nothing."""
        nothing = torch.empty(0, dtype=torch.float64)
        self._steps += 1
        if self.world == 1 or not self.ledger.is_steady or self._steps % EVERY:
            return nothing
        now = self.ledger.totals()
        before, self._mark = self._mark, now
        if before is None:
            return nothing
        rows = torch.zeros(self.world, len(COLUMNS), dtype=torch.float64)
        rows[self.rank] = torch.tensor([now[name] - before[name] for name in COLUMNS], dtype=torch.float64)
        return rows.flatten()

    def judge(self, step: int, received: Tensor) -> None:
        """Takes the sum of what all ranks had to tell."""
        if self.rank != 0 or not received.numel():
            return
        rows = received.cpu().view(self.world, len(COLUMNS))
        found = {loss.rank: loss for loss in losses(rows)}
        total = float(rows.sum())
        for rank in [rank for rank in self._slow if rank not in found]:
            del self._slow[rank]
            self._pending.pop(rank, None)
        for rank in self._clean:
            self._clean[rank] += 1
        for rank, loss in found.items():
            self._slow[rank] += 1
            if self._slow[rank] == 1:
                self._pending[rank] = loss
                continue
            for part in filter(None, (self._pending.pop(rank, None), loss)):
                _add(self._losses.setdefault(rank, Loss(rank)), part)
            if self._clean.get(rank, FORGET + 1) > FORGET:
                self._named.append(Straggler(rank, step, loss.own / loss.others, loss.part, loss.lost / total))
            self._clean[rank] = 0

    def named(self) -> list[Straggler]:
        """Those found since the last call."""
        found, self._named = self._named, []
        return found

    def take(self) -> list[Loss]:
        """What each has cost since the last call."""
        found, self._losses = self._losses, {}
        return list(found.values())


def losses(rows: Tensor) -> list[Loss]:
    """The slow ranks of one window [world, columns], and what each has cost."""
    own = rows[:, : len(OWN)]
    meet = rows[:, len(OWN) :]
    seconds = own.sum(1)
    others = float(seconds.sort().values[(len(rows) - 1) // 2])
    waited = float((meet - meet.min(0).values).sum())
    beyond = {rank: float(mine) - others for rank, mine in enumerate(seconds) if mine >= RATIO * others and mine > 0}
    found = []
    for rank, excess in beyond.items():
        lost = min(waited * excess / sum(beyond.values()), (len(rows) - 1) * excess)
        if lost >= SHARE * float(rows.sum()):
            parts = own[rank] - own.sort(0).values[(len(rows) - 1) // 2]
            found.append(Loss(rank, lost, EVERY, float(seconds[rank]), others, OWN[int(parts.argmax())]))
    return found


def _add(total: Loss, loss: Loss) -> None:
    total.lost, total.steps = total.lost + loss.lost, total.steps + loss.steps
    total.own, total.others, total.part = total.own + loss.own, total.others + loss.others, loss.part
