r"""Sums and products of Jacobians: what the chain rule makes of maps that follow each other or stand side by side.

``A @ B`` is the Jacobian of a after b, ``A + B`` that of a + b, and `IdentityJacobian` that of the residual stream, so
that ``IdentityJacobian.like(x) + A`` belongs to x + a(x). Products go through the parts one after the other; nothing is
multiplied out.

**What rounding does.** A part computes its product with a unit vector up to ν + (β + 2 eps)·s, with ν its
``accuracy.product``, β its ``accuracy.point`` and s ≥ ‖J‖ its ``size()``. To first order the error of a product of
parts is that of each, carried through the others, and the error of a sum the sum of errors:

.. math:: \nu_{A_1\cdots A_m} = \sum_i \bigl(\nu_i + (\beta_i + 2\,\mathrm{eps})\,s_i\bigr)\prod_{j\ne i}s_j,
          \qquad \nu_{A_1+\dots+A_m} = \sum_i \bigl(\nu_i + (\beta_i + 2\,\mathrm{eps})\,s_i\bigr).

A relative error of a part becomes an absolute one of the whole, because parts may cancel. The sizes multiply, so for
many layers this bound is far above what happens: `howsmooth.network.composed_jacobian` measures it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from howsmooth._util.guarantee import weakest
from howsmooth._util.validation import validated
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import Accuracy, JacobianOperator

if TYPE_CHECKING:
    pass


_OF_ONE_PRODUCT = 2.0
"""Relative error, in eps, of a product beyond what a part states as its noise."""


class IdentityJacobian(JacobianOperator):
    """The Jacobian of x ↦ x.

    >>> IdentityJacobian.like(torch.zeros(2, 3)).matvec(torch.ones(2, 3)).sum()
    tensor(6.)
    """

    method = "closed form"

    @validated
    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, batch: Sequence[int] = ()):
        if min((*shape, *batch), default=1) < 1:
            raise InvalidInput(f"shapes are of whole numbers, at least 1, got {tuple(shape)} and {tuple(batch)}.")
        self.batch_shape, self.in_shape, self.out_shape = torch.Size(batch), torch.Size(shape), torch.Size(shape)
        self.dtype, self.device = dtype, device

    @classmethod
    @validated
    def like(cls, x: Tensor) -> IdentityJacobian:
        """At one input, ``(n, d)``, or a batch of them."""
        return cls(x.shape[-2:], x.dtype, x.device, x.shape[:-2])

    def matvec(self, v: Tensor) -> Tensor:
        return v

    def rmatvec(self, u: Tensor) -> Tensor:
        return u

    def size(self) -> Tensor:
        return torch.ones(self.batch_shape, dtype=torch.float64)

    def rounded(self, dtype: torch.dtype) -> IdentityJacobian:
        return IdentityJacobian(self.in_shape, dtype, self.device, self.batch_shape)

    def subset(self, index: Tensor) -> IdentityJacobian:
        return IdentityJacobian(self.in_shape, self.dtype, self.device, index.shape)


class _Composed(JacobianOperator):
    """Several operators as one; the first of ``parts`` is the last to act in a product."""

    def __init__(self, parts: Sequence[JacobianOperator]):
        self.parts = tuple(parts)
        batches = {part.batch_shape for part in self.parts}
        if len(batches) != 1 or len({part.device for part in self.parts}) != 1:
            raise InvalidInput(
                f"operators are combined map by map, but these hold batches of shapes "
                f"{', '.join(str(tuple(part.batch_shape)) for part in self.parts)} on "
                f"{', '.join(sorted({str(part.device) for part in self.parts}))}: build them at the same input."
            )
        (self.batch_shape,) = batches
        self.in_shape, self.out_shape = self.parts[-1].in_shape, self.parts[0].out_shape
        self.device = self.parts[0].device
        # A part may compute in a wider dtype for reasons of its own: the narrowest is what all of them give.
        self.dtype = min((part.dtype for part in self.parts), key=lambda dtype: dtype.itemsize)
        methods = dict.fromkeys(part.method for part in self.parts)
        self.method = "closed form, streamed" if "closed form, streamed" in methods else " and ".join(methods)
        self.notes = tuple(dict.fromkeys(note for part in self.parts for note in part.notes))

    def _errors(self) -> list[tuple[Tensor, Tensor]]:
        """Of every part its size, and how far its product with a unit vector may be off."""
        pairs = []
        for part in self.parts:
            size = part.size()
            relative = part.accuracy.point + _OF_ONE_PRODUCT * torch.finfo(part.dtype).eps
            absolute = torch.as_tensor(part.accuracy.product, dtype=torch.float64).cpu()
            pairs.append((size, absolute + relative * size))
        return pairs

    def _accuracy(self, product: Tensor) -> Accuracy:
        return Accuracy(product=product, guarantee=weakest(*(part.accuracy.guarantee for part in self.parts)))

    def rounded(self, dtype: torch.dtype) -> JacobianOperator:
        return type(self)([part.rounded(dtype) for part in self.parts])

    def subset(self, index: Tensor) -> JacobianOperator | None:
        parts = [part.subset(index) for part in self.parts]
        known = [part for part in parts if part is not None]
        return type(self)(known) if len(known) == len(parts) else None


class Product(_Composed):
    """A₁ A₂ … A_m; products of products are one.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> twice = MatrixOperator(2 * torch.eye(2))
    >>> (twice @ twice @ twice).matvec(torch.ones(2))
    tensor([8., 8.])
    """

    @validated
    def __init__(self, parts: Sequence[JacobianOperator]):
        flat = [inner for part in parts for inner in (part.parts if isinstance(part, Product) else (part,))]
        for left, right in pairwise(flat):
            if left.in_shape != right.out_shape:
                raise InvalidInput(
                    f"{left!r} takes vectors of shape {tuple(left.in_shape)}, but {right!r} gives out "
                    f"{tuple(right.out_shape)}: they do not follow each other."
                )
        super().__init__(flat)

    @cached_property
    def accuracy(self) -> Accuracy:  # type: ignore[override]
        errors = self._errors()
        every = reduce(torch.mul, (size for size, _ in errors))
        shares = (torch.where(size > 0, error / size, 0.0) * every for size, error in errors)
        return self._accuracy(sum(shares, torch.zeros(())))

    def size(self) -> Tensor:
        return reduce(torch.mul, (part.size() for part in self.parts))

    def matvec(self, v: Tensor) -> Tensor:
        for part in reversed(self.parts):
            v = part.matvec(v)
        return v.to(self.dtype)

    def rmatvec(self, u: Tensor) -> Tensor:
        for part in self.parts:
            u = part.rmatvec(u)
        return u.to(self.dtype)


class Sum(_Composed):
    """A₁ + A₂ + … + A_m.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> (MatrixOperator(torch.eye(2)) + MatrixOperator(torch.ones(2, 2))).matvec(torch.ones(2))
    tensor([3., 3.])
    """

    @validated
    def __init__(self, parts: Sequence[JacobianOperator]):
        flat = [inner for part in parts for inner in (part.parts if isinstance(part, Sum) else (part,))]
        shapes = {(part.in_shape, part.out_shape) for part in flat}
        if len(shapes) != 1:
            raise InvalidInput(f"only operators of one shape add up, not {' and '.join(map(repr, flat))}.")
        super().__init__(flat)

    @cached_property
    def accuracy(self) -> Accuracy:  # type: ignore[override]
        return self._accuracy(sum((error for _, error in self._errors()), torch.zeros(())))

    def size(self) -> Tensor:
        return sum((part.size() for part in self.parts), torch.zeros((), dtype=torch.float64))

    def matvec(self, v: Tensor) -> Tensor:
        return reduce(torch.add, [part.matvec(v) for part in self.parts]).to(self.dtype)

    def rmatvec(self, u: Tensor) -> Tensor:
        return reduce(torch.add, [part.rmatvec(u) for part in self.parts]).to(self.dtype)
