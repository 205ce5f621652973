"""`gemctl eval`: scores a data set with a checkpoint of a run, and with a logistic regression on the same rows.

gemctl eval RUN                              # the newest verified checkpoint on data.eval
gemctl eval RUN --data PATH --checkpoint 300 --out scores.parquet
gemctl eval RUN data.eval=PATH               # the run's own rows, which were moved
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gemctl import paths, torch_call
from gemctl.config.compose import compose, from_yaml
from gemctl.config.schema import Config
from gemctl.data.files import find_files, shown, urls
from gemctl.data.fingerprint import fingerprint
from gemctl.errors import InputError
from gemctl.launch.inputs import fingerprint_notes, relocated, require_present
from gemctl.plan.job import module_notes
from gemctl.report.report import Evaluation
from gemctl.run.base import newest_verified
from gemctl.run.directory import RunDir, find
from gemctl.run.files import read_text
from gemctl.run.inputs import SPEC, Sources, data_differences, read, spec_differences
from gemctl.run.manifest import Checkpoint, checkpoints, verify
from gemctl.specs import feature_spec
from gemctl.terminal import note

PLACES = ("data.spec", "data.train", "data.eval")


def run(args: argparse.Namespace) -> Evaluation:
    if args.out is not None:
        _check_out(Path(args.out))
    chosen = find(args.run, args.root)
    checkpoint, notes = choose(chosen, args.checkpoint)
    config, changed = _configured(chosen, checkpoint, args.places, args.data)
    data = args.data or config.data.eval
    if data is None:
        raise InputError("the run has no data.eval: name the rows to score with --data PATH")
    notes += [*changed, *find_files(data).notes("--data" if args.data else "data.eval")]
    for line in module_notes(config, chosen.run_id):
        note(line)
    scores = torch_call.call(
        "gemctl.train.evaluate:evaluate",
        dict[str, Any],
        config=config,
        checkpoint=checkpoint.path,
        data=urls(data),
        out=args.out,
    )
    return Evaluation(
        chosen.run_id, checkpoint.path.name, checkpoint.step, shown(data), out=args.out, notes=notes, **scores
    )


def _check_out(out: Path) -> None:
    """Raises InputError if the scores could not be written in the end, or would replace anything but scores. Leaves no
    file behind."""
    if paths.exists(out) and not out.is_file():
        raise InputError(f"--out {out}: cannot be written: not a regular file")
    if paths.exists(out) and out.stat().st_size and not _holds_scores(out):
        raise InputError(f"--out {out}: exists already and holds no scores; give another name, or delete it")
    with paths.writing(f"--out {out}"), tempfile.NamedTemporaryFile(dir=out.absolute().parent, prefix=f".{out.name}."):
        pass


def _holds_scores(path: Path) -> bool:
    try:
        return any(name.startswith("score_") for name in pq.read_schema(path).names)
    except (OSError, pa.ArrowException):
        return False


def choose(run: RunDir, step: int | None) -> tuple[Checkpoint, list[str]]:
    """The checkpoint of `step`, or the newest that verifies with the reasons why newer ones do not."""
    if step is None:
        try:
            choice = newest_verified(run)
        except InputError as error:
            raise InputError(f"{error}\nto score an older one: --checkpoint STEP") from error
        if choice.checkpoint is None:
            raise InputError([f"{run.path}: no checkpoint that verifies", *choice.passed_over])
        return choice.checkpoint, choice.passed_over
    current = [checkpoint for checkpoint in checkpoints(run) if checkpoint.current]
    wanted = [checkpoint for checkpoint in current if checkpoint.step == step]
    if not wanted:
        steps = ", ".join(str(checkpoint.step) for checkpoint in current if checkpoint.flaw is None) or "none"
        raise InputError(f"--checkpoint {step}: {run.path} has no checkpoint of that step (it has {steps})")
    if faults := [wanted[0].reason] if wanted[0].flaw is not None else verify(wanted[0].path):
        raise InputError(faults)
    return wanted[0], []


def _configured(
    run: RunDir, checkpoint: Checkpoint, places: list[str], data: list[str] | None
) -> tuple[Config, list[str]]:
    """The checkpoint's configuration with the present locations of spec and data, and how the data have changed since.
    `places`: locations that the user names; `data`: rows to score instead of data.eval.

    InputError for a spec of different content, and for data that no longer exist.
    """
    attempt = run.attempt(checkpoint.attempt)
    if not attempt.config.exists():
        raise InputError(f"{attempt.config}: missing; it describes the model of {checkpoint.path.name}")
    if wrong := [word for word in places if word.partition("=")[0] not in PLACES]:
        raise InputError([f"{word}: only {', '.join(PLACES)} can be named here" for word in wrong])
    before = from_yaml(read_text(attempt.config), str(attempt.config))
    config = relocated(run, attempt.path, before, compose(str(attempt.config), places))
    require_present(config.data, ["spec"] if data else ["spec", "eval"])
    inputs = read(attempt.path, run.path)
    if inputs is None:
        return config, fingerprint_notes(run, attempt.path)
    named = any(word.startswith("data.spec=") for word in places)
    if named and (found := spec_differences(inputs.spec, feature_spec.load(config.data.spec))):
        what = f"data.spec={config.data.spec}: differs from the spec that the checkpoint was trained with"
        raise InputError([f"{what}: {one}" for one in found])
    config.data.spec = str(attempt.path / SPEC)  # whatever has become of the original
    sets = {key: sources for key, sources in inputs.data_sets().items() if key != "data.eval" or not data}
    return config, [line for key, sources in sets.items() for line in _changed(key, sources, config)]


def _changed(key: str, before: Sources, config: Config) -> list[str]:
    """How a data set differs from what the run read; unreadable rows are reported by those who read them."""
    try:
        now = fingerprint(getattr(config.data, key.removeprefix("data.")))
    except InputError:
        return []
    return [f"{key} has changed since the run read it: {one}" for one in data_differences(before, now)]
