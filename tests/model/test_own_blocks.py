"""docs/models.md as it stands: its plain PyTorch loop learns, its own block is planned and trained; what is refused."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gemctl.errors import InputError
from gemctl.model.gem import GemModel
from gemctl.model.init import init_rules
from gemctl.model.interaction import InteractionBlock
from gemctl.specs.contradictions import contradictions
from gemctl.specs.count import module_flops, parameters
from gemctl.specs.interaction import CustomSpec, DhenSpec, InteractionSpec, WukongSpec
from gemctl.specs.model import LayerSpec, ModelConfig
from tests.model.cases import LENGTHS, Case, cast, random_batch, random_dense, random_embedded
from tests.support.small import SPEC

PAGE = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
GATED = CustomSpec("gated_specs.Gated", {"tokens": 3})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's modules with those of the page."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    for text in CODE:
        if found := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / found[1]).write_text(text, encoding="utf-8")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def model_of(*interactions: InteractionSpec) -> ModelConfig:
    return ModelConfig(dim=8, layers=[LayerSpec(interaction=one) for one in interactions])


def test_the_pages_loops_run_and_learn() -> None:
    torch.manual_seed(0)
    ops, loop = (text for text in CODE if not text.startswith("# "))
    kept: dict[str, Any] = {}
    exec(ops, kept)
    assert kept["seen"].shape == (8, 2, 16)
    exec(loop, kept)
    assert kept["losses"][0] > 0.6
    assert sum(kept["losses"][-10:]) / 10 < 0.35


def test_an_own_block_is_counted_built_and_differentiated(package: Path) -> None:
    model = model_of(GATED, DhenSpec(members=[GATED, WukongSpec(fm_tokens=2, lc_tokens=2)]))
    assert contradictions(model, SPEC) == []
    case = Case(model, SPEC)
    with torch.device("meta"):
        built = GemModel(model, SPEC)
    found = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    assert found == dict(parameters(model, SPEC))
    assert init_rules(built).keys() == found.keys()
    batch = cast(random_batch(SPEC, case.lengths), torch.float32)
    dense = random_dense(case, torch.float32)
    with FlopCounterMode(display=False) as counter:
        dense(batch, random_embedded(SPEC, batch, 8, torch.float32)).sum().backward()
    assert all(parameter.grad is not None for parameter in dense.parameters())
    lengths = {"history": batch.sequences["history"].offsets.diff().numpy()}
    forward = sum(module_flops(model, SPEC, len(LENGTHS), lengths).values())
    assert 2.9 * forward < counter.get_total_flops() <= 3 * forward


SPECS = """
from dataclasses import dataclass
from gemctl.specs.weights import Weight
from typing import ClassVar
import sys

@dataclass
class Half:
    tokens: int
    module: ClassVar[str] = "gated_blocks.GatedModule"

@dataclass
class Lies:
    tokens: int
    module: ClassVar[str] = "gated_blocks.GatedModule"
    def weights(self, inputs, dim): return [Weight("mix.weight", (1, 2)), Weight("gate.weight", (dim, dim))]
    def kept(self, inputs, dim): return 0

@dataclass
class Raises(Lies):
    def weights(self, inputs, dim): raise ZeroDivisionError("oh")

@dataclass
class Nowhere(Lies):
    module: ClassVar[str] = "gated_blocks.Missing"

@dataclass
class KeepsText(Lies):
    def weights(self, inputs, dim): return []
    def kept(self, inputs, dim): return "x"

@dataclass
class KeepsNothing(KeepsText):
    def kept(self, inputs, dim): return dim // 0

@dataclass
class Narrow(KeepsText):
    module: ClassVar[str] = "other_blocks.NarrowModule"

@dataclass
class Buffered(KeepsText):
    module: ClassVar[str] = "other_blocks.BufferedModule"

class NoDataclass: pass
"""

BLOCKS = """
import torch
from torch import nn

