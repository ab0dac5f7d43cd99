"""Networks of several layers: exact lines, remainders that hold, radii that no attack enters, broken proofs caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence.deep_networks import attacked, cases, draw_network, left_over
from howsmooth.attention.stages import TokenStage
from howsmooth.certificates import CentredNorm, Residual, SelfAttend, SequenceClassifier, certified_margins
from howsmooth.certificates.network import margins as deep
from howsmooth.certificates.network.affine_form import AffineForm, spectral_ceiling
from howsmooth.certificates.network.attention_remainder import AttentionRemainder
from howsmooth.certificates.network.margins import LinearisedNetwork
from howsmooth.certificates.network.taylor_remainders import (
    ActivationRemainder,
    NormalisationRemainder,
    ProductRemainder,
    multiply,
)
from howsmooth.certificates.read_module import read_classifier
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation
from howsmooth.network.nodes import Beside, MixTokens, Multiply, Node, Parallel, Rearrange, Series, Skip, Tokenwise


@pytest.mark.parametrize("seed", range(4))
def test_values_and_slopes_are_those_of_the_network(seed: int) -> None:
    case = draw_network(seed)
    n = len(case.x)
    lines = LinearisedNetwork(read_classifier(case.network, case.x).root, case.x, range(n))
    torch.testing.assert_close(lines.logits, case.network(case.x), rtol=1e-12, atol=1e-12)
    jacobian = torch.autograd.functional.jacobian(case.network, case.x)
    torch.testing.assert_close(lines.form.slopes[0][0], jacobian, rtol=1e-10, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_no_attack_inside_a_radius_changes_the_class_or_passes_the_bound(seed: int) -> None:
    found = attacked(draw_network(seed), starts=3, steps=12)
    assert found.radius > 0
    assert found.inside > 0
    assert found.radius <= found.nearest
    assert found.excess <= 1e-12


def broken(monkeypatch: pytest.MonkeyPatch, kind: type, change: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Replace the ends a remainder gives."""
    sound = kind.numbers
    monkeypatch.setattr(kind, "numbers", lambda self, reach: change(self, *sound(self, reach)))


def passed(seeds: range) -> float:
    """By how much true remainders pass their bounds, at most."""
    return max(left_over(draw_network(seed), draws=8) for seed in seeds)


@pytest.mark.slow
def test_every_remainder_stays_within_its_bound() -> None:
    assert passed(range(6)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AttentionRemainder, ActivationRemainder, NormalisationRemainder])
