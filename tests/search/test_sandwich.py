"""L ≤ Lip ≤ U: both ends checked against dense Jacobians and the catalogue, and attacked."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.bounds import CATALOGUE, table
from howsmooth.bounds.bound_table import ContradictedBound
from howsmooth.errors import InvalidInput
from howsmooth.reports.figures.bound_curves import sandwich_figure
from howsmooth.search.sandwich_search import not_passed, sandwich, tightest_upper
from howsmooth.search.witness import Witness
from howsmooth.sets import Around, Ball, InputSet, Normalised, Sphere
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.testing import dense_jacobian

QUICK = {"starts": 2, "steps": 25}


def dense_norm(f: nn.Module, x: Tensor, order: float = 2) -> float:
    """The norm of the Jacobian that autograd writes out in float64."""
    return float(torch.linalg.matrix_norm(dense_jacobian(copy.deepcopy(f).double(), x), order))


def against_identity(**options: object) -> hs.SelfAttention:
    """Logits −x_j·x_i, values x_j."""
    return hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2), **options)


@pytest.mark.slow
def test_both_ends_hold_for_every_length_and_radius() -> None:
    attention = hs.SelfAttention.random(6, heads=2, mask="causal", seed=1)
    found = sandwich(attention, [2, 5], over=[hs.sets.Ball(2.0), hs.sets.Ball(1.0)], **QUICK)
    assert [(cell.n, cell.size) for cell in found] == [(2, 1.0), (2, 2.0), (5, 1.0), (5, 2.0)]
    for cell in found:
        assert cell.witness.x.shape == (cell.n, 6)
        assert cell.over.excess(cell.witness.x) < 1e-9
        assert cell.lower == pytest.approx(dense_norm(attention, cell.witness.x), rel=1e-3)
        assert cell.lower <= dense_norm(attention, cell.witness.x) * (1 + 1e-9)
        best = table(attention, n=cell.n, over=hs.sets.Ball(cell.size)).tightest(
            "upper", ["ball", "global", "mean-field d2"]
        )
        assert best is not None
        assert cell.upper is not None
        assert (cell.upper.name, cell.upper.value) == (best.name, best.value)
        assert cell.upper.value >= cell.lower
        assert cell.ratio == cell.upper.value / cell.lower == cell.upper.ratio


def test_the_worst_case_of_minus_identity_lies_between_known_ends() -> None:
    """a = R² = 8: the search must reach 16.1 at n = 8, and no input exceeds a + (1 + a)√n."""
    (cell,) = sandwich(against_identity(), [8], over=[hs.sets.Ball(8**0.5)])
    assert cell.upper is not None
    assert cell.upper.value == pytest.approx(8 + 9 * 8**0.5)
    assert 16.1 <= cell.lower <= cell.upper.value


@pytest.mark.slow
def test_one_head_has_ends_of_its_own() -> None:
    attention = hs.SelfAttention.random(6, heads=3, seed=2)
    for head in range(3):
        (cell,) = sandwich(attention, [4], over=[hs.sets.Ball(1.5)], head=head, **QUICK)
        measured = hs.measure_heads(attention, cell.witness.x).value
        assert cell.lower == pytest.approx(float(measured[head]), rel=1e-6)
        rows = [row for row in table(attention, n=4, over=hs.sets.Ball(1.5), per_head=True) if row.kind == "upper"]
        assert cell.upper is not None
        assert cell.upper.value == min(row.value for row in rows if (row.head, row.norm) == (head, 2))
        assert cell.upper.head == head


@pytest.mark.slow
def test_a_larger_ball_is_never_left_below_a_smaller_one() -> None:
    """The smaller ball's witness is offered, so that one step from one start cannot fall behind it."""
    attention = hs.SelfAttention.random(5, seed=3)
    thorough, *hasty = (
        sandwich(attention, [6], over=[hs.sets.Ball(1.0)], starts=6, steps=150),
        *(
            sandwich(attention, [6], over=[hs.sets.Ball(1.0), hs.sets.Ball(1.0 + step)], starts=1, steps=1)
            for step in (1e-3, 1e-6)
        ),
    )
    for found in hasty:
        assert found[1].lower >= found[0].lower * (1 - 1e-6)
    assert thorough[0].lower > hasty[0][0].lower  # the control: without an offer one step falls behind


