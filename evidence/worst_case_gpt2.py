"""The worst case of GPT-2 heads: what a search reaches beside the theorem's construction and the best upper bound."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from safetensors.torch import load_file

from evidence.real_heads import GPT2_FILE, shared_folder
from evidence.tables import table
from howsmooth.attention import AttentionMap
from howsmooth.bounds.bound_table import BoundRow
from howsmooth.bounds.lower_bounds import real_eigenpairs, two_cluster_input
from howsmooth.models.weight_files import load_attention
from howsmooth.reports.growth import Growth, growth
from howsmooth.reports.growth.laws import ROUNDING
from howsmooth.search import worst_case
from howsmooth.search.ascent import norm_at
from howsmooth.search.sandwich_search import not_passed, tightest_upper
from howsmooth.search.search_question import constructions, two_poles
from howsmooth.sets import Ball
from howsmooth.sets.ellipsoid import Ellipsoid

TITLE = "The worst case of GPT-2 heads"
LAYERS, RADIUS = (0, 6, 11), 10.0
LENGTHS, LONGER = (8, 16, 32, 64), (32, 64, 128, 256, 512)
SHOWN, ALONE = 64, 16
"""Length of the table of all heads, and of the search without constructions."""
STARTS, STEPS = 2, 16
STARTS_ALONE, STEPS_ALONE = 4, 60
ABOVE = 1.001
"""A search that ends this much above another value has exceeded it."""


@dataclass(frozen=True)
class Point:
    """One head at one length.

    Attributes:
        branches: the larger σ of the inputs of Castin et al. 2024, both eigenvalue branches, the outlier first.
        clusters: σ at the two clusters of `howsmooth.bounds.lower_bounds`, their pair and scale chosen for the
            head.
        poles: σ at `howsmooth.search.search_question.two_poles`.
        search: what the search reaches, which has all of these among its starts; start: the one that led there.
        upper: the smallest upper bound by a theorem.
    """

    n: int
    branches: float
    clusters: float
    poles: float
    search: float
    start: str
    upper: BoundRow

    @property
    def theorem(self) -> float:
        """The better one of the theorem's constructions."""
        return max(self.branches, self.clusters)

    @property
    def gain(self) -> float:
        """The search over the theorem's construction."""
        return self.search / self.theorem

    @property
    def climbed(self) -> float:
        """The search over the best of all its constructions: what climbing adds to them."""
        return self.search / max(self.theorem, self.poles)

    @property
    def ratio(self) -> float:
        """The upper end over the lower."""
        return self.upper.value / self.search


@dataclass(frozen=True)
class HeadCase:
    """One head on one ball at all lengths.

    Attributes:
        gamma: γ of the theorem, max(−γ_min, γ_max/8) over the real eigenvalues of A; NaN when there are none.
        points: at every length.
        unbiased: at every length, the branches' σ for the head without its query bias, as the theorem has it.
        longer: σ at two poles, at further lengths.
        alone: what random starts reach by themselves at one length.
    """

    layer: int
    head: int
    place: str
    radius: float
    gamma: float
    points: tuple[Point, ...]
    unbiased: tuple[float, ...]
    longer: tuple[float, ...]
    alone: float

    @property
    def exponent(self) -> float:
        """2γR²: the theorem speaks up to n = 1 + e^{2γR²}."""
        return 2 * self.gamma * self.radius**2

    def at(self, n: int) -> Point:
        return next(point for point in self.points if point.n == n)

    def qualifies(self) -> bool:
        """Whether the theorem speaks about all lengths."""
        return math.log(self.points[-1].n - 1) <= self.exponent

    def growths(self) -> dict[str, Growth]:
        """The laws of the theorem's input, with and without the query bias, of the search and of two poles."""
        lengths = [point.n for point in self.points]
        return {
            "branches": growth([point.branches for point in self.points], lengths),
            "branches without query bias": growth(self.unbiased, lengths),
            "search": growth([point.search for point in self.points], lengths),
            f"two poles, n = {LONGER[0]} … {LONGER[-1]}": growth(self.longer, LONGER),
        }


def gpt2(folder: Path, layers: Sequence[int] = LAYERS) -> Iterator[tuple[int, AttentionMap, float]]:
    """Layers with their causal attention and the radius of what ln_1 gives out."""
    path = folder / "weights" / GPT2_FILE
    tensors = load_file(path)
    for layer in layers:
        after = Ellipsoid.layer_norm(tensors[f"h.{layer}.ln_1.weight"], tensors[f"h.{layer}.ln_1.bias"])
        yield layer, load_attention(path, f"h.{layer}.attn.", heads=12, mask="causal"), after.radius


def theorem_gamma(head: AttentionMap) -> float:
    """γ = max(−γ_min, γ_max/8) of a map of one head."""
    values = real_eigenpairs(head)[0].flatten()
    values = values[~values.isnan()]
    return float((-values).maximum(values / 8).amax()) if len(values) else math.nan


