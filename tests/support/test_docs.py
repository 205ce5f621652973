"""What the documentation says is there: commands and their configurations, files, links, the import graph."""

import re
from pathlib import Path

import networkx as nx
import pytest

from gemctl import architecture
from tests.support.doc_commands import PAGES, ROOT, Checker, Command, all_commands, dead_references, of_module, of_page


@pytest.fixture
def checker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checker:
    """With the user's own files that the texts name."""
    own = tmp_path / "my_configs/model"
    own.mkdir(parents=True)
    for name in ("mine", "wide"):
        (own / f"{name}.yaml").write_text((ROOT / "configs/model/gem_nano.yaml").read_text(encoding="utf-8"))
    for name in ("my.yaml", "ml100k.yaml"):
        (tmp_path / name).write_text("train: {steps: 5}\n", encoding="utf-8")
    monkeypatch.chdir(ROOT)
    return Checker(tmp_path)


def test_every_command_line_is_right(checker: Checker) -> None:
    commands = list(all_commands())
    assert len(commands) > 150
    assert [problem for command in dict.fromkeys(commands) for problem in checker.problems(command)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gemctl stpo RUN", "no command 'stpo'"),
        ("gemctl plan experiment=main", "no choice 'main'"),
        ("gemctl train train.stpes=3", "unknown key"),
        ("gemctl train --dryrun", "unknown argument"),
        ("gemctl resume", "required: RUN (see"),
        ("gemctl plan topology.tables.users=table_wise", "users"),
        ("gemctl plan topology.ep=2", "topology.ep"),
        ("gemctl bench model model=gem_tinny", "gem_tinny"),
        ("gemctl checkpoint diff RUN", "required"),
        ("gemctl plan --config-dir my_configs model=nope", "no choice 'nope'"),
        ("gemctl train -m launcher=slurm train.steps=1,0", "train.steps=0"),
    ],
)
def test_a_wrong_command_line_is_found(text: str, expected: str, checker: Checker) -> None:
    (problem,) = checker.problems(Command("README.md", text))
    assert problem.startswith(f"README.md: {text}: ") and expected in problem


def test_what_a_page_holds(checker: Checker) -> None:
    page = (
        "see `gemctl resume` and\n`gemctl report RUN\n--html` or `train`\n"
        "```bash\nsource x\ngemctl plan topology=fsdp \\\n    train.steps=3   # a comment\n```\n"
        "```console\n$ gemctl train train.stpes=3\nerror: no\n$ A=b gemctl list\ngemctl plan\n```\n"
        "```python\ngemctl train\n```\n"
    )
    found = [(command.text, command.loose, command.fails) for command in of_page("p.md", page)]
    assert found == [
        ("gemctl plan topology=fsdp train.steps=3", False, False),
        ("gemctl train train.stpes=3", False, True),
        ("A=b gemctl list", False, False),
        ("gemctl resume", True, False),
        ("gemctl report RUN --html", True, False),
    ]
    assert [problem for command in of_page("p.md", page) for problem in checker.problems(command)] == []


def test_what_a_module_holds() -> None:
    module = (
        '"""One line.\n\n    gemctl list    # lists\n"""\nX = "gemctl nope"\n'
        'def f():\n    """See `gemctl stop`."""\n    # after `gemctl plan`\n'
    )
    found = [(command.text, command.loose) for command in of_module("m.py", module)]
    assert found == [("gemctl list", False), ("gemctl stop", True), ("gemctl plan", True)]


def test_an_error_that_does_not_come_is_found(checker: Checker) -> None:
    (problem,) = checker.problems(Command("README.md", "gemctl plan", fails=True))
    assert "is shown to fail" in problem


def test_every_file_and_link_that_a_page_names_is_there() -> None:
    assert [problem for page in PAGES for problem in dead_references(page)] == []


def test_a_dead_reference_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n## One, `two`!\n`gemctl/plan/bild.py`, `tests/support`, [a](no.md), [b](#one-two), [c](#three),\n"
        "[d](page.md#one-two), [e](https://example.org/x#y), `kernels/*/op.py`,\n"
        "`find` in `gemctl/run/directory.py`, `RunDir.lose` in `gemctl/run/directory.py`\n",
        encoding="utf-8",
    )
    assert dead_references(page) == [
        "page.md: gemctl/plan/bild.py", "page.md: RunDir.lose in gemctl/run/directory.py", "page.md: no.md",
        "page.md: #three",
    ]  # fmt: skip


def test_the_import_graph_is_up_to_date() -> None:
    assert architecture.PAGE.read_text(encoding="utf-8") == architecture.page(), "run `make docs`"


def test_every_part_is_described() -> None:
    text = architecture.PAGE.read_text(encoding="utf-8").partition(architecture.END)[2]
    packages = architecture.packages()
    assert [part for part in packages if not re.search(rf"^\*\*`{part}`\*\*", text, re.MULTILINE)] == []
    assert [part for part in architecture.parts() if f"`{part}`" not in text] == []


def test_arrows_that_others_imply_are_left_out() -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("d", "c")])
    assert architecture.arrows(graph) == [("a", "b"), ("b", "c"), ("c", "d"), ("d", "c")]
