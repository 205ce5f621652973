"""A run directory as a trained run leaves it, made from files alone: no torch, no ranks, a second at most.

run = saved_run(tmp_path, steps=[2, 4], topology.dp_replicate=2)
"""

from dataclasses import replace
from pathlib import Path

from gemctl.config.compose import compose, to_yaml
from gemctl.config.schema import Config
from gemctl.data.synthetic import ensure
from gemctl.durable import create, sync_file
from gemctl.launch.inputs import absolute_paths, record
from gemctl.plan.build import to_json
from gemctl.plan.job import planned
from gemctl.plan.state import saved_state
from gemctl.run.attempt import Attempt, Base, claim
from gemctl.run.directory import RunDir
from gemctl.run.inputs import write
from gemctl.run.manifest import Manifest, RunFacts, StoredObject, describe_file, folder_name, publish
from gemctl.run.rank_records import StageRecorder
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
    config = replace(config, data=absolute_paths(config.data))
    run = RunDir.create(config.run.root, config.run.name, ["gemctl", "train"])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=4, heartbeat=0.02)
    create(attempt.config, to_yaml(config))
    create(attempt.plan, to_json(planned(config)))
    write(record(config.data), attempt.path, run.path)
    attempt.write_base(Base(None, 0))
    StageRecorder(attempt, 0).enter("step", reached)
    attempt.write_end("failed", step=reached)
    for step in steps:
        save(run, attempt, step, config)
    return run


def save(run: RunDir, attempt: Attempt, step: int, config: Config) -> None:
    """Publishes a checkpoint whose manifest is that of the configuration's model, and its one file anything."""
    folder = run.checkpoints / folder_name(step, attempt.number)
    folder.mkdir()
    file = folder / "__0_0.distcp"
    file.write_bytes(bytes(range(100)))
    sync_file(file)
    shapes = saved_state(config, feature_spec.load(config.data.spec))
    objects = {key: StoredObject(list(shape), "float32", 4, "", 1, "1") for key, shape in shapes.items()}
    facts = RunFacts(4, {}, ["here"] * 4, "", "", 0, {})
    publish(folder, Manifest(step, attempt.number, facts, {}, objects, {file.name: describe_file(file)}))
