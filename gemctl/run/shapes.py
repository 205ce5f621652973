"""The schema of a run's JSON files: the type of every key that a command reads, checked whenever a file is read.

    problems("attempts/1/end.json", Path("…/end.json"), {"step": "three"})     # ["attempts/1/end.json: step='three' …"]

A shape is a type, a tuple of alternative shapes, a set of strings, a list with the shape of its items, a dict with the
shapes of keys (other keys are not checked, and a missing key is an error only when it is read), or one of `Each`,
`Items` and `Row`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 2**63
LAST_TIME = 253402300799.0  # the year 9999


@dataclass(frozen=True)
class Each:
    """An object with arbitrary keys whose values have this shape."""

    shape: Any


@dataclass(frozen=True)
class Items:
    """A list of at least `least` items, or of exactly `count`."""

    shape: Any
    least: int = 0
    count: int | None = None

    def text(self) -> str:
        exactly = "" if self.count is None else f" of {self.count}"
        return f"a list{exactly}" if self.count is not None or not self.least else "a list that is not empty"


@dataclass(frozen=True)
class Row:
    """A list with one item per shape."""

    shapes: tuple[Any, ...]


class Time:
    """Unix time in seconds, before the year 10000."""


WORDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Time: "a time", None: "null"}

STATS = Items(float, count=4)  # sum, mean, largest and the rank that has it
QUALITY = Each((int, float, None))
CAUSE = {
    "kind": str, "rank": (int, None), "stage": (str, None), "step": (int, None), "detail": str, "log": (str, None),
    "host": (str, None), "lines": [str], "others": (str, None), "text": str,
}  # fmt: skip
BASE = {"checkpoint": (str, None), "step": int, "passed_over": [int], "left_alone": [str]}
END = {
    "outcome": {"finished", "stopped", "preempted", "failed", "killed"}, "time": Time, "step": (int, None),
    "saved": int, "kind": (str, None), "signal": (str, None), "again": bool, "refusal": (str, None),
    "distrusts": str, "cause": CAUSE,
}  # fmt: skip
ROLE = {
    "name": str, "image": str, "entrypoint": str, "args": [str], "env": Each(str), "num_replicas": int,
    "max_retries": int, "retry_policy": str, "resource": {"cpu": (int, float), "gpu": int, "memMB": int},
}  # fmt: skip
APP = {"name": str, "roles": [ROLE]}
TOPOLOGY = Each(int)
PLACE = {"path": str, "from_run": (str, None)}
SOURCES = [{**PLACE, "glob": str, "files": Items({}, least=1)}]
METRICS = {
    "kind": str, "step": int, "time": Time, "loss": (float, None), "tasks": Each(QUALITY), "examples": float,
    "tokens": float, "flops": float, "seconds": float, "peak": (float, None), "ranks": int,
    "examples_per_s": (float, None), "tokens_per_s": (float, None), "effective_mfu": (float, None),
    "unknown_ids": Each(int), "skipped": int, "spikes": int, "passed_over": int, "uncounted": Each(int),
    "lr": (float, None), "grad_norm": (float, None),
}  # fmt: skip
LOSS = {
    "rank": int, "host": (str, None), "lost": float, "steps": int, "own": float, "others": float, "part": str,
}  # fmt: skip
LEDGER = {
    "kind": str, "step": int, "time": Time, "ranks": int, "wall": STATS, "parts": Each(STATS), "peak_rss": STATS,
    "start_rss": STATS, "gpu_allocated": STATS, "gpu_reserved": STATS,
    "traffic": {"steps": int, "sent": [Row((str, str, float, float))]},
    "stragglers": [LOSS], "rank": int, "host": (str, None), "ratio": float, "share": float, "part": str,
}  # fmt: skip
EVENT = {
    "event": str, "time": Time, "rank": int, "pid": int, "host": str, "seconds": float, "ok": bool, "message": str,
    "code": (int, None), "signal": (str, None), "killed": bool, "out_of_memory": bool,
}  # fmt: skip
STAGE = {
    "event": str, "stage": str, "step": (int, None), "time": Time, "pid": int, "type": str, "message": str,
    "trace": str, "result": str,
}  # fmt: skip
PLAN = {
    "name": str, "hash": str, "topology": TOPOLOGY, "tables": Each({"sharding": str, "rows": int, "dim": int}),
    "objects": [{"name": str, "place": str}], "classes": {"count": int, "listed": [{"bytes": Each(float)}]},
    "traffic": [{"axis": str, "collective": str, "messages": float, "bytes": float}],
    "fit": {"needs": [{"needed": int}]},
}  # fmt: skip
FILES: dict[str, Any] = {
    "run.json": {
        "run_id": str, "name": str, "created": Time, "command": [str], "directory": str, "host": str, "user": str,
        "git": ({"commit": (str, None), "changed": bool}, None), "versions": Each(str),
    },
    "claim.json": {
        "owner": str, "host": str, "pid": int, "time": Time, "nodes": int, "ranks_per_node": int, "heartbeat": float,
        "first_request": int,
    },
    "base.json": BASE,
    "end.json": END,
    "plan.json": PLAN,
    "mesh.json": {"topology": TOPOLOGY, "hosts": [{"name": str, "slots": int, "address": str}]},
    "request.json": {
        "time": Time, "pid": int, "first_attempt": int, "first_request": int, "kind": str, "app": APP,
        "base": (BASE, None), **APP,
    },
    "submitted.json": {"time": Time, "host": str, "run": str, "pid": int, "started": (int, float, None), "job": str},
    "inputs.json": {"spec": {**PLACE, "sha256": str}, "train": SOURCES, "eval": (SOURCES, None)},
    "loaded.json": {"time": Time, "seconds": float},
    "rolled_back.json": {"step": int, "what": str, "ranks": [int], "time": Time},
    "supervisor.jsonl": {"event": str, "attempt": int, **BASE, **END},
    "metrics.jsonl": METRICS,
    "ledger.jsonl": LEDGER,
    "rollup.jsonl": {"metrics": [METRICS], "ledger": [LEDGER], "read": Items(int, count=2)},
    "saves.jsonl": {
        "event": str, "step": int, "time": Time, "stall": float, "seconds": float, "staged": int, "fault": str,
        "tolerated": bool, "left": int,
    },
}  # fmt: skip
REQUEST = {"kind": str, "signal": (str, None), "time": Time, "host": str, "pid": int}


def problems(where: str, path: Path, value: dict[str, Any]) -> list[str]:
    """The values of the wrong type in `value`, read at `where` in the file `path`; one line each."""
    shape = _shape(path)
    return [] if shape is None else [f"{where}: {text}" for text in _wrong("", value, shape)]


def _shape(path: Path) -> Any:
    """The shape of the objects in a run's file; None if it is not checked."""
    if path.parent.name == "requests":
        return REQUEST
    if path.parent.name == "ranks":
        return STAGE
    if path.name.startswith("agent-"):
        return EVENT
    if path.name.startswith("times-"):
        return {"rank": int, "bytes": int, "time": Time}
    return FILES.get(path.name)


