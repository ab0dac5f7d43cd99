"""Modules as what certificates are about: exact copies in float64, attention maps, networks, folded transformers.

What is read of a module is compared with the module itself (`howsmooth.network.reader`), in float64, at the input and
near it. The module, its mode, its buffers and torch's random state are not changed.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from howsmooth._util.common import first_line, first_tensor, random_stream
from howsmooth.attention import AttentionMap
from howsmooth.attention.conversion import check_map_unchanged, check_unchanged
from howsmooth.certificates.classifier.patch_transformer import MAPS, AffineLayer, PatchTransformer
from howsmooth.certificates.classifier.robust_radius import Classifier
from howsmooth.errors import HowsmoothError, InvalidInput, NotDifferentiable, UnsupportedModel
from howsmooth.models.network_source import as_function, open_network
from howsmooth.network.activations import activation
from howsmooth.network.nodes import Attend
from howsmooth.network.reader import Network, gradients, read_function

M = TypeVar("M", bound=nn.Module)
_VALUE_TOLERANCE, _SLOPE_TOLERANCE = 1e-9, 1e-6
"""Largest difference that counts as rounding, relative to outputs plus derivative times input, and to derivatives."""
_FUSED = {1: "relu", 2: "gelu"}
"""The activation that torch's encoder layers run when gradients are off, by their own number for it."""
_NOTHING = 1e-12
"""Outputs of a network below this may be rounding alone."""
_NEAR, _FAR = 1e-3, 10.0
"""Minimum and maximum distance of the second point, in norms of the input plus one."""


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore torch's random state when the block ends, and switch autocast off inside it.

    Weights may be drawn while they are read. Reading and comparison share one block, so that they draw different
    numbers.
    """
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        yield


def double_copy(module: M, attached: bool = False) -> M:
    """A copy of a module in float64, in its own mode, for which a certificate holds.

    Stored numbers are exact; numbers computed from them, weights included, are not rounded to the module's dtype. The
    epsilon that `torch.nn.RMSNorm` takes from the dtype stays.

    Args:
        attached: whether a copy of a module in float64 shares its weights, so that autograd leads to them.
    """
    stored = [value for inner in module.modules() for value in (*inner._buffers.values(), *vars(inner).values())]
    computed = [value for value in stored if isinstance(value, Tensor) and not value.is_leaf]
    shared = [*module.parameters(), *computed] if attached else []
    try:
        memory = {id(one): one.detach().clone() for one in computed} | {id(one): one for one in shared}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of torch, when it copies an exported program
            double = copy.deepcopy(module, memory)
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


def rms_eps(dtype: torch.dtype) -> float:
    """The default epsilon of a `torch.nn.RMSNorm`: that of the dtype it computes in, or of float32 if that is smaller.

    >>> rms_eps(torch.float16) == torch.finfo(torch.float32).eps
    True
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


@preserved_random_state()
def read_classifier(model: Any, x: Tensor, check: bool = True, attached: bool = False) -> Network:
    """A classifier in float64 as nodes, from its tokens or pixels to one token of logits.

    Args:
        model: a module, a model of transformers, or a text that names one (`howsmooth.models.network_source`).
        x: its input. check: whether the nodes are compared with it.
        attached: whether the nodes hold its own weights, and the network x, as autograd follows them.
    """
    opened = open_network(model) if isinstance(model, str) else getattr(model, "_orig_mod", model)
    if not isinstance(opened, nn.Module):
        raise UnsupportedModel(f"a class is certified of a module, not of a {type(opened).__name__}.")
    check_modes(opened)
    double = double_copy(opened, attached)
    function, start, root = as_function(double, x.double() if x.is_floating_point() else x)
    if not attached:
        _check_runs(function, start)
    read = partial(read_function, function, start, root=root, name=type(opened).__name__)
    try:
        network = read(check=check)
    except NotDifferentiable:  # of an operation that is not known, which is what to say
        network = read(check=False)
        network.check_complete("a certificate")
        raise
    network = replace(network, x=start.reshape(network.x.shape)) if attached else network
    network.check_complete("a certificate")
    rows, classes = network.root(network.x).shape
    if rows != 1 or classes < 2:
        raise UnsupportedModel(
            f"a class is certified of a network that gives logits, but this {network.name} gives {rows} tokens of "
            f"{classes} numbers: put a classifier behind it."
        )
    return network


