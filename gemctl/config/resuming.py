"""What a resumed run may change: every key of the configuration is free, allowed on request, or refused, with a reason.

    gemctl resume RUN launcher.ranks_per_node=2 optim.dense.lr=1e-4 --allow optim.dense.lr

RULES is the only list; docs/reference.md shows it, and a test checks that it speaks of every key.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gemctl.config.keys import GROUPS, all_keys, did_you_mean_key, has_free_names
from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.specs.yaml_file import KeyPath, dotted


class Kind(StrEnum):
    """What `gemctl resume` does with a changed key."""

    FREE = "free"
    ALLOW = "with --allow"
    REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """Holds for `key` and, if it is a group, for all keys below it that have no rule of their own."""

    key: str
    kind: Kind
    reason: str


@dataclass(frozen=True)
class Change:
    """A key whose value a resumed run changes, or whose files have changed: `details` says in what, a line each."""

    key: str
    before: Any
    after: Any
    rule: Rule
    details: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people: the key and its values, then the details."""
        same = self.before == self.after
        what = f"{self.after!r} has changed" if same else f"{self.before!r} → {self.after!r}"
        return [f"{self.key}: {what}", *(f"{self.key}: {detail}" for detail in self.details)]


LAYOUT = "the state is resharded; the curve stays the same up to rounding"
COURSE = "changes the curve from here on"
ROWS = "other rows from here on: some may come twice, others not at all"
AVERAGE = "{} not touch the state, but with optim.tables.sync_every > 1 the tables' replicas are averaged for them"
MODEL = "the saved state is this model's; to take over what fits, start a run with checkpoint.warm_start"

RULES = (
    Rule("run", Kind.REFUSED, "names the run and where it lies"),
    Rule("run.seed", Kind.REFUSED, "the order of the rows and every random draw follow from it"),
    Rule("run.access", Kind.REFUSED, "it is the mode of the run's folder, and its owner's to change: docs/security.md"),
    Rule("train.steps", Kind.FREE, "how far the run goes does not change how it gets there"),
    Rule("train.eval_every", Kind.FREE, AVERAGE.format("evaluations do")),
    Rule("train.log_every", Kind.FREE, "logs do not touch the state"),
    Rule("train.accumulate", Kind.FREE, "the same sums in another order"),
    Rule("train.recompute", Kind.FREE, "the same values, made twice"),
    Rule("train.nan", Kind.FREE, "matters only where a loss or a gradient is not finite"),
    Rule("train.spike", Kind.FREE, "matters only where a loss is a spike"),
    Rule("train.global_batch", Kind.ALLOW, "step s begins at row s · global_batch: " + ROWS),
    Rule("train", Kind.ALLOW, COURSE),
    Rule("recover", Kind.FREE, "how failures are met does not touch the state"),
    Rule("data.spec", Kind.ALLOW, "says what the model's inputs and tables are"),
    Rule("data.synthetic", Kind.REFUSED, "says which log the files hold"),
    Rule("data.eval", Kind.FREE, "evaluations do not touch the state"),
    Rule("data.prefetch", Kind.FREE, "the same batches, earlier"),
    Rule("data", Kind.ALLOW, ROWS),
    Rule("model", Kind.REFUSED, MODEL),
    Rule("precision", Kind.ALLOW, COURSE),
    Rule("optim.tables.kind", Kind.REFUSED, "the saved state is that optimizer's"),
    Rule("optim", Kind.ALLOW, COURSE),
    Rule("topology.mp_replicate", Kind.ALLOW, "replicas of tables update with their own rows first: another curve"),
    Rule("topology", Kind.FREE, LAYOUT),
    Rule("cluster", Kind.FREE, LAYOUT),
    Rule("checkpoint.warm_start", Kind.REFUSED, "counts at the start of a run alone"),
    Rule("checkpoint", Kind.FREE, AVERAGE.format("saves do")),
    Rule("launcher", Kind.FREE, LAYOUT),
)

MOVED = Rule("data", Kind.FREE, "the same content at another place")
GROWN = Rule("data.train", Kind.FREE, "the rows up to here are the same, and others follow them")


def rule_of(key: str) -> Rule:
    """The rule of the longest key that `key` is or lies below. KeyError if none speaks of it."""
    matches = [rule for rule in RULES if key == rule.key or key.startswith(rule.key + ".")]
    if not matches:
        raise KeyError(key)
    return max(matches, key=lambda rule: len(rule.key))


def refuse_choices(words: list[str]) -> None:
    """InputError for each GROUP=CHOICE whose group a resumed run keeps as it is, by one line for the group."""
    problems = []
    for word in words:
        group = word.split("=")[0]
        if group == "experiment":
            problems.append(f"{word}: refused, it chooses a whole configuration, and the run has one")
        elif group in GROUPS and rule_of(group).kind is Kind.REFUSED:
            problems.append(f"{word}: refused, {rule_of(group).reason}")
    if problems:
        raise InputError(problems)


def changes(before: Config, after: Config) -> list[Change]:
    """Every key whose value differs, in the order of the schema."""
    old, new = (_flat(dataclasses.asdict(config), ()) for config in (before, after))
    keys = dict.fromkeys([*old, *new])
    return [Change(key, old.get(key), new.get(key), rule_of(key)) for key in keys if old.get(key) != new.get(key)]


def check_changes(found: list[Change], allowed: list[str]) -> None:
    """InputError for each change that is refused, or that needs `--allow` and has none, and for a wrong `--allow`.

    `allowed`: keys, or groups of them.
    """
    problems = [f"--allow {key}: no such key{did_you_mean_key(key)}" for key in allowed if key not in all_keys()]
    for change in found:
        what, *details = change.lines()
        if change.rule.kind is Kind.REFUSED:
            problems += [f"{what}: refused, {change.rule.reason}", *details]
        elif change.rule.kind is Kind.ALLOW and not covers(allowed, change.key):
            problems += [f"{what}: {change.rule.reason}; if you want that: --allow {change.key}", *details]
    if problems:
        raise InputError(problems)


def covers(allowed: list[str], key: str) -> bool:
    """True if `key` is one of `allowed` or lies in such a group."""
    return any(key == one or key.startswith(one + ".") for one in allowed)


def _flat(value: Any, path: KeyPath) -> dict[str, Any]:
    if isinstance(value, dict) and not has_free_names(path):
        return {name: item for key, nested in value.items() for name, item in _flat(nested, (*path, key)).items()}
    return {dotted(path): value}
