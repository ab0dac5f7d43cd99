"""The evidence and the race of the worst case, on a sample small enough for a test."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import howsmooth as hs
from benchmarks import worst_case as bench
from benchmarks.cases import block_function, random_case
from evidence import worst_case_gpt2 as gpt2
from evidence import worst_case_real as real
from evidence import worst_case_references as references
from howsmooth.bounds.bound_table import BoundRow
from howsmooth.bounds.lower_bounds import two_cluster_input
from howsmooth.meanfield import Measure, local_constant
from howsmooth.models import NAMED, Targets, open_model
from howsmooth.sets import Tokens
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.testing import dense_jacobian as dense

F64 = torch.float64
EYE = torch.eye(2, dtype=F64)
UPPER = BoundRow("a bound", 20.0, "upper", 2, "ball", "", "")


def dense_norm(f: object, x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense(f, x), 2))


def head_case(search: object = lambda n: 4 * n**0.5, gamma: float = 1.0) -> gpt2.HeadCase:
    points = tuple(
        gpt2.Point(n, n**0.5, 2 * n**0.5, 3 * n**0.5, search(n), "random 3, clusters", UPPER)  # type: ignore[operator]
        for n in gpt2.LENGTHS
    )
    longer = tuple(n**0.5 for n in gpt2.LONGER)
    return gpt2.HeadCase(0, 1, "ln_1", 10.0, gamma, points, longer[:4], longer, 10.0)


def test_a_point_has_the_dense_norm_at_every_construction() -> None:
    block = hs.SelfAttention.random(8, 2, dtype=F64, mask="causal")
    found = gpt2.head_point(block, 1, 6, 2.0)
    alone, tokens = block.head(1), Ellipsoid.ball(2.0, 8)
    assert found.clusters == pytest.approx(dense_norm(alone, two_cluster_input(alone, tokens, 6)), rel=1e-9)
    assert found.theorem <= found.search * (1 + 1e-9)
    assert found.search <= found.upper.value
    assert found.gain >= found.climbed >= 1 - 1e-9


@pytest.mark.parametrize(("a", "gamma", "places"), [(-3.0, 3.0, (-2.0, 2.0)), (8.0, 1.0, (2.0, 1.0))])
def test_the_branches_are_those_of_the_theorem(a: float, gamma: float, places: tuple[float, float]) -> None:
    head = hs.SelfAttention.from_bilinear(a * torch.eye(1, dtype=F64), torch.eye(1, dtype=F64), mask="causal")
    x = torch.tensor([places[0]] + [places[1]] * 5, dtype=F64)[:, None]
    assert gpt2.theorem_gamma(head) == pytest.approx(gamma)
    assert gpt2.branches(head, 6, 2.0) == pytest.approx(dense_norm(head, x), rel=1e-9)


def test_a_head_without_real_eigenvalues_has_no_branches_and_does_not_qualify() -> None:
    turn = hs.SelfAttention.from_bilinear(torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=F64), EYE)
    assert math.isnan(gpt2.theorem_gamma(turn))
    assert gpt2.branches(turn, 6, 2.0) == 0
    assert not head_case(gamma=math.nan).qualifies()


def test_only_lengths_within_the_theorem_qualify() -> None:
    limit = math.log(63) / 200  # 2γR² = ln 63 at R = 10
    assert head_case(gamma=1.01 * limit).qualifies()
    assert not head_case(gamma=0.99 * limit).qualifies()


def test_an_exponent_of_one_half_is_seen_and_another_is_not() -> None:
    assert all(gpt2._holds_half(fit) for fit in head_case().growths().values())
    steep = head_case(lambda n: 4 * n**0.7).growths()
    assert steep["search"].exponent == pytest.approx(0.7)
    assert not gpt2._holds_half(steep["search"])


def test_a_search_below_the_construction_would_be_counted() -> None:
    text = " ".join(gpt2.counts([head_case(), head_case()]))
    assert "Of 8 searches 0 end below" in text
    assert "On 2 of 2 heads" in text
    assert "random, clusters 8 times" in text
    low = gpt2.counts([head_case(), head_case(lambda n: 1.9 * n**0.5)])[0]
    assert "Of 8 searches 4 end below" in low
    assert "On 1 of 2 heads" in low


def test_the_tables_hold_every_head() -> None:
    found = [head_case(), replace(head_case(), layer=6)]
    assert len(gpt2.all_heads(found).splitlines()) == 2 + 2
    assert "0.5–0.5; 1; 1" in gpt2.growth_table(found)
    assert "| 0 | 10 | 8–8 | 16–16 | 24–24 | 32–32 | 20–20 | 2 | 0.625 |" in gpt2.values_table(found)


@pytest.mark.slow
def test_a_head_of_gpt2_is_searched_beyond_the_theorem(shared_dir: object) -> None:
    folder = gpt2.shared_folder()
    if folder is None:
        pytest.skip("needs the weights of GPT-2 in HOWSMOOTH_SHARED")
    ((_, attention, radius),) = gpt2.gpt2(folder, (6,))
    found = gpt2.head_point(attention, 3, 8, radius)
    assert radius == pytest.approx(23.5, abs=0.05)
    assert 10 * found.theorem < found.search <= found.upper.value < 3 * found.search


@pytest.mark.parametrize("b", [1.0, 3.0])
def test_the_closed_form_of_two_atoms_is_the_local_constant(b: float) -> None:
    head = hs.SelfAttention.from_bilinear(torch.tensor([[-b]], dtype=F64), torch.ones(1, 1, dtype=F64))
    for first, second, ratio in np.random.default_rng(0).uniform(-1, 1, (5, 3)):
        atoms = torch.tensor([[first], [second]], dtype=F64)
        weights = torch.tensor([1.0, math.exp(3 * ratio)], dtype=F64)
        exact = local_constant(head, Measure(atoms, weights / weights.sum())).value
        assert references.two_atom_norm(b, first, second, 3 * ratio) == pytest.approx(float(exact), rel=1e-8)


@pytest.mark.slow
def test_the_supremum_of_two_atoms_is_the_one_known() -> None:
    assert references.two_atom_supremum(3.0) == pytest.approx(48.07, abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 4, 8])
def test_known_worst_cases_are_found_again(place: int) -> None:
    assert references.row(list(references.known())[place])[-1] == "yes"


def test_a_missed_target_is_said_and_a_value_above_a_bound_is_refused() -> None:
    case = references.Known("x", lambda: 10.0, 0.99, None, lambda: 9.8, 12.0)
    assert references.row(case) == ["x", "99 % of 10", "–", "9.8 (98.00 %)", "12", "NO"]
    assert references.row(replace(case, share=0.95))[-1] == "yes"
    with pytest.raises(AssertionError, match="above the upper bound"):
        references.row(replace(case, upper=9.0))


@pytest.mark.parametrize("name", ["random:bert[layers=1,width=16]", "random:llama[layers=1,width=16]"])
def test_embedded_tokens_are_what_the_first_layer_sees(name: str) -> None:
    opened = open_model(name)
    window = real.window(opened)
    over = Tokens(*real.embeddings(opened.model))
    seen = Targets(opened, window).sites[0].x
    torch.testing.assert_close(over.sequence(window.ids[0]), seen.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        over.sequence(window.ids.expand(2, -1)), seen.double().expand(2, -1, -1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_near_a_text_both_ends_enclose_what_random_neighbours_have() -> None:
    (near,) = real.near_text(open_model("random:bert[layers=1,width=16]"), [0], steps=10)
    assert [cell.over.eps / near.size for cell in near.cells] == pytest.approx(real.SHARES)
    for cell, random in zip(near.cells, near.random, strict=True):
        assert cell.centre < cell.lower <= cell.upper.value
        assert random <= cell.upper.value
    assert near.cells[0].lower <= near.cells[1].lower * (1 + 1e-9)
    assert len(real.near_table([near]).splitlines()) == 3


@pytest.mark.slow
def test_a_sequence_rougher_than_the_text_is_found() -> None:
    if not NAMED["minilm"].available():
        pytest.skip("needs all-MiniLM-L6-v2")
    found = real.worst_sequence(open_model("minilm"), starts=0, steps=1)
    assert found.witness.value > 1.05 * found.text
    assert len(found.tokens) == real.LENGTH
    assert "of 32 tokens of the vocabulary" in real.sequence_text(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", bench.PEERS)
def test_a_peer_of_the_race_has_the_norm_and_its_gradient(name: str) -> None:
    case = random_case(5, width=6, heads=1).double()
    f, x = block_function(case), case.x.clone().requires_grad_()
    norm = torch.linalg.matrix_norm(dense(f, x, create_graph=True), 2)
    (exact,) = torch.autograd.grad(norm, x)
    slope = bench.PowerSlope(f, x, rtol=1e-9, most=1000) if name == "power iteration" else bench.PEERS[name](f, x)
    values, gradients = zip(*(slope(x) for _ in range(1 if name == "power iteration" else 300)), strict=True)
    assert max(values) <= norm.item() * (1 + 1e-12)
    assert values[-1] == pytest.approx(norm.item(), rel=1e-9)
    torch.testing.assert_close(gradients[-1], exact, rtol=1e-5, atol=1e-7)


def test_adam_stays_in_the_ball_and_climbs() -> None:
    case = random_case(5, width=6, heads=1).double()
    seen: list[Tensor] = []
    slope = bench.WarmSlope(block_function(case), case.x)

    def watched(x: Tensor) -> tuple[float, Tensor]:
        seen.append(x.detach().clone())
        return slope(x)

    values = list(bench.adam(watched, case.x, 0.3, 40))
    assert len(values) == 40
    assert values[-1] > 2 * values[5]
    assert max(float(x.norm(dim=-1).max()) for x in seen[1:]) <= bench.RADIUS * (1 + 1e-12)
    steps = [float((b - a).norm()) for a, b in itertools.pairwise(seen)]
    assert steps[-1] < 0.1 * steps[0]


def test_the_first_time_of_a_value_counts() -> None:
    traces = [[(1.0, 2.0), (2.0, 5.0)], [(1.5, 3.0), (3.0, 9.0)]]
    assert bench.reached(traces, 3.0) == 1.5
    assert bench.reached(traces, 9.0) == 3.0
    assert bench.reached(traces, 9.1) == math.inf
    assert bench.Race("x", 1.0, 30.0, 2.0).ratio == 15


def test_as_it_comes_the_first_peer_counts_or_the_time_that_all_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ours", lambda case, start, steps: [(0.5, 96.0), (9.0, 100.0)])
    ways = {"slow": [[(1.0, 50.0), (8.0, 97.0)]], "quick": [[(2.0, 90.0), (4.0, 95.0)], [(6.0, 10.0)]]}
    won = bench.as_it_comes(random_case(2, width=4, heads=1), ways)
    assert won == bench.Race("quick", 95.0, 4.0, 0.5)
    assert won.written == "4 / 0.5 = 8×"
    none = bench.as_it_comes(
        random_case(2, width=4, heads=1), {"slow": [[(30.0, 1.0)]], "quick": [[(1.0, 9.0)], [(7.0, 94.0)]]}
    )
    assert none.written == "> 7 / 0.5 = > 14×"


def test_a_trace_is_as_long_as_it_may_be_and_never_falls() -> None:
    assert [best for _, best in bench.traced(iter([1.0, 3.0, 2.0]), 60)] == [1.0, 3.0, 3.0]
    assert len(bench.traced(iter([1.0, 3.0, 2.0]), 0)) == 1


@pytest.mark.slow
def test_the_race_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STEPS", (25, 50))
    section = bench.run(True, lambda text: None)
    assert [len(table.rows) for table in section.tables] == [3, 1]
    assert len(section.targets) == 4
