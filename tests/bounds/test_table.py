"""The table: true from both sides for every kind of attention, sorted, compared where comparison means something."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.bounds import CATALOGUE, Bound, three_paths
from howsmooth.bounds.bound_table import BoundRow, ContradictedBound, Table, table, with_witness
from howsmooth.reports.figures import save_figure
from howsmooth.reports.figures.bound_curves import bounds_against_n, spaced
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.testing import dense_jacobian


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dot(seed: int, **options: object) -> hs.SelfAttention:
    return hs.SelfAttention.random(4, 2, seed=seed, dtype=torch.float64, **options)


def biased(seed: int) -> hs.SelfAttention:
    weights = [normal(4, 4, seed=seed + i) for i in range(4)]
    return hs.SelfAttention(*weights, heads=2, query_bias=normal(4, seed=9), key_bias=normal(4, seed=8))


def of_kind(kind: type, seed: int, **options: object) -> nn.Module:
    return kind(*(normal(4, 4, seed=seed + i) / 2 for i in range(4)), heads=2, **options)


MAPS: dict[str, Callable[[int], nn.Module]] = {
    "plain": dot,
    "causal": lambda seed: dot(seed, mask="causal"),
    "window": lambda seed: dot(seed, mask=hs.SlidingWindow(2, causal=True)),
    "rotary": lambda seed: dot(seed, rotary=hs.Rotary.standard(2)),
    "alibi": lambda seed: dot(seed, logit_biases=[hs.ALiBi.standard(2)]),
    "soft-capped": lambda seed: dot(seed, softcap=2.0),
    "normalised": lambda seed: dot(seed, qk_norm="rms"),
    "grouped": lambda seed: dot(seed, kv_heads=1),
    "biased": biased,
    "l2": lambda seed: hs.L2SelfAttention(*(normal(4, 4, seed=seed + i) / 2 for i in range(3)), heads=2),
    "l2 causal": lambda seed: hs.L2SelfAttention(normal(4, 4, seed=seed), normal(4, 4, seed=1), mask="causal"),
    "sigmoid": lambda seed: of_kind(hs.SigmoidAttention, seed),
    "cosine": lambda seed: of_kind(hs.CosineAttention, seed, eps=0.1),
}


def dense(attention: nn.Module, x: Tensor, head: int | None, norm: float) -> float:
    """The norm of the Jacobian that autograd writes out, the output of other heads set to zero."""
    if head is not None:
        attention = copy.deepcopy(attention)
        kept = torch.zeros_like(attention.output_weight)
        kept[head] = attention.output_weight[head]
        attention.output_weight = kept
    matrix = dense_jacobian(attention, x)
    return float(torch.linalg.matrix_norm(matrix, norm))


def entry(name: str, value: float, side: str = "upper", scope: str = "ball", norm: float = 2) -> Bound:
    return Bound(
        name=name,
        statement=r"\|V\|_2",
        reference="a test & 100 % so",
        side=side,
        norm=norm,
        scope=scope,
        kinds=(),
        assumptions=(),
        evaluate=lambda where: torch.tensor(value, dtype=torch.float64),
        combine="block",
    )


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A catalogue of these entries alone."""

    def keep(*entries: Bound) -> None:
        for name in list(CATALOGUE):
            monkeypatch.delitem(CATALOGUE, name)
        for bound in entries:
            monkeypatch.setitem(CATALOGUE, bound.name, bound)

    return keep


def by_name(found: Table) -> dict[str, BoundRow]:
    assert len({row.name for row in found}) == len(found)
    return {row.name: row for row in found}


