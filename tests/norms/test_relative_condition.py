"""The relative condition: of every map the value that autograd and the forward pass give, and blind to units."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.attention import AttentionMap, CosineAttention, DenseBias, L2SelfAttention, SigmoidAttention
from howsmooth.norms import local_constant


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def maps() -> dict[str, nn.Module]:
    draw = [tokens(8, 8, seed=i) for i in range(1, 5)]
    return {
        "causal": hs.SelfAttention.random(8, heads=2, kv_heads=1, mask="causal", dtype=torch.float64),
        "biases": hs.SelfAttention(
            *draw, heads=2, value_bias=tokens(8, seed=7), output_bias=tokens(8, seed=8), softcap=5.0
        ),
        "sigmoid": SigmoidAttention(*draw, heads=2),
        "cosine": CosineAttention(*draw, heads=2),
        "l2": L2SelfAttention(*draw[:3], heads=2),
        "torch": nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval(),
    }


@pytest.mark.parametrize("name", list(maps()))
def test_equals_sigma_times_input_over_output(name: str) -> None:
    f, x = maps()[name], tokens(6, 8)
    plain = (lambda t: f(t[None], t[None], t[None])[0][0]) if name == "torch" else f
    m = hs.measure(f, x)
    with torch.no_grad():
        y = plain(x)
    dense = torch.autograd.functional.jacobian(plain, x).reshape(48, 48)
    wanted = torch.linalg.matrix_norm(dense, 2) * x.norm() / y.norm()
    assert float(m.relative) == pytest.approx(float(wanted), 1e-6)


@pytest.mark.parametrize("norm", [1, 2, math.inf, "fro", "token"])
def test_uses_the_vector_norm_that_belongs_to_the_norm(norm: float | str) -> None:
    f, x = nn.Sequential(nn.Linear(8, 5), nn.Tanh()).double(), tokens(6, 8)
    y = f(x).detach()
    lengths = {
        1: lambda t: t.abs().sum(),
        2: lambda t: t.norm(),
        math.inf: lambda t: t.abs().max(),
        "fro": lambda t: t.norm(),
        "token": lambda t: t.norm(dim=-1).max(),
    }
    m = hs.measure(f, x, norm=norm)
    assert float(m.scale) == pytest.approx(float(lengths[norm](x) / lengths[norm](y)), 1e-9)


def test_heads_and_batches_have_one_each() -> None:
    attention, x = hs.SelfAttention.random(8, heads=2, dtype=torch.float64), tokens(3, 6, 8)
    m = hs.measure_heads(attention, x)
    with torch.no_grad():
        out = attention.weights(x) @ attention.staged(x)[2] @ attention.output_weight
    wanted = m.value * (x.norm(dim=(1, 2))[:, None] / out.norm(dim=(-2, -1)))
    assert m.relative is not None
    assert torch.allclose(m.relative, wanted, rtol=1e-9)
    assert hs.measure(attention, x).relative.shape == (3,)  # type: ignore[union-attr]


def test_long_inputs_need_no_square_of_numbers() -> None:
    """With no memory for weights the output comes tile by tile, the same as at once."""
    attention, x = hs.SelfAttention.random(8, heads=2, mask="causal", dtype=torch.float64), tokens(700, 8)
    streamed = hs.jacobian(attention, x, memory=0)
    assert "streamed" in streamed.method
    y = streamed.value_at(attention, x)
    assert y is not None
    assert torch.allclose(y, attention(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", [1, 2, math.inf, "fro", "token"])
def test_lengths_in_parts_are_those_at_once(norm: float | str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(3, 7, 5)
    once = local_constant.size(x, norm, 2)
    monkeypatch.setattr(local_constant, "_PART", 4)
    torch.testing.assert_close(local_constant.size(x, norm, 2), once, rtol=1e-14, atol=0)


def test_units_of_the_tokens_change_sigma_and_not_the_relative_condition() -> None:
    attention, x, gain = hs.SelfAttention.random(8, heads=2, dtype=torch.float64), tokens(6, 8), 4.0
    weights = [w.flatten(0, 1) for w in (attention.query_weight, attention.key_weight, attention.value_weight)]
    twin = hs.SelfAttention(*(w / gain for w in weights), attention.output_weight.flatten(0, 1).T, heads=2)
    one, other = hs.measure(attention, x), hs.measure(twin, gain * x)
    assert float(other) == pytest.approx(float(one) / gain, 1e-9)
    assert float(other.relative) == pytest.approx(float(one.relative), 1e-9)


def test_output_of_zero_has_none() -> None:
    m = hs.measure(lambda x: x - tokens(3, 2), tokens(3, 2))
    assert math.isnan(float(m.relative))
    assert m.to_dict()["relative"] is None
    assert "relative" not in repr(m)


def test_is_said_and_written() -> None:
    m = hs.measure(torch.sin, tokens(4, 2))
    assert repr(m).endswith(f"relative condition {float(m.relative):.3g}")
    assert m.to_dict()["relative"] == pytest.approx(float(m.relative))
    assert hs.norms.operator_norm(hs.jacobian(torch.sin, tokens(4, 2))).relative is None


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", [hs.SelfAttention, hs.L2SelfAttention, SigmoidAttention, CosineAttention, "blind"])
def test_the_value_from_the_weights_that_are_known(kind: Any, per_head: bool) -> None:
    """Also where the rows of weights do not sum to one: a token that sees nothing has the output 0, not the centre."""
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(4, 8, 8, generator=draw, dtype=torch.float64)
    hidden = torch.zeros(6, 6, dtype=torch.float64).index_fill(0, torch.tensor([2]), -math.inf)
    if kind == "blind":
        attention: AttentionMap = hs.SelfAttention(*weights, heads=2, mask=DenseBias(hidden))
    else:
        attention = kind(*weights[: 3 if kind is L2SelfAttention else 4], heads=2)
    x = 3 + torch.randn(2, 6, 8, generator=draw, dtype=torch.float64)
    operator = hs.jacobians.attention_jacobian(attention, x, per_head=per_head)
    with torch.no_grad():
        heads = attention.weights(x) @ attention.staged(x)[2] @ attention.output_weight
        wanted = heads if per_head else attention(x)
    assert torch.allclose(operator.value_at(attention, x), wanted, rtol=1e-10, atol=1e-12)
