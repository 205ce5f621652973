"""constraints/locks: complete, hashed, in step with pyproject.toml and the pins, and what is installed here."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "constraints" / "locks"
STAND_IN = "fbgemm-gpu"  # built from packaging/, for torchrec's sake
FILES = {
    "cpu": ["torch-cpu.txt", "cpu.txt"],
    "cpu-test": ["torch-cpu.txt", "cpu-test.txt"],
    "cuda": ["cuda.txt"],
    "cuda-test": ["cuda-test.txt"],
}


def locked(name: str) -> dict[str, str]:
    """Distribution → version, of the entries that apply to this Python and platform."""
    entries = [entry for file in FILES[name] for entry in _entries(LOCKS / file)]
    applies = [one for one in map(_requirement, entries) if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in applies}


def _entries(path: Path) -> list[str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace(" \\\n", " ").splitlines()


def _requirement(entry: str) -> Requirement:
    return Requirement(entry.split(" --hash", 1)[0])


def _asked(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for one in lists for text in one]


def _pins(build: str) -> list[Requirement]:
    lines = (ROOT / "constraints" / f"{build}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("path", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_entry_is_one_version_with_a_hash(path: Path) -> None:
    for entry in _entries(path):
        assert re.fullmatch(r"[\w.-]+==[\w.+]+( ; [^#]+?)?( --hash=sha256:[0-9a-f]{64})+", entry.replace("    ", "")), (
            entry
        )


@pytest.mark.parametrize("name", FILES)
def test_a_lock_meets_the_project_and_the_pins(name: str) -> None:
    build, _, tools = name.partition("-")
    have = locked(name)
    if build == "cpu":
        have[STAND_IN] = "1.8.0+cpu"
    missing = [
        str(one)
        for one in _asked(*(["test", "dev"] if tools else []))
        if canonicalize_name(one.name) not in have
        or not one.specifier.contains(have[canonicalize_name(one.name)], prereleases=True)
    ]
    missing += [
        str(pin)
        for pin in _pins(build)
        if (name_ := canonicalize_name(pin.name)) in have and not pin.specifier.contains(have[name_], prereleases=True)
    ]
    assert missing == []


@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_tests_run_on_what_a_user_installs(build: str) -> None:
    assert locked(build).items() <= locked(f"{build}-test").items()


def test_what_is_installed_is_what_is_locked() -> None:
    want = locked("cpu-test" if metadata.version("torch").endswith("+cpu") else "cuda-test")
    have: dict[str, str] = {canonicalize_name(one.metadata["Name"]): one.version for one in metadata.distributions()}
    assert {name: have.get(name) for name in want} == want
