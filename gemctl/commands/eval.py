"""`gemctl eval`: scores a data set with a checkpoint of a run, a logistic regression beside it on the same rows.

gemctl eval RUN                              # the newest verified checkpoint on data.eval
gemctl eval RUN --data PATH --checkpoint 300 --out scores.parquet
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl import paths
from gemctl.errors import GemctlError, InputError

if TYPE_CHECKING:
    from gemctl.config.schema import DataPath
    from gemctl.run.directory import RunDir
    from gemctl.run.manifest import Checkpoint
    from gemctl.run.scores import Evaluation

HELP = "Score a data set with a checkpoint."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")
    parser.add_argument(
        "--data", metavar="PATH", action="append", help="file, folder or glob, may be repeated (default: data.eval)"
    )
    parser.add_argument("--checkpoint", type=int, metavar="STEP", help="default: the newest that verifies")
    parser.add_argument("--out", metavar="FILE", help="also write every row's scores to this Parquet file")


def run(args: argparse.Namespace) -> "Evaluation":
    from gemctl.data.files import find_files, shown
    from gemctl.run.directory import find
    from gemctl.run.scores import Evaluation

    if args.out is not None:
        _check_out(Path(args.out))
    chosen = find(args.run, args.root)
    checkpoint, notes = choose(chosen, args.checkpoint)
    if not (config := chosen.attempt(checkpoint.attempt).config).exists():
        raise InputError(f"{config}: is missing; it says which model {checkpoint.path.name} is of")
    data = args.data or _eval_data(chosen, checkpoint)
    notes += find_files(data).notes("--data" if args.data else "data.eval")
    result = _score(chosen, checkpoint, data, args.out)
    return Evaluation(
        chosen.run_id, checkpoint.path.name, checkpoint.step, shown(data), out=args.out, notes=notes, **result
    )


def _check_out(out: Path) -> None:
    """Raises InputError where the scores could not be written in the end. Nothing is left there."""
    if paths.exists(out) and not out.is_file():
        raise InputError(f"--out {out}: cannot be written: this is no file")
    with paths.writing(f"--out {out}"), tempfile.NamedTemporaryFile(dir=out.absolute().parent, prefix=f".{out.name}."):
        pass


def choose(run: "RunDir", step: int | None) -> "tuple[Checkpoint, list[str]]":
    """The checkpoint after `step` steps, or the newest that verifies with the reasons why newer ones do not."""
    from gemctl.run.manifest import valid_checkpoints, verify
    from gemctl.run.selection import newest_verified

    if step is None:
        try:
            choice = newest_verified(run)
        except InputError as error:
            raise InputError(f"{error}\nto score an older one: --checkpoint STEP") from error
        if choice.checkpoint is None:
            raise InputError([f"{run.path}: no checkpoint that verifies", *choice.passed_over])
        return choice.checkpoint, choice.passed_over
    valid = valid_checkpoints(run)
    wanted = [checkpoint for checkpoint in valid if checkpoint.step == step]
    if not wanted:
        steps = ", ".join(str(checkpoint.step) for checkpoint in valid) or "none"
        raise InputError(f"--checkpoint {step}: {run.path} has no checkpoint of that step (it has {steps})")
    if faults := verify(wanted[0].path):
        raise InputError(faults)
    return wanted[0], []


def _eval_data(run: "RunDir", checkpoint: "Checkpoint") -> "DataPath":
    from gemctl.config.compose import from_yaml
    from gemctl.run.files import read_text

    file = run.attempt(checkpoint.attempt).config
    data = from_yaml(read_text(file), str(file)).data.eval
    if data is None:
        raise InputError("the run has no data.eval: name the rows to score with --data PATH")
    return data


def _score(run: "RunDir", checkpoint: "Checkpoint", data: "DataPath", out: str | None) -> dict[str, Any]:
    """Runs gemctl.train.evaluate; its problems become this command's."""
    from gemctl.data.files import urls
    from gemctl.run.files import read_json
    from gemctl.run.process import run_module

    with tempfile.TemporaryDirectory(prefix="gemctl-eval-") as folder:
        result = Path(folder) / "result.json"
        words = [str(run.path), str(checkpoint.path), str(result), *urls(data), *(["--out", out] if out else [])]
        code = run_module("gemctl.train.evaluate", *words).returncode
        found = read_json(result) if result.exists() else {}
    if code == InputError.exit_code and "problems" in found:
        raise InputError(found["problems"])
    if code != 0:
        detail = "\n".join(found.get("problems", [])) or f"the scoring process ended with exit code {code}; see above"
        raise GemctlError(detail)
    return found
