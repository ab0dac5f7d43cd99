"""The result of a search: an input, its local Lipschitz constant, and the way it was found; and its file.

The file holds tensors and a JSON text under one checksum. It may come from anywhere: its content is checked for kind
and range before it becomes a `Witness`, so that no code behind it meets a text in the place of a number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR
from typing import Any, Literal

import torch
from torch import Tensor

from howsmooth._util.checksummed import Damaged, checksummed_bytes, read_checksummed, read_json
from howsmooth._util.common import rounded, write_whole
from howsmooth._util.display import card
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import (
    NotNegative,
    Size,
    check_count,
    check_fields,
    check_finite,
    check_number,
    check_one_of,
    check_path,
    check_tensor,
    validated,
)
from howsmooth.errors import InvalidInput
from howsmooth.norms import Measurement

FORMAT, _FIRST_FORMAT = "howsmooth witness 2", "howsmooth witness 1"
"""The first format had no checksum."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32)}
_TENSORS = {"x", "history", "ids", "left", "right"}
_STORY = {"value", "head", "over", "start", "seed", "steps", "seconds", "stopped", "source", "norm", "measurement"}
_MEASUREMENT = {"norm", "value", "lower", "upper", "confidence", "converged", "products", "method", "dtype", "seconds"}
_MEASUREMENT |= {"values", "residuals", "notes"}
_HOLDS = {"lower_holds", "upper_holds"}
"""The guarantees of the ends; where they are missing, rounding counts as measured."""
_GUARANTEES = {each.name.lower(): each for each in Guarantee}
Stopped = Literal["steps", "seconds", "interrupted", "settled", "running"]


