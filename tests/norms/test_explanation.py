"""Explanations against dense Jacobians: paths, sinks, energies, influence."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from evidence import attention_cases as cases
from howsmooth.jacobians import attention_jacobian

MAPS = [
    ("dot_product", "none", 4, 2, "rotary", True, "rms qk-norm and softcap"),
    ("dot_product", "causal", 4, 4, "alibi", False, "plain"),
    ("sigmoid", "padding", 4, 4, "none", True, "plain"),
    ("cosine", "window", 4, 1, "none", True, "plain"),
    ("l2", "causal", 4, 4, "none", False, "plain"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MAPS, ids=lambda case: case[0])
def test_influence_is_the_norm_of_every_block(case: tuple) -> None:
    attention, x = cases.build(*case), cases.tokens()
    blocks = torch.func.jacrev(attention)(x).transpose(1, 2)
    expected = torch.linalg.matrix_norm(blocks, ord=2)
    torch.testing.assert_close(hs.token_influence(attention, x, rtol=1e-9), expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(hs.token_influence(attention.forward, x), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", MAPS, ids=lambda case: case[0])
def test_story_of_every_head_equals_dense_algebra(case: tuple) -> None:
    attention, x = cases.build(*case), cases.tokens(2)
    story = hs.explain(attention, x, per_head=True, rtol=1e-8)
    n = x.shape[1]
    dense = attention_jacobian(attention, x, per_head=True).dense()
    left, values, right = torch.linalg.svd(dense)
    torch.testing.assert_close(story.total.value, values[..., 0], rtol=1e-7, atol=0)
    energy_in = right[..., 0, :].reshape(2, 4, n, -1).square().sum(-1)
    energy_out = left[..., 0].reshape(2, 4, n, -1).square().sum(-1)
    torch.testing.assert_close(story.input_energy.double(), energy_in, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(story.output_energy.double(), energy_out, rtol=1e-5, atol=1e-6)
    weights = attention.weights(x)
    torch.testing.assert_close(story.sink, weights.sum(-2).max(-1).values)
    assert (story.total.lower <= story.value_path.upper + story.score_path.upper).all()
    blocks = dense.reshape(2, 4, n, -1, n, x.shape[-1]).transpose(3, 4)
    torch.testing.assert_close(story.influence, torch.linalg.matrix_norm(blocks, ord=2), rtol=1e-2, atol=1e-10)


def test_value_path_of_a_head_is_a_kronecker_product() -> None:
    attention = hs.SelfAttention.random(12, heads=3, dtype=torch.float64, mask="causal")
    x = torch.randn(9, 12, dtype=torch.float64)
    story = hs.explain(attention, x, per_head=True, influence=False, rtol=1e-8)
    weights = torch.linalg.matrix_norm(attention.weights(x), ord=2)
    values = torch.linalg.matrix_norm(attention.output_weight.mT @ attention.value_weight, ord=2)
    torch.testing.assert_close(story.value_path.value, weights * values, rtol=1e-7, atol=0)
    assert story.influence is None
    assert (weights <= story.sink.sqrt()).all()


def test_sink_and_entropy_of_uniform_and_of_captured_attention() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    uniform = hs.explain(hs.SelfAttention.from_bilinear(0 * one, one), torch.zeros(8, 1, dtype=torch.float64))
    torch.testing.assert_close(uniform.sink, torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(uniform.entropy, torch.full((1,), 8.0, dtype=torch.float64).log())
    x = torch.ones(8, 1, dtype=torch.float64)
    x[3] = 50
    captured = hs.explain(hs.SelfAttention.from_bilinear(one, one), x)
    assert captured.sink_token.item() == 3
    assert captured.sink.item() == pytest.approx(8)
    assert captured.entropy.item() == pytest.approx(0, abs=1e-12)


def test_block_story_has_one_number_and_one_map() -> None:
    attention = hs.SelfAttention.random(12, heads=3)
    story = hs.explain(attention, torch.randn(7, 12))
    assert story.total.value.shape == ()
    assert story.influence.shape == (7, 7)
    assert story.input_energy.sum().item() == pytest.approx(1, abs=1e-5)
    assert story.sink.shape == (3,)


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(hs.InvalidInput, match="explain needs an attention map"):
        hs.explain(torch.tanh, torch.randn(3, 4))
    with pytest.raises(hs.InvalidInput, match="tokens in and out"):
        hs.token_influence(lambda x: x.sum(), torch.randn(3, 4))


@pytest.mark.parametrize("case", MAPS, ids=lambda case: case[0])
def test_value_share_is_what_the_value_path_does_in_the_worst_direction(case: tuple) -> None:
    attention, x = cases.build(*case), cases.tokens()
    story = hs.explain(attention, x, per_head=True, influence=False, rtol=1e-8)
    value = attention_jacobian(attention, x, per_head=True).along("value").dense()
    left, right = story.total.left.flatten(1), story.total.right.flatten(1)
    expected = torch.einsum("hi,hij,hj->h", left, value, right) / story.total.value
    torch.testing.assert_close(story.value_share, expected, rtol=1e-6, atol=1e-9)


def test_influence_of_one_head_is_that_of_all_heads() -> None:
    attention = hs.SelfAttention.random(12, heads=3, mask="causal")
    x = torch.randn(2, 7, 12)
    every = hs.token_influence(attention, x, per_head=True)
    torch.testing.assert_close(hs.token_influence(attention, x, head=1), every[:, 1])
    with pytest.raises(hs.InvalidInput, match="no head 3"):
        hs.token_influence(attention, x, head=3)