def branches(head: AttentionMap, n: int, radius: float) -> float:
    """The larger σ of the theorem's two branches; 0 when A has no real eigenvalue."""
    starts = constructions(head, Ball(radius), n, head.in_features)
    return max((float(norm_at(head, s.x, 2)) for s in starts if s.name.endswith("branch")), default=0.0)


def head_point(attention: AttentionMap, head: int, n: int, radius: float) -> Point:
    """One search, and σ at the constructions by themselves."""
    alone, over = attention.head(head), Ball(radius)
    tokens = Ellipsoid.ball(radius, attention.in_features)
    clusters, poles = (float(norm_at(alone, f(alone, tokens, n), 2)) for f in (two_cluster_input, two_poles))
    witness = worst_case(attention, n, over=over, head=head, starts=STARTS, steps=STEPS)
    upper = not_passed(tightest_upper(alone, n, over, head=0), witness.value)
    assert upper is not None
    return Point(n, branches(alone, n, radius), clusters, poles, witness.value, witness.start, upper)


def head_case(layer: int, attention: AttentionMap, head: int, place: str, radius: float) -> HeadCase:
    """One head on one ball at all lengths."""
    alone, plain = attention.head(head), attention.head(head)
    plain.query_bias = None
    tokens = Ellipsoid.ball(radius, attention.in_features)
    random = worst_case(
        attention, ALONE, over=Ball(radius), head=head, constructions=False, starts=STARTS_ALONE, steps=STEPS_ALONE
    )
    return HeadCase(
        layer,
        head,
        place,
        radius,
        theorem_gamma(alone),
        tuple(head_point(attention, head, n, radius) for n in LENGTHS),
        tuple(branches(plain, n, radius) for n in LENGTHS),
        tuple(float(norm_at(alone, two_poles(alone, tokens, n), 2)) for n in LONGER),
        random.value,
    )


def cases(folder: Path, progress: Callable[[str], None] = lambda text: None) -> Iterator[HeadCase]:
    """All heads of all layers on both balls."""
    for layer, attention, radius in gpt2(folder):
        for place, size in (("ln_1", radius), (f"{RADIUS:g}", RADIUS)):
            for head in range(attention.heads):
                progress(f"layer {layer}, R = {size:.3g}, head {head}")
                yield head_case(layer, attention, head, place, size)


def counts(found: Sequence[HeadCase]) -> list[str]:
    """Who ends where, in words."""
    points = [point for case in found for point in case.points]
    last = [case.at(SHOWN) for case in found]
    below = sum(point.search < point.theorem * (1 - 1e-9) for point in points)
    above = sum(all(point.gain > ABOVE for point in case.points) for case in found)
    gains, climbed, ratios = ([getattr(p, name) for p in last] for name in ("gain", "climbed", "ratio"))
    won = Counter(re.sub(r" \d+,", ",", point.start) for point in points)
    beyond = sum(case.alone > ABOVE * case.at(ALONE).theorem for case in found)
    shares = [100 * case.alone / case.at(ALONE).search for case in found]
    return [
        f"Of {len(points)} searches {below} end below the theorem's construction. On {above} of {len(found)} heads and "
        f"radii they exceed it at every length; at n = {SHOWN} by a factor of {median(gains):.4g} in the median, at "
        f"least {min(gains):.4g} and at most {max(gains):.4g}. The tightest upper bound is {min(ratios):.3g} to "
        f"{max(ratios):.3g} times the value reached, {median(ratios):.3g} times in the median. Two poles reach about "
        f"‖V‖a√((n − 2)/2) of its ‖V‖(a + (1 + a)√n), which is 1 : "
        f"{2**0.5 * (1 + SHOWN**0.5) / (SHOWN - 2) ** 0.5:.3g} where a is large.",
        f"The starts that won: {', '.join(f'{name} {count} times' for name, count in won.most_common())}. Climbing "
        f"adds {100 * (median(climbed) - 1):.2g} % to the best construction in the median, at most "
        f"{100 * (max(climbed) - 1):.2g} %. Without any construction, from {STARTS_ALONE} random starts in "
        f"{STEPS_ALONE} steps at n = {ALONE}, the search exceeds the theorem's construction on {beyond} of "
        f"{len(found)}, and reaches {median(shares):.2g} % of the value with constructions in the median, "
        f"{max(shares):.2g} % at best. Where logits reach the hundreds the climb from random inputs cannot "
        "replace a construction.",
    ]


def by_layer(found: Sequence[HeadCase]) -> list[list[HeadCase]]:
    keys = dict.fromkeys((case.layer, case.place) for case in found)
    return [[case for case in found if (case.layer, case.place) == key] for key in keys]


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.3g}–{max(values):.3g}"


