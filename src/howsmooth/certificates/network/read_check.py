"""A comparison of the parts read of a network with the network itself.

Both run in float64 at the input and at a random point about as far from it as the certificate reaches. Outputs must
agree at both points and derivatives of a random combination of outputs at the second, within rounding. The network,
its mode, its buffers and torch's random state are not changed; the comparison takes three calls and one backward pass.

Tolerances: docs/theory/certificates-network.md, section "Comparison with the network".
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_line, first_tensor, random_stream
from howsmooth.attention import AttentionMap, as_attention_map
from howsmooth.certificates.classifier.patch_transformer import MAPS, AffineLayer, PatchTransformer
from howsmooth.certificates.classifier.robust_radius import Classifier
from howsmooth.certificates.network.parts_ir import (
    ACTIVATIONS,
    ActivationPart,
    AttentionPart,
    LinearPart,
    NormalisationPart,
    Part,
    PoolPart,
    ResidualPart,
    SelfAttend,
    SequenceClassifier,
    check_attention_unchanged,
    check_unchanged,
    read_network,
    rms_eps,
)
from howsmooth.errors import HowsmoothError, UnsupportedModel

M = TypeVar("M", bound=nn.Module)
_VALUE_TOLERANCE, _SLOPE_TOLERANCE = 1e-9, 1e-6
"""Largest difference that counts as rounding, relative to outputs plus derivative times input, and to derivatives."""
_NOTHING = 1e-12
"""Outputs of a network below this may be rounding alone."""
_NEAR, _FAR = 1e-3, 10.0
"""Minimum and maximum distance of the second point, in norms of the input plus one."""


def evaluate_parts(parts: Sequence[Part], x: Tensor) -> Tensor:
    """The network of these parts at tokens ``(n, d)``.

    >>> evaluate_parts([ActivationPart("relu"), PoolPart("mean")], torch.tensor([[-1.0, 2.0], [1.0, 2.0]]))
    tensor([[0.5000, 2.0000]])
    """
    for part in parts:
        match part:
            case LinearPart(weight, bias):
                x = nn.functional.linear(x, weight, bias)
            case NormalisationPart(eps):
                x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
            case ActivationPart(activation):
                x = ACTIVATIONS[activation](x)
            case AttentionPart(attention):
                x = attention(x)
            case ResidualPart(branch):
                x = x + evaluate_parts(branch, x)
            case PoolPart(pool):
                x = x.mean(0, keepdim=True) if pool == "mean" else x[:1]
    return x


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore torch's random state when the block ends, and switch autocast off inside it.

    Weights may be drawn while they are read. Reading and comparison share one block, so that they draw different
    numbers.
    """
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        yield