def test_a_longer_input_begins_from_the_shorter_ones_witness() -> None:
    """Repeating all tokens of an unmasked input leaves ‖J‖ as it is, so the longer input is not below the shorter."""
    attention = against_identity()
    (short,) = sandwich(attention, [4], over=[hs.sets.Ball(2.0)], starts=4, steps=200)
    doubled = short.witness.x.repeat_interleave(2, 0)
    assert float(hs.measure(attention, doubled, rtol=1e-9)) >= short.lower * (1 - 1e-6)
    both = sandwich(attention, [4, 8], over=[hs.sets.Ball(2.0)], starts=1, steps=1)
    assert both[1].lower >= both[0].lower * (1 - 1e-6)


def test_the_table_says_when_an_earlier_witness_won() -> None:
    attention = hs.SelfAttention.random(5, seed=3)
    first, second = sandwich(attention, [6], over=[hs.sets.Ball(1.0), hs.sets.Ball(1.0 + 1e-9)], starts=3, steps=100)
    assert (first.start, second.start) == (first.witness.start, "an earlier witness")


@pytest.mark.slow
def test_near_an_input_the_witness_lies_between_its_value_and_the_neighbourhood_bound() -> None:
    attention = hs.SelfAttention.random(8, heads=2, seed=4)
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(5))
    found = sandwich(attention, [3, 7], over=[hs.sets.Around(x, 0.05), hs.sets.Around(x, 0.2)], **QUICK)
    for cell in found:
        assert isinstance(cell.over, Around)
        assert float((cell.witness.x - x[: cell.n]).norm(dim=-1).max()) <= cell.over.eps * (1 + 1e-9)
        assert cell.centre == pytest.approx(dense_norm(attention, x[: cell.n].double()), rel=1e-3)
        assert cell.upper is not None
        assert cell.centre * (1 - 1e-6) <= cell.lower <= cell.upper.value
        expected = CATALOGUE["howsmooth.three_path_ball"](attention, over=hs.sets.Around(x[: cell.n], cell.over.eps))
        assert cell.upper.value <= float(expected) * (1 + 1e-12)
    assert found[1].lower > found[0].lower


def test_frobenius_balls_take_the_bound_of_the_ball_per_token_that_holds_them() -> None:
    attention, x = hs.SelfAttention.random(4, seed=6), torch.randn(5, 4)
    together, each = Around(x, 0.1, per_token=False), Around(x, 0.1)
    assert tightest_upper(attention, 5, together) == tightest_upper(attention, 5, each)
    (cell,) = sandwich(attention, [5], over=together, **QUICK)
    assert float((cell.witness.x - x).norm()) <= 0.1 * (1 + 1e-6)


def test_a_normalisation_layer_and_its_token_set_are_the_same_set() -> None:
    attention, norm = hs.SelfAttention.random(6, heads=2, seed=7), nn.LayerNorm(6)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    by_layer, by_set = (sandwich(attention, [4], over=over, **QUICK)[0] for over in (norm, Ellipsoid.after(norm)))
    assert by_layer.lower == by_set.lower
    assert Normalised(norm).excess(by_layer.witness.x) < 1e-9
    assert by_layer.upper == by_set.upper
    assert by_layer.size == Ellipsoid.after(norm).radius


def test_several_sets_are_searched_one_after_the_other() -> None:
    sets: list[InputSet] = [Sphere(1.0), Ball(2.0)]
    found = sandwich(against_identity(), [3], over=sets, **QUICK)
    assert [str(cell.over) for cell in found] == ["|x| = 1", "|x| ≤ 2"]
    assert float((found[0].witness.x.norm(dim=-1) - 1).abs().max()) < 1e-9