HEAD = hs.SelfAttention.from_bilinear(-torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("per_head", [False, True], ids=["block", "heads"])
@pytest.mark.parametrize("name", MAPS)
def test_upper_bounds_lie_above_the_dense_jacobian_and_above_every_lower_bound(name: str, per_head: bool) -> None:
    for seed, scale in ((0, 0.3), (1, 1.0), (2, 4.0)):
        attention, x = MAPS[name](seed), scale * normal(5, 4, seed=100 + seed)
        found = table(attention, over=hs.sets.Around(x, 0.1), per_head=per_head)
        exact = {(r.head, r.norm): dense(attention, x, r.head, r.norm) for r in found}
        for row in found:
            truth = exact[row.head, row.norm]
            if row.kind == "measured":
                assert row.value == pytest.approx(truth, rel=1e-9)
            if row.kind == "upper":  # every scope holds the input
                assert row.value >= truth * (1 - 1e-9), row.name
                assert row.ratio is None or row.ratio >= 1 - 1e-9
        heads = range(attention.heads) if per_head else [None]
        assert {row.head for row in found if row.kind == "measured"} == set(heads)


def test_rows_are_sorted_tightest_first_within_norm_and_head() -> None:
    found = table(dot(0), over=normal(5, 4, seed=1), per_head=True)
    heads = [row.head for row in found]
    assert heads == sorted(heads)
    for head in (0, 1):
        rows = [row for row in found if row.head == head]
        kinds = [row.kind for row in rows]
        assert kinds == sorted(kinds, key=["measured", "upper", "lower"].index)
        upper, lower = ([row.value for row in rows if row.kind == kind] for kind in ("upper", "lower"))
        assert len(upper) >= 4
        assert upper == sorted(upper)
        assert lower == sorted(lower, reverse=True)


def test_ratios_divide_by_what_is_known_on_the_same_scope(only: Callable[..., None]) -> None:
    only(
        entry("t.point", 10.0, scope="point"),
        entry("t.ball", 60.0),
        entry("t.measures", 900.0, scope="mean-field W2"),
        entry("t.everywhere", 80.0, scope="global"),
        entry("t.low", 20.0, "lower"),
        entry("t.low_measures", 300.0, "lower", "mean-field W2"),
    )
    found = table(HEAD, over=normal(3, 2, seed=0))
    rows, low = by_name(found), float(found.measured.lower)
    assert 0 < low < 10
    assert rows["t.point"].ratio == 10 / low
    assert rows["measured"].ratio == float(found.measured.value) / low
    assert rows["t.ball"].ratio == 3.0
    assert rows["t.everywhere"].ratio == 4.0
    assert rows["t.measures"].ratio == 3.0
    assert rows["t.low"].ratio == 1.0
    assert found.best_lower == 20.0
    assert table(HEAD, over=hs.sets.Ball(1.0)).best_lower == 300.0
    assert found.tightest("upper", ("ball", "global")).name == "t.ball"
    assert found.tightest("lower", ("global",)) is None


def test_the_measured_value_is_the_best_lower_bound_when_no_other_is_larger(only: Callable[..., None]) -> None:
    only(entry("t.ball", 60.0), entry("t.low", 1e-9, "lower"))
    found = table(HEAD, over=normal(3, 2, seed=0))
    assert found.best_lower == float(found.measured.lower)
    assert by_name(found)["t.ball"].ratio == 60 / found.best_lower


@pytest.mark.parametrize("scope", ["point", "ball", "global", "mean-field W2"])
def test_an_upper_bound_below_what_is_measured_is_an_error_that_names_it(scope: str, only: Callable[..., None]) -> None:
    x = normal(3, 2, seed=0)
    truth = dense(HEAD, x, None, 2)
    only(entry("t.wrong", 0.99 * truth, scope=scope))
    with pytest.raises(ContradictedBound, match=r"t\.wrong .* measured \(at the input\) reaches"):
        table(HEAD, over=x)
    only(entry("t.right", 1.01 * truth, scope=scope))
    assert len(table(HEAD, over=x)) == 2


def test_an_upper_bound_below_a_lower_one_is_an_error_only_where_they_speak_of_the_same(
    only: Callable[..., None],
) -> None:
    only(entry("t.up", 2.0), entry("t.low", 3.0, "lower"))
    with pytest.raises(ContradictedBound, match=r"t\.up .* at most 2, but t\.low"):
        table(HEAD, n=3, over=hs.sets.Ball(1.0))
    only(entry("t.up", 2.0), entry("t.low", 3.0, "lower", "mean-field W2"))
    assert len(table(HEAD, n=3, over=hs.sets.Ball(1.0))) == 2
    only(entry("t.up", 2.0), entry("t.low", 3.0, "lower", norm=math.inf))
    assert len(table(HEAD, n=3, over=hs.sets.Ball(1.0))) == 2


def test_lower_bounds_that_say_nothing_are_left_out_and_overflow_is_vacuous(only: Callable[..., None]) -> None:
    only(entry("t.low", math.nan, "lower"), entry("t.inf", math.inf), entry("t.nan", math.nan), entry("t.up", 7.0))
    found = table(HEAD, n=3, over=hs.sets.Ball(1.0))
    assert [row.name for row in found] == ["t.up", "t.inf", "t.nan"]
    assert [row.vacuous for row in found] == [False, True, True]
    assert str(found).count("> 1e308 (vacuous)") == 2
    assert found.to_latex().count(r"$>10^{308}$") == 2
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [(row["value"], row["vacuous"]) for row in plain["rows"]] == [(7.0, False), (None, True), (None, True)]


def test_mean_field_bounds_of_sharp_attention_are_vacuous_not_an_error() -> None:
    sharp = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
    rows = by_name(table(sharp, n=4, over=hs.sets.Ball(100.0)))
    assert rows["howsmooth.mean_field"].vacuous
    assert not rows["howsmooth.sqrt_n"].vacuous


def test_values_are_written_on_the_side_where_they_stay_true() -> None:
    facts = (2, "ball", "", "")
    assert BoundRow("a", 1.23451, "upper", *facts).written == "≤ 1.235"
    assert BoundRow("a", 1.23459, "lower", *facts).written == "≥ 1.234"
    assert BoundRow("a", 1.23459, "measured", *facts).written == "≈ 1.235"


def test_the_table_agrees_with_the_entries_of_the_catalogue() -> None:
    attention = dot(3)
    found = table(attention, n=7, over=hs.sets.Ball(1.5), per_head=True)
    for name in ("castin2024.sqrt_n", "howsmooth.mean_field"):
        values = [row.value for row in found if row.name == name]
        assert values == CATALOGUE[name](attention, n=7, over=hs.sets.Ball(1.5), per_head=True).tolist()
    assert [row.value for row in table(attention, n=7, over=hs.sets.Ball(1.5)) if row.name == "castin2024.sqrt_n"] == [
        float(CATALOGUE["castin2024.sqrt_n"](attention, n=7, over=hs.sets.Ball(1.5)))
    ]


def test_every_bound_is_a_row_or_refused_with_its_reason() -> None:
    attention = dot(0, mask="causal")
    found = table(attention, n=6, over=hs.sets.Ball(1.0), per_head=True)
    assert {row.name for row in found} | set(found.refused) == set(CATALOGUE)
    assert "mask" in found.refused["castin2024.mean_field"]
    for name, reason in found.refused.items():
        with pytest.raises(hs.DoesNotApply) as refusal:
            CATALOGUE[name](attention, n=6, over=hs.sets.Ball(1.0), per_head=True)
        assert reason in str(refusal.value)


def test_norm_filters_and_a_norm_without_bounds_is_refused(only: Callable[..., None]) -> None:
    only(entry("t.two", 60.0), entry("t.inf", 60.0, norm=math.inf))
    x = normal(3, 2, seed=0)
    assert [row.norm for row in table(HEAD, over=x)] == [2, 2, math.inf, math.inf]
    assert {row.norm for row in table(HEAD, over=x, norm=2)} == {2}
    found = table(HEAD, over=x, norm=math.inf)
    assert [row.name for row in found] == ["measured", "t.inf"]
    assert found[0].value == pytest.approx(dense(HEAD, x, None, math.inf), rel=1e-9)
    assert found[1].ratio == 60 / float(found.measured.lower)
    with pytest.raises(hs.InvalidInput, match="norms 2, inf and 'token'"):
        table(HEAD, over=x, norm=1)


@pytest.mark.slow
def test_the_inf_norm_of_a_large_input_is_left_unmeasured(only: Callable[..., None]) -> None:
    only(entry("t.inf", 1e9, norm=math.inf))
    wide = hs.SelfAttention.random(64)
    assert set(table(wide, over=normal(64, 64, seed=0)).measurements) == {2, math.inf}
    assert set(table(wide, over=normal(65, 64, seed=0)).measurements) == {2}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_input_counts_as_inside_the_set_of_its_own_normalisation(dtype: torch.dtype) -> None:
    norm = nn.LayerNorm(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 1e-5, -1.0]))
        norm.bias.copy_(torch.tensor([3.0, 0.0, 1.0, 0.5]))
    x = norm(normal(5, 4, seed=0).float()).detach().to(dtype)
    assert table(dot(0), over=hs.sets.Point(x, within=norm)).measured is not None
    with pytest.raises(hs.InvalidInput, match="token 4 of the input lies outside the set"):
        table(dot(0), over=hs.sets.Point(torch.cat([x[:4], 1.2 * x[4:]]), within=norm))


