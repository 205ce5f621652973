"""The progress of a run, read from its files: a live line on a terminal, elsewhere a plain one every 15 seconds.

    with Progress(steps=config.train.steps) as progress:
        progress.follow(attempt)       # repeatedly, as often as convenient

It writes to standard error, so standard output holds the command's result alone.
"""

import sys
import time
from types import TracebackType
from typing import IO, Any

from gemctl.run.attempt import Attempt
from gemctl.run.files import LogTail
from gemctl.terminal import console, shown
from gemctl.units import number, percent, rate

READ_EVERY = 0.2  # seconds between reads of the files
PLAIN_EVERY = 15.0  # seconds between plain lines
DOING = {
    "start": "joining the ranks",
    "build": "building the model",
    "load": "loading the checkpoint",
    "data": "training",
    "step": "training",
    "eval": "evaluating",
    "save": "saving",
    "close": "finishing",
}


class Progress:
    """Follows the newest attempt that it is given. `steps`: steps of the whole run."""

    def __init__(self, steps: int, out: IO[str] | None = None) -> None:
        self.steps = steps
        self._out = out or sys.stderr
        self._attempt: int | None = None
        self._metrics: LogTail | None = None
        self._stages: LogTail | None = None
        self._ledger: LogTail | None = None
        self._train: list[dict[str, Any]] = []  # the last lines, to estimate the speed
        self._stage = "launching"
        self._uncounted: set[str] = set()  # tasks that were noted as uncounted
        self._read_at = self._printed = float("-inf")
        self._last_line = ""
        self._live: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def note(self, text: str) -> None:
        """Shows a line permanently."""
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            self._print(text)

    def follow(self, attempt: Attempt) -> None:
        """Shows what the attempt has written since the last call."""
        now = time.monotonic()
        if now - self._read_at < READ_EVERY:
            return
        self._read_at = now
        self._read(attempt)
        if self._out.isatty():
            self._show_live()
        elif now - self._printed >= PLAIN_EVERY:
            self._printed = now
            self._print_state()

    def close(self) -> None:
        """Shows the final state and restores the terminal."""
        if self._live is not None:
            self._live.update(self.line(), refresh=True)
            self._live.stop()
            self._live = None
        elif self._attempt is not None:
            self._print_state()

    def line(self) -> str:
        """The current state in one line."""
        start = f"attempt {self._attempt}, " if self._attempt and self._attempt > 1 else ""
        if not self._train:
            return f"{start}{self._stage}"
        last = self._train[-1]
        parts = [f"{start}step {last['step']:,}/{self.steps:,}", *_measured(last)]
        if (left := self._left()) is not None:
            parts.append(f"{_clock(left)} left")
        return "  ".join([*parts, self._stage] if self._stage not in {"training", "launching"} else parts)

    def _read(self, attempt: Attempt) -> None:
        if attempt.number != self._attempt:
            self._attempt, self._train, self._stage = attempt.number, [], "launching"
            self._metrics, self._stages = LogTail(attempt.metrics), LogTail(attempt.rank_log(0))
            self._ledger = LogTail(attempt.ledger)
        if self._metrics is None or self._stages is None or self._ledger is None:
            return
        for line in self._ledger.new():
            if line["kind"] == "straggler":
                self.note(straggler(line))
        found = [line for line in self._metrics.new() if line["kind"] == "train"]
        for line in found:
            self._note_uncounted(line)
        self._train = [*self._train, *found][-5:]
        for event in self._stages.new():
            self._stage = DOING.get(event["stage"], event["stage"])

    def _note_uncounted(self, line: dict[str, Any]) -> None:
        """Notes, once per task, that no row counts for it in any step of the line."""
        for task in line.get("uncounted", {}):
            if line["tasks"][task]["logloss"] is None and task not in self._uncounted:
                self._uncounted.add(task)
                self.note(uncounted(task, line["step"]))

    def _left(self) -> float | None:
        """Seconds to the last step, at the speed of the last lines."""
        if len(self._train) < 2:
            return None
        first, last = self._train[0], self._train[-1]
        done = last["step"] - first["step"]
        return (last["time"] - first["time"]) / done * (self.steps - last["step"]) if done > 0 else None

    def _show_live(self) -> None:
        if self._live is None:
            from rich.live import Live  # noqa: PLC0415

            self._live = Live(console=console(self._out), auto_refresh=False)
            self._live.start()
        self._live.update(self._bar(), refresh=True)

    def _bar(self) -> Any:
        from rich.console import Group  # noqa: PLC0415
        from rich.progress_bar import ProgressBar  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        done = self._train[-1]["step"] if self._train else 0
        return Group(ProgressBar(total=self.steps, completed=done, width=60), Text(self.line()))

    def _print_state(self) -> None:
        """Prints the current state, unless it is unchanged."""
        if self.line() != self._last_line:
            self._last_line = self.line()
            self._print(self._last_line)

    def _print(self, text: str) -> None:
        self._out.write(shown(text) + "\n")
        self._out.flush()


def straggler(line: dict[str, Any]) -> str:
    """One line of text about the rank that the others wait for, from a line of ledger.jsonl."""
    on = f" on {line['host']}" if line["host"] else ""
    return (
        f"rank {line['rank']}{on} takes {line['ratio']:.1f} × the others' time, most of it in {line['part']}: "
        f"{line['share']:.0%} of all ranks' time is lost to it (step {line['step']:,})"
    )


def uncounted(task: str, step: int) -> str:
    """One line of text: no row counts for a task."""
    return f"step {step:,}: no row counts for task {task}: its label is null or masked in all, or the weight is 0"


def measured(line: dict[str, Any]) -> str:
    """One line of text for a line of metrics.jsonl, or for a straggler in ledger.jsonl."""
    step = f"step {line['step']:,}"
    match line["kind"]:
        case "train":
            return "  ".join([step, *_measured(line)])
        case "eval":
            return "  ".join([f"evaluation at {step}", f"NE {_nes(line)}", f"{line['seconds']:.1f} s"])
        case "straggler":
            return straggler(line)
        case kind:
            return f"{kind}, {step}"


def _measured(line: dict[str, Any]) -> list[str]:
    return [
        f"loss {number(line['loss'])}",
        f"NE {_nes(line)}",
        f"{rate(line['examples_per_s'])} examples/s",
        f"{rate(line['tokens_per_s'])} events/s",
        f"effective MFU {percent(line['effective_mfu'])}",
    ]


def _nes(line: dict[str, Any]) -> str:
    return ", ".join(f"{task} {number(quality['ne'])}" for task, quality in line["tasks"].items())


def _clock(seconds: float) -> str:
    """1:02:03, 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
