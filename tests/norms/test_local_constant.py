"""`hs.measure` and `hs.measure_heads` from the user's side, against dense SVDs and published reference values.

The relative condition: of every map the value that autograd and the forward pass give, and blind to units.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from evidence import attention_cases as cases
from howsmooth.attention import AttentionMap, CosineAttention, DenseBias, L2SelfAttention, SigmoidAttention
from howsmooth.jacobians import attention_jacobian
from howsmooth.norms import local_constant
from howsmooth.testing import dense_jacobian


def sigma(f, x: Tensor) -> float:
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.func.jacrev(f)(x)
    return float(torch.linalg.matrix_norm(jacobian.detach().reshape(-1, x.numel()), ord=2))


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_value_equals_dense_svd_to_eight_digits_when_asked_for_nine(kind: str, mask: str) -> None:
    attention, x = cases.build(kind, mask, 4, 4, "rotary", True, "plain"), cases.tokens()
    found = hs.measure(attention, x, rtol=1e-9, dense_limit=0)
    assert found.method.startswith("golub-kahan")
    assert bool(found.converged)
    assert float(found) == pytest.approx(sigma(attention, x), rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_of_torch(dtype: torch.dtype, batch_first: bool) -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first).to(dtype)
    x = torch.randn(3, 9, 16, dtype=dtype)
    found = hs.measure(module, x)
    module = module.double()
    for item, value in zip(x, found.value, strict=True):
        expected = sigma(lambda y: module(y, y, y, need_weights=False)[0], item.double())
        assert float(value) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.slow
def test_transformer_encoder_layer_of_torch(norm_first: bool, dtype: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first).to(dtype).eval()
    x = torch.randn(2, 20, 16, dtype=dtype)
    found = hs.measure(layer, x, dense_limit=0)
    layer = layer.double()
    for item, value in zip(x, found.value, strict=True):
        assert float(value) == pytest.approx(sigma(_without_fast_path(layer), item.double()), rel=1e-3)


def _without_fast_path(layer: nn.TransformerEncoderLayer):
    def attend(y: Tensor) -> Tensor:
        return layer.self_attn(y, y, y, need_weights=True)[0]

    def call(x: Tensor) -> Tensor:
        if layer.norm_first:
            x = x + attend(layer.norm1(x))
            return x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))
        x = layer.norm1(x + attend(x))
        return layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))

    return call


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.slow
def test_whole_gpt2_block(attn_implementation: str) -> None:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=50, attn_implementation=attn_implementation)
    model = GPT2Model(config).double().eval()
    mask = torch.full((12, 12), -math.inf, dtype=torch.float64).triu(1)[None, None]
    x = torch.randn(1, 12, 32, dtype=torch.float64)

    def block(y: Tensor) -> Tensor:
        out = model.h[0](y, attention_mask=mask)
        return out if isinstance(out, Tensor) else out[0]

    found = hs.measure(block, x, rtol=1e-6)
    assert found.value.shape == (1,)
    assert float(found) == pytest.approx(_sigma_by_vjp(block, x), rel=1e-6)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.slow
def test_whole_llama_block(attn_implementation: str) -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        vocab_size=50,
        attn_implementation=attn_implementation,
    )
    model = LlamaModel(config).double().eval()
    mask = torch.full((12, 12), -math.inf, dtype=torch.float64).triu(1)[None, None]
    x = torch.randn(1, 12, 32, dtype=torch.float64)
    rope = model.rotary_emb(x, torch.arange(12)[None])

    def block(y: Tensor) -> Tensor:
        out = model.layers[0](y, attention_mask=mask, position_embeddings=rope)
        return out if isinstance(out, Tensor) else out[0]

    found = hs.measure(block, x, rtol=1e-6)
    assert float(found) == pytest.approx(_sigma_by_vjp(block, x), rel=1e-6)


def _sigma_by_vjp(f, x: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense_jacobian(f, x), ord=2))


def test_plain_function_in_a_batch_without_gradients_and_with_frozen_parameters() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).requires_grad_(False)
    x = torch.randn(4, 3, 6)
    with torch.no_grad():
        found = hs.measure(net, x)
    assert found.value.shape == (4,)
    for item, value in zip(x, found.value, strict=True):
        assert float(value) == pytest.approx(sigma(net, item), rel=1e-3)


def test_attention_without_gradients_leaves_no_trace() -> None:
    attention = hs.SelfAttention.random(32, heads=4)
    x = torch.randn(40, 32, requires_grad=True)
    with torch.inference_mode():
        inside = hs.measure(attention, x)
    outside = hs.measure(attention, x)
    assert float(inside) == float(outside)
    assert x.grad is None


@pytest.mark.slow
def test_heads_equal_dense_svd_of_each_head() -> None:
    attention = hs.SelfAttention.random(24, heads=4, kv_heads=2, mask="causal", dtype=torch.float64)
    x = torch.randn(2, 30, 24, dtype=torch.float64)
    found = hs.measure_heads(attention, x, rtol=1e-6, dense_limit=0)
    assert found.value.shape == (2, 4)
    for item in range(2):
        for head in range(4):
            alone = hs.SelfAttention(
                attention.query_weight[head],
                attention.key_weight[head // 2],
                attention.value_weight[head // 2],
                attention.output_weight[head].T,
                mask="causal",
            )
            assert float(found.value[item, head]) == pytest.approx(sigma(alone, x[item]), rel=1e-6)


def test_singular_vectors_of_heads_are_in_token_coordinates() -> None:
    attention = hs.SelfAttention.random(24, heads=4, dtype=torch.float64)
    x = torch.randn(10, 24, dtype=torch.float64)
    found = hs.measure_heads(attention, x, k=2, rtol=1e-8)
    operator = attention_jacobian(attention, x, per_head=True)
    assert found.right.shape == (4, 2, 10, 24)
    for place in range(2):
        moved = operator.matvec(found.right[:, place])
        expected = found.values[:, place, None, None] * found.left[:, place]
        torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-6)


def test_value_moves_as_much_as_a_finite_difference_along_the_right_vector() -> None:
    attention = hs.SelfAttention.random(16, heads=2, dtype=torch.float64, mask="causal")
    x = torch.randn(20, 16, dtype=torch.float64)
    found = hs.measure(attention, x, rtol=1e-6)
    step = 1e-6 * found.right
    moved = (attention(x + step) - attention(x - step)).norm() / (2e-6)
    assert float(moved) == pytest.approx(float(found), rel=1e-6)


def test_what_the_released_scripts_return_is_another_number() -> None:
    """They keep the primal output of the forward-mode product and so return √‖Jᵀf(X)‖ (theory, section 6)."""
    attention = hs.SelfAttention.random(16, heads=2, dtype=torch.float64)
    x = torch.randn(20, 16, dtype=torch.float64)
    wrong = hs.jacobian(attention, x).rmatvec(attention(x)).norm().sqrt()
    assert abs(float(wrong) / float(hs.measure(attention, x)) - 1) > 0.1


def test_measure_heads_refuses_a_plain_function() -> None:
    with pytest.raises(hs.InvalidInput, match="needs an attention map"):
        hs.measure_heads(torch.tanh, torch.randn(3, 4))


def test_dropout_in_training_is_refused() -> None:
    with pytest.raises(hs.InvalidInput, match=r"\.eval\(\)"):
        hs.measure(nn.MultiheadAttention(8, 2, dropout=0.1), torch.randn(3, 8))
    with pytest.raises(hs.InvalidInput, match=r"\.eval\(\)"):
        hs.measure(nn.TransformerEncoderLayer(8, 2, 16), torch.randn(3, 8))


@pytest.mark.parametrize("norm", [1, math.inf, "fro"])
def test_other_norms_equal_the_dense_ones(norm: float | str) -> None:
    attention = cases.build("dot_product", "causal", 4, 2, "rotary", True, "plain")
    x = cases.tokens()
    dense = dense_jacobian(attention, x)
    found = hs.measure(attention, x, norm=norm)
    assert float(found) == pytest.approx(float(torch.linalg.matrix_norm(dense, ord=norm)), rel=1e-9)


# Reference values: theory section 3, A = −γI, V = 1, b = γR². One outlier at −R among n − 1 tokens at R.
UNMASKED = {50: "10.4", 100: "17.6", 200: "28.4", 500: "43.3", 1000: "48.0", 2000: "45.0", 10_000: "26.2"}
MASKED = {50: "9.0", 100: "14.7", 200: "24.1", 500: "42.4", 1000: "57.3", 2000: "69.4", 10_000: "83.3"}
CESARO = {2: "1.144", 10: "1.410", 100: "1.630", 1000: "1.748", 3000: "1.786"}
SUPREMA = {1: "2.99", 2: "12.9", 3: "48.0", 4: "166"}


def two_atoms(b: float, outliers: int, n: int, mask: str | None = None) -> float:
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.ones(n, 1, dtype=torch.float64)
    x[:outliers] = -1
    return float(hs.measure(hs.SelfAttention.from_bilinear(-b * one, one, mask=mask), x, rtol=1e-5))


@pytest.mark.parametrize("n", [n if n < 5000 else pytest.param(n, marks=pytest.mark.slow) for n in UNMASKED])
def test_one_outlier_reproduces_the_reference_values(n: int) -> None:
    assert f"{two_atoms(3, 1, n):.1f}" == UNMASKED[n]
    assert f"{two_atoms(3, 1, n, 'causal'):.1f}" == MASKED[n]


@pytest.mark.parametrize("n", CESARO)
@pytest.mark.slow
def test_causal_averaging_reproduces_the_norm_of_the_cesaro_matrix(n: int) -> None:
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    attention = hs.SelfAttention.from_bilinear(zero, one, mask="causal")
    found = hs.measure(attention, torch.zeros(n, 1, dtype=torch.float64), rtol=1e-5)
    cesaro = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1)[:, None]
    assert float(found) == pytest.approx(float(torch.linalg.matrix_norm(cesaro, ord=2)), rel=1e-5)
    assert f"{float(found):.3f}" == CESARO[n]


@pytest.mark.parametrize("b", SUPREMA)
@pytest.mark.slow
def test_outlier_at_its_best_length_reproduces_the_two_atom_suprema(b: int) -> None:
    """The printed suprema are those of √(n−1)·p(1 + 2(1−p)b), p = E/(E+n−1), E = e^{2b}: the outlier moves the rest.

    The whole norm on the same input is a little larger (3.07 instead of 2.99 at b = 1); its oracle is the 2 × 2 matrix
    of the two atoms with the rest weighted by n − 1.
    """
    rest = torch.arange(1, 10_000, dtype=torch.float64)
    share = math.exp(2 * b) / (math.exp(2 * b) + rest)
    closed = rest.sqrt() * share * (1 + 2 * (1 - share) * b)
    others = int(closed.argmax()) + 1
    one = torch.ones(1, 1, dtype=torch.float64)
    x = torch.ones(others + 1, 1, dtype=torch.float64)
    x[0] = -1
    operator = hs.jacobian(hs.SelfAttention.from_bilinear(-b * one, one), x)
    column = operator.columns(torch.tensor([0]))[0, 1:]
    assert float(column.norm()) == pytest.approx(float(closed.max()), rel=1e-10)
    assert float(f"{float(column.norm()):.3g}") == float(SUPREMA[b])
    assert two_atoms(b, 1, others + 1) == pytest.approx(_two_atom_norm(b, others), rel=1e-5)


def _two_atom_norm(b: float, rest: int) -> float:
    mass, x = torch.tensor([1.0, rest], dtype=torch.float64), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    weights = mass * torch.exp(-b * x[:, None] * x)
    weights = weights / weights.sum(1, keepdim=True)
    mean = weights @ x
    jacobian = weights * (1 - b * x[:, None] * (x - mean[:, None])) + torch.diag(-b * (weights @ x**2 - mean**2))
    return float(torch.linalg.matrix_norm(mass.sqrt()[:, None] * jacobian / mass.sqrt(), ord=2))


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
