"""A rank that dies, raises or hangs in any stage ends the whole run soon, and the report names it."""

from pathlib import Path

import pytest

from tests.recovery.small_run import Case, Ended, supervise_all
from tests.world import run_world

STAGES = {"build": "stage=build", "step": "stage=step,step=3", "save": "stage=save"}
KINDS = {"kill": "signal", "raise": "exception", "hang": "hang"}
TOLD = {"kill": "killed by SIGKILL", "raise": "InjectedError: planted in rank 1", "hang": "maybe_inject ("}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Ended]:
    """Every fault in every stage, all at once."""
    faults = [(kind, stage) for kind in KINDS for stage in STAGES]
    cases = [
        Case(
            str(tmp_path_factory.mktemp("runs")),
            f"{kind}:rank=1,{STAGES[stage]}",
            watchdog=8.0 if kind == "hang" else 60.0,
        )
        for kind, stage in faults
    ]
    results = run_world(1, supervise_all, cases, gloo=False)[0]
    return dict(zip(faults, results, strict=True))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_fault_ends_the_run_and_is_named(ends: dict[tuple[str, str], Ended], kind: str, stage: str) -> None:
    end = ends[kind, stage]
    assert (end.error, end.exit_code, end.left) == ("RunFailed", 1, [])
    assert end.seconds < (15 if kind == "hang" else 10)
    assert end.cause is not None
    assert (end.cause["kind"], end.cause["rank"], end.cause["stage"]) == (KINDS[kind], 1, stage)
    assert end.cause["step"] == {"build": None, "step": 3, "save": 6}[stage]
    for text in (f"rank 1 failed first, in stage {stage}", TOLD[kind], "gemctl resume", end.run_dir.run_id):
        assert text in end.message
    assert Path(end.cause["log"]).is_file()


def test_end_is_on_record(ends: dict[tuple[str, str], Ended]) -> None:
    run = ends["raise", "step"].run_dir
    end = run.attempt(1).end()
    assert end is not None
    assert (end["outcome"], end["cause"]["rank"]) == ("failed", 1)
    assert "planted in rank 1" in run.attempt(1).rank_output(1).read_text()
