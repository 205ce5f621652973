"""Whole runs of the real worker, small: supervisor, agent, ranks and training, forked from the preloaded server.

ended = run_world(1, real_run, str(tmp_path), 2, "grad_nan:rank=1,step=5", ["checkpoint.every=2"], gloo=False)[0]
"""

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

import gemctl.ranks.worker
from gemctl import env
from gemctl.config.compose import compose, to_yaml
from gemctl.data.batch import Batch
from gemctl.data.synthetic import ensure
from gemctl.errors import GemctlError
from gemctl.parallel.assemble import ShardedModel
from gemctl.plan.build import to_json
from gemctl.plan.job import planned
from gemctl.recover.context import Prepared
from gemctl.recover.supervisor import run_attempts
from gemctl.run.directory import RunDir
from gemctl.run.requests import file, pending
from gemctl.train.loop import Trainer
from tests.support.saved_run import words
from tests.support.small_run import Case, Disturbing, Ended, ForkedAgents, _ended


def train(run: str, number: int) -> None:
    """The worker."""
    gemctl.ranks.worker.main(run, number)


def ahead_of_others() -> None:
    """From now on other programs of this machine wait for this attempt's processes, where that may be asked for."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-15")


def train_ahead(run: str, number: int) -> None:
    """The worker, for what is about times."""
    ahead_of_others()
    gemctl.ranks.worker.main(run, number)


def poisoned(run: str, number: int) -> None:
    """The worker; in the first attempt it saves a state that is not finite at step 4, and goes on with it."""
    save = Trainer.save

    def poison_and_save(self: Trainer) -> int:
        if number > 1 or self.done != 4:
            return save(self)
        for parameter in self.model.dense.parameters():
            parameter.detach().fill_(math.nan)
        step = save(self)
        self.saver.wait()  # the next step fails
        return step

    Trainer.save = poison_and_save  # type: ignore[method-assign]
    gemctl.ranks.worker.main(run, number)


def stopped_in_evaluation(run: str, number: int) -> None:
    """The worker; its host is told to end as rank 0 begins an evaluation, of which each batch takes a second."""
    predict = ShardedModel.predict

    def slow_predict(self: ShardedModel, batch: Batch, padded_rows: int) -> Tensor:
        opened = RunDir.open(run)
        if env.rank() == 0 and not pending(opened, opened.attempt(number)):
            file(opened, "stop", "SIGTERM")
        time.sleep(1)
        return predict(self, batch, padded_rows)

    ShardedModel.predict = slow_predict  # type: ignore[method-assign]
    gemctl.ranks.worker.main(run, number)


def real_run(
    folder: str, ranks: int, inject: str, overrides: list[str], worker: Callable[[str, int], None] = train
) -> Ended:
    """Trains until the run has ended, supervised in this process's main thread; GEMCTL_INJECT is `inject`."""
    if inject:
        os.environ["GEMCTL_INJECT"] = inject
    shape = [f"launcher.ranks_per_node={ranks}", "topology.dp_replicate=1"]
    given = {word.partition("=")[0] for word in overrides}
    base = [word for word in words(Path(folder)) if word.partition("=")[0] not in given]
    config = compose(None, [*base, *shape, *overrides])
    ensure(config.data)
    run = RunDir.create(config.run.root, config.run.name, ["gemctl", "train"])
    case = Case(folder, ranks_per_node=ranks)
    follower = Disturbing(case, run)
    agents = ForkedAgents(run, case)
    agents.worker = worker
    prepared = Prepared(to_yaml(config), to_json(planned(config)), 1, ranks)
    error: GemctlError | None = None
    try:
        run_attempts(run, 1, prepared, config.recover, agents, follower)
    except GemctlError as caught:
        error = caught
    return _ended(run, error, follower.notes)
