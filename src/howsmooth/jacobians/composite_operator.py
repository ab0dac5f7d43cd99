r"""The Jacobian of attention with something around it: see `howsmooth.attention.composite_map`.

With F the derivative of the features, J that of plain attention at them, g the gate of head h, O its output and W its
slice of the output projection,

    J_h v = W_hᵀ [ g ∘ (J (F v))_h + O_h ∘ g' ∘ (G_h v) ],

each factor but J token by token. Without a gate W is part of J. The error of a product is that of J between the norms
of its surroundings, and a rounding of every product beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import validated
from howsmooth.attention.composite_map import Composite, Gate, Parts, Placement
from howsmooth.attention.stages import IDENTITY, TokenDerivative
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.attention_operator import (
    DEFAULT_MEMORY,
    AttentionJacobian,
    TokenBlocks,
    attention_jacobian,
    dtype_of_products,
)
from howsmooth.jacobians.operator import Accuracy, JacobianOperator, power_steps, random_input
from howsmooth.numerics.roundoff import spread_of_sum

CompositePath = Literal["all", "value", "score", "gate"]
_POWER_STEPS = 3


@dataclass(frozen=True)
class _Gates(Gate):
    """The gates of every map, ``(maps, heads, n or v, ·)``: one head for each map, or all of them.

    ``value`` and ``slope`` are g, and O ∘ g'. An axis of one map stands for all.

    Attributes:
        places: how many heads the inner map puts side by side.
    """

    places: int

    def out(self, mixed: Tensor) -> Tensor:
        """W(g ∘ heads) of heads side by side, ``(maps, n, places·v)``."""
        heads = mixed.unflatten(-1, (self.places, -1)).transpose(1, 2)
        if heads.shape[1] != self.value.shape[1]:
            heads = heads.sum(1, keepdim=True)  # a head's map has zeros in the places of the others
        return (heads * self.value @ self.output).sum(1)

    def back(self, u: Tensor) -> Tensor:
        """The transpose of `out`; head by head the places of other heads are filled too, and not read."""
        heads = (u[:, None] @ self.output.mT * self.value).transpose(1, 2).flatten(2)
        others = self.places // self.value.shape[1]
        return heads if others == 1 else heads.repeat(1, 1, others)

    def moved(self, v: Tensor) -> Tensor:
        """W(O ∘ g' ∘ Gv)."""
        return (v[:, None] @ self.weight.mT * self.slope @ self.output).sum(1)

    def moved_back(self, u: Tensor) -> Tensor:
        """The transpose of `moved`."""
        return (u[:, None] @ self.output.mT * self.slope @ self.weight).sum(1)

    def select(self, index: Tensor) -> _Gates:
        """The gates of some maps."""
        weight, output, value, slope = (
            tensor[index] if len(tensor) > 1 else tensor
            for tensor in (self.weight, self.output, self.value, self.slope)
        )
        return _Gates(weight, output, value, slope, self.places)

    def at(self, tokens: slice) -> _Gates:
        """The gates of some tokens."""
        return replace(self, value=self.value[:, :, tokens], slope=self.slope[:, :, tokens])

    def norms(self) -> tuple[float, float]:
        """Bounds on the norms of W diag(g) and W diag(O ∘ g') G."""
        stacked = (w.flatten(1, 2).double() for w in (self.output, self.weight))
        outer, inner = (float(torch.linalg.matrix_norm(w, 2).max()) for w in stacked)
        return outer * float(self.value.max()), outer * float(self.slope.abs().max()) * inner


class _Attended:
    """Statistics of the weights of the inner map, for the tokens that are attended to."""

    def __init__(self, parent: AttentionJacobian, place: Placement):
        self.inner, self.place = parent.mixing, place

    def column_sums(self) -> Tensor:
        return self.inner.column_sums()[..., self.place.keys]

    def entropy(self) -> Tensor:
        """Means over the tokens whose outputs belong to the map: others see nothing, or themselves alone."""
        outputs = self.place.outputs.stop - self.place.outputs.start
        return self.inner.entropy() * self.place.tokens / outputs


@dataclass(frozen=True, eq=False, repr=False)
class CompositeJacobian(JacobianOperator):
    """Products with the Jacobian of a `Composite` at x; build it with `composite_jacobian`.

    Attributes:
        features: the derivative of the features.
        path: "value" or "score" as in `AttentionJacobian`, or "gate" for the part that moves through the gate alone.
    """

    inner: AttentionJacobian
    place: Placement
    features: TokenDerivative
    gates: _Gates | None
    in_width: int
    path: CompositePath = "all"

    def __post_init__(self) -> None:
        width = self.inner.out_shape[1] if self.gates is None else self.gates.output.shape[-1]
        shapes = ((self.place.rows, self.in_width), (self.place.outputs, width))
        in_shape, out_shape = (torch.Size([span.stop - span.start, width]) for span, width in shapes)
        self._take_after(self.inner, in_shape=in_shape, out_shape=out_shape)

    @property
    def by_head(self) -> bool:
        """Whether every head is a map of its own."""
        return self.inner.by_head

    @property
    def mixing(self) -> _Attended:
        """Statistics of the weights."""
        return _Attended(self.inner, self.place)

    @property
    def moving_gates(self) -> _Gates | None:
        """The gates, where the path leads through their derivative."""
        return self.gates if self.path in ("all", "gate") else None

    @cached_property
    def accuracy(self) -> Accuracy:  # type: ignore[override]
        # The point is that of the logits, and of the features that were rounded before.
        inner = self.inner.accuracy
        return Accuracy(2 * inner.point, self._product_error(torch.as_tensor(inner.product)), inner.alignment)

    def _product_error(self, error: Tensor) -> Tensor:
        front = float(torch.as_tensor(self.features.size()).max())
        out, gate = (1.0, 0.0) if self.gates is None else self.gates.norms()
        eps, terms = torch.finfo(self.dtype).eps, self.in_shape[1] + self.inner.in_shape[1] + self.inner.out_shape[1]
        error = error * front * out
        if self.features == IDENTITY and self.gates is None:
            return error
        *_, (_, length) = power_steps(self.inner, random_input(self.inner), _POWER_STEPS)
        return error + eps * spread_of_sum(terms) * (front * out * length.sqrt() + gate)

    @full_precision
    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        tokens = v.to(self.dtype).reshape(-1, *self.in_shape)
        out = tokens.new_zeros(len(tokens), *self.out_shape)
        if self.path != "gate":
            moved = self.place.put(self.features.jvp(tokens))
            mixed = self.inner.matvec(moved.reshape(*self.batch_shape, *self.inner.in_shape))
            out = mixed.reshape(-1, *self.inner.out_shape)[:, self.place.outputs]
            out = out if self.gates is None else self.gates.out(out)
        if self.moving_gates is not None:
            out = out + self.moving_gates.moved(tokens)
        return out.reshape(*self.batch_shape, *self.out_shape)

    @full_precision
    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        grad = u.to(self.dtype).reshape(-1, *self.out_shape)
        back = grad.new_zeros(len(grad), *self.in_shape)
        if self.path != "gate":
            whole = grad.new_zeros(len(grad), *self.inner.out_shape)
            whole[:, self.place.outputs] = grad if self.gates is None else self.gates.back(grad)
            moved = self.inner.rmatvec(whole.reshape(*self.batch_shape, *self.inner.out_shape))
            moved = moved.reshape(-1, *self.inner.in_shape)[:, self.place.rows, self.place.columns]
            back = self.features.vjp(moved)
        if self.moving_gates is not None:
            back = back + self.moving_gates.moved_back(grad)
        return back.reshape(*self.batch_shape, *self.in_shape)

    def along(self, path: CompositePath) -> CompositeJacobian:
        """The same Jacobian restricted to one path."""
        return replace(self, inner=self.inner if path == "gate" else self.inner.along(path), path=path)

    def subset(self, index: Tensor) -> CompositeJacobian:
        gates = None if self.gates is None else self.gates.select(index)
        return replace(self, inner=self.inner.subset(index), features=self.features.select(index), gates=gates)

    @torch.no_grad()
    def value_at(self, f: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor | None:
        return None if self.by_head or not isinstance(f, Composite) else f(x.detach().to(f.dtype))

    def token_blocks(self, rows: slice) -> CompositeBlocks:
        """The blocks J_ij of some output tokens and all input tokens."""
        return CompositeBlocks(self, rows)


class CompositeBlocks(JacobianOperator):
    """As `TokenBlocks`: batch shape ``(rows, n)``, or ``(rows, heads, n)`` head by head, of d × d maps.

    Products are taken on tensors ``(rows, maps, n, ·)``.
    """

    def __init__(self, parent: CompositeJacobian, rows: slice):
        first = parent.place.outputs.start
        self.parent, self.queries = parent, rows
        self.inner = TokenBlocks(parent.inner, slice(rows.start + first, rows.stop + first))
        batch = torch.Size([*self.inner.batch_shape[:-1], parent.in_shape[0]])
        self._take_after(parent, batch_shape=batch, in_shape=parent.in_shape[1:], out_shape=parent.out_shape[1:])
        error = torch.as_tensor(parent.accuracy.product)
        self.accuracy = Accuracy(parent.accuracy.point, error.reshape(-1, 1) if parent.by_head else error.reshape(()))
        tokens = torch.arange(rows.start, rows.stop, device=self.device)
        self.diagonal = tokens - rows.start, slice(None), tokens

    def _through_gates(self, product: Callable[[_Gates, Tensor], Tensor], blocks: Tensor) -> Tensor:
        """W(g_i ∘ ·) of the blocks of every query i, or its transpose."""
        gates = self.parent.gates
        if gates is None:
            return blocks
        of_queries = (gates.at(slice(i, i + 1)) for i in range(self.queries.start, self.queries.stop))
        return torch.stack([product(gate, block) for gate, block in zip(of_queries, blocks, strict=True)])

    def _add_gates(self, product: Callable[[_Gates, Tensor], Tensor], total: Tensor, moved: Tensor) -> None:
        """Add the part that moves through the gate of token i when token i moves."""
        gates = self.parent.moving_gates
        if gates is not None:
            own = product(gates.at(self.queries), moved[self.diagonal].transpose(0, 1))
            total[self.diagonal] += own.transpose(0, 1)

    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        parent, place = self.parent, self.parent.place
        v = v.reshape(len(self.diagonal[0]), -1, *parent.in_shape)
        out = v.new_zeros(*v.shape[:-1], *self.out_shape)
        if parent.path != "gate":
            mixed = self.inner.matvec(place.put(parent.features.jvp(v)).reshape(*self.inner.batch_shape, -1))
            mixed = mixed.reshape(*v.shape[:2], place.tokens, -1)[..., place.rows, :]
            out = self._through_gates(_Gates.out, mixed)
        self._add_gates(_Gates.moved, out, v)
        return out.reshape(*self.batch_shape, *self.out_shape)

    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        parent, place = self.parent, self.parent.place
        u = u.reshape(len(self.diagonal[0]), -1, parent.in_shape[0], *self.out_shape)
        back = u.new_zeros(*u.shape[:-1], *self.in_shape)
        if parent.path != "gate":
            mixed = self._through_gates(_Gates.back, u)
            whole = mixed.new_zeros(*u.shape[:2], place.tokens, mixed.shape[-1])
            whole[..., place.rows, :] = mixed
            moved = self.inner.rmatvec(whole.reshape(*self.inner.batch_shape, -1))
            moved = moved.reshape(*u.shape[:2], place.tokens, -1)[..., place.rows, place.columns]
            back = parent.features.vjp(moved)
        self._add_gates(_Gates.moved_back, back, u)
        return back.reshape(*self.batch_shape, *self.in_shape)


@validated
@full_precision
def composite_jacobian(
    composite: Composite, x: Tensor, *, per_head: bool = False, memory: int = DEFAULT_MEMORY
) -> CompositeJacobian:
    """The Jacobian of a composite map at x, ``(n, d)`` or ``(batch, n, d)``, in closed form.

    Arguments as in `attention_jacobian`.

    >>> import howsmooth as hs
    >>> gated = hs.attention.ComposedAttention(hs.SelfAttention.random(8, heads=2), gate=torch.eye(8))
    >>> composite_jacobian(gated, torch.randn(5, 8), per_head=True).dense().shape
    torch.Size([2, 40, 40])
    """
    dtype = dtype_of_products(composite, x)
    with torch.no_grad():
        parts = composite.parts(x.detach().reshape(-1, *x.shape[-2:]).double())
        tokens = parts.tokens.to(dtype).reshape(*x.shape[:-2], *parts.tokens.shape[-2:])
        inner = attention_jacobian(parts.attention, tokens, per_head=per_head, memory=memory)
        features = parts.derivative.to(inner.dtype)
        if per_head:
            features = features.select(torch.arange(inner.batch_size, device=x.device) // composite.heads)
        gates = None if parts.gate is None else _gates(parts, parts.gate, inner)
        return CompositeJacobian(inner, parts.placement, features, gates, x.shape[-1])


def _gates(parts: Parts, gate: Gate, inner: AttentionJacobian) -> _Gates:
    attention, place = parts.attention, parts.placement
    if attention.terms.first_blind(place.tokens, attention.heads) is not None:
        raise InvalidInput("a gate needs tokens that see something: leave padded tokens out.")
    output = inner.mixing.mixed_values(attention, parts.tokens)[:, place.outputs].unflatten(0, (-1, attention.heads))
    tensors = [gate.weight[None], gate.output[None], gate.value, output * gate.slope]
    if inner.by_head:
        tensors = [t.expand(len(output), -1, -1, -1).flatten(0, 1)[:, None] for t in tensors]
    weight, out, value, slope = (t.to(inner.dtype) for t in tensors)
    return _Gates(weight, out, value, slope, attention.heads)
