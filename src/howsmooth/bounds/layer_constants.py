r"""Lipschitz constants of the layers around attention: linear maps, activations, MLPs, normalisations.

All of them act on every token by itself, so their constant on n tokens in the Frobenius norm is their constant on one.

>>> import torch
>>> round(layer_norm(torch.ones(8), eps=1e-5), 1)  # everywhere
316.2
>>> round(layer_norm(torch.ones(8), eps=1e-5, variance=0.25), 5)  # where every token has at least that variance
1.99996
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from howsmooth._util.validation import check_positive
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.norms.small_matrices import spectral


@dataclass(frozen=True)
class KnownActivation:
    """An element-wise function with its Lipschitz constant, the supremum of |act'|.

    Attributes:
        function: the activation itself.
        lipschitz: the constant, rounded up in the last digit where it has no closed form.
        reached: where |act'| comes to it.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    lipschitz: float
    reached: str

    @property
    def at_zero(self) -> float:
        """|act(0)|; |act(t)| is at most this plus lipschitz·|t|."""
        return float(self.function(torch.zeros((), dtype=torch.float64)).abs())


_SWISH = 1.099839320129  # ½ + x/4 at the root x = 2.399357… of x·tanh(x/2) = 2; the same for x·σ(βx), whatever β
_GELU = (1 + math.erf(1)) / 2 + math.exp(-1) / math.sqrt(math.pi)  # Φ(√2) + √2 φ(√2), as act'' = φ(t)(2 − t²)
_SELU = 1.0507009873554805 * 1.6732632423543772

ACTIVATIONS: dict[str, KnownActivation] = {
    entry.name: entry
    for entry in (
        KnownActivation("identity", lambda t: t, 1.0, "everywhere"),
        KnownActivation("relu", functional.relu, 1.0, "t > 0"),
        KnownActivation("relu6", functional.relu6, 1.0, "0 < t < 6"),
        KnownActivation("leaky_relu", functional.leaky_relu, 1.0, "t > 0 (negative slope 0.01)"),
        KnownActivation("elu", functional.elu, 1.0, "t > 0 (α = 1)"),
        KnownActivation("selu", functional.selu, _SELU, "t → 0 from below: λα"),
        KnownActivation("softplus", functional.softplus, 1.0, "t → ∞"),
        KnownActivation("tanh", torch.tanh, 1.0, "t = 0"),
        KnownActivation("sigmoid", torch.sigmoid, 0.25, "t = 0"),
        KnownActivation("softsign", functional.softsign, 1.0, "t = 0"),
        KnownActivation("hardswish", functional.hardswish, 1.5, "t → 3 from below"),
        KnownActivation("gelu", functional.gelu, _GELU, "t = √2, 1.12890…"),
        KnownActivation("gelu_tanh", torch.nn.GELU("tanh"), 1.128993068659, "t = 1.41850…, numerically"),
        KnownActivation("silu", functional.silu, _SWISH, "t = 2.39936…"),
        KnownActivation("quick_gelu", lambda t: t * torch.sigmoid(1.702 * t), _SWISH, "t = 2.39936…/1.702"),
        KnownActivation("mish", functional.mish, 1.088498161252, "t = 1.49057…, numerically"),
    )
}
"""Activations by name, each with its constant; tests find every one again by a search over t."""

_PROBE = torch.linspace(-30, 30, 961, dtype=torch.float64)


def activation(which: str | KnownActivation | Callable[[Tensor], Tensor]) -> KnownActivation:
    """The entry of `ACTIVATIONS` of that name, or that computes the same as the given function or module.

    >>> activation(torch.nn.GELU(approximate="tanh")).name
    'gelu_tanh'
    >>> activation("gelu").lipschitz
    1.12890...
    """
    if isinstance(which, KnownActivation):
        return which
    if isinstance(which, str):
        if which not in ACTIVATIONS:
            raise InvalidInput(f"there is no activation {which!r}: choose from {', '.join(ACTIVATIONS)}.")
        return ACTIVATIONS[which]
    with torch.no_grad(), suppress(RuntimeError):  # what cannot take a vector of doubles is none of these
        answers = which(_PROBE.clone())
        for entry in ACTIVATIONS.values():
            if answers.shape == _PROBE.shape and torch.allclose(answers, entry.function(_PROBE), rtol=1e-7, atol=1e-7):
                return entry
    raise InvalidInput(
        f"the activation {getattr(which, '__name__', type(which).__name__)} computes none of {', '.join(ACTIVATIONS)}: "
        "give an KnownActivation with its Lipschitz constant."
    )


def linear_constant(weight: Tensor) -> float:
    r"""x ↦ Wx + b: :math:`\|W\|_2`, reached in the direction of the top singular vector.

    >>> linear_constant(torch.diag(torch.tensor([3.0, -4.0])))
    4.0
    """
    return float(spectral(weight.detach().double()))


def mlp(weights: Sequence[Tensor], act: str | KnownActivation | Callable[[Tensor], Tensor]) -> float:
    r"""x ↦ W_k act(W_{k−1} … act(W_1 x)): :math:`\mathrm{Lip}(\mathrm{act})^{k-1}\prod_i\|W_i\|_2`, biases or not.

    By the chain rule the Jacobian is :math:`W_k D_{k-1} W_{k-1} \cdots D_1 W_1` with diagonal :math:`\|D_i\| \le
    \mathrm{Lip}(\mathrm{act})`.

    Args:
        weights: as in `torch.nn.Linear`, ``(out_features, in_features)``, first layer first.
        act: between the layers.

    >>> mlp([2 * torch.eye(3), 5 * torch.eye(3)], "relu")
    10.0
    """
    if not weights:
        raise InvalidInput("an MLP has at least one weight matrix.")
    return activation(act).lipschitz ** (len(weights) - 1) * math.prod(linear_constant(weight) for weight in weights)