def test_an_input_outside_the_hyperplane_of_centred_tokens_is_refused() -> None:
    x = torch.full((1, 4), 0.5, dtype=torch.float64)
    assert table(dot(0), over=hs.sets.Point(x, within=nn.RMSNorm(4))).measured is not None
    with pytest.raises(hs.InvalidInput, match="outside the set"):
        table(dot(0), over=hs.sets.Point(x, within=nn.LayerNorm(4)))


def test_attention_is_left_in_its_dtype_and_measured_in_float64() -> None:
    attention = hs.SelfAttention.random(4, 2)
    x = normal(5, 4, seed=0).float()
    found = table(attention, over=x)
    assert found.measured.dtype == torch.float64
    assert attention.dtype == torch.float32
    assert float(found.measured) == pytest.approx(
        dense(attention.in_dtype(torch.float64), x.double(), None, 2), rel=1e-9
    )


def test_json_is_plain_and_complete() -> None:
    found = table(dot(0), over=normal(5, 4, seed=1))
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (plain["kind"], plain["heads"], plain["n"], plain["eps"]) == ("dot_product", 2, 5, None)
    assert plain["best_lower"] == found.best_lower
    assert plain["measured"]["2"]["value"] == float(found.measured)
    assert [row["name"] for row in plain["rows"]] == [row.name for row in found]
    facts = ["name", "value", "kind", "norm", "scope", "reference", "statement", "ratio", "head", "guarantee"]
    assert {*facts, "vacuous"} == set(plain["rows"][0])
    assert table(HEAD, n=math.inf, over=hs.sets.Ball(1.0)).to_dict()["n"] == "inf"


