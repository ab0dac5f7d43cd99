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
from typing import Literal

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import check_finite, validated
from howsmooth.attention.composite_map import Composite, Gate, Parts, Placement
from howsmooth.attention.stages import TokenDerivative
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY, AttentionJacobian, TokenBlocks, attention_jacobian
from howsmooth.jacobians.function_checks import check_tokens, random_like
from howsmooth.jacobians.operator import Accuracy, JacobianOperator
from howsmooth.numerics.roundoff import spread_of_sum

CompositePath = Literal["all", "value", "score", "gate"]
_POWER_STEPS = 3


@dataclass(frozen=True)
class _Gates:
    """The gate of every map (heads running fastest): value and slope ``(maps, n, v)``.

    Attributes:
        weight, output: G and W of each map's head, ``(heads of an item, v, ·)`` or, head by head, ``(maps, v, ·)``.
        value, slope: g, and O ∘ g'.
        by_head: whether every head is a map of its own.
        places: how many heads the inner map puts side by side.
    """

    weight: Tensor
    output: Tensor
    value: Tensor
    slope: Tensor
    by_head: bool
    places: int

    def _heads(self, v: Tensor) -> Tensor:
        """Tokens ``(maps, n, ·)`` once for each head they belong to."""
        return v if self.by_head else v[:, None]

    def _each(self, numbers: Tensor) -> Tensor:
        return numbers if self.by_head else numbers.unflatten(0, (-1, len(self.weight)))

    def _summed(self, per_head: Tensor) -> Tensor:
        return per_head if self.by_head else per_head.sum(1)

    def split(self, mixed: Tensor) -> Tensor:
        """Heads side by side ``(maps, n, heads·v)`` → those of each map."""
        width = self.value.shape[-1]
        heads = mixed.unflatten(-1, (-1, width))
        if not self.by_head:
            return heads.transpose(1, 2)
        return heads.sum(2)  # a head's map has zeros in the places of the others

    def join(self, heads: Tensor) -> Tensor:
        """The transpose of `split`; head by head the places of other heads are filled too, and not read."""
        if not self.by_head:
            return heads.transpose(1, 2).flatten(2)
        return heads.repeat(1, 1, self.places)

    def out(self, mixed: Tensor) -> Tensor:
        """W(g ∘ heads)."""
        return self._summed(self.split(mixed) * self._each(self.value) @ self.output)

    def back(self, u: Tensor) -> Tensor:
        """The transpose of `out`."""
        return self.join(self._heads(u) @ self.output.mT * self._each(self.value))

    def moved(self, v: Tensor) -> Tensor:
        """W(O ∘ g' ∘ Gv)."""
        return self._summed(self._heads(v) @ self.weight.mT * self._each(self.slope) @ self.output)

    def moved_back(self, u: Tensor) -> Tensor:
        """The transpose of `moved`."""
        return self._summed(self._heads(u) @ self.output.mT * self._each(self.slope) @ self.weight)

    def select(self, index: Tensor, maps: Tensor) -> _Gates:
        weights = (self.weight[index], self.output[index]) if self.by_head else (self.weight, self.output)
        return replace(self, weight=weights[0], output=weights[1], value=self.value[maps], slope=self.slope[maps])

    def norms(self) -> tuple[float, float]:
        """Bounds on the norms of W diag(g) and W diag(O ∘ g') G."""
        output = self.output if self.by_head else self.output.flatten(0, 1)[None]
        weight = self.weight if self.by_head else self.weight.flatten(0, 1)[None]
        outer, inner = (float(torch.linalg.matrix_norm(w.double(), 2).max()) for w in (output, weight))
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


