"""What a command would run: the configuration as YAML, the plan as tables, and what `train --dry-run` would launch.

gemctl plan experiment=synthetic
"""

import shlex
from collections import defaultdict
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gemctl.config.compose import to_yaml
from gemctl.config.schema import Config
from gemctl.launch.submit import DryRun
from gemctl.mesh.groups import AxisGroups, Ranks, groups
from gemctl.mesh.topology import Topology
from gemctl.plan.build import Plan
from gemctl.plan.fit import USABLE
from gemctl.plan.memory import HOST
from gemctl.plan.traffic import Traffic
from gemctl.render.checkpoint import warm_start
from gemctl.units import DASH, abbreviated, binary, count, plural, si

CLASSES, TABLES, HOSTS, FIRST_HOSTS, GROUPS = 3, 12, 8, 4, 2
"""Rank classes, embedding tables and hosts that are shown at most; of more hosts the first ones and the last; of an
axis's groups the first ones and the last."""


def config(value: Config) -> str:
    """All keys of a configuration."""
    return to_yaml(value).rstrip("\n")


def dry_run(value: DryRun) -> list[Any]:
    """The plan, then each role of the request, then what the scheduler would be given."""
    warm = [Text(warm_start(value.warm_start))] if value.warm_start is not None else []
    form = [] if value.form is None else ["", value.form.rstrip()]
    lines = ["", *(line for role in value.request["roles"] for line in _role(role)), *form]
    return [Group(plan(value.plan), *warm), "\n".join(lines)]


def _role(role: dict[str, Any]) -> list[str]:
    environment = [f"    {name}={shlex.quote(text)}" for name, text in sorted(role["env"].items())]
    command = shlex.join([role["entrypoint"], *role["args"]])
    return [f"would launch {role['num_replicas']} × {role['name']}:", *environment, f"    {command}"]


def plan(value: Plan) -> Group:
    """The mesh by host, the tables, the memory of every object, the traffic of every axis."""
    return Group(
        _head(value),
        axes(value.mesh),
        *([hosts(value.topology, value.mesh)] if value.topology.world_size > 1 else []),
        _tables(value),
        _memory(value),
        _traffic(value),
        _summary(value),
    )


def _head(value: Plan) -> Text:
    topology = value.topology
    parameters = sum(unit.parameters for unit in value.units)
    rows = sum(table.rows for table in value.tables.values())
    return Text(
        f"plan {value.hash[:12]} of {value.name}: {topology.world_size} ranks, dense {topology.dp_replicate} × "
        f"{topology.dp_shard}, tables {topology.mp_replicate} × {topology.mp_shard}; {count(parameters)} dense "
        f"parameters in {plural(len(value.units), 'unit')}, {count(rows)} table rows"
    )


def axes(mesh: list[AxisGroups]) -> Table:
    """The axes of degree > 1: their groups, and how many hosts a group spans; those of degree 1 in one row."""
    table = _titled("mesh: process groups per axis", "axis", "degree", "groups")
    table.add_column("ranks of each group", justify="left", overflow="fold")
    table.add_column("a group spans", justify="left")
    for axis in mesh:
        if axis.degree > 1:
            lists = [f"[{abbreviated(axis.ranks(group))}]" for group in range(min(axis.groups, GROUPS))]
            lists += [] if axis.groups <= GROUPS + 1 else ["…"]
            lists += [] if axis.groups <= GROUPS else [f"[{abbreviated(axis.ranks(axis.groups - 1))}]"]
            table.add_row(axis.axis, f"{axis.degree:,}", f"{axis.groups:,}", " ".join(lists), _span(axis))
    if ones := ", ".join(axis.axis for axis in mesh if axis.degree == 1):
        table.add_row(ones, "1")
    return table