def test_latex_has_one_line_per_row_and_escapes_names(only: Callable[..., None]) -> None:
    only(entry("t.up_a", 6.0e7), entry("t.low", 3.0, "lower"))
    lines = table(HEAD, n=3, over=hs.sets.Ball(1.0)).to_latex().splitlines()
    assert lines[0] == r"\begin{tabular}{lllrlrl}"
    assert lines[-1] == r"\end{tabular}"
    body = [line for line in lines if line.endswith(r"\\") and "bound" not in line]
    assert len(body) == 2
    assert body[0].startswith(r"t.up\_a & $\|V\|_2$ & ")
    assert r"$\le 6\times 10^{7}$ & rounding modelled & $2\times 10^{7}$ & a test \& 100 \% so \\" in body[0]
    for line in body:
        assert line.replace(r"\&", "").count("&") == 6
        assert line.count("{") == line.count("}")
        assert line.replace(r"\$", "").count("$") % 2 == 0


def test_latex_of_heads_has_a_column_more() -> None:
    lines = table(dot(0), n=5, over=hs.sets.Ball(1.0), per_head=True).to_latex().splitlines()
    assert lines[0] == r"\begin{tabular}{rlllrlrl}"
    assert all(line.replace(r"\&", "").count("&") == 7 for line in lines if line.endswith(r"\\"))