def check_modes(module: nn.Module) -> None:
    """Refuse modules that compute other things in other calls, whatever this one shows.

    Spectral norms in training mode turn the vector by which they divide, and encoder layers whose activation was
    replaced still run the one they were made with on torch's fast path: in batches, without gradients.
    """
    for name, inner in module.named_modules():
        hooked = any(isinstance(hook, SpectralNorm) for hook in inner._forward_pre_hooks.values())
        if inner.training and (isinstance(inner, parametrizations._SpectralNorm) or hooked):
            raise InvalidInput(f"{name}, a spectral norm in training mode, changes at every call: call .eval() first.")
        if isinstance(inner, nn.TransformerEncoderLayer) and inner.activation_relu_or_gelu in _FUSED:
            _check_fused(inner, name)


def _check_fused(layer: nn.TransformerEncoderLayer, name: str) -> None:
    fused, own = _FUSED[layer.activation_relu_or_gelu], ""
    with suppress(InvalidInput):
        own = activation(layer.activation).name
    if own != fused:
        raise UnsupportedModel(
            f"{name}: its activation was replaced by {own or 'another'}, but without gradients torch still runs "
            f"{fused}: pass the activation when the layer is made."
        )


def _check_runs(function: Callable[[Tensor], Any], x: Tensor) -> None:
    """Refuse a module that does not run at its input in float64."""
    try:
        with torch.no_grad():
            function(x.clone())
    except HowsmoothError:
        raise
    except Exception as error:  # whatever the module stumbles over
        raise UnsupportedModel(f"this network does not run on this input in float64 ({first_line(error)}).") from error


@preserved_random_state()
@torch.no_grad()
def read_map(f: object, x: Tensor) -> AttentionMap | None:
    """The attention map that a module computes; None for a module that computes more than attention.

    A module may also know its own map (``attention_map``); it answers for its formula.
    """
    if isinstance(f, AttentionMap):
        check_map_unchanged(f, "f")
        return f
    if not isinstance(f, nn.Module):
        return None
    check_modes(f)
    double = double_copy(getattr(f, "_orig_mod", f))
    call = (lambda y: double(y, y, y, need_weights=False)) if isinstance(f, nn.MultiheadAttention) else double
    tokens = x.double()
    if isinstance(f, nn.MultiheadAttention) or getattr(f, "batch_first", True):
        network = _read_either(call, tokens, double)
    else:
        _check_runs(call, tokens[:, None])
        network = read_function(call, tokens[:, None], root=double)
    root = network.root
    return root.attention if isinstance(root, Attend) and isinstance(root.attention, AttentionMap) else None


def _read_either(call: Callable[[Tensor], Any], x: Tensor, root: nn.Module) -> Network:
    """The layer at tokens ``(n, d)``, or at a batch of one where it takes batches only."""
    try:
        return read_function(call, x, root=root)
    except HowsmoothError:
        raise
    except Exception:  # blocks of models unpack a batch in ways of their own
        _check_runs(call, x[None])
        return read_function(call, x[None], root=root)


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
    for point in (image.double(), near_point(image.double(), 0.0)):
        limit = 2 * folded.noise(double.patches(point), 0.0)
        _check_near(double, lambda z: folded(double.patches(z)), point, limit, lambda: _other("the network"))
    return folded


def agrees_within(network: Network, point: Tensor, limit: float) -> bool:
    """Whether nodes and network differ by rounding alone at a point, values by at most a limit."""
    own, read = (lambda z: network.function(z)), (lambda z: network.root(z))
    with torch.no_grad():
        still = torch.equal(_called(own, point), _called(own, point))
    try:
        _check_near(own, read, point, limit, lambda: "")
    except UnsupportedModel:
        return False
    return still


def _other(name: str) -> str:
    return f"{name} computes something else than was read of it, so that it has no certificate."


def near_point(x: Tensor, reach: float) -> Tensor:
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
    with torch.no_grad():
        value = _called(f, x)
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        (slope,) = gradients(lambda z: _called(f, z), x, _drawn(value, "slopes"), [x])
    return value, slope


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


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return one.shape == other.shape and bool(((one - other).abs() <= tolerance).all())
