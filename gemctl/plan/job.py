"""A configuration as a job: its feature spec, its data, its plan, and all that is wrong with any of them.

    spec = job.spec_of(config)
    for line in job.check(config): ...      # InputError with every problem, else notes for the user

Nothing is printed here and nothing is written.
"""

import re
from contextlib import suppress

from gemctl import paths
from gemctl.config.compose import BadConfig
from gemctl.config.keys import GROUPS
from gemctl.config.schema import Config, DataConfig
from gemctl.data import synthetic
from gemctl.data.columns import disagreements
from gemctl.data.files import DataFiles, find_files, in_both, shown
from gemctl.data.parquet import ParquetSource
from gemctl.errors import InputError
from gemctl.plan.build import Plan, build, faults
from gemctl.plan.fit import cluster_memory
from gemctl.specs import feature_spec
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import own_modules


def spec_of(config: Config) -> FeatureSpec:
    """The feature spec of a configuration, also that of a synthetic log that is not written yet."""
    if config.data.synthetic is not None and not paths.exists(config.data.spec):
        return feature_spec.parse(synthetic.spec_text(config.data.synthetic), config.data.spec)
    return feature_spec.load(config.data.spec)


def planned(config: Config) -> Plan:
    """The plan of a configuration. Raises InputError for a bad feature spec or an impossible topology."""
    return build(config, spec_of(config))


def further_problems(bad: BadConfig) -> list[str]:
    """Problems of a bad configuration beyond its wrong values, leaving out any that a wrong value may have caused."""
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


def check(config: Config) -> list[str]:
    """Notes on the data of a job that can be planned and read.

    Raises InputError with every problem of topology, model, feature spec, tables and data.
    """
    try:
        spec = spec_of(config)
    except InputError as error:
        raise InputError([*faults(config, None), *error.problems]) from error
    problems, notes = faults(config, spec), []
    try:
        notes = check_data(config.data, cluster_memory(config).host)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)
    return notes


def check_data(data: DataConfig, memory: int | None = None) -> list[str]:
    """Opens the data that a run would read; returns the notes of `file_notes`. `memory`: bytes of a host, if known.

    Raises InputError for data that are missing or do not fit the feature spec, for ids or times whose types differ
    between training and evaluation, and for row groups that do not fit in `memory`.
    """
    if synthetic.absent(data):
        return []
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
    return file_notes(data)


def file_notes(data: DataConfig) -> list[str]:
    """Which files beside the data are not read, and which are both trained on and evaluated."""
    files, notes = {}, []
    for key, url in {"data.train": data.train, "data.eval": data.eval}.items():
        with suppress(InputError):  # missing data are reported elsewhere
            files[key] = find_files(url) if url is not None else DataFiles([], [])
            notes += files[key].notes(key)
    if len(files) == 2 and (both := in_both(files["data.train"], files["data.eval"])):
        notes.append(f"data.eval: {both}: also in data.train, so the evaluation is of rows that were trained on")
    return notes


def module_notes(config: Config, run_id: str) -> list[str]:
    """Which modules the configuration of a run, perhaps somebody else's, imports; to be shown before it does."""
    named = own_modules(config.model)
    return [f"{run_id}: its configuration imports these modules here: {', '.join(named)}"] if named else []