def values_table(found: Sequence[HeadCase]) -> str:
    """Least and most over the heads of a layer, at one length."""
    rows = []
    for group in by_layer(found):
        points = [case.at(SHOWN) for case in group]
        columns = [spread([getattr(p, name) for p in points]) for name in ("branches", "clusters", "poles", "search")]
        upper = spread([p.upper.value for p in points])
        gain, ratio = median(p.gain for p in points), median(p.ratio for p in points)
        rows.append([group[0].layer, f"{group[0].radius:.3g}", *columns, upper, f"{gain:.4g}", f"{ratio:.3g}"])
    head = ["layer", "R", "branches", "best scale", "two poles", "search", "upper bound", "search ÷ theorem"]
    return table([*head, "upper ÷ search"], rows)


def growth_table(found: Sequence[HeadCase]) -> str:
    """Exponents of the heads that the theorem speaks about."""
    rows, names = [], list(found[0].growths())
    for group in by_layer(found):
        able = [case.growths() for case in group if case.qualifies()]
        cells = []
        for name in names:
            fits = [fits[name] for fits in able]
            holds, likeliest = sum(map(_holds_half, fits)), sum(fit.laws[0].name == "n^1/2" for fit in fits)
            cells.append(f"{spread([round(fit.exponent, 3) for fit in fits])}; {holds}; {likeliest}" if fits else "")
        exponents = spread([case.exponent for case in group])
        rows.append([group[0].layer, f"{group[0].radius:.3g}", exponents, f"{len(able)} of {len(group)}", *cells])
    return table(["layer", "R", "2γR²", "heads with n ≤ 1 + e^{2γR²}", *names], rows)


def _holds_half(fit: Growth) -> bool:
    return fit.interval is not None and fit.interval[0] - ROUNDING <= 0.5 <= fit.interval[1] + ROUNDING


def all_heads(found: Sequence[HeadCase]) -> str:
    rows = []
    for case in found:
        p = case.at(SHOWN)
        numbers = [f"{value:.4g}" for value in (p.branches, p.clusters, p.poles, p.search, p.upper.value)]
        ends = [f"{p.gain:.4g}", f"{p.ratio:.3g}", p.start]
        rows.append([case.layer, case.head, f"{case.radius:.3g}", f"{case.exponent:.3g}", *numbers, *ends])
    head = ["layer", "head", "R", "2γR²", "branches", "best scale", "two poles", "search", "upper bound"]
    return table([*head, "search ÷ theorem", "upper ÷ search", "start"], rows)


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    folder = shared_folder()
    if folder is None:
        return ["The weights of GPT-2 were not at hand: set HOWSMOOTH_SHARED to the folder that holds them."]
    found = list(cases(folder, progress))
    names = sorted({point.upper.name for case in found for point in case.points})
    return [
        f"Heads of GPT-2, layers {', '.join(map(str, LAYERS))}, causal, each with its slice of the output projection, "
        f"for all inputs whose tokens lie in a ball: of the radius R that bounds what ln_1 gives out, and of R = "
        f"{RADIUS:g}. n = {', '.join(map(str, LENGTHS))}; {STARTS} random starts beside the constructions, {STEPS} "
        "steps.",
        "The theorem's constructions are two clusters with the outlier first: the two *branches* of Castin et al. "
        "2024, x₁ = −Ru and the others Ru, or x₁ = Ru and the others Ru/2, u a real eigenvector of A; and the pair at "
        "its *best scale* that this project chooses for a head. Every value is σ measured at the input. *Two poles* is "
        "this project's construction for the worst case: two tokens far apart that all others look at alike.",
        *counts(found),
        f"n = {SHOWN}, least and most over the 12 heads; quotients are medians. The upper bound is "
        f"{', '.join(f'`{name}`' for name in names)}:",
        values_table(found),
        "## Growth",
        f"The exponent of σ ≈ c·n^α by `hs.growth`, n = {LENGTHS[0]} … {LENGTHS[-1]} where nothing else is said: least "
        "and most over the heads that the theorem speaks about; on how many of them its 95 % interval holds 1/2; and "
        "on how many n^1/2 is the likeliest of the laws compared. At each length there is one worst input and no "
        "noise, so that the interval is that of the regression and says how far the points bend away from a line.",
        growth_table(found),
        "The proposition is for heads without a query bias, and there its input grows like n^1/2 to all digits shown; "
        "the bias of GPT-2 shifts the weights of the construction on some heads. Two poles, to which the search comes, "
        "have n − 2 tokens that look at them, and √(n − 2) against n = 8 … 64 fits to n^0.56 with an interval that "
        "hardly holds 1/2. At larger n the exponent comes down towards 1/2; without noise even what is left of the "
        "difference stands out of the interval.",
        f"## All heads, n = {SHOWN}",
        all_heads(found),
    ]