@dataclass(frozen=True, eq=False)
class Witness:
    """An input on which a map is rough: the Lipschitz constant over the set is at least ``lower``.

    Attributes:
        x: the input, ``(n, d)``, float64.
        value: ‖J(x)‖, measured anew at x in float64.
        measurement: that measurement, with its singular vectors.
        norm: 2 or inf.
        head: which head of the map, or None for the whole of it.
        over: the set searched, as plain Python.
        start: the start that led here.
        history: the best value after each step.
        seed, steps, seconds: of the search; steps is how many were made.
        stopped: why it ended: "steps", "seconds", "interrupted", "settled", or "running" in a file that a search still
            writes to.
        ids: token ids, for sequences of embeddings.
        source: how the map was made, when the command line made it.
    """

    x: Tensor
    value: NotNegative
    measurement: Measurement
    norm: float
    head: Size | None
    over: dict[str, Any]
    start: str
    history: list[float]
    seed: int
    steps: Size
    seconds: NotNegative
    stopped: Stopped
    ids: Tensor | None = None
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def lower(self) -> float:
        """The lower end of the measurement at x, and so of the constant over the set."""
        return float(self.measurement.lower)

    @property
    def lower_holds(self) -> Guarantee:
        """The guarantee of the lower end."""
        return self.measurement.lower_holds

    def __repr__(self) -> str:
        n, d = self.x.shape
        norm = "‖J‖_∞" if self.norm == math.inf else "‖J‖₂"
        end = f"≥ {rounded(self.lower, ROUND_FLOOR)}, {self.lower_holds.words()}"
        return f"Witness({norm} = {self.value:.6g} ({end}) at {n} × {d}, from {self.start!r}, {self.steps} steps)"

    def _repr_html_(self) -> str:
        facts = [("over", str(self.over.get("set", "the set"))), ("from", self.start), ("ended by", self.stopped)]
        return card(
            repr(self), facts, ["The lower end holds for the Lipschitz constant over the set: this input attains it."]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, all of it or nothing.

        >>> import howsmooth as hs, tempfile
        >>> from howsmooth.search import worst_case
        >>> head = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))
        >>> witness = worst_case(head, 4, over=hs.sets.Ball(1.0), starts=1, steps=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     witness.save(folder + "/w.safetensors")
        ...     Witness.load(folder + "/w.safetensors").value == witness.value
        True
        """
        m = self.measurement
        history = torch.tensor(self.history, dtype=torch.float64)
        tensors = {"x": self.x, "history": history, "ids": self.ids, "left": m.left, "right": m.right}
        story = {name: getattr(self, name) for name in sorted(_STORY - {"norm", "measurement"})}
        story |= {
            "norm": "inf" if self.norm == math.inf else 2,
            "measurement": {name: value for name, value in m.to_dict().items() if name != "relative"},
        }
        texts = {"format": FORMAT, "witness": plain_json(story, "the witness")}
        there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        write_whole(check_path(path, "path"), checksummed_bytes(there, texts))

    @classmethod
    @validated
    def load(cls, path: str | os.PathLike[str]) -> Witness:
        """Read a file that `save` wrote; one clear error for anything else."""
        file = check_path(path, "path")
        if not file.is_file():
            raise InvalidInput(f"there is no file {file}: check the path.")
        try:
            tensors, texts, has_checksum = read_checksummed(file)
        except Damaged as error:
            raise InvalidInput(f"{file.name} cannot be read: it is damaged, or no safetensors file.") from error
        if texts.get("format") != (FORMAT if has_checksum else _FIRST_FORMAT) or "x" not in tensors:
            raise InvalidInput(f"{file.name} is no witness: give a file that hs.worst_case or Witness.save wrote.")
        try:
            story = read_json(texts.get("witness", ""))
            _same_names(tensors.keys() | {"ids", "left", "right"}, _TENSORS)
            _same_names(story.keys(), _STORY)
            _check_tensors(tensors)
            norm = _norm(story.pop("norm"))
            measurement = _measurement(story.pop("measurement"), norm, tensors)
            history, ids = tensors["history"].tolist(), tensors.get("ids")
            witness = cls(x=tensors["x"], history=history, ids=ids, norm=norm, measurement=measurement, **story)
            check_fields(witness)
        except (Damaged, InvalidInput) as error:
            why = str(error).rstrip(".")
            raise InvalidInput(
                f"{file.name} is a witness of another version, or was changed by hand ({why})."
            ) from error
        return witness


def plain_json(value: Mapping[str, Any], name: str) -> str:
    """JSON of plain Python; `InvalidInput` for anything else."""
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} must be made of words, finite numbers, lists and dictionaries ({error}).") from None


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    x = check_tensor(tensors["x"], "x", dims=(2,))
    for name in ("x", "left", "right"):
        if name in tensors:
            check_finite(check_tensor(tensors[name], name), name)
    history = tensors["history"]
    if history.dim() != 1 or history.dtype != torch.float64 or history.isnan().any():
        raise InvalidInput("history is no list of numbers")
    ids = tensors.get("ids")
    if ids is not None and (ids.dtype != torch.int64 or ids.shape != x.shape[:1] or (ids < 0).any()):
        raise InvalidInput("ids are not the tokens of x")


def _measurement(plain: Any, norm: float, tensors: Mapping[str, Tensor]) -> Measurement:
    _same_names(set(plain if isinstance(plain, dict) else ()) - _HOLDS, _MEASUREMENT)
    if _norm(plain["norm"]) != norm:
        raise InvalidInput("the measurement is of another norm")
    upper = plain["upper"]
    values, residuals = (
        None if plain[name] is None else torch.stack([_tensor(v, name) for v in _list(plain[name], name)])
        for name in ("values", "residuals")
    )
    if not isinstance(plain["converged"], bool):
        raise InvalidInput("converged is of another kind")
    if not 0 <= check_number(plain["confidence"], "confidence") <= 1:
        raise InvalidInput("confidence is no probability")
    measurement = Measurement(
        value=_tensor(plain["value"], "value"),
        lower=_tensor(plain["lower"], "lower"),
        upper=torch.tensor(math.inf, dtype=torch.float64) if upper is None else _tensor(upper, "upper"),
        confidence=plain["confidence"],
        norm=norm,
        converged=torch.tensor(plain["converged"]),
        products=check_count(plain["products"], "products", least=0),
        method=plain["method"],
        dtype=_DTYPES[check_one_of(plain["dtype"], _DTYPES, "dtype")],
        seconds=check_number(plain["seconds"], "seconds", least=0),
        left=tensors.get("left"),
        right=tensors.get("right"),
        values=values,
        residuals=residuals,
        notes=tuple(_list(plain["notes"], "notes")),
        rounding=_GUARANTEES[check_one_of(plain.get("lower_holds", "measured"), _GUARANTEES, "lower_holds")],
    )
    check_fields(measurement)
    return measurement


def _same_names(given: Any, wanted: set[str]) -> None:
    if set(given) != wanted:
        raise InvalidInput(f"names differ: {', '.join(sorted(map(repr, set(given) ^ wanted)))}")


def _norm(value: object) -> float:
    return math.inf if check_one_of(value, (2, "inf"), "norm") == "inf" else 2


def _tensor(value: object, name: str) -> Tensor:
    return torch.tensor(check_number(value, name, least=0), dtype=torch.float64)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or (not value and name != "notes"):
        raise InvalidInput(f"{name} is no list")
    return value
