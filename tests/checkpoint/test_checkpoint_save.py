"""Saving and loading in real worlds: bit-equal to the values at the save, concurrently with training's collectives."""

import os
import signal
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from statistics import median

import pytest
import torch

from gemctl.checkpoint import save
from gemctl.checkpoint.content import content_sum
from gemctl.checkpoint.pieces import Piece
from gemctl.checkpoint.retention import remove_half_written
from gemctl.run.attempt import Base
from gemctl.run.base import newest_verified
from gemctl.run.directory import RunDir
from gemctl.run.files import read_log
from gemctl.run.manifest import KindCount, checkpoints, count_kinds, read, verify
from tests.checkpoint import checkpoint_ranks as ranks
from tests.checkpoint.checkpoint_world import ROWS, add_attempt, make_run
from tests.support.waiting import wait_for
from tests.support.world import WorldError, run_world


@pytest.mark.parametrize(("before", "after"), [(0, 10), (19, 19)])
def test_the_thread_that_writes_yields_to_training_and_stays_nicer_if_it_is(before: int, after: int) -> None:
    def lowered() -> int:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(before, os.getpriority(os.PRIO_PROCESS, thread)))
        save._lower_priority()
        return os.getpriority(os.PRIO_PROCESS, thread)

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lowered).result() == max(after, os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_load_restores_every_bit_and_the_next_steps(world: int, tmp_path: Path) -> None:
    make_run(tmp_path)
    saved = run_world(world, ranks.save_and_go_on, tmp_path)
    assert run_world(world, ranks.load_and_go_on, tmp_path) == saved
    folder = tmp_path / "checkpoints/step_2.a1"
    assert verify(folder) == []
    manifest = read(folder)
    assert manifest.facts.world == world
    assert manifest.objects["tables.embedding_bags.wide.weight"].shape == [ROWS["wide"], 4]
    assert manifest.objects["tables.embedding_bags.wide.weight"].pieces == world
    assert manifest.objects["dense.0.weight"].bytes == 4 * 7 * 12
    if world == 4:
        assert manifest.objects["dense.0.weight"].layout == "dp_replicate=2:R dp_shard=2:S(0)"
        assert run_world(3, ranks.load_and_go_on, tmp_path)[0][0] == saved[0][0]


def test_the_hash_is_that_of_the_full_values(tmp_path: Path) -> None:
    results = run_world(2, ranks.full_values, 7)
    (digest, full), (other, none) = results
    assert other == digest and none == {}
    expected = sha256()
    for key, value in sorted(full.items()):
        flat, shape = _flatten(value)
        expected.update(f"{key} torch.float32 {shape}\n".encode() + struct.pack(f"<{len(flat)}f", *flat))
    assert digest == expected.hexdigest()
    assert run_world(1, ranks.full_values, 8)[0][0] != digest


def _flatten(value: object) -> tuple[list[float], list[int]]:
    if not isinstance(value, list):
        return [float(value)], []  # type: ignore[arg-type]
    parts = [_flatten(item) for item in value]
    return [number for part, _ in parts for number in part], [len(value), *parts[0][1]]


def test_a_save_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert run_world(2, ranks.save_while_writer_waits, tmp_path) == [True, True]
    assert [checkpoint.step for checkpoint in checkpoints(make_run(tmp_path, 0))] == [2, 1]


@pytest.mark.parametrize(
    ("stage", "newest"),
    [
        pytest.param("copy", 2, marks=pytest.mark.slow),
        pytest.param("plan", 2, marks=pytest.mark.slow),
        ("metadata", 2),
        pytest.param("manifest's draft", 2, marks=pytest.mark.slow),
        ("write", 2),
        ("hash", 2),
        ("before the manifest", 2),
        ("after the manifest", 4),
        ("in pruning", 4),
    ],
)
def test_all_ranks_killed_in_a_save_lose_no_published_checkpoint(stage: str, newest: int, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(WorldError, match="killed"):
        run_world(2, ranks.die_in, tmp_path, stage)
    choice = newest_verified(run)
    found, refused = choice.checkpoint, choice.passed_over
    assert found is not None and found.step == newest
    if stage == "in pruning":  # half deleted: it must not be taken for a checkpoint
        assert [checkpoint.step for checkpoint in checkpoints(run)] == [4]
    if newest == 2:
        told = [f"{run.checkpoints}/step_4.a1: unfinished: it has no manifest.json"]
        # A rank whose copy was done may have made the folder before the other's death reached it.
        assert refused == told or (stage == "copy" and refused == [])

    run.attempt(1).write_end("failed")
    add_attempt(run, 2, Base(found.path.name, found.step))
    run_world(2, ranks.save_twice, tmp_path, [6], 2, 1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_6.a2"]


def test_a_full_disk_on_one_rank_stops_the_save_on_all(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for first, second in run_world(2, ranks.save_with_small_files, tmp_path, 1):
        assert first == second
        assert "saving step 1 failed: rank 1" in first
        assert "__1_0.distcp: File too large (errno 27)" in first
    assert not any(checkpoint.current for checkpoint in checkpoints(run))


STAGES = ["manifest", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("write", "hash", "link", "prune"))]


@pytest.mark.parametrize("stage", STAGES)
def test_what_an_attempt_saves_that_was_stopped_and_taken_over_is_void(stage: str, tmp_path: Path) -> None:
    """SIGSTOP in the save of step 4, a takeover, SIGCONT. What the old attempt writes then is never listed, loaded or
    kept, and it deletes nothing of the run."""
    run = make_run(tmp_path)
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(run_world, 2, ranks.stop_in, tmp_path, stage, 1)
        pid = _wait_until_stopped(tmp_path / "pid")
        found = newest_verified(run).checkpoint
        assert found is not None and found.step == (4 if stage == "prune" else 2)
        second = add_attempt(run, 2, Base(found.path.name, found.step))
        if stage in {"hash", "prune"}:  # or later: both orders must be right
            remove_half_written(run, second)
        os.kill(pid, signal.SIGCONT)
        said = going.result()
    if stage != "prune":
        assert all("attempt 2 owns the run now; what attempt 1 saves is void" in text for text in said)
    assert (found.path / "manifest.json").exists()
    choice = newest_verified(run)
    again, refused = choice.checkpoint, choice.passed_over
    assert again == found
    assert next(checkpoint.path for checkpoint in checkpoints(run) if checkpoint.flaw is None) == found.path
    if stage in {"manifest", "link"}:
        assert "step_4.a1: void: attempt 2 started from step 2" in refused[0]
    run.attempt(1).write_end("failed")  # until then it may still write into a half-written folder, which stays
    run_world(2, ranks.save_twice, tmp_path, [6], 2, 1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_6.a2"]


def _wait_until_stopped(file: Path) -> int:
    """The process that `file` names, once it is stopped."""

    def stopped() -> str | None:
        text = file.read_text() if file.exists() else ""
        return text if text and Path(f"/proc/{text}/stat").read_text().rpartition(")")[2].split()[0] == "T" else None

    return int(wait_for(stopped, 30, "a rank that has stopped itself") or 0)


# Saves at steps 2, 4 and 6 with keep=1: failing tries by step, retries, tolerate, then: passed, what ends it, what is
# left.
POLICIES = {
    "a retry succeeds": ({4: 1}, 1, 0, [2, 4, 6], None, ["step_6.a1"]),
    "one failed save is tolerated": ({4: 2}, 1, 1, [2, 4, 6], None, ["step_6.a1"]),
    "two in a row are too many": ({4: 1, 6: 1}, 0, 1, [2, 4], "step 6", ["step_2.a1"]),
    "none may fail": ({4: 9}, 2, 0, [2], "step 4", ["step_2.a1"]),
    "the last one must be there": ({6: 1}, 0, 1, [2, 4, 6], "step 6", ["step_4.a1"]),
}
RARE = {"two in a row are too many", "none may fail"}


def test_a_load_proves_that_every_value_came_back(tmp_path: Path) -> None:
    make_run(tmp_path)
    for first, second in run_world(2, ranks.lose_a_value_on_the_way, tmp_path):
        assert (
            "not those that were saved: optim.dense.0.bias.exp_avg, optim.dense.0.weight.exp_avg, optim.dense.2"
            in first
        )
        assert second.endswith("not those that were saved: optim.dense.0.weight.exp_avg")
    manifest = read(tmp_path / "checkpoints/step_2.a1")
    assert all(stored.content for stored in manifest.objects.values())
    assert count_kinds(manifest.objects)["AdamW state"] == KindCount(12, 4 * (2 * (84 + 7 + 7 + 1) + 4), 12)


@pytest.mark.parametrize("world", [1, 3])
def test_the_content_of_a_tensor_does_not_depend_on_its_sharding(world: int) -> None:
    """Against the definition in whole numbers; box by box, along any axis, for every element size."""
    sums, full = run_world(world, ranks.sums_by_hand, 5)[0]
    assert sums == {key: _content(value) for key, value in full.items()} and len(sums) > 15


def _content(full: torch.Tensor) -> int:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[full.element_size()]
    values = full.contiguous().view(-1).view(words).tolist()
    return sum(word * (2 * index + 1) for index, word in enumerate(values)) % 2**64


def test_boxes_along_any_axis_add_up() -> None:
    wide = torch.randn(3, 200_001)  # longer than a block
    for full in (torch.randn(7, 5, 3), torch.randn(50, 7).bfloat16(), torch.randint(-9, 9, (4, 3)), wide):
        assert content_sum(Piece(full, (0,) * full.dim(), full.shape)) == _content(full)
        for axis in range(full.dim()):
            low, high = full.narrow(axis, 0, 2), full.narrow(axis, 2, full.shape[axis] - 2)
            at = tuple(2 * (other == axis) for other in range(full.dim()))
            parts = Piece(low, (0,) * full.dim(), full.shape), Piece(high, at, full.shape)
            assert sum(map(content_sum, parts)) % 2**64 == _content(full)
    assert content_sum(Piece(torch.zeros(0, 4), (0, 0), torch.Size([0, 4]))) == 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in RARE else []) for name in POLICIES]
)
def test_what_a_save_does_that_the_disk_refuses(name: str, tmp_path: Path) -> None:
    fails, retries, tolerate, passed, ends, left = POLICIES[name]
    run = make_run(tmp_path)
    for went, check, wait in run_world(2, ranks.save_on_a_disk_that_fills, tmp_path, fails, retries, tolerate):
        assert went == passed
        said = check or wait
        assert (said is None) if ends is None else f"saving {ends} failed: rank 1" in said and "__1_0.distcp" in said
    assert [path.name for path in run.checkpoints.iterdir()] == left  # a failed save leaves nothing behind
    assert verify(run.checkpoints / left[0]) == []
    events = [(line["event"], line["step"]) for line in read_log(run.attempt(1).saves)]
    tries = [[("retry", step)] * min(count, retries) for step, count in fails.items()]
    assert [event for event in events if event[0] == "retry"] == [event for step in tries for event in step]
    failed = [line for line in read_log(run.attempt(1).saves) if line["event"] == "failed"]
    assert all("File too large" in line["fault"] for line in failed)
    assert [line["step"] for line in failed] == [step for step, count in fails.items() if count > retries]


def test_a_checkpoint_stands_although_older_ones_cannot_be_deleted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run_world(2, ranks.save_and_fail_to_prune, tmp_path) == [["step_4.a1", "step_2.a1"]] * 2
    events = [line["event"] for line in read_log(run.attempt(1).saves)]
    assert events == ["prune failed", "saved"] * 2


def test_a_manifest_that_may_not_be_on_disk_deletes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run_world(2, ranks.save_unsynced, tmp_path) == [["step_4.a1", "step_2.a1"]] * 2
    assert [line["event"] for line in read_log(run.attempt(1).saves)] == ["saved", "published, not synced", "saved"]
    assert [verify(checkpoint.path) for checkpoint in checkpoints(run)] == [[], []]


def test_a_position_that_is_not_json_fails_on_every_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for said in run_world(2, ranks.save_bad_position, tmp_path):
        assert "saving step 1 failed: rank 0" in said and "JSON" in said
    assert not any(checkpoint.current for checkpoint in checkpoints(run))


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine, as uploads have low priority
@pytest.mark.parametrize("world", [1, 4])
def test_a_save_blocks_for_about_a_bare_copy_and_leaves_the_cores_to_training(
    world: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """1 GB over the ranks, from the second save on (the first has to get its memory). Medians of the ratios of three
    saves over all ranks: each ratio is of two times beside each other, as the machine's own pace changes."""
    make_run(tmp_path)
    every = run_world(world, ranks.time_saves, tmp_path, 1000 // world, 3, timeout=570)

    def ratio(above: str, below: str) -> float:
        return median(a / b for times in every for a, b in zip(times[above], times[below], strict=True))

    stall, share, step = ratio("stall", "copy"), ratio("stall", "whole"), ratio("during", "alone")
    first = max(times["first"][0] for times in every)
    figures = f"first {first:.3f} s, then {stall:.2f} × a copy, {share:.3f} × a whole save, steps {step:.2f} ×"
    record_property("save", figures)
    assert stall <= 1.5 and share <= 0.2 and step <= 1.3, figures
    saves = read_log(RunDir(tmp_path).attempt(1).saves)
    assert [line["event"] for line in saves] == ["saved"] * 4 and saves[0]["stall"] > 0  # the first is told too
