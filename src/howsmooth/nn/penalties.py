r"""Penalties on smoothness: terms of a loss, differentiable in the weights.

**Jacobian norm.** With unit vectors u, v close to the top singular vectors, :math:`\sigma \approx \langle u,
Jv\rangle`, and :math:`d\sigma = \langle u, (dJ)v\rangle` when they are exact: the vectors may be held fixed. One step
of the power method per call updates them, as weights change slowly. The value never exceeds σ.

**Softmax Jacobian.** :math:`\|\mathrm{diag}\,p - pp^\top\| \le g(p) = p_1(1-p_1+p_2)` (Yudin et al. 2025) is small for
flat weights and for weights on a single token; the mean of g over all rows of P is the penalty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import evaluating, random_stream
from howsmooth._util.validation import check_count, validated
from howsmooth.bounds.softmax_jacobian import softmax_jacobian_norm
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.nn.hosting.call_recorder import CallRecorder, RecordedCall
from howsmooth.nn.layers.attention_layer import AttentionLayer, precise
from howsmooth.nn.layers.dot_product_layers import SigmoidAttention


class _Penalty(ABC):
    """The mean over layers of a number that depends on the last call of each layer."""

    @validated
    def __init__(self, model: nn.Module, layers: Iterable[str] | None = None):
        self._recorder = CallRecorder(model, layers)
        for name, module in self._recorder.modules.items():
            self._check(name, module)

    def _check(self, name: str, module: nn.Module) -> None:
        """Refuse a module for which the penalty is undefined."""
        return

    @abstractmethod
    def _value(self, name: str, call: RecordedCall) -> Tensor:
        """Return the number of one layer."""

    def __call__(self) -> Tensor:
        """Return the penalty of the latest forward pass; add it to the loss.

        The error for tokens or weights of NaN or infinity names the layer.
        """
        calls = self._recorder.take()
        if not calls:
            raise InvalidInput("the penalty depends on a forward pass: run the model, with gradients, first.")
        values = []
        for name, call in calls.items():
            with evaluating(call.module):
                values.append(self._value(name, call))
            if not bool(values[-1].detach().isfinite()):
                raise InvalidInput(
                    f"the penalty of {name or 'the layer'} is {float(values[-1].detach())}, because its tokens or its "
                    "weights are NaN, infinite or too large: leave this step out, or train with a lower rate."
                )
        return torch.stack(values).mean()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._recorder.close()


class JacobianPenalty(_Penalty):
    """The mean of σ² (or σ) over layers and texts, at the latest tokens of each layer.

    Tokens count as constants: the gradient is that of the layers' own weights. A layer is the called module: a block of
    transformers includes all its parts besides attention (in BERT's family residual and LayerNorm).

    Args:
        model: the model in training.
        layers: dotted paths; by default every attention layer.
        power: 2 for σ², 1 for σ.
        steps: steps of the power method in each call.

    >>> layer = nn.Linear(3, 3, bias=False)
    >>> penalty = JacobianPenalty(nn.Sequential(layer), layers=["0"], steps=50)
    >>> _ = layer(torch.randn(4, 3))
    >>> bool(torch.isclose(penalty(), torch.linalg.matrix_norm(layer.weight, 2) ** 2, rtol=1e-3))
    True
    """

    @validated
    def __init__(self, model: nn.Module, layers: Iterable[str] | None = None, power: int = 2, steps: int = 1):
        self.power, self.steps = check_count(power, "power", most=2), check_count(steps, "steps")
        super().__init__(model, layers)
        self._vectors: dict[str, Tensor] = {}

    def _value(self, name: str, call: RecordedCall) -> Tensor:
        x = precise(call.tokens.detach())
        known = self._vectors.pop(name, None)
        squares, left = power_method_norm(call.output, x, known, self.steps, self.power)
        if bool(left.isfinite().all()):  # a vector of NaN would spoil all later steps
            self._vectors[name] = left
        return squares.mean()


def power_method_norm(
    f: Callable[[Tensor], Tensor], x: Tensor, left: Tensor | None = None, steps: int = 1, power: int = 1
) -> tuple[Tensor, Tensor]:
    """Return |Jᵀu|^power ≤ σ^power for every text of x after steps of the power method from ``left``, and the new u.

    The value is differentiable in all parameters of f, with u held fixed. J comes from reverse mode alone: Jᵀu is
    linear in u, so that Jv is its derivative in u along v.

    >>> matrix = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64)).requires_grad_()
    >>> value, _ = power_method_norm(lambda x: x @ matrix, torch.ones(1, 2, dtype=torch.float64), steps=40)
    >>> value.detach(), torch.autograd.grad(value, matrix)[0].round(decimals=6)
    (tensor(3., dtype=torch.float64), tensor([[0., 0.],
            [0., 1.]], dtype=torch.float64))
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = f(x)
        if not y.requires_grad:
            raise NotDifferentiable("the layer's output does not depend on its tokens, so that there is no Jacobian.")
        dims = tuple(range(1 if x.dim() == 3 else 0, y.dim()))
        if left is None or left.shape != y.shape:
            left = torch.randn(y.shape, generator=random_stream(0, "penalty")).to(y)
        left = _unit(left.to(y), dims)
        for _ in range(steps):
            left = left.detach().requires_grad_()
            (pulled,) = torch.autograd.grad(y, x, left, create_graph=True)
            (pushed,) = torch.autograd.grad(pulled, left, _unit(pulled.detach(), dims), retain_graph=True)
            # Where J vanishes, all directions are equal.
            left = torch.where(pushed.any(), _unit(pushed, dims), left.detach())
        left = left.detach()
        (pulled,) = torch.autograd.grad(y, x, left, create_graph=True)
        other = pulled if power == 2 else _unit(pulled.detach(), dims)
        return (pulled * other).sum(dims), left


