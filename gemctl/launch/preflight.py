"""What `gemctl resume` will load, move and lose, determined before any rank is started; nothing is written.

    gemctl resume RUN launcher.ranks_per_node=2 --dry-run

The checkpoint's files are hashed, its manifest is compared with the tensors that the model will have, and its attempt's
plan with the new one. A mismatch stops here rather than in the ranks.
"""

from dataclasses import asdict, dataclass
from typing import Any

from gemctl.config.resuming import Change
from gemctl.config.schema import Config
from gemctl.errors import InputError
from gemctl.plan.build import Plan
from gemctl.plan.state import saved_state
from gemctl.run.base import from_scratch, newest_verified
from gemctl.run.conclusion import reference
from gemctl.run.directory import RunDir, cut_files
from gemctl.run.files import read_log, read_whole
from gemctl.run.manifest import Checkpoint, KindCount, Manifest, count_kinds, number_after, read
from gemctl.specs.data import FeatureSpec


@dataclass(frozen=True)
class Load:
    """Tensors of one kind. `before`, `after`: how they were sharded when saved, and how they will be; `moved`: whether
    these differ. `checked`: how many have a content hash that the ranks will verify (all, unless an older gemctl saved
    them)."""

    kind: str
    objects: int
    bytes: int
    checked: int
    before: str
    after: str
    moved: bool


@dataclass(frozen=True)
class Preflight:
    """The outcome of a resume. `checkpoint` None: from step 0. `passed_over`: newer checkpoints that are not used, and
    why; `left_alone`: the names of those of them that were published; `lost`: steps and rows that are repeated or
    skipped; `cut`: files that a power loss has truncated; `notes`: other remarks for the user."""

    run: str
    attempt: int
    checkpoint: str | None
    step: int
    steps: int
    ranks_before: int | None
    ranks: int
    loads: list[Load]
    passed_over: list[str]
    left_alone: list[str]
    changes: list[Change]
    lost: list[str]
    cut: list[str]
    notes: list[str]


def preflight(
    run: RunDir,
    before: Config,
    config: Config,
    spec: FeatureSpec,
    plan: Plan,
    changed: list[Change],
    notes: list[str],
    restart: bool = False,
) -> Preflight:
    """Determines the outcome of a resume. `restart`: from step 0, ignoring checkpoints. InputError if no checkpoint is
    usable, if its tensors are not the model's, or if no step is left to do."""
    choice = from_scratch(run) if restart else newest_verified(run)
    checkpoint = choice.checkpoint
    step = checkpoint.step if checkpoint else 0
    _refuse_done(run, step, config)
    manifest = read(checkpoint.path) if checkpoint else None
    if checkpoint and manifest:
        _refuse_other_tensors(checkpoint, manifest, config, spec)
    return Preflight(
        run=str(run.path),
        attempt=number_after(run, run.last_attempt()),
        checkpoint=checkpoint.path.name if checkpoint else None,
        step=step,
        steps=config.train.steps,
        ranks_before=manifest.facts.world if manifest else None,
        ranks=plan.topology.world_size,
        loads=_loads(run, manifest, plan) if manifest else [],
        passed_over=choice.passed_over,
        left_alone=choice.left_alone,
        changes=changed,
        lost=_lost(run, step, before, config),
        cut=cut_files(run),
        notes=notes,
    )


def _refuse_done(run: RunDir, step: int, config: Config) -> None:
    if step >= config.train.steps:
        raise InputError(
            f"{run.run_id}: has completed step {step} of train.steps={config.train.steps}; "
            f"to train further: gemctl resume {reference(run)} train.steps={2 * step}"
        )


def _refuse_other_tensors(checkpoint: Checkpoint, manifest: Manifest, config: Config, spec: FeatureSpec) -> None:
    """The checkpoint must hold exactly the tensors of the model and its optimizers."""
    wanted, where = saved_state(config, spec), checkpoint.path
    problems = [f"{where}: {key} is not in the checkpoint" for key in wanted if key not in manifest.objects]
    for key, stored in manifest.objects.items():
        if key not in wanted:
            problems.append(f"{where}: {key} is in the checkpoint, but the model has no such tensor")
        elif tuple(stored.shape) != wanted[key]:
            problems.append(f"{where}: {key} is {stored.shape}, the model needs {list(wanted[key])}")
    if problems:
        raise InputError(problems)


def _loads(run: RunDir, manifest: Manifest, plan: Plan) -> list[Load]:
    file = run.attempt(manifest.attempt).plan
    old: dict[str, Any] = read_whole(file) or {}
    new = asdict(plan)
    counts = count_kinds(manifest.objects)
    return [_load(kind, counted, old, new) for kind, counted in counts.items()]


def _load(kind: str, counted: KindCount, old: dict[str, Any], new: dict[str, Any]) -> Load:
    describe = _tables if "table" in kind else _dense
    before, after = describe(old) if old else "unknown: its plan is missing", describe(new)
    moved = before != after or ("table" in kind and _shards(old) != _shards(new))
    return Load(kind, counted.objects, counted.bytes, counted.checked, before, after, moved)


def _dense(plan: dict[str, Any]) -> str:
    return _degrees(plan, ("dp_replicate", "dp_shard", "ep"))


def _degrees(plan: dict[str, Any], axes: tuple[str, ...]) -> str:
    return " × ".join(f"{axis} {plan['topology'][axis]}" for axis in axes if plan["topology"][axis] > 1) or "one rank"


def _tables(plan: dict[str, Any]) -> str:
    kinds = [table["sharding"] for table in plan["tables"].values()]
    shares = ", ".join(f"{kinds.count(kind)} {kind.replace('_', '-')}" for kind in dict.fromkeys(sorted(kinds)))
    return f"{_degrees(plan, ('mp_replicate', 'mp_shard'))}: {shares}"


def _shards(plan: dict[str, Any]) -> dict[str, list[Any]]:
    """How each table is sharded, and over which ranks of its group."""
    return {
        name: [table[part] for part in ("sharding", "first_rank", "ranks") if part in table]
        for name, table in plan.get("tables", {}).items()
    }


def _lost(run: RunDir, step: int, before: Config, config: Config) -> list[str]:
    found = []
    reached = max((_reached(run, attempt.number) for attempt in run.attempts()), default=0)
    if reached > step:
        found.append(f"steps {step + 1} to {reached} are repeated: they are in no valid checkpoint")
    old, new = step * before.train.global_batch, step * config.train.global_batch
    if old != new:
        what = "are repeated" if new < old else "are skipped"
        found.append(f"rows {min(old, new):,} to {max(old, new):,} of the data's order {what}: train.global_batch")
    return found


def _reached(run: RunDir, attempt: int) -> int:
    """Steps that the attempt has completed, by rank 0's record."""
    lines = read_log(run.attempt(attempt).rank_log(0))
    steps = [line["step"] for line in lines if line["stage"] in {"data", "step", "save"} and line["step"] is not None]
    return max(steps, default=0)
