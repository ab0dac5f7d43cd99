"""How a scan is asked for in a few characters: ``0,2-4``, ``8,16,…,512`` and ``head[layers=0-5,heads=3]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from howsmooth.checks import shown
from howsmooth.errors import InvalidInput

WHATS = ("head", "attention", "residual", "mlp", "layer", "prefix", "model", "logits")
"""What can be measured: every head, and the targets of `howsmooth.models.target`."""
_PLURALS = {"heads": "head", "layers": "layer", "prefixes": "prefix", "mlps": "mlp", "block": "attention"}
_PARAMETERS = ("layers", "heads", "lengths")
_DOTS = ("…", "...")
_NUMBER = "[0-9]{1,12}"
_LARGEST = 10**12
_MOST = 100_000
"""More layers, heads or lengths than anything has: a range is not written out further."""
Numbers = str | int | Iterable[int]


@dataclass(frozen=True)
class Selection:
    """One kind of map and where to measure it; None means everywhere."""

    what: str
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None


def parse_numbers(text: Numbers, name: str = "layers") -> tuple[int, ...]:
    """Numbers from 0 and ranges with both ends, in rising order.

    >>> parse_numbers("0,2-4"), parse_numbers([3, 1])
    ((0, 2, 3, 4), (1, 3))
    """
    wrong = InvalidInput(f"{name} are numbers and rising ranges such as 0,2-4, got {shown(text)}.")
    if not isinstance(text, str):
        numbers = _whole_numbers(text)
        if not numbers:
            raise wrong
        return tuple(sorted(set(numbers)))
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(rf"\s*({_NUMBER})\s*(?:-\s*({_NUMBER})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise wrong
        if last > _MOST:
            raise InvalidInput(f"no model has {name} up to {last}: name those that are there, for example 0,2-4.")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def parse_lengths(text: Numbers) -> tuple[int, ...]:
    """Numbers of tokens; dots continue by doubling up to the number that follows.

    >>> parse_lengths("8,16,…,128"), parse_lengths([100, 50])
    ((8, 16, 32, 64, 128), (50, 100))
    """
    wrong = InvalidInput(f"lengths are numbers of tokens such as 64,128 or 8,16,…,512, got {shown(text)}.")
    if not isinstance(text, str):
        numbers = _whole_numbers(text)
        if not numbers or min(numbers) < 1:
            raise wrong
        return tuple(sorted(set(numbers)))
    parts = [part.strip() for part in text.split(",")]
    found: list[int] = []
    for place, part in enumerate(parts):
        if part in _DOTS and found and re.fullmatch(_NUMBER, "".join(parts[place + 1 : place + 2])):
            end = int(parts[place + 1])
            while 2 * found[-1] < end:
                found.append(2 * found[-1])
            if 2 * found[-1] != end:
                raise InvalidInput(f"doubling does not lead to {end} in {shown(text)}: write for example 8,16,…,512.")
        elif re.fullmatch(_NUMBER, part) and int(part) >= 1:
            found.append(int(part))
        else:
            raise wrong
    return tuple(sorted(set(found)))


def _whole_numbers(given: object) -> list[int] | None:
    """A number, or several, as a list; None for anything else."""
    several = given if isinstance(given, Iterable) else [given]
    found = list(islice(several, _MOST))
    return (
        found if all(isinstance(one, int) and not isinstance(one, bool) and one <= _LARGEST for one in found) else None
    )


def parse_what(text: str | Sequence[str]) -> tuple[Selection, ...]:
    """Kinds of maps, each with an optional choice in brackets.

    >>> parse_what("heads[layers=0-2,5,heads=3], layer")
    (Selection(what='head', layers=(0, 1, 2, 5), heads=(3,), lengths=None), Selection(what='layer', ...))
    """
    if not isinstance(text, str) and not (isinstance(text, Sequence) and all(isinstance(one, str) for one in text)):
        raise InvalidInput(f"what to measure is a text such as head,layer or a list of texts, got {shown(text)}.")
    whole = text if isinstance(text, str) else ",".join(text)
    found = []
    for part in (piece.strip() for piece in re.split(r",(?![^\[]*\])", whole)):
        match = re.fullmatch(r"([\w-]+)\s*(?:\[(.*)\])?", part)
        name = _PLURALS.get(match[1], match[1]) if match else ""
        if match is None or name not in WHATS:
            raise InvalidInput(
                f"{shown(part)} cannot be measured: choose from {', '.join(WHATS)}, with a choice in brackets if you "
                "like, for example head[layers=0-5,heads=3]."
            )
        found.append(Selection(name, **_choices(match[2] or "", part)))
    return tuple(dict.fromkeys(found))


def _choices(text: str, whole: str) -> dict[str, tuple[int, ...]]:
    """``layers=0-2,5,heads=3`` by name; a part without a name belongs to the name before it."""
    given: dict[str, list[str]] = {}
    name = ""
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if "=" in part:
            name, _, part = (piece.strip() for piece in part.partition("="))
        if name not in _PARAMETERS:
            raise InvalidInput(
                f"{shown(whole)}: brackets choose {', '.join(_PARAMETERS)}, for example [layers=0-5,heads=3]."
            )
        given.setdefault(name, []).append(part)
    return {
        name: parse_lengths(",".join(parts)) if name == "lengths" else parse_numbers(",".join(parts), name)
        for name, parts in given.items()
    }
