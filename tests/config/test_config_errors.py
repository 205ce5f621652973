"""Bad configuration: every problem in one go, each with its place and the nearest right word."""

from pathlib import Path

import pytest

from gemctl.cli import main
from gemctl.config.compose import compose, from_yaml
from gemctl.config.keys import all_keys, did_you_mean_key
from gemctl.errors import InputError
from gemctl.suggest import did_you_mean


def problems(overrides: list[str], file: str | None = None, config_dir: str | None = None) -> list[str]:
    with pytest.raises(InputError) as caught:
        compose(file, overrides, config_dir)
    return caught.value.problems


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.dimm=64", "model.dimm=64: unknown key 'model.dimm'; did you mean model.dim?"),
        ("modle.dim=64", "modle.dim=64: unknown key 'modle.dim'; did you mean model.dim?"),
        ("modeldim=64", "modeldim=64: unknown key 'modeldim'; did you mean model.dim"),
        ("modle=gem_nano", "modle=gem_nano: unknown key 'modle'; did you mean model?"),
        ("train.lr=1", "train.lr=1: unknown key 'train.lr'; did you mean optim.dense.lr or optim.tables.lr?"),
        ("dense.lr=1", "dense.lr=1: unknown key 'dense.lr'; did you mean optim.dense.lr"),
        ("model=gem_nanu", "model=gem_nanu: group model has no choice 'gem_nanu'; did you mean gem_nano?"),
        ("model=64", "model=64: group model has no choice '64' (choices: gem_1gpu, gem_host, gem_nano, "),
        ("data.order=shufled", 'data.order=shufled: must be time or shuffled, not "shufled"; did you mean shuffled?'),
        ("train.steps=0", "train.steps=0: must be an integer ≥ 1, not 0"),
        ("train.steps=2.5", "train.steps=2.5: must be an integer ≥ 1, not 2.5"),
        ("train.steps=true", "train.steps=true: must be an integer ≥ 1, not true"),
        ("train.steps=null", "train.steps=null: must be an integer ≥ 1, not null"),
        ("train.steps='5'", "train.steps='5': must be an integer ≥ 1, not \"5\""),
        ("run.seed=9223372036854775808", "run.seed=9223372036854775808: must be an integer ≥ 0 below 2^63"),
        ("optim.dense.lr=nan", "optim.dense.lr=nan: must be a finite number, not nan"),
        ("optim.dense.lr=1e400", "optim.dense.lr=1e400: must be a finite number, not 1e400"),
        ("topology.dp_shard=atuo", "topology.dp_shard=atuo: must be an integer ≥ 1 or auto"),
        ("run.name=2026", "run.name=2026: must be a string that matches"),
        ("optim.dense.betas=[0.9]", "optim.dense.betas=[0.9]: must be a list of 2 values, each a number ≥ 0 and < 1"),
        ("optim.dense.betas=[0.9,1]", "optim.dense.betas=[0.9,1]: must be a number ≥ 0 and < 1, not 1"),
        ("optim.dense=adamw", "optim.dense=adamw: must be a mapping with the keys lr, betas"),
        (
            "topology.tables={user: colum_wise}",
            "topology.tables={user: colum_wise}: must be row_wise, table_wise or table_row_wise",
        ),
        (
            "topology.tables=3",
            "topology.tables=3: must be a mapping of names to row_wise, table_wise or table_row_wise, not 3",
        ),
        ("train.steps.x=3", "train.steps.x=3: train.steps has no nested keys: set it as a whole"),
        ("optim.dense.betas.0=0.5", "optim.dense.betas.0=0.5: optim.dense.betas has no nested keys: set it as a whole"),
        ("model={dimm: 3}", "model={dimm: 3}: unknown key 'model.dimm'; did you mean model.dim?"),
        ("+model.depth=3", "+model.depth=3: keys cannot be added: write model.depth=3"),
        ("++train.stepz=3", "++train.stepz=3: keys cannot be added; did you mean"),
        ("~train.steps", "~train.steps: keys cannot be removed: set train.steps to a value"),
        ("train.steps=1,2", "train.steps=1,2: several values: use -m for a sweep over them"),
        ("model@x=gem_nano", "model@x=gem_nano: choose a group with GROUP=CHOICE"),
        ("train.steps", "train.steps: has no value: write train.steps=VALUE"),
        ("model", "model: has no choice: write model=CHOICE"),
        ("experiment", "experiment: has no choice: write experiment=CHOICE"),
        ("nothing-near", "nothing-near: neither KEY=VALUE nor a YAML file"),
        ("train.stepz", "train.stepz: neither KEY=VALUE nor a YAML file; did you mean train.steps?"),
        ("train.steps=(1", "train.steps=(1: invalid value"),
        ("=3", "=3: the key before = is missing"),
        ("data.spec=${run.nam}", "data.spec=${run.nam}: in ${…}: unknown key 'run.nam'; did you mean run.name"),
        ("data.spec=${nope}", "data.spec=${nope}: in ${…}: unknown key 'nope'"),
        ("run.name=${train.stps}", "run.name=${train.stps}: in ${…}: unknown key 'train.stps'; did you mean train.st"),
        ("run.name=${run.name}", "run.name=${run.name}: refers to itself"),
        ("train.steps=${run.name}", 'train.steps=${run.name}: must be an integer ≥ 1, not "synthetic"'),
        ("data.spec=${cluster.gpu.x}", "data.spec=${cluster.gpu.x}: in ${…}: cluster.gpu has no nested keys"),
        ("train.steps=${x:1}", "train.steps=${x:1}: can't be resolved: Unsupported interpolation type x"),
        ("data=parquet", "data.spec must be set: feature spec (YAML)"),
        ("hydra.run.dir=x", "hydra.run.dir=x: unknown key 'hydra.run.dir'"),
    ],
)
def test_one_line_says_what_where_and_what_instead(override: str, expected: str) -> None:
    found = problems([override])
    assert found[0].startswith(expected), found
    assert len(found) == (2 if override == "data=parquet" else 1)


