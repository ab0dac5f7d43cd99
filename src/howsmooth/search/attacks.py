r"""ℓ2 attacks on a classifier: the smallest move found that changes a class, and the worst found inside a ball.

Both are upper bounds on every proved radius. *Minimal norm*: decoupled direction and norm [1]_; δ follows the unit
gradient of the margin m = logit of the label − largest other, its length shrinks by a factor where the class has
changed and grows where it has not. *Projected gradient*: unit steps down the margin in the ball, from random starts.

.. [1] J. Rony et al., *Decoupling direction and norm for efficient gradient-based L2 adversarial attacks and defenses*,
   CVPR 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.validation import Count, NotNegative, Seed, validated
from howsmooth.errors import InvalidInput
from howsmooth.models.network_source import as_function
from howsmooth.network.reader import tokens_shape
from howsmooth.network.trace import first_traced

Model = Callable[[Tensor], Tensor]
_TINY = 1e-12


@dataclass(frozen=True)
class Attack:
    """The result of an attack for every input.

    Attributes:
        distance: ℓ2 distance to the nearest point found with another class, ∞ where none was, ``(batch,)``.
        margin: the smallest margin met, ``(batch,)``. point: where it was met, or the nearest point found.
    """

    distance: Tensor
    margin: Tensor
    point: Tensor


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The logit of each label less the largest other, ``(batch,)``.

    >>> margins(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([1]))
    tensor([1.])
    """
    here = torch.nn.functional.one_hot(labels, logits.shape[-1]).bool()
    return logits[here] - logits.masked_fill(here, -torch.inf).amax(-1)


@validated
def minimal_norm_attack(model: Model, x: Tensor, labels: Tensor, steps: Count = 200, decay: float = 0.05) -> Attack:
    """The nearest point found at which the class is not the label, for a batch of inputs ``(batch, …)``.

    >>> line = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> attack = minimal_norm_attack(lambda x: x @ line.mT, torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
    >>> 0.5 <= float(attack.distance) < 0.51
    True
    """
    _check(x, labels)
    delta, point = torch.zeros_like(x), x.clone()
    length = torch.ones(len(x), dtype=x.dtype, device=x.device)
    distance = smallest = torch.full_like(length, torch.inf)
    for step in range(steps):
        margin, gradient = _slope(model, x + delta, labels)
        size = _lengths(delta)
        changed = margin <= 0
        nearer = changed & (size < distance)
        distance, point = torch.where(nearer, size, distance), torch.where(_like(nearer, x), x + delta, point)
        smallest = torch.minimum(smallest, margin)
        shrink = decay * (1 - step / steps) + 0.002
        length = torch.where(changed, torch.minimum(size, distance) * (1 - shrink), length * (1 + shrink))
        stride = length * (0.5 * (1 - step / steps) + 0.02)
        delta = delta - gradient * _like(stride, x)
        delta = delta * _like(length / _lengths(delta).clamp_min(_TINY), x)
    return Attack(distance, smallest, point)


@validated
def projected_attack(
    model: Model,
    x: Tensor,
    labels: Tensor,
    radius: NotNegative | Tensor,
    steps: Count = 40,
    starts: Count = 2,
    seed: Seed = 0,
) -> Attack:
    """The smallest margin found within ``radius`` of each input, one number or one for each."""
    _check(x, labels)
    generator = torch.Generator().manual_seed(seed)
    reach = torch.as_tensor(radius, dtype=x.dtype).expand(len(x))
    smallest, point = torch.full_like(reach, torch.inf), x.clone()
    for start in range(starts):
        delta = torch.zeros_like(x)
        if start:
            delta = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            delta = delta * _like(reach / _lengths(delta), x)
        for step in range(steps + 1):
            margin, gradient = _slope(model, x + delta, labels)
            lower = margin < smallest
            smallest, point = torch.where(lower, margin, smallest), torch.where(_like(lower, x), x + delta, point)
            delta = delta - gradient * _like(reach * (1.0 - step / (steps + 1)), x)
            delta = delta * _like((reach / _lengths(delta).clamp_min(_TINY)).clamp_max(1.0), x)
    return Attack(torch.where(smallest <= 0, _lengths(point - x), torch.inf), smallest, point)


@validated
def attack_network(model: Any, x: Tensor, label: int, tokens: Sequence[int] | None = None) -> float | None:
    """The distance of the nearest input found with another class: the farthest that one of its tokens has moved.

    Args:
        model: what `howsmooth.read_network` reads, as itself. x: its input, vectors, numbers of tokens or pixels.
        tokens: those that move, all when None.

    >>> net = torch.nn.Linear(2, 2, bias=False)
    >>> _ = net.weight.data.copy_(torch.eye(2))
    >>> distance = attack_network(net, torch.tensor([[1.0, 0.5]]), 0)
    >>> 0.35 <= distance < 0.36
    True
    """
    function, start, _ = as_function(model, x)
    rows, width = tokens_shape(start)
    here = start.detach().reshape(rows, width)
    moving = list(range(rows)) if tokens is None else list(tokens)

    def logits(moved: Tensor) -> Tensor:
        places = torch.tensor(moving)
        several = [here.index_put((places,), one) for one in moved]
        return torch.stack([first_traced(function(one.reshape(start.shape))).reshape(-1) for one in several])

    found = minimal_norm_attack(logits, here[moving][None], torch.tensor([label]))
    if not bool(found.distance.isfinite()):
        return None
    return float((found.point[0] - here[moving]).norm(dim=-1).max())


def _slope(model: Model, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The margins and their unit gradients."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        margin = margins(model(x), labels)
        (gradient,) = torch.autograd.grad(margin.sum(), x)
    return margin.detach(), gradient / _like(_lengths(gradient).clamp_min(_TINY), x)


def _lengths(x: Tensor) -> Tensor:
    """The length of every input of a batch."""
    return x.flatten(1).norm(dim=1)


def _like(numbers: Tensor, x: Tensor) -> Tensor:
    """One number for each input, in a shape that multiplies a batch of inputs."""
    return numbers.reshape(-1, *[1] * (x.dim() - 1))


def _check(x: Tensor, labels: Tensor) -> None:
    if x.dim() < 2 or labels.shape != x.shape[:1] or labels.is_floating_point():
        raise InvalidInput(
            f"a batch of inputs and a whole number for each are needed, got {tuple(x.shape)} and {tuple(labels.shape)}."
        )
