"""What a run reads: recorded when it is submitted, and compared with what is there when it is resumed."""

import dataclasses
from collections.abc import Iterable
from glob import has_magic
from pathlib import Path

from gemctl import paths
from gemctl.config.resuming import GROWN, MOVED, Change, rule_of
from gemctl.config.schema import Config, DataConfig, DataPath
from gemctl.data import synthetic
from gemctl.data.files import expanded, shown, urls
from gemctl.data.fingerprint import fingerprint
from gemctl.errors import InputError
from gemctl.run.conclusion import saved_step
from gemctl.run.directory import RunDir
from gemctl.run.inputs import SPEC, Inputs, data_differences, grown, here, read, rows_of, spec_differences
from gemctl.specs import feature_spec
from gemctl.specs.data import FeatureSpec
from gemctl.specs.feature_spec import OWN_PREFIX
from gemctl.terminal import note


def write_synthetic(data: DataConfig) -> None:
    """Writes the synthetic log if the configuration asks for one that does not exist."""
    if synthetic.absent(data):
        files = [shown(path) for path in (data.train, data.eval, data.spec) if path is not None]
        note(f"writing the synthetic log: {', '.join(files)}")
        synthetic.ensure(data)


def record(data: DataConfig, planned: FeatureSpec | None = None) -> Inputs:
    """The spec's text and the files' fingerprints, as they are now.

    InputError with all problems, and if the spec is no longer the one that was `planned` with.
    """
    data = absolute_paths(data)
    problems: list[str] = []
    fingerprints = {}
    for key, url in {"train": data.train, "eval": data.eval}.items():
        try:
            fingerprints[key] = fingerprint(url) if url is not None else None
        except InputError as error:
            problems += [f"data.{key}: {problem}" for problem in error.problems]
    text = feature_spec.read(data.spec)
    if problems:
        raise InputError(problems)
    inputs = Inputs(data.spec, text, fingerprints["train"] or [], fingerprints["eval"])
    if planned is not None and inputs.spec != planned:
        raise InputError(f"data.spec: {data.spec} was changed while the run was being planned: start it again")
    return inputs


def absolute_paths(data: DataConfig) -> DataConfig:
    """The same data with absolute paths, so that `resume` and `eval` of the run work from any folder."""

    def every(url: DataPath) -> DataPath:
        return _absolute(url) if isinstance(url, str) else [_absolute(one) for one in url]

    return dataclasses.replace(
        data, spec=_absolute(data.spec), train=every(data.train), eval=every(data.eval) if data.eval else None
    )


def _absolute(path: str) -> str:
    return path if "://" in path or path.startswith(OWN_PREFIX) else str(Path(expanded(path)).absolute())


def relocated(run: RunDir, folder: Path, before: Config, asked: Config) -> Config:
    """The configuration of a resumed run with its inputs' present locations. Where the user named none, they are those
    of the submission or attempt in `folder`, whose configuration is `before`. A lost spec is replaced by the run's
    copy."""
    inputs, data = read(folder, run.path), asked.data
    if inputs is not None:
        known = here(before.data, folder, run.path)
        if data.spec == before.data.spec:
            data = dataclasses.replace(data, spec=inputs.spec_path if _exists(inputs.spec_path) else known.spec)
        if data.train == before.data.train:
            data = dataclasses.replace(data, train=known.train)
        if data.eval == before.data.eval:
            data = dataclasses.replace(data, eval=known.eval)
    return dataclasses.replace(asked, data=absolute_paths(data))


def require_present(data: DataConfig, names: Iterable[str] = ("spec", "train", "eval")) -> None:
    """InputError for each local path of these keys of `data` that does not exist, with the override that names its new
    location. Globs are left to those who read them."""
    problems = [
        f"data.{name}: {path} no longer exists; say where it is now: data.{name}=PATH"
        for name in names
        for path in urls(getattr(data, name) or [])
        if not has_magic(path) and not _exists(path)
    ]
    if problems:
        raise InputError(problems)


def _exists(path: str) -> bool:
    return "://" in path or path.startswith(OWN_PREFIX) or paths.exists(path)


def with_input_changes(
    run: RunDir, folder: Path, before: Config, config: Config, now: Inputs, changed: list[Change]
) -> list[Change]:
    """`changed`, the changed keys of a resumed run, corrected by the inputs' content: a new location of the same
    content is free, and changed content is a change of its key. Runs of an older gemctl cannot be compared."""
    had = read(folder, run.path)
    if had is None:
        return changed
    changes = [change for change in changed if change.key not in {"data.spec", "data.train", "data.eval"}]
    differences = {"data.spec": spec_differences(had.spec, now.spec)}
    if differences["data.spec"]:
        differences["data.spec"].append(f"the run has a copy of the original: {folder / SPEC}")
    differences["data.train"] = data_differences(had.train, now.train)
    differences["data.eval"] = data_differences(had.eval or [], now.eval or [])
    for key, found in differences.items():
        name = key.removeprefix("data.")
        old, new = getattr(before.data, name), getattr(config.data, name)
        details = found if None not in (old, new) else []
        if details or old != new:
            changes.append(_change(run, before, config, had, now, key, (old, new), details))
    return changes


def _change(
    run: RunDir, before: Config, config: Config, had: Inputs, now: Inputs, key: str,
    locations: tuple[DataPath | None, DataPath | None], details: list[str],
) -> Change:  # fmt: skip
    rule = rule_of(key) if details or None in locations else MOVED
    in_order = before.data.order == config.data.order == "time"
    if key == "data.train" and in_order and grown(had.train, now.train):
        seen = (saved_step(run) or 0) * before.train.global_batch
        rule = GROWN if seen <= rows_of(had.train) else rule
    return Change(key, *locations, rule, details)


def fingerprint_notes(run: RunDir, folder: Path) -> list[str]:
    """A note if the run's inputs cannot be compared."""
    if read(folder, run.path) is not None:
        return []
    return ["whether spec or data have changed is unknown: an older gemctl recorded no fingerprints of them"]