def test_all_problems_of_the_command_line_and_the_file_come_at_once(tmp_path: Path) -> None:
    text = "train:\n  steps: 0\n  stepz: 4\nmodle: {dim: 3, heads: 2}\noptim:\n  dense: {lr: fast}\n"
    file = write(tmp_path / "my.yaml", text)
    found = problems(["model.dimm=1", "train.accumulate=0", "run.root=a", "run.root=b", "precision=fp8"], file)
    assert sorted(found) == sorted(
        [
            f"{file}:3: unknown key 'train.stepz'; did you mean train.steps?",
            f"{file}:4: unknown key 'modle'; did you mean model?",
            "model.dimm=1: unknown key 'model.dimm'; did you mean model.dim?",
            "run.root=b: given twice, first as run.root=a",
            "precision=fp8: group precision has no choice 'fp8' (choices: bf16, fp32)",
            f"{file}:2: train.steps: must be an integer ≥ 1, not 0",
            "train.accumulate=0: must be an integer ≥ 1, not 0",
            f'{file}:6: optim.dense.lr: must be a number > 0, not "fast"',
        ]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  steps: 5\n  steps: 6\n", ":3: train.steps: given twice, first on line 2"),
        ("train:\n  steps: [5\n", ":3: not YAML: "),
        ("train:\n\tsteps: 5\n", ":2: not YAML: "),
        ("- train\n", ":1: a configuration is a mapping of keys"),
        ("model.dim: 3\n", ":1: key 'model.dim': in YAML write it nested, as model: {dim: 3}"),
        ("topology:\n  tables:\n    1: row_wise\n", ":3: topology.tables.1: a key must be a string: quote it"),
        ("defaults:\n  - modle: gem_nano\n", ":2: defaults: unknown group 'modle'; did you mean model?"),
        (
            "defaults:\n  - model: gem_nan\n",
            ":2: defaults: group model has no choice 'gem_nan'; did you mean gem_nano?",
        ),
        ("defaults:\n  - _self_\n  - model: gem_nano\n", ":2: defaults: '_self_': write GROUP: CHOICE"),
        ("train: &t\n  steps: 5\n  accumulate: *t\n", ":1: train.accumulate: contains itself"),
        ("train: !!python/object:os.system {}\n", ":1: train: tag 'tag:yaml.org,2002:python/object:os.system' is not"),
        ("train:\n  steps: !!python/name:os.system x\n", ":2: not YAML: could not determine a constructor"),
        ("run:\n  seed: 2001-01-01\n", ':2: run.seed: must be an integer ≥ 0, not "2001-01-01"'),
        ("data:\n  train: ???\n", ": data.train must be set"),
    ],
)
def test_a_files_problem_names_its_line(text: str, expected: str, tmp_path: Path) -> None:
    file = write(tmp_path / "my.yaml", text)
    found = problems([], file)
    assert any(expected in f": {problem}" for problem in found), found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1: 2", "1: a key must be a string: quote it"),
        ("train: {1: 2}", "train.1: a key must be a string: quote it"),
        ("a: &a [*a]", "a.0: contains itself"),
        ("run: &a [*a]", "run.0: contains itself"),
        ("topology: {tables: &a {b: *a}}", "topology.tables.b: contains itself"),
        ("train: {steps: 1, steps: x}", "train.steps: given twice, first on line 1"),
        ("train: 5", "train: must be a mapping with the keys global_batch, "),
        ("train: {steps: abc}", 'train.steps: must be an integer ≥ 1, not "abc"'),
        ("train: {steps: -1}", "train.steps: must be an integer ≥ 1, not -1"),
        ("train: {steps: '${run.nope}'}", "train.steps: in ${…}: unknown key 'run.nope'"),
        ("train: {steps: '${.log_every}', log_every: '${.steps}'}", "train.steps: refers to itself through train.lo"),
        ("train:\n  steps: ???", "train.steps must be set: "),
        ("train: [", "not YAML: "),
    ],
)
@pytest.mark.parametrize("standalone", [False, True])
def test_one_fault_is_one_line(text: str, expected: str, standalone: bool, tmp_path: Path) -> None:
    """Also where other keys take the wrong key's value: none of them is blamed."""
    more = "\noptim: {dense: {warmup: '${train.steps}'}}\ncheckpoint: {every: '${optim.dense.warmup}'}"
    file = write(tmp_path / "my.yaml", text + more + "\ndata: {spec: s, train: t}\n")
    found = problems([], file) if not standalone else problems_of(Path(file))
    assert len(found) == 1 and expected in found[0], found


