"""Layers under autocast, in half precision, and compiled."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from howsmooth import nn as layers
from howsmooth.nn.layers.attention_layer import AttentionLayer

D, H, N = 16, 2, 9
LAYER_KINDS = [
    layers.L2Attention,
    layers.ContractiveL2Attention,
    layers.DotProductAttention,
    layers.SigmoidAttention,
    layers.CosineAttention,
    layers.NormControlledAttention,
    layers.LipschitzNormAttention,
    layers.GradientStepAttention,
]
kinds = pytest.mark.parametrize("kind", LAYER_KINDS, ids=lambda kind: kind.__name__)
# Half a unit in the last place, times the products on the way.
halves = pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)], ids=str)


@pytest.fixture(autouse=True)
def _plain_kernels() -> Iterator[None]:
    """Without oneDNN, whose bfloat16 kernels need instructions that some processors only claim to have."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # the public switch warns about Intel GPUs
    yield
    torch._C._set_mkldnn_enabled(enabled)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach() - expected.detach()).double().norm() / expected.detach().double().norm())


@halves
@kinds
def test_autocast_stays_close_in_both_directions(kind: type[AttentionLayer], dtype: torch.dtype, error: float) -> None:
    layer, x = kind(D, H), torch.randn(2, N, D)
    weights = list(layer.parameters())
    expected = layer.eval()(x)[0]
    gradients = torch.autograd.grad(expected.square().sum(), weights)
    with torch.autocast("cpu", dtype=dtype):
        found = layer(x)[0]
    assert relative(found, expected) < error
    for part, whole in zip(torch.autograd.grad(found.float().square().sum(), weights), gradients, strict=True):
        assert part.dtype == torch.float32
        assert relative(part, whole) < 5 * error
    with torch.autocast("cpu", dtype=dtype):
        assert layer.train()(x)[0].isfinite().all()


@pytest.mark.parametrize("kind", LAYER_KINDS[:2], ids=lambda kind: kind.__name__)
def test_autocast_does_not_round_squared_distances(kind: type[AttentionLayer]) -> None:
    """Weights of keys far from the origin: in bfloat16 |k|² alone would be off by several units."""
    layer, x = kind(D, H).eval(), torch.randn(N, D)
    with torch.no_grad():
        layer.qk_proj.weight.copy_(torch.eye(D))
        expected = layer(x, need_weights=True)[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = layer(x.bfloat16().float(), need_weights=True)[1]
    assert float((found - expected).abs().max()) < 2e-2


@halves
@kinds
def test_layer_in_half_precision_stays_close(kind: type[AttentionLayer], dtype: torch.dtype, error: float) -> None:
    layer, x = kind(D, H).eval(), torch.randn(2, N, D)
    expected, bound = layer(x)[0], layer.lipschitz_bound(N, radius=2.0)
    layer.to(dtype)
    found = layer(x.to(dtype))[0]
    assert found.dtype == dtype
    assert relative(found, expected) < error
    assert float(layer.lipschitz_bound(N, radius=2.0)) == pytest.approx(float(bound), rel=5 * error)


def compare_compiled(layer: AttentionLayer, backend: str, **call: object) -> None:
    """Outputs and all gradients of the compiled layer against the plain one."""
    torch._dynamo.reset()
    x, compiled, found = torch.randn(2, N, D), torch.compile(layer, fullgraph=True, backend=backend), []
    for each in (compiled, layer):
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        tokens = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            out = each(tokens, **call)[0]
            found.append((out, *torch.autograd.grad(out.square().sum(), (tokens, *layer.parameters()))))
        layer.load_state_dict(before)  # the estimates of norms move in training
    for part, whole in zip(*found, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@kinds
def test_layer_is_captured_as_one_graph(kind: type[AttentionLayer]) -> None:
    call = {} if kind is layers.LipschitzNormAttention else {"is_causal": True}
    for training in (True, False):
        compare_compiled(kind(D, H).train(training), "aot_eager", **call)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_compiled_layer_equals_the_plain_one() -> None:
    compare_compiled(layers.ContractiveL2Attention(D, H), "inductor", is_causal=True)
