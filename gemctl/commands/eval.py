"""`gemctl eval`: scores a data set with a checkpoint of a run, a logistic regression beside it on the same rows.

gemctl eval RUN                              # the newest verified checkpoint on data.eval
gemctl eval RUN --data PATH --checkpoint 300 --out scores.parquet
gemctl eval RUN data.eval=PATH               # the run's own rows, which were moved
"""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl import paths
from gemctl.errors import GemctlError, InputError

if TYPE_CHECKING:
    from gemctl.config.schema import Config, DataPath
    from gemctl.report.scores import Evaluation
    from gemctl.run.directory import RunDir
    from gemctl.run.inputs import Sources
    from gemctl.run.manifest import Checkpoint

PLACES = ("data.spec", "data.train", "data.eval")
HELP = "Score a data set with a checkpoint."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="path of a run, its id or a unique prefix of it")
    parser.add_argument(
        "places",
        nargs="*",
        metavar="data.spec=PATH | data.train=PATH | data.eval=PATH",
        help="where the run's own data are now, if they were moved",
    )
    parser.add_argument("--root", default="runs", metavar="DIR", help="where run directories lie (default: runs)")
    parser.add_argument(
        "--data", metavar="PATH", action="append", help="file, folder or glob, may be repeated (default: data.eval)"
    )
    parser.add_argument("--checkpoint", type=int, metavar="STEP", help="default: the newest that verifies")
    parser.add_argument(
        "--out", metavar="FILE", help="also write every row's scores to this Parquet file, which may hold older ones"
    )


def run(args: argparse.Namespace) -> "Evaluation":
    from gemctl.commands.configured import note_modules
    from gemctl.data.files import find_files, shown
    from gemctl.report.scores import Evaluation
    from gemctl.run.directory import find

    if args.out is not None:
        _check_out(Path(args.out))
    chosen = find(args.run, args.root)
    checkpoint, notes = choose(chosen, args.checkpoint)
    config, changed = _configured(chosen, checkpoint, args.places, args.data)
    data = args.data or config.data.eval
    if data is None:
        raise InputError("the run has no data.eval: name the rows to score with --data PATH")
    notes += [*changed, *find_files(data).notes("--data" if args.data else "data.eval")]
    note_modules(config, chosen)
    result = _score(config, checkpoint, data, args.out)
    return Evaluation(
        chosen.run_id, checkpoint.path.name, checkpoint.step, shown(data), out=args.out, notes=notes, **result
    )


def _check_out(out: Path) -> None:
    """Raises InputError where the scores could not be written in the end, or would replace anything but scores. Nothing
    is left there."""
    if paths.exists(out) and not out.is_file():
        raise InputError(f"--out {out}: cannot be written: this is no file")
    if paths.exists(out) and out.stat().st_size and not _holds_scores(out):
        raise InputError(f"--out {out}: exists already and holds no scores; give another name, or delete it")
    with paths.writing(f"--out {out}"), tempfile.NamedTemporaryFile(dir=out.absolute().parent, prefix=f".{out.name}."):
        pass


def _holds_scores(path: Path) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return any(name.startswith("score_") for name in pq.read_schema(path).names)
    except (OSError, pa.ArrowException):
        return False


def choose(run: "RunDir", step: int | None) -> "tuple[Checkpoint, list[str]]":
    """The checkpoint after `step` steps, or the newest that verifies with the reasons why newer ones do not."""
    from gemctl.run.manifest import checkpoints, verify
    from gemctl.run.selection import newest_verified

    if step is None:
        try:
            choice = newest_verified(run)
        except InputError as error:
            raise InputError(f"{error}\nto score an older one: --checkpoint STEP") from error
        if choice.checkpoint is None:
            raise InputError([f"{run.path}: no checkpoint that verifies", *choice.passed_over])
        return choice.checkpoint, choice.passed_over
    found = [checkpoint for checkpoint in checkpoints(run) if checkpoint.current]
    wanted = [checkpoint for checkpoint in found if checkpoint.step == step]
    if not wanted:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found if checkpoint.flaw is None) or "none"
        raise InputError(f"--checkpoint {step}: {run.path} has no checkpoint of that step (it has {steps})")
    if faults := [wanted[0].reason] if wanted[0].flaw is not None else verify(wanted[0].path):
        raise InputError(faults)
    return wanted[0], []