def problems_of(file: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        from_yaml(file.read_text(), str(file))
    return caught.value.problems


def test_a_missing_file_is_named() -> None:
    assert problems([], "nowhere.yaml") == ["nowhere.yaml: cannot be read: No such file or directory"]


def test_a_choice_that_the_file_hides_wholly_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "my.yaml", "precision: {dense: fp32}\n")
    assert problems(["precision=bf16"], file) == [
        f"precision=bf16: has no effect: {file} overrides everything that it sets"
    ]
    compose(file, ["precision=fp32"])  # changes nothing, and says nothing else


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        (
            {"model/big.yaml": "dim: 64\ndimm: 3\n"},
            ["model=big"],
            "model/big.yaml:2: model.dimm: unknown key 'model.dimm'",
        ),
        ({"model/big.yaml": "dim: -4\n"}, ["model=big"], "model/big.yaml:1: model.dim: must be an integer ≥ 4"),
        ({"model/big.yaml": "dim: [\n"}, ["model=big"], "model/big.yaml:2: not YAML"),
        ({"model/big.yaml": "dim: 4\ndim: 8\n"}, ["model=big"], "model/big.yaml:2: not YAML: found duplicate key dim"),
        ({"model/big.yaml": "defaults: [huge]\n"}, ["model=big"], "huge"),
        ({"model/gem_nano.yaml": "dim: 4\n"}, [], "model/gem_nano.yaml: a built-in choice has this name"),
        ({"modle/big.yaml": "dim: 4\n"}, [], "contains no GROUP/CHOICE.yaml"),
        ({}, [], "no such folder"),
    ],
)
def test_problems_in_the_users_own_groups(
    files: dict[str, str], overrides: list[str], expected: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        write(tmp_path / "own" / name, text)
    found = problems(overrides, config_dir=str(tmp_path / "own"))
    assert expected in found[0], found
    assert len(found) == 1


def test_a_runs_configuration_is_checked_with_its_lines() -> None:
    with pytest.raises(InputError) as caught:
        from_yaml("data: {spec: s, train: t}\ntrain:\n  steps: no\n  stepz: 1\n", "runs/x/config.yaml")
    assert caught.value.problems == [
        "runs/x/config.yaml:4: unknown key 'train.stepz'; did you mean train.steps?",
        "runs/x/config.yaml:3: train.steps: must be an integer ≥ 1, not no",
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("trian", "; did you mean train?"),
        ("RESUME", "; did you mean resume?"),
        ("plann", "; did you mean Plan?"),
        ("evaluate", ""),
        ("", ""),
    ],
)
def test_the_closest_known_name_is_suggested(word: str, expected: str) -> None:
    assert did_you_mean(word, ["Plan", "train", "resume"]) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("train.stpes", "train.steps"),
        ("optim.lr", "optim.dense.lr or optim.tables.lr"),
        ("topology.dp_shards", "topology.dp_shard"),
        ("topology.eps", "topology.ep, optim.tables.eps or optim.dense.eps"),
        ("checkpoint.stpes", "train.steps"),
        ("modeldim", "model.dim or model"),
        ("experimnet", "experiment"),
    ],
)
def test_a_suggested_key_is_close_as_a_whole_or_has_the_closest_name(key: str, expected: str) -> None:
    assert did_you_mean_key(key) == f"; did you mean {expected}?"


