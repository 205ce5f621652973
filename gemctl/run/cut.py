"""What a power loss has left empty or cut in a run, where an older gemctl or the disk had not put it there yet.

cut_files(run)      # ["attempt 2: claim.json, config.yaml: empty or cut, as a power loss leaves files; …"]
"""

from pathlib import Path

from gemctl.errors import InputError
from gemctl.run.directory import RunDir
from gemctl.run.files import CutFileError, entries, is_whole, numbered, read_json

LEFT = "empty or cut, as a power loss leaves files"


def cut_files(run: RunDir) -> list[str]:
    """One line for run.json, and for each submission and attempt of which something is cut."""
    found = [f"{RunDir.IDENTITY}: {LEFT}; the run goes on without it"] if run.identity_cut else []
    folders = [("submission", run.submissions / str(number)) for number in numbered(run.submissions)]
    folders += [("attempt", attempt.path) for attempt in run.attempts()]
    for kind, folder in folders:
        if names := ", ".join(sorted(path.name for path in entries(folder) if _is_cut(path))):
            found.append(f"{kind} {folder.name}: {names}: {LEFT}; what is missing counts as never written")
    return found


def _is_cut(path: Path) -> bool:
    """Whatever else may be wrong with a file, who needs it says."""
    try:
        if path.suffix == ".json":
            read_json(path)
        return path.suffix == ".yaml" and not is_whole(path)
    except CutFileError:
        return True
    except (InputError, OSError):
        return False