def double_copy(module: M) -> M:
    """A copy of a module in float64, in its own mode, for which a certificate holds.

    Stored numbers are exact; numbers computed from them, weights included, are not rounded to the module's dtype. The
    epsilon that `torch.nn.RMSNorm` takes from the dtype stays.
    """
    stored = (value for inner in module.modules() for value in (*inner._buffers.values(), *vars(inner).values()))
    computed = {
        id(value): value.detach().clone() for value in stored if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        double = copy.deepcopy(module, computed)
    except Exception as error:  # whatever a hook or an attribute holds
        raise UnsupportedModel(
            f"this {type(module).__name__} cannot be copied, as a certificate in float64 needs it "
            f"({first_line(error)})."
        ) from error
    dtype = next((p.dtype for p in double.parameters() if p.is_floating_point()), torch.float64)
    for inner in double.modules():
        if isinstance(inner, nn.RMSNorm) and inner.eps is None:
            inner.eps = rms_eps(dtype if inner.weight is None else inner.weight.dtype)
    return double.double()


@preserved_random_state()
@torch.no_grad()
def check_network(
    double: SequenceClassifier, x: Tensor, parts: Sequence[Part], logits: Tensor, rounding: Tensor, reach: float
) -> None:
    """Refuse a network whose parts compute another function than the network itself.

    Args:
        double: the network `double_copy`. x: tokens ``(n, d)`` or their numbers ``(n,)``. logits: of the parts at x.
        rounding: bounds on their rounding errors. reach: radius of the certificate.
    """
    vectors = double.embed(x)
    there = _near(vectors, reach)

    def read(z: Tensor) -> Tensor:
        return evaluate_parts(parts, double.placed(z))[0]

    limit = 2 * float(rounding.detach().amax())
    allowed = _check_near(double, read, there, limit, lambda: _difference(double, there))
    for point in (x, vectors):  # by its numbers and by its vectors: does it give the same twice?
        if not _alike(_called(double, point), logits.detach(), allowed):
            raise UnsupportedModel(_difference(double, vectors))


@preserved_random_state()
@torch.no_grad()
def read_map(f: nn.Module, x: Tensor, reach: float = 0.0) -> AttentionMap:
    """The attention map of a layer or map, refused when it computes another function."""
    check_attention_unchanged(f, "f")
    if isinstance(f, AttentionMap):
        return f
    double = double_copy(f)
    attention = as_attention_map(double, len(x))
    assert attention is not None
    own, read = partial(_of_one_sequence, double), partial(AttentionMap.forward, attention)
    for point in (x.double(), _near(x.double(), reach)):
        _check_near(own, read, point, math.inf, lambda: _other(type(f).__name__))
    return attention


@preserved_random_state()
@torch.no_grad()
def read_folded(network: PatchTransformer, image: Tensor) -> Classifier:
    """The folded form of a vision transformer, refused when the network computes another function at an image."""
    check_unchanged(network, PatchTransformer, "the network")
    for name in MAPS:
        inner = getattr(network, name)
        if not isinstance(inner, AffineLayer):
            raise UnsupportedModel(f"{name}, a {type(inner).__name__}, has no certificate.")
        check_unchanged(inner, AffineLayer, name)
    double, folded = double_copy(network), network.folded()
    for point in (image.double(), _near(image.double(), 0.0)):
        limit = 2 * folded.noise(double.patches(point), 0.0)
        _check_near(double, lambda z: folded(double.patches(z)), point, limit, lambda: _other("the network"))
    return folded


def _other(name: str) -> str:
    return f"{name} computes something else than was read of it, so that it has no certificate."


def _near(x: Tensor, reach: float) -> Tensor:
    """A random point about as far from x as a certificate reaches."""
    move = _drawn(x, "agreement")
    size = 1 + float(x.norm())
    return x + min(max(reach, _NEAR * size), _FAR * size) * move / move.norm()


def _drawn(like: Tensor, name: str) -> Tensor:
    return torch.randn(like.shape, generator=random_stream(0, name), dtype=torch.float64, device="cpu")


def _check_near(
    own: Callable[[Tensor], Tensor],
    read: Callable[[Tensor], Tensor],
    x: Tensor,
    limit: float,
    sentence: Callable[[], str],
) -> float:
    """Refuse a map whose value or derivative at x differs from that of its parts; return the tolerance."""
    (mine, my_slope), (value, slope) = (_with_slope(f, x) for f in (own, read))
    if not bool(value.isfinite().all()):
        raise UnsupportedModel(
            "outputs near this input are not finite, so that what was read cannot be compared with them: scale the "
            "input or the weights."
        )
    floor = min(limit, _NOTHING) if math.isfinite(limit) else 0.0
    allowed = min(limit, _VALUE_TOLERANCE * float(value.abs().amax() + slope.norm() * x.norm()) + floor)
    steepest = _SLOPE_TOLERANCE * float(slope.norm()) + allowed
    if not _alike(mine, value, allowed) or not _alike(my_slope, slope, steepest):
        raise UnsupportedModel(sentence())
    return allowed


def _with_slope(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """f at x and the gradient there of a random combination of its outputs."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        value = _called(f, x)
        total = (value * _drawn(value, "slopes")).sum()
        slope = torch.autograd.grad(total, x, allow_unused=True)[0] if value.requires_grad else None
    return value.detach(), torch.zeros_like(x) if slope is None else slope


def _called(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    try:
        return first_tensor(f(x.clone()))  # some modules work in place
    except HowsmoothError:
        raise
    except Exception as error:  # whatever the module stumbles over
        raise UnsupportedModel(
            f"what was read cannot be compared with the module itself, which does not run on this input in float64 "
            f"({first_line(error)})."
        ) from error


def _of_one_sequence(layer: nn.Module, x: Tensor) -> Tensor:
    """The output for tokens ``(n, d)`` of a layer, also of one that takes batches only."""
    attend = SelfAttend(layer)
    try:
        output = attend(x)
    except Exception:  # blocks of models unpack a batch in ways of their own
        return attend(x[None])[0]
    return output if output.dim() == x.dim() else attend(x[None])[0]


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return one.shape == other.shape and bool(((one - other).abs() <= tolerance).all())


def _difference(network: SequenceClassifier, vectors: Tensor) -> str:
    """A sentence that names the part with the largest relative difference from the network."""
    x, worst = network.placed(vectors), (0.0, "", "")
    layers = network.layers._modules if isinstance(network.layers, nn.Sequential) else {"": network.layers}
    for name, layer in (*((f"layers.{key}", layer) for key, layer in layers.items()), ("classes", network.classes)):
        if name == "classes":
            x = (x.mean(-2) if network.pool == "mean" else x[..., 0, :])[None]
        alone = SequenceClassifier([layer], nn.Identity(), pool="first")
        read = evaluate_parts(read_network(alone, len(x))[:-1], x)
        own = _called(layer, x)
        gap = float((own - read).norm() / own.norm().clamp_min(1e-300))
        worst, x = max(worst, (gap, name, type(layer).__name__)), own
    gap, name, kind = worst
    return _other(f"{name}, a {kind}," if gap > _VALUE_TOLERANCE else "the network")
