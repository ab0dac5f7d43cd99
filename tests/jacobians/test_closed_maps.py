"""Compositions in closed form against dense autograd in float64, and what they say of their rounding."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import howsmooth as hs
from howsmooth.attention.stages import TokenStage, UnitNorm
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import attention_jacobian, tiles
from howsmooth.jacobians.closed_maps import (
    ClosedAttention,
    ClosedMap,
    ComposedJacobian,
    Parallel,
    Series,
    Skip,
    Tokenwise,
    composed_jacobian,
)
from howsmooth.jacobians.tiles import Workspace
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation
from howsmooth.models.layer_wiring import norm_stage
from howsmooth.norms.lanczos import golub_kahan
from howsmooth.testing import dense_jacobian

N, D = 5, 6


def tokens(seed: int = 0, n: int = N, d: int = D) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    for parameter in module.double().requires_grad_(False).parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return module


W = tokens(1, 2 * D, D)
STAGES: dict[str, tuple[TokenStage, Callable[[Tensor], Tensor]]] = {
    "linear": (Affine(W, W[:, 0]), lambda x: x @ W.T + W[:, 0]),
    "scale": (Diagonal(W[0], W[1]), lambda x: x * W[0] + W[1]),
    "multiple": (Diagonal(0.3), lambda x: 0.3 * x),
    "rms": (UnitNorm.rms(D, 1e-3, W[0]), lambda x: W[0] * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()),
    "layer norm": (norm_stage(norm := randomised(nn.LayerNorm(D, eps=1e-3))), norm),
    "gate": (GatedActivation(F.silu), lambda x: F.silu(x[..., : D // 2]) * x[..., D // 2 :]),
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


def test_a_norm_with_a_gain_of_one_plus_its_weight_is_told_by_its_answers() -> None:
    class OnePlus(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.weight * (1 + self.weight)

    module = randomised(OnePlus(D, eps=1e-4))
    x = tokens()
    torch.testing.assert_close(norm_stage(module)(x), module(x))


def block(seed: int = 0, mask: str | None = "causal") -> tuple[ClosedMap, Callable[[Tensor], Tensor]]:
    """x + attention(norm x), then x + MLP(norm x)."""
    attention = hs.SelfAttention.random(D, heads=2, seed=seed, mask=mask, dtype=torch.float64)
    first, second = (randomised(nn.LayerNorm(D)) for _ in range(2))
    up, down = tokens(seed + 7, 9, D), tokens(seed + 8, D, 9)
    mlp = Tokenwise(Affine(up), Activation(F.gelu), Affine(down))
    closed = Series(
        Parallel(Skip(), Series(Tokenwise(norm_stage(first)), ClosedAttention(attention))),
        Parallel(Skip(), Series(Tokenwise(norm_stage(second)), mlp)),
    )

    def function(x: Tensor) -> Tensor:
        x = x + attention(first(x))
        return x + F.gelu(second(x) @ up.T) @ down.T

    return closed, function


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


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time, storage by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in given if isinstance(given, list | tuple) else (given,):
            if isinstance(tensor, Tensor):
                place = tensor.untyped_storage().data_ptr()
                self.holders[place] = self.holders.get(place, 0) + 1
                self.bytes[place] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor, self._drop, place)
        self.most = max(self.most, sum(self.bytes.values()))
        return given

    def _drop(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            del self.holders[place], self.bytes[place]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 2**29])
def test_memory_of_a_layer_grows_with_the_tokens_and_not_with_their_square(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building and products together; a negative control keeps the weights."""
    for name, size in {"TILE_ROWS": 64, "TILE_COLS": 64, "TILE_SIZE": 2**12, "BAND_SIZE": 2**12}.items():
        monkeypatch.setattr(tiles, name, size)
    closed, _ = block()
    most = []
    for n in (256, 1024):
        x = tokens(n=n).float()
        monkeypatch.setattr(Workspace, "_known", WeakValueDictionary())  # none left by operators still alive
        with LiveBytes() as live:
            J = hs.jacobian(closed, x, memory=memory)
            J.rmatvec(J.matvec(x))
        most.append(live.most)
    exponent = math.log(most[1] / most[0]) / math.log(4)
    assert exponent <= 1.1 if memory == 0 else exponent > 1.5


