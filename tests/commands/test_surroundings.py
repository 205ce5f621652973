"""Odd surroundings: no user name or home, encodings that lack characters, standard streams that are closed or full."""

import ast
import errno
import io
import os
import pwd
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemctl import cli, env, startup
from gemctl.errors import InputError
from gemctl.process import python
from gemctl.run import conclusion
from gemctl.run.directory import RunDir, list_runs
from gemctl.startup import PLAIN_ERRORS, plain

ROOT = Path(__file__).resolve().parent.parent.parent
USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME")


@pytest.fixture
def no_passwd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No user variables and no passwd entry, as in a container that runs as a bare number; returns the TMPDIR."""

    def missing(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", missing)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_passwd_entry_is_known_by_its_number(no_passwd: Path) -> None:
    assert env.user() == f"uid{os.getuid()}"
    run = RunDir.create(str(no_passwd / "runs"), "name", [])
    assert run.info()["user"] == f"uid{os.getuid()}"


def test_a_user_without_a_home_gets_a_private_one_among_the_temporary_folders(no_passwd: Path) -> None:
    home = env.home()
    assert home == no_passwd / f"gemctl-{os.getuid()}"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert env.cache_folder() == home / ".cache" / "gemctl"
    assert env.home() == home


def test_a_temporary_home_that_others_may_write_to_is_not_used(no_passwd: Path) -> None:
    (no_passwd / f"gemctl-{os.getuid()}").mkdir()
    (no_passwd / f"gemctl-{os.getuid()}").chmod(0o777)
    assert env.home() == Path("/nonexistent")


def test_a_temporary_home_that_is_a_link_is_not_used(no_passwd: Path) -> None:
    (no_passwd / "elsewhere").mkdir()
    (no_passwd / f"gemctl-{os.getuid()}").symlink_to(no_passwd / "elsewhere")
    assert env.home() == Path("/nonexistent")


def test_compiled_code_is_kept_where_no_other_user_can_put_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for cache, expected in {"mine": "mine/gemctl", "file/below": f"gemctl-{os.getuid()}"}.items():
        (tmp_path / "file").touch()  # no folder can be made below it
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
        env.keep_compiled_code_private()
        folder = tmp_path / expected / "torchinductor"
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_of_compiled_code_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "gemctl" / "torchinductor").mkdir(parents=True)
    (tmp_path / "gemctl" / "torchinductor").chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    env.keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / f"gemctl-{os.getuid()}" / "torchinductor")


def test_libraries_get_the_same_user_and_home(no_passwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_stream", lambda stream, fd, kind: stream)
    startup.prepare()
    assert os.environ["USER"] == f"uid{os.getuid()}"
    assert Path.home() == no_passwd / f"gemctl-{os.getuid()}"
    for name in ("USER", "HOME"):
        monkeypatch.delenv(name)


@pytest.mark.parametrize("failing", ["gemctl.run.directory.create_json", "gemctl.run.directory._identity"])
def test_a_run_that_cannot_be_made_leaves_nothing(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run.json")

    monkeypatch.setattr(failing, full)
    with pytest.raises((InputError, OSError)):
        RunDir.create(str(tmp_path), "name", [])
    assert list((tmp_path / "name").iterdir()) == []
    assert list_runs(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("ascii", "2 × 2 … ⌈rows⌉ – █ ≈", b"2 x 2 ... ceil(rows) - # ~"),
        ("latin-1", "2 × 2 …", b"2 \xd7 2 ..."),
        ("ascii", "日 \U0001f600", b"\\u65e5 \\U0001f600"),
        ("utf-8", "a\udcff b", b"a\\xff b"),
        ("utf-8", "×", "×".encode()),
    ],
)
def test_characters_that_an_encoding_lacks_become_plain_ones(encoding: str, text: str, written: bytes) -> None:
    startup.codecs.register_error(PLAIN_ERRORS, plain)
    assert text.encode(encoding, PLAIN_ERRORS) == written


def gemctl(shell: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """`shell` run by sh, with $GEMCTL as the command; its stdout and stderr are captured unless it redirects them."""
    environment = {**os.environ, "GEMCTL": f"{sys.executable} -m gemctl", **variables}
    return subprocess.run(
        ["sh", "-c", shell], capture_output=True, encoding="utf-8", env=environment, check=False, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("shell", "code", "out", "said"),
    [
        ("$GEMCTL --help >&-", 0, "", ""),
        ("$GEMCTL list --root docs >&- 2>&- <&-", 0, "", ""),
        ("$GEMCTL nonsense 2>&-", 2, "", ""),
        ("$GEMCTL nonsense 2>/dev/full", 2, "", ""),
        ("$GEMCTL --help >/dev/full", 1, "", "error: standard output: No space left on device\n"),
        ("$GEMCTL list --json --root docs >/dev/full 2>/dev/full", 1, "", ""),
    ],
)
def test_streams_that_are_closed_or_full_have_a_sensible_exit_code(shell: str, code: int, out: str, said: str) -> None:
    done = gemctl(shell)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, said)


def test_output_is_plain_where_the_encoding_is_ascii() -> None:
    done = gemctl("$GEMCTL plan", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "dense 2 x 2" in done.stdout


def test_closed_streams_do_not_lend_their_numbers_to_other_files() -> None:
    code = "from gemctl import startup; startup.prepare(); import os; print(os.open('/dev/zero', 0), file=open(9, 'w'))"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "{code}" 9>&1 <&- >&- 2>&-', sys.executable],
        capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert int(done.stdout) > 2


def test_messages_to_a_closed_stream_are_dropped(tmp_path: Path) -> None:
    """The terminal was closed, or the reader of the pipe has gone: a run must not end by it."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(io.BufferedWriter(startup.Messages(writer, "w")), line_buffering=True)
    stream.write("a line\n")
    stream.write("another\n")
    stream.close()


def _without_encoding(file: Path) -> list[str]:
    """Calls that read or write text in the locale's encoding."""
    found = []
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        named = {word.arg: word.value for word in call.keywords}
        mode = named.get("mode", call.args[-1] if call.args and name != "NamedTemporaryFile" else None)
        mode = call.args[0] if name == "NamedTemporaryFile" and call.args else mode
        binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
        module = ast.unparse(call.func.value).split(".")[-1] if isinstance(call.func, ast.Attribute) else ""
        file_call = name in {"open", "fdopen"} and module not in {"os", "RunDir", "filesystem"} and not binary
        text_call = name in {"read_text", "write_text"} and isinstance(call.func, ast.Attribute)
        if "encoding" not in named and (file_call or text_call or "text" in named):
            found.append(f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:80]}")
    return found


def test_every_file_that_is_read_or_written_as_text_states_its_encoding() -> None:
    files = [file for folder in ("gemctl", "launchers", "kernels") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    assert [line for file in files for line in _without_encoding(file)] == []


def test_a_deleted_current_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(str(tmp_path / "runs"), "name", [])
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert conclusion.reference(run) == conclusion.short(run.path) == str(run.path)
        assert cli.main(["status", str(run.path)]) == 0
    finally:
        os.chdir(ROOT)
    gone.mkdir()
    plan = shlex.join(python("-m", "gemctl", "plan"))
    ended = subprocess.run(f"rmdir {gone} && {plan}", shell=True, cwd=gone, capture_output=True, text=True, check=False)
    assert (ended.returncode, "the current folder has been deleted" in ended.stderr) == (2, True)