def test_a_table_is_a_sequence_of_rows() -> None:
    found = table(HEAD, n=5, over=hs.sets.Ball(1.0))
    assert list(found) == [found[i] for i in range(len(found))]
    assert found[:2] == tuple(found)[:2]
    assert found.measured is None
    assert found.setting.n == 5
    assert all(row.name in str(found) for row in found)


def test_no_bound_at_all_is_an_empty_table(only: Callable[..., None]) -> None:
    only()
    found = table(HEAD, n=5, over=hs.sets.Ball(1.0))
    assert (len(found), found.best_lower, found.tightest("upper")) == (0, None, None)
    assert found.to_dict()["rows"] == []


def test_a_missing_radius_is_asked_for() -> None:
    for where in ({"n": 10}, {}):
        with pytest.raises(hs.InvalidInput, match="give a set"):
            table(HEAD, **where)


def test_an_input_of_the_set_is_one_more_lower_bound() -> None:
    found = table(HEAD, n=5, over=hs.sets.Ball(1.0))
    x = torch.tensor([[-1.0, 0.0], *[[1.0, 0.0]] * 4], dtype=torch.float64)
    known = with_witness(found, x, "clusters")
    row = by_name(known)["clusters"]
    assert row.value == pytest.approx(float(hs.measure(HEAD.double(), x)), rel=1e-2)
    assert (row.kind, row.scope, len(known)) == ("lower", "ball", len(found) + 1)
    assert known.best_lower == max(found.best_lower or 0.0, row.value)
    assert all(new.ratio <= old.ratio for new, old in zip(known[:3], found[:3], strict=True))  # type: ignore[operator]


def test_equal_tokens_at_the_origin_are_measured_without_a_set() -> None:
    found = table(HEAD, over=torch.zeros(3, 2))
    assert found.setting.tokens is None
    assert by_name(found)["measured"].value == pytest.approx(1.0)


class Doubling(nn.Module):
    """A map without heads, known to the catalogue by its kind alone."""

    kind, in_features = "doubling", 2

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_module_that_is_no_attention_map_is_measured_as_a_function(only: Callable[..., None]) -> None:
    only(replace(entry("t.up", 3.0), kinds=("doubling",)), entry("t.maps", 1.0))
    for per_head in (False, True):
        found = table(Doubling(), over=normal(3, 2, seed=0), per_head=per_head)
        assert [row.name for row in found] == ["measured", "t.up"]
        assert found[0].value == pytest.approx(2.0)
        assert "attention map" in found.refused["t.maps"]


def curve(figure: object, name: str) -> list[tuple[float, float]]:
    """The points of the line that carries this label."""
    axes = figure.axes[0]
    (label,) = [text for text in axes.texts if name in text.get_text().split(" = ")]
    (line,) = [line for line in axes.lines if line.get_color() == label.get_color() and len(line.get_xdata()) > 1]
    return list(zip(*line.get_data(), strict=True))


@pytest.mark.slow
def test_the_figure_draws_the_numbers_of_the_table(tmp_path: Path) -> None:
    figure = bounds_against_n(HEAD, lengths=[4, 16, 64], over=hs.sets.Ball(1.0))
    for name in ("castin2024.sqrt_n", "howsmooth.sqrt_n", "howsmooth.mean_field"):
        expected = [
            (n, by_name(table(HEAD, n=n, over=hs.sets.Ball(1.0)))[name].value) for n in (4, 7, 16, 64)
        ]  # 7 ≈ e²: the bend
        assert curve(figure, name) == expected
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert {text.get_text() for text in axes.get_legend().get_texts()} >= {"upper bound", "estimate"}
    save_figure(figure, tmp_path / "f.png")
    assert imread(tmp_path / "f.png").std() > 0.05


