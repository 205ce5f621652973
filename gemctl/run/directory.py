"""A run is a directory: what is in it is enough to understand, resume or compare the run.

runs/<name>/<run_id>/
  run.json            identity, git commit, versions, command line; written once
  requests/<n>.json   stop, save (gemctl/run/requests.py)
  supervisor.jsonl    attempts, causes, budgets; append-only
  submissions/<n>/    what was asked for (gemctl/run/submission.py)
  attempts/<n>/       gemctl/run/attempt.py
  checkpoints/        step_<n>.a<attempt>/

gemctl list           # lists the runs below runs/
"""

import errno
import importlib.metadata
import os
import platform
import secrets
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gemctl import env, paths
from gemctl.credentials import masked
from gemctl.durable import make_folders, sync_folder
from gemctl.errors import InputError
from gemctl.run.access import Access, create_folder, written_as, written_by_umask
from gemctl.run.attempt import Attempt
from gemctl.run.files import CutFileError, create_json, entries, is_whole, numbered, read_json, read_whole

LEFT = "empty or truncated, as after a power loss"
PACKAGES = ("gemctl", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchx", "numpy", "pyarrow")


class RunDir:
    """One run. Make it with `create`, open it with `open`, or find it by what a user typed with `find`."""

    IDENTITY = "run.json"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests = path / "requests"
        self.checkpoints = path / "checkpoints"
        self.submissions = path / "submissions"
        self.supervisor_log = path / "supervisor.jsonl"
        self._attempts: dict[int, Attempt] = {}

    @property
    def run_id(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, root: str, name: str, command: list[str], access: Access = "private") -> "RunDir":
        """Creates `<root>/<name>/<new run id>/` with its run.json; `command` is the command line that started it.

        InputError if it cannot be written.
        """
        run = cls(folder_of(root, name, access) / new_run_id())
        identity = _identity(run.run_id, name, command)
        with paths.writing(f"run.root {root}"):
            try:
                create_folder(run.path, access)  # an existing one may be another run's: its run.json decides
            except FileExistsError:
                return cls.create(root, name, command, access)
            sync_folder(run.path.parent)
            try:
                with written_as(run.path):
                    for part in (run.requests, run.submissions, run.checkpoints, run.path / "attempts"):
                        part.mkdir(exist_ok=True)
                    create_json(run.path / cls.IDENTITY, identity)  # syncs the folders too
            except FileExistsError:  # another run drew this id in the same second
                return cls.create(root, name, command, access)
            except BaseException:
                shutil.rmtree(run.path, ignore_errors=True)  # no half-created run is left
                raise
        return run

    @classmethod
    def open(cls, path: Path | str) -> "RunDir":
        """The run in `path`; InputError if there is none, or a newer version of gemctl wrote it."""
        run = cls(Path(path).absolute())
        if not (run.path / cls.IDENTITY).is_file():
            raise InputError(f"{path}: not a run directory ({cls.IDENTITY} is missing)")
        run.info()
        return run

    def info(self) -> dict[str, Any]:
        """The contents of run.json; if a power loss truncated it, what the folder tells, unless nothing was created in
        it."""
        if (found := read_whole(self.path / self.IDENTITY)) is not None:
            return found
        if any(entries(folder) for folder in (self.submissions, self.path / "attempts")):
            created = self.path.stat().st_mtime
            return {"run_id": self.run_id, "name": self.path.parent.name, "created": created}
        return read_json(self.path / self.IDENTITY)

    @property
    def identity_cut(self) -> bool:
        """Whether run.json is empty or truncated."""
        return read_whole(self.path / self.IDENTITY) is None

    def configured(self) -> Attempt | None:
        """The newest attempt with a configuration; None if there is none."""
        return next((attempt for attempt in reversed(self.attempts()) if attempt.configured), None)

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first. The last one owns the run."""
        return [self.attempt(number) for number in numbered(self.path / "attempts")]

    def attempt(self, number: int) -> Attempt:
        if number not in self._attempts:
            self._attempts[number] = Attempt(self.path / "attempts" / str(number))
        return self._attempts[number]

    def last_attempt(self) -> Attempt | None:
        attempts = self.attempts()
        return attempts[-1] if attempts else None


def folder_of(root: str, name: str, access: Access = "private") -> Path:
    """The folder of all runs called `name`, created if necessary. InputError if no run can be written there.

    Folders created for a run with run.access=group belong to the group too, so that it can reach the run.
    """
    folder = Path(root).absolute() / name
    with paths.writing(f"run.root {root}"):
        for part in reversed([folder, *folder.parents]) if access == "group" else ():
            if not part.exists():
                with suppress(FileExistsError):
                    create_folder(part, access)
        with written_by_umask():
            make_folders(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return folder


def new_run_id() -> str:
    """Time (UTC) and a short random suffix; ids sort by age."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def find(reference: str, root: str) -> RunDir:
    """The run with this path, run id or unique prefix of a run id below `root`."""
    if not reference:
        raise InputError("RUN '': name a run by its path, its id or a prefix of the id")
    if paths.is_file(Path(reference) / RunDir.IDENTITY):
        return RunDir.open(reference)
    runs = list_runs(root)
    exact = [run for run in runs if run.run_id == reference]
    matches = exact or [run for run in runs if run.run_id.startswith(reference)]
    if len(matches) == 1:
        return RunDir.open(matches[0].path)
    if matches:
        raise InputError(f"{reference}: matches {len(matches)} runs in {root}: {_names(matches)}")
    if named := [run for run in runs if run.path.parent.name == reference]:
        raise InputError(f"{reference}: is the name of {_names(named[-3:])}; name a run by its id, or a prefix of it")
    _refuse_closed(reference, root)
    known = f"the newest are {_names(runs[-3:])}" if runs else "which has no runs"
    raise InputError(
        f"{reference}: no such run: neither the path of a run directory nor the id of a run in {root} ({known})"
    )


def list_runs(root: str) -> list[RunDir]:
    """All runs below `root`, oldest first."""
    paths = [path.parent for path in Path(root).absolute().glob(f"*/*/{RunDir.IDENTITY}")]
    return [RunDir(path) for path in sorted(paths, key=lambda path: path.name)]


def closed_folders(root: str) -> list[Path]:
    """Folders of runs, or of all runs of a name, below `root` that this user may not read."""
    top = Path(root).absolute()
    return [path for depth in ("*", "*/*") for path in sorted(top.glob(depth)) if _closed(path)]


def _closed(folder: Path) -> bool:
    try:
        return folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)
    except OSError as error:
        return error.errno == errno.EACCES  # below a closed one


