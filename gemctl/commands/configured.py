"""The arguments that every command with a configuration takes: [FILE.yaml] [GROUP=CHOICE …] [KEY=VALUE …]."""

import argparse
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from gemctl import paths
from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.config.compose import BadConfig
    from gemctl.config.schema import Config, DataConfig
    from gemctl.plan.build import Plan
    from gemctl.run.directory import RunDir
    from gemctl.specs.data import FeatureSpec


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Adds the positional words and --config-dir."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FILE.yaml | GROUP=CHOICE | KEY=VALUE",
        help="one file of your own, group choices and values; docs/reference.md lists all of them, "
        "`gemctl train --cfg` prints what they come to",
    )
    parser.add_argument("--config-dir", metavar="DIR", help="folder with more choices, as DIR/GROUP/CHOICE.yaml")


def add_detach(parser: argparse._ActionsContainer) -> None:
    """Adds --detach."""
    parser.add_argument(
        "--detach", action="store_true", help="return once the run has begun or waits in a queue; it outlives the shell"
    )


def composed(args: argparse.Namespace) -> "Config":
    """The configuration that the arguments ask for. Raises InputError with all problems."""
    from gemctl.config.compose import BadConfig, compose

    files = [word for word in args.words if is_file(word)]
    if len(files) > 1:
        raise InputError(f"{' '.join(files)}: more than one file; a file's `defaults:` list can choose groups")
    try:
        return compose(files[0] if files else None, [word for word in args.words if word not in files], args.config_dir)
    except BadConfig as bad:
        raise InputError(bad.problems + _further(bad)) from None


def _further(bad: "BadConfig") -> list[str]:
    """What is wrong beside the values themselves, as far as no wrong one has a part in it."""
    from gemctl.config.keys import GROUPS
    from gemctl.plan.build import faults

    wrong = {group for group in GROUPS if any(re.search(rf"\b{group}\b[.=]", text) for text in bad.problems)}
    config = bad.mended
    if config is None or wrong & {"topology", "launcher", "experiment"}:
        return []
    if wrong & {"data", "model"}:
        config.topology.ep = "auto"  # it depends on the model
        return faults(config, None)
    try:
        spec = spec_of(config)
    except InputError as error:
        return error.problems + faults(config, None)
    return faults(config, spec)


def check_all(config: "Config") -> None:
    """InputError with all that keeps a run of the configuration from starting: launcher, topology, model, feature spec,
    tables, data."""
    from gemctl.launchers.api import launcher_of
    from gemctl.plan.build import faults

    problems: list[str] = []
    try:
        launcher_of(config.launcher.kind).check(config)
    except InputError as error:
        problems += error.problems
    try:
        spec = spec_of(config)
    except InputError as error:
        raise InputError([*problems, *faults(config, None), *error.problems]) from error
    problems += faults(config, spec)
    try:
        check_data(config.data, host_memory(config))
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)


def is_file(word: str) -> bool:
    """True for a word that names a YAML file: an existing file, or a YAML name that can't be an override."""
    yaml = word.endswith((".yaml", ".yml"))
    return paths.is_file(word) if "=" in word else yaml or paths.is_file(word)


def planned(config: "Config") -> "Plan":
    """The plan of a configuration. Raises InputError for a bad feature spec or a topology that has no place."""
    from gemctl.plan.build import build

    return build(config, spec_of(config))


def note_modules(config: "Config", run: "RunDir") -> None:
    """Says which modules the configuration of a run, perhaps somebody else's, has imported, before they are."""
    from gemctl.specs.custom import modules
    from gemctl.terminal import note

    if named := modules(config.model):
        note(f"{run.run_id}: its configuration has these modules imported here: {', '.join(named)}")


def spec_of(config: "Config") -> "FeatureSpec":
    """The feature spec of a configuration; that of a synthetic log also where it is not written yet."""
    from gemctl.specs import feature_spec

    if config.data.synthetic is not None and not paths.exists(config.data.spec):
        from gemctl.data.synthetic import spec_text

        return feature_spec.parse(spec_text(config.data.synthetic), config.data.spec)
    return feature_spec.load(config.data.spec)


def make_data(data: "DataConfig") -> None:
    """Writes the synthetic log where it is asked for and not there, and says so."""
    from gemctl.data.files import shown
    from gemctl.data.synthetic import absent, ensure
    from gemctl.terminal import note

    if absent(data):
        written = [shown(path) for path in (data.train, data.eval, data.spec) if path is not None]
        note(f"writing the synthetic log: {', '.join(written)}")
        ensure(data)


def check_data(data: "DataConfig", memory: int | None = None) -> None:
    """Opens the data that a run would read, and says which files lie there that it would not. Raises InputError for
    what is missing or does not fit the feature spec, where ids or times are of other kinds here than there, and for row
    groups that a host with `memory` bytes (None: unknown) can't read."""
    from gemctl.data.columns import disagreements
    from gemctl.data.files import shown
    from gemctl.data.parquet import ParquetSource
    from gemctl.data.synthetic import absent
    from gemctl.specs import feature_spec

    if absent(data):
        return
    spec = feature_spec.load(data.spec)
    problems, columns = [], []
    for key, url in {"data.train": data.train, "data.eval": data.eval}.items():
        if url is None:
            continue
        try:
            source = ParquetSource(url, spec, histories=data.histories == "keep")
            source.close()
            if memory is not None:
                source.check_memory(memory)
            problems += [] if source.row_count else [f"{key}={shown(url)}: no rows"]
            columns += source.columns
        except InputError as error:
            problems += error.problems
    problems += disagreements(columns)
    if problems:
        raise InputError(problems)
    note_files(data)


def host_memory(config: "Config") -> int | None:
    """Bytes of a host of the configuration's cluster; None where nothing says it."""
    from gemctl.plan.fit import cluster_memory

    return cluster_memory(config).host


def note_files(data: "DataConfig") -> None:
    """Says which files lie beside the rows and are not read, and which are both trained on and evaluated."""
    from gemctl.data.files import DataFiles, find_files, in_both
    from gemctl.terminal import note

    found = {}
    for key, url in {"data.train": data.train, "data.eval": data.eval}.items():
        with suppress(InputError):  # what is not there is said elsewhere
            found[key] = find_files(url) if url is not None else DataFiles([], [])
            for line in found[key].notes(key):
                note(line)
    if len(found) == 2 and (both := in_both(found["data.train"], found["data.eval"])):
        note(f"data.eval: {both}: also in data.train, so the evaluation is of rows that were trained on")
