"""Every node against dense autograd in float64: value, Jacobian, its transpose, its size and its columns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.attention import ComposedAttention
from howsmooth.attention.stages import TokenStage, UnitNorm
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import attention_jacobian
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation, Norm, Softmax
from howsmooth.network.composed_jacobian import ComposedJacobian, composed_jacobian
from howsmooth.network.nodes import (
    Attend,
    Beside,
    MixTokens,
    Multiply,
    Node,
    Parallel,
    Rearrange,
    Series,
    Skip,
    Tokenwise,
    Unread,
)
from howsmooth.testing import dense_jacobian
from tests.network.blocks import D, N, block, norm_stage, randomised, tokens

W = tokens(1, 2 * D, D)
STAGES: dict[str, tuple[TokenStage, Callable[[Tensor], Tensor]]] = {
    "linear": (Affine(W, W[:, 0]), lambda x: x @ W.T + W[:, 0]),
    "scale": (Diagonal(W[0], W[1]), lambda x: x * W[0] + W[1]),
    "multiple": (Diagonal(0.3), lambda x: 0.3 * x),
    "rms": (UnitNorm.rms(D, 1e-3, W[0]), lambda x: W[0] * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()),
    "rms norm": (Norm(D, 1e-3, W[0], W[1]), lambda x: F.rms_norm(x, (D,), W[0], 1e-3) + W[1]),
    "layer norm": (norm_stage(norm := randomised(nn.LayerNorm(D, eps=1e-3))), norm),  # type: ignore[arg-type]
    "bare layer norm": (Norm(D, 1e-3, centred=True), lambda x: F.layer_norm(x, (D,), eps=1e-3)),
    "gate": (GatedActivation(F.silu), lambda x: F.silu(x[..., : D // 2]) * x[..., D // 2 :]),
    "softmax": (Softmax(), lambda x: x.softmax(-1)),
    **{
        name: (Activation(act), act)
        for name, act in {
            "relu": F.relu,
            "gelu": F.gelu,
            "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
            "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
            "silu": F.silu,
            "tanh": torch.tanh,
        }.items()
    },
}


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_equals_autograd(name: str) -> None:
    stage, function = STAGES[name]
    x = tokens()
    closed = Tokenwise(stage)
    torch.testing.assert_close(closed(x), function(x))
    J = composed_jacobian(closed, x)
    exact = dense_jacobian(function, x)
    torch.testing.assert_close(J.dense(), exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(J.adjoint.dense(), exact.mT, rtol=1e-10, atol=1e-12)
    (part,) = J.parts
    assert float(part.size()) >= float(torch.linalg.matrix_norm(exact, 2)) * (1 - 1e-12)
    everything = torch.arange(part.in_size)
    columns = part.columns(everything).reshape(part.in_size, -1).mT
    torch.testing.assert_close(columns, exact, rtol=1e-10, atol=1e-12)


def test_a_norm_followed_by_a_factor_and_a_shift_is_one_norm() -> None:
    factor, shift, x = W[2], W[3], tokens()
    for plain in (Norm(D, 1e-3, W[0], W[1], centred=True), Norm(D, 1e-3)):
        torch.testing.assert_close(plain.followed_by(factor, shift)(x), plain(x) * factor + shift)
        torch.testing.assert_close(plain.followed_by(None, shift)(x), plain(x) + shift)
        torch.testing.assert_close(plain.followed_by(factor, None)(x), plain(x) * factor)


INDEX = torch.tensor([[1, 1, -1], [29, 0, 6]])
MIX = tokens(5, 3, N)
SQUARE, CUBIC = Tokenwise(Activation(torch.square)), Tokenwise(Activation(lambda t: t**3 - t))
NODES: dict[str, tuple[Node, Callable[[Tensor], Tensor]]] = {
    "skip": (Skip(), lambda x: x),
    "attention": (Attend(a := hs.SelfAttention.random(D, heads=2, dtype=torch.float64)), a),
    "attention with sinks": (
        Attend(s := ComposedAttention(a, sinks=tokens(6, 1, 2)[0])),
        lambda x: s(x),
    ),
    "series": (Series(SQUARE, Series(CUBIC, Tokenwise(Affine(W)))), lambda x: (x**6 - x**2) @ W.T),
    "sum": (Parallel(Skip(), SQUARE, CUBIC), lambda x: x**2 + x**3),
    "side by side": (Beside(SQUARE, Skip(), CUBIC), lambda x: torch.cat([x**2, x, x**3 - x], -1)),
    "product": (Multiply(SQUARE, CUBIC), lambda x: x**2 * (x**3 - x)),
    "numbers moved": (
        Rearrange(INDEX),
        lambda x: torch.where(INDEX < 0, 0, x.flatten()[INDEX.clamp_min(0)]),
    ),
    "numbers moved and scaled": (
        Rearrange(INDEX, W[:2, :3], W[2:4, :3]),
        lambda x: torch.where(INDEX < 0, 0, x.flatten()[INDEX.clamp_min(0)]) * W[:2, :3] + W[2:4, :3],
    ),
    "tokens mixed": (MixTokens(MIX), lambda x: MIX @ x),
    "unread": (Unread("cumsum", lambda x: x.square().cumsum(-2)), lambda x: x.square().cumsum(-2)),
}


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("name", NODES)
def test_every_node_equals_autograd(name: str, batch: tuple[int, ...]) -> None:
    node, function = NODES[name]
    x = torch.stack([tokens(2), tokens(3)]) if batch else tokens()
    items = list(x) if batch else [x]
    value, J = node.linearize(x, 2**20)
    each = [function(item) for item in items]
    expected = torch.stack(each) if batch else each[0]
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(node(x), expected)
    matrices = [dense_jacobian(function, item) for item in items]
    exact = torch.stack(matrices) if batch else matrices[0]
    torch.testing.assert_close(J.dense(), exact, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(J.adjoint.dense(), exact.mT, rtol=1e-10, atol=1e-11)
    sizes = torch.as_tensor(J.size()).double()
    assert bool((sizes >= torch.linalg.matrix_norm(exact, 2) * (1 - 1e-10)).all())
    torch.testing.assert_close(node.jacobian_at(x, 2**20).dense(), exact, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in NODES if name != "unread"])
def test_the_value_alone_is_differentiable(name: str) -> None:
    node, function = NODES[name]
    x = tokens()
    torch.testing.assert_close(dense_jacobian(node, x), dense_jacobian(function, x), rtol=1e-10, atol=1e-11)


def test_a_walk_meets_every_node_in_order() -> None:
    inner = Series(SQUARE, Attend(a))
    both = Parallel(Skip(), inner)
    assert [type(node).__name__ for node in Series(both, CUBIC).walk()] == [
        *("Series", "Parallel", "Skip", "Series", "Tokenwise", "Attend", "Tokenwise"),
    ]
    assert both.attentions == 1


def test_unread_operations_say_where_they_are() -> None:
    assert str(Unread("sort", torch.sort)) == "sort"
    assert str(Unread("sort", torch.sort, "layers.0.mlp")) == "sort in layers.0.mlp"


@pytest.mark.parametrize("memory", [2**29, 0])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_a_layer_equals_autograd(mask: str | None, memory: int) -> None:
    closed, function = block(mask=mask)
    x = tokens()
    torch.testing.assert_close(closed(x), function(x))
    J = hs.jacobian(closed, x, memory=memory)
    assert isinstance(J, ComposedJacobian)
    assert J.method == ("closed form" if memory else "closed form, streamed")
    torch.testing.assert_close(J.dense(), dense_jacobian(function, x), rtol=1e-9, atol=1e-11)


def test_a_batch_is_one_map_per_item() -> None:
    closed, function = block()
    x = torch.stack([tokens(3), tokens(4)])
    J = hs.jacobian(closed, x)
    assert J.batch_shape == (2,)
    expected = torch.stack([dense_jacobian(function, item) for item in x])
    torch.testing.assert_close(J.dense(), expected, rtol=1e-9, atol=1e-11)
    m = hs.measure(closed, x, dense_limit=1)
    torch.testing.assert_close(m.value, torch.linalg.matrix_norm(expected, 2), rtol=1e-3, atol=0)


KINDS: dict[str, Callable[[], hs.SelfAttention]] = {
    "softmax": lambda: hs.SelfAttention.random(D, heads=2, dtype=torch.float64),
    "causal": lambda: hs.SelfAttention.random(D, heads=2, mask="causal", dtype=torch.float64),
    "grouped": lambda: hs.SelfAttention.random(D, heads=2, kv_heads=1, dtype=torch.float64),
    "softcap": lambda: hs.SelfAttention.random(D, heads=2, softcap=2.0, dtype=torch.float64),
    "cosine": lambda: hs.CosineAttention.random(D, heads=2, dtype=torch.float64),
    "sigmoid": lambda: hs.SigmoidAttention.random(D, heads=2, dtype=torch.float64),
}


@pytest.mark.parametrize("memory", [2**29, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rounded_operator_is_the_same_up_to_rounding(kind: str, memory: int) -> None:
    attention = KINDS[kind]()
    J = attention_jacobian(attention, tokens(), memory=memory)
    rounded = J.rounded(torch.float32)
    assert rounded.dtype == torch.float32
    assert rounded.method == J.method
    difference = torch.linalg.matrix_norm(rounded.dense().double() - J.dense(), 2)
    assert 0 < difference <= 16 * torch.finfo(torch.float32).eps * torch.linalg.matrix_norm(J.dense(), 2)


def test_weights_in_their_own_dtype_are_not_copied() -> None:
    weight = torch.randn(5, D)
    _, operator = Tokenwise(Affine(weight)).linearize(tokens(), 0)
    [link] = operator.rounded(torch.float32).chain.links  # type: ignore[attr-defined]
    assert link.weight is weight


def test_attention_maps_share_the_memory() -> None:
    closed = Series(block()[0], block(1)[0])
    assert closed.attentions == 2
    x = tokens(n=40)
    one = 2 * 40 * 40 * 8  # weights of the two heads of one of the blocks
    assert hs.jacobian(closed, x, memory=2 * one).method == "closed form"
    assert hs.jacobian(closed, x, memory=one).method == "closed form, streamed"


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_mode_of_the_caller_does_not_matter(mode: Callable[[], AbstractContextManager[None]]) -> None:
    closed, function = block()
    x = tokens()
    expected = dense_jacobian(function, x)
    with mode():
        torch.testing.assert_close(hs.jacobian(closed, tokens()).dense(), expected, rtol=1e-9, atol=1e-11)


def test_tokens_of_the_wrong_kind_are_refused() -> None:
    closed, _ = block()
    with pytest.raises(InvalidInput, match="add the missing axes"):
        hs.jacobian(closed, torch.zeros(D))
    with pytest.raises(InvalidInput, match="NaN or infinite"):
        hs.jacobian(closed, torch.full((N, D), float("nan")))
