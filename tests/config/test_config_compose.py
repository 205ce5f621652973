"""Composition: what stands over what, and that a configuration survives being written and read."""

import json
from pathlib import Path

import jsonschema
import pytest

from gemctl.config.compose import compose, from_yaml, json_schema, to_yaml
from gemctl.config.groups import Groups
from gemctl.config.keys import GROUPS
from gemctl.errors import InputError
from gemctl.render.show import plain


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_without_arguments_it_is_the_synthetic_job_on_four_ranks() -> None:
    config = compose(None, [])
    assert (config.launcher.nodes, config.launcher.ranks_per_node) == (1, 4)
    assert (config.topology.dp_replicate, config.topology.dp_shard) == (2, "auto")
    assert (config.topology.mp_replicate, config.topology.mp_shard) == (1, "auto")
    assert config.topology.table_sharding == "row_wise"
    assert config.train.global_batch == 4096
    assert config.data.synthetic is not None
    assert config.data.train == "data/synthetic/train.parquet"


def test_later_layers_stand_over_earlier_ones(tmp_path: Path) -> None:
    file = write(tmp_path, "my.yaml", "train:\n  steps: 7\n  accumulate: 2\nrun: {name: mine}\n")
    config = compose(file, ["experiment=ml100k", "train.accumulate=3"])
    assert config.data.train == "data/ml100k/train.parquet"  # the group
    assert config.train.global_batch == 512  # the experiment's choice
    assert config.train.steps == 7  # the file over the experiment
    assert config.run.name == "mine"
    assert config.train.accumulate == 3  # the command line over the file


def test_a_file_chooses_groups_and_the_command_line_chooses_over_it(tmp_path: Path) -> None:
    file = write(tmp_path, "my.yaml", "defaults:\n  - override /precision: bf16\n  - topology: fsdp\n  - _self_\n")
    assert compose(file, []).precision.dense == "bf16"
    assert compose(file, []).topology.dp_replicate == 1
    assert compose(file, ["precision=fp32"]).precision.dense == "fp32"


def test_config_dir_adds_choices(tmp_path: Path) -> None:
    write(tmp_path, "model/wide.yaml", "defaults: [gem_nano]\ndim: 64\n")
    write(
        tmp_path,
        "experiment/mine.yaml",
        "# @package _global_\ndefaults:\n  - override /model: wide\ntrain: {steps: 3}\n",
    )
    config = compose(None, ["experiment=mine"], str(tmp_path))
    assert (config.model.dim, config.model.name, config.train.steps) == (64, "gem_nano", 3)


def test_interpolations_see_the_whole_configuration(tmp_path: Path) -> None:
    file = write(tmp_path, "my.yaml", "train: {steps: 50, eval_every: '${train.steps}'}\n")
    config = compose(file, ["run.name=${model.name}-${train.steps}", "train.steps=60"])
    assert (config.run.name, config.train.eval_every) == ("gem_nano-60", 60)
    assert compose(None, ["run.seed=${train.accumulate}"]).run.seed == 1  # a default of the schema, in no file


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=ml100k", "topology.tables={user: table_wise}", "cluster.memory_gb=12.5"],
        ["data.spec='it is: #1'", "optim.dense.eps=1e-12", "run.root='1e-3'"],
        [r"data.spec='\${literal} \\\${x}'", "run.root='2024-01-01'", "run.name='007'", "data.eval=null"],
    ],
)
def test_export_round_trips(overrides: list[str], tmp_path: Path) -> None:
    config = compose(None, overrides)
    text = to_yaml(config)
    assert from_yaml(text, "config.yaml") == config
    assert compose(write(tmp_path, "full.yaml", text), []) == config
    assert from_yaml(text, "config.yaml").optim.dense.eps == config.optim.dense.eps


def test_composed_values_are_typed_as_the_schema_says() -> None:
    config = compose(None, ["train.steps=1e3", "optim.dense.lr=1", "optim.dense.betas=[0,0.5]"])
    assert isinstance(config.train.steps, int) and config.train.steps == 1000
    assert isinstance(config.optim.dense.lr, float)
    assert all(isinstance(beta, float) for beta in config.optim.dense.betas)


def test_every_choice_of_every_group_is_valid_and_says_what_it_is() -> None:
    groups = Groups()
    for group in GROUPS:
        for choice in groups.choices(group):
            needed = ["data.spec=s.yaml", "data.train=t.parquet"] if choice == "parquet" else []
            config = compose(None, [f"{group}={choice}", *needed])
            jsonschema.validate(json.loads(json.dumps(plain(config))), json_schema())


def test_the_json_schema_knows_every_key_and_forbids_all_others() -> None:
    def walk(node: dict[str, object]) -> None:
        if node.get("type") == "object" and "properties" in node:
            assert node["additionalProperties"] is False
        for below in node.values():
            for item in below if isinstance(below, list) else [below]:
                if isinstance(item, dict):
                    walk(item)

    walk(json_schema())
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_a_runs_configuration_stands_alone() -> None:
    config = from_yaml("data: {spec: s.yaml, train: t.parquet}\n", "config.yaml")
    assert config.topology.dp_replicate == 1  # the schema's default, not a group's
    with pytest.raises(InputError, match=r"config.yaml:1: defaults: not in a standalone"):
        from_yaml("defaults: [{model: gem_nano}]\ndata: {spec: s, train: t}\n", "config.yaml")
