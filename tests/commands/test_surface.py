"""Where code could come in: every place that makes objects or code out of data, starts a process or listens.

The lists are complete in both directions: a new place fails until it stands here with its reason, a reason without its
place fails too.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILTINS = {"eval", "exec", "compile"}  # names of variables too: only calls count
MAKES_OBJECTS = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy",  # modules
    "eval", "exec", "compile", "builtins", "__import__", "import_module",
    "torch.load", "torch.jit.load", "torch.package", "weights_only", "allow_pickle", "Unpickler", "find_class",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "_object_to_tensor", "_tensor_to_object", "_DistWrapper",
    "dcp.save", "dcp.load", "dcp.async_save", "dcp.load_state_dict", "dcp.save_state_dict",
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader",
    "yaml.SafeLoader", "yaml.safe_load", "instantiate", "Pipe", "recv",
}  # fmt: skip
STARTS_PROCESSES = {
    "sys.executable", "subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call",
    "subprocess.check_output", "subprocess.getoutput", "os.system", "os.popen", "os.fork", "os.forkpty",
    "os.posix_spawn", "os.posix_spawnp", "os.execv", "os.execve", "os.execvp", "os.execvpe", "os.execl", "os.spawnv",
    "multiprocessing", "elastic_launch", "_runner.schedule", "pty", "create_subprocess_exec",
}  # fmt: skip
LISTENS = {
    "TCPStore", "create_server", "bind", "listen", "socketserver", "http.server", "asyncio.start_server",
    "grpc", "xmlrpc", "Listener", "BaseManager",
}  # fmt: skip

OBJECTS = {
    ("gemctl/cli.py", "import_module"): "gemctl's own commands, by the names in COMMANDS",
    ("gemctl/torch_call.py", "import_module"): "gemctl's own functions, by the names in calls of `call`",
    ("launchers/api.py", "import_module"): "gemctl's own launchers, by the names in LAUNCHERS",
    ("gemctl/render/show.py", "import_module"): "gemctl's own renderers, by the names in a table",
    ("gemctl/bench/kernels.py", "import_module"): "gemctl's own peers, by the names in a table",
    ("gemctl/ranks/agent.py", "import_module"): "the names in PRELOAD",
    ("kernels/dispatch.py", "import_module"): "gemctl's own kernels, by the names of ops and backends",
    ("gemctl/specs/custom.py", "import_module"): "the module that a configuration names: who writes it is trusted",
    ("gemctl/model/build.py", "import_module"): "the module that a spec names, gemctl's own or the user's",
    ("gemctl/checkpoint/metadata.py", "pickle"): "its instructions, of which it makes inert values",
    ("gemctl/checkpoint/metadata.py", "find_class"): "makes an inert value",
    ("gemctl/specs/yaml_file.py", "yaml.SafeLoader"): "makes plain values alone",
    ("gemctl/checkpoint/load.py", "dcp.load"): "without a group: each rank by itself",
    ("gemctl/bench/ranks.py", "pickle"): "what a child forked from this process sends through a pipe that has no name",
    ("gemctl/bench/ranks.py", "Pipe"): "that pipe",
    ("gemctl/bench/ranks.py", "recv"): "that pipe",
    ("gemctl/cluster/node.py", "recv"): "bytes of a socket",
}
PROCESSES = {
    ("gemctl/process.py", "sys.executable"): "python(), which adds -P",
    ("gemctl/cluster/checks.py", "sys.executable"): "shown by doctor",
    ("gemctl/torch_call.py", "subprocess.run"): "python()",
    ("gemctl/bench/quality.py", "subprocess.run"): "python()",
    ("launchers/local.py", "subprocess.Popen"): "python()",
    ("launchers/local.py", "_runner.schedule"): "TorchX, whose request has its command line from python()",
    ("gemctl/run/directory.py", "subprocess.run"): "git",
    ("gemctl/cluster/host.py", "subprocess.run"): "nvidia-smi",
    ("launchers/slurm_client.py", "subprocess.run"): "SLURM's clients",
    ("launchers/slurm_client.py", "subprocess.Popen"): "srun, whose request has its command line from python()",
    ("gemctl/ranks/store.py", "os.fork"): "serves the store",
    ("gemctl/bench/ranks.py", "os.fork"): "ranks that measure",
    ("gemctl/bench/ranks.py", "multiprocessing"): "its pipes",
    ("gemctl/ranks/agent.py", "elastic_launch"): "forks the ranks",
    ("gemctl/ranks/agent.py", "multiprocessing"): "torchrun's errors and log settings",
    ("launchers/slurm_agents.py", "subprocess.Popen"): "the type of what slurm_client has started",
}
LISTENERS = {
    ("gemctl/ranks/store.py", "TCPStore"): "the store of several hosts, and connections to it",
    ("gemctl/ranks/store.py", "create_server"): "the store of several hosts",
    ("gemctl/ranks/rendezvous.py", "create_server"): "whether an address is this machine's, for a moment",
    ("gemctl/cluster/node.py", "create_server"): "a message to itself over the loopback",
    ("gemctl/cluster/checks.py", "create_server"): "whether an address is this machine's, for a moment",
}


def _sources() -> Iterator[Path]:
    for folder in ("gemctl", "kernels", "launchers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(part.is_symlink() for part in [path, *path.parents] if part.is_relative_to(ROOT / folder)):
                yield path


def _names(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all that is imported, called, inherited or passed by keyword."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id not in BUILTINS:
            yield node.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.keyword) and node.arg and node.arg not in BUILTINS:
            yield node.arg
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.FunctionDef):
            yield node.name


@cache
def _all_names() -> list[tuple[str, str]]:
    """Files and the names in them."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in _sources()}
    return sorted({(str(path.relative_to(ROOT)), name) for path, tree in trees.items() for name in _names(tree)})


def _found(wanted: set[str]) -> set[tuple[str, str]]:
    found = set()
    for path, name in _all_names():
        parts = name.split(".")
        ends = {".".join(parts[first:last]) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1)}
        found |= {(path, end) for end in ends & wanted if end == name or end not in BUILTINS}
    return found


@pytest.mark.parametrize(
    ("wanted", "known"),
    [(MAKES_OBJECTS, OBJECTS), (STARTS_PROCESSES, PROCESSES), (LISTENS, LISTENERS)],
    ids=["objects", "processes", "listeners"],
)
def test_every_place_is_known(wanted: set[str], known: dict[tuple[str, str], str]) -> None:
    found = _found(wanted)
    assert sorted(found - known.keys()) == []
    assert sorted(known.keys() - found) == []
