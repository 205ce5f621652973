"""What the runs of the chaos suite train: a tiny model with experts, tables and attention on 2, 3 or 4 ranks.

The layouts of a family give the same curve up to rounding, so a run may be resumed on any other of them.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

FILES = {"spec": "spec.yaml", "train": "train.parquet", "eval": "eval.parquet"}
STEPS = 8
EVERY = 2  # steps between saves
DATA = {"users": 50, "items": 200, "rows": 300, "eval_rows": 50}
CONFIG = {
    "data": {"synthetic": DATA},
    "train": {"global_batch": 30, "steps": STEPS, "log_every": 4, "eval_every": 3},
    "model": {
        "name": "tiny",
        "dim": 8,
        "layers": [
            {
                "sequence": {"kind": "kunlun", "ffn_hidden": 8},
                "summary": {"kind": "pma", "tokens": 2},
                "interaction": {
                    "kind": "wukong_experts",
                    "experts": 2,
                    "tokens": 4,
                    "fm_tokens": 2,
                    "lc_tokens": 2,
                    "rank": 4,
                    "hidden": [16],
                },
            }
        ],
    },
    "optim": {"dense": {"lr": 1e-3, "warmup": 4}, "tables": {"lr": 0.02}},
    "checkpoint": {"every": EVERY},
    "recover": {"heartbeat": 0.1, "watchdog": 60.0},
}


@dataclass(frozen=True)
class Layout:
    """A number of ranks and how the model is distributed over them. `optimizer`: of the tables."""

    name: str
    family: str
    world: int
    dp_replicate: int = 1
    ep: int = 1
    mp_replicate: int = 1
    tables: str = "{}"
    optimizer: str = "rowwise_adagrad"

    def words(self) -> list[str]:
        """The command-line overrides for this layout."""
        return [
            f"launcher.ranks_per_node={self.world}",
            f"topology.dp_replicate={self.dp_replicate}",
            f"topology.ep={self.ep}",
            f"topology.mp_replicate={self.mp_replicate}",
            f"topology.tables={self.tables}",
            f"optim.tables.kind={self.optimizer}",
        ]


# With table replicas AdaGrad's state depends on which rows a replica sees, so such layouts are not interchangeable;
# with sgd, tables are exact for the global batch in any layout.
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("two", "one replica", 2),
        Layout("three", "one replica", 3, tables="{user: table_wise}"),
        Layout("four", "one replica", 4, dp_replicate=2, ep=2),
        Layout("replicas", "replicas", 4, ep=2, mp_replicate=2),
        Layout("pair", "sgd", 2, dp_replicate=2, mp_replicate=2, optimizer="sgd"),
        Layout("two by two", "sgd", 4, dp_replicate=2, mp_replicate=2, tables="{tag: table_wise}", optimizer="sgd"),
    )
}


def prepare(root: Path) -> None:
    """Writes the configuration file that every run starts with."""
    files = {key: str(root / "data" / name) for key, name in FILES.items()}
    config = {**CONFIG, "data": {**CONFIG["data"], **files}, "run": {"root": str(root / "runs")}}  # type: ignore[dict-item]
    (root / "chaos.yaml").write_text(yaml.safe_dump(config))
