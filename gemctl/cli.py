"""The command line: finds the command, parses its arguments, shows its value, turns errors into exit codes.

    gemctl --help

A command is an entry of COMMANDS in gemctl/commands/arguments.py and a module gemctl/commands/NAME.py with `run(args)`,
which returns a value for gemctl/render/show.py. The module is imported after the arguments are parsed, so help and
mistyped arguments cost little more than starting Python.
"""

import argparse
import errno
import importlib
import os
import sys
from typing import Any, NoReturn

from gemctl.commands.arguments import COMMANDS, sentence
from gemctl.credentials import refusal
from gemctl.errors import GemctlError, InputError, Interrupted, os_problem
from gemctl.suggest import did_you_mean
from gemctl.terminal import shown

EPILOG = "exit codes: 0 done or stopped, 1 the run failed, 2 bad input, 3 does not fit, 130 Ctrl-C, 143 SIGTERM"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises InputError, suggests the nearest option and wraps at a fixed width."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", lambda prog: argparse.HelpFormatter(prog, width=100, max_help_position=32))
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
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
        """Every option that `words` may use: those of this parser and of the subcommand that `words` name."""
        named = [leaf for leaf in self.leaves() if leaf.prog.split()[-1] in words]
        return sorted(
            {text for parser in [self, *named] for action in parser._actions for text in action.option_strings}
        )


def usage() -> str:
    """The text of `gemctl --help`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    head = ["usage: gemctl COMMAND [ARGUMENTS]", "", "Plan, train and resume recommendation foundation models.", ""]
    tail = ["", "gemctl COMMAND --help describes a command's arguments; docs/reference.md every key.", EPILOG]
    return "\n".join([*head, "commands:", *lines, *tail])


def parser_of(name: str) -> Parser:
    """The argument parser of one command."""
    command = COMMANDS[name]
    parser = Parser(prog=f"gemctl {name}", description=sentence(command.summary))
    command.add_arguments(parser)
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
    except BrokenPipeError:  # nobody reads our output any more
        return 1
    except OSError as error:
        if error.errno == errno.ENOENT and not _current_folder_exists():
            _say("error: the current folder has been deleted: change to another one (cd) and try again")
            return InputError.exit_code
        if (refused := os_problem(error)) is None:
            raise
        _say(f"error: {refused}")
        return GemctlError.exit_code


def _current_folder_exists() -> bool:
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
        from gemctl.render.show import show  # noqa: PLC0415

        show(value, as_json=args.json)
    return int(getattr(value, "exit_code", 0))


def _parse(parser: Parser, words: list[str]) -> argparse.Namespace:
    # Options may come between positional words; argparse cannot do that for parsers with subcommands.
    parse = parser.parse_known_intermixed_args if parser.leaves() == [parser] else parser.parse_known_args
    args, unknown = parse(words)
    if unknown:
        known = parser.options(words)
        raise InputError([f"{word}: unknown argument{did_you_mean(word.split('=')[0], known)}" for word in unknown])
    return args
