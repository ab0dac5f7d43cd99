"""The peers of the benchmarks compute the same number as a dense float64 singular value decomposition."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from benchmarks import bare, heads, layer, long, machine, one_product, peers, report, timing
from benchmarks.cases import Case, block_function, head_functions, random_case
from benchmarks.peers import FuncProducts
from benchmarks.race import race
from benchmarks.worker import row_error
from howsmooth.jacobians.attention_operator import AttentionJacobian
from howsmooth.testing import dense_jacobian

MASKS = pytest.mark.parametrize("causal", [False, True])
KINDS = pytest.mark.parametrize("make", [FuncProducts.fresh, FuncProducts.traced])


def tiny(causal: bool = False) -> Case:
    return random_case(6, width=8, heads=2, causal=causal).double()


def dense_norm(f, x: Tensor) -> float:
    jacobian = dense_jacobian(f, x)
    return float(torch.linalg.svdvals(jacobian)[0])


@MASKS
def test_block_function_is_the_forward_map(causal):
    case = tiny(causal)
    torch.testing.assert_close(block_function(case)(case.x), case.attention(case.x), rtol=1e-12, atol=1e-12)


@MASKS
def test_head_functions_add_up_to_the_block(causal):
    case = tiny(causal)
    total = sum(f(case.x) for f in head_functions(case))
    torch.testing.assert_close(total, case.attention(case.x), rtol=1e-12, atol=1e-12)


@KINDS
@MASKS
def test_power_iteration_reaches_the_dense_svd(make, causal):
    case = tiny(causal)
    f, x = block_function(case), case.x
    exact = dense_norm(case.attention, x)
    found = peers.power_iteration(make(f, x), x, exact, rtol=1e-8, most_iterations=2000)
    assert found.reached
    assert abs(found.value / exact - 1) <= 1e-8
    assert found.value <= exact * (1 + 1e-14)


def test_power_iteration_stops_by_itself_on_the_residual():
    case = tiny()
    f, x = block_function(case), case.x
    found = peers.power_iteration(FuncProducts.fresh(f, x), x, rtol=1e-4, most_iterations=2000)
    assert found.reached
    assert abs(found.value / dense_norm(case.attention, x) - 1) <= 1e-4


def test_power_iteration_that_is_cut_short_says_so():
    case = tiny()
    f, x = block_function(case), case.x
    found = peers.power_iteration(FuncProducts.fresh(f, x), x, dense_norm(f, x), rtol=1e-12, most_iterations=2)
    assert not found.reached
    assert found.products == 4


@KINDS
def test_arpack_equals_the_dense_svd(make):
    case = tiny()
    f, x = block_function(case), case.x
    found = peers.arpack(make(f, x), x, x.numel(), rtol=1e-20)
    assert abs(found.value / dense_norm(case.attention, x) - 1) <= 1e-10


def test_arpack_takes_maps_that_are_not_square():
    matrix = torch.randn(8, 3, dtype=torch.float64)
    x = torch.randn(6, 8, dtype=torch.float64)
    found = peers.arpack(FuncProducts.traced(lambda x: torch.sin(x) @ matrix, x), x, 18, rtol=1e-20)
    assert abs(found.value / dense_norm(lambda x: torch.sin(x) @ matrix, x) - 1) <= 1e-10


def test_dense_peer_equals_the_dense_svd():
    case = tiny()
    assert abs(peers.dense(block_function(case), case.x).value / dense_norm(case.attention, case.x) - 1) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("contest", [one_product.core, one_product.block])
@MASKS
def test_contestants_of_one_product_agree_with_float64(contest, causal):
    products, reference = contest(random_case(40, width=32, heads=4, causal=causal))
    for name, product in products.items():
        if not name.startswith("bare"):
            for got, exact in zip(product(), reference, strict=True):
                assert float((got - exact).norm() / exact.norm()) < 1e-5, name


def test_bare_products_in_tiles_are_those_of_the_whole_batch():
    case = random_case(1100, width=32, heads=4)  # several tiles
    operator = hs.jacobian(case.attention, case.x)
    assert isinstance(operator, AttentionJacobian)
    assert len(operator.mixing.tiles) > 1
    tangents = operator.projection.into_heads(case.x[None])
    whole, tiles = (make(operator.mixing, tangents)() for make in (bare.whole_batch, bare.in_tiles))
    for a, b in zip(whole, tiles, strict=True):
        assert float((a - b).norm() / a.norm()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("per_head", [False, True])
def test_race_is_won_by_right_answers_only(per_head):
    case = random_case(12, width=16, heads=2)
    maps = head_functions(case) if per_head else [block_function(case)]
    results = race(case, heads.measure_heads if per_head else layer.measure, maps, rounds=1)
    exact = case.double()
    norms = [dense_norm(f, exact.x) for f in (head_functions(exact) if per_head else [block_function(exact)])]
    target = (heads.measure_heads if per_head else layer.measure)(exact, 1e-9).value.reshape(-1)
    assert torch.allclose(target, torch.tensor(norms, dtype=torch.float64), rtol=1e-8, atol=0)
    for result in results:
        for finish in (result.ours, *result.peers):
            assert finish.reached
            assert finish.error <= 1e-3


@MASKS
def test_row_error_is_small_for_the_right_product_and_large_for_a_wrong_one(causal):
    case = random_case(50, width=8, heads=1, causal=causal)
    v = torch.randn(case.x.shape)
    u = hs.jacobian(case.attention, case.x).matvec(v)
    assert row_error(case, v, u) < 1e-5
    assert row_error(case, v, 1.01 * u) > 1e-3


def test_best_seconds_runs_everyone_in_turns():
    order: list[str] = []
    best = timing.best_seconds({name: lambda name=name: order.append(name) for name in "ab"}, rounds=2)
    assert order == list("ababab")
    assert set(best) == {"a", "b"}
    assert all(0 <= seconds < 1 for seconds in best.values())


def test_a_new_section_leaves_the_recorded_ones_on_the_page(tmp_path: Path):
    target = report.Target("claim", "≥ 2×", "3×", True)
    for name in ("first", "second", "first"):
        table = report.Table(["way", "ms"], [["ours", name]])
        report.Section(name, f"Title {name}", "Text.", [table], [target], "machine", "2020-01-01").record(tmp_path)
    page = tmp_path / "results.md"
    report.write_page(("first", "missing", "second"), tmp_path, page)
    text = page.read_text(encoding="utf-8")
    assert text.index("## 1. Title first") < text.index("## 3. Title second")
    assert text.count("| claim | ≥ 2× | 3× | yes |") == 2
    assert "| ours | second |" in text


def test_every_section_of_the_page_has_a_number_of_its_own():
    titles = [line for line in report.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    numbers = [title.split(".")[0] for title in titles]
    assert len(set(numbers)) == len(numbers) == len(list(report.RECORDED.glob("*.json")))


@pytest.mark.parametrize("module", [long, machine, peers, report, timing], ids=lambda module: module.__name__)
def test_examples_in_docstrings_hold(module: ModuleType):
    failed, attempted = doctest.testmod(module)
    assert attempted > 0
    assert failed == 0