class CompositeJacobian(JacobianOperator):
    """Products with the Jacobian of a `Composite` at x; build it with `composite_jacobian`.

    ``path`` is "value" or "score" as in `AttentionJacobian`, or "gate" for the part that moves through the gate alone.
    """

    def __init__(
        self,
        inner: AttentionJacobian,
        place: Placement,
        features: TokenDerivative | None,
        gates: _Gates | None,
        in_width: int,
        shared: bool,
        path: CompositePath = "all",
    ):
        self.inner, self.place, self.features, self.gates, self.path = inner, place, features, gates, path
        self.shared = shared  # whether all maps have the features of one input
        self.by_head, self.mixing = inner.by_head, _Attended(inner, place)
        self.batch_shape = inner.batch_shape
        self.in_shape = torch.Size([place.rows.stop - place.rows.start, in_width])
        width = inner.out_shape[1] if gates is None else gates.output.shape[-1]
        self.out_shape = torch.Size([place.outputs.stop - place.outputs.start, width])
        self.dtype, self.device, self.method = inner.dtype, inner.device, inner.method
        # The point is that of the logits, and of the features that were rounded before.
        self.accuracy = Accuracy(2 * inner.accuracy.point, self._product_error(), inner.accuracy.alignment)

    def _product_error(self) -> Tensor:
        front = 1.0 if self.features is None else float(torch.as_tensor(self.features.size()).max())
        out, gate = (1.0, 0.0) if self.gates is None else self.gates.norms()
        eps, terms = torch.finfo(self.dtype).eps, self.in_shape[1] + self.inner.in_shape[1] + self.inner.out_shape[1]
        error = torch.as_tensor(self.inner.accuracy.product) * front * out
        if self.features is None and self.gates is None:
            return error
        return error + eps * spread_of_sum(terms) * (front * out * self._inner_size() + gate)

    def _inner_size(self) -> Tensor:
        """About the norm of the inner map, by a few steps of the power method."""
        v = random_like(torch.empty(*self.batch_shape, *self.inner.in_shape, dtype=self.dtype)).to(self.device)
        size = torch.zeros(self.batch_shape, dtype=torch.float64, device=self.device)
        for _ in range(_POWER_STEPS):
            v = self.inner.rmatvec(self.inner.matvec(v))
            length = torch.linalg.vector_norm(v.double(), dim=(-2, -1))
            size = length.sqrt()
            v = (v / length.clamp_min(torch.finfo(v.dtype).tiny)[..., None, None]).to(v.dtype)
        return size

    @full_precision
    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        tokens = v.to(self.dtype).reshape(-1, *self.in_shape)
        out = tokens.new_zeros(len(tokens), *self.out_shape)
        if self.path != "gate":
            moved = tokens if self.features is None else self.features.jvp(tokens)
            mixed = self.inner.matvec(self.place.put(moved).reshape(*self.batch_shape, *self.inner.in_shape))
            mixed = mixed.reshape(-1, *self.inner.out_shape)[:, self.place.outputs]
            out = mixed if self.gates is None else self.gates.out(mixed)
        if self.gates is not None and self.path in ("all", "gate"):
            out = out + self.gates.moved(tokens)
        return out.reshape(*self.batch_shape, *self.out_shape)

    @full_precision
    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        grad = u.to(self.dtype).reshape(-1, *self.out_shape)
        back = grad.new_zeros(len(grad), *self.in_shape)
        if self.path != "gate":
            mixed = grad if self.gates is None else self.gates.back(grad)
            whole = mixed.new_zeros(len(mixed), *self.inner.out_shape)
            whole[:, self.place.outputs] = mixed
            moved = self.inner.rmatvec(whole.reshape(*self.batch_shape, *self.inner.out_shape))
            moved = moved.reshape(-1, *self.inner.in_shape)[:, self.place.rows, self.place.columns]
            back = moved if self.features is None else self.features.vjp(moved)
        if self.gates is not None and self.path in ("all", "gate"):
            back = back + self.gates.moved_back(grad)
        return back.reshape(*self.batch_shape, *self.in_shape)

    def along(self, path: CompositePath) -> CompositeJacobian:
        """The same Jacobian restricted to one path."""
        inner = self.inner if path == "gate" else self.inner.along(path)
        return CompositeJacobian(inner, self.place, self.features, self.gates, self.in_shape[1], self.shared, path)

    def subset(self, index: Tensor) -> CompositeJacobian:
        maps = self.inner.projection.maps_of(index)
        features = self.features if self.features is None or self.shared else self.features.select(index)
        gates = None if self.gates is None else self.gates.select(index, maps)
        rest = self.in_shape[1], self.shared, self.path
        return CompositeJacobian(self.inner.subset(index), self.place, features, gates, *rest)

    @torch.no_grad()
    def value_at(self, f: Callable[[Tensor], Tensor] | None, x: Tensor) -> Tensor | None:
        return None if self.by_head or not isinstance(f, Composite) else f(x.detach().to(f.dtype))

    def token_blocks(self, rows: slice) -> CompositeBlocks:
        """The blocks J_ij of some output tokens and all input tokens."""
        return CompositeBlocks(self, rows)


