"""Attention with something around it against dense autograd of its own forward pass, and of its heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import Chunked, ComposedAttention, UnitNorm
from howsmooth.attention.composite_map import Feature, Features
from howsmooth.attention.stages import HeadNorm, PlaceScale
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.composite_operator import composite_jacobian
from howsmooth.testing import dense_jacobian

D, HEADS, N = 12, 4, 7


def draw(*shape: int) -> Tensor:
    return 0.4 * torch.randn(*shape, dtype=torch.float64)


def inner(width: int = D, **options: object) -> hs.SelfAttention:
    weights = draw(HEADS * 6, width), draw(2 * 6, width), draw(2 * 5, width), draw(10, HEADS * 5)
    biases = {"query_bias": draw(24), "key_bias": draw(12), "value_bias": draw(10), "output_bias": draw(10)}
    return hs.SelfAttention(*weights, heads=HEADS, kv_heads=2, **biases, **options)  # type: ignore[arg-type]


def latent(*more: Feature) -> Features:
    return Features(Feature(draw(8, D), draw(8), [UnitNorm.rms(8, gain=draw(8))]), *more)


def composed(name: str) -> ComposedAttention:
    if name == "sinks":
        return ComposedAttention(inner(mask="causal", rotary=hs.Rotary.standard(6)), sinks=draw(HEADS))
    if name == "sinks in a window under a cap":
        return ComposedAttention(inner(mask=hs.SlidingWindow(3), softcap=2.0), sinks=draw(HEADS))
    if name == "gate":
        return ComposedAttention(inner(mask="causal", qk_norm="rms"), gate=draw(20, D), gate_bias=draw(20))
    if name == "features":
        norm = HeadNorm(1e-5, draw(5), draw(5))
        return ComposedAttention(
            inner(8 + 5 + D, mask=Chunked(3)), features=latent(Feature(draw(5, D), None, [norm]), Feature(None))
        )
    return ComposedAttention(
        inner(13, mask="causal"), features=latent(Feature(draw(5, D))), sinks=draw(HEADS), gate=draw(20, D)
    )


KINDS = ["sinks", "sinks in a window under a cap", "gate", "features", "all at once"]


def head_jacobian(f: ComposedAttention, x: Tensor, head: int) -> Tensor:
    """The Jacobian of the map with the output of one head alone."""
    kept = f.attention.output_weight
    f.attention.output_weight = torch.zeros_like(kept)
    f.attention.output_weight[head] = kept[head]
    matrix = dense_jacobian(f, x)
    f.attention.output_weight = kept
    return matrix


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_products_heads_and_blocks_equal_dense_autograd(name: str) -> None:
    f, x = composed(name), draw(N, D)
    expected = dense_jacobian(f, x)
    operator = hs.jacobian(f, x)
    torch.testing.assert_close(operator.dense(), expected, rtol=0, atol=1e-12)
    u = draw(*operator.out_shape)
    torch.testing.assert_close(operator.rmatvec(u).flatten(), expected.T @ u.flatten(), rtol=0, atol=1e-12)
    heads = torch.stack([head_jacobian(f, x, head) for head in range(HEADS)])
    torch.testing.assert_close(composite_jacobian(f, x, per_head=True).dense(), heads, rtol=0, atol=1e-12)
    measured = hs.measure_heads(f, x, rtol=1e-8).value
    torch.testing.assert_close(measured, torch.linalg.matrix_norm(heads, 2), rtol=1e-8, atol=0)
    blocks = expected.reshape(N, -1, N, D).transpose(1, 2)
    torch.testing.assert_close(
        hs.token_influence(f, x, rtol=1e-6), torch.linalg.matrix_norm(blocks, 2), rtol=0, atol=1e-8
    )
    by_head = torch.linalg.matrix_norm(heads.reshape(HEADS, N, -1, N, D).transpose(2, 3), 2)
    torch.testing.assert_close(hs.token_influence(f, x, per_head=True, rtol=1e-6), by_head, rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_batches_and_single_precision_agree_with_single_inputs(name: str) -> None:
    f, x = composed(name), draw(3, N, D)
    expected = torch.stack([torch.linalg.matrix_norm(dense_jacobian(f, one), 2) for one in x])
    for wide in (x, x.float()):
        torch.testing.assert_close(hs.measure(f, wide).value, expected, rtol=2e-3, atol=0)
    heads = torch.stack([hs.measure_heads(f, one, rtol=1e-6).value for one in x])
    torch.testing.assert_close(hs.measure_heads(f, x, rtol=1e-6).value, heads, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_paths_add_up_and_the_ends_hold(name: str) -> None:
    f, x = composed(name), draw(N, D)
    story = hs.explain(f, x)
    gate = 0.0 if story.gate_path is None else float(story.gate_path)
    assert (story.gate_path is None) == (f.gate is None)
    assert float(story.total) <= float(story.value_path) + float(story.score_path) + gate + 1e-9
    whole = composite_jacobian(f, x)
    parts = [whole.along(path).dense() for path in ("value", "score", *(["gate"] if gate else []))]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole.dense(), rtol=0, atol=1e-12)
    exact = float(torch.linalg.matrix_norm(dense_jacobian(f, x), 2))
    measured = hs.measure(f, x.float(), rtol=1e-2)
    assert float(measured.lower) * (1 - 1e-6) <= exact <= float(measured.upper) * (1 + 1e-6)
    weights = f.weights(x)
    torch.testing.assert_close(story.sink, weights.sum(-2).amax(-1))
    rest = (1 - weights.sum(-1, keepdim=True)).clamp_min(0)
    entropy = torch.special.entr(torch.cat([weights, rest], -1)).sum(-1).mean(-1)
    torch.testing.assert_close(story.entropy, entropy)


def test_far_sinks_leave_plain_attention_and_near_ones_silence_it() -> None:
    plain, x = inner(mask="causal"), draw(N, D)
    expected = float(hs.measure(plain, x, rtol=1e-8))
    assert float(hs.measure(ComposedAttention(plain, sinks=torch.full((4,), -60.0)), x, rtol=1e-8)) == pytest.approx(
        expected, rel=1e-9
    )
    assert float(hs.measure(ComposedAttention(plain, sinks=torch.full((4,), 60.0)), x)) < 1e-12 * expected


def test_open_gates_leave_plain_attention() -> None:
    plain, x = inner(), draw(N, D)
    f = ComposedAttention(plain, gate=torch.zeros(20, D, dtype=torch.float64))
    assert float(hs.measure(f, x, rtol=1e-8)) == pytest.approx(float(hs.measure(plain, x, rtol=1e-8)) / 2, rel=1e-9)


@pytest.mark.parametrize("stage", [HeadNorm(1e-5), HeadNorm(1e-5, draw(4, 6), draw(4, 6)), PlaceScale(0.3, 2)])
def test_stages_of_single_heads_equal_dense_autograd(stage: HeadNorm | PlaceScale) -> None:
    attention, x = inner(mask="causal"), draw(N, D)
    attention.query_stages.insert(0, stage)
    torch.testing.assert_close(hs.jacobian(attention, x).dense(), dense_jacobian(attention, x), rtol=0, atol=1e-12)
    heads = hs.measure_heads(attention, draw(2, N, D)).value
    assert heads.shape == (2, HEADS)
    alone = torch.stack([attention.head(h)(x) for h in range(HEADS)]).sum(0)
    bias = 0.0 if attention.output_bias is None else attention.output_bias
    torch.testing.assert_close(alone, attention(x) - bias, rtol=0, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="one finite logit for each of 4 heads"):
        ComposedAttention(inner(), sinks=torch.zeros(3))
    with pytest.raises(InvalidInput, match=r"the gate has shape \(3, 12\), but must be \(20, d\)"):
        ComposedAttention(inner(), gate=draw(3, D))
    with pytest.raises(InvalidInput, match="only an attention map has keys"):
        hs.jacobian(composed("sinks"), draw(N, D), wrt="keys")
