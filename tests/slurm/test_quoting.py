"""Values keep their meaning in batch scripts, shells and SLURM's own file names, whatever characters they have."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchx.specs import AppDef, Role, macros

from gemctl.config.compose import compose
from gemctl.config.schema import SlurmConfig
from gemctl.errors import InputError
from gemctl.launchers import slurm
from gemctl.launchers.api import literal, request
from gemctl.launchers.slurm_client import parse_facts
from gemctl.launchers.slurm_job import batch_job, directive, file_name, step
from gemctl.run.directory import RunDir
from tests.slurm.desk import WAIT, Desk, Watched
from tests.support.waiting import wait_for

ODD = ["my runs", "50%j", "50%%", "it's", 'q"x', "a\\b", "a\\%j b", "h#x", "$HOME", "a$$b${app_id}", "`x`", "a;b",
       "日本", "tab\there", "-dash", "x\\"]  # fmt: skip
TEXT = st.text(st.characters(exclude_characters="\0\n", exclude_categories=["Cs"]), min_size=1, max_size=20)


def as_sbatch_reads(line: str) -> list[str]:
    """The options of a #SBATCH line, as SLURM's own parser cuts them (tested against it below)."""
    words: list[str] = []
    word, quote, escaped, begun = "", "", False, False
    for character in line:
        if not quote and not escaped and character == "#":
            break
        if not quote and character.isspace():
            words, word, begun = ([*words, word], "", False) if begun else (words, word, begun)
        elif escaped:
            word, escaped, begun = word + character, False, True
        elif character == "\\":
            escaped = begun = True
        elif quote and character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote, begun = character, True
        else:
            word, begun = word + character, True
    return [*words, word] if begun else words


def as_slurm_opens(name: str) -> str:
    """The file that SLURM opens for an output file's name without placeholders."""
    return name.replace("\\\\", "\\") if "\\" in name else name.replace("%%", "%")


@settings(deadline=None)
@given(TEXT)
@example("a b")
@example("\\")
@example("x'\"#\\ ")
def test_directive_is_one_option_with_the_value(text: str) -> None:
    assert as_sbatch_reads(f"--comment={directive(text)}") == [f"--comment={text}"]


@settings(deadline=None)
@given(TEXT)
@example("50%j")
@example("a\\%%")
def test_output_file_is_the_path_itself(text: str) -> None:
    path = Path("/runs") / text
    name = file_name(path)
    assert as_slurm_opens(name) == str(path)
    if "\\" not in name:
        assert name.count("%") == 2 * str(path).count("%")


def test_simple_values_stay_as_they_are() -> None:
    for value in ("rack1|rack2", "1-12:00:00", "gpu:h100:8", "[a&b]*2", "/scratch/runs/7.log"):
        assert directive(value) == value


@settings(max_examples=50, deadline=None)
@given(TEXT)
@example("a$$b${app_id}")
@example("${replica_id}")
def test_no_macro_is_found_in_a_path(text: str) -> None:
    assert macros.Values("/img", "app", "3", "HEAD").substitute(literal(text)) == text
    (role,) = request(Path("/r") / text, 1, compose(None, []).launcher).roles
    command = step(role, SlurmConfig())[-1].split("; exec ", 1)[1]
    words = shlex.split(command)
    assert words[words.index("gemctl.ranks.agent") + 1] == str(Path("/r") / text)


@pytest.mark.parametrize("text", ODD)
def test_batch_script_runs_the_command_with_the_values(text: str, tmp_path: Path) -> None:
    app = AppDef("job", [Role("agent", "", entrypoint="true")])
    job = batch_job(app, SlurmConfig(env={"OWN": text}), "o", f"printf '%s|' \"$OWN\" {shlex.quote(text)}")
    done = subprocess.run(["bash", "-c", job.script()], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == f"{text}|{text}|"


def test_path_with_a_line_break_is_refused() -> None:
    config = compose(None, ["launcher=slurm"])
    config.run.root = "a\nb"
    with pytest.raises(InputError, match="sbatch accepts no path with a line break"):
        slurm.check(config)


def test_facts_of_a_job_whose_names_have_blanks_are_read() -> None:
    text = "JobId=1 JobName=a JobState=FAKE\n JobState=RUNNING Restarts=0\n Command=/a b JobState=X\n WorkDir=/my r\n"
    facts = parse_facts(text)
    assert (facts["JobState"], facts["Restarts"], facts["WorkDir"]) == ("RUNNING", "0", "/my r")
    assert (facts["JobName"], facts["Command"]) == ("a JobState=FAKE", "/a b JobState=X")


@pytest.mark.slow
def test_sbatch_itself_reads_every_value(desk: Desk) -> None:
    jobs = {}
    for text in ODD:
        folder = desk.folder / "odd" / text
        folder.mkdir(parents=True)
        app = AppDef(text, [Role("agent", "", entrypoint="true")])
        script = folder / "job.sbatch"
        command = f"printf %s {shlex.quote(text)}"
        script.write_text(
            batch_job(app, SlurmConfig(), file_name(folder / "out.log"), command).script(), encoding="utf-8"
        )
        jobs[text] = desk.cluster.must("sbatch", "--parsable", str(script))
    wait_for(lambda: not desk.cluster.must("squeue", "-h"), WAIT, "all jobs")
    for text, job in jobs.items():
        folder = desk.folder / "odd" / text
        assert (folder / "out.log").read_text(encoding="utf-8") == text
        facts = parse_facts(desk.cluster.must("scontrol", "show", "job", job))
        assert (facts["JobName"], facts["Command"]) == (text, str(folder / "job.sbatch"))


@pytest.mark.slow
def test_run_below_an_odd_root_trains_and_tells_how_to_go_on(desk: Desk) -> None:
    root = "50%j a\\b/it's $$ #\""
    shown = root.replace('"', '\\"')
    words = desk.words(
        "launcher.nodes=1", "launcher.ranks_per_node=2", "topology.dp_replicate=2", f'run.root="{shown}"'
    )
    done = desk.gemctl("train", *words, "train.steps=2", "--detach", "--json")
    assert done.code == 0, done.told
    run = Watched(RunDir.open(done.json()["path"]))
    assert run.dir.path.parent.parent == desk.folder / root
    assert desk.ended(run, 1)["outcome"] == "finished"
    wait_for(lambda: "step 2/2" in run.supervisor_log())  # the supervisor's last line comes after the end record
    resumed = desk.gemctl("resume", str(run.dir.path))
    (line,) = [line for line in resumed.told.splitlines() if "to train further: " in line]
    again = shlex.split(line.split("to train further: ", 1)[1])
    assert desk.gemctl(*again[1:], "--dry-run").code == 0