def test_the_figure_measures_the_first_tokens_of_the_input() -> None:
    attention, x = dot(0), normal(9, 4, seed=1)
    figure = bounds_against_n(attention, over=x)
    points = curve(figure, "measured: the first n tokens of the input")
    assert [n for n, _ in points] == [2, 4, 8, 9]
    assert [value for _, value in points] == pytest.approx([dense(attention, x[:n], None, 2) for n in (2, 4, 8, 9)])


@pytest.mark.slow
def test_the_figure_marks_the_crossover_when_it_is_inside() -> None:
    marks = [
        line.get_xdata()[0]
        for line in bounds_against_n(HEAD, over=hs.sets.Ball(1.0)).axes[0].lines
        if line.get_linestyle() == ":"
    ]
    assert marks == pytest.approx([math.exp(2)])
    far = bounds_against_n(HEAD, lengths=[2, 4], over=hs.sets.Ball(2.0)).axes[0]
    assert not [line for line in far.lines if line.get_linestyle() == ":"]


def test_the_figure_names_what_is_far_above_instead_of_drawing_it() -> None:
    axes = bounds_against_n(HEAD, lengths=[2, 8], over=hs.sets.Ball(6.0)).axes[0]
    assert any(text.get_text() == "↑ castin2024.mean_field: 1e33" for text in axes.texts)
    assert axes.get_ylim()[1] < 1e10


def test_a_figure_without_a_set_or_with_one_length_is_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="needs a set"):
        bounds_against_n(HEAD, lengths=[2, 4])
    with pytest.raises(hs.InvalidInput, match="two lengths"):
        bounds_against_n(HEAD, lengths=[2], over=hs.sets.Ball(1.0))
    with pytest.raises(hs.InvalidInput, match="two lengths"):
        bounds_against_n(HEAD, lengths=[2, 4], over=normal(3, 2, seed=0))


def test_labels_keep_their_distance() -> None:
    placed = spaced([0.0, 0.01, 0.02, 0.9, 0.99, 1.0], 0.05)
    assert all(b - a >= 0.05 - 1e-12 for a, b in pairwise(placed))
    assert placed[-1] == 1.0


def test_a_token_set_can_be_given_itself() -> None:
    ball = Ellipsoid.ball(1.0, width=2)
    assert [r.value for r in table(HEAD, n=5, over=ball)] == [r.value for r in table(HEAD, n=5, over=hs.sets.Ball(1.0))]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("eps", [None, 0.1])
def test_the_weights_of_all_heads_are_computed_once_for_all_bounds(
    per_head: bool, eps: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    compute = three_paths._weights

    def counting(attention: hs.SelfAttention, query: Tensor, *rest: object) -> object:
        counted.append(len(query))
        return compute(attention, query, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(three_paths, "_weights", counting)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    over = x if eps is None else hs.sets.Around(x, eps)
    found = table(hs.SelfAttention.random(8, heads=4), over=over, per_head=per_head)
    at_input = {row.name for row in found if row.scope in ("point", "neighbourhood") and row.kind == "upper"}
    assert len(at_input) == 5 + (eps is not None)
    assert counted == [4]


def test_heads_that_do_not_fit_together_are_walked_in_groups_to_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    together = table(hs.SelfAttention.random(8, heads=4), over=hs.sets.Around(x, 0.1))
    monkeypatch.setattr(three_paths, "GROUP_SIZE", 1)
    alone = table(hs.SelfAttention.random(8, heads=4), over=hs.sets.Around(x, 0.1))
    assert [row.name for row in together] == [row.name for row in alone]
    assert [row.value for row in together] == pytest.approx([row.value for row in alone], rel=1e-12)
