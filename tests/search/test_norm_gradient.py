"""The gradient of ‖J(X)‖ through fixed vectors, against automatic differentiation of forward-mode products."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.search import norm_gradient
from howsmooth.search.ascent import first_vectors as leading
from howsmooth.search.ascent import norm_at
from howsmooth.search.norm_gradient import AttentionRoughness, FunctionRoughness, aligned, largest_entry_sign, unit

F64 = torch.float64
N = 5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def maps() -> dict[str, AttentionMap]:
    weights = 0.7 * draw(4, 6, 6)
    blind = torch.tensor([[True] * N] * (N - 1) + [[False] * N])
    far = hs.SlidingWindow(3)
    return {
        "plain": hs.SelfAttention.random(6, 2, dtype=F64),
        "causal": hs.SelfAttention.random(6, 2, dtype=F64, mask="causal"),
        "biased": hs.SelfAttention(*weights, heads=3, query_bias=draw(6), key_bias=draw(6), value_bias=draw(6)),
        "softcap": hs.SelfAttention.random(6, 2, dtype=F64, softcap=1.5),
        "grouped, rotary, q/k norm": hs.SelfAttention.random(
            8, 4, kv_heads=2, dtype=F64, rotary=hs.Rotary.standard(2), qk_norm="rms"
        ),
        "ALiBi in a window": hs.SelfAttention.random(6, 2, dtype=F64, mask=far, logit_biases=[hs.ALiBi.standard(2)]),
        "a blind token": hs.SelfAttention.random(6, 2, dtype=F64, mask=blind),
        "l2": hs.L2SelfAttention(weights[0], weights[1], heads=2, mask="causal"),
        "sigmoid": hs.SigmoidAttention(*weights, heads=2),
        "sigmoid, softcap": hs.SigmoidAttention(*weights, heads=2, softcap=2.0),
        "cosine": hs.CosineAttention(*weights, heads=3),
    }


def by_autograd(f: AttentionMap, x: Tensor, v: Tensor, norm: float) -> tuple[Tensor, Tensor, Tensor]:
    image = torch.func.jvp(f, (x,), (v,))[1]
    u = largest_entry_sign(image[None])[0] if norm == math.inf else image / image.norm()
    value = image.abs().max() if norm == math.inf else image.norm()
    gradient = torch.func.grad(lambda x: (u * torch.func.jvp(f, (x,), (v,))[1]).sum())(x)
    return value, gradient, aligned(torch.func.vjp(f, x)[1](u)[0][None], norm)[0]


@pytest.mark.parametrize("norm", [2, math.inf])
@pytest.mark.parametrize("block", [2**17, 12])
@pytest.mark.parametrize("name", maps())
def test_slopes_of_attention_equal_automatic_differentiation(
    name: str, block: int, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_gradient, "BLOCK_SIZE", block)
    f = maps()[name]
    x = draw(3, N, f.in_features, seed=1)
    v = aligned(draw(*x.shape, seed=2), norm)
    slope = AttentionRoughness(f, norm).slope(x, v)
    for i in range(len(x)):
        value, gradient, vectors = by_autograd(f, x[i], v[i], norm)
        assert float(slope.value[i]) == pytest.approx(float(value), rel=1e-12)
        assert torch.allclose(slope.gradient[i], gradient, atol=1e-11 * float(gradient.abs().max()))
        assert torch.allclose(slope.vectors[i], vectors, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("norm", [2, math.inf])
def test_slopes_of_functions_equal_the_closed_form_at_the_top_vectors(norm: float, batched: bool) -> None:
    """Both follow the same maximum, from the left and from the right, so at its vectors they agree."""
    f = maps()["causal"]
    x = draw(3, N, 6, seed=1)
    closed, general = AttentionRoughness(f, norm), FunctionRoughness(lambda x: f(x), norm)
    general.batched = batched
    values, right = leading(x, closed)
    for _ in range(100):
        right = closed.slope(x, right).vectors
    image = hs.jacobian(f, x).matvec(right)
    left = largest_entry_sign(image) if norm == math.inf else unit(image)
    expected, found = closed.slope(x, right), general.slope(x, left)
    assert torch.allclose(found.value, expected.value, rtol=1e-9)
    assert torch.allclose(found.gradient, expected.gradient, atol=1e-6)
    assert torch.allclose(found.vectors, left, atol=1e-5)
    assert bool((values <= expected.value * (1 + 1e-12)).all())


def test_a_slope_predicts_how_the_norm_grows() -> None:
    """Against finite differences of the dense singular value, at its own singular vectors."""
    f = hs.SelfAttention.random(4, dtype=F64, mask="causal")
    x = draw(1, N, 4, seed=3)
    measured = norm_at(f, x[0], 2)
    assert measured.right is not None
    slope = AttentionRoughness(f, 2).slope(x, measured.right[None])
    direction = draw(N, 4, seed=4)
    h = 1e-5
    ends = [float(norm_at(f, x[0] + s * h * direction, 2)) for s in (1, -1)]
    expected = (ends[0] - ends[1]) / (2 * h)
    assert float((slope.gradient[0] * direction).sum()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["plain", "causal", "l2", "sigmoid"])
def test_rows_of_large_jacobians_are_chosen_by_probes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.search.ascent._ALL_ROWS", 0)
    f = maps()[name]
    check_leading(f, draw(3, 40, f.in_features, seed=5), math.inf, least=0.9)


@pytest.mark.parametrize("norm", [2, math.inf])
@pytest.mark.parametrize("name", ["plain", "causal", "l2", "sigmoid"])
def test_vectors_to_begin_with_come_near_the_dense_norm(name: str, norm: float) -> None:
    f = maps()[name]
    for n in (N, 40):
        check_leading(f, draw(3, n, f.in_features, seed=5), norm)


def check_leading(f: AttentionMap, x: Tensor, norm: float, least: float = 0.99) -> None:
    values, vectors = leading(x, AttentionRoughness(f, norm))
    for i in range(len(x)):
        dense = torch.func.jacrev(f)(x[i]).reshape(-1, x[i].numel())
        exact = float(torch.linalg.matrix_norm(dense, norm))
        assert least * exact <= float(values[i]) <= exact * (1 + 1e-12)
        attained = torch.linalg.vector_norm(dense @ vectors[i].flatten(), norm)
        assert float(attained) >= float(values[i]) * (1 - 1e-6)


def test_functions_that_cannot_be_batched_go_one_by_one() -> None:
    def branching(x: Tensor) -> Tensor:
        return x.tanh() * (2 if float(x[0, 0]) > 0 else 3)

    rough = FunctionRoughness(branching, 2)
    x = torch.tensor([[[0.5, 0.0]], [[-0.5, 0.0]]], dtype=F64)
    slope = rough.slope(x, unit(torch.tensor([[[0.0, 1.0]]] * 2, dtype=F64)))
    assert slope.value.tolist() == [2.0, 3.0]
    assert not rough.batched


def test_linear_functions_have_no_slope() -> None:
    slope = FunctionRoughness(lambda x: 3 * x, 2).slope(draw(2, 3, 2), unit(draw(2, 3, 2, seed=1)))
    assert torch.allclose(slope.value, torch.full((2,), 3.0, dtype=F64))
    assert not slope.gradient.any()


def test_functions_without_second_derivatives_are_refused() -> None:
    rough = FunctionRoughness(lambda x: torch.cdist(x, x + 1), 2)
    with pytest.raises(NotDifferentiable, match="twice"):
        rough.slope(draw(2, 3, 2), draw(2, 3, 3))
    with pytest.raises(NotDifferentiable, match="twice"):
        FunctionRoughness(lambda x: x.detach(), 2).slope(draw(2, 3, 2), draw(2, 3, 2))
    with pytest.raises(InvalidInput, match="random"):
        FunctionRoughness(nn.Dropout(0.5), 2).out_shape(draw(30, 2))


@pytest.mark.parametrize("name", maps())
def test_one_head_is_what_measure_heads_measures(name: str) -> None:
    f = maps()[name]
    x = draw(N, f.in_features, seed=6)
    together = hs.measure_heads(f, x).value
    alone = torch.stack([norm_at(f.head(h), x, 2).value for h in range(f.heads)])
    assert torch.allclose(together, alone, rtol=1e-9)
    whole = f(x) if f.output_bias is None else f(x) - f.output_bias
    assert torch.allclose(sum(f.head(h)(x) for h in range(f.heads)), whole, atol=1e-12)


def test_one_head_takes_its_own_share_of_biases_by_head() -> None:
    per_head = draw(2, N, N, seed=7)
    f = hs.SelfAttention.random(6, 2, dtype=F64, logit_biases=[hs.DenseBias(per_head), hs.RelativeBias(draw(2, 7))])
    x = draw(N, 6, seed=6)
    assert torch.allclose(f.head(0)(x) + f.head(1)(x), f(x), atol=1e-12)
    assert not torch.allclose(f.head(0).weights(x), f.head(1).weights(x))
    for bad in (-1, 2, True):
        with pytest.raises(InvalidInput, match="no head"):
            f.head(bad)
