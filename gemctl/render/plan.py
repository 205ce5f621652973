"""A plan in the terminal: the mesh host by host, the tables, every object's bytes, every axis's traffic; one screen.

gemctl plan experiment=synthetic
"""

from collections import defaultdict

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gemctl.mesh.axes import Axis
from gemctl.mesh.groups import groups, nominal_hosts
from gemctl.mesh.topology import Topology
from gemctl.plan.build import Plan
from gemctl.plan.fit import USABLE
from gemctl.plan.traffic import Traffic
from gemctl.render.units import DASH, binary, count, si

HOSTS, CLASSES, TABLES = 4, 3, 12
"""Most hosts, rank classes and tables that are shown; how many more there are is said."""


def plan(value: Plan) -> Group:
    """The plan as Rich tables."""
    return Group(
        _head(value),
        _mesh(value.topology),
        _tables(value),
        _objects(value),
        _traffic(value),
        _notes(value),
    )


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def _head(value: Plan) -> Text:
    topology = value.topology
    parameters = sum(unit.parameters for unit in value.units)
    rows = sum(table.rows for table in value.tables.values())
    return Text(
        f"plan {value.hash[:12]} of {value.name}: {topology.world_size} ranks, dense {topology.dp_replicate} × "
        f"{topology.dp_shard}, tables {topology.mp_replicate} × {topology.mp_shard}; {count(parameters)} dense "
        f"parameters in {_plural(len(value.units), 'unit')}, {count(rows)} table rows"
    )


def _mesh(topology: Topology) -> Table:
    """Ranks by host; below each rank, for every axis of degree > 1, the number of its group."""
    found = groups(topology)
    axes = [axis for axis in Axis if topology.degree(axis) > 1]
    ones = ", ".join(axis for axis in Axis if axis not in axes)
    hosts = nominal_hosts(topology)
    table = _table("mesh: the group of every rank", "axis", "degree")
    for host in hosts[:HOSTS]:
        table.add_column(host.name, no_wrap=True)
    first = range(0, topology.world_size, topology.ranks_per_node)[:HOSTS]
    places = [range(start, start + topology.ranks_per_node) for start in first]
    table.add_row("rank", "", *(_cells(list(ranks)) for ranks in places))
    for axis in axes:
        group_of = np.empty(topology.world_size, np.int64)
        group_of[found[axis]] = np.arange(len(found[axis]))[:, None]
        cells = (_cells(group_of[ranks].tolist()) for ranks in places)
        table.add_row(axis, str(topology.degree(axis)), *cells)
    if ones:
        table.add_row(ones, "1")
    if len(hosts) > HOSTS:
        table.caption = f"… and {_plural(len(hosts) - HOSTS, 'host')} more"
    return table


def _cells(numbers: list[int]) -> str:
    """Numbers in columns of equal width; a host of many ranks shows its first 8."""
    shown = "".join(f"{number:>5}" for number in numbers[:8])
    return shown + (" …" if len(numbers) > 8 else "")


def _tables(value: Plan) -> Table:
    table = _table("tables", "name", "lookup", "sharding", "rows", "dim", "rows a rank", "weights", "state", left=3)
    largest = sorted(value.tables.values(), key=lambda item: (-item.weight_bytes, item.name))
    for item in largest[:TABLES]:
        where = item.sharding.replace("_", "-")
        if item.sharding != "row_wise":
            last = item.first_rank + item.ranks - 1
            where += f" on {item.first_rank}" + (f"–{last}" if item.ranks > 1 else "")
        sizes = (binary(item.weight_bytes), binary(item.state_bytes))
        table.add_row(item.name, item.lookup, where, count(item.rows), str(item.dim), count(item.shard_rows), *sizes)
    if len(largest) > TABLES:
        table.caption = f"… and {_plural(len(largest) - TABLES, 'table')} more, all smaller"
    return table


def _objects(value: Plan) -> Table:
    classes = value.classes.listed[:CLASSES]
    names = [f"rank {found.first_rank}" + (f" (×{found.ranks})" if found.ranks > 1 else "") for found in classes]
    table = _table("bytes a rank", "object", *names)
    table.add_column("how", justify="left", overflow="fold")
    for item in value.objects:
        mark = "≈ " if item.estimate else ""
        sizes = [binary(found.bytes[item.name]) for found in classes]
        table.add_row(item.name, *sizes, Text(mark + item.formula, style="dim"))
    table.add_row("total", *(binary(found.total) for found in classes), "≈ is an estimate", style="bold")
    if value.classes.count > CLASSES:
        table.caption = (
            f"… and {_plural(value.classes.count - CLASSES, 'rank class', 'rank classes')} more, all lighter"
        )
    return table


def _traffic(value: Plan) -> Table:
    by_axis: dict[str, list[Traffic]] = defaultdict(list)
    for part in value.traffic:
        by_axis[part.axis].append(part)
    table = _table("sent by a rank in a step", "axis", "tier", "calls", "bytes", left=2)
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
        verdict = {True: "fits", False: "DOES NOT FIT", None: "unknown: set cluster.gpu"}[need.fits]
        lines.append(f"{need.pool}: {binary(need.needed)} of {binary(usable)} usable: {verdict}")
    if value.fit.message:
        lines.append(value.fit.message)
    return Text("\n".join(lines))


def _replication(value: Plan) -> str:
    found = value.replication
    text = f"tables: {binary(found.replica_bytes)} with optimizer state"
    if found.replicas > 1:
        text += f" in each of {found.replicas} replicas, which adds {binary(found.added_bytes)} a rank"
    return f"{text}; the fullest rank holds {found.imbalance:.2f} × the mean"


def _plural(number: int, word: str, many: str = "") -> str:
    return f"{number:,} {word if number == 1 else many or word + 's'}"
