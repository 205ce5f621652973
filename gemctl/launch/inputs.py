"""What a run reads: taken down when it is submitted, and compared with what is there now when it goes on."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl import paths
from gemctl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gemctl.config.resuming import Change
    from gemctl.config.schema import Config, DataConfig, DataPath
    from gemctl.run.directory import RunDir
    from gemctl.run.inputs import Inputs
    from gemctl.specs.data import FeatureSpec


def taken(data: "DataConfig", planned: "FeatureSpec | None" = None) -> "Inputs":
    """The spec's text and the files' fingerprints, as they are now. InputError with all problems, and where the spec is
    not the one that was `planned` with any more."""
    from gemctl.data.fingerprint import fingerprint
    from gemctl.run.inputs import Inputs
    from gemctl.specs import feature_spec

    data = absolute(data)
    problems: list[str] = []
    found = {}
    for key, url in {"train": data.train, "eval": data.eval}.items():
        try:
            found[key] = fingerprint(url) if url is not None else None
        except InputError as error:
            problems += [f"data.{key}: {problem}" for problem in error.problems]
    text = feature_spec.read(data.spec)
    if problems:
        raise InputError(problems)
    inputs = Inputs(data.spec, text, found["train"] or [], found["eval"])
    if planned is not None and inputs.spec != planned:
        raise InputError(f"data.spec: {data.spec} was changed while the run was being planned: start it again")
    return inputs


def absolute(data: "DataConfig") -> "DataConfig":
    """The same data with absolute paths, so that `resume` and `eval` of the run work from any folder."""
    return dataclasses.replace(
        data, spec=_absolute(data.spec), train=_every(data.train), eval=_every(data.eval) if data.eval else None
    )


def _every(url: "DataPath") -> "DataPath":
    return _absolute(url) if isinstance(url, str) else [_absolute(one) for one in url]


def _absolute(path: str) -> str:
    from gemctl.data.files import expanded
    from gemctl.specs.feature_spec import OWN_PREFIX

    return path if "://" in path or path.startswith(OWN_PREFIX) else str(Path(expanded(path)).absolute())


def placed(run: "RunDir", folder: Path, before: "Config", asked: "Config") -> "Config":
    """The configuration of a resumed run with the places where its inputs are now: where the user has named none, those
    of the submission or attempt in `folder`, whose configuration is `before`. A spec that is gone is the run's copy."""
    from gemctl.run.inputs import here, read

    inputs, data = read(folder, run.path), asked.data
    if inputs is not None:
        known = here(before.data, folder, run.path)
        if data.spec == before.data.spec:
            data = dataclasses.replace(data, spec=inputs.spec_path if _there(inputs.spec_path) else known.spec)
        if data.train == before.data.train:
            data = dataclasses.replace(data, train=known.train)
        if data.eval == before.data.eval:
            data = dataclasses.replace(data, eval=known.eval)
    return dataclasses.replace(asked, data=absolute(data))


def refuse_gone(data: "DataConfig", names: "Iterable[str]" = ("spec", "train", "eval")) -> None:
    """InputError for each local path of these keys of `data` where nothing is, with the key that says where it is now.
    Globs are left to those who read them."""
    from glob import has_magic

    from gemctl.data.files import urls

    problems = [
        f"data.{name}: nothing is at {path} any more; say where it is now: data.{name}=PATH"
        for name in names
        for path in urls(getattr(data, name) or [])
        if not has_magic(path) and not _there(path)
    ]
    if problems:
        raise InputError(problems)


def _there(path: str) -> bool:
    from gemctl.specs.feature_spec import OWN_PREFIX

    return "://" in path or path.startswith(OWN_PREFIX) or paths.exists(path)


def compared(
    run: "RunDir", folder: Path, before: "Config", config: "Config", now: "Inputs", found: "list[Change]"
) -> "list[Change]":
    """`found`, the changed keys of a resumed run, with what its files say: a new place of the same content is free, and
    content that has changed is a change of its key. What an older gemctl submitted cannot be compared."""
    from gemctl.run.inputs import SPEC, data_differences, read, spec_differences

    had = read(folder, run.path)
    if had is None:
        return found
    changes = [change for change in found if change.key not in {"data.spec", "data.train", "data.eval"}]
    differences = {"data.spec": spec_differences(had.spec, now.spec)}
    if differences["data.spec"]:
        differences["data.spec"].append(f"the run has a copy of what it was: {folder / SPEC}")
    differences["data.train"] = data_differences(had.train, now.train)
    differences["data.eval"] = data_differences(had.eval or [], now.eval or [])
    for key, found_in in differences.items():
        name = key.removeprefix("data.")
        old, new = getattr(before.data, name), getattr(config.data, name)
        details = found_in if None not in (old, new) else []
        if details or old != new:
            changes.append(_judged(run, before, config, had, now, key, (old, new), details))
    return changes


def _judged(
    run: "RunDir", before: "Config", config: "Config", had: "Inputs", now: "Inputs", key: str,
    places: "tuple[DataPath | None, DataPath | None]", details: list[str],
) -> "Change":  # fmt: skip
    from gemctl.config.resuming import GROWN, MOVED, Change, rule_of
    from gemctl.run.conclusion import saved_step
    from gemctl.run.inputs import grown, rows_of

    rule = rule_of(key) if details or None in places else MOVED
    in_order = before.data.order == config.data.order == "time"
    if key == "data.train" and in_order and grown(had.train, now.train):
        seen = (saved_step(run) or 0) * before.train.global_batch
        rule = GROWN if seen <= rows_of(had.train) else rule
    return Change(key, *places, rule, details)


def noted(run: "RunDir", folder: Path) -> list[str]:
    """What a user should know of inputs that cannot be compared."""
    from gemctl.run.inputs import read

    if read(folder, run.path) is not None:
        return []
    return ["whether spec or data have changed is unknown: the run has no fingerprints of them (an older gemctl's)"]