def test_l2_attention_has_both_ends_everywhere_in_the_infinity_norm() -> None:
    one = torch.ones(1, 1)
    attention = hs.L2SelfAttention(one, one, one)
    (cell,) = sandwich(attention, [10], norm=math.inf, starts=4, steps=150)
    assert cell.upper is not None
    assert (cell.upper.scope, cell.upper.norm) == ("global", math.inf)
    assert cell.lower == pytest.approx(dense_norm(attention, cell.witness.x, math.inf), rel=1e-9)
    assert 0.99 * 4.407 <= cell.lower <= cell.upper.value <= 5.405


def test_any_function_has_a_lower_end_alone() -> None:
    (cell,) = sandwich(lambda x: torch.sin(3 * x), [2], over=Ball(1.0, width=2), **QUICK)
    assert cell.upper is None
    assert cell.ratio is None
    assert 2.99 <= cell.lower <= 3 * (1 + 1e-9)  # |3 cos(3x)| ≤ 3, reached at 0
    assert cell.to_dict()["bound"] is None


@pytest.fixture
def false_bound() -> Iterator[None]:
    """√n‖V‖ without the score path: what the catalogue must never say."""
    true = CATALOGUE["howsmooth.sqrt_n"]
    CATALOGUE["false.sqrt_n"] = replace(
        true, name="false.sqrt_n", evaluate=lambda where, folded: where.numbers(folded).value * where.count**0.5
    )
    yield
    del CATALOGUE["false.sqrt_n"]


@pytest.mark.usefixtures("false_bound")
def test_a_false_bound_is_contradicted_loudly() -> None:
    with pytest.raises(ContradictedBound, match=r"false\.sqrt_n says .* but the witness"):
        sandwich(against_identity(), [8], over=[hs.sets.Ball(8**0.5)])


def test_a_bound_is_contradicted_only_by_more_than_rounding() -> None:
    upper = tightest_upper(against_identity(), 8, Ball(1.0))
    assert upper is not None
    kept = not_passed(upper, upper.value * (1 + 1e-8))
    assert kept is not None
    assert kept.ratio == pytest.approx(1)
    with pytest.raises(ContradictedBound):
        not_passed(upper, upper.value * (1 + 1e-5))
    assert not_passed(None, 1.0) is None


def test_an_upper_bound_that_overflows_says_nothing() -> None:
    for radius in (1.2e154, 1e160):
        upper = tightest_upper(against_identity(), 4, Ball(radius))
        assert upper is not None
        assert upper.vacuous
    (real,) = sandwich(against_identity(), [4], over=[hs.sets.Ball(1.0)], **QUICK)
    cell = replace(real, upper=not_passed(upper, real.lower))
    assert cell.ratio is None
    assert cell.to_dict()["vacuous"]
    json.dumps(cell.to_dict(), allow_nan=False)
    assert len(sandwich_figure([cell]).axes) == 1


def test_logits_beyond_the_resolution_of_float64_are_refused() -> None:
    with pytest.raises(InvalidInput, match="choose a smaller radius"):
        sandwich(against_identity(), [4], over=[hs.sets.Ball(1e160)], **QUICK)


def test_interruption_keeps_what_was_found(tmp_path: Path) -> None:
    def interrupt(label: str, done: float, cells: int, best: float) -> None:
        if done > 1.5:
            raise KeyboardInterrupt

    files = {}

    def file(n: int, over: InputSet) -> Path:
        return files.setdefault(n, tmp_path / f"{n}.safetensors")

    found = sandwich(against_identity(), [2, 3, 4], over=[hs.sets.Ball(1.0)], **QUICK, files=file, progress=interrupt)
    assert found.interrupted
    assert [cell.n for cell in found] == [2, 3]
    assert [cell.witness.stopped == "interrupted" for cell in found] == [False, True]
    assert sorted(files) == [2, 3]
    for cell in found:
        assert Witness.load(files[cell.n]).lower == cell.lower


@pytest.mark.slow
def test_the_time_is_shared_by_all_searches() -> None:
    attention = hs.SelfAttention.random(16, heads=2, seed=8)
    found = sandwich(attention, [16, 24], over=[hs.sets.Ball(1.0)], starts=8, steps=10**6, seconds=1.0)
    assert [cell.witness.stopped in ("seconds", "settled") for cell in found] == [True, True]
    assert sum(cell.witness.seconds for cell in found) < 4