def _unit(v: Tensor, dims: tuple[int, ...]) -> Tensor:
    length = torch.linalg.vector_norm(v, dim=dims, keepdim=True)
    return v / length.clamp(min=torch.finfo(v.dtype).tiny)


class SoftmaxJacobianPenalty(_Penalty):
    """The mean over layers of `softmax_jacobian_penalty` at the latest tokens of each layer.

    For layers that can return their weights: those of `howsmooth.nn` (except sigmoid attention, which has no softmax)
    and `torch.nn.MultiheadAttention`. Give the weights of a transformers model, ``output_attentions=True`` with eager
    attention, to `softmax_jacobian_penalty` itself.

    >>> from howsmooth.nn import L2Attention
    >>> layer = L2Attention(8, num_heads=2)
    >>> penalty = SoftmaxJacobianPenalty(layer)
    >>> _ = layer(torch.randn(2, 5, 8))
    >>> bool(0 < penalty() < 0.5)
    True
    """

    def _check(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, AttentionLayer | nn.MultiheadAttention) or isinstance(module, SigmoidAttention):
            raise InvalidInput(
                f"{name or 'the model'} is a {type(module).__name__}, which returns no softmax weights: give "
                "attention weights to softmax_jacobian_penalty, or name other layers."
            )

    def _value(self, name: str, call: RecordedCall) -> Tensor:
        changed: dict[str, Any] = {"need_weights": True, "average_attn_weights": False}
        return softmax_jacobian_penalty(call.repeat(call.tokens, **changed)[1])


@validated
def softmax_jacobian_penalty(weights: Tensor | Iterable[Tensor]) -> Tensor:
    """Return the mean of g(p) = p₁(1 − p₁ + p₂) over rows p of attention weights, from 0 to ½.

    Rows of zeros do not count.

    Args:
        weights: ``(…, n, m)``, or several such, whose means are averaged.

    >>> softmax_jacobian_penalty(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor(0.2500)
    """
    if not isinstance(weights, Tensor):
        means = [softmax_jacobian_penalty(each) for each in weights]
        if not means:
            raise InvalidInput(
                "there are no attention weights: call the model with output_attentions=True and eager attention."
            )
        return torch.stack(means).mean()
    if weights.dim() < 1 or not weights.is_floating_point() or weights.shape[-1] == 0:
        raise InvalidInput(f"attention weights have shape (…, n, m), got {weights.dtype} {tuple(weights.shape)}.")
    weights = precise(weights)
    if not bool(weights.detach().isfinite().all()):
        raise InvalidInput(
            "attention weights hold NaN or infinity, as torch gives them for tokens that see nothing: leave those rows "
            "out."
        )
    seeing = weights.detach().sum(-1) > 0
    return softmax_jacobian_norm(weights).sum() / seeing.sum().clamp(min=1)