def _wrong(key: str, value: Any, shape: Any) -> list[str]:
    if isinstance(shape, dict) and isinstance(value, dict):
        return [
            text for name in shape.keys() & value.keys() for text in _wrong(_of(key, name), value[name], shape[name])
        ]
    if isinstance(shape, Each) and isinstance(value, dict):
        return [text for name, item in value.items() for text in _wrong(_of(key, name), item, shape.shape)]
    if isinstance(shape, Row) and isinstance(value, list) and len(value) == len(shape.shapes):
        pairs = enumerate(zip(value, shape.shapes, strict=True))
        return [text for at, (item, one) in pairs for text in _wrong(f"{key}[{at}]", item, one)]
    items = Items(shape[0]) if isinstance(shape, list) else shape
    if isinstance(items, Items) and isinstance(value, list):
        if len(value) < items.least or items.count not in {None, len(value)}:
            return [_must(key, value, items)]
        return [text for at, item in enumerate(value) for text in _wrong(f"{key}[{at}]", item, items.shape)]
    if isinstance(shape, tuple):
        tried = [_wrong(key, value, one) for one in shape]
        same = [
            found for found, one in zip(tried, shape, strict=True) if isinstance(one, dict) and isinstance(value, dict)
        ]
        return [] if [] in tried else same[0] if same else [_must(key, value, shape)]
    return [] if _fits(value, shape) else [_must(key, value, shape)]


def _fits(value: Any, shape: Any) -> bool:
    """For values that are neither an object nor a list."""
    if isinstance(shape, dict | list | Each | Items | Row):
        return False
    if isinstance(shape, set):
        return isinstance(value, str) and value in shape
    if shape is None or shape is bool or shape is str:
        return value is None if shape is None else isinstance(value, shape)
    if isinstance(value, bool) or not isinstance(value, int if shape is int else (int, float)):
        return False
    if shape is Time:
        return 0 <= value <= LAST_TIME
    return abs(value) < LARGEST if isinstance(value, int) else math.isfinite(value)


def _of(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _must(key: str, value: Any, shape: Any) -> str:
    shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}…"
    return f"{key or 'it'}={shown}: must be {_words(shape)}"


def _words(shape: Any) -> str:
    if isinstance(shape, tuple):
        return " or ".join(map(_words, shape))
    if isinstance(shape, set):
        return f"one of {', '.join(sorted(shape))}"
    if isinstance(shape, Row):
        return f"a list of {len(shape.shapes)}"
    if isinstance(shape, Items):
        return shape.text()
    return "an object" if isinstance(shape, dict | Each) else "a list" if isinstance(shape, list) else WORDS[shape]
