"""A run directory as a trained run leaves it, made from files alone: no torch, no ranks, a second at most.

run = saved_run(tmp_path, steps=[2, 4], topology.dp_replicate=2)
"""

from dataclasses import replace
from pathlib import Path

from gemctl.commands.configured import planned
from gemctl.commands.inputs import absolute, taken
from gemctl.config.compose import compose, to_yaml
from gemctl.config.schema import Config
from gemctl.data.synthetic import ensure
from gemctl.plan.build import to_json
from gemctl.plan.state import saved_state
from gemctl.run.attempt import Base, claim
from gemctl.run.directory import RunDir
from gemctl.run.inputs import write
from gemctl.run.manifest import Manifest, RunFacts, StoredObject, describe_file, folder_name, publish
from gemctl.run.stages import StageRecorder
from gemctl.specs import feature_spec

SIZES = ("users=50", "items=200", "rows=300", "eval_rows=50")
SMALL = [f"data.synthetic.{size}" for size in SIZES] + ["train.global_batch=70", "train.steps=9", "model.dim=8"]


def words(folder: Path) -> list[str]:
    """The small synthetic job below `folder`, on four ranks."""
    files = {"train": "train.parquet", "eval": "eval.parquet", "spec": "spec.yaml"}
    places = [f"data.{key}={folder}/data/{name}" for key, name in files.items()]
    return ["experiment=synthetic", *SMALL, *places, f"run.root={folder}/runs", "run.name=saved"]


def saved_run(folder: Path, steps: list[int], reached: int) -> RunDir:
    """Attempt 1 of a run with a checkpoint at each of `steps`, which then came to step `reached` and died."""
    config = compose(None, words(folder))
    ensure(config.data)
    return saved(config, steps, reached)


def saved(config: Config, steps: list[int], reached: int) -> RunDir:
    """The same of any configuration whose data are there."""
    config = replace(config, data=absolute(config.data))
    run = RunDir.create(config.run.root, config.run.name, ["gemctl", "train"])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=4, heartbeat=0.02)
    attempt.config.write_text(to_yaml(config))
    attempt.plan.write_text(to_json(planned(config)))
    write(taken(config.data), attempt.path, run.path)
    attempt.write_base(Base(None, 0))
    StageRecorder(attempt, 0).enter("step", reached)
    attempt.write_end("failed", step=reached)
    shapes = saved_state(config, feature_spec.load(config.data.spec))
    for step in steps:
        where = run.checkpoints / folder_name(step, 1)
        where.mkdir()
        (where / "__0_0.distcp").write_bytes(bytes(range(100)))
        objects = {key: StoredObject(list(shape), "float32", 4, "", 1, "1") for key, shape in shapes.items()}
        files = {"__0_0.distcp": describe_file(where / "__0_0.distcp")}
        publish(where, Manifest(step, 1, RunFacts(4, {}, ["here"] * 4, "", "", 0, {}), {}, objects, files))
    return run
