"""The plan: mesh, table shards, every byte and every collective of a configuration. No torch, no process, no GPU.

    gemctl plan experiment=synthetic

A plan holds rules and rank classes, so its JSON is small at any world size, and its hash depends on the
configuration, the feature spec and the data's footers only; only `fit` depends on the machine.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemctl.cluster.host import Host
from gemctl.config.schema import Config
from gemctl.errors import DoesNotFit, InputError
from gemctl.mesh.groups import AxisGroups, axis_groups
from gemctl.mesh.topology import Topology, check, resolve
from gemctl.plan.data_facts import DataFacts, data_facts
from gemctl.plan.dense import Unit, expert_modules, units
from gemctl.plan.fit import Fit, Memory, cluster_memory, explain, judge, nearest_change, needs
from gemctl.plan.memory import Inputs, MemoryObject, RankClasses, memory_objects, rank_classes
from gemctl.plan.tables import Replication, TablePlan, place, replication
from gemctl.plan.traffic import Traffic, traffic
from gemctl.specs.contradictions import contradictions
from gemctl.specs.count import dense_parameters, step_flops
from gemctl.specs.data import FeatureSpec
from gemctl.specs.model import experts

FORMAT = 1
MOST, MOST_OF_A_RANK = 1 << 58, 1 << 45
"""Parameters or bytes in total, and bytes of one object on one rank, beyond which a plan is refused uncounted."""


@dataclass(frozen=True)
class UnitPlan:
    """One FSDP2 unit: the parameters gathered together, and one rank's padded share of them."""

    name: str
    parameters: int
    shard_elements: int


@dataclass(frozen=True)
class Compute:
    """Useful FLOPs, forward 1 and backward 2, at the data's mean lengths. Time is measured, not estimated."""

    flops_per_example: float
    flops_per_step: float


@dataclass(frozen=True)
class Plan:
    """The value of plan.json. Bytes everywhere."""

    name: str
    topology: Topology
    mesh: list[AxisGroups]
    tables: dict[str, TablePlan]
    replication: Replication
    units: list[UnitPlan]
    objects: list[MemoryObject]
    classes: RankClasses
    traffic: list[Traffic]
    compute: Compute
    data: DataFacts
    fit: Fit
    hash: str
    format: int = FORMAT

    @property
    def fits(self) -> bool | None:
        """None where the cluster's memory is unknown."""
        return self.fit.fits

    @property
    def exit_code(self) -> int:
        """Exit code of `gemctl plan`: 3 if it does not fit."""
        return DoesNotFit.exit_code if self.fits is False else 0


def build(config: Config, spec: FeatureSpec, host: Host | None = None) -> Plan:
    """The plan of a configuration, checked against `host` (default: this one) if the cluster group sets no memory.

    Raises InputError with all violations, and DoesNotFit for numbers beyond any machine. A plan that merely does not
    fit is returned: `check_fits` refuses it.
    """
    if problems := faults(config, spec):
        raise InputError(problems)
    facts = data_facts(config.data, spec)
    given = _inputs(config, spec, facts)
    objects = _countable(memory_objects(given))
    classes = rank_classes(objects, given.topology)
    shown: dict[str, Any] = {
        "name": config.run.name,
        "topology": given.topology,
        "mesh": axis_groups(given.topology),
        "tables": dict(given.tables),
        "replication": replication(given.tables, given.topology),
        "units": [_unit(unit) for unit in given.units],
        "objects": objects,
        "classes": classes,
        "traffic": traffic(given),
        "compute": _compute(given),
        "data": facts,
    }
    fit = _fit(given, objects, classes, cluster_memory(config, host))
    return Plan(**shown, fit=fit, hash=_hash({**shown, "format": FORMAT}))


def faults(config: Config, spec: FeatureSpec | None) -> list[str]:
    """Every reason why a configuration has no plan; without `spec`, those that need none."""
    topology, violations = check(config.topology, config.launcher, experts(config.model))
    problems = [violation.message for violation in violations]
    if spec is None:
        return problems
    problems += contradictions(config.model, spec)
    if topology is not None:
        try:
            place(spec, config, topology)
        except InputError as error:
            problems += error.problems
    return problems


def check_fits(plan: Plan) -> None:
    """Raises DoesNotFit (exit 3) if a pool of memory overflows."""
    if plan.fits is False:
        raise DoesNotFit(plan.fit.message)


def to_json(plan: Plan) -> str:
    """The text of plan.json."""
    return json.dumps(dataclasses.asdict(plan), indent=1) + "\n"


def _inputs(config: Config, spec: FeatureSpec, facts: DataFacts) -> Inputs:
    topology = resolve(config.topology, config.launcher, experts(config.model))
    tables = place(spec, config, topology)
    names = [module.name for module in expert_modules(config.model, spec)]
    sharded = units(dense_parameters(config.model, spec), topology, names)
    given = Inputs(config, spec, topology, sharded, tables, facts)
    parameters = sum(unit.parameters for unit in given.units)
    largest = max((table.weight_bytes for table in tables.values()), default=0)
    if parameters > MOST or largest > MOST:  # int64 would overflow
        raise DoesNotFit(f"the dense part has {parameters:.1e} parameters, the largest table {largest:.1e} bytes")
    return given


def _countable(objects: list[MemoryObject]) -> list[MemoryObject]:
    huge = [item for item in objects if item.largest > MOST_OF_A_RANK]
    if huge:
        text = "; ".join(f"{item.name}: {item.largest:.1e} bytes per rank ({item.formula})" for item in huge)
        raise DoesNotFit(f"more than any machine has: {text}")
    return objects


def _unit(unit: Unit) -> UnitPlan:
    return UnitPlan(unit.name, unit.parameters, unit.padded)


def _compute(given: Inputs) -> Compute:
    lengths = {name: np.array([round(mean)]) for name, mean in given.facts.mean_events.items()}
    example = float(step_flops(given.config.model, given.spec, 1, lengths))
    return Compute(example, example * given.config.train.global_batch)


def _fit(given: Inputs, objects: list[MemoryObject], classes: RankClasses, memory: Memory) -> Fit:
    found = needs(objects, given.topology, given.config, memory)
    verdict = judge(found)
    if verdict is not False:
        return Fit(verdict, found)

    def fits(changed: Config) -> bool:
        other = _inputs(changed, given.spec, given.facts)
        here = changed.launcher.kind == "local" and (memory.shared_by > 1 or changed.cluster.memory_gb is None)
        shared = changed.launcher.nodes if here else 1
        pools = dataclasses.replace(memory, shared_by=shared)
        return judge(needs(memory_objects(other), other.topology, changed, pools)) is not False

    change = nearest_change(given.config, fits)
    return Fit(False, found, explain(found, classes.listed[0], objects, change))


def _hash(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()
