"""Sigmoid, cosine, normalised, LipschitzNorm and gradient-step attention: bounds attacked, assumptions broken.

The measured side is always the dense float64 autograd Jacobian and its SVD.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.attention import UnitNorm
from howsmooth.attention.autodiff_maps import GradientStepAttention, LipschitzNormAttention
from howsmooth.bounds import get, other_attentions
from howsmooth.bounds.other_attentions import cosine as printed_cosine
from howsmooth.bounds.question_setting import Setting, setting
from howsmooth.sets.ellipsoid import Ellipsoid

pytestmark = pytest.mark.slow

Free = dict[str, Tensor]
STARTS = 5
MIXED = torch.tensor([[True, False, True, False]] * 3 + [[False, True, True, True]])


def jacobian_norm(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """By `torch.func`, because the ascent maps over starts."""
    dense = torch.func.jacrev(f)(x)
    return torch.linalg.svdvals(dense.flatten(0, 1).flatten(1))[0]


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def in_ball(z: Tensor) -> Tensor:
    return z / z.norm(dim=-1, keepdim=True).clamp(min=1.0)


def attack(
    name: str,
    make: Callable[[Free], nn.Module],
    start: Free,
    tokens: Ellipsoid | None = None,
    weights_too: bool = True,
) -> Tensor:
    """Climb log ‖J‖ − log bound from every start, over tokens and, for most, weights; the highest ratios met."""
    bound = get(name)
    free = {key: value.clone() for key, value in start.items()}
    climbing = [value.requires_grad_() for key, value in free.items() if weights_too or key == "z"]
    optimizer = torch.optim.Adam(climbing, lr=0.1, maximize=True)
    highest = torch.zeros(len(start["z"]), dtype=torch.float64)

    def place(one: Free) -> Tensor:
        return one["z"] if tokens is None else tokens.at(in_ball(one["z"]))

    def ceiling(one: Free) -> Tensor:
        where = Setting(make(one), len(one["z"]), tokens, None if tokens is not None else place(one))
        return bound.evaluate(where) if bound.combine == "block" else bound.evaluate(where, True).sum()

    for _ in range(40):
        measured = torch.vmap(lambda one: jacobian_norm(make(one), place(one)))(free)
        ceilings = torch.stack([ceiling({key: t[i] for key, t in free.items()}) for i in range(len(highest))])
        highest = torch.maximum(highest, (measured / ceilings).detach())
        optimizer.zero_grad()
        (measured.log() - ceilings.log()).sum().backward()
        for value in climbing:
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad.nan_to_num(0.0, 0.0, 0.0)
        optimizer.step()
    for i in range(len(highest)):  # the catalogue's own answer, at the end
        one = {key: t[i].detach() for key, t in free.items()}
        where = {"over": place(one)} if tokens is None else {"n": len(one["z"]), "over": tokens}
        found = jacobian_norm(make(one), place(one)) / bound(make(one), **where)
        highest[i] = torch.maximum(highest[i], found)
    return highest


def starts(seed: int, n: int, width: int, heads: int = 1, token_scale: float = 1.0) -> Free:
    weights = {name: draw(seed + i, STARTS, width, width) for i, name in enumerate("qkvo", start=1)}
    return {"z": draw(seed, STARTS, n, width, scale=token_scale), **weights}


def family(kind: type[nn.Module], **options: object) -> Callable[[Free], nn.Module]:
    return lambda free: kind(free["q"], free["k"], free["v"], free["o"], **options)


def on_a_set(seed: int, width: int, radius: float) -> Ellipsoid:
    if seed % 2:
        return Ellipsoid.layer_norm(draw(seed, width).abs() + 0.1, draw(seed + 1, width, scale=0.5))
    return Ellipsoid.ball(radius, width)


SIGMOID = [
    {},
    {"mask": "causal"},
    {"heads": 2, "logit_shift": 1.0},
    {"softcap": 1.0, "scale": 1.0},
    {"mask": MIXED, "logit_shift": -3.0},
]
COSINE = [
    {"eps": 0.1},
    {"eps": 1.0, "temperature": 3.0, "mask": "causal"},
    {"eps": 0.5, "value_scale": 2.0, "heads": 2},
    {"eps": 0.01, "temperature": 0.3, "mask": MIXED},
    {"eps": 0.3, "temperature": 6.0, "softcap": 2.0},
]
SHAPES = [(4, 2), (4, 2), (4, 4), (4, 1), (4, 2)]


@pytest.mark.parametrize("case", range(5))
def test_the_local_sigmoid_bound_survives_ascent(case: int) -> None:
    make = family(hs.SigmoidAttention, **SIGMOID[case])
    ratios = attack("ramapuram2024.local", make, starts(10 * case, *SHAPES[case]), weights_too=False)
    assert ratios.max() <= 1 + 1e-9
    assert ratios.max() > 0.3


@pytest.mark.parametrize("case", range(5))
def test_the_sigmoid_bound_on_a_set_survives_ascent(case: int) -> None:
    n, width = SHAPES[case]
    biases = {name: draw(100 + case + i, width) for i, name in enumerate(("query_bias", "key_bias", "value_bias"))}
    rotary = {"rotary": hs.Rotary.standard(width)} if case in (1, 4) else {}
    make = family(hs.SigmoidAttention, **SIGMOID[case], **(biases if case else {}), **rotary)
    ratios = attack("howsmooth.sigmoid", make, starts(10 * case, n, width), on_a_set(case, width, 1.5))
    assert ratios.max() <= 1 + 1e-9
    assert ratios.max() > 0.3


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("name", ["qi2023.cosine", "howsmooth.cosine", "howsmooth.cosine_mean_field"])
def test_the_cosine_bounds_survive_ascent(name: str, case: int) -> None:
    n, width = SHAPES[case]
    options = COSINE[case]
    if name == "howsmooth.cosine_mean_field":
        options = {**options, "mask": None, "temperature": min(1.0, options.get("temperature", 1.0))}
    if case in (1, 4):
        options = options | {"query_bias": draw(7, width), "key_bias": draw(8, width), "value_bias": draw(9, width)}
    if case == 1 and name == "howsmooth.cosine":
        options = options | {"rotary": hs.Rotary(torch.ones(1, dtype=torch.float64), amplitude=1.3)}
    ratios = attack(name, family(hs.CosineAttention, **options), starts(10 * case, n, width, token_scale=0.3))
    assert ratios.max() <= 1 + 1e-9
    assert ratios.max() > (0.02 if name == "qi2023.cosine" else 0.1)


@pytest.mark.parametrize("case", range(5))
def test_the_qk_norm_bound_survives_ascent(case: int) -> None:
    n, width = SHAPES[case]
    gain = draw(case, width)
    options: dict[str, object] = [
        {"qk_norm": (UnitNorm(0.1), UnitNorm(0.1))},
        {"qk_norm": (UnitNorm.rms(width, 0.1, gain), UnitNorm.rms(width, 0.2)), "mask": "causal"},
        {"qk_norm": (UnitNorm(0.5, 2.0), UnitNorm(0.5, 2.0)), "heads": 2, "query_bias": draw(3, width)},
        {"qk_norm": (UnitNorm(0.01), UnitNorm(0.05)), "scale": 4.0},
        {
            "qk_norm": (UnitNorm(0.3), UnitNorm(0.2)),
            "rotary": hs.Rotary(torch.ones(1, dtype=torch.float64), amplitude=1.2),
            "key_bias": draw(4, width),
        },
    ][case]
    start = starts(10 * case, n, width, token_scale=0.3)
    ratios = attack("howsmooth.qk_norm", family(hs.SelfAttention, **options), start, on_a_set(case, width, 1.0), False)
    assert ratios.max() <= 1 + 1e-9
    assert ratios.max() > 0.1


@pytest.mark.parametrize(("n", "width", "heads"), [(1, 3, 1), (2, 1, 1), (3, 2, 1), (5, 2, 2), (8, 2, 1)])
def test_the_lipschitz_norm_bound_survives_ascent(n: int, width: int, heads: int) -> None:
    make = family(LipschitzNormAttention, heads=heads)
    ratios = attack("howsmooth.lipschitz_norm", make, starts(n, n, width))
    assert ratios.max() <= 1 + 1e-9
    assert ratios.max() > 0.3


@pytest.mark.parametrize(("keys", "width", "step"), [(2, 1, 0.5), (2, 2, 3.0), (4, 2, 1.0), (6, 3, 4.0), (3, 3, 0.0)])
def test_the_gradient_step_bound_survives_ascent(keys: int, width: int, step: float) -> None:
    start = {
        "z": draw(keys, STARTS, 2, width, scale=0.1),
        "y": draw(1, STARTS, keys, width),
        "a": draw(2, STARTS, width, width),
    }
    ratios = attack("howsmooth.gradient_step", lambda free: GradientStepAttention(free["a"], free["y"], step), start)
    assert ratios.max() <= 1 + 1e-9
    assert ratios.max() > 0.9


@pytest.mark.parametrize("case", range(5))
def test_the_non_expansive_step_survives_ascent(case: int) -> None:
    def make(free: Free) -> nn.Module:
        longest = free["y"].norm(dim=-1).amax()  # brought to one, so that the longest step is two
        return GradientStepAttention(torch.eye(1 + case, dtype=torch.float64), free["y"] / longest, 2 * (1 - 1e-12))

    start = {"z": draw(case, STARTS, 2, 1 + case, scale=0.1), "y": draw(1 + case, STARTS, 2 + case, 1 + case)}
    ratios = attack("furuya2026.nonexpansive", make, start)
    assert ratios.max() <= 1 + 1e-9
    assert ratios.max() > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_a_short_gradient_step_never_expands(seed: int) -> None:
    points = draw(seed, 2 + seed % 4, 3)
    step = float(other_attentions.longest_step(points))
    attention = GradientStepAttention(torch.eye(3, dtype=torch.float64), points, step)
    assert get("furuya2026.nonexpansive")(attention) == 1
    x, y = draw(seed + 1, 200, 3, scale=2.0), draw(seed + 2, 200, 3, scale=2.0)
    assert ((attention(x) - attention(y)).norm(dim=-1) <= (x - y).norm(dim=-1) * (1 + 1e-12)).all()


# Exact values, and bounds against each other


def test_two_points_attain_the_gradient_step_bound() -> None:
    points = torch.tensor(
        [[3.0, 1.0], [-1.0, 1.0]], dtype=torch.float64
    )  # they tie at x = 0, two apart from the middle
    for step in (0.25, 0.5, 1.0, 5.0):
        attention = GradientStepAttention(torch.eye(2, dtype=torch.float64), points, step)
        measured = jacobian_norm(attention, torch.zeros(1, 2, dtype=torch.float64))
        assert float(measured) == pytest.approx(float(get("howsmooth.gradient_step")(attention)), rel=1e-12)
        assert float(measured) == pytest.approx(max(1.0, 4 * step - 1), rel=1e-12)


def test_the_gradient_step_bound_allows_every_step_of_the_paper_and_more() -> None:
    points = torch.tensor([[5.0, 1.0], [5.0, -1.0]], dtype=torch.float64)  # far from the origin, close together
    attention = GradientStepAttention(torch.eye(2, dtype=torch.float64), points, 2.0)
    assert float(other_attentions.longest_step(points)) < 0.1
    assert get("howsmooth.gradient_step")(attention) == 1
    assert float(jacobian_norm(attention, draw(0, 3, 2))) <= 1 + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_step_of_the_paper_gives_one_in_our_bound(seed: int) -> None:
    points = draw(seed, 6, 3) + draw(seed + 1, 3)
    assert other_attentions.gradient_step(points, float(other_attentions.longest_step(points))) == 1


def test_own_cosine_bound_is_never_above_that_of_the_paper() -> None:
    for seed in range(20):
        heads = 1 + seed % 2
        weights = [draw(seed + i, 4, 4) for i in range(4)]
        attention = hs.CosineAttention(*weights, heads=heads, temperature=0.1 * 2**seed, eps=0.01 * (1 + seed))
        for n in (1, 2, 50):
            for per_head in (False, True):
                own, paper = (
                    get(name)(attention, n=n, per_head=per_head) for name in ("howsmooth.cosine", "qi2023.cosine")
                )
                assert (own <= paper).all()


def test_the_papers_cosine_bound_is_the_printed_form_of_every_head() -> None:
    query, key, value, output = draw(3, 4, 4, 4)
    attention = hs.CosineAttention(query, key, value, output, heads=2, temperature=-2.0, value_scale=3.0, eps=0.04)
    found = get("qi2023.cosine")(attention, n=7, per_head=True)
    for h, rows in enumerate((slice(0, 2), slice(2, 4))):
        norms = [torch.linalg.matrix_norm(part, 2) for part in (query[rows], key[rows], value[rows], output[:, rows])]
        form = 3.0 * 5.0 * (49 * 2.0 * norms[1] + 7 * 2.0 * norms[0] + 14 * norms[2])
        assert float(found[h]) == pytest.approx(float(norms[3] * form), rel=1e-12)
        assert float(printed_cosine(*norms[:3], 3.0, 2.0, 0.04, 7)) == pytest.approx(float(form), rel=1e-12)


def test_the_cosine_bound_for_every_n_is_below_the_one_for_many_tokens() -> None:
    attention = hs.CosineAttention(*draw(0, 3, 2, 2), temperature=1.5, eps=0.1)
    every = get("howsmooth.cosine_mean_field")(attention)
    crossover = math.exp(3.0)
    assert every > get("howsmooth.cosine")(attention, n=math.floor(crossover))
    assert every < get("howsmooth.cosine")(attention, n=math.ceil(crossover))


def test_the_sigmoid_bound_on_a_ball_is_never_above_the_local_form_at_its_worst() -> None:
    for seed in range(20):
        a, v = draw(seed, 3, 3), draw(seed + 1, 3, 3)
        attention = hs.SigmoidAttention.from_bilinear(a, v, logit_shift=float(seed - 10))
        n, radius = 1 + seed, 0.2 + 0.1 * seed
        swing = torch.linalg.matrix_norm(a, 2) * radius**2
        weights = torch.sigmoid(torch.linspace(-1, 1, 4001, dtype=torch.float64) * swing + (seed - 10))
        most, steepest = weights.max(), (weights * (1 - weights)).max()
        form = torch.linalg.matrix_norm(v, 2) * (n * most + 2 * n * steepest * swing)
        assert float(get("howsmooth.sigmoid")(attention, n=n, over=hs.sets.Ball(radius))) <= float(form) * (1 + 1e-6)


def test_the_sigmoid_bound_stays_finite_with_the_usual_shift() -> None:
    attention = hs.SigmoidAttention.from_bilinear(*torch.eye(2, dtype=torch.float64).repeat(2, 1, 1))
    values = [
        float(get("howsmooth.sigmoid")(attention, n=n, over=hs.sets.Ball(1.0))) for n in (10, 10**3, 10**6, 10**9)
    ]
    assert values == sorted(values)
    assert values[-1] <= 3 * math.e  # (1 + 2a)e^a
    assert values[-1] == pytest.approx(3 * math.e, rel=1e-6)


def test_equal_tokens_come_close_to_the_sigmoid_bounds() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    attention = hs.SigmoidAttention.from_bilinear(one, one)
    x = torch.ones(1000, 1, dtype=torch.float64)
    measured = float(hs.measure(attention, x, rtol=1e-6))
    for name, where in (
        ("ramapuram2024.local", {"over": x}),
        ("howsmooth.sigmoid", {"n": 1000, "over": hs.sets.Ball(1.0)}),
    ):
        assert 0.999 <= measured / float(get(name)(attention, **where)) <= 1 + 1e-6


def test_sigmoid_numbers_hold_for_every_token_of_the_set() -> None:
    for seed, rotary in ((0, None), (1, hs.Rotary(torch.ones(1, dtype=torch.float64), amplitude=1.4))):
        biases = {name: draw(seed + 50 + i, 3) for i, name in enumerate(("query_bias", "key_bias", "value_bias"))}
        attention = hs.SigmoidAttention(*draw(seed, 4, 3, 3), rotary=rotary, logit_shift=0.5, **biases)
        tokens = Ellipsoid.rms_norm(draw(seed + 9, 3), draw(seed + 10, 3))
        numbers = other_attentions.sigmoid_numbers(attention, tokens, n=400)
        x = tokens.at(torch.nn.functional.normalize(draw(seed + 11, 400, 3), dim=-1))
        logits = torch.logit(attention.weights(x))
        assert numbers.low <= logits.min()
        assert logits.max() <= numbers.high
        value = (x @ attention.value_weight[0].T + attention.value_bias[0]) @ attention.output_weight[0]
        assert 0.5 * numbers.size <= value.norm(dim=-1).max() <= numbers.size
        if rotary is None:
            assert logits.max() - logits.min() > 0.4 * (numbers.high - numbers.low)


def test_reach_holds_for_every_token_of_the_set() -> None:
    weight, bias, gain = draw(0, 1, 3, 3), draw(1, 1, 3, scale=6.0), draw(2, 3)
    stages = [UnitNorm(0.3, 2.0, gain), hs.Rotary(torch.ones(1, dtype=torch.float64), amplitude=1.5)]
    tokens = Ellipsoid.ball(1.0, 3)
    x = tokens.at(in_ball(draw(3, 300, 3)))

    def project(x: Tensor) -> Tensor:
        out = x @ weight[0].T + bias[0]
        for stage in stages:
            out = stage(out)
        return out

    slope = max(float(torch.linalg.matrix_norm(torch.func.jacrev(project)(t[None])[0, :, 0], 2)) for t in x)
    everywhere, here = (other_attentions.Reach.of(weight, bias, stages, where) for where in (None, tokens))
    assert project(x).norm(dim=-1).max() <= here.most <= everywhere.most
    assert slope <= here.slope < everywhere.slope  # the bias keeps projected tokens away from zero


def test_mixing_of_lipschitz_norm_never_passes_its_constant_and_comes_near() -> None:
    highest = 0.0
    for n in (2, 3, 4, 5, 30):
        t = torch.full((n,), n**-0.5, dtype=torch.float64)
        column = torch.sigmoid(2 * t - math.log(n - 1)).sum()
        highest = max(highest, float(column))
    assert 0.93 * other_attentions.MIXING <= highest**0.5 <= other_attentions.MIXING


def test_multi_head_bounds_cover_the_block() -> None:
    x = draw(5, 6, 4)
    weights = draw(6, 4, 4, 4)
    for attention, name, where in (
        (hs.CosineAttention(*weights, heads=2, eps=0.2), "howsmooth.cosine", {"n": 6}),
        (hs.SigmoidAttention(*weights, heads=2), "ramapuram2024.local", {"over": x}),
        (LipschitzNormAttention(*weights, heads=2), "howsmooth.lipschitz_norm", {}),
    ):
        block, heads = get(name)(attention, **where), get(name)(attention, per_head=True, **where)
        assert heads.shape == (2,)
        assert jacobian_norm(attention, x) <= block <= heads.sum() * (1 + 1e-12)


# Every assumption, broken


def formula(name: str, attention: nn.Module, **where: object) -> float:
    """The number a bound would give if it did not refuse."""
    return float(get(name).evaluate(setting(attention, **where), True).sum())  # type: ignore[arg-type]


def refusal(name: str, attention: nn.Module, **where: object) -> str:
    with pytest.raises(hs.DoesNotApply) as caught:
        get(name)(attention, **where)
    return str(caught.value)


EYE = torch.eye(2, dtype=torch.float64)
ZERO = torch.zeros(2, 2, dtype=torch.float64)
UNIT = torch.tensor([1.0, 0.0], dtype=torch.float64)
FIRST = torch.diag(UNIT)


BIG = torch.tensor([[0.0, 30.0]] * 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("attention", "x", "said"),
    [
        (hs.SigmoidAttention(ZERO, EYE, EYE, query_bias=UNIT, logit_shift=0.0), BIG, "queries have no bias"),
        (hs.SigmoidAttention(EYE, ZERO, EYE, key_bias=UNIT, logit_shift=0.0), BIG, "keys and values have no bias"),
        (hs.SigmoidAttention(EYE, EYE, ZERO, value_bias=UNIT), EYE, "keys and values have no bias"),
        (
            hs.SigmoidAttention(FIRST, FIRST, EYE, qk_norm=(UnitNorm(1e-8), UnitNorm(1e-8))),
            torch.tensor([[1e-4, 30.0], [1e-4, 30.0]], dtype=torch.float64),
            "linear",
        ),
    ],
)
def test_the_local_sigmoid_bound_is_false_beyond_its_assumptions_and_refuses(
    attention: nn.Module, x: Tensor, said: str
) -> None:
    assert jacobian_norm(attention, x) > 1.5 * formula("ramapuram2024.local", attention, over=x)
    assert said in refusal("ramapuram2024.local", attention, over=x)


def test_the_local_sigmoid_bound_is_false_with_rotary_positions_and_refuses() -> None:
    to_first, to_second = torch.tensor([[[1.0, 0], [0, 0]], [[0, 0], [1.0, 0]]], dtype=torch.float64)
    rotary = hs.Rotary(torch.full((1,), math.pi / 2, dtype=torch.float64))
    attention = hs.SigmoidAttention(to_first, to_second, EYE, rotary=rotary, scale=1.0)
    x = torch.tensor([[0.0, 50.0], [1.0, 50.0]], dtype=torch.float64)
    score = torch.linalg.matrix_norm(to_second.T @ to_first, 2)  # zero: unturned, queries and keys never meet
    assert jacobian_norm(attention, x) > 1.5 * other_attentions.sigmoid_local(1.0, score, attention.weights(x), x)
    message = refusal("ramapuram2024.local", attention, over=x)
    assert "rotary" in message
    assert "the nearest bound that does apply is howsmooth.three_path" in message


def test_the_sigmoid_bound_on_a_set_refuses_added_biases_which_break_it() -> None:
    attention = hs.SigmoidAttention(ZERO, ZERO, EYE, logit_shift=-5.0, mask=torch.full((3, 3), 10.0))
    where = {"n": 3, "over": hs.sets.Ball(1.0)}
    assert jacobian_norm(attention, EYE[[0, 1, 0]]) > formula("howsmooth.sigmoid", attention, **where)
    assert "nothing but a mask" in refusal("howsmooth.sigmoid", attention, **where)


def test_the_sigmoid_bound_on_a_set_refuses_normalised_queries_which_break_it() -> None:
    attention = hs.SigmoidAttention(EYE, EYE, EYE, qk_norm=(UnitNorm(1e-6), UnitNorm(1e-6)))
    x = 1e-3 * EYE
    assert jacobian_norm(attention, x) > formula("howsmooth.sigmoid", attention, n=2, over=hs.sets.Ball(1e-3))
    assert "linear" in refusal("howsmooth.sigmoid", attention, n=2, over=hs.sets.Ball(1e-3))
    assert "n is finite" in refusal(
        "howsmooth.sigmoid", hs.SigmoidAttention(EYE, EYE, EYE), n=math.inf, over=hs.sets.Ball(1.0)
    )


@pytest.mark.parametrize("name", ["qi2023.cosine", "howsmooth.cosine", "howsmooth.cosine_mean_field"])
def test_cosine_bounds_are_false_without_normalised_values_and_refuse(name: str) -> None:
    second = EYE - FIRST
    attention = hs.CosineAttention(FIRST, FIRST, second, eps=1.0, normalize_values=False)
    x = torch.tensor([[1.0, 100.0], [-1.0, -100.0]], dtype=torch.float64)
    with_them = hs.CosineAttention(FIRST, FIRST, second, eps=1.0)
    assert jacobian_norm(with_them, x) <= get(name)(with_them, n=2)
    assert jacobian_norm(attention, x) > 2 * get(name)(with_them, n=2)  # the same ε, τ, ν and matrices
    assert "values are normalised too" in refusal(name, attention, n=2)
    message = refusal(name, attention, over=x)
    assert "howsmooth.qk_norm" in message
    assert jacobian_norm(attention, x) <= get("howsmooth.qk_norm")(attention, over=x)


def test_without_eps_cosine_attention_has_no_constant_and_the_bounds_refuse() -> None:
    attention = hs.CosineAttention(EYE, EYE, EYE, eps=0.0)
    small = [float(jacobian_norm(attention, t * (EYE + 0.5))) for t in (1.0, 1e-3, 1e-6)]
    assert small[1] == pytest.approx(1e3 * small[0])
    assert small[2] == pytest.approx(1e6 * small[0])
    for name in ("qi2023.cosine", "howsmooth.cosine", "howsmooth.cosine_mean_field"):
        assert "ε > 0" in refusal(name, attention, n=2)


def test_cosine_bounds_that_grow_with_n_refuse_infinitely_many_tokens() -> None:
    attention = hs.CosineAttention(EYE, EYE, EYE, eps=1.0)
    for name in ("qi2023.cosine", "howsmooth.cosine"):
        message = refusal(name, attention, n=math.inf)
        assert "n is finite" in message
        assert "howsmooth.cosine_mean_field" in message


def test_the_papers_cosine_bound_refuses_rotary_amplitudes_which_break_it() -> None:
    second = torch.tensor([[0.0, 0.1], [0.0, 0.0]], dtype=torch.float64)  # keys and values read the other coordinate
    rotary = hs.Rotary(torch.zeros(1, dtype=torch.float64), amplitude=30.0)
    attention = hs.CosineAttention(FIRST, second, second, eps=1.0, rotary=rotary, temperature=0.01)
    x = torch.tensor([[0.0, 100.0], [0.0, -100.0]], dtype=torch.float64)
    assert jacobian_norm(attention, x) > 10 * formula("qi2023.cosine", attention, n=2)
    assert jacobian_norm(attention, x) <= get("howsmooth.cosine")(attention, n=2)
    assert "rotary" in refusal("qi2023.cosine", attention, n=2)


def test_the_cosine_bound_for_every_n_is_false_under_a_mask_and_refuses() -> None:
    n = 400
    one, none = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    attention = hs.CosineAttention(none, none, one, eps=1.0, temperature=1e-3, mask="causal")
    measured = float(hs.measure(attention, torch.zeros(n, 1, dtype=torch.float64)))  # the Cesàro matrix
    assert measured > 1.6 * formula("howsmooth.cosine_mean_field", attention)
    assert measured <= get("howsmooth.cosine")(attention, n=n)
    assert "not on their places" in refusal("howsmooth.cosine_mean_field", attention, n=n)


def test_the_qk_norm_bound_refuses_what_it_is_not_for() -> None:
    where = {"n": 2, "over": hs.sets.Ball(1.0)}
    assert "normalised" in refusal("howsmooth.qk_norm", hs.SelfAttention(EYE, EYE, EYE), **where)
    assert "values are linear" in refusal("howsmooth.qk_norm", hs.CosineAttention(EYE, EYE, EYE), **where)
    sharp = hs.SelfAttention(EYE, EYE, EYE, qk_norm=(UnitNorm(0.0), UnitNorm(0.0)))
    assert "ε > 0" in refusal("howsmooth.qk_norm", sharp, **where)
    assert "n is finite" in refusal(
        "howsmooth.qk_norm", hs.SelfAttention(EYE, EYE, EYE, qk_norm="rms"), n=math.inf, over=hs.sets.Ball(1.0)
    )


def test_a_long_gradient_step_expands_and_the_paper_s_bound_refuses() -> None:
    points = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    attention = GradientStepAttention(EYE, points, 2.5)  # the longest step is 2
    assert jacobian_norm(attention, torch.zeros(1, 2, dtype=torch.float64)) > 1.4
    message = refusal("furuya2026.nonexpansive", attention)
    assert "the step is at most 2/max|Ay_j|²" in message
    assert "howsmooth.gradient_step" in message


def test_without_the_divisor_the_lipschitz_norm_bound_is_false() -> None:
    weights = torch.ones(3, 1, 1, dtype=torch.float64)
    bound = float(get("howsmooth.lipschitz_norm")(LipschitzNormAttention(*weights)))
    x = torch.tensor([[0.0], [30.0], [-30.0]], dtype=torch.float64)
    assert jacobian_norm(LipschitzNormAttention(*weights), x) <= bound
    assert jacobian_norm(hs.SelfAttention(*weights, scale=1.0), x) > 10 * bound
    assert "is for lipschitz_norm attention, not dot_product" in refusal(
        "howsmooth.lipschitz_norm", hs.SelfAttention(*weights), over=x
    )