def gated_mlp(
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    act: str | KnownActivation | Callable[[Tensor], Tensor],
    radius: float | None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> float:
    r"""x ↦ W_d [act(W_g x + b_g) ∘ (W_u x + b_u)] (SwiGLU, GeGLU) on tokens with |x| ≤ R.

    With :math:`L = \mathrm{Lip}(\mathrm{act})` and, row by row, :math:`u_i = |w_{u,i}|R + |b_{u,i}|` and
    :math:`g_i = |\mathrm{act}(0)| + L(|w_{g,i}|R + |b_{g,i}|)`:

    .. math:: \|W_d\|\,\bigl(L\,\|\mathrm{diag}(u)\,W_g\| + \|\mathrm{diag}(g)\,W_u\|\bigr).

    Proof: the Jacobian is W_d [diag(act'(·) ∘ (W_u x + b_u)) W_g + diag(act(·)) W_u]; on the ball the diagonals are
    entry-wise at most L·u and g, and :math:`\|DW\|^2 = \|W^\top D^2 W\|` grows with every :math:`|D_{ii}|`. ∎

    A product of two functions of x is not globally Lipschitz: the Jacobian grows like R, so that without a radius there
    is no bound.

    >>> one = torch.ones(1, 1)
    >>> gated_mlp(one, one, one, "identity", radius=3.0)  # x ↦ x²
    6.0
    """
    if radius is None:
        raise DoesNotApply("a gated MLP is not Lipschitz on all inputs: give the radius of the ball tokens lie in.")
    check_positive(radius, "a radius")
    entry = activation(act)
    gate, up = gate.detach().double(), up.detach().double()
    largest_up = up.norm(dim=1) * radius + _size(up_bias)
    largest_gate = entry.at_zero + entry.lipschitz * (gate.norm(dim=1) * radius + _size(gate_bias))
    inner = entry.lipschitz * linear_constant(largest_up[:, None] * gate) + linear_constant(largest_gate[:, None] * up)
    return linear_constant(down) * inner


def layer_norm(gain: Tensor, eps: float, variance: float | None = None) -> float:
    r"""x ↦ γ ∘ (x − mean)/√(var + ε) + β on tokens of variance at least v: :math:`\|\Gamma\Pi\|/\sqrt{v+\varepsilon}`.

    Γ = diag(γ), Π the projection on centred vectors; :math:`\|\Gamma\Pi\| \le \max|\gamma|`. Without a variance, v = 0.

    Proof: with z = Πx and var = |z|²/d the Jacobian is :math:`(\mathrm{var}+\varepsilon)^{-1/2}\,\Gamma\Pi M`,
    :math:`M = I - zz^\top/(d(\mathrm{var}+\varepsilon))`, and M has eigenvalues 1 and ε/(var + ε). ∎
    Tight: constant tokens (z = 0, M = I) reach it for v = 0, and for d ≥ 3 any z ⟂ the top right singular vector of ΓΠ
    with var = v does.
    """
    gain = gain.detach().double()
    centring = torch.eye(len(gain), dtype=torch.float64) - 1.0 / len(gain)
    return linear_constant(gain[:, None] * centring) * _steepest(eps, variance, "variance")


def rms_norm_constant(gain: Tensor, eps: float, mean_square: float | None = None) -> float:
    r"""x ↦ γ ∘ x/√(|x|²/d + ε) on tokens of mean square at least v: :math:`\max|\gamma|/\sqrt{v+\varepsilon}`.

    The proof of `layer_norm` with Π = I; tight at x = 0, and for d ≥ 2 at x ⟂ e_i, |γ_i| the largest.

    >>> rms_norm_constant(torch.tensor([1.0, -2.0]), eps=0.0, mean_square=4.0)
    1.0
    """
    return float(gain.detach().double().abs().max()) * _steepest(eps, mean_square, "mean square")


def normalisation(norm: nn.Module, floor: float | None = None) -> float:
    """`layer_norm` or `rms_norm_constant` of a torch module, on tokens of variance (mean square) at least ``floor``.

    >>> round(normalisation(nn.LayerNorm(4, eps=1e-6)))
    1000
    """
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or len(norm.normalized_shape) != 1:
        raise InvalidInput(f"{type(norm).__name__} is not a LayerNorm or RMSNorm of single tokens.")
    gain = torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight
    if isinstance(norm, nn.RMSNorm):
        return rms_norm_constant(gain, torch.finfo(gain.dtype).eps if norm.eps is None else norm.eps, floor)
    return layer_norm(gain, norm.eps, floor)


def _steepest(eps: float, floor: float | None, what: str) -> float:
    floor = 0.0 if floor is None else floor
    if not (math.isfinite(eps) and eps >= 0 and math.isfinite(floor) and floor >= 0):
        raise InvalidInput(f"eps and the {what} must be finite and not negative, got {eps} and {floor}.")
    if eps + floor == 0:
        raise DoesNotApply(f"normalisation with eps = 0 is not Lipschitz: give the smallest {what} of a token.")
    return 1 / math.sqrt(eps + floor)


def _size(bias: Tensor | None) -> Tensor | float:
    return 0.0 if bias is None else bias.detach().double().abs()
