"""The command line: finds the command, parses its arguments, shows its value, turns errors into exit codes.

    gemctl --help

Commands are imported only when used, so `gemctl --help` costs little more than starting Python. A command is a module
gemctl/commands/<name>.py with `HELP` (its summary), `arguments(parser)` and `run(args)`, which returns a value for
gemctl/render/show.py. Exit codes: 0, 1 the run failed, 2 bad input, 3 does not fit, 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import errno
import importlib
import os
import sys
from typing import Any, NoReturn

from gemctl.credentials import refusal
from gemctl.errors import FULL, GemctlError, InputError, Interrupted
from gemctl.terminal import shown

COMMANDS = {
    "train": "train a model as the configuration says",
    "plan": "show the mesh, the table shards and every byte of a configuration, and start nothing",
    "resume": "go on with a run from its newest verified checkpoint, on the same or another number of ranks",
    "supervise": "follow a submitted run's attempts here; batch scripts and --detach start it",
    "list": "list runs and what each is doing",
    "status": "say what a run is doing",
    "logs": "show what a run's processes said and did, the cause of a failure first",
    "stop": "ask a run to save and end",
    "report": "say what a run reached and where its time went",
    "eval": "score a data set with a checkpoint",
    "data": "import a raw log, write the synthetic one, or draft a feature spec for a Parquet file",
    "checkpoint": "list, verify, compare, export and prune checkpoints",
    "bench": "measure how fast kernels, layers and whole models are on this machine",
    "config": "export a configuration",
    "doctor": "check this machine and what is installed on it",
}
# What the system may refuse of a file by no fault of gemctl's.
REFUSED = {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ESTALE,
    errno.ENAMETOOLONG,
    errno.EMFILE,
    errno.ENFILE,
}
EPILOG = "exit codes: 0 done or stopped, 1 the run failed, 2 bad input, 3 does not fit, 130 Ctrl-C, 143 SIGTERM"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises InputError, offers the nearest option and wraps at a fixed width."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", lambda prog: argparse.HelpFormatter(prog, width=100, max_help_position=32))
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from gemctl.config.nearest import did_you_mean

            known = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), known) or f" (one of {', '.join(known)})"
            raise InputError(f"{self.prog}: {value!r}: unknown {action.metavar or action.dest}{near}")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            if action.type is not int:
                raise
            raise argparse.ArgumentError(action, f"must be an integer, not {text!r}") from error

    def leaves(self) -> "list[Parser]":
        """The parsers of the deepest subcommands, or this one."""
        nested = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [leaf for action in nested for parser in action.choices.values() for leaf in parser.leaves()] or [self]

    def options(self, words: list[str]) -> list[str]:
        """Every option that the command line `words` may have: of this parser and of the subcommand that it names."""
        named = [leaf for leaf in self.leaves() if leaf.prog.split()[-1] in words]
        return sorted(
            {text for parser in [self, *named] for action in parser._actions for text in action.option_strings}
        )


def usage() -> str:
    """The text of `gemctl --help`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items()]
    head = ["usage: gemctl COMMAND [ARGUMENTS]", "", "Plan, train and resume recommendation foundation models.", ""]
    tail = ["", "gemctl COMMAND --help tells a command's arguments; docs/reference.md has every key.", EPILOG]
    return "\n".join([*head, "commands:", *lines, *tail])


def parser_of(name: str) -> Parser:
    """The argument parser of one command."""
    module = importlib.import_module(f"gemctl.commands.{name}")
    parser = Parser(prog=f"gemctl {name}", description=module.HELP)
    module.arguments(parser)
    for leaf in parser.leaves():
        leaf.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command line; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except InputError as error:
        for problem in error.problems:
            _say(f"error: {problem}")
        return error.exit_code
    except Interrupted as stopped:
        _say(str(stopped))
        return stopped.exit_code
    except GemctlError as error:
        _say(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone
        return 1
    except OSError as error:
        if error.errno == errno.ENOENT and not _folder_is_there():
            _say("error: the current folder has been deleted: go to another one (cd) and try again")
            return InputError.exit_code
        if error.errno not in FULL and not (error.errno in REFUSED and error.filename):
            raise
        _say(f"error: {error.filename or 'a file'}: {os.strerror(error.errno)}")
        return GemctlError.exit_code


def _folder_is_there() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 (pathlib costs a help text half its time)
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    print(shown(text), file=sys.stderr)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in {"-h", "--help", "help"}:
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else InputError.exit_code
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        from gemctl.config.nearest import did_you_mean

        raise InputError(f"{name!r}: unknown command{did_you_mean(name, list(COMMANDS))}")
    if exposed := [f"{word}: {why}" for word in rest if (why := refusal(word)) is not None]:
        raise InputError(list(map(shown, exposed)))
    parser = parser_of(name)
    try:
        args = _parse(parser, rest)
    except SystemExit as done:  # --help has been printed
        return int(done.code or 0)
    args.command_line = ["gemctl", *words]
    value = importlib.import_module(f"gemctl.commands.{name}").run(args)
    if value is not None:
        from gemctl.render.show import show

        show(value, as_json=args.json)
    return int(getattr(value, "exit_code", 0))


def _parse(parser: Parser, words: list[str]) -> argparse.Namespace:
    # Options may stand between positional words; argparse cannot do that for parsers with subcommands.
    parse = parser.parse_known_intermixed_args if parser.leaves() == [parser] else parser.parse_known_args
    args, unknown = parse(words)
    if unknown:
        from gemctl.config.nearest import did_you_mean

        known = parser.options(words)
        raise InputError([f"{word}: unknown argument{did_you_mean(word.split('=')[0], known)}" for word in unknown])
    return args
