"""Sets of inputs as texts, for the command line: ``point``, ``around:0.01``, ``around:1%``, ``ball:2``, ``norm``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from howsmooth._util.validation import shown, validated
from howsmooth.errors import InvalidInput
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.input_sets import Ball, InputSet, Normalised, Sphere
from howsmooth.sets.near_sets import Around, Point

Form = Literal["point", "around", "together", "ball", "sphere", "norm", "rms"]
_SIZED = ("around", "together", "ball", "sphere")
_NEAR = ("point", "around", "together")
_EXAMPLES = "point, around:0.01, around:1%, together:0.01, ball:2, sphere:2 or norm"


@dataclass(frozen=True)
class SetText:
    """A set of inputs as a text names it; `sets` makes it once the input and the normalisation are known.

    Sizes are absolute, unless they end in %: a share of the mean norm of the tokens of the input.

    - ``point``: the input. ``around:0.01``: every token within 0.01 of its own. ``together:0.01``: all tokens together,
      in the Frobenius norm.
    - ``ball:2`` and ``sphere:2``: every token in the ball, or on the sphere, of that radius around the origin.
    - ``norm``: the image of the normalisation before the map. ``norm:h.0.ln_1``: of the LayerNorm of that name,
      ``rms:h.0.ln_1``: of the RMSNorm.

    Several sizes between commas are several sets: ``ball:1,2,5``.

    Attributes:
        form: the word before the colon.
        sizes: the numbers, rising; shares as numbers between 0 and 1.
        share: whether sizes are shares of the mean token norm.
        name: of the normalisation.

    >>> [print(region) for region in SetText.parse("ball:2,1").sets()]
    |x| ≤ 1
    |x| ≤ 2
    [None, None]
    >>> SetText.parse("ball")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: 'ball' names no set: write for example point, around:0.01, ..., sphere:2 or norm.
    """

    form: Form
    sizes: tuple[float, ...] = ()
    share: bool = False
    name: str | None = None

    @classmethod
    @validated
    def parse(cls, text: str) -> SetText:
        """Read a text; one sentence with examples for a text that names no set."""
        form, colon, rest = text.strip().partition(":")
        if form in ("norm", "rms") and (rest or not colon) and (form == "norm" or rest):
            return cls(form, name=rest or None)  # type: ignore[arg-type]
        if form == "point" and not colon:
            return cls("point")
        shares = {part.strip().endswith("%") for part in rest.split(",")}
        sizes = numbers_in(rest.replace("%", ""))
        if form not in _SIZED or not all(size > 0 and math.isfinite(size) for size in sizes):
            raise InvalidInput(f"{shown(text)} names no set: write for example {_EXAMPLES}.")
        if len(shares) > 1 or (shares == {True} and form not in _NEAR):
            raise InvalidInput(
                f"{shown(text)} mixes units: sizes with % are shares of the mean token norm, and only of around and "
                "together, for example around:1%,5%."
            )
        share = shares == {True}
        return cls(form, tuple(size / 100 if share else size for size in sizes), share)  # type: ignore[arg-type]

    @property
    def near_input(self) -> bool:
        """Whether the set is about an input."""
        return self.form in _NEAR

    @validated
    def absolute(self, x: Tensor | None = None) -> tuple[float, ...]:
        """The sizes, shares multiplied by the mean token norm of x."""
        if not self.share:
            return self.sizes
        if x is None:
            raise InvalidInput("a size with % is a share of the mean token norm: give an input.")
        unit = float(x.double().norm(dim=-1).mean())
        return tuple(share * unit for share in self.sizes)

    @validated
    def sets(
        self, x: Tensor | None = None, norm: Ellipsoid | None = None, within: InputSet | None = None
    ) -> list[InputSet]:
        """The sets, smallest first.

        Args:
            x: the input that the set is about. norm: the image of the normalisation. within: as in `Around`.
        """
        if self.form in ("norm", "rms"):
            assert norm is not None
            return [Normalised(norm)]
        if self.form in ("ball", "sphere"):
            return [(Ball if self.form == "ball" else Sphere)(radius) for radius in self.sizes]
        if x is None:
            raise InvalidInput(f"the set {self.form} is about an input: give one.")
        if self.form == "point":
            return [Point(x, within=within)]
        return [Around(x, eps, self.form == "around", within=within) for eps in self.absolute(x)]


def numbers_in(text: str) -> list[float]:
    """Numbers between commas in rising order; NaN alone for a text that is no such list.

    >>> numbers_in("2, 0.5"), numbers_in("2,x")
    ([0.5, 2.0], [nan])
    """
    try:
        return sorted({float(number) for number in text.split(",")})
    except ValueError:
        return [math.nan]
