"""Which keys a resumed run may change: each one freely, only with --allow, or not at all, with the reason.

    gemctl resume RUN launcher.ranks_per_node=2 optim.dense.lr=1e-4 --allow optim.dense.lr

RULES covers every key, and docs/reference.md shows it.
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
    """Applies to `key` and to all keys below it that have no rule of their own."""

    key: str
    kind: Kind
    reason: str


@dataclass(frozen=True)
class Change:
    """A key whose value a resumed run changes, or whose files have changed; `details`: how, one line each."""

    key: str
    before: Any
    after: Any
    rule: Rule
    details: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The key with its values, then the details."""
        same = self.before == self.after
        what = f"{self.after!r} has changed" if same else f"{self.before!r} → {self.after!r}"
        return [f"{self.key}: {what}", *(f"{self.key}: {detail}" for detail in self.details)]


LAYOUT = "the state is resharded; the curve stays the same up to rounding"
COURSE = "changes the curve from here on"
ROWS = "different rows from here on: some may be repeated, others skipped"
AVERAGE = "{} not change the state, except that table replicas are averaged first if optim.tables.sync_every > 1"
MODEL = "the saved state belongs to this model; to load what fits into another, start a run with checkpoint.warm_start"

RULES = (
    Rule("run", Kind.REFUSED, "the run's name and directory"),
    Rule("run.seed", Kind.REFUSED, "it determines the row order and every random draw"),
    Rule("run.access", Kind.REFUSED, "the mode of the run directory, which its owner can change: docs/security.md"),
    Rule("train.steps", Kind.FREE, "the last step does not affect the steps before it"),
    Rule("train.eval_every", Kind.FREE, AVERAGE.format("evaluations do")),
    Rule("train.log_every", Kind.FREE, "logging does not change the state"),
    Rule("train.accumulate", Kind.FREE, "the same sums in another order"),
    Rule("train.recompute", Kind.FREE, "the same values, computed twice"),
    Rule("train.nan", Kind.FREE, "affects only non-finite losses and gradients"),
    Rule("train.spike", Kind.FREE, "affects only loss spikes"),
    Rule("train.global_batch", Kind.ALLOW, "step s begins at row s · global_batch: " + ROWS),
    Rule("train", Kind.ALLOW, COURSE),
    Rule("recover", Kind.FREE, "failure handling does not change the state"),
    Rule("data.spec", Kind.ALLOW, "it defines the model's inputs and tables"),
    Rule("data.synthetic", Kind.REFUSED, "it defines the log in the files"),
    Rule("data.eval", Kind.FREE, "evaluation does not change the state"),
    Rule("data.prefetch", Kind.FREE, "the same batches, read earlier"),
    Rule("data", Kind.ALLOW, ROWS),
    Rule("model", Kind.REFUSED, MODEL),
    Rule("precision", Kind.ALLOW, COURSE),
    Rule("optim.tables.kind", Kind.REFUSED, "the saved state belongs to this optimizer"),
    Rule("optim", Kind.ALLOW, COURSE),
    Rule("topology.mp_replicate", Kind.ALLOW, "table replicas are updated with their own rows first: another curve"),
    Rule("topology", Kind.FREE, LAYOUT),
    Rule("cluster", Kind.FREE, LAYOUT),
    Rule("checkpoint.warm_start", Kind.REFUSED, "it applies only at the start of a run"),
    Rule("checkpoint", Kind.FREE, AVERAGE.format("saves do")),
    Rule("launcher", Kind.FREE, LAYOUT),
)

MOVED = Rule("data", Kind.FREE, "the same content in another place")
GROWN = Rule("data.train", Kind.FREE, "the rows up to here are the same; more follow them")


def rule_of(key: str) -> Rule:
    """The most specific rule that applies to `key`. KeyError if there is none."""
    matches = [rule for rule in RULES if key == rule.key or key.startswith(rule.key + ".")]
    if not matches:
        raise KeyError(key)
    return max(matches, key=lambda rule: len(rule.key))


def refuse_choices(words: list[str]) -> None:
    """InputError for each GROUP=CHOICE whose group a resumed run may not change."""
    problems = []
    for word in words:
        group = word.split("=")[0]
        if group == "experiment":
            problems.append(f"{word}: refused, an experiment is a whole configuration, and the run has one")
        elif group in GROUPS and rule_of(group).kind is Kind.REFUSED:
            problems.append(f"{word}: refused, {rule_of(group).reason}")
    if problems:
        raise InputError(problems)


def changes(before: Config, after: Config) -> list[Change]:
    """The keys whose values differ, in the schema's order."""
    old, new = (_flat(dataclasses.asdict(config), ()) for config in (before, after))
    keys = dict.fromkeys([*old, *new])
    return [Change(key, old.get(key), new.get(key), rule_of(key)) for key in keys if old.get(key) != new.get(key)]


def check_changes(found: list[Change], allowed: list[str]) -> None:
    """InputError for changes that are refused or need an `--allow` that is not given, and for unknown `--allow` keys.

    `allowed`: keys, or groups of them.
    """
    problems = [f"--allow {key}: no such key{did_you_mean_key(key)}" for key in allowed if key not in all_keys()]
    for change in found:
        what, *details = change.lines()
        if change.rule.kind is Kind.REFUSED:
            problems += [f"{what}: refused, {change.rule.reason}", *details]
        elif change.rule.kind is Kind.ALLOW and not covers(allowed, change.key):
            problems += [f"{what}: {change.rule.reason}; to change it anyway: --allow {change.key}", *details]
    if problems:
        raise InputError(problems)


def covers(allowed: list[str], key: str) -> bool:
    """True if `key` is one of `allowed`, or below one."""
    return any(key == one or key.startswith(one + ".") for one in allowed)


def _flat(value: Any, path: KeyPath) -> dict[str, Any]:
    if isinstance(value, dict) and not has_free_names(path):
        return {name: item for key, nested in value.items() for name, item in _flat(nested, (*path, key)).items()}
    return {dotted(path): value}