def test_files_carry_the_source(tmp_path: Path) -> None:
    path, source = tmp_path / "w.safetensors", {"source": "here"}
    (cell,) = sandwich(
        against_identity(), [2], over=[hs.sets.Ball(1.0)], **QUICK, files=lambda n, over: path, source=source
    )
    stored = Witness.load(path)
    assert stored.source == source
    assert torch.equal(stored.x, cell.witness.x)
    assert cell.to_dict()["file"] == str(path)


def test_progress_goes_from_nothing_to_all() -> None:
    seen: list[tuple[float, int]] = []
    sandwich(
        against_identity(),
        [2, 3],
        over=[hs.sets.Ball(1.0)],
        **QUICK,
        progress=lambda _, done, of, best: seen.append((done, of)),
    )
    assert seen[0] == (0.0, 2)
    assert seen == sorted(seen)
    assert 1.5 < seen[-1][0] <= 2


def test_rows_go_to_pandas_and_json() -> None:
    found = sandwich(against_identity(), [2, 4], over=[hs.sets.Ball(1.0), hs.sets.Ball(2.0)], **QUICK)
    frame = found.to_pandas()
    assert frame["lower"].tolist() == [cell.lower for cell in found]
    assert (frame["upper"] >= frame["lower"]).all()
    assert set(frame["over"]) == {"ball"}
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


@pytest.mark.slow
def test_the_figure_shows_both_ends_against_n_and_against_the_radius() -> None:
    found = sandwich(against_identity(), [2, 4, 8], over=[hs.sets.Ball(1.0), hs.sets.Ball(2.0)], **QUICK)
    figure = found.figure()
    assert [ax.get_xlabel() for ax in figure.axes] == ["number of tokens n", "radius R of the tokens"]
    left, right = ([line for line in ax.lines if len(line.get_xdata()) > 1] for ax in figure.axes)
    assert (len(left), len(right)) == (2 * 2, 2 * 3)
    assert list(left[0].get_ydata()) == [cell.lower for cell in found if cell.size == 1.0]
    assert list(right[1].get_ydata()) == [cell.upper.value for cell in found if cell.n == 2 and cell.upper]
    for lower, upper in zip(left[::2], left[1::2], strict=True):
        assert all(low <= high for low, high in zip(lower.get_ydata(), upper.get_ydata(), strict=True))
    (only,) = sandwich_figure(found[:1]).axes
    assert only.get_xlabel() == "number of tokens n"
    near = sandwich(
        against_identity(),
        [2],
        over=[hs.sets.Around(torch.ones(2, 2), 0.1), hs.sets.Around(torch.ones(2, 2), 0.2)],
        **QUICK,
    )
    assert [ax.get_xlabel() for ax in near.figure().axes] == ["distance ε that tokens may move"]


def test_wrong_requests_are_refused() -> None:
    attention = against_identity()
    for wrong in ([], [0], [-2, 4], [2.5]):
        with pytest.raises(InvalidInput, match="whole number"):
            sandwich(attention, wrong, over=[hs.sets.Ball(1.0)])
    with pytest.raises(InvalidInput, match="give at least one"):
        sandwich(attention, [2], over=[])
    with pytest.raises(InvalidInput, match="got -1"):
        sandwich(attention, [2], over=[hs.sets.Ball(-1.0)])
    with pytest.raises(InvalidInput, match="got nan"):
        sandwich(attention, [2], over=[hs.sets.Ball(math.nan)])
    with pytest.raises(InvalidInput, match="give at least one"):
        sandwich(attention, [2], over={3: [Ball(1.0)]})
    with pytest.raises(InvalidInput, match="the input has 2"):
        sandwich(attention, [3], over=[hs.sets.Around(torch.ones(2, 2), 0.1)])
    with pytest.raises(InvalidInput, match=r"got -0\.1"):
        sandwich(attention, [2], over=[hs.sets.Around(torch.ones(2, 2), -0.1)])
    with pytest.raises(InvalidInput, match="width 3"):
        sandwich(attention, [2], over=nn.LayerNorm(3))
    with pytest.raises(InvalidInput, match="no search has ended"):
        sandwich_figure(())
