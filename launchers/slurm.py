"""Runs as SLURM jobs: the batch script runs `gemctl supervise`, which starts agents by job steps and watches them.

    gemctl train launcher=slurm launcher.nodes=2 launcher.ranks_per_node=8 launcher.slurm.partition=gpu

A job only brings the supervisor to life, and back after a preemption or the time limit (docs/slurm.md). Attempts,
their order and their budgets are the supervisor's, as everywhere.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gemctl import env, process
from gemctl.config.schema import Config
from gemctl.config.slurm import SlurmConfig
from gemctl.durable import create
from gemctl.errors import InputError
from gemctl.launchers import slurm_client
from gemctl.launchers.request import from_json
from gemctl.launchers.slurm_agents import SlurmAgents
from gemctl.launchers.slurm_job import batch_job, file_name
from gemctl.run.access import written_as
from gemctl.run.directory import RunDir
from gemctl.run.submission import Job, Submission

if TYPE_CHECKING:
    from torchx.specs import AppDef

IN_PROCESS = False  # the supervisor is in the job
SCRIPT = "job.sbatch"


def check(config: Config) -> None:
    """InputError for options that contradict each other."""
    slurm = options(config)
    problems = [
        f"launcher.slurm.env.{name}: {name!r} is no name of an environment variable"
        for name in slurm.env
        if not name.isidentifier() or not name.isascii()
    ]
    problems += [
        f"launcher.slurm.env_from: {name} has a value in launcher.slurm.env too: name it in one of them"
        for name in slurm.env_from
        if name in slurm.env
    ]
    if "\n" in config.run.root or "\n" in config.run.name:
        problems.append("run.root, run.name: sbatch takes no path with a line break")
    if slurm.container_image is None:
        named = {"container_mounts": slurm.container_mounts, "container_workdir": slurm.container_workdir}
        problems += [
            f"launcher.slurm.{key} is set, and launcher.slurm.container_image is not: nothing would use it"
            for key, value in named.items()
            if value
        ]
    limit = _seconds(slurm.time_limit) if slurm.time_limit is not None else 0
    if 0 < limit <= slurm.save_before_limit:  # 0: no limit
        problems.append(
            f"launcher.slurm.save_before_limit={slurm.save_before_limit}: must be below launcher.slurm.time_limit="
            f"{slurm.time_limit} ({limit} s), or the run would be ended as soon as it begins"
        )
    if problems:
        raise InputError(problems)


def _seconds(limit: str) -> int:
    """A time limit as SLURM reads it: M, M:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS."""
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_here(config: Config) -> None:
    """InputError for variables that are to be passed on and are not set; SlurmError where no controller answers."""
    missing = [name for name in options(config).env_from if name not in env.for_slurm()]
    if missing:
        raise InputError([f"launcher.slurm.env_from: {name} is not set in this shell" for name in missing])
    slurm_client.call("scontrol", "ping")


def options(config: Config) -> SlurmConfig:
    return config.launcher.slurm or SlurmConfig()


def form(app: "AppDef", config: Config, submission: Path) -> str:
    """The batch script."""
    run = submission.parent.parent
    words = process.python("-m", "gemctl", "supervise", str(run), "--submission", submission.name)
    output = file_name(Submission(submission).output)
    return batch_job(app, options(config), output, shlex.join(words)).script()


def start(run: RunDir, submission: Submission, config: Config) -> None:
    """Submits the job."""
    app = from_json(submission.asked["app"])
    script = submission.path / SCRIPT
    create(script, form(app, config, submission.path))
    submission.output.touch()  # so that it has the run's mode, whatever SLURM would give it
    submission.write_submitted(job=slurm_client.submit(str(script)))


def array_form(app: "AppDef", config: Config, submissions: Sequence[Path]) -> str:
    """The batch script of an array whose task i runs submission i; each writes to its own submission's log."""
    before = [
        "runs=(",
        *(f"  {shlex.quote(str(folder.parent.parent))}" for folder in submissions),
        ")",
        "run=${runs[SLURM_ARRAY_TASK_ID]}",
        f'exec >>"$run/submissions/{submissions[0].name}/{Submission(submissions[0]).output.name}" 2>&1',
    ]
    supervise = shlex.join(process.python("-m", "gemctl", "supervise"))
    command = f'{supervise} "$run" --submission {submissions[0].name}'
    job = batch_job(app, options(config), "/dev/null", command, before)
    at_once = options(config).array_at_once
    tasks = f"0-{len(submissions) - 1}" + (f"%{at_once}" if at_once else "")
    return dataclasses.replace(job, options={**job.options, "array": tasks}).script()


def start_array(submissions: Sequence[Submission], config: Config) -> list[str]:
    """Submits all as one array; returns SLURM's names of its tasks."""
    app = from_json(submissions[0].asked["app"])
    script = submissions[0].path / SCRIPT
    with written_as(submissions[0].path):
        create(script, array_form(app, config, [one.path for one in submissions]))
        for submission in submissions:
            submission.output.touch()
        job = slurm_client.submit(str(script))
    tasks = [f"{job}_{number}" for number in range(len(submissions))]
    for submission, task in zip(submissions, tasks, strict=True):
        with written_as(submission.path):
            submission.write_submitted(job=task)
    return tasks


def jobs(submissions: Sequence[Submission]) -> list[Job | None]:
    """The submissions' jobs, as far as SLURM says."""
    numbers = [submitted["job"] if (submitted := one.submitted()) is not None else None for one in submissions]
    said = iter(slurm_client.states([number for number in numbers if number is not None]))
    return [next(said) if number is not None else None for number in numbers]


def cancel(submission: Submission) -> None:
    """Takes the job out of the queue."""
    submitted = submission.submitted()
    if submitted is not None:
        slurm_client.cancel(submitted["job"])


def bring_back(config: Config, why: Literal["due", "lost", "told"]) -> bool:
    """Queues this process's job again where that is due, where it has lost nodes and SLURM does nothing about it, or
    where SLURM preempts it and leaves it time to save: a job that ends in that time counts as done."""
    allocation = env.slurm_allocation()
    if allocation is None or not options(config).requeue:
        return False
    if why == "lost":
        slurm_client.wait_for_verdict(slurm_client.hostnames(allocation.nodelist))
    return slurm_client.requeue(allocation.job, allocation.restarts, only_if_preempted=why == "told")


def takes_over(submission: Submission) -> bool:
    """True in a job that was queued again: SLURM has ended what it was before."""
    allocation, submitted = env.slurm_allocation(), submission.submitted()
    if allocation is None or submitted is None:
        return False
    return allocation.restarts > 0 and submitted["job"] in allocation.names


def agents(run: RunDir, config: Config) -> SlurmAgents:
    allocation = env.slurm_allocation()
    if allocation is None:
        raise InputError(
            "launcher.kind=slurm: agents are started by steps of a SLURM job, and this process is not in one: "
            "gemctl train and gemctl resume submit it"
        )
    return SlurmAgents(run, config, allocation)
