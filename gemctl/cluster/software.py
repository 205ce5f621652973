"""Checks that the installed builds of torch, FBGEMM and TorchRec are compatible, from metadata, without importing them.

    gemctl doctor

FBGEMM and TorchRec 1.N require torch 2.(N+5). FBGEMM has a CUDA build (distribution fbgemm-gpu) and a CPU build
(fbgemm-gpu-cpu, with an empty stand-in fbgemm-gpu whose version ends in +cpu). Both install the package fbgemm_gpu, so
a mixture can be imported and then fails, or silently uses the wrong one.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gemctl.errors import GemctlError

CPU, CUDA = "cpu", "cuda"
Version = Callable[[str], str | None]


@dataclass(frozen=True)
class Builds:
    """Versions and builds ("cpu", "cuda"; None: not installed) from the installed metadata."""

    torch: str | None
    torch_build: str | None
    fbgemm: str | None
    fbgemm_build: str | None
    torchrec: str | None


def installed_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def builds(version: Version = installed_version) -> Builds:
    """The installed builds."""
    torch = version("torch")
    cpu, stand_in = version("fbgemm-gpu-cpu"), version("fbgemm-gpu")
    cuda = stand_in if stand_in and not _is_cpu(stand_in) else None
    both = f"{CPU} and {CUDA}" if cpu and cuda else None
    build = both or (CUDA if cuda else CPU if cpu else None)
    return Builds(torch, torch and _torch_build(torch), cuda or cpu, build, version("torchrec"))


def problems(found: Builds) -> list[str]:
    """Every reason why these builds can't work together, with its remedy."""
    return list(_problems(found))


def require() -> None:
    """Raises GemctlError (exit 1) if the installed builds can't work together; `train` calls it before it launches."""
    if found := problems(builds()):
        raise GemctlError("\n".join(found))


def _problems(found: Builds) -> Iterator[str]:
    remedy = "install the whole set of constraints/cpu.txt or constraints/cuda.txt in a fresh environment"
    if found.torch is None:
        yield f"torch is not installed: {remedy}"
    if found.fbgemm is None and importlib.util.find_spec("fbgemm_gpu") is None:
        yield f"FBGEMM is not installed (fbgemm-gpu-cpu or fbgemm-gpu): {remedy}"
    if found.torchrec is None and importlib.util.find_spec("torchrec") is None:
        yield f"torchrec is not installed: {remedy}"
    if found.fbgemm_build == f"{CPU} and {CUDA}":
        yield f"fbgemm-gpu-cpu and a CUDA build of fbgemm-gpu are both installed and overwrite each other: {remedy}"
    elif found.torch and found.fbgemm_build and found.torch_build != found.fbgemm_build:
        wanted = "fbgemm-gpu" if found.torch_build == CUDA else "fbgemm-gpu-cpu"
        other = "fbgemm-gpu-cpu fbgemm-gpu" if found.torch_build == CUDA else "fbgemm-gpu"
        yield (
            f"torch {found.torch} is a {_name(found.torch_build)} build, FBGEMM {found.fbgemm} a "
            f"{_name(found.fbgemm_build)} build: pip uninstall {other}, then pip install {wanted}"
            f"=={_partner(found.torch)}.*, or {remedy}"
        )
    yield from _versions(found, remedy)


def _versions(found: Builds, remedy: str) -> Iterator[str]:
    if found.torch is None or _partner(found.torch) is None:
        return
    partner = _partner(found.torch)
    for name, version in (("FBGEMM", found.fbgemm), ("torchrec", found.torchrec)):
        if version and version.split(".")[:2] != (partner or "").split("."):
            yield f"{name} {version} is not compatible with torch {found.torch}, which needs {partner}.*: {remedy}"


def _partner(torch: str) -> str | None:
    """The version "1.N" of FBGEMM and TorchRec for torch "2.M", N = M − 5; None for other major versions."""
    match = re.match(r"2\.(\d+)\.", torch)
    return f"1.{int(match.group(1)) - 5}" if match else None


def _name(build: str | None) -> str:
    return "CUDA" if build == CUDA else "CPU"


def _is_cpu(version: str) -> bool:
    return version.partition("+")[2].startswith("cpu")


def _torch_build(version: str) -> str:
    """From the local version (+cpu, +cu130), or else from torch/version.py, which every wheel contains."""
    local = version.partition("+")[2]
    if local.startswith("cpu"):
        return CPU
    return CUDA if local.startswith("cu") or _version_file_names_cuda() else CPU


def _version_file_names_cuda() -> bool:
    path = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def pins(path: Path) -> dict[str, str]:
    """The exact pins of a constraints file: version by name."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines) if version}


def constraints_file(build: str | None) -> Path | None:
    """The constraints for a torch build in the checkout that gemctl runs from; None if there is no checkout."""
    root = Path(__file__).resolve().parent.parent.parent
    path = root / "constraints" / ("cuda.txt" if build == CUDA else "cpu.txt")
    return path if path.is_file() else None


def off_pin(path: Path, version: Version = installed_version) -> list[str]:
    """ "name 1.2 (pinned 1.1)" for every installed distribution with another version; triton may be missing."""
    found = ((name, pin, version(name)) for name, pin in pins(path).items())
    return [
        f"{name} {have or 'missing'} (pinned {pin})"
        for name, pin, have in found
        if (have or "").partition("+")[0] != pin.partition("+")[0] and not (have is None and name == "triton")
    ]