def test_a_batch_is_one_map_per_item() -> None:
    closed, function = block()
    x = torch.stack([tokens(3), tokens(4)])
    J = hs.jacobian(closed, x)
    assert J.batch_shape == (2,)
    expected = torch.stack([dense_jacobian(function, item) for item in x])
    torch.testing.assert_close(J.dense(), expected, rtol=1e-9, atol=1e-11)
    m = hs.measure(closed, x, dense_limit=1)
    torch.testing.assert_close(m.value, torch.linalg.matrix_norm(expected, 2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("depth", [1, 6])
def test_blur_in_single_precision_covers_the_whole_error(depth: int) -> None:
    maps = [block(seed)[0] for seed in range(depth)]
    closed = Series(*maps)
    x = tokens().float()
    J = composed_jacobian(closed, x)
    exact = composed_jacobian(closed, x.double()).dense()
    error = float(torch.linalg.matrix_norm(J.dense().double() - exact, 2) / torch.linalg.matrix_norm(exact, 2))
    assert error <= J.accuracy.point <= 5e-5
    m = hs.measure(closed, x, dense_limit=1)
    assert m.lower <= torch.linalg.matrix_norm(exact, 2) <= m.upper
    assert bool(m.converged)


def test_far_tokens_cost_no_digits_in_single_precision() -> None:
    """At 10⁶ ± 1 float32 would keep one digit of what a normalisation leaves of them: activations are in float64."""
    closed = Series(Tokenwise(norm_stage(randomised(nn.LayerNorm(D)))), block()[0])
    x = (1e6 + tokens()).float()
    J, exact = composed_jacobian(closed, x), composed_jacobian(closed, x.double()).dense()
    assert J.dtype == torch.float32
    assert float(
        torch.linalg.matrix_norm(J.dense().double() - exact, 2)
    ) <= J.accuracy.point * torch.linalg.matrix_norm(exact, 2)


def test_what_single_precision_cannot_resolve_is_computed_in_double() -> None:
    """10⁶ − (10⁶ − 1) = 1: every product loses six digits."""
    closed = Parallel(Tokenwise(Diagonal(1e6)), Tokenwise(Diagonal(1 - 1e6)))
    J = composed_jacobian(Series(closed, block()[0]), tokens().float())
    assert J.dtype == torch.float64
    assert J.accuracy.point < 5e-5


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_measurement_starts_with_the_product_that_building_has_made(dtype: torch.dtype) -> None:
    J = composed_jacobian(block()[0], tokens().to(dtype))
    assert J.cached_product is not None
    start, product = J.cached_product
    assert torch.equal(product, J.matvec(start))
    known, elsewhere = golub_kahan(J), golub_kahan(J, seed=1)
    J.cached_product = None
    anew = golub_kahan(J)
    assert known.products == anew.products - 1
    assert torch.equal(torch.stack([known.value, known.upper]), torch.stack([anew.value, anew.upper]))
    J.cached_product = (start, 2 * product)  # would be seen where it is used, and is not where it is not
    assert golub_kahan(J, max_steps=2).upper != golub_kahan(replaced(J), max_steps=2).upper
    assert torch.equal(golub_kahan(J, seed=1).upper, elsewhere.upper)


def replaced(J: ComposedJacobian) -> ComposedJacobian:
    return ComposedJacobian(J.parts, J.accuracy.point, J.output)


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


def test_half_precision_is_computed_in_single() -> None:
    assert composed_jacobian(block()[0], tokens().half()).dtype == torch.float32


def test_tokens_of_the_wrong_kind_are_refused() -> None:
    closed, _ = block()
    with pytest.raises(InvalidInput, match="add the missing axes"):
        hs.jacobian(closed, torch.zeros(D))
    with pytest.raises(InvalidInput, match="NaN or infinite"):
        hs.jacobian(closed, torch.full((N, D), float("nan")))
