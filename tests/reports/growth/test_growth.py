"""Growth laws: fits against scipy and numpy, intervals and verdicts on data whose law is known."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, stats

import howsmooth as hs
from howsmooth import InvalidInput
from howsmooth.reports.figures import new_figure
from howsmooth.reports.figures.growth_curve import growth_figure
from howsmooth.reports.growth import Growth, growth
from howsmooth.reports.growth.laws import Sample, compare_laws, fit_break, fit_power_law

LENGTHS = np.array([8, 16, 32, 64, 128, 256, 512])
LAWS = {
    "constant": lambda n: 0 * n + 3.0,
    "log n": lambda n: 2 * np.log(n),
    "n^1/4": lambda n: 2 * n**0.25,
    "n^1/2": lambda n: 0.7 * n**0.5,
    "power": lambda n: 0.7 * n**0.37,
    "plateau": lambda n: np.minimum(n, 100.0) ** 0.5,
}


def noisy(law: str, inputs: int, noise: float, seed: int, lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Values of a law times independent lognormal errors, (lengths, inputs)."""
    errors = np.random.default_rng(seed).normal(0, noise, (len(lengths), inputs))
    return LAWS[law](lengths.astype(float))[:, None] * np.exp(errors)


def repeated(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All points of a (lengths, inputs) array as two columns."""
    return np.repeat(LENGTHS, values.shape[1]), values.reshape(-1)


def test_exponent_and_standard_error_equal_those_of_scipy() -> None:
    draw = np.random.default_rng(0)
    lengths = np.repeat([8, 16, 32, 64, 128], 3)
    values = 0.7 * lengths**0.4 * np.exp(draw.normal(0, 0.2, len(lengths)))
    found, line = fit_power_law(lengths.tolist(), values.tolist()), stats.linregress(np.log(lengths), np.log(values))
    assert found is not None
    assert found.exponent == pytest.approx(line.slope, rel=1e-12)
    assert found.error == pytest.approx(line.stderr, rel=1e-12)
    assert found.factor == pytest.approx(np.exp(line.intercept), rel=1e-12)
    assert found.at(32) == pytest.approx(np.exp(line.intercept + line.slope * np.log(32)), rel=1e-12)


def test_two_points_have_a_law_but_no_error() -> None:
    found = fit_power_law([4, 16], [1.0, 2.0])
    assert found is not None
    assert (found.exponent, found.error) == (pytest.approx(0.5), None)
    assert str(found) == "n^0.50"


@pytest.mark.parametrize(("lengths", "values"), [([8, 8], [1.0, 2.0]), ([8, 16], [0.0, 1.0]), ([8, 16], [1, np.inf])])
def test_there_is_no_law_through_one_length_or_values_without_logarithm(lengths: list, values: list) -> None:
    assert fit_power_law(lengths, values) is None


def test_exponent_is_that_of_all_points_and_of_the_weighted_geometric_means() -> None:
    rows = [row[: 2 + i] for i, row in enumerate(noisy("n^1/4", 9, 0.2, seed=1))]
    found = growth(rows, LENGTHS)
    points = np.repeat(LENGTHS, [len(row) for row in rows])
    assert found.exponent == pytest.approx(stats.linregress(np.log(points), np.log(np.concatenate(rows))).slope)
    means = [np.log(row).mean() for row in rows]
    weights = np.sqrt([len(row) for row in rows])
    slope, intercept = np.polyfit(np.log(LENGTHS), means, 1, w=weights)
    assert (found.exponent, found.factor) == (pytest.approx(slope), pytest.approx(math.exp(intercept)))
    assert found.at(100) == pytest.approx(math.exp(intercept) * 100**slope)


def test_exponent_of_paired_inputs_is_the_mean_of_theirs() -> None:
    values = noisy("power", 6, 0.2, seed=2)
    each = [np.polyfit(np.log(LENGTHS), np.log(column), 1)[0] for column in values.T]
    assert growth(values, LENGTHS, paired=True).exponent == pytest.approx(np.mean(each))


def test_paired_interval_is_the_percentile_interval_of_scipy_stretched_for_few_inputs() -> None:
    draw = np.random.default_rng(3)
    values = noisy("n^1/2", 8, 0.1, seed=3) * np.exp(draw.normal(0, 1, 8))
    slopes = np.array([np.polyfit(np.log(LENGTHS), np.log(column), 1)[0] for column in values.T])
    plain = stats.bootstrap(
        (slopes,), np.mean, method="percentile", n_resamples=20000, rng=np.random.default_rng(0)
    ).confidence_interval
    wider = math.sqrt(8 / 7) * stats.t.ppf(0.975, 7) / stats.norm.ppf(0.975)
    found = growth(values, LENGTHS, paired=True, resamples=20000)
    assert found.method == "bootstrap"
    expected = slopes.mean() + wider * (np.array(plain) - slopes.mean())
    assert found.interval == pytest.approx(tuple(expected), abs=0.02 * (expected[1] - expected[0]))


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [3, 10])
def test_interval_covers_the_true_exponent_as_often_as_it_says(inputs: int) -> None:
    intervals = [
        growth(noisy("power", inputs, 0.2, seed=seed), LENGTHS, resamples=300, seed=seed).interval
        for seed in range(300)
    ]
    covered = np.mean([low <= 0.37 <= high for low, high in intervals])  # type: ignore[misc]
    assert 0.92 <= covered <= 0.985


@pytest.mark.slow
def test_paired_intervals_cover_and_unpaired_ones_are_wider_where_inputs_differ_at_all_lengths() -> None:
    covered, widths = [], []
    for seed in range(200):
        shared = np.exp(np.random.default_rng(1000 + seed).normal(0, 0.6, 6))
        values = noisy("power", 6, 0.1, seed=seed) * shared
        paired, unpaired = (
            growth(values, LENGTHS, paired=paired, resamples=300, seed=seed).interval for paired in (True, False)
        )
        assert paired is not None
        assert unpaired is not None
        covered.append([low <= 0.37 <= high for low, high in (paired, unpaired)])
        widths.append((unpaired[1] - unpaired[0]) / (paired[1] - paired[0]))
    assert 0.90 <= np.mean([one for one, _ in covered]) <= 0.985
    assert np.mean([other for _, other in covered]) == 1
    assert np.median(widths) > 2


def test_values_without_spread_have_the_interval_of_the_regression_and_say_so() -> None:
    values = noisy("n^1/2", 1, 0.1, seed=0)[:, 0]
    line = stats.linregress(np.log(LENGTHS), np.log(values))
    reach = stats.t.ppf(0.975, 5) * line.stderr
    found = growth(values, LENGTHS)
    assert found.method == "regression"
    assert found.interval == pytest.approx((line.slope - reach, line.slope + reach))
    assert "from the regression: no spread of inputs to resample" in found.sentence
    copies = growth(np.repeat(values[:, None], 5, axis=1), LENGTHS)  # the same numbers again are no further evidence
    assert (copies.interval, copies.laws) == (found.interval, found.laws)


def test_one_length_with_a_single_input_has_the_interval_of_the_regression() -> None:
    rows = [[1.0, 1.1], [2.0], [3.9, 4.2]]
    found = growth(rows, [4, 16, 64])
    line = stats.linregress(np.log([4, 4, 16, 64, 64]), np.log([1.0, 1.1, 2.0, 3.9, 4.2]))
    assert found.interval is not None
    assert found.interval[1] - found.exponent == pytest.approx(stats.t.ppf(0.975, 3) * line.stderr)
    assert "a single input at some length" in found.sentence


def test_two_values_have_an_exponent_without_interval_and_no_comparison() -> None:
    found = growth([1.0, 2.0], [4, 16])
    assert (found.exponent, found.interval, found.verdict, found.laws) == (pytest.approx(0.5), None, None, ())
    assert found.sentence == (
        "Over n = 4 … 16 the values grow like n^0.50 (two values, so no interval); they are too few to compare laws."
    )
    assert found.band(8) is None


def test_band_is_the_interval_of_the_mean_response() -> None:
    values = noisy("n^1/4", 1, 0.1, seed=4)[:, 0]
    x, y = np.log(LENGTHS), np.log(values)
    line = stats.linregress(x, y)
    rest = y - line.intercept - line.slope * x
    size = math.sqrt(rest @ rest / 5) * stats.t.ppf(0.975, 5)
    found = growth(values, LENGTHS)
    for n in (8, 50, 512):
        centre = line.intercept + line.slope * math.log(n)
        reach = size * math.sqrt(1 / 7 + (math.log(n) - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
        assert found.band(n) == pytest.approx((math.exp(centre - reach), math.exp(centre + reach)))
    low, high = growth(noisy("n^1/4", 10, 0.1, seed=4), LENGTHS).band(64)  # type: ignore[misc]
    assert low < 2 * 64**0.25 < high < 1.1 * low


def by_likelihood(name: str, x: np.ndarray, y: np.ndarray) -> float:
    """The largest Gaussian log-likelihood of a law, by a general optimiser."""
    shapes: dict[str, Any] = {
        "constant": lambda p: p[0] + 0 * x,
        "log n": lambda p: p[0] + np.log(x),
        "n^1/4": lambda p: p[0] + x / 4,
        "n^1/2": lambda p: p[0] + x / 2,
        "power": lambda p: p[0] + p[1] * x,
        "plateau": lambda p: p[0] + p[1] * np.minimum(x, p[2]),
    }

    def cost(p: np.ndarray) -> float:
        return -float(stats.norm.logpdf(y, shapes[name](p), np.exp(p[3])).sum())

    ends = [-5, 5], [0 if name == "plateau" else -2, 2], [x[x > x.min()].min(), np.unique(x)[-2]], [-6, 1]
    found = optimize.differential_evolution(cost, ends, rng=0, tol=1e-12, maxiter=3000)
    return -min(found.fun, optimize.minimize(cost, found.x, method="Nelder-Mead", options={"xatol": 1e-10}).fun)


@pytest.mark.parametrize("truth", ["log n", "plateau"])
@pytest.mark.slow
def test_likelihoods_equal_those_of_a_general_optimiser(truth: str) -> None:
    values = noisy(truth, 3, 0.1, seed=5)
    n, flat = repeated(values)
    found = {law.name: law for law in growth(values, LENGTHS).laws}
    assert len(found) == 6
    for name, law in found.items():
        assert law.log_likelihood == pytest.approx(by_likelihood(name, np.log(n), np.log(flat)), abs=1e-5)
        assert law.bic == pytest.approx(law.parameters * math.log(len(n)) - 2 * law.log_likelihood)
    assert sum(law.weight for law in found.values()) == pytest.approx(1)


def test_paired_laws_leave_out_what_each_input_adds() -> None:
    values = noisy("n^1/2", 4, 0.1, seed=6) * np.exp(np.random.default_rng(6).normal(0, 1, 4))
    n, flat = repeated(values)
    who = np.tile(np.eye(4), (len(LENGTHS), 1))
    squares = np.linalg.lstsq(np.column_stack([np.log(n), who]), np.log(flat))[1][0]
    points = 4 * (len(LENGTHS) - 1) + 1
    law = next(law for law in growth(values, LENGTHS, paired=True).laws if law.name == "power")
    assert law.log_likelihood == pytest.approx(-points / 2 * (math.log(2 * math.pi * squares / points) + 1))
    # What inputs differ in drowns the law when they are taken for new ones at every length.
    assert growth(values, LENGTHS, paired=True).verdict == "n^1/2"
    assert growth(values, LENGTHS).verdict is None


@pytest.mark.parametrize("seed", range(6))
def test_the_broken_line_has_the_least_squares_of_all(seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = np.sort(draw.uniform(0, 5, 6))
    y = 0.6 * np.minimum(x, draw.uniform(1, 4)) + draw.normal(0, 0.2, 6)
    weights = draw.integers(1, 5, 6).astype(float)

    def squares(start: float) -> float:
        design = np.column_stack([np.ones(6), np.minimum(x, start)]) * np.sqrt(weights)[:, None]
        (_, slope), rest, *_ = np.linalg.lstsq(design, y * np.sqrt(weights))
        return float(rest[0]) if slope > 0 else math.inf

    found = fit_break(x, y, weights)
    assert found is not None
    starts = np.linspace(x[1], x[-2], 4001)
    least = min(squares(start) for start in [*starts, *x[1:-1]])
    assert squares(float(found.start)) == pytest.approx(float(found.squares), rel=1e-9)
    assert least * (1 - 1e-4) <= float(found.squares) <= least * (1 + 1e-9)


@pytest.mark.parametrize("truth", LAWS)
def test_the_right_law_is_picked_where_the_data_are_clear(truth: str) -> None:
    verdicts = [growth(noisy(truth, 10, 0.05, seed), LENGTHS, resamples=100).verdict for seed in range(40)]
    assert verdicts.count(truth) >= 36
    assert not set(verdicts) - {truth, None}  # never a wrong one


@pytest.mark.parametrize("truth", ["log n", "n^1/4"])
def test_laws_that_are_close_are_not_told_apart_without_the_data_for_it(truth: str) -> None:
    short = np.array([32, 64, 128])
    found = [growth(noisy(truth, 5, 0.2, seed, short), short, resamples=100) for seed in range(40)]
    verdicts = [one.verdict for one in found]
    assert verdicts.count(None) >= 30
    assert "cannot tell" in found[verdicts.index(None)].sentence


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "lengths"), [(1, 8), (2, 5), (10, 7)])
def test_growth_that_goes_on_is_hardly_ever_called_a_plateau(inputs: int, lengths: int) -> None:
    n = 8 * 2 ** np.arange(lengths)
    verdicts = [growth(noisy("power", inputs, 0.1, s, n), n, resamples=100).verdict for s in range(200)]
    assert verdicts.count("plateau") <= 6


def test_a_plateau_says_from_which_n() -> None:
    found = growth(noisy("plateau", 10, 0.05, seed=7), LENGTHS)
    assert found.verdict == "plateau"
    assert found.plateau is not None
    assert found.plateau.interval is not None
    low, high = found.plateau.interval
    assert 85 < low < 100 < high < 115
    assert low < found.plateau.start < high
    assert found.plateau.exponent == pytest.approx(0.5, abs=0.05)
    assert found.plateau.level == pytest.approx(10, rel=0.05)
    assert "a plateau describes them better, with strong evidence: growth like n^0.5" in found.sentence
    assert f"up to about n = {found.plateau.start:.0f} (95 % interval {low:.0f} to {high:.0f})" in found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [4, 10])
def test_intervals_of_the_start_of_a_plateau_cover_it(inputs: int) -> None:
    drawn = (growth(noisy("plateau", inputs, 0.1, seed), LENGTHS, resamples=300, seed=seed) for seed in range(200))
    found = [one.plateau for one in drawn]
    intervals = [one.interval for one in found if one is not None and one.interval is not None]
    assert len(intervals) >= 190
    assert 0.92 <= np.mean([low <= 100 <= high for low, high in intervals]) <= 0.99


def test_the_mean_field_regime_is_found_where_its_theorem_puts_it() -> None:
    head = hs.SelfAttention.from_bilinear(-2 * torch.eye(1), torch.eye(1))
    bound, lengths = hs.bounds.get("howsmooth.unified"), [2**k for k in range(1, 13)]
    found = growth([float(bound(head, n=n, over=hs.sets.Ball(1.0))) for n in lengths], lengths)
    assert found.verdict == "plateau"
    assert found.plateau is not None
    assert found.plateau.interval is None
    assert 32 < found.plateau.start < 64  # the neighbours of e^{2a} = 54.6 among the lengths
    below = [n for n in lengths if n < math.exp(4)]  # a + (1+a)√n, before the bend
    part = growth([float(bound(head, n=n, over=hs.sets.Ball(1.0))) for n in below], below)
    assert part.plateau is None
    assert 0.3 < part.exponent < 0.5


def test_exact_laws_are_told_by_their_own_name_and_not_by_rounding() -> None:
    for name in ("constant", "log n", "n^1/4", "n^1/2"):
        assert growth(LAWS[name](LENGTHS.astype(float)), LENGTHS).verdict == name
    falling = growth(LENGTHS**-0.3, LENGTHS)
    assert falling.verdict == "power"
    assert "fall like n^-0.30" in falling.sentence


def test_log_n_has_no_likelihood_where_it_is_zero() -> None:
    found = growth(noisy("n^1/2", 3, 0.1, 0, np.arange(1, 9)), np.arange(1, 9))
    laws = {law.name: law for law in found.laws}
    assert laws["log n"].weight == 0
    assert laws["log n"].log_likelihood == -math.inf
    assert laws["n^1/2"].weight > 0.5
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["laws"]["log n"]["log_likelihood"] is None


def test_values_that_do_not_change_are_said_not_to() -> None:
    found = growth(noisy("constant", 10, 0.1, seed=1), LENGTHS)
    assert found.verdict == "constant"
    assert "the values change like n^" in found.sentence
    assert "a constant describes them best of the laws compared" in found.sentence


def same(one: Growth, other: Growth) -> bool:
    return (one.exponent, one.interval, one.laws) == (other.exponent, other.interval, other.laws)


def test_arrays_lists_tensors_and_columns_of_a_table_say_the_same() -> None:
    values = noisy("n^1/4", 4, 0.1, seed=0)
    found = growth(values, LENGTHS)
    n, flat = repeated(values)
    rows = pd.DataFrame({"length": n, "value": flat})
    assert same(found, growth(rows.value, rows.length))
    assert same(found, growth(pd.DataFrame(values), LENGTHS.tolist()))
    assert same(found, growth([list(row) for row in values], tuple(LENGTHS)))
    assert same(found, growth(torch.tensor(values, requires_grad=True), torch.tensor(LENGTHS)))
    assert same(found, growth(list(torch.tensor(values)), LENGTHS))
    assert same(found, growth(values[::-1], LENGTHS[::-1]))
    half = growth(torch.tensor(values, dtype=torch.bfloat16), LENGTHS)
    assert half.exponent == pytest.approx(found.exponent, abs=0.01)


def test_the_seed_fixes_the_interval() -> None:
    values = noisy("n^1/4", 4, 0.1, seed=0)
    first, again, other = (growth(values, LENGTHS, seed=seed).interval for seed in (0, 0, 1))
    assert first == again != other
    assert first == pytest.approx(other, abs=0.01)


def test_a_higher_confidence_has_a_wider_interval() -> None:
    values = noisy("n^1/4", 6, 0.1, seed=0)
    (a, b), (c, d) = (growth(values, LENGTHS, confidence=level).interval for level in (0.8, 0.99))  # type: ignore[misc]
    assert c < a < b < d


@pytest.mark.parametrize(
    ("values", "lengths", "said"),
    [
        ([[1.0, 2.0]], [8], "two different lengths"),
        ([1.0, 2.0], [8, 8], "two different lengths"),
        ([], [], "two different lengths"),
        ([1.0, 0.0], [8, 16], "at n = 16 are not all positive"),
        ([1.0, -2.0], [8, 16], "at n = 16 are not all positive"),
        ([[1.0, math.nan], [1.0, 2.0]], [8, 16], "at n = 8 are not all positive"),
        ([1.0, math.inf], [8, 16], "at n = 16 are not all positive"),
        ([[1.0], []], [8, 16], "at n = 16 must be a number or a list"),
        (np.ones((2, 3, 4)), [8, 16], "at n = 8 must be a number or a list"),
        (np.ones((3, 2)), [8, 16], "got 3 for 2: give an array of shape"),
        (1.0, [8, 16], "got 1 for 2"),
        ([1.0, 2.0], [0, 16], "lengths must be positive"),
        ([1.0, 2.0], [8, math.nan], "lengths must be positive"),
        ([1.0, 2.0], 8, "per length"),
        (["a", "b"], [8, 16], "the values must be real numbers"),
        ([1.0, 2.0], ["a", "b"], "the lengths must be real numbers"),
        ([1j, 2.0], [8, 16], "the values must be real numbers"),
        ([None, 2.0], [8, 16], "at n = 8 are not all positive"),
    ],
)
def test_data_without_an_answer_are_refused(values: Any, lengths: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        growth(values, lengths)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"confidence": 1.0}, "between 0 and 1"),
        ({"confidence": math.nan}, "between 0 and 1"),
        ({"resamples": 10}, "at least 100 resamples"),
        ({"paired": True}, "the same inputs at every length"),
    ],
)
def test_options_without_an_answer_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        growth([[1.0, 2.0], [2.0, 3.0, 4.0]], [8, 16], **options)


def test_the_dictionary_is_ready_for_json() -> None:
    found = growth(noisy("plateau", 10, 0.1, seed=7), LENGTHS)
    back = json.loads(json.dumps(found.to_dict()))
    assert back["exponent"] == found.exponent
    assert tuple(back["interval"]) == found.interval
    assert back["plateau"]["start"] == found.plateau.start  # type: ignore[union-attr]
    assert back["inputs"] == [10] * 7
    assert back["sentence"] == str(found)
    assert next(iter(back["laws"])) == back["verdict"] == "plateau"


def test_laws_with_too_few_numbers_are_left_out() -> None:
    x = np.log([4.0, 8.0, 16.0, 32.0, 64.0])
    names = {law.name for law in compare_laws(Sample(x, x / 3, np.ones(5), 0.0, 5))}
    assert names == {"constant", "log n", "n^1/4", "n^1/2", "power"}


def test_the_figure_has_data_fit_band_slopes_and_plateau() -> None:
    values = noisy("plateau", 10, 0.1, seed=7)
    found = growth(values, LENGTHS)
    axes = growth_figure(found).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = {str(line.get_label()): line for line in axes.lines}
    n, flat = repeated(values)
    np.testing.assert_allclose(lines["inputs"].get_data(), (n, flat))
    np.testing.assert_allclose(lines["geometric means"].get_ydata(), stats.gmean(values, axis=1))
    np.testing.assert_allclose(lines[f"$n^{{{found.exponent:.2f}}}$"].get_ydata()[0], found.at(8))
    for name, slope in (("$n^{1/4}$", 0.25), ("$n^{1/2}$", 0.5)):
        y = np.asarray(lines[name].get_ydata())
        assert math.log(y[-1] / y[0]) / math.log(512 / 8) == pytest.approx(slope)
    bent = np.asarray(lines[f"$n^{{{found.plateau.exponent:.2f}}}$, then a plateau"].get_ydata())  # type: ignore[union-attr]
    assert bent[-1] == bent[-20] == pytest.approx(found.plateau.level)  # type: ignore[union-attr]
    assert f"n = {found.plateau.start:.0f}" in [text.get_text() for text in axes.texts]  # type: ignore[union-attr]
    assert found.sentence in axes.get_xlabel()
    assert "95 % band (bootstrap)" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_figure_of_single_values_has_no_means_and_fits_into_other_figures() -> None:
    whole, panels = new_figure(2)
    assert growth_figure(growth([1.0, 2.0], [4, 16]), ax=panels[1]) is whole
    labels = [text.get_text() for text in panels[1].get_legend().get_texts()]
    assert labels == ["values", "$n^{0.50}$", "$n^{1/4}$", "$n^{1/2}$"]
    assert panels[1].get_xlabel() == "number of tokens n"
