"""The result of measuring a norm: a number with both ends and their guarantees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.common import rounded
from howsmooth._util.display import card
from howsmooth._util.guarantee import Guarantee, weakest, with_guarantees
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.operator import JacobianOperator

NormKind = float | str
_SYMBOLS: dict[NormKind, str] = {2: "‖J‖₂", 1: "‖J‖₁", math.inf: "‖J‖_∞", "fro": "‖J‖_F", "token": "‖J‖_token"}


@dataclass(frozen=True, eq=False, repr=False)
class Measurement:
    """A norm of every map of a batch, with ends.

    The tensors are float64 of the operator's batch shape (0-dimensional for a single map).

    Attributes:
        value: the estimate.
        lower: the end from below; the random start plays no part in it.
        upper: the end from above, true with probability ``confidence``. Both include an allowance for rounding, see
            `rounding_allowance`.
        rounding: whether that allowance is modelled (MODELLED: attention and matrices) or was measured (MEASURED:
            layers, models and functions); `lower_holds` and `upper_holds` are the guarantees of the ends, at most
            MODELLED because the solver's own rounding is modelled. `hs.certify` proves ends.
        confidence: probability with which ``upper`` holds, for each map by itself; 1.0 when no chance is involved and
            0.0 when there is no upper bound. The chance lies in the solver's own random start, not in the operator.
        norm: 2, 1, ``math.inf``, ``"fro"`` or ``"token"``.
        converged: whether each map reached the requested accuracy.
        products: Jacobian products made; one J v or Jᵀ u over all maps still running counts as one.
        method: how the number was found.
        dtype: of the products.
        seconds: time taken.
        left, right: unit singular vectors u, v, ``batch_shape + out_shape`` and ``batch_shape + in_shape``. One of
            J v = value·u and Jᵀu = value·v holds exactly, the other up to the residual. With k > 1 requested, a
            dimension of size k comes before the map's own. Where the singular value is zero up to rounding, they are
            orthonormal to those before, and ``residuals`` says how far they are from a triplet.
        values: the k largest singular values, ``batch_shape + (k,)``.
        residuals: the larger of ‖J v − σ u‖ and ‖Jᵀu − σ v‖ for each of ``values``; for a sampled Frobenius norm,
            the standard error of ``value``.
        notes: further facts for the reader.
        scale: |X|/|f(X)| in the vector norm that belongs to ``norm`` (for "fro" the Frobenius norm), NaN where f(X) is
            zero; None where the function itself is not known.

    >>> from howsmooth.jacobians.operator import MatrixOperator
    >>> from howsmooth.norms import operator_norm
    >>> m = operator_norm(MatrixOperator(torch.diag(torch.tensor([3.0, 4.0]))))
    >>> float(m)
    4.0
    >>> m
    ‖J‖₂ = 4 (≥ 3.9999, ≤ 4.0001, rounding modelled; converged, 2 products, dense float32)
    """

    value: Tensor
    lower: Tensor
    upper: Tensor
    confidence: float
    norm: NormKind
    converged: Tensor
    products: int
    method: str
    dtype: torch.dtype
    seconds: float
    left: Tensor | None = None
    right: Tensor | None = None
    values: Tensor | None = None
    residuals: Tensor | None = None
    notes: tuple[str, ...] = ()
    scale: Tensor | None = None
    rounding: Guarantee = Guarantee.MODELLED

    def __post_init__(self) -> None:
        if not bool((self.lower <= self.upper).all()):
            raise InvalidInput(
                "The lower end of this measurement is above its upper end, or one of them is not a number: "
                "measure again, in float64."
            )

    @property
    def lower_holds(self) -> Guarantee:
        """The guarantee of the lower end."""
        return weakest(self.rounding, Guarantee.MODELLED)

    @property
    def upper_holds(self) -> Guarantee:
        """The guarantee of the upper end, apart from its probability ``confidence``."""
        return self.lower_holds

    @property
    def relative(self) -> Tensor | None:
        """The relative condition value·|X|/|f(X)|: by what share of itself the output can move when the input moves by
        a small share of itself. It compares layers and models, which σ does not
        (`howsmooth.norms.local_constant`)."""
        return None if self.scale is None else self.value * self.scale

    def __float__(self) -> float:
        if self.value.numel() != 1:
            raise InvalidInput(
                f"This measurement holds {self.value.numel()} maps: use .value, or .value.max() for the largest."
            )
        return float(self.value)

    def to_dict(self, vectors: bool = False) -> dict[str, Any]:
        """Plain Python for JSON: lists instead of tensors, None where there is no bound, vectors only on request."""
        plain: dict[str, Any] = {
            "norm": "inf" if self.norm == math.inf else self.norm,
            "value": _plain(self.value),
            "lower": _plain(self.lower),
            "upper": _plain(self.upper),
            "confidence": self.confidence,
            "converged": self.converged.tolist(),
            "products": self.products,
            "method": self.method,
            "dtype": str(self.dtype).removeprefix("torch."),
            "seconds": self.seconds,
            "values": _plain(self.values),
            "residuals": _plain(self.residuals),
            "notes": list(self.notes),
            "lower_holds": self.lower_holds.name.lower(),
            "upper_holds": self.upper_holds.name.lower(),
            "relative": _plain(self.relative),
        }
        if vectors:
            plain |= {"left": _plain(self.left), "right": _plain(self.right)}
        return plain

    def __repr__(self) -> str:
        symbol, count = _SYMBOLS[self.norm], self.value.numel()
        how = f"{self.products} products, {self.method} {str(self.dtype).removeprefix('torch.')}"
        if count == 1:
            state = "converged" if bool(self.converged) else "not converged"
            value = rounded(float(self.value), ROUND_HALF_EVEN, 4)
            return f"{symbol} = {value} ({self.ends()}; {state}, {how}){self._compared()}"
        low, high = (rounded(float(x), ROUND_HALF_EVEN, 4) for x in (self.value.min(), self.value.max()))
        ratio = float(torch.where(self.upper > 0, self.upper / self.lower, torch.ones_like(self.upper)).max())
        gap = f", upper/lower at most {rounded(ratio, ROUND_CEILING)}" if self.confidence else ""
        state = f"{int(self.converged.sum())}/{count} converged"
        return (
            f"{symbol} of {count} maps = {low} … {high} (each {self.guarantees}{gap}; {state}, {how}){self._compared()}"
        )

    @property
    def guarantees(self) -> str:
        """The guarantees of the ends of every map: "≥ lower, ≤ upper with probability 99 %, rounding modelled"."""
        above = "≤ upper" if self.confidence else "no upper bound"
        return with_guarantees("≥ lower", above, self.lower_holds, self.upper_holds, self.confidence or 1.0)

    def ends(self, index: tuple[int, ...] = ()) -> str:
        """Both ends of one map with their guarantees, rounded outwards: "≥ 3.9999, ≤ 4.0001, rounding modelled"."""
        lower, upper = float(self.lower[index]), float(self.upper[index])
        below = f"≥ {rounded(lower, ROUND_FLOOR)}"
        if not self.confidence or math.isinf(upper):
            return with_guarantees(below, "no upper bound", self.lower_holds)
        above = f"≤ {rounded(upper, ROUND_CEILING)}"
        return with_guarantees(below, above, self.lower_holds, self.upper_holds, self.confidence)

    def _repr_html_(self) -> str:
        name, _, rest = repr(self).partition(" (")
        facts = [("converged", f"{int(self.converged.sum())} of {self.value.numel()}"), ("method", self.method)]
        if self._compared():
            meaning = "share by which the output can move per share of the input; it compares layers and models"
            facts.insert(0, (self._compared().removeprefix(", "), meaning))
        return card(name, [("ends", rest.split(";")[0]), *facts], self.notes)

    def _compared(self) -> str:
        """The relative condition in words, or nothing."""
        known = None if self.relative is None else self.relative[self.relative.isfinite()]
        if known is None or not known.numel():
            return ""
        low, high = (rounded(float(x), ROUND_HALF_EVEN, 3) for x in (known.min(), known.max()))
        return f", relative condition {low if self.value.numel() == 1 else f'{low} … {high}'}"


def uncrossed(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The ends of maps, with a note and no upper end where they contradict each other.

    The lower end is a length that was computed, the upper end an argument: where the lower one is above, it is the
    argument (a probability, or the allowance for rounding) that has failed.

    >>> uncrossed(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.5]))[1].tolist()
    [1.5, inf]
    """
    crossed = ~(lower <= upper)
    note = f"no upper bound for {int(crossed.sum())} of {crossed.numel()} maps, whose ends contradict each other: "
    notes = (note + "measure again with another seed or in float64",) if bool(crossed.any()) else ()
    return lower, torch.where(crossed, math.inf, upper), notes