def test_a_remainder_taken_as_nothing_is_caught(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Unstable neurons taken as stable, a second derivative dropped."""
    broken(monkeypatch, kind, lambda _, lower, upper: (0 * lower, 0 * upper))
    assert passed(range(6)) > 1e-4


@pytest.mark.slow
def test_half_of_the_moves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from howsmooth.certificates.network import attention_remainder, taylor_remainders

    for module in (attention_remainder, taylor_remainders):
        monkeypatch.setattr(module, "moved_by", lambda rows, reach: 0.5 * rows @ reach[: rows.shape[-1]])
    assert passed(range(6)) > 1e-4


def test_a_planted_counter_example_just_outside_is_met() -> None:
    """A linear network has an exact radius: certified up to it, to one in a thousand, and not beyond."""
    net = SequenceClassifier([nn.Identity()], nn.Linear(4, 2), pool="first").double()
    with torch.no_grad():
        net.classes.weight.copy_(torch.tensor([[3.0, 0, 4, 0], [0, 0, 0, 0]]))  # type: ignore[union-attr, operator]
        net.classes.bias.copy_(torch.tensor([1.0, 0.0]))  # type: ignore[union-attr, operator]
    proof = hs.certify(net, torch.zeros(3, 4, dtype=torch.float64), 0, tokens=[0])
    assert 0.2 * 0.998 < proof.radius < 0.2
    for norm, exact in ((torch.inf, 1 / 7), (1, 1 / 4)):
        found = hs.certify(net, torch.zeros(3, 4, dtype=torch.float64), 0, tokens=[0], norm=norm).radius
        assert exact * 0.998 < found < exact


def test_a_kink_just_outside_is_met() -> None:
    """Margin 1 − 10·relu(z − ½): the class changes at z = 0.6, the gradient at the input is zero."""
    net = SequenceClassifier([nn.Linear(1, 1), nn.ReLU()], nn.Linear(1, 2)).double()
    with torch.no_grad():
        for tensor, values in zip(net.parameters(), ([[1.0]], [-0.5], [[-10.0], [0.0]], [1.0, 0.0]), strict=True):
            tensor.copy_(torch.tensor(values))
    assert 0.59 < hs.certify(net, torch.zeros(1, 1, dtype=torch.float64), 0).radius < 0.6


@pytest.mark.slow
def test_one_word_gets_a_larger_radius_than_all_and_ids_equal_their_vectors() -> None:
    case = draw_network(3)
    net = SequenceClassifier(
        list(case.network.layers), case.network.classes, nn.Embedding(11, case.x.shape[1]).double()
    )
    ids = torch.tensor([4, 1, 7])
    label = int(net(ids).argmax())
    one, every = (hs.certify(net, ids, label, tokens=tokens).radius for tokens in ([1], None))
    assert 0 < every < one
    assert one == hs.certify(net, net.embed(ids).detach(), label, tokens=[1]).radius
    together = hs.certify(net, ids, label, ball="frobenius").radius
    assert every < together <= one


def test_standard_encoders_are_read() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", norm_first=True, batch_first=True)
    net = SequenceClassifier([layer], nn.Linear(8, 3), pool="first").double().eval()
    x = torch.randn(5, 8, dtype=torch.float64)
    lines = LinearisedNetwork(read_classifier(net, x).root, x, [0])
    torch.testing.assert_close(lines.logits, net(x[None])[0], rtol=1e-9, atol=1e-9)
    assert hs.certify(net, x, int(net(x[None]).argmax()), tokens=[0]).radius > 0


class Sorted(nn.Module):
    """The numbers of each token in order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1).values


def test_what_cannot_be_certified_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw_network(0)
    net, x = case.network, case.x
    predicted = int(net(x).argmax())
    other = hs.certify(net, x, (predicted + 1) % 3)
    assert (other.radius, other.predicted) == (0.0, predicted)
    assert f"is {predicted}" in other.notes[-1]
    with pytest.raises(InvalidInput, match="one of 3 classes"):
        hs.certify(net, x, 5)
    with pytest.raises(UnsupportedModel, match=r"activation softplus in layers\.0 has no certificate, only relu, gelu"):
        hs.certify(SequenceClassifier([nn.Softplus()], nn.Linear(4, 2)), x, 0)
    with pytest.raises(UnsupportedModel, match=r"a soft-cap in layers\.0 has no certificate"):
        hs.certify(SequenceClassifier([hs.SelfAttention.random(4, softcap=2.0)], nn.Linear(4, 2)), x, 0)
    with pytest.raises(UnsupportedModel, match=r"layers\.0 is dropout in training mode: call \.eval\(\) first"):
        hs.certify(SequenceClassifier([nn.Dropout(0.1)], nn.Linear(4, 2)), x, 0)
    with pytest.raises(InvalidInput, match="each once"):
        hs.certify(net, x, predicted, tokens=[])
    with pytest.raises(InvalidInput, match="no embedding"):
        hs.certify(net, torch.tensor([1, 2]), 0)
    with pytest.raises(UnsupportedModel, match=r"needs every operation of a network, but .* not known: sort in layers"):
        hs.certify(SequenceClassifier([Sorted()], nn.Linear(4, 2)), x, 0)
    with pytest.raises(UnsupportedModel, match="gives 2 tokens of 4 numbers: put a classifier behind it"):
        hs.certify(nn.Linear(4, 4), x, 0)
    with pytest.raises(UnsupportedModel, match="certified of a module, not of a function"):
        hs.certify(lambda z: z, x, 0)  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="label"):
        hs.certify(net, x)  # type: ignore[call-overload]
    monkeypatch.setattr(deep, "LARGEST", 100)
    with pytest.raises(InvalidInput, match="GB, more than"):
        hs.certify(net, x, predicted)


