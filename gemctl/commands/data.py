"""`gemctl data`: make training data, and find out what is in it.

gemctl data synth data/synthetic --rows 1000000
gemctl data import ml-100k data/ml100k
gemctl data spec clicks.parquet -o spec.yaml
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemctl import paths
from gemctl.errors import InputError

if TYPE_CHECKING:
    from gemctl.config.schema import DataPath
    from gemctl.data.drafting import Draft
    from gemctl.data.importing import Imported
    from gemctl.data.synthetic import SyntheticLog

HELP = "Import a raw log, write the synthetic one, or draft a feature spec for a Parquet file."


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    importing = actions.add_parser(
        "import", help="RecBole atomic files (*.inter, *.user, *.item) → train, valid and test Parquet with a spec"
    )
    importing.add_argument("source", metavar="SRC", help="folder with one *.inter file, or such a file")
    importing.add_argument("out", metavar="OUT", help="folder to write to")
    importing.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=COLUMN>=NUMBER",
        help="a task, may be repeated (default where there is a rating: liked=rating>=4, loved=rating>=5)",
    )
    importing.add_argument("--history", type=int, default=100, metavar="N", help="events kept a row (default: 100)")
    synth = actions.add_parser("synth", help="write the seeded synthetic click log")
    synth.add_argument("out", metavar="OUT", nargs="?", default="data/synthetic", help="folder (default: %(default)s)")
    for name, what in (
        ("rows", "training rows"),
        ("eval-rows", "evaluation rows"),
        ("users", "users"),
        ("items", "items"),
        ("seed", "seed"),
    ):
        synth.add_argument(f"--{name}", type=int, metavar="N", help=what)
    spec = actions.add_parser("spec", help="draft a feature spec for Parquet files")
    spec.add_argument("data", metavar="PATH", nargs="+", help="files, folders or globs, any fsspec URL")
    spec.add_argument("-o", "--out", metavar="SPEC.yaml", help="write it there instead of showing it")
    spec.add_argument("--label", action="append", default=[], metavar="COLUMN", help="a label column, may be repeated")


def run(args: argparse.Namespace) -> "Imported | SyntheticLog | Draft":
    if args.action == "import":
        return import_log(args.source, args.out, args.label, args.history)
    if args.action == "synth":
        sizes = {name: getattr(args, name) for name in ("rows", "eval_rows", "users", "items", "seed")}
        return synthesise(args.out, {name: size for name, size in sizes.items() if size is not None})
    return draft_spec(args.data, args.label, args.out)


def import_log(source: str, out: str, labels: list[str], history: int) -> "Imported":
    """Imports RecBole atomic files into folder `out`."""
    from gemctl.data.importing import import_recbole

    if history < 1:
        raise InputError(f"--history {history}: at least 1 event")
    _refuse_there(out, "train.parquet", "valid.parquet", "test.parquet", "spec.yaml", "vocabularies.json")
    return import_recbole(source, out, labels=labels, history=history)


def synthesise(out: str, sizes: dict[str, int]) -> "SyntheticLog":
    """Writes the synthetic log into folder `out`; `sizes` replaces defaults of the configuration."""
    from pydantic import TypeAdapter, ValidationError

    from gemctl.config.schema import SyntheticConfig
    from gemctl.data import synthetic

    try:
        config = TypeAdapter(SyntheticConfig).validate_python(sizes)
    except ValidationError as error:
        raise InputError([_wrong_size(str(e["loc"][0]), e["input"]) for e in error.errors()]) from error
    _refuse_there(out, "train.parquet", "eval.parquet", "spec.yaml")
    return synthetic.write(config, f"{out}/train.parquet", f"{out}/eval.parquet", f"{out}/spec.yaml")


def _refuse_there(out: str, *names: str) -> None:
    """InputError for files of these names in folder `out`, which would be replaced."""
    there = [f"{out}/{name}" for name in names if paths.exists(f"{out}/{name}")]
    if there:
        raise InputError([f"{path}: exists already; name another folder, or delete it" for path in there])


def _wrong_size(name: str, value: int) -> str:
    from gemctl.config.keys import find
    from gemctl.specs.json_schema import wrong

    return f"--{name.replace('_', '-')}: {wrong(find(('data', 'synthetic', name)) or {}, value)}"


def draft_spec(data: "DataPath", labels: list[str], out: str | None) -> "Draft":
    """Drafts a spec for the Parquet files of `data`; with `out` into a new file there."""
    from gemctl.data.drafting import draft

    if out is not None and paths.exists(out):
        raise InputError(f"{out}: exists already; give another name with -o, or delete it")
    found = draft(data, labels)
    if out is not None:
        with paths.writing(f"-o {out}"):
            Path(out).write_text(found.text, encoding="utf-8")
    return replace(found, path=out)
