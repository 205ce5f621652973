"""The kernel benchmark on tiny shapes on CPU: what it counts, and peers that work, refuse and fail."""

from collections.abc import Callable

import grimp
import pytest
import torch
from torch import Tensor

from gemctl.bench import kernels
from gemctl.bench.cases import OPS, SMALL, Case, make
from gemctl.bench.results import KernelBench, KernelSettings
from gemctl.commands.arguments import BENCH_OPS
from gemctl.errors import InputError
from gemctl.render.bench import kernel_sections

HERE = "tests.bench.test_bench_kernels"


def same(case: Case) -> Callable[[], Tensor] | None:
    """A peer that does GDPA alone, with our own op."""
    return case.call if case.op == "gdpa" else None


def broken(case: Case) -> Callable[[], Tensor] | None:
    def call() -> Tensor:
        raise RuntimeError("no such kernel")

    return call


def settings(repeats: int = 5, case: tuple[str, ...] = ()) -> KernelSettings:
    return KernelSettings(case=list(case), batch=3, heads=2, head_dim=8, dtype="float32", repeats=repeats, small=True)


@pytest.fixture(scope="module")
def bench() -> KernelBench:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemctl.bench.clock.TARGET", 0.0)
        return kernels.measure(settings(repeats=2), kernels.peers([f"same={HERE}:same", f"broken={HERE}:broken"]))


def test_every_op_and_case_is_timed_in_both_directions(bench: KernelBench) -> None:
    ours = [(x.op, x.case, x.direction) for x in bench.timings if x.contender == "gemctl"]
    shapes = {op: [shape.name for shape in SMALL if fits(shape)] for op, fits in OPS.items()}
    wanted = [(op, case, way) for op, names in shapes.items() for case in names for way in ("forward", "backward")]
    assert ours == wanted
    assert all(len(x.seconds) == 2 and x.rate is not None for x in bench.timings if x.contender == "gemctl")
    assert bench.host.keys() == OPS.keys() == set(BENCH_OPS)
    assert len(bench.matmul) == len(bench.copy) == len(wanted) / 2


def test_rates_are_useful_work_over_the_median(bench: KernelBench) -> None:
    for timing in bench.timings:
        if timing.contender != "gemctl":
            continue
        shape = next(shape for shape in SMALL if shape.name == timing.case)
        case = make(timing.op, shape, 3, 2, 8, torch.float32, torch.device("cpu"))
        len_q, len_k = case.q_offsets.diff(), case.k_offsets.diff()
        backward = timing.direction == "backward"
        assert timing.median == pytest.approx(sum(timing.seconds) / 2)
        assert timing.rate is not None
        assert timing.median is not None
        if timing.op in {"gdpa", "jagged_flash_attention"}:
            work = 4 * 2 * 8 * float((len_q * len_k).sum()) * (2.5 if backward else 1)
        else:
            tokens, outer = 4 * 2 * 8 * int(len_k.sum()), 4 * 2 * 8 * (3 * 4)
            block = timing.op == "block_attention"
            forward_bytes = 4 * tokens if block else 2 * tokens + outer
            work = float(7 * tokens if block else 4 * tokens + outer) if backward else float(forward_bytes)
        assert timing.rate * timing.median == pytest.approx(work)


def test_what_a_peer_does_not_do_is_a_result(bench: KernelBench) -> None:
    told = {(x.contender, x.op == "gdpa"): x.why_not for x in bench.timings}
    assert told["same", True] is None
    assert told["same", False] == "does not support this case"
    assert told["broken", True] == told["broken", False] == "RuntimeError: no such kernel"
    rows = {section.title.split(":")[0]: section.rows for section in kernel_sections(bench)}
    assert [row[1] for row in rows["gdpa"][:3]] == ["gemctl", "same", "broken"]
    assert [row[1] for row in rows["pooled_attention"]] == ["gemctl", "broken"]
    assert ["device", "CPU"] in rows["Measured on"]


def test_wrong_arguments_are_told_together() -> None:
    with pytest.raises(InputError) as error:
        kernels.peers(["a=no.such.module:f", "b", "c=math:nothing", "d=.math:f", "e=math:pi"])
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "--peer a=no.such.module",
        "--peer b",
        "--peer c=math",
        "--peer d=.math",
        "--peer e=math",
    ]
    with pytest.raises(InputError) as error:
        kernels.measure(settings(repeats=0, case=("large",)), {})
    assert len(error.value.problems) == 2


def test_every_peer_has_a_name_of_its_own() -> None:
    with pytest.raises(InputError) as error:
        kernels.peers([f"gemctl={HERE}:same", f"={HERE}:same", f"a={HERE}:same", f"a={HERE}:broken"])
    names = ["name 'gemctl' is empty or taken", "name '' is", "name 'a' is"]
    assert all(name in problem for name, problem in zip(names, error.value.problems, strict=True))


def test_imports_neither_torchrec_nor_fbgemm() -> None:
    graph = grimp.build_graph("gemctl", include_external_packages=True)
    for package in ("torchrec", "fbgemm_gpu"):
        assert package not in graph.modules or graph.find_shortest_chain("gemctl.bench.kernels", package) is None