def test_half_precision_is_computed_in_double_and_said() -> None:
    net = SequenceClassifier(
        [Residual(CentredNorm(4), SelfAttend(nn.MultiheadAttention(4, 2)))], nn.Linear(4, 2)
    ).eval()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    label = int(net(x).argmax())
    single, half = hs.certify(net, x, label), hs.certify(net.half(), x.half(), label)
    assert half.radius == pytest.approx(single.radius, rel=0.05)
    assert "computed in float64" in half.notes
    named = SequenceClassifier([nn.ReLU()], nn.Linear(4, 2), nn.Embedding(5, 4))
    ids = torch.tensor([1, 3])
    assert "computed in float64" in hs.certify(named, ids, int(named(ids).argmax())).notes
    assert not hs.certify(named.double(), ids, int(named(ids).argmax())).notes


def change(bound: Callable[[], Tensor], weight: Tensor, step: Tensor) -> float:
    """By how much a bound grows when a weight makes a small step, by the symmetric difference."""
    with torch.no_grad():
        weight += step
        up = bound()
        weight -= 2 * step
        down = bound()
        weight += step
    return float((up - down) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["torch", "howsmooth"])
def test_margins_are_differentiable_in_weights_and_tokens(layer: str) -> None:
    """The bound on the margins at a radius has the derivative of finite differences."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2) if layer == "torch" else hs.nn.DotProductAttention(4, 2)
    mlp = nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)
    net = SequenceClassifier(
        [Residual(nn.LayerNorm(4), SelfAttend(attention)), Residual(CentredNorm(4), *mlp)], nn.Linear(4, 3)
    )
    net, x = net.double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = {name: p for name, p in net.named_parameters() if p.dim() == 2} | {"x": x}

    def bound() -> Tensor:
        return certified_margins(net, x, 0, 0.05)[1:].sum()

    slopes = torch.autograd.grad(bound(), list(weights.values()))
    for weight, slope in zip(weights.values(), slopes, strict=True):
        step = 1e-5 * torch.randn_like(weight)
        assert change(bound, weight, step) == pytest.approx(float((slope * step).sum()), rel=1e-3)
        assert float(slope.abs().max()) > 0


Exact = list[list[Fraction]]
"""Tokens in rational numbers."""


def exactly(node: Node, tokens: Exact) -> Exact:
    """What a network of linear maps, ReLUs, products and moves computes in rational numbers."""
    match node:
        case Series():
            for inner in node.nodes:
                tokens = exactly(inner, tokens)
            return tokens
        case Tokenwise():
            for stage in node.stages:
                tokens = [exactly_staged(stage, token) for token in tokens]
            return tokens
        case Parallel() | Beside() | Multiply():
            one, other = (exactly(inner, tokens) for inner in node.nodes)
            pairs = (
                [list(zip(a, b, strict=True)) for a, b in zip(one, other, strict=True)]
                if len(one[0]) == len(other[0])
                else []
            )
            match node:
                case Beside():
                    return [a + b for a, b in zip(one, other, strict=True)]
                case Multiply():
                    return [[a * b for a, b in row] for row in pairs]
            return [[a + b for a, b in row] for row in pairs]
        case Rearrange(index=index, factor=factor, constant=constant):
            flat = [*(number for token in tokens for number in token), Fraction(0)]  # the last for an index of −1
            ones, zeros = torch.ones(index.shape).double(), torch.zeros(index.shape).double()
            rows = (index, ones if factor is None else factor, zeros if constant is None else constant)
            return [
                [Fraction(f) * flat[i] + Fraction(c) for i, f, c in zip(*row, strict=True)]
                for row in zip(*(t.tolist() for t in rows), strict=True)
            ]
        case MixTokens(matrix=matrix):
            columns = list(zip(*tokens, strict=True))
            return [[total(row, column) for column in columns] for row in matrix.tolist()]
    assert isinstance(node, Skip)
    return tokens


def exactly_staged(stage: TokenStage, token: list[Fraction]) -> list[Fraction]:
    match stage:
        case Affine(weight=weight):
            return [total(row, token) for row in weight.tolist()]
        case Diagonal(gain=gain):
            return [Fraction(g) * number for g, number in zip(gain.tolist(), token, strict=True)]  # type: ignore[union-attr]
        case Activation(name="relu"):
            return [max(number, Fraction(0)) for number in token]
        case GatedActivation(name="relu"):
            half = len(token) // 2
            return [max(g, Fraction(0)) * u for g, u in zip(token[:half], token[half:], strict=True)]
    raise AssertionError(stage)


def total(weights: Sequence[float], numbers: Sequence[Fraction]) -> Fraction:
    """A sum of products, exactly."""
    return sum((Fraction(w) * number for w, number in zip(weights, numbers, strict=True)), Fraction(0))


def drawn(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator).double()


BEHIND: dict[str, Callable[[torch.Generator], Node]] = {
    "nothing": lambda g: Skip(),
    "relu": lambda g: Tokenwise(Activation(torch.relu, "relu")),
    "product": lambda g: Multiply(Tokenwise(Affine(drawn(3, 3)(g))), Skip()),
    "gate": lambda g: Tokenwise(Affine(drawn(6, 3)(g)), GatedActivation(torch.relu, "relu")),
    "scale": lambda g: Tokenwise(Diagonal(drawn(3)(g))),
    "moves": lambda g: Rearrange(torch.tensor([[2, 0, 2], [1, -1, 0]]), drawn(2, 3)(g), drawn(2, 3)(g)),
    "mixture": lambda g: Series(Rearrange(torch.tensor([[2, 0], [1, 2], [0, 1]])), MixTokens(drawn(2, 3)(g))),
    "side by side": lambda g: Series(
        Beside(Skip(), Tokenwise(Affine(drawn(2, 3)(g)))), Tokenwise(Affine(drawn(3, 5)(g)))
    ),
    "sum": lambda g: Parallel(Skip(), Tokenwise(Affine(drawn(3, 3)(g)))),
}


def passed_exact(what: str) -> tuple[Fraction, Fraction]:
    """By how much a bound, and a margin as computed, pass the exact margin at most: large numbers cancel first."""
    over, off, generator = [], [], torch.Generator().manual_seed(0)
    for _ in range(20):
        x = 1e6 * (1 + torch.rand(1, 3, generator=generator).double())
        first = 1 + torch.rand(3, 3, generator=generator).double()
        first[:, 2] = -(first[:, :2] @ x[0, :2]) / x[0, 2] + 1e-6  # sums of 10⁶ that leave about one
        behind = BEHIND[what](generator)
        n, d = behind(x).shape
        last = [Rearrange(torch.arange(n * d)[None]), Tokenwise(Affine(drawn(2, n * d)(generator)))]
        root = Series(Tokenwise(Affine(first)), behind, *(last if n > 1 else last[1:]))
        lines = LinearisedNetwork(root, x, [0])
        logits = exactly(root, [[Fraction(number) for number in x[0].tolist()]])[0]
        bound, exact = lines.margins(0, torch.zeros(1, dtype=torch.float64))[1], logits[0] - logits[1]
        over.append(Fraction(float(bound)) - exact)
        off.append(Fraction(float(lines.logits[0] - lines.logits[1])) - exact)
    return max(over), max(off)


@pytest.mark.parametrize("what", BEHIND)
def test_margins_at_an_input_are_below_the_exact_ones_where_rounding_is_large(what: str) -> None:
    """Large numbers that cancel in the first layer: the margin as computed is off, above the exact one as often as not.

    Where something that is not linear follows, the error comes in through its remainder.
    """
    over, off = passed_exact(what)
    assert over <= 0
    assert off > Fraction(1e-11)  # of margins of about one: far more than the last layer rounds


@pytest.mark.parametrize(
    ("what", "step"), [("moves", "rearranged"), ("mixture", "mixed"), ("side by side", "beside"), ("sum", "plus")]
)
def test_errors_that_a_step_does_not_pass_on_are_missed(what: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = getattr(AffineForm, step)

    def careless(*args: Any) -> AffineForm:
        form = sound(*args)
        return replace(form, rounding=torch.zeros_like(form.rounding))

    monkeypatch.setattr(AffineForm, step, staticmethod(careless) if step == "beside" else careless)
    assert passed_exact(what)[0] > 0


def test_errors_that_a_product_does_not_pass_on_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = deep.multiply

    def careless(a: AffineForm, u: AffineForm) -> tuple[AffineForm, ProductRemainder]:
        form, remainder = sound(a, u)
        rows = [
            torch.cat([torch.zeros_like(rows[..., :1]), rows[..., 1:]], -1)
            for rows in (remainder.left, remainder.right)
        ]
        return form, ProductRemainder(*rows, torch.zeros_like(remainder.noise))

    monkeypatch.setattr(deep, "multiply", careless)
    assert passed_exact("product")[0] > 0


@pytest.mark.parametrize("what", BEHIND)
def test_margins_are_below_the_exact_ones_where_rounding_begins(what: str) -> None:
    """Inputs in exact numbers: what is off is what the step itself rounds, and bounds are not far below."""
    off, generator = [], torch.Generator().manual_seed(1)
    for _ in range(40):
        x, behind = torch.randn(1, 3, generator=generator).double(), BEHIND[what](generator)
        n, d = behind(x).shape
        root = Series(behind, Rearrange(torch.arange(n * d)[None]), Tokenwise(Affine(torch.eye(2, n * d).double())))
        lines = LinearisedNetwork(root, x, [0])
        logits = exactly(root, [[Fraction(number) for number in x[0].tolist()]])[0]
        bound, exact = lines.margins(0, torch.zeros(1, dtype=torch.float64))[1], logits[0] - logits[1]
        assert Fraction(float(bound)) <= exact
        assert float(exact - Fraction(float(bound))) < 1e-11
        off.append(Fraction(float(lines.logits[0] - lines.logits[1])) - exact)
    assert (max(off) > 0) == (what not in ("nothing", "relu"))


def test_spectral_ceiling_is_above_the_norm_and_near_it() -> None:
    matrices = torch.randn(20, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ceiling, exact = spectral_ceiling(matrices), torch.linalg.matrix_norm(matrices, 2)
    assert bool((ceiling >= exact).all())
    assert bool((ceiling <= 1.02 * exact).all())


@pytest.mark.slow
def test_cases_cover_every_part() -> None:
    assert {case.norm for case in cases(40)} == {"mean only", "standard", "rms"}
    assert {case.activation for case in cases(40)} == {"relu", "gelu", "silu"}
    assert {case.mask for case in cases(40)} == {"none", "causal", "window", "boolean"}


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1)])
def test_errors_of_both_factors_of_a_product_are_in_its_remainder(signs: tuple[int, int]) -> None:
    """Factors 2 and 3 that are off by as much as their forms allow, at an input that does not move."""
    errors = (0.01, 0.02)

    def factor(value: float, error: float) -> AffineForm:
        one = torch.full((1, 1), value, dtype=torch.float64)
        return AffineForm(one, (torch.zeros(1, 1, 1, 1, dtype=torch.float64),), one.new_tensor([error, 0.0]))

    form, remainder = multiply(factor(2.0, errors[0]), factor(3.0, errors[1]))
    lower, upper = remainder.numbers(torch.tensor([1.0, 0.0], dtype=torch.float64))
    truth = (2.0 + signs[0] * errors[0]) * (3.0 + signs[1] * errors[1])
    assert float(form.value + lower) <= truth <= float(form.value + upper)
    assert float(upper) < 0.0703  # 2·0.02 + 3·0.01 + 0.01·0.02
