"""A plan in the terminal: the mesh host by host, the tables, every object's bytes, every axis's traffic; one screen.

gemctl plan experiment=synthetic
"""

from collections import defaultdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gemctl.plan.build import Plan
from gemctl.plan.fit import USABLE
from gemctl.plan.memory import HOST
from gemctl.plan.traffic import Traffic
from gemctl.render import mesh
from gemctl.render.tables import titled
from gemctl.units import DASH, binary, count, plural, si

CLASSES, TABLES = 3, 12
"""Most rank classes and tables that are shown; how many more there are is said."""


def plan(value: Plan) -> Group:
    """The plan as Rich tables."""
    return Group(
        _head(value),
        mesh.axes(value.mesh),
        *([mesh.hosts(value.topology, value.mesh)] if value.topology.world_size > 1 else []),
        _tables(value),
        _objects(value),
        _traffic(value),
        _notes(value),
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


def _tables(value: Plan) -> Table:
    table = titled("tables", "name", "lookup", "sharding", "rows", "dim", "rows a rank", "weights", "state", left=3)
    largest = sorted(value.tables.values(), key=lambda item: (-item.weight_bytes, item.name))
    for item in largest[:TABLES]:
        where = item.sharding.replace("_", "-")
        if item.sharding != "row_wise":
            last = item.first_rank + item.ranks - 1
            where += f" on {item.first_rank}" + (f"–{last}" if item.ranks > 1 else "")
        sizes = (binary(item.weight_bytes), binary(item.state_bytes))
        table.add_row(item.name, item.lookup, where, count(item.rows), str(item.dim), count(item.shard_rows), *sizes)
    if len(largest) > TABLES:
        table.caption = f"… and {plural(len(largest) - TABLES, 'table')} more, all smaller"
    return table


def _objects(value: Plan) -> Table:
    classes = value.classes.listed[:CLASSES]
    names = [f"rank {found.first_rank}" + (f" (×{found.ranks})" if found.ranks > 1 else "") for found in classes]
    table = titled("bytes a rank", "object", *names)
    table.add_column("how", justify="left", overflow="fold")
    for item in value.objects:
        mark = "≈ " if item.estimate else ""
        sizes = [binary(found.bytes[item.name]) for found in classes]
        table.add_row(item.name, *sizes, Text(mark + item.formula, style="dim"))
    note = "≈ is an estimate"
    if len(value.fit.needs) > 1:  # a pool of GPUs beside the hosts
        note += f"; in host memory: {', '.join(item.name for item in value.objects if item.place == HOST)}"
    table.add_row("total", *(binary(found.total) for found in classes), note, style="bold")
    if value.classes.count > CLASSES:
        table.caption = f"… and {plural(value.classes.count - CLASSES, 'rank class', 'rank classes')} more, all lighter"
    return table


def _traffic(value: Plan) -> Table:
    by_axis: dict[str, list[Traffic]] = defaultdict(list)
    for part in value.traffic:
        by_axis[part.axis].append(part)
    table = titled("sent by a rank in a step", "axis", "tier", "calls", "bytes", left=2)
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


def _notes(value: Plan) -> Text:
    lines = [_replication(value)] if value.tables else []
    lengths = [f"{name} {mean:.1f}" for name, mean in value.data.mean_events.items()]
    lines.append(f"mean events: {', '.join(lengths) or DASH} ({value.data.source})")
    example, step = si(value.compute.flops_per_example), si(value.compute.flops_per_step)
    lines.append(f"compute: {example}FLOP an example, {step}FLOP a step; step time and MFU: {DASH} until measured")
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
    found = value.replication
    text = f"tables: {binary(found.replica_bytes)} with optimizer state"
    if found.replicas > 1:
        text += f" in each of {found.replicas} replicas, which adds {binary(found.added_bytes)} a rank"
    return f"{text}; the fullest rank holds {found.imbalance:.2f} × the mean"
