"""Writes the import graph of gemctl's parts into docs/architecture.md, between two markers.

    python -m gemctl.architecture        # a part of `make docs`

A part is a package of gemctl, or a single module beside the packages. The picture has the packages, without arrows
that others imply; the table under it has every import between parts.
"""

import re
import tomllib
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- written by `make docs` -->", "<!-- end -->"


def parts() -> nx.DiGraph:
    """An edge from each part to each part that one of its modules imports; names without `gemctl.`."""
    graph = grimp.build_graph("gemctl", cache_dir=None)
    found = nx.DiGraph()
    found.add_nodes_from(sorted(name.split(".")[1] for name in graph.find_children("gemctl")))
    for importer in sorted(graph.modules - {"gemctl"}):
        for imported in graph.find_modules_directly_imported_by(importer) - {"gemctl"}:
            found.add_edge(importer.split(".")[1], imported.split(".")[1])
    found.remove_edges_from(list(nx.selfloop_edges(found)))
    return found


def packages() -> list[str]:
    """The parts that are folders."""
    return sorted(path.parent.name for path in (ROOT / "gemctl").glob("*/__init__.py"))


def torch_free() -> set[str]:
    """The parts that import-linter keeps free of torch (pyproject.toml)."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    forbidden = next(contract for contract in contracts if contract["type"] == "forbidden")
    return {module.removeprefix("gemctl.") for module in forbidden["source_modules"]}


def arrows(graph: nx.DiGraph) -> list[tuple[str, str]]:
    """The edges without those that longer paths imply; inside a cycle, all of them."""
    condensed = nx.condensation(graph)
    component = condensed.graph["mapping"]
    kept = set(nx.transitive_reduction(condensed).edges)
    pairs = ((a, b, component[a], component[b]) for a, b in graph.edges)
    return sorted((a, b) for a, b, above, below in pairs if above == below or (above, below) in kept)


def picture() -> str:
    """The picture (Mermaid) and the table."""
    graph, folders = parts(), packages()
    free = [name for name in folders if name in torch_free()]
    lines = ["```mermaid", "flowchart TD"]
    for title, members in ("torch-free", free), ("with torch", [name for name in folders if name not in free]):
        lines += [f'  subgraph "{title}"', *(f"    {name}" for name in members), "  end"]
    lines += [f"  {above} --> {below}" for above, below in arrows(graph.subgraph(folders))]
    lines += ["```", "", "| package or module | imports |", "| --- | --- |"]
    lines += [f"| `{name}` | {', '.join(sorted(graph[name])) or '–'} |" for name in sorted(graph)]
    return "\n".join(lines)


def page() -> str:
    """The text of docs/architecture.md with the graph as it is now."""
    between = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    return between.sub(lambda _: f"{BEGIN}\n\n{picture()}\n\n{END}", PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
