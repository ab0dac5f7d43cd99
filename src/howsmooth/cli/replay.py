"""A witness knows the map it belongs to: what is written beside it, and how the map is found again."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from howsmooth.attention import AttentionMap
from howsmooth.cli.sources import Request, Settings, Site, mask_name, positions_name
from howsmooth.errors import InvalidInput
from howsmooth.worstcase.leading import evaluate
from howsmooth.worstcase.one_head import one_head
from howsmooth.worstcase.witness import Witness

_ACCURACY = 1e-3
"""Of a measurement, by which it may lie below what an unfinished search knew."""
_SAME = 1e-9
"""Relative difference that rounding can make between two machines, far below what other weights make."""
_OF_THE_MAP = ("source", "prefix", "layer", "seed")


def remember(request: Request, settings: Settings, attention: AttentionMap) -> dict[str, Any]:
    """What a witness file says about its map: the options that name it, and the hash of its weights."""
    said = {name: getattr(request, name) for name in _OF_THE_MAP} | vars(settings) | {"length": None}
    return {name: value for name, value in said.items() if value is not None} | {"sha256": map_sha256(attention)}


def map_sha256(attention: AttentionMap) -> str:
    """A hash of all weights with names, dtypes and shapes, and of the mask and positions.

    >>> import howsmooth as hs
    >>> plain, causal = hs.SelfAttention.random(4), hs.SelfAttention.random(4, mask="causal")
    >>> map_sha256(plain) == map_sha256(hs.SelfAttention.random(4)), map_sha256(plain) == map_sha256(causal)
    (True, False)
    """
    said = (str(attention), attention.kind, attention.softcap, mask_name(attention), positions_name(attention))
    digest = hashlib.sha256(repr(said).encode())
    for name, tensor in sorted(attention.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Replay:
    """A stored witness and the map it was found for.

    Attributes:
        file: where it is stored.
        witness: as stored.
        site: its map and its tokens.
        again: the norm of the Jacobian there, measured now in the same way.
    """

    file: Path
    witness: Witness
    site: Site
    again: float

    @classmethod
    def open(cls, file: Path, request: Request, settings: Settings) -> Replay:
        """The witness of a file, with the map that the command names, or else the one that the file names.

        Refuses a map with other weights than those the witness was found for.
        """
        if request.input is not None or request.text is not None or settings.length is not None:
            raise InvalidInput("--witness holds the tokens: leave out --input, --text and --length.")
        witness = Witness.load(file)
        named = (request, settings) != (Request(), Settings())
        if not named and not witness.source:
            raise InvalidInput(f"{file} does not say which map it belongs to: name the weights before --witness.")
        if not named:
            request, settings = _recalled(witness.source, file)
        short = None if request.names_model else 1
        site = request.open(replace(settings, length=short))
        stored = witness.source.get("sha256")
        if stored is not None and map_sha256(site.attention) != stored:
            raise InvalidInput(
                f"{file} was found for other weights, masks or positions than those of {site.source}: name the map it "
                "belongs to, with the options it had."
            )
        if witness.x.shape[-1] != site.attention.in_features:
            raise InvalidInput(
                f"{file} holds tokens of width {witness.x.shape[-1]}, but {site.source} takes "
                f"{site.attention.in_features}: name the map it belongs to."
            )
        alone = site.attention if witness.head is None else one_head(site.attention, witness.head)
        again = float(evaluate(alone, witness.x, witness.norm))
        same = math.isclose(again, witness.value, rel_tol=_SAME)
        if not same and not (_unfinished(witness) and again > witness.value * (1 - _ACCURACY)):
            raise InvalidInput(
                f"{file} says {witness.value:.9g}, but {site.source} gives {again:.9g} at its input: name the map it "
                "belongs to, with the options it had."
            )
        return cls(file, witness, replace(site, x=witness.x, tokens=f"the witness {file}", drawn=False), again)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python for JSON."""
        norm = "inf" if math.isinf(self.witness.norm) else 2
        kept = {"file": str(self.file), "norm": norm, "head": self.witness.head, "over": self.witness.over}
        return kept | {"stored": self.witness.value, "value": self.again}

    def in_words(self) -> str:
        """What was stored and what was found again, in one line."""
        which = "the block" if self.witness.head is None else f"head {self.witness.head}"
        stored = f"{self.witness.value:.9g}"
        how = (
            f"at least {stored}, which the search knew"
            if _unfinished(self.witness)
            else f"the same as stored ({stored})"
        )
        return f"witness: {self.again:.9g} for {which}, {how}"


def _unfinished(witness: Witness) -> bool:
    """Whether the search was killed, or interrupted twice: its value is then the lower bound it had until then."""
    return not bool(witness.measurement.converged.all())


def _recalled(source: dict[str, Any], file: Path) -> tuple[Request, Settings]:
    """The options that were written beside the witness."""
    known = {field.name for field in fields(Settings)}
    request = {name: source[name] for name in _OF_THE_MAP if name in source}
    settings = {name: value for name, value in source.items() if name in known}
    unknown = set(source) - set(request) - set(settings) - {"sha256"}
    if unknown or "source" not in request:
        raise InvalidInput(f"{file} names its map in a way that is not known here: name the weights before --witness.")
    return Request(**request), Settings(**settings)
