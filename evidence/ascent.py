r"""Gradient ascent on measured/bound: the attack that every upper bound has to survive.

The Lipschitz constant at an input is a maximum, :math:`\|J\| = \max_{u,v} \langle u, Jv\rangle`, so that with the
maximisers held fixed its gradient is that of :math:`\langle u, J(X)v\rangle`: one forward-mode product, differentiated
backwards. The maximisers follow X by a few steps of the power method (Boyd 1974 for the ∞-norm), and the value that is
reported in the end comes from the dense float64 autograd Jacobian.

Many starts run side by side: every free variable has a leading axis of starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.attention import LogitBias
from howsmooth.attention.masks import Maps
from howsmooth.bounds import Bound, Setting
from howsmooth.sets import Point
from howsmooth.sets.ellipsoid import Ellipsoid

Free = dict[str, Tensor]
"""The free variables: "z" for the tokens, "log_mass" for the masses of atoms, and weights by their own names."""
ROUNDING = 1e-9
"""A measured value above (1 + this)·bound is a violation; both sides are float64."""


@dataclass(frozen=True)
class Case:
    """A map, the inputs it may be given, and the starts of the ascent.

    Attributes:
        where: what is attacked, in words.
        start: free variables, each ``(starts, …)``.
        attention: a new map, from one start's free variables.
        tokens: the set every token lies in; z is then kept in the unit ball of each token.
        centre, eps: instead of a set, every token stays within eps of this input, ``(n, d)``.
        ordered: whether atoms see only those at earlier positions and themselves (for masses only).

    Without a set and a centre z is the input itself.
    """

    where: str
    start: Free
    attention: Callable[[Free], nn.Module]
    tokens: Ellipsoid | None = None
    centre: Tensor | None = None
    eps: float = 0.0
    ordered: bool = False

    @property
    def starts(self) -> int:
        """Number of maximisations."""
        return len(self.start["z"])

    def input(self, free: Free) -> Tensor:
        """The tokens of one start."""
        if self.tokens is not None:
            return self.tokens.at(free["z"])
        return free["z"] if self.centre is None else self.centre + self.eps * free["z"]

    def setting(self, free: Free) -> Setting:
        """Where the bound is asked; differentiable in the free variables."""
        x, n = self.input(free), free["z"].shape[-2]
        if self.tokens is not None:
            return Setting(self.attention(free), n, self.tokens)
        if self.centre is not None:
            return Setting(
                self.attention(free), n, Point(self.centre).ellipsoid(self.centre.shape[-1]), self.centre, self.eps
            )
        return Setting(self.attention(free), n, x=x)

    def restrict(self, free: Free) -> None:
        """Bring z back to where it may be, in place."""
        if self.tokens is not None or self.centre is not None:
            free["z"].div_(free["z"].norm(dim=-1, keepdim=True).clamp(min=1.0))

    def measured(self, free: Free, copies: int = 1) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
        """The map, its input and √mass of every token, for one start; each atom in ``copies`` equal parts."""
        attention, x = self.attention(free), self.input(free)
        if "log_mass" not in free:
            return attention, x, torch.ones_like(x[:, :1])
        log_mass = free["log_mass"].log_softmax(-1).repeat_interleave(copies) - math.log(copies)
        attention.logit_biases = nn.ModuleList([Atoms(log_mass, copies if self.ordered else None)])
        return attention, x.repeat_interleave(copies, 0), (log_mass / 2).exp()[:, None]


class Atoms(LogitBias):
    """Tokens of unequal mass: key j gains ln w_j. With ``step``, groups of so many tokens stand in order."""

    def __init__(self, log_mass: Tensor, step: int | None):
        super().__init__()
        self.log_mass, self.step = log_mass, step

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        added = self.log_mass[cols].expand(rows.stop - rows.start, -1)
        if self.step is not None:
            row, col = maps.positions(rows) // self.step, maps.positions(cols) // self.step
            added = added + maps.hide(col <= row[:, None])
        return added[None]


def ascend(case: Case, bound: Bound | None = None, norm: float = 2, steps: int = 100, rate: float = 0.1) -> Free:
    """The best free variables met while climbing ‖J‖, or ‖J‖/bound for a bound that depends on what is free.

    The weights stay as they start near an input, where the bound depends on more than their norms, and for bounds at a
    point, which promise gradients in the tokens only.
    """
    held = case.centre is not None or (bound is not None and bound.scope == "point")
    free = {name: value.clone().requires_grad_(name == "z" or not held) for name, value in case.start.items()}
    case.restrict({name: value.data for name, value in free.items()})
    climbing = [value for value in free.values() if value.requires_grad]
    optimizer = torch.optim.Adam(climbing, lr=rate, maximize=True)
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(_outputs(case, free).shape, generator=generator, dtype=torch.float64)
    left = refine(case, free, left, norm, rounds=8)
    best = {name: value.detach().clone() for name, value in free.items()}
    highest = torch.full((case.starts,), -math.inf, dtype=torch.float64)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        left, norms = follow(case, free, left, norm)
        height = norms.clamp(min=1e-300).log()
        if bound is not None:
            height = height - torch.stack([_bound(bound, case, _item(free, i)) for i in range(case.starts)]).log()
        better = height.detach() > highest
        highest = torch.where(better, height.detach(), highest)
        for name, value in free.items():
            best[name][better] = value.detach()[better]
        optimizer.zero_grad()
        height.sum().backward()
        for value in climbing:
            assert value.grad is not None
            value.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        case.restrict({name: value.data for name, value in free.items()})
    return best


def exact(case: Case, free: Free, norm: float = 2) -> Tensor:
    """‖J‖ of every start from the dense autograd Jacobian.

    Atoms with masses are counted in two halves each: the Jacobian then also knows the ways in which the mass of an
    atom can split, so that its norm is the whole local constant in the Wasserstein distance.
    """
    values = []
    for i in range(case.starts):
        f, x, root = case.measured(_item(free, i), copies=2)
        dense = torch.func.jacrev(f)(x.detach()).detach() * root[:, :, None, None] / root
        values.append(torch.linalg.matrix_norm(dense.reshape(-1, x.numel()), norm))
    return torch.stack(values)


def ratios(case: Case, free: Free, bound: Bound, measured: Tensor) -> Tensor:
    """Measured over bound for every start."""
    with torch.no_grad():
        return measured / torch.stack([bound.at(case.setting(_item(free, i))) for i in range(case.starts)])


def _item(free: Free, index: int) -> Free:
    return {name: value[index] for name, value in free.items()}


def _outputs(case: Case, free: Free) -> Tensor:
    f, x, _ = case.measured(_item(free, 0))
    with torch.no_grad():
        return f(x).expand(case.starts, -1, -1)


def _forward(case: Case, free: Free, tangent: Tensor) -> Tensor:
    """Jv of every start."""

    def one(free: Free, tangent: Tensor) -> Tensor:
        f, x, root = case.measured(free)
        return root * torch.func.jvp(f, (x,), (tangent / root,))[1]

    return torch.vmap(one)(free, tangent)


def _backward(case: Case, free: Free, cotangent: Tensor) -> Tensor:
    """Jᵀu of every start."""

    def one(free: Free, cotangent: Tensor) -> Tensor:
        f, x, root = case.measured(free)
        return torch.func.vjp(f, x)[1](root * cotangent)[0] / root

    return torch.vmap(one)(free, cotangent)


def follow(case: Case, free: Free, left: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """One step of the power method: the next u, and ⟨u, Jv⟩ as a function of the free variables with u, v fixed."""
    with torch.no_grad():
        right = _backward(case, free, left)
        right = right.sign() if norm == math.inf else _unit(right)
    image = _forward(case, free, right)
    left = _largest(image.detach()) if norm == math.inf else _unit(image.detach())
    return left, (left * image).flatten(1).sum(1)


@torch.no_grad()
def refine(case: Case, free: Free, left: Tensor, norm: float, rounds: int) -> Tensor:
    """u after some steps of the power method."""
    for _ in range(rounds):
        left, _ = follow(case, free, left, norm)
    return left


def _unit(t: Tensor) -> Tensor:
    return t / t.flatten(1).norm(dim=1).clamp(min=1e-300)[:, None, None]


def _largest(t: Tensor) -> Tensor:
    """The largest entry of each item, its sign alone."""
    flat = t.flatten(1)
    place = flat.abs().argmax(1, keepdim=True)
    return torch.zeros_like(flat).scatter(1, place, flat.gather(1, place).sign()).reshape(t.shape)


def _bound(bound: Bound, case: Case, free: Free) -> Tensor:
    where = case.setting(free)
    return bound.evaluate(where) if bound.combine == "block" else bound.evaluate(where, True).sum()
