"""What reaches a terminal: no control characters and no credentials, from whatever file or command line they come."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from gemctl.cli import main
from gemctl.credentials import masked, refusal
from gemctl.launch.progress import Progress
from gemctl.run.attempt import Base, claim
from gemctl.run.directory import RunDir
from gemctl.run.files import JsonLog, create_json
from gemctl.run.rank_records import StageRecorder
from gemctl.run.submission import submit
from gemctl.terminal import console, shown

EVIL = "a\x1b]0;title\x07b\x1b[2J\x9bK\rc\x7f\u202etxt\x1b[31mred\x1b[0m"
PLAIN = r"a\x1b]0;title\x07b\x1b[2J\x9bK\x0dc\x7f\u202etxtred"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

SECRETS = {
    "s3://KEY:SECRET@bucket/a.parquet": "s3://***@bucket/a.parquet",
    "s3://AKIA:ab/cd+ef@bucket/a": "s3://***@bucket/a",
    "s3://AKIA:12/cd+ef@bucket/a": "s3://***@bucket/a",
    "simplecache::s3://K:S@b/x": "simplecache::s3://***@b/x",
    "https://TOKEN@host/a": "https://***@host/a",
    "data.train=[s3://K:S@b/x,s3://K:S@b/y]": "data.train=[s3://***@b/x,s3://***@b/y]",
    "https://h/a?X-Amz-Signature=abc&X-Amz-Expires=60": "https://h/a?X-Amz-Signature=***&X-Amz-Expires=60",
    "https://h/a?x=1&token=abc#f": "https://h/a?x=1&token=***#f",
    "abfs://c@a.dfs.core.windows.net/p?sv=1&sig=a%2Fb": "abfs://c@a.dfs.core.windows.net/p?sv=1&sig=***",
    "HTTPS://TOKEN@host/a": "HTTPS://***@host/a",
    f"https://{'jwt' * 400}@host/a": "https://***@host/a",
    f"https://u:{'jwt' * 400}@host/a": "https://***@host/a",
    "https://u:p@ss@host/a@b": "https://***@host/a@b",
    "https://h/a#access_token=abc": "https://h/a#access_token=***",
    "s3://b/a?secret_access_key=abc": "s3://b/a?secret_access_key=***",
    "abfs://c@a/p;AccountKey=abc": "abfs://c@a/p;AccountKey=***",
    "could not read https://u:p@h/x: 403": "could not read https://***@h/x: 403",
}
CLEAN = [
    "s3://bucket/a.parquet", "abfs://container@account.dfs.core.windows.net/x", "hdfs://user@name:8020/x",
    "https://host:8080/a@b", "s3://bucket/time=10:30@x/a", "file:///data/a", "a:b@c", "https://h/a?page=2&sigma=3",
    "https://h:443", "optim.dense.lr=0.1",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_credentials_of_urls_are_masked_and_refused(text: str) -> None:
    assert masked(text) == SECRETS[text] and masked(SECRETS[text]) == SECRETS[text]
    assert "fsspec" in (refusal(text) or "")


@pytest.mark.parametrize("text", CLEAN)
def test_urls_without_credentials_are_taken(text: str) -> None:
    assert (masked(text), refusal(text)) == (text, None)


@pytest.mark.parametrize("part", ["://a:", "://", "a", "?token", "https://", "://a:b?tokentoken&sig="])
def test_a_hostile_line_is_masked_in_linear_time(part: str) -> None:
    start = time.monotonic()
    masked("x://" + part * (200_000 // len(part)))
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    "words",
    [
        ["train", "data.train=s3://KEY:hunter2@bucket/x"],
        ["plan", "data.eval=[https://h/x?sig=hunter2]"],
        ["data", "spec", "https://h/x?token=hunter2"],
        ["eval", "RUN", "--data", "s3://K:hunter2@b/x"],
        ["train", "own.yaml"],
        ["train", "oc.yaml"],
        ["train", "list.yaml"],
    ],
)
def test_no_command_takes_credentials_or_repeats_them(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("URL", "s3://K:hunter2@b/x")
    Path("own.yaml").write_text("launcher: {slurm: {env: {PROXY: 'http://me:hunter2@proxy:1'}}}\n")
    Path("oc.yaml").write_text("data: {train: '${oc.env:URL}'}\n")
    Path("list.yaml").write_text("data: {train: ['s3://b/x', 's3://K:hunter2@b/x']}\n")
    assert main(words) == 2
    said = capsys.readouterr()
    assert "a URL with credentials would be visible in ps" in said.err
    assert "hunter2" not in said.out + said.err
    assert not Path("runs").exists()


def test_what_is_kept_of_a_command_line_has_no_credentials(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path), "gem", ["gemctl", "train", "data.train=s3://K:hunter2@b/x"])
    assert "hunter2" not in (run.path / "run.json").read_text()


def test_control_characters_are_shown_not_sent() -> None:
    assert shown(EVIL) == PLAIN
    assert shown("Ω × 日本 é\n\tx") == "Ω × 日本 é\n\tx"
    out = io.StringIO()
    table = Table("head")
    table.add_row(EVIL)
    table.add_row("[bold]x[/bold] :smile:")
    console(out, 200).print(table, Text(EVIL))
    assert out.getvalue().count("a\\x1b]0;title") == out.getvalue().count("\\x1b[2J\\x9bK") == 2
    assert "[bold]x[/bold] :smile:" in out.getvalue()
    progress = Progress(3, out)
    progress.note(EVIL)
    assert not CONTROLS.search(out.getvalue())


def test_a_console_keeps_its_own_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    console(out, 80).print(Text("x\x1b[2J", style="red"))
    assert out.getvalue() == "\x1b[31mx\\x1b[2J\x1b[0m\n"


@pytest.fixture
def evil_run(tmp_path: Path) -> RunDir:
    """A run whose every text has control characters."""
    run = RunDir.create(str(tmp_path / "runs"), "gem", ["gemctl", EVIL])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=1, heartbeat=0.01)
    attempt.write_base(Base(None, 0))
    attempt.rank_output(0).write_text(f"{EVIL}\n", encoding="utf-8")
    StageRecorder(attempt, 0).fail(RuntimeError(EVIL))
    agent = {"event": "agent", "host": EVIL, "pid": 1, "time": 1.0}
    JsonLog(attempt.agent_log(0)).write(agent)
    tasks = {EVIL: {"ne": 0.5, "base_rate": 0.1, "logloss": 1.0, "calibration": 1.0}}
    line = {"kind": "train", "step": 1, "time": 2.0, "loss": 1.0, "tasks": tasks, "examples_per_s": 1.0}
    JsonLog(attempt.metrics).write(line | {"tokens_per_s": 1.0, "effective_mfu": None})
    cause = {"kind": "rank", "rank": 0, "stage": EVIL, "step": 1, "detail": EVIL, "log": EVIL, "text": EVIL}
    attempt.write_end("failed", step=1, cause=cause | {"others": EVIL, "lines": [EVIL]}, refusal=EVIL)
    JsonLog(run.supervisor_log).write({"event": "end", "attempt": 1, "outcome": EVIL, "time": 3.0, "cause": cause})
    create_json(run.requests / "1.json", {"kind": "stop", "signal": EVIL})
    return run


@pytest.mark.parametrize("words", [["status"], ["logs"], ["logs", "--merged"], ["report"], ["checkpoint", "list"]])
@pytest.mark.parametrize("as_json", [False, True])
def test_no_command_passes_a_run_s_control_characters_on(
    evil_run: RunDir, words: list[str], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, str(evil_run.path), *(["--json"] if as_json else [])])
    said = capsys.readouterr()
    assert said.out + said.err
    assert not CONTROLS.search(said.out + said.err), said.out + said.err
    if words[0] in {"status", "logs"}:
        assert "title" in said.out


def test_a_page_has_no_control_characters_credentials_or_markup_of_a_run(tmp_path: Path) -> None:
    run = RunDir.create(str(tmp_path), "gem", [f"<b>{EVIL}\ud800-\udcff https://h/x?a=1&token=hunter2"])
    attempt = claim(run.path, 1, nodes=1, ranks_per_node=1, heartbeat=0.01)
    attempt.write_base(Base(None, 0))
    attempt.write_end("finished", step=1)
    assert main(["report", str(run.path), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"&lt;b&gt;{PLAIN}\\ud800-\\udcff https://h/x?a=1&amp;token=***" in page
    assert not CONTROLS.search(page) and "hunter2" not in page


@pytest.mark.parametrize("original", ["\ud800", "a\0b"])
def test_a_submission_that_names_no_path_as_its_run_s_is_read(tmp_path: Path, original: str) -> None:
    run = RunDir.create(str(tmp_path), "gem", [])
    submission = submit(run, "", "{}", {"app": {}})
    create_json(submission.submitted_file, {"time": 1.0, "host": "n", "run": original, "pid": 1, "started": 1})
    assert (submission.submitted() or {})["run"] == original


def test_list_shows_what_cannot_be_read_in_visible_characters(
    evil_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    root = evil_run.path.parent.parent
    folder = root / "gem" / "2026\x1b[2J"
    folder.mkdir()
    (folder / "run.json").write_text('{"x": "\x1b[2J"')
    assert main(["list", "--root", str(root)]) == 0
    said = capsys.readouterr().out
    assert "\\x1b[2J" in said and not CONTROLS.search(said)
