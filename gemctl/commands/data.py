"""`gemctl data`: make training data, and find out what is in it.

gemctl data synth data/synthetic --rows 1000000
gemctl data import ml-100k data/ml100k
gemctl data spec clicks.parquet -o spec.yaml
"""

import argparse
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gemctl import paths
from gemctl.commands.arguments import SYNTHETIC_SIZES
from gemctl.config.keys import find
from gemctl.config.schema import DataPath, SyntheticConfig
from gemctl.data import synthetic
from gemctl.data.drafting import Draft, draft
from gemctl.data.importing import Imported, import_recbole
from gemctl.data.synthetic import SyntheticLog
from gemctl.errors import InputError
from gemctl.specs.json_schema import wrong


def run(args: argparse.Namespace) -> Imported | SyntheticLog | Draft:
    if args.action == "import":
        return import_log(args.source, args.out, args.label, args.history)
    if args.action == "synth":
        names = [name.replace("-", "_") for name in SYNTHETIC_SIZES]
        sizes = {name: getattr(args, name) for name in names}
        return synthesise(args.out, {name: size for name, size in sizes.items() if size is not None})
    return draft_spec(args.data, args.label, args.out)


def import_log(source: str, out: str, labels: list[str], history: int) -> Imported:
    """Imports RecBole atomic files into folder `out`."""
    if history < 1:
        raise InputError(f"--history {history}: must be at least 1")
    _refuse_existing(out, "train.parquet", "valid.parquet", "test.parquet", "spec.yaml", "vocabularies.json")
    return import_recbole(source, out, labels=labels, history=history)


def synthesise(out: str, sizes: dict[str, int]) -> SyntheticLog:
    """Writes the synthetic log into folder `out`; `sizes` replaces defaults of the configuration."""
    try:
        config = TypeAdapter(SyntheticConfig).validate_python(sizes)
    except ValidationError as error:
        raise InputError([_wrong_size(str(e["loc"][0]), e["input"]) for e in error.errors()]) from error
    _refuse_existing(out, "train.parquet", "eval.parquet", "spec.yaml")
    return synthetic.write(config, f"{out}/train.parquet", f"{out}/eval.parquet", f"{out}/spec.yaml")


def _refuse_existing(out: str, *names: str) -> None:
    """InputError for files of these names in folder `out`, which would be replaced."""
    there = [f"{out}/{name}" for name in names if paths.exists(f"{out}/{name}")]
    if there:
        raise InputError([f"{path}: exists already; name another folder, or delete it" for path in there])


def _wrong_size(name: str, value: int) -> str:
    return f"--{name.replace('_', '-')}: {wrong(find(('data', 'synthetic', name)) or {}, value)}"


def draft_spec(data: DataPath, labels: list[str], out: str | None) -> Draft:
    """Drafts a feature spec for the Parquet files of `data`; with `out`, writes it to that new file."""
    if out is not None and paths.exists(out):
        raise InputError(f"{out}: exists already; give another name with -o, or delete it")
    drafted = draft(data, labels)
    if out is not None:
        with paths.writing(f"-o {out}"):
            Path(out).write_text(drafted.text, encoding="utf-8")
    return replace(drafted, path=out)
