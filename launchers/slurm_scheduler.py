"""SLURM for TorchX: any request with one role as one job of one component, with the options of `launcher.slurm`.

    torchx run -s gemctl_slurm -cfg partition=main,time_limit=60 dist.ddp -j 2x2 --script train.py

TorchX's own `slurm` submits a heterogeneous job, which SLURM places without regard to the network; this one submits a
plain job. Replicas are SLURM's tasks in its order of the nodes; each writes slurm-JOB-REPLICA.log in the working
directory.
"""

import re
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role, runopts

from gemctl.config.schema import SlurmConfig
from gemctl.launchers import slurm_client
from gemctl.launchers.slurm_job import FIRST_HOST, BatchJob, batch_job, step

NAME = "gemctl_slurm"
OPTIONS = TypeAdapter(SlurmConfig)
# Options that a TorchX request states itself, or that only gemctl's supervisor uses.
LEFT_OUT = {"cpus_per_rank", "memory_gb", "spare_nodes", "check_nodes", "save_before_limit", "array_at_once"}
TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list[str], "object": dict[str, str]}
STATES = {
    "COMPLETED": AppState.SUCCEEDED,
    "CANCELLED": AppState.CANCELLED,
    "waiting": AppState.PENDING,
    "running": AppState.RUNNING,
}
POLL = 0.5


def create_scheduler(session_name: str, **more: object) -> "SlurmScheduler":
    """The target of TorchX's entry point."""
    return SlurmScheduler(session_name)


class SlurmScheduler(Scheduler[Mapping[str, Any]]):
    """The scheduler; its requests are `BatchJob`s."""

    def __init__(self, session_name: str) -> None:
        super().__init__(NAME, session_name)

    def _run_opts(self) -> runopts:
        found = runopts()
        for name, node in OPTIONS.json_schema()["properties"].items():
            if name in LEFT_OUT:
                continue
            kinds = [option["type"] for option in node.get("anyOf", [node]) if option["type"] != "null"]
            found.add(name, type_=TYPES[kinds[0]], help=node["description"])
        return found

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[BatchJob]:
        slurm = _options(cfg)
        _check(app)
        (role,) = app.roles
        command = shlex.join(step(role, slurm, output="slurm-%j-%t.log"))
        return AppDryRunInfo(batch_job(app, slurm, "slurm-%j.log", command, [FIRST_HOST]), BatchJob.script)

    def schedule(self, dryrun_info: AppDryRunInfo[BatchJob]) -> str:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".sbatch") as file:
            file.write(dryrun_info.request.script())
            file.flush()
            return slurm_client.submit(file.name)

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        state = _state(app_id)
        return None if state is None else DescribeAppResponse(app_id=app_id, state=state)

    def list(self) -> list[ListAppResponse]:
        return [ListAppResponse(app_id=job, state=_of_word(word)) for job, word in slurm_client.own_jobs().items()]

    def _cancel_existing(self, app_id: str) -> None:
        slurm_client.cancel(app_id)

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Lines of replica `k`'s output, stdout and stderr interleaved."""
        if streams not in {None, Stream.COMBINED}:
            raise ValueError(f"{NAME}: stdout and stderr of a replica are one file: ask for streams=combined")
        if since is not None or until is not None:
            raise ValueError(f"{NAME}: lines have no timestamps: since and until are not supported")
        path = Path(slurm_client.facts(app_id)["WorkDir"]) / f"slurm-{app_id}-{k}.log"
        lines = (
            _lines(path, app_id)
            if should_tail
            else iter(path.read_text(encoding="utf-8", errors="replace").splitlines(True))
        )
        return (line for line in lines if regex is None or re.search(regex, line))


def _options(cfg: Mapping[str, Any]) -> SlurmConfig:
    """The options that were given. ValueError names every unknown or invalid one."""
    given = {name: value for name, value in cfg.items() if value is not None}
    wrong = [f"{name}: not an option of {NAME}" for name in given if name in LEFT_OUT]
    try:
        found = OPTIONS.validate_python(given)
    except ValidationError as error:
        wrong += [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
    if wrong:
        raise ValueError("; ".join(wrong))
    return found


def _check(app: AppDef) -> None:
    """ValueError for parts of a request that a job of one component would ignore."""
    if len(app.roles) != 1:
        names = ", ".join(role.name for role in app.roles)
        raise ValueError(f"{NAME}: a job has one role, {app.name} has {len(app.roles)} ({names}): TorchX's own slurm")
    role: Role = app.roles[0]
    if role.max_retries:
        raise ValueError(f"{NAME}: role {role.name}: max_retries={role.max_retries}: a job is not retried")
    if role.mounts:
        raise ValueError(f"{NAME}: role {role.name}: mounts: use container_mounts")


def _state(job: str) -> AppState | None:
    word = slurm_client.word(job)
    return None if word is None else _of_word(word)


def _of_word(word: str) -> AppState:
    return STATES.get(word.rstrip("+")) or STATES.get(slurm_client.kind(word), AppState.FAILED)


def _lines(path: Path, job: str) -> Iterator[str]:
    """Lines as they are written, until the job has ended."""
    offset, ended = 0, False
    while True:
        if path.exists():
            with path.open(encoding="utf-8", errors="replace") as file:
                file.seek(offset)
                yield from iter(file.readline, "")
                offset = file.tell()
        if ended:
            return
        ended = _state(job) not in {AppState.PENDING, AppState.RUNNING}
        time.sleep(POLL)
