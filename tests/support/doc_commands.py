"""Finds the `gemctl …` command lines of README, docs, docstrings and comments, and says what is wrong with them.

Taken as they stand: lines of a ```console block behind a prompt, lines of a ```bash block and of a docstring, and
`inline code`, which may leave required arguments out (`gemctl resume`). Help texts come with docs/reference.md.
"""

import argparse
import ast
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gemctl import cli
from gemctl.config.compose import compose
from gemctl.config.overrides import expand
from gemctl.config.schema import Config
from gemctl.data.synthetic import spec_text
from gemctl.errors import InputError
from gemctl.plan.build import faults
from gemctl.specs import feature_spec

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "kernels").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+ )*gemctl [^`]+)`")
LINE = re.compile(r"^\s*(?:\$ )?((?:[A-Z_]+=\S+ )*gemctl [a-z-].*)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"^(KEY|GROUP)=|^(experiment|model)=[A-Z]+$")
FILE = re.compile(r"`((?:gemctl|tests|kernels|launchers|configs|constraints|docs|packaging)/[\w./*-]*)`")
NAMED = re.compile(r"`([A-Za-z_][\w.]*)` in `([\w/]+\.py)`")
EXAMPLE = re.compile(r"/[A-Z]+/|/foo\b")
LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
FAILS = re.compile(r"\s*(#\s*)?(error: |exit 2)")


@dataclass(frozen=True)
class Command:
    """One command line. `loose`: inline code, which may be incomplete; `fails`: shown with its error message."""

    file: str
    text: str
    loose: bool = False
    fails: bool = False


def all_commands() -> Iterator[Command]:
    """Every command line of the project's own texts."""
    for page in PAGES:
        yield from of_page(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
    for folder in ("gemctl", "launchers", "kernels"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield from of_module(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        yield from _inline(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))


def of_page(name: str, text: str) -> Iterator[Command]:
    """The command lines of a Markdown page."""
    for kind, block in FENCE.findall(text):
        if kind in {"bash", "console", ""}:
            yield from _lines(name, block if kind != "console" else _typed(block))
    yield from _inline(name, FENCE.sub("", text))


def of_module(name: str, text: str) -> Iterator[Command]:
    """The command lines of a module's docstrings and comments."""
    tree = ast.walk(ast.parse(text))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in tree if isinstance(node, documented)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    texts += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    for part in texts:
        yield from _lines(name, part)
        yield from _inline(name, part)


def _typed(block: str) -> str:
    """What was typed in a console block, with the first line of an error that follows as a comment."""
    lines = block.splitlines()
    kept = []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("$ "):
            kept.append(f"{line} # {after}" if FAILS.match(after) else line)
    return "\n".join(kept)


def _lines(name: str, text: str) -> Iterator[Command]:
    joined = re.sub(r"\\\n\s*", "", text)
    for found in LINE.findall(joined):
        code, _, comment = found.partition(" #")
        for part in re.split(r"\s*(?:&&|;)\s+", code):
            if re.match(r"(?:[A-Z_]+=\S+ )*gemctl ", part):
                yield Command(name, part.strip(), fails=bool(FAILS.match(comment)))


def _inline(name: str, text: str) -> Iterator[Command]:
    for found in INLINE.findall(text):
        yield Command(name, " ".join(found.split()), loose=True)


def dead_references(page: Path) -> list[str]:
    """Files of the repository (`gemctl/…`, `tests/…`), `names` in `files.py` and link targets that are not there."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = dict.fromkeys(path.rstrip("/") for path in FILE.findall(text) if not EXAMPLE.search(path))
    dead = [path for path in named if not any(ROOT.glob(path))]
    for name, path in NAMED.findall(text):
        word = re.escape(name.rsplit(".", 1)[-1])
        if path not in dead and not re.search(rf"\b{word}\b", (ROOT / path).read_text(encoding="utf-8")):
            dead.append(f"{name} in {path}")
    for target in LINK.findall(text):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in _anchors(linked)):
            dead.append(target)
    return [f"{page.name}: {target}" for target in dead]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Checker:
    """`folder` holds the user's files that the texts name (my.yaml, my_configs); compositions are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parsers: dict[str, cli.Parser] = {}
        self._results: dict[tuple[str, ...], list[str]] = {}

    def problems(self, command: Command) -> list[str]:
        """What is wrong with the command line; nothing where it is shown to fail and does."""
        name, *words = _words(command.text)
        found = self._problems(name, words, command.loose)
        if command.fails and name in {"train", "plan"}:  # other commands fail for what is in their files
            return [] if found else [f"{command.file}: {command.text}: is shown to fail but is right"]
        return [f"{command.file}: {command.text}: {problem}" for problem in found]

    def _problems(self, name: str, words: list[str], loose: bool) -> list[str]:
        if name in {"COMMAND", "VERB", "--help"}:
            return []
        if name not in cli.COMMANDS:
            return [f"no command {name!r}"]
        parser = self._parsers.setdefault(name, cli.parser_of(name))
        if "--help" in words:
            return []
        try:
            args = cli._parse(parser, words)
        except InputError as error:
            return [] if loose and _incomplete(parser, words, str(error)) else error.problems
        asked = getattr(args, "words", None) or getattr(args, "changes", [])
        lines = expand(asked) if getattr(args, "multirun", False) else [asked]
        return [problem for line in lines for problem in self._composed(line, getattr(args, "config_dir", None))]

    def _composed(self, words: list[str], config_dir: str | None) -> list[str]:
        """The problems of a configuration, up to what the plan says of it without its data."""
        overrides = [word for word in words if not PLACEHOLDER.search(word) and "=" in word]
        file = next((str(self.folder / word) for word in words if "=" not in word), None)
        asked = (file or "", config_dir or "", *overrides)
        if not overrides and file is None:
            return []
        if asked not in self._results:
            self._results[asked] = self._compose(file, overrides, config_dir)
        return self._results[asked]

    def _compose(self, file: str | None, overrides: list[str], config_dir: str | None) -> list[str]:
        try:
            config = compose(file, overrides, str(self.folder / config_dir) if config_dir else None)
            return faults(config, _spec(config)) if file is None else []
        except InputError as error:
            return error.problems


def _words(text: str) -> list[str]:
    """The words behind `gemctl`, without an ellipsis and with a number for N."""
    words = ["1" if word == "N" else word for word in shlex.split(text) if word != "…"]
    return words[words.index("gemctl") + 1 :]


def _incomplete(parser: cli.Parser, words: list[str], message: str) -> bool:
    """Whether inline code leaves out only what a reader adds: required arguments, or the value of an option."""
    if "required" in message or "expected one argument" in message:
        known = {text for leaf in [parser, *parser.leaves()] for text in _option_strings(leaf)}
        return all(word.split("=")[0] in known for word in words if word.startswith("-"))
    return False


def _option_strings(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings


def _spec(config: Config) -> feature_spec.FeatureSpec | None:
    """The feature spec of a synthetic log, or one that is in the repository; None for the user's own."""
    if config.data.synthetic is not None:
        return feature_spec.parse(spec_text(config.data.synthetic), config.data.spec)
    file = Path(config.data.spec)
    return feature_spec.load(str(file)) if file.is_file() else None
