"""Which keys a resumed run may change: every key has a rule, and refusals say why."""

import dataclasses

import pytest

from gemctl.config.keys import all_keys
from gemctl.config.resuming import RULES, Kind, changes, check_changes, refuse_choices, rule_of
from gemctl.config.schema import Config, DataConfig
from gemctl.errors import InputError


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    groups = {key.split(".")[0] for key in all_keys()}
    assert all(rule_of(key) for key in all_keys() if key not in groups)
    assert all(rule.key in all_keys() for rule in RULES)
    used = {rule_of(key) for key in all_keys()}
    assert [rule.key for rule in RULES if rule not in used and rule.key not in groups] == []
    assert all(rule.reason for rule in RULES)


def test_what_may_change_and_why_not() -> None:
    before = Config(data=DataConfig(spec="s", train="t"))
    after = dataclasses.replace(
        before,
        train=dataclasses.replace(before.train, steps=7, log_every=1),
        checkpoint=dataclasses.replace(before.checkpoint, every=3),
        recover=dataclasses.replace(before.recover, watchdog=5.0),
        topology=dataclasses.replace(before.topology, dp_replicate=2, tables={"item": "table_wise"}),
        launcher=dataclasses.replace(before.launcher, ranks_per_node=2),
    )
    found = changes(before, after)
    assert {change.rule.kind for change in found} == {Kind.FREE} and len(found) == 7
    check_changes(found, [])
    after.run = dataclasses.replace(before.run, seed=5)
    after.model = dataclasses.replace(before.model, dim=64)
    after.optim.dense.lr, after.optim.tables.lr = 1e-5, 1e-5
    found = changes(Config(data=DataConfig(spec="s", train="t")), after)
    with pytest.raises(InputError) as error:
        check_changes(found, ["optim.tables", "model", "optim.dense.lrr"])
    said = error.value.problems
    assert len(said) == 4
    assert said[0] == "--allow optim.dense.lrr: no such key; did you mean optim.dense.lr or optim.tables.lr?"
    assert said[1].startswith("run.seed: 0 → 5: refused, it determines the row order")
    assert said[2].startswith("model.dim: 32 → 64: refused, the saved state belongs to this model")
    assert (
        said[3]
        == "optim.dense.lr: 0.002 → 1e-05: changes the curve from here on; to change it anyway: --allow optim.dense.lr"
    )


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("run.name", "run"),
        ("run.seed", "run.seed"),
        ("train.steps", "train.steps"),
        ("train", "train"),
        ("data.synthetic.rows", "data.synthetic"),
        ("optim.tables.kind", "optim.tables.kind"),
        ("optim.tables.lr", "optim"),
    ],
)
def test_the_most_specific_rule_applies(key: str, rule: str) -> None:
    assert rule_of(key).key == rule


def test_a_key_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyError, match="trainer"):
        rule_of("trainer")  # not below "train"


def test_choices_of_refused_groups_are_refused_with_the_reason() -> None:
    with pytest.raises(InputError) as caught:
        refuse_choices(["model=gem_tiny", "experiment=ml100k", "topology=fsdp", "train.steps=5", "run.name=x", "run=y"])
    assert caught.value.problems == [
        f"model=gem_tiny: refused, {rule_of('model').reason}",
        "experiment=ml100k: refused, an experiment is a whole configuration, and the run has one",
        f"run=y: refused, {rule_of('run').reason}",
    ]


@pytest.mark.parametrize("word", ["topology=fsdp", "precision=bf16", "data=ml100k", "model.dim=64", "other.yaml"])
def test_other_words_of_a_resume_are_left_to_the_rules_of_their_keys(word: str) -> None:
    refuse_choices([word])