def _configured(
    run: "RunDir", checkpoint: "Checkpoint", places: list[str], data: list[str] | None
) -> "tuple[Config, list[str]]":
    """The configuration that the checkpoint is of, with the places where spec and data are now, and in what the data
    have changed since. `places`: those that the user names; `data`: the rows to score instead of data.eval.

    InputError for a spec of another content, and for data that are gone.
    """
    from gemctl.config.compose import compose, from_yaml
    from gemctl.launch.inputs import noted, placed, refuse_gone
    from gemctl.run.files import read_text
    from gemctl.run.inputs import SPEC, read, spec_differences
    from gemctl.specs import feature_spec

    attempt = run.attempt(checkpoint.attempt)
    if not attempt.config.exists():
        raise InputError(f"{attempt.config}: is missing; it says which model {checkpoint.path.name} is of")
    if wrong := [word for word in places if word.partition("=")[0] not in PLACES]:
        raise InputError([f"{word}: only {', '.join(PLACES)} can be named here" for word in wrong])
    before = from_yaml(read_text(attempt.config), str(attempt.config))
    config = placed(run, attempt.path, before, compose(str(attempt.config), places))
    refuse_gone(config.data, ["spec"] if data else ["spec", "eval"])
    inputs = read(attempt.path, run.path)
    if inputs is None:
        return config, noted(run, attempt.path)
    named = any(word.startswith("data.spec=") for word in places)
    if named and (found := spec_differences(inputs.spec, feature_spec.load(config.data.spec))):
        where = f"data.spec={config.data.spec}"
        raise InputError([f"{where}: is not the spec that the checkpoint was made with: {one}" for one in found])
    config.data.spec = str(attempt.path / SPEC)  # whatever has become of the file that it was copied from
    sets = {key: sources for key, sources in inputs.data_sets().items() if key != "data.eval" or not data}
    return config, [note for key, sources in sets.items() for note in _changed(key, sources, config)]


def _changed(key: str, before: "Sources", config: "Config") -> list[str]:
    """In what a data set is not what the run read; rows that cannot be read are told by those who read them."""
    from gemctl.data.fingerprint import fingerprint
    from gemctl.run.inputs import data_differences

    try:
        now = fingerprint(getattr(config.data, key.removeprefix("data.")))
    except InputError:
        return []
    return [f"{key} has changed since the run read it: {one}" for one in data_differences(before, now)]


def _score(config: "Config", checkpoint: "Checkpoint", data: "DataPath", out: str | None) -> dict[str, Any]:
    """Runs gemctl.train.evaluate; its problems become this command's."""
    from gemctl.config.compose import to_yaml
    from gemctl.data.files import urls
    from gemctl.process import run_module
    from gemctl.run.files import read_json

    with tempfile.TemporaryDirectory(prefix="gemctl-eval-") as folder:
        file, result = Path(folder) / "config.yaml", Path(folder) / "result.json"
        file.write_text(to_yaml(config), encoding="utf-8")
        words = [str(file), str(checkpoint.path), str(result), *urls(data), *(["--out", out] if out else [])]
        code = run_module("gemctl.train.evaluate", *words).returncode
        found = read_json(result) if result.exists() else {}
    if code == InputError.exit_code and "problems" in found:
        raise InputError(found["problems"])
    if code != 0:
        detail = "\n".join(found.get("problems", [])) or f"the scoring process ended with exit code {code}; see above"
        raise GemctlError(detail)
    return found
