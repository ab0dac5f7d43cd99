"""The expansion of pooled attention against autograd, and its remainder under attack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from evidence.juries import ROUNDING
from evidence.pooled_terms import POOLS
from howsmooth.certificates.classifier.cls_token import Expansion, Functionals, PooledAttention

N, D, HEADS, OUT = 4, 3, 2, 5


def pool(seed: int, steep: float = 1.0, lead: float = 0.0) -> tuple[PooledAttention, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows = N + 1
    keys, values, offsets = steep * draw(HEADS, D), draw(HEADS, OUT, D), draw(HEADS, rows)
    offsets[:, 2] += lead
    return PooledAttention(keys, offsets, values, draw(HEADS, rows, OUT), draw(OUT), 1), draw(N, D)


def along(pooled: PooledAttention, a: Tensor, tokens: Tensor) -> Functionals:
    return Functionals(pooled.at(tokens), a[None])


@pytest.mark.parametrize("seed", range(4))
def test_gradient_and_curvature_equal_autograd(seed: int) -> None:
    pooled, tokens = pool(seed, steep=2.0)
    a, move = torch.randn(OUT, dtype=torch.float64), torch.randn(1, N * D, dtype=torch.float64)

    def g(flat: Tensor) -> Tensor:
        return a @ pooled(flat.reshape(N, D))

    found = along(pooled, a, tokens)
    gradient = torch.autograd.functional.jacobian(g, tokens.flatten())
    hessian = torch.autograd.functional.hessian(g, tokens.flatten())
    torch.testing.assert_close(found.value[0], g(tokens.flatten()))
    torch.testing.assert_close(found.gradient[0], gradient)
    torch.testing.assert_close(found.hessian_product(move)[0], hessian @ move[0])
    spectrum = torch.linalg.eigvalsh(hessian)
    least, most = (float(end) for end in found.curvature)
    assert least <= spectrum[0] < spectrum[-1] <= most
    assert most - least <= 2 * HEADS * (spectrum[-1] - spectrum[0])


def test_curvature_of_one_head_is_exact() -> None:
    pooled, tokens = pool(7)
    single = PooledAttention(
        pooled.keys[:1], pooled.key_offsets[:1], pooled.values[:1], pooled.value_offsets[:1], pooled.constant, 1
    )
    a = torch.ones(OUT, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda flat: a @ single(flat.reshape(N, D)), tokens.flatten())
    spectrum = torch.linalg.eigvalsh(hessian)
    found = along(single, a, tokens).curvature
    torch.testing.assert_close(torch.stack(found).flatten(), spectrum[[0, -1]])


def worst_share(steep: float, radius: float, seeds: range, lead: float = 0.0) -> float:
    """The largest share of its bound that the remainder reaches, by ascent inside the ball."""
    worst = 0.0
    for seed in seeds:
        pooled, tokens = pool(seed, steep, lead)
        a = torch.randn(OUT, dtype=torch.float64)
        found = along(pooled, a, tokens)
        start, slope = found.value[0], found.gradient[0]
        bound = float(found.remainder(radius))
        for sign in (-1, 1):
            delta = torch.randn(N * D, dtype=torch.float64)
            for _ in range(40):
                delta = (radius * delta / delta.norm()).requires_grad_()
                rest = a @ pooled(tokens + delta.reshape(N, D)) - start - slope @ delta
                rest = sign * (rest - 0.5 * (found.hessian_product(delta[None])[0] @ delta))
                worst = max(worst, float(rest.detach()) / bound)
                (step,) = torch.autograd.grad(rest, delta)
                delta = delta.detach() + radius * step / step.norm()
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(("steep", "radius"), [(0.5, 0.1), (2.0, 0.3), (1.0, 2.0), (6.0, 1.0)])
def test_no_move_leaves_more_than_the_remainder(steep: float, radius: float) -> None:
    assert 0.005 < worst_share(steep, radius, range(4)) <= 1


def test_a_remainder_without_its_fourth_cumulant_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Functionals.third_derivative

    def without_values(self: Functionals, radii: Tensor) -> Tensor:
        self._deviation, self._range = 0 * self._deviation, 0 * self._range
        self.pulled = 1e-3 * self.pulled
        return full(self, radii)

    monkeypatch.setattr(Functionals, "third_derivative", without_values)
    assert worst_share(2.0, 0.3, range(4)) > 1


@pytest.mark.slow
def test_saturation_at_the_input_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst_share(3.0, 1.0, range(4), lead=12.0) <= 1
    still = Expansion.spread
    monkeypatch.setattr(Expansion, "spread", lambda self, radii: still(self, 0 * radii))
    assert worst_share(3.0, 1.0, range(4), lead=12.0) > 1


def test_saturated_heads_have_almost_no_remainder() -> None:
    pooled, tokens = pool(0, lead=40.0)
    assert float(along(pooled, torch.ones(OUT, dtype=torch.float64), tokens).remainder(0.5)) < 1e-6


NEAR = {
    ("two tokens, 0.5 by 0.01", "variance"): 0.98,
    ("two tokens, 0.2 by 0.01", "growth"): 0.98,
    ("two tokens, 0.2 by 0.01", "curvature"): 0.98,
    ("two tokens, 0.1 by 0.01", "third derivative"): 0.67,
    ("two tokens whose values move", "third derivative"): 0.98,
    ("two tokens whose values move", "remainder"): 0.98,
    ("two tokens of the largest skew whose values move across", "third derivative"): 0.9,
    ("drawn, steep", "reach"): 0.98,
}
"""How close the truth comes to a term, at least: one that falls below this share of itself is caught."""


@pytest.mark.parametrize(("label", "name"), NEAR)
def test_no_move_passes_a_term_and_the_closest_comes_near_it(label: str, name: str) -> None:
    shares = POOLS[label].example(label).shares()
    assert NEAR[label, name] <= shares[name]
    assert max(shares.values()) <= 1 + ROUNDING