def _refuse_closed(reference: str, root: str) -> None:
    """InputError if `reference` is a run that this user may not read."""
    named = [path for path in closed_folders(root) if path.name.startswith(reference)]
    for path in [Path(reference)] if _closed(Path(reference)) else named[:1]:
        raise InputError(f"{path}: Permission denied: the run is closed to you (run.access, docs/security.md)")


def _names(runs: list[RunDir]) -> str:
    return ", ".join(run.run_id for run in runs)


def cut_files(run: RunDir) -> list[str]:
    """One line for run.json and each submission and attempt with empty or truncated files, which were written by an
    older version of gemctl, or lost by the disk."""
    found = [f"{RunDir.IDENTITY}: {LEFT}; it is ignored"] if run.identity_cut else []
    folders = [("submission", run.submissions / str(number)) for number in numbered(run.submissions)]
    folders += [("attempt", attempt.path) for attempt in run.attempts()]
    for kind, folder in folders:
        if names := ", ".join(sorted(path.name for path in entries(folder) if _is_cut(path))):
            found.append(f"{kind} {folder.name}: {names}: {LEFT}; they count as never written")
    return found


def _is_cut(path: Path) -> bool:
    """Other faults of a file are reported by whoever reads it."""
    try:
        if path.suffix == ".json":
            read_json(path)
        return path.suffix == ".yaml" and not is_whole(path)
    except CutFileError:
        return True
    except (InputError, OSError):
        return False


def _identity(run_id: str, name: str, command: list[str]) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "name": name,
        "created": time.time(),
        "command": list(map(masked, command)),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "user": env.user(),
        "git": git_commit(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> dict[str, Any] | None:
    """The commit of the source tree that gemctl runs from, and whether it was modified; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=5
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid")), None)
    return {"commit": commit, "changed": any(not line.startswith("#") for line in lines)}
