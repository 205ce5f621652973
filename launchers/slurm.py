"""Runs as SLURM jobs: the batch script runs `gemctl supervise`, which starts agents by job steps and watches them.

    gemctl train launcher=slurm launcher.nodes=2 launcher.ranks_per_node=8 launcher.slurm.partition=gpu

The job only starts the supervisor, and restarts it after a preemption or the time limit (docs/slurm.md). Attempts,
their order and their budgets are up to the supervisor, as with every launcher.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl import env, process
from gemctl.config.schema import Config, SlurmConfig
from gemctl.durable import create
from gemctl.errors import InputError
from gemctl.launchers import slurm_client
from gemctl.launchers.api import RequeueReason, from_json
from gemctl.launchers.slurm_agents import SlurmAgents
from gemctl.launchers.slurm_job import batch_job, file_name
from gemctl.run.access import written_as
from gemctl.run.directory import RunDir
from gemctl.run.submission import Job, Submission

if TYPE_CHECKING:
    from torchx.specs import AppDef

IN_PROCESS = False  # the job runs the supervisor
SCRIPT = "job.sbatch"


def check(config: Config) -> None:
    """InputError for invalid options, and for ones that contradict each other."""
    slurm = options(config)
    problems = [
        f"launcher.slurm.env.{name}: {name!r} is not a valid name of an environment variable"
        for name in slurm.env
        if not name.isidentifier() or not name.isascii()
    ]
    problems += [
        f"launcher.slurm.env_from: {name} is set in launcher.slurm.env too: keep one of the two"
        for name in slurm.env_from
        if name in slurm.env
    ]
    if "\n" in config.run.root or "\n" in config.run.name:
        problems.append("run.root, run.name: sbatch accepts no path with a line break")
    if slurm.container_image is None:
        named = {"container_mounts": slurm.container_mounts, "container_workdir": slurm.container_workdir}
        problems += [
            f"launcher.slurm.{key} has no effect without launcher.slurm.container_image"
            for key, value in named.items()
            if value
        ]
    limit = _seconds(slurm.time_limit) if slurm.time_limit is not None else 0
    if 0 < limit <= slurm.save_before_limit:  # 0: no limit
        problems.append(
            f"launcher.slurm.save_before_limit={slurm.save_before_limit}: must be below launcher.slurm.time_limit="
            f"{slurm.time_limit} ({limit} s), or the run would be told to stop as soon as it starts"
        )
    if problems:
        raise InputError(problems)


def _seconds(limit: str) -> int:
    """Seconds of a time limit in SLURM's syntax: M, M:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS."""
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def check_here(config: Config) -> None:
    """InputError for variables of `env_from` that are not set; SlurmError if no SLURM controller answers."""
    missing = [name for name in options(config).env_from if name not in env.for_slurm()]
    if missing:
        raise InputError([f"launcher.slurm.env_from: {name} is not set in this shell" for name in missing])
    slurm_client.call("scontrol", "ping")


def options(config: Config) -> SlurmConfig:
    return config.launcher.slurm or SlurmConfig()


def script(app: "AppDef", config: Config, submission: Path) -> str:
    """The batch script of one run."""
    run = submission.parent.parent
    words = process.python("-m", "gemctl", "supervise", str(run), "--submission", submission.name)
    output = file_name(Submission(submission).output)
    return batch_job(app, options(config), output, shlex.join(words)).script()


def start(run: RunDir, submission: Submission, config: Config) -> None:
    """Submits the job."""
    app = from_json(submission.asked["app"])
    file = submission.path / SCRIPT
    create(file, script(app, config, submission.path))
    submission.output.touch()  # with the run's file mode rather than SLURM's
    submission.write_submitted(job=slurm_client.submit(str(file)))


def array_script(app: "AppDef", config: Config, submissions: Sequence[Path]) -> str:
    """The batch script of an array whose task i runs submission i; each task writes to its submission's own log."""
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
    """Submits all of them as one array; returns SLURM's ids of its tasks."""
    app = from_json(submissions[0].asked["app"])
    file = submissions[0].path / SCRIPT
    with written_as(submissions[0].path):
        create(file, array_script(app, config, [one.path for one in submissions]))
        for submission in submissions:
            submission.output.touch()
        job = slurm_client.submit(str(file))
    tasks = [f"{job}_{number}" for number in range(len(submissions))]
    for submission, task in zip(submissions, tasks, strict=True):
        with written_as(submission.path):
            submission.write_submitted(job=task)
    return tasks


def jobs(submissions: Sequence[Submission]) -> list[Job | None]:
    """The submissions' jobs, as far as SLURM knows them."""
    numbers = [submitted["job"] if (submitted := one.submitted()) is not None else None for one in submissions]
    states = iter(slurm_client.states([number for number in numbers if number is not None]))
    return [next(states) if number is not None else None for number in numbers]


def cancel(submission: Submission) -> None:
    """Cancels the job."""
    submitted = submission.submitted()
    if submitted is not None:
        slurm_client.cancel(submitted["job"])


def requeue(config: Config, reason: RequeueReason) -> bool:
    """Requeues this process's job: for its time limit, after a loss of nodes that SLURM does not answer itself, or when
    SLURM preempts it with a grace time, as a job that ends within the grace time would count as completed."""
    allocation = env.slurm_allocation()
    if allocation is None or not options(config).requeue:
        return False
    if reason == "lost_hosts":
        slurm_client.wait_for_verdict(slurm_client.hostnames(allocation.nodelist))
    return slurm_client.requeue(allocation.job, allocation.restarts, only_if_preempted=reason == "terminated")


def replaces_supervisor(submission: Submission) -> bool:
    """True in a requeued job: SLURM has ended all processes of its earlier start."""
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
