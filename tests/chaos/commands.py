"""`gemctl` as forks of one process that has imported everything: the real command line, supervisor, agent and worker.

    preload()
    pid = start(["train", *layout.words(root)], root / "out")      # as `gemctl train …` in a session of its own

A command, its agent and its ranks are what they are in a shell, but that an agent is forked by its supervisor where
TorchX would start a new Python process, which takes 5 s. The peak of a rank, 0.3 s an attempt, is not measured.
"""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemctl import __main__ as program
from gemctl import process
from gemctl.run.attempt import Attempt
from gemctl.run.directory import RunDir
from tests.support.small_run import AgentProcesses

MODULES = (
    "hydra", "hydra.core.global_hydra", "omegaconf", "pydantic", "pyarrow.parquet",
    "torch", "torch.utils.tensorboard", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.launcher.api", "torchrec", "torchrec.distributed",
    "gemctl.ranks.agent", "gemctl.ranks.worker", "gemctl.checkpoint.diff",
    "gemctl.commands.train", "gemctl.commands.resume",
    "gemctl.commands.stop", "gemctl.config.compose", "gemctl.plan.build", "gemctl.recover.supervisor",
    "gemctl.launch.progress", "gemctl.render.show", "gemctl.launchers.local", "gemctl.data.synthetic",
    "torchx.runner", "torchx.schedulers.local_scheduler",
)  # fmt: skip
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def preload() -> None:
    """Imports what commands need; nothing here may start a thread, since this process forks."""
    for name in MODULES:
        importlib.import_module(name)
    modules: dict[str, Any] = sys.modules
    modules["gemctl.launchers.local"].LocalAgents = ForkedAgents
    modules["gemctl.train.loop"].measure_peak = lambda device, group: 1e9


class ForkedAgents(AgentProcesses):
    """Like a run's LocalAgents, with a fork instead of a new Python process."""

    def __init__(self, run: RunDir, *rest: Any) -> None:
        super().__init__(run)

    def start(self, attempt: Attempt) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _leave(lambda: _agent(self.run, attempt, writer))
        os.close(writer)
        os.read(reader, 1)  # by now it has a process group for `kill`
        os.close(reader)
        self.pids[0] = pid


def _agent(run: RunDir, attempt: Attempt, ready: int) -> int:
    _own_session()
    os.write(ready, b".")
    os.close(ready)
    agent: Any = sys.modules["gemctl.ranks.agent"]
    return int(agent.main([str(run.path), "--attempt", str(attempt.number), "--node", "0"]))


def start(words: list[str], output: Path, environment: Mapping[str, str], folder: Path) -> int:
    """Starts `gemctl WORDS` in `folder`; returns its process. Its stdout and stderr go to `output`.out and .err."""
    pid = os.fork()
    if pid == 0:
        _leave(lambda: _command(words, output, environment, folder))
    return pid


def _command(words: list[str], output: Path, environment: Mapping[str, str], folder: Path) -> int:
    process.die_with_parent(os.getppid())
    _own_session()
    os.chdir(folder)
    os.environ.update(environment)
    for target, suffix in ((1, ".out"), (2, ".err")):
        fd = os.open(output.with_name(output.name + suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, target)
        os.close(fd)
    sys.argv = ["gemctl", *words]
    return program.main()


def _own_session() -> None:
    os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)


def _leave(run: Any) -> None:
    """Ends this process with the result of `run()`, like a Python process."""
    code = 1
    try:
        code = run()
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
