"""Calls of functions that need torch, each in a Python process of its own: the command line itself imports no torch.

    found = call("gemctl.checkpoint.diff:compare", Comparison, a=Path("…"), b=Path("…"))

Arguments and result are plain values, paths and dataclasses; pydantic makes them of JSON by their annotations. The
process gets its arguments on stdin and writes its reply to stdout; whatever else the function prints goes to stderr.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from gemctl import env
from gemctl.errors import GemctlError, InputError, os_problem
from gemctl.process import FORK_SAFE, describe_exit, die_with_parent, python

Result = TypeVar("Result")


def call(function: str, kind: type[Result], **arguments: Any) -> Result:
    """What `function`, given as "module:name", returns for `arguments`, as a `kind`.

    Raises the function's InputError or GemctlError; GemctlError if its process dies.
    """
    reply = json.loads(_in_process(function, json.dumps(arguments, default=_plain)))
    if "problems" in reply:
        problems, code = reply["problems"], reply["exit_code"]
        raise InputError(problems) if code == InputError.exit_code else GemctlError("\n".join(problems))
    return TypeAdapter(kind).validate_python(reply["result"])


def _in_process(function: str, request: str) -> str:
    """Runs `answer` in a process that lives no longer than this one.

    It has a session of its own, so Ctrl-C reaches this process alone, which ends it on the way out.
    """
    env.keep_compiled_code_private()
    done = subprocess.run(
        python("-m", "gemctl.torch_call", function),
        input=request,
        stdout=subprocess.PIPE,
        env=os.environ | FORK_SAFE,
        encoding="utf-8",
        check=False,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    if done.returncode != 0:
        how = describe_exit(done.returncode)
        where = "" if done.returncode == -signal.SIGKILL else "; its messages are above"  # SIGKILL leaves none
        raise GemctlError(f"the process of {function} failed ({how}){where}")
    return done.stdout


def answer(function: str, request: str) -> str:
    """Calls `function` with the JSON object `request`; returns {"result": …}, or {"problems": […], "exit_code": …}."""
    try:
        work = _resolve(function)
        given = json.loads(request)
        annotations = inspect.signature(work, eval_str=True).parameters
        arguments = {name: TypeAdapter(annotations[name].annotation).validate_python(given[name]) for name in given}
        result = work(**arguments)
        return json.dumps({"result": result}, default=_plain)
    except GemctlError as error:
        problems = error.problems if isinstance(error, InputError) else str(error).splitlines()
        return json.dumps({"problems": problems, "exit_code": error.exit_code})
    except OSError as error:
        if (problem := os_problem(error)) is None:
            raise
        return json.dumps({"problems": [problem], "exit_code": GemctlError.exit_code})


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else dataclasses.asdict(value)


def _resolve(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def main() -> None:
    """Answers one call: the function's name is the argument, the request is on stdin."""
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with reply:
        reply.write(answer(sys.argv[1], sys.stdin.read()))


if __name__ == "__main__":
    main()
