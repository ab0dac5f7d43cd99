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

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_positive
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.network.activations import KnownActivation, activation
from howsmooth.norms.small_matrices import spectral


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