class CompositeBlocks(JacobianOperator):
    """As `TokenBlocks`: batch shape ``(rows, n)``, or ``(rows, heads, n)`` head by head, of d × d maps."""

    def __init__(self, parent: CompositeJacobian, rows: slice):
        place = parent.place
        shifted = slice(rows.start + place.outputs.start, rows.stop + place.outputs.start)
        self.parent, self.inner, self.span = parent, TokenBlocks(parent.inner, shifted), rows
        self.in_shape, self.out_shape = parent.in_shape[1:], parent.out_shape[1:]
        self.batch_shape = torch.Size([*self.inner.batch_shape[:-1], parent.in_shape[0]])
        self.dtype, self.device, self.method = parent.dtype, parent.device, parent.method
        error = torch.as_tensor(parent.accuracy.product)
        self.accuracy = Accuracy(parent.accuracy.point, error.reshape(-1, 1) if parent.by_head else error.reshape(()))
        self.tokens, self.gates = torch.arange(rows.start, rows.stop, device=self.device), parent.gates

    def _gated(self, tensor: Tensor, back: bool) -> Tensor:
        """W(g_i ∘ ·) of blocks ``(rows, …, n, ·)``, or its transpose."""
        assert self.gates is not None
        outs = []
        for row, token in enumerate(self.tokens.tolist()):
            n = tensor.shape[-2]
            value = self.gates.value[:, token : token + 1].expand(-1, n, -1)
            gates = replace(self.gates, value=value)
            block = tensor[row] if self.parent.by_head else tensor[row][None]
            block = gates.back(block) if back else gates.out(block)
            outs.append(block if self.parent.by_head else block[0])
        return torch.stack(outs)

    def _own(self, tensor: Tensor, back: bool) -> Tensor:
        """The part that moves through the gate of token i when token i moves, ``(rows, …, ·)``."""
        assert self.gates is not None
        slope = self.gates.slope[:, self.span]
        gates = replace(self.gates, value=self.gates.value[:, self.span], slope=slope)
        stacked = tensor.transpose(0, 1) if self.parent.by_head else tensor[None]
        moved = gates.moved_back(stacked) if back else gates.moved(stacked)
        return moved.transpose(0, 1) if self.parent.by_head else moved[0]

    def _diagonal(self, tensor: Tensor) -> tuple[Tensor | slice, ...]:
        return (self.tokens - self.span.start, slice(None), self.tokens)[:: 1 if tensor.dim() == 4 else 2]

    @torch.no_grad()
    def matvec(self, v: Tensor) -> Tensor:
        place, features, path = self.parent.place, self.parent.features, self.parent.path
        v = v.reshape(*self.batch_shape, *self.in_shape)
        out = v.new_zeros(*self.batch_shape, *self.out_shape)
        if path != "gate":
            moved = v if features is None else features.jvp(v)
            mixed = self.inner.matvec(place.put(moved))
            mixed = mixed.reshape(*self.inner.batch_shape, -1)[..., place.rows, :]
            out = mixed if self.gates is None else self._gated(mixed, back=False)
        if self.gates is not None and path in ("all", "gate"):
            index = self._diagonal(v)
            out[index] += self._own(v[index], back=False)
        return out

    @torch.no_grad()
    def rmatvec(self, u: Tensor) -> Tensor:
        place, features, path = self.parent.place, self.parent.features, self.parent.path
        u = u.reshape(*self.batch_shape, *self.out_shape)
        back = u.new_zeros(*self.batch_shape, *self.in_shape)
        if path != "gate":
            mixed = u if self.gates is None else self._gated(u, back=True)
            whole = mixed.new_zeros(*self.inner.batch_shape, mixed.shape[-1])
            whole[..., place.rows, :] = mixed
            moved = self.inner.rmatvec(whole).reshape(*self.inner.batch_shape, -1)[..., place.rows, place.columns]
            back = moved if features is None else features.vjp(moved)
        if self.gates is not None and path in ("all", "gate"):
            index = self._diagonal(u)
            back[index] += self._own(u[index], back=True)
        return back


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
    check_tokens(x)
    if x.shape[-1] != composite.in_features:
        raise InvalidInput(f"tokens are {x.shape[-1]} wide, but the attention takes {composite.in_features}.")
    for name, tensor in composite.named_buffers():
        if tensor.is_floating_point() and "logit_biases" not in name:
            check_finite(tensor, name.replace("_", " "))
    dtype = torch.promote_types(torch.promote_types(x.dtype, composite.dtype), torch.float32)
    with torch.no_grad():
        parts = composite.parts(x.detach().reshape(-1, *x.shape[-2:]).double())
        tokens = parts.tokens.to(dtype).reshape(*x.shape[:-2], *parts.tokens.shape[-2:])
        inner = attention_jacobian(parts.attention, tokens, per_head=per_head, memory=memory)
        features = None if parts.derivative is None else parts.derivative.to(inner.dtype)
        shared = len(parts.tokens) == 1
        if features is not None and per_head and not shared:
            features = features.select(torch.arange(inner.batch_size, device=x.device) // composite.heads)
        gates = None if parts.gate is None else _gates(parts, parts.gate, inner)
        return CompositeJacobian(inner, parts.placement, features, gates, x.shape[-1], shared)


def _gates(parts: Parts, gate: Gate, inner: AttentionJacobian) -> _Gates:
    attention, place = parts.attention, parts.placement
    if attention.terms.first_blind(place.tokens, attention.heads) is not None:
        raise InvalidInput("a gate needs tokens that see something: leave padded tokens out.")
    output = inner.mixing.mixed_values(attention, parts.tokens)[:, place.outputs]
    weight, out = (w.repeat(len(parts.tokens), 1, 1) if inner.by_head else w for w in (gate.weight, gate.output))
    value, slope = gate.value.flatten(0, 1), output * gate.slope.flatten(0, 1)
    weight, out, value, slope = (t.to(inner.dtype) for t in (weight, out, value, slope))
    return _Gates(weight, out, value, slope, inner.by_head, attention.heads)
