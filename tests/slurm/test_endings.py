"""Jobs that are cancelled, reach their time limit or are preempted: they save in time, and requeue only if wanted."""

import pytest

from gemctl.run.files import read_log
from tests.slurm.desk import STEPS, Desk, Saved, Watched
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LONG = "train.steps=100000"


def save_begins(run: Watched, since: float, attempt: int = 1) -> float:
    """Seconds from `since` until the first rank began the save that ends an attempt."""
    stop = [line["time"] for line in run.lines(attempt) if line["stage"] == "save" and line["time"] >= since]
    return min(stop) - since


def test_scancel_saves_and_the_run_can_be_resumed(desk: Desk) -> None:
    """The foreground's exit code is 143 too. SLURM does not start the job again."""
    command = desk.start("train", *desk.words(LONG))
    run = desk.submitted(command)
    desk.at_work(run, step=7)
    asked = desk.now()
    desk.cluster.must("scancel", run.job())
    end = desk.ended(run, 1)
    assert (end["outcome"], end["signal"]) == ("stopped", "SIGTERM")
    assert save_begins(run, asked) < 1.0
    assert run.saved()[0] == end["step"] > 7
    desk.job_ended(run.job(), "CANCELLED")
    done = command.done()
    assert (done.code, "stopped at step" in done.told) == (143, True), done.told

    done = desk.gemctl("resume", run.id, f"train.steps={end['step'] + 3}", "--detach")
    assert done.code == 0, done.told
    assert desk.ended(run, 2)["outcome"] == "finished"
    assert run.attempt(2).base().step == end["step"]
    assert run.saved()[0] == end["step"] + 3
    assert desk.job_state(run.job()) == "CANCELLED"


def test_stop_saves_and_the_job_completes(desk: Desk) -> None:
    run = desk.train(LONG)
    desk.at_work(run, step=3)
    asked = desk.now()
    assert desk.gemctl("stop", run.id).code == 0
    end = desk.ended(run, 1)
    assert (end["outcome"], run.saved()[0]) == ("stopped", end["step"])
    assert save_begins(run, asked) < 1.0
    desk.job_ended(run.job(), "COMPLETED")
    assert desk.restarts(run.job()) == 0
    assert desk.gemctl("status", run.id, "--json").json()["state"] == "stopped"


def test_time_limit_saves_and_the_supervisor_queues_the_job_again(desk: Desk) -> None:
    """SLURM looks every 30 s, and warns where it would be late the next time: here 22 to 52 s after the start, when the
    ranks are at work. The time limit has a budget of its own."""
    run = desk.train(
        LONG, "launcher.slurm.time_limit='1'", "launcher.slurm.save_before_limit=8",
        "recover.budgets.crash=0", "recover.budgets.preemption=0", "recover.budgets.time_limit=1",
    )  # fmt: skip
    end = desk.ended(run, 1)
    assert (end["outcome"], end["kind"], end["signal"]) == ("preempted", "time_limit", "SIGUSR1")
    assert run.saved()[0] == end["step"] > 0
    desk.start_again(run.job())
    desk.at_work(run, 2)
    assert run.attempt(2).base().step == end["step"]
    assert desk.ended(run, 2)["kind"] == "time_limit"
    desk.job_ended(run.job(), "FAILED")
    assert "recover.budgets.time_limit=1" in run.supervisor_log()


def test_five_preemptions_leave_the_crash_budget_alone(desk: Desk, undisturbed: Saved) -> None:
    """Jobs of the partition `urgent` take the nodes; each time the run saves; in the end all is as if undisturbed."""
    slow = ";".join(f"slow:factor=30,attempt={number}" for number in range(1, 6))
    run = desk.train(f"train.steps={STEPS}", "recover.budgets.crash=0", "recover.budgets.startup=0", inject=slow)
    for number in range(1, 6):
        desk.at_work(run, number)
        urgent = desk.cluster.must(
            "sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null",
            "--wrap", "true",
        )  # fmt: skip
        end = desk.ended(run, number)
        assert (end["outcome"], end["kind"]) == ("stopped", "preemption")
        desk.job_ended(urgent, "COMPLETED")
        desk.start_again(run.job(), number)
    assert desk.ended(run, 6)["outcome"] == "finished"
    desk.job_ended(run.job(), "COMPLETED")
    kinds = [line["kind"] for line in read_log(run.dir.supervisor_log) if line["event"] == "end"]
    assert kinds == ["preemption"] * 5 + [None]
    assert run.saved() == undisturbed


def test_job_that_fails_at_build_runs_once(desk: Desk) -> None:
    run = desk.train("train.steps=5", inject="raise:rank=2,stage=build")
    end = desk.ended(run, 1)
    assert (end["outcome"], end["kind"]) == ("failed", "startup")
    assert "rank 2 on n3 failed first, in stage build" in end["cause"]["text"]
    desk.job_ended(run.job(), "FAILED")
    assert not run.attempt(2).path.exists()
    assert desk.restarts(run.job()) == 0


def test_resume_locally_on_two_ranks_and_back(desk: Desk) -> None:
    run = desk.train("train.steps=4")
    assert desk.ended(run, 1)["outcome"] == "finished"
    local = ["launcher.kind=local", "launcher.nodes=1", "topology.dp_replicate=1"]
    done = desk.start("resume", run.id, "train.steps=8", *local).done()
    assert done.code == 0, done.told
    assert (run.attempt(2).base().step, run.attempt(2).claim().host, run.saved()[0]) == (4, "login", 8)
    back = ["launcher.kind=slurm", "launcher.nodes=2", "topology.dp_replicate=2"]
    done = desk.start("resume", run.id, "train.steps=12", *back).done()
    assert done.code == 0, done.told
    assert (run.attempt(3).base().step, run.saved()[0], len(run.hosts(3))) == (8, 12, 2)


def test_controller_that_is_away_for_20_seconds(desk: Desk) -> None:
    """The run continues, and commands report at once that SLURM does not answer."""
    run = desk.train(LONG)
    desk.at_work(run, step=2)
    desk.cluster.kill_controller()
    away = desk.now()
    step = run.step(1)
    done = desk.gemctl("status", run.id, "--json")
    assert done.code == 0, done.told
    status = done.json()
    assert (status["state"], status["submission"]["job"]["state"]) == ("running", "unknown")
    assert "squeue" in status["submission"]["job"]["detail"]
    refused = desk.gemctl("train", *desk.words("train.steps=1"), "--detach")
    assert (refused.code, "scontrol" in refused.told) == (1, True), refused.told
    wait_for(lambda: desk.now() - away > 20, 60, "20 seconds")
    assert run.step(1) > step + 10
    desk.cluster.start_controller()
    assert desk.gemctl("stop", run.id).code == 0
    assert desk.ended(run, 1)["outcome"] == "stopped"
    desk.job_ended(run.job(), "COMPLETED")
