"""The file of a witness: tensors and a JSON text under one seal, and what each of them must be.

A file comes from anywhere. What it says is checked for its kind and its range before it becomes a `Witness`, so that
nothing behind it meets a text where a number should be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from howsmooth._util.checksummed import Damaged, checksummed_bytes, read_checksummed, read_json
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.validation import check_count, check_fields, check_finite, check_number, check_one_of, check_tensor
from howsmooth.errors import InvalidInput
from howsmooth.norms import Measurement

FORMAT, _FIRST_FORMAT = "howsmooth witness 2", "howsmooth witness 1"
"""The first format had no seal."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32)}
_TENSORS = {"x", "history", "ids", "left", "right"}
_STORY = {"value", "head", "over", "start", "seed", "steps", "seconds", "stopped", "source", "norm", "measurement"}
_MEASUREMENT = {"norm", "value", "lower", "upper", "confidence", "converged", "products", "method", "dtype", "seconds"}
_MEASUREMENT |= {"values", "residuals", "notes"}
_HOLDS = {"lower_holds", "upper_holds"}
"""The guarantees of the ends; where they are missing, rounding counts as measured."""
_GUARANTEES = {each.name.lower(): each for each in Guarantee}
_Witness = TypeVar("_Witness")


def content(tensors: Mapping[str, Tensor | None], story: Mapping[str, Any]) -> bytes:
    """A file of the tensors that are there and the story that goes with them."""
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return checksummed_bytes(kept, {"format": FORMAT, "witness": plain_json(story, "the witness")})


def plain_json(value: Mapping[str, Any], name: str) -> str:
    """JSON of plain Python; `InvalidInput` for anything else."""
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} must be made of words, finite numbers, lists and dictionaries ({error}).") from None


def read(path: Path, make: Callable[..., _Witness]) -> _Witness:
    """The `Witness` of a file, made of its content; one clear error for anything but a file that `content` made."""
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}: check the path.")
    try:
        tensors, texts, has_checksum = read_checksummed(path)
    except Damaged as error:
        raise InvalidInput(f"{path.name} cannot be read: it is damaged, or no safetensors file.") from error
    if texts.get("format") != (FORMAT if has_checksum else _FIRST_FORMAT) or "x" not in tensors:
        raise InvalidInput(f"{path.name} is no witness: give a file that hs.worst_case or Witness.save wrote.")
    try:
        story = read_json(texts.get("witness", ""))
        _same_names(tensors.keys() | {"ids", "left", "right"}, _TENSORS)
        _same_names(story.keys(), _STORY)
        _check_tensors(tensors)
        norm = _norm(story.pop("norm"))
        measurement = _measurement(story.pop("measurement"), norm, tensors)
        arrays = {"x": tensors["x"], "history": tensors["history"].tolist(), "ids": tensors.get("ids")}
        witness = make(**arrays, norm=norm, measurement=measurement, **story)
        check_fields(witness)
    except (Damaged, InvalidInput) as error:
        why = str(error).rstrip(".")
        raise InvalidInput(f"{path.name} is a witness of another version, or was changed by hand ({why}).") from error
    return witness


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    x = check_tensor(tensors["x"], "x", dims=(2,))
    for name in ("x", "left", "right"):
        if name in tensors:
            check_finite(check_tensor(tensors[name], name), name)
    history = tensors["history"]
    if history.dim() != 1 or history.dtype != torch.float64 or bool(history.isnan().any()):
        raise InvalidInput("history is no list of numbers")
    ids = tensors.get("ids")
    if ids is not None and (ids.dtype != torch.int64 or ids.shape != x.shape[:1] or bool((ids < 0).any())):
        raise InvalidInput("ids are not the tokens of x")


def _measurement(plain: Any, norm: float, tensors: Mapping[str, Tensor]) -> Measurement:
    _same_names(set(plain if isinstance(plain, dict) else ()) - _HOLDS, _MEASUREMENT)
    if _norm(plain["norm"]) != norm:
        raise InvalidInput("the measurement is of another norm")
    value, lower = (_tensor(plain[name], name) for name in ("value", "lower"))
    upper = torch.tensor(math.inf, dtype=torch.float64) if plain["upper"] is None else _tensor(plain["upper"], "upper")
    values, residuals = (
        None if plain[name] is None else torch.stack([_tensor(v, name) for v in _list(plain[name], name)])
        for name in ("values", "residuals")
    )
    if not bool(lower <= upper):
        raise InvalidInput("lower is above upper")
    if not isinstance(plain["converged"], bool) or not isinstance(plain["method"], str):
        raise InvalidInput("converged and method are of another kind")
    if not 0 <= check_number(plain["confidence"], "confidence") <= 1:
        raise InvalidInput("confidence is no probability")
    if not all(isinstance(note, str) for note in _list(plain["notes"], "notes")):
        raise InvalidInput("notes are words")
    return Measurement(
        value=value,
        lower=lower,
        upper=upper,
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
        notes=tuple(plain["notes"]),
        rounding=_GUARANTEES[check_one_of(plain.get("lower_holds", "measured"), _GUARANTEES, "lower_holds")],
    )


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