SCALE = float(torch.ones(1))  # real also where the model is made on the meta device

class NarrowModule(nn.Module):
    def __init__(self, spec, inputs, dim): super().__init__()
    def forward(self, x): return x[:, :1]

class BufferedModule(NarrowModule):
    def __init__(self, spec, inputs, dim):
        super().__init__(spec, inputs, dim)
        self.register_buffer("seen", torch.zeros(dim))
"""


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (CustomSpec("nowhere_at_all.Block"), "importing nowhere_at_all raises ModuleNotFoundError"),
        (CustomSpec("others.Missing"), "others has no 'Missing'"),
        (CustomSpec("others.NoDataclass"), "is not a spec: name a dataclass with tokens, module, weights, kept"),
        (CustomSpec("gated_blocks.GatedModule"), "is not a spec"),
        (CustomSpec("others.Half", {"tokens": 3}), "an incomplete spec: it has no 'weights' (the parameters and"),
        (CustomSpec("gated_specs.Gated"), "options.tokens: "),
        (CustomSpec("gated_specs.Gated", {"tokens": "many"}), "options.tokens: "),
        (CustomSpec("gated_specs.Gated", {"tokens": 0}), "`tokens` must be an integer ≥ 1"),
        (CustomSpec("others.Raises", {"tokens": 3}), "weights() raises ZeroDivisionError: oh"),
        (CustomSpec("gated_specs.Gated", {"tokens": 3, "token": 4}), "options.token: unknown; it has tokens"),
        (CustomSpec("others.KeepsText", {"tokens": 3}), "kept() gives 'x', not a number of values"),
        (CustomSpec("others.KeepsNothing", {"tokens": 3}), "kept() raises ZeroDivisionError"),
    ],
    ids=str,
)
def test_what_is_no_whole_spec_is_refused_with_the_reason(spec: CustomSpec, reason: str, package: Path) -> None:
    (package / "others.py").write_text(SPECS, encoding="utf-8")
    problems = contradictions(model_of(spec), SPEC)
    assert len(problems) == 1
    assert problems[0].startswith("model.layers.0.interaction: ")
    assert reason in problems[0]


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        (
            "Lies",
            ["parameter gate.bias: weights() says None, the module has (8,)", "parameter mix.weight: "],
        ),
        ("Nowhere", ["its module gated_blocks.Missing cannot be made"]),
        ("Buffered", ["its module keeps the buffer seen: "]),
    ],
)
def test_a_module_that_is_not_its_spec_is_refused(name: str, reasons: list[str], package: Path) -> None:
    (package / "others.py").write_text(SPECS, encoding="utf-8")
    (package / "other_blocks.py").write_text(BLOCKS, encoding="utf-8")
    with pytest.raises(InputError) as error, torch.device("meta"):
        GemModel(model_of(CustomSpec(f"others.{name}", {"tokens": 3})), SPEC)
    assert len(error.value.problems) == len(reasons)
    for problem, reason in zip(error.value.problems, reasons, strict=True):
        assert reason in problem


def test_an_output_of_another_shape_is_not_broadcast(package: Path) -> None:
    (package / "others.py").write_text(SPECS, encoding="utf-8")
    (package / "other_blocks.py").write_text(BLOCKS, encoding="utf-8")
    block = InteractionBlock(CustomSpec("others.Narrow", {"tokens": 3}), 5, 8)
    with pytest.raises(InputError, match=re.escape("made (2, 1, 8), not [B, tokens, dim] = (2, 3, 8)")):
        block(torch.zeros(2, 5, 8))


def test_a_spec_that_imports_torch_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process without torch, as the plan's is."""
    (package / "heavy.py").write_text("import sys\nsys.modules['torch'] = sys\nclass Block: pass\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "torch")
    problems = contradictions(model_of(CustomSpec("heavy.Block")), SPEC)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert len(problems) == 1
    assert "importing heavy imports torch" in problems[0]
