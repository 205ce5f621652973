"""Plays many scenarios, several at once, judges each, and prints its seed, scenario and outcome.

    make chaos                      # 220 scenarios
    make chaos SEED=17              # repeats one
    make chaos SEED=100 COUNT=50    # seeds 100 to 149

Each case is a process forked from one that has imported everything. Undisturbed runs come first, one per layout: every
other run must reach the same state.
"""

import argparse
import functools
import os
import pickle
import select
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemctl import process
from tests.chaos import commands
from tests.chaos.layouts import LAYOUTS, STEPS, prepare
from tests.chaos.scenario import KINDS, draw

COUNT = 220  # scenarios of a full run
LANES = 3  # concurrent cases: a case mostly waits
CONFIG = "chaos.yaml"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
WELL, RESUMED, REFUSED, BAD = "by itself", "by a resume", "refused", "WRONG"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case. `end`: whether its run reached the right state by itself or by a resume, was refused, or
    is wrong. `missed`: deeds that were impossible because the run ended before their moment.
    """

    seed: int
    kind: str
    end: str
    objections: list[str]
    missed: list[str]
    seconds: float
    cpu: float  # CPU seconds of all its processes
    text: str

    def report(self) -> str:
        """The scenario and its outcome as text."""
        lines = [self.text, f"  → {self.end} after {self.seconds:.1f} s ({self.cpu:.1f} s of CPU)"]
        lines += [f"    missed: {text}" for text in self.missed] + [
            f"    OBJECTION: {text}" for text in self.objections
        ]
        return "\n".join(lines)


def make_references(root: Path) -> dict[str, Path]:
    """The last checkpoint of an undisturbed run by layout; runs are made if missing."""
    homes = {name: root / "references" / name.replace(" ", "-") for name in LAYOUTS}
    if not (root / CONFIG).exists():
        prepare(root)
        words = {name: [f"run.root={home}", *LAYOUTS[name].words()] for name, home in homes.items()}
        calls = {name: functools.partial(_train, root, words[name]) for name in words}
        first = {"two": calls.pop("two")}  # writes the data
        for name, failed in [*in_forks(first, 1), *in_forks(calls, 2)]:
            if failed != "":
                raise RuntimeError(f"the undisturbed run on {name}: {failed}")
    return {name: next(home.glob(f"*/*/checkpoints/step_{STEPS}.a1")) for name, home in homes.items()}


def _train(root: Path, words: list[str]) -> str:
    """Runs `gemctl train` to its end; returns its error if it fails."""
    output = root / f"reference-{os.getpid()}"
    pid = commands.start(["train", str(root / CONFIG), "run.name=undisturbed", *words], output, ENVIRONMENT, root)
    return "" if os.waitpid(pid, 0)[1] == 0 else output.with_name(f"{output.name}.err").read_text()


def play_all(root: Path, seeds: Iterable[int], lanes: int = LANES) -> Iterator[Outcome]:
    """The outcome of each seed, in order of completion."""
    commands.preload()
    references = make_references(root)
    calls = {seed: functools.partial(_case, root, seed, references) for seed in seeds}
    for seed, outcome in in_forks(calls, lanes):
        yield outcome or _broken(seed, "the case's process died")


def in_forks(calls: Mapping[Any, Callable[[], Any]], lanes: int) -> Iterator[tuple[Any, Any]]:
    """Key and result of each call, made in a separate fork, `lanes` at a time; None if the process died."""
    waiting, running = list(calls), dict[int, tuple[Any, int]]()  # pipe → key, process
    while waiting or running:
        while waiting and len(running) < lanes:
            key = waiting.pop(0)
            pipe, pid = _fork(calls[key])
            running[pipe] = key, pid
        for pipe in select.select(running, [], [])[0]:
            key, pid = running.pop(pipe)
            with os.fdopen(pipe, "rb") as file:
                data = file.read()
            os.waitpid(pid, 0)
            yield key, pickle.loads(data) if data else None


def _fork(call: Callable[[], object]) -> tuple[int, int]:
    """Runs `call` in a fork; returns the pipe with its pickled result, and its process."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            process.die_with_parent(os.getppid())
            os.close(reader)
            with os.fdopen(writer, "wb") as file:
                file.write(pickle.dumps(call()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    return reader, pid


def _case(root: Path, seed: int, references: dict[str, Path]) -> Outcome:
    from tests.chaos.oracle import judge  # noqa: PLC0415
    from tests.chaos.play import play  # noqa: PLC0415

    scenario, start = draw(seed), time.monotonic()
    folder = root / "cases" / f"{seed}-{os.getpid()}"
    try:
        case = play(scenario, folder, root / CONFIG)
        said = judge(case, scenario, references)
    except Exception:
        return _broken(seed, traceback.format_exc())
    codes = [one.code for one in case.commands if one.words[0] != "stop"]
    well = codes[0] == 0 and codes.count(0) == 1
    end = BAD if said else REFUSED if scenario.refusal and codes[-1] != 0 else WELL if well else RESUMED
    if not said:
        shutil.rmtree(folder)
    ran = [f"    {one.words[0]}: exit code {one.code} after {one.seconds:.1f} s" for one in case.commands]
    text = "\n".join([scenario.text(), *ran])
    return Outcome(seed, scenario.kind, end, said, case.missed, time.monotonic() - start, sum(os.times()[:4]), text)


def _broken(seed: int, why: str) -> Outcome:
    scenario = draw(seed)
    return Outcome(seed, scenario.kind, BAD, [why], [], 0.0, 0.0, scenario.text())


def table(outcomes: Iterable[Outcome]) -> str:
    """A Markdown table of kinds and the outcomes of their cases."""
    counts = Counter((one.kind, end) for one in outcomes for end in (one.end, *(["missed"] if one.missed else [])))
    ends = [WELL, RESUMED, REFUSED, BAD, "missed"]
    lines = ["| kind | cases | right state by itself | after a resume | refused | wrong | of them: moment missed |"]
    lines.append("|---|" + "---:|" * 6)
    for kind in [*KINDS, "all"]:
        cells = [sum(counts[one, end] for one in KINDS if kind in {one, "all"}) for end in ends]
        lines.append(f"| {kind} | {sum(cells[:4])} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed (default: 0)")
    parser.add_argument("--count", type=int, help=f"how many (default: 1 with --seed, else {COUNT})")
    parser.add_argument("--lanes", type=int, default=LANES, help=f"cases at once (default: {LANES})")
    parser.add_argument("--folder", type=Path, help="where they run, and what is left of wrong ones (default: new)")
    args = parser.parse_args(argv)
    first, count = args.seed or 0, args.count or (COUNT if args.seed is None else 1)
    root = (args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    root.mkdir(parents=True, exist_ok=True)
    os.environ.update(ENVIRONMENT)
    start, outcomes = time.monotonic(), list[Outcome]()
    for outcome in play_all(root, range(first, first + count), args.lanes):
        outcomes.append(outcome)
        sys.stdout.write(outcome.report() + "\n")
        sys.stdout.flush()
    wrong = [outcome for outcome in outcomes if outcome.end == BAD]
    minutes, cpu = (time.monotonic() - start) / 60, sum(outcome.cpu for outcome in outcomes) / 60
    sys.stdout.write(f"\n{table(outcomes)}\n\n{len(outcomes)} cases in {minutes:.1f} minutes ({cpu:.1f} of CPU); ")
    sys.stdout.write(f"load {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores; {len(wrong)} wrong")
    sys.stdout.write(f": seeds {', '.join(str(one.seed) for one in wrong)}, in {root}/cases\n" if wrong else "\n")
    if not wrong and args.folder is None:
        shutil.rmtree(root)
    return 1 if wrong else 0