def measurement_between(
    op: JacobianOperator,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    rtol: float,
    confidence: float = 1.0,
    notes: tuple[str, ...] = (),
    **facts: Any,
) -> Measurement:
    """From one value per map and its two ends, converged where these are rtol apart; the facts are the rest."""
    value, lower, upper = (numbers.reshape(op.batch_shape) for numbers in (value, *ends))
    converged = upper <= (1.0 + rtol) * lower  # a float: tensors take no huge whole numbers
    if confidence == 1:
        notes += rounding_note(~converged, op.dtype)
    return Measurement(
        value,
        lower,
        upper,
        confidence,
        converged=converged,
        dtype=op.dtype,
        notes=notes,
        rounding=op.accuracy.guarantee,
        **facts,
    )


def rounding_note(limited: Tensor, dtype: torch.dtype) -> tuple[str, ...]:
    """A note where rounding keeps maps from the requested accuracy.

    >>> rounding_note(torch.tensor([True, False]), torch.float32)
    ('rounding in float32 limits the ends of 1 of 2 maps: use float64 inputs',)
    """
    if not bool(limited.any()):
        return ()
    advice = "use float64 inputs" if dtype == torch.float32 else "ask for a larger rtol, or centre and scale the input"
    where = f"{int(limited.sum())} of {limited.numel()} maps" if limited.numel() > 1 else "this map"
    return (f"rounding in {str(dtype).removeprefix('torch.')} limits the ends of {where}: {advice}",)


def _plain(x: Tensor | None) -> Any:
    if x is None:
        return None
    if x.ndim:
        return [_plain(entry) for entry in x]
    return float(x) if math.isfinite(x) else None
