"""A whole training step of a model, on jagged batches and on padded ones, in turns: examples/s and MFU.

    gemctl bench model model=gem_tiny --rows 64 --longest 512 --fill 0.3

The step is the trainer's: lookup, forward, agreement of the ranks, backward, update of the dense part and the tables.
The padded contender differs only in the dense part (gemctl/bench/padded.py): same parameters, same batch, PyTorch's
attention. Both must first compute the same logits and gradients. The contenders alternate, so a slower machine slows
both; the ratio is the median of the turns' ratios.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gemctl.bench.batches import filled, random_batch
from gemctl.bench.padded import pad, pad_embedded, padded
from gemctl.bench.ranks import on_ranks
from gemctl.bench.results import ModelBench, Race
from gemctl.config.schema import Config
from gemctl.data.batch import Batch
from gemctl.errors import GemctlError, InputError
from gemctl.mesh.topology import resolve
from gemctl.model.embeddings import Embedded
from gemctl.model.init import InitRule
from gemctl.parallel.assemble import ShardedModel, assemble
from gemctl.report.layers import device, worlds
from gemctl.specs.count import step_flops
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import experts
from gemctl.train.ledger import Ledger
from gemctl.train.optim import DenseOptimizer
from gemctl.train.peak import measure_peak
from gemctl.train.step import Flags, Stepper

BATCHES = 4
CONTENDERS = ("jagged", "padded")
AGREE = 1e-3
"""Largest difference of float32 results relative to their norm; sums of thousands of terms differ in their order."""


def measure(config: Config, spec: FeatureSpec, race: Race) -> ModelBench:
    """Forks the ranks; the time of a step is that of its slowest rank."""
    world, local = worlds(config)
    if world != local:
        raise InputError(f"launcher.nodes={config.launcher.nodes}: this benchmark runs on one machine")
    found = on_ranks(world, _measure_rank, config, spec, race, threads=race.threads)
    seconds = {
        name: [max(turn) for turn in zip(*(rank["seconds"][name] for rank in found), strict=True)]
        for name in CONTENDERS
    }
    parts = {
        name: {part: sum(rank["parts"][name][part] for rank in found) / world for part in found[0]["parts"][name]}
        for name in CONTENDERS
    }
    return ModelBench(
        race, config.model.name, device(config), world, sum(rank["events"] for rank in found) / BATCHES,
        sum(rank["flops"] for rank in found) / BATCHES, sum(rank["peak"] for rank in found), BATCHES, seconds, parts,
        max(rank["apart"] for rank in found),
    )  # fmt: skip


def _measure_rank(config: Config, spec: FeatureSpec, race: Race) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    topology = resolve(config.topology, config.launcher, experts(config.model))
    model = assemble(config, spec, topology, torch.device("cpu"))
    # Branches that are zero at initialisation would hide a difference.
    model.rules = {name: _nonzero(rule) for name, rule in model.rules.items()}
    model.initialise(config.run.seed)
    own = race.rows // world
    seeds = [step * world + rank for step in range(BATCHES)]
    batches = [
        random_batch(spec, {s.name: filled(own, race.longest, race.fill, seed) for s in spec.sequences}, seed)
        for seed in seeds
    ]
    runs = _Steps(config, model, batches)
    apart = runs.difference()
    seconds, parts = runs.race(race.repeats)
    return {
        "seconds": seconds, "parts": parts, "apart": apart, "peak": measure_peak(model.device),
        "events": sum(batch.tokens() for batch in batches),
        "flops": sum(_flops(config, spec, batch) for batch in batches),
    }  # fmt: skip


def _nonzero(rule: InitRule) -> InitRule:
    return InitRule("uniform", 0.1) if rule.kind == "zeros" else rule


def _flops(config: Config, spec: FeatureSpec, batch: Batch) -> float:
    lengths = {name: events.offsets.diff().numpy() for name, events in batch.sequences.items()}
    return step_flops(config.model, spec, len(batch), lengths)


class _Steps:
    """Steps of one rank, by either contender, over the same batches."""

    def __init__(self, config: Config, model: ShardedModel, batches: list[Batch]) -> None:
        self.model, self.batches, self.ledger = model, batches, Ledger()
        self.wide = [pad(batch) for batch in batches]  # a loader would do this
        self.stepper = Stepper(config, model, DenseOptimizer(model.dense, config.optim.dense), self.ledger)
        self.ledger.first_step_done()
        self.index = 0

    def difference(self) -> float:
        """The largest difference of logits and of gradients, relative to their norms.

        GemctlError if it is more than rounding.
        """
        worst = 0.0
        for index, batch in enumerate(self.batches):
            results = [self._results(index, batch, name) for name in CONTENDERS]
            for one, other in zip(*results, strict=True):
                worst = max(worst, float((one - other).norm() / one.norm().clamp(min=1e-12)))
        if worst > AGREE:
            raise GemctlError(
                f"the padded model's results differ by {worst:.1e}, more than {AGREE}: the speeds cannot be compared"
            )
        return worst

    def _results(self, index: int, batch: Batch, name: str) -> list[Tensor]:
        leaves = self.model.tables(batch, len(batch)).leaves
        with self._as(name, index):
            logits = self.model.logits(batch, leaves)
        logits.sigmoid().square().sum().backward()
        grads = [leaf.grad for leaf in (*leaves.tensors(), *self.model.dense.parameters()) if leaf.grad is not None]
        for parameter in self.model.dense.parameters():
            parameter.grad = None
        return [logits.detach(), *(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads)]

    def race(self, repeats: int) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
        """Seconds of each turn (a step over every batch), and seconds of all turns by part of the ledger."""
        seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        parts: dict[str, dict[str, float]] = {name: {} for name in CONTENDERS}
        for turn in range(-1, repeats):
            for name in CONTENDERS:
                dist.barrier()
                self.ledger.take()
                start = time.perf_counter()
                for index in range(BATCHES):
                    self.step(name, index)
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - start)
                    for part, own in self.ledger.take().items():
                        parts[name][part] = parts[name].get(part, 0.0) + own
        return seconds, parts

    def step(self, name: str, index: int) -> None:
        """One training step over batch `index`."""
        batch = self.batches[index]
        with self._as(name, index):
            self.stepper.step(self.index, batch, len(batch), Flags())
        self.index += 1

    @contextmanager
    def _as(self, name: str, index: int) -> Iterator[None]:
        """Makes the dense part that of the contender, for batch `index`."""
        if name == "jagged":
            yield
            return
        dense, jagged = self.model.dense, self.model.dense.forward

        def forward(module: Any, batch: Batch, embedded: Embedded) -> Tensor:
            logits: Tensor = jagged(self.wide[index], pad_embedded(batch, embedded))
            return logits

        dense.forward = MethodType(forward, dense)  # type: ignore[method-assign]
        try:
            with padded(dense):
                yield
        finally:
            del dense.forward