@pytest.mark.parametrize("key", ["x", "train.qqq", ""])
def test_nothing_is_suggested_for_a_key_like_no_other(key: str) -> None:
    assert did_you_mean_key(key) == ""


def test_a_key_of_another_group_is_offered_with_its_right_path() -> None:
    for key in all_keys():
        name = key.rsplit(".", 1)[-1]
        for group in ("run", "checkpoint", "optim.tables"):
            moved = f"{group}.{name}"
            if moved not in all_keys():
                (problem,) = problems([f"{moved}=1"])
                assert key in problem.split("did you mean ")[1].rstrip("?").replace(" or ", ", ").split(", ")


WORLD = "topology.dp_replicate × topology.dp_shard is 2 × 3 = 6, but the world has"
HEADS = "model.heads is 3, which does not divide model.dim = 32"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.steps=x", "topology.dp_shard=3"], ["train.steps=x: must be", WORLD]),
        (["topology.dp_shard=3", "model.heads=3", "checkpoint.keep=0"], ["checkpoint.keep=0: must be", WORLD, HEADS]),
        (["topology.dp_shard=3", "model.heads=3"], [WORLD, HEADS]),
        (["model.dim=x", "topology.dp_shard=3"], ["model.dim=x: must be", WORLD]),
        (["topology.dp_shard=x", "model.heads=3"], ["topology.dp_shard=x: must be"]),  # the rest may follow from it
        (["launcher.nodes=2", "topology.dp_shard=3"], ["launcher.nodes=2: launcher.kind=local", WORLD]),
        (["train.stpes=3", "model.heads=3"], ["train.stpes=3: unknown key", HEADS]),
        (
            ["experiment=parquet", "data.spec=/nope.yaml", "data.train=/nope", "topology.dp_shard=3"],
            [WORLD, "/nope.yaml: the feature spec can't be read"],
        ),
    ],
)
def test_problems_of_schema_plan_and_data_are_told_at_once(
    words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told), lines
    for line, start in zip(lines, told, strict=True):
        assert line.startswith(f"error: {start}")
