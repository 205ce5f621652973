"""100 ms that are planted in one place show in the part of the ledger that they belong to, and nowhere else."""

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import gemctl.ranks.worker
from gemctl.checkpoint.staging import Stager
from gemctl.data.loader import Loader
from gemctl.train.ledger import AROUND, STEP
from gemctl.train.loop import Trainer
from gemctl.train.step import Flags
from tests.support.real_run import ahead_of_others, real_run
from tests.support.world import run_world

PLANTED = 0.1  # seconds
BOUND = 0.01
# What happens in a step, by its number modulo 5; "save" stands for a save without anything planted.
KINDS = ("nothing", "late data", "slow forward on rank 1", "save", "slow save")
AGAINST = {"late data": "nothing", "slow forward on rank 1": "nothing", "slow save": "save"}
CYCLES, FIRST = 40, 5
PARTS = (*STEP, *AROUND, "unaccounted")
SHOWS = {  # (what is planted, rank) → the part
    ("late data", 0): "data_wait",
    ("late data", 1): "data_wait",
    ("slow forward on rank 1", 0): "flag_wait",  # it waits for rank 1
    ("slow forward on rank 1", 1): "dense_forward",
    ("slow save", 0): "checkpoint_stall",
    ("slow save", 1): "checkpoint_stall",
}


def plant(run: str, number: int) -> None:
    """The worker, with 100 ms planted in three steps of five; each step's seconds by part go to times-<rank>.jsonl."""
    ahead_of_others()
    kind, start = "", dict.fromkeys(PARTS, 0.0)
    step, following, stage = Trainer._step, Loader.__next__, Stager.stage

    def late_if(kinds: str) -> None:
        time.sleep(PLANTED if kind == kinds else 0)

    def timed_step(self: Trainer, stepper: Any, loader: Any, index: int, passed_over: Any) -> Any:
        nonlocal kind, start
        if index == 0:
            head = list(self.model.dense.children())[-1]
            head.register_forward_pre_hook(lambda *_: late_if(f"slow forward on rank {self.rank}"))
        if kind:
            end = self.ledger.totals()
            took = {part: end[part] - start[part] for part in PARTS}
            with (Path(run) / f"times-{self.rank}.jsonl").open("a") as file:
                file.write(json.dumps([index - 1, kind, took]) + "\n")
        self.saver._wait_for_thread()  # an upload is over before the next step
        kind, start = KINDS[index % len(KINDS)], self.ledger.totals()
        return step(self, stepper, loader, index, passed_over)

    def late_next(self: Loader) -> Any:
        late_if("late data")
        return following(self)

    def late_stage(self: Stager, state: Any) -> Any:
        late_if("slow save")
        return stage(self, state)

    def due(self: Trainer, flags: Flags) -> bool:
        return kind.endswith("save")

    Trainer._step, Trainer._save_due = timed_step, due  # type: ignore[method-assign]
    Loader.__next__, Stager.stage = late_next, late_stage  # type: ignore[method-assign, assignment]
    gemctl.ranks.worker.main(run, number)


def moved(file: Path) -> dict[str, dict[str, float]]:
    """What is planted → part → by how much its median over the steps with it is longer than over those without."""
    seconds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for index, kind, took in map(json.loads, file.read_text().splitlines()):
        if index >= FIRST:
            seconds[kind].append(took)
    assert all(len(steps) >= CYCLES for steps in seconds.values())

    def medians(kind: str, part: str) -> float:
        return median(step[part] for step in seconds[kind])

    return {
        kind: {part: medians(kind, part) - medians(other, part) for part in PARTS} for kind, other in AGAINST.items()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_planted_time_shows_in_its_part_alone(tmp_path: Path, record_property: Any) -> None:
    """Two ranks of one thread, 40 steps of each kind in turn in one run. A busy machine may spoil a try of three."""
    steps = FIRST + CYCLES * len(KINDS) + 1
    asked = [f"train.steps={steps}", "data.prefetch=0", "data.eval=null", "checkpoint.every=0", "train.log_every=1000"]
    for turn in range(3):
        folder = tmp_path / str(turn)
        (ended,) = run_world(1, real_run, str(folder), 2, "", asked, plant, gloo=False, timeout=240)
        assert ended.error is None, ended.message
        found = {rank: moved(ended.run_dir.path / f"times-{rank}.jsonl") for rank in (0, 1)}
        wrong = [
            f"{kind}, rank {rank}: {part} {1000 * by:+.1f} ms"
            for (kind, rank), right in SHOWS.items()
            for part, by in found[rank][kind].items()
            if abs(by - (PLANTED if part == right else 0)) > BOUND
        ]
        record_property(
            "attribution", {f"{k}, rank {r}": round(1000 * found[r][k][p], 1) for (k, r), p in SHOWS.items()}
        )
        if not wrong:
            return
    raise AssertionError("; ".join(wrong))
