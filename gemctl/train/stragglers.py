"""Detects the ranks that the others wait for, and what that costs, from the ledger's clocks.

    stragglers = Stragglers(ledger, rank, world)
    sent = stragglers.due()                     # every EVERY steps the flag all-reduce carries one row per rank
    stragglers.judge(step, received)
    stragglers.named(), stragglers.take()       # on rank 0: new stragglers; the cost of each since the last call

A rank's own time is everything outside the parts in which ranks wait for each other: compute, waiting for data,
logging, and time that no clock covers. A straggler's own time is at least RATIO times that of the others, in two
consecutive windows of EVERY steps, and the others wait for it: in the parts in which ranks wait for each other, time
beyond that of the fastest rank is waiting. The waiting time is divided among the stragglers in proportion to their
excess, and each waiting rank contributes at most that excess.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from gemctl.mesh.topology import CLOCKS_EVERY
from gemctl.train.ledger import PARTS, STARTUP, Ledger

EVERY = CLOCKS_EVERY  # steps per window
RATIO = 1.5
SHARE = 0.05  # of a window's rank-seconds must be lost
FORGET = 4  # windows without being slow, after which a straggler is reported again

MEET = ("tables_forward", "flag_wait", "exposed_communication", "tables_backward", "tables_sync", "optimizer")
ASIDE = (*STARTUP, "checkpoint_stall", "eval", "peak")  # outside of steps
OWN = (*(name for name in PARTS if name not in (*MEET, *ASIDE)), "unaccounted")
COLUMNS = (*OWN, *MEET)


@dataclass(frozen=True)
class Straggler:
    """`ratio`: its own time over that of the others (the lower median). `part`: in which it exceeds them most. `share`:
    of the window's rank-seconds that it cost. `step`: steps completed at the window's end."""

    rank: int
    step: int
    ratio: float
    part: str
    share: float


@dataclass
class Loss:
    """What a straggler has cost since the last `take`: rank-seconds, over windows of this many steps."""

    rank: int
    lost: float = 0.0
    steps: int = 0
    own: float = 0.0  # its own seconds
    others: float = 0.0  # the others' median
    part: str = ""


class Stragglers:
    """One rank's part of the detection; rank 0 judges."""

    def __init__(self, ledger: Ledger, rank: int, world: int) -> None:
        self.ledger, self.rank, self.world = ledger, rank, world
        self._mark: dict[str, float] | None = None
        self._steps = 0
        self._slow = Counter[int]()  # windows in a row
        self._clean = Counter[int]()  # windows since each reported rank was last slow
        self._pending: dict[int, Loss] = {}  # of ranks that have been slow in one window only
        self._losses: dict[int, Loss] = {}
        self._named: list[Straggler] = []

    def due(self) -> Tensor:
        """What this rank sends in this step: [world · columns] (float64) with its own row filled, or nothing."""
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
        """Evaluates the sum of what all ranks sent."""
        if self.rank != 0 or not received.numel():
            return
        rows = received.cpu().view(self.world, len(COLUMNS))
        slow = {loss.rank: loss for loss in losses(rows)}
        total = float(rows.sum())
        for rank in [rank for rank in self._slow if rank not in slow]:
            del self._slow[rank]
            self._pending.pop(rank, None)
        for rank in self._clean:
            self._clean[rank] += 1
        for rank, loss in slow.items():
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
        """Stragglers detected since the last call."""
        named, self._named = self._named, []
        return named

    def take(self) -> list[Loss]:
        """The cost of each straggler since the last call."""
        taken, self._losses = self._losses, {}
        return list(taken.values())


def losses(rows: Tensor) -> list[Loss]:
    """The slow ranks of one window [world, columns] and the cost of each."""
    own = rows[:, : len(OWN)]
    meet = rows[:, len(OWN) :]
    seconds = own.sum(1)
    others = float(seconds.sort().values[(len(rows) - 1) // 2])
    waited = float((meet - meet.min(0).values).sum())
    beyond = {rank: float(mine) - others for rank, mine in enumerate(seconds) if mine >= RATIO * others and mine > 0}
    slow = []
    for rank, excess in beyond.items():
        lost = min(waited * excess / sum(beyond.values()), (len(rows) - 1) * excess)
        if lost >= SHARE * float(rows.sum()):
            parts = own[rank] - own.sort(0).values[(len(rows) - 1) // 2]
            slow.append(Loss(rank, lost, EVERY, float(seconds[rank]), others, OWN[int(parts.argmax())]))
    return slow


def _add(total: Loss, loss: Loss) -> None:
    total.lost, total.steps = total.lost + loss.lost, total.steps + loss.steps
    total.own, total.others, total.part = total.own + loss.own, total.others + loss.others, loss.part