def hosts(topology: Topology, mesh: list[AxisGroups]) -> Table:
    """Every host's ranks, and the numbers of the groups that they belong to."""
    shown = [axis for axis in mesh if axis.degree > 1]
    table = _titled("process groups per host", "host", "ranks", *(axis.axis for axis in shown), left=99)
    host_count = -(-topology.world_size // topology.ranks_per_node)
    numbers = {axis.axis: _group_of(groups(topology)[axis.axis]) for axis in shown}
    for host in range(host_count):
        if host_count > HOSTS and FIRST_HOSTS <= host < host_count - 1:
            if host == FIRST_HOSTS:
                table.add_row(f"… {host_count - FIRST_HOSTS - 1:,} more")
            continue
        first, stop = host * topology.ranks_per_node, min((host + 1) * topology.ranks_per_node, topology.world_size)
        cells = (abbreviated(sorted(set(number[first:stop].tolist()))) for number in numbers.values())
        table.add_row(f"host{host}", abbreviated(list(range(first, stop))), *cells)
    return table


def _span(axis: AxisGroups) -> str:
    fewest, most = axis.hosts
    return plural(most, "host") if fewest == most else f"{fewest} to {plural(most, 'host')}"


def _group_of(rows: Ranks) -> Ranks:
    """int64 [world]: the number of each rank's group."""
    numbers = np.empty(rows.size, np.int64)
    numbers[rows] = np.arange(len(rows))[:, None]
    return numbers


def _tables(value: Plan) -> Table:
    table = _titled("tables", "name", "lookup", "sharding", "rows", "dim", "rows per rank", "weights", "state", left=3)
    largest = sorted(value.tables.values(), key=lambda item: (-item.weight_bytes, item.name))
    for item in largest[:TABLES]:
        where = item.sharding.replace("_", "-")
        if item.sharding != "row_wise":
            last = item.first_rank + item.ranks - 1
            where += f" on {item.first_rank}" + (f"–{last}" if item.ranks > 1 else "")
        sizes = (binary(item.weight_bytes), binary(item.state_bytes))
        table.add_row(item.name, item.lookup, where, count(item.rows), str(item.dim), count(item.shard_rows), *sizes)
    if len(largest) > TABLES:
        table.caption = f"… and {plural(len(largest) - TABLES, 'smaller table')}"
    return table


def _memory(value: Plan) -> Table:
    classes = value.classes.listed[:CLASSES]
    names = [f"rank {one.first_rank}" + (f" (×{one.ranks})" if one.ranks > 1 else "") for one in classes]
    table = _titled("memory per rank", "object", *names)
    table.add_column("how", justify="left", overflow="fold")
    for item in value.objects:
        mark = "≈ " if item.estimate else ""
        sizes = [binary(one.bytes[item.name]) for one in classes]
        table.add_row(item.name, *sizes, Text(mark + item.formula, style="dim"))
    note = "≈: estimate"
    if len(value.fit.needs) > 1:  # GPUs beside the hosts
        note += f"; in host memory: {', '.join(item.name for item in value.objects if item.place == HOST)}"
    table.add_row("total", *(binary(one.total) for one in classes), note, style="bold")
    if value.classes.count > CLASSES:
        more = plural(value.classes.count - CLASSES, "rank class", "rank classes")
        table.caption = f"… and {more} that need less"
    return table


def _traffic(value: Plan) -> Table:
    by_axis: dict[str, list[Traffic]] = defaultdict(list)
    for part in value.traffic:
        by_axis[part.axis].append(part)
    table = _titled("sent per rank and step", "axis", "tier", "calls", "bytes", left=2)
    table.add_column("collectives", justify="left", overflow="fold")
    for axis, parts in by_axis.items():
        kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for part in parts:
            kinds[part.collective][0] += part.messages
            kinds[part.collective][1] += part.bytes
        text = ", ".join(f"{calls} {kind} {binary(size)}" for kind, (calls, size) in kinds.items())
        calls, size = sum(part.messages for part in parts), sum(part.bytes for part in parts)
        table.add_row(axis, parts[0].tier.value, str(calls), binary(size), Text(text, style="dim"))
    return table


def _summary(value: Plan) -> Text:
    lines = [_replication(value)] if value.tables else []
    lengths = [f"{name} {mean:.1f}" for name, mean in value.data.mean_events.items()]
    lines.append(f"mean events: {', '.join(lengths) or DASH} ({value.data.source})")
    example, step = si(value.compute.flops_per_example), si(value.compute.flops_per_step)
    lines.append(f"compute: {example}FLOP per example, {step}FLOP per step; step time and MFU: {DASH} until measured")
    for need in value.fit.needs:
        usable = None if need.available is None else int(USABLE * need.available)
        unknown = f"unknown: set cluster.{'gpu' if 'GPU' in need.pool else 'memory_gb'}"
        verdict = {True: "fits", False: "DOES NOT FIT", None: unknown}[need.fits]
        lines.append(f"{need.pool}: {binary(need.needed)} of {binary(usable)} usable: {verdict}")
        lines += [need.note] if need.note else []
    if value.fit.message:
        lines.append(value.fit.message)
    return Text("\n".join(lines))


def _replication(value: Plan) -> str:
    tables = value.replication
    text = f"tables: {binary(tables.replica_bytes)} with optimizer state"
    if tables.replicas > 1:
        text += f" in each of {tables.replicas} replicas, which adds {binary(tables.added_bytes)} per rank"
    return f"{text}; the fullest rank holds {tables.imbalance:.2f} × the mean"


def _titled(title: str, *columns: str, left: int = 1) -> Table:
    """A table without lines whose first `left` columns are text; the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    return table
