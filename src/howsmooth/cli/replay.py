"""Witness files name their map: the entry in the file, and the way back to the map."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from howsmooth._util.common import digest, printable
from howsmooth._util.validation import check_count, check_seed, fits
from howsmooth.attention import AttentionMap
from howsmooth.cli.source_options import (
    AttentionOptions,
    MapAtTokens,
    Request,
    mask_name,
    positions_name,
    random_settings,
)
from howsmooth.errors import InvalidInput
from howsmooth.search.ascent import norm_at
from howsmooth.search.witness import Witness

_ACCURACY = 1e-3
"""Of a measurement, by which it may lie below what an unfinished search knew."""
_SAME = 1e-9
"""Relative difference that rounding can make between two machines, far below what other weights make."""
_OF_THE_MAP = ("source", "prefix", "layer", "seed")


def remember(request: Request, settings: AttentionOptions, attention: AttentionMap) -> dict[str, Any]:
    """The entry of a witness file about its map: the options that name it, and the hash of its weights."""
    options = {name: getattr(request, name) for name in _OF_THE_MAP} | vars(settings) | {"length": None}
    if request.names_model:
        options["layer"] = request.layer or 0
    return {name: value for name, value in options.items() if value is not None} | {"sha256": map_sha256(attention)}


def map_sha256(attention: AttentionMap) -> str:
    """A hash of all weights with names, dtypes and shapes, and of the mask and positions.

    >>> import howsmooth as hs
    >>> plain, causal = hs.SelfAttention.random(4), hs.SelfAttention.random(4, mask="causal")
    >>> map_sha256(plain) == map_sha256(hs.SelfAttention.random(4)), map_sha256(plain) == map_sha256(causal)
    (True, False)
    """
    facts = (str(attention), attention.kind, attention.softcap, mask_name(attention), positions_name(attention))
    return digest(attention.state_dict(), repr(facts).encode())


@dataclass(frozen=True)
class Replay:
    """A stored witness and the map it was found for.

    Attributes:
        file: where it is stored.
        witness: as stored.
        site: its map and its tokens.
        again: the norm of the Jacobian there, measured now in the same way.
        moved: the SOURCE that the file names, where the command names another one.
    """

    file: Path
    witness: Witness
    site: MapAtTokens
    again: float
    moved: str | None = None

    @classmethod
    def open(cls, file: Path, request: Request, settings: AttentionOptions) -> Replay:
        """The witness of a file, with the map that the command names.

        A file may come from anywhere, so that it opens nothing by itself: a model, a folder or a weights file must be
        named by the command too. Random weights are drawn as the file states. When both name the same SOURCE and the
        command has no other option, the options are those of the file. Refuses a map with other weights than those
        of the witness.
        """
        if request.input is not None or request.text is not None or settings.length is not None:
            raise InvalidInput("--witness holds the tokens: leave out --input, --text and --length.")
        witness = Witness.load(file)
        recalled = _recalled(witness.source, file) if witness.source else None
        request, settings = _chosen(request, settings, recalled, witness, file)
        short = None if request.names_model else "1"
        site = request.open(replace(settings, length=short))
        moved = None if recalled is None or recalled[0].source == request.source else printable(recalled[0].source)
        stored = witness.source.get("sha256")
        if stored is not None and map_sha256(site.attention) != stored:
            other = "" if moved is None else f" (it names {moved})"
            raise InvalidInput(
                f"{file} was found for other weights, masks or positions than those of {site.source}{other}: name the "
                "map it belongs to, with the options it had."
            )
        if witness.x.shape[-1] != site.attention.in_features:
            raise InvalidInput(
                f"{file} holds tokens of width {witness.x.shape[-1]}, but {site.source} takes "
                f"{site.attention.in_features}: name the map it belongs to."
            )
        alone = site.attention if witness.head is None else site.attention.head(witness.head)
        again = float(norm_at(alone, witness.x, witness.norm))
        same = math.isclose(again, witness.value, rel_tol=_SAME)
        if not same and not (_unfinished(witness) and again > witness.value * (1 - _ACCURACY)):
            raise InvalidInput(
                f"{file} says {witness.value:.9g}, but {site.source} gives {again:.9g} at its input: name the map it "
                "belongs to, with the options it had."
            )
        return cls(file, witness, replace(site, x=witness.x, tokens=f"the witness {file}"), again, moved)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python for JSON."""
        norm = "inf" if math.isinf(self.witness.norm) else 2
        facts = {"file": self.file, "norm": norm, "head": self.witness.head, "over": self.witness.over}
        return facts | {"stored": self.witness.value, "value": self.again}

    def in_words(self) -> str:
        """The stored and the new value in one line."""
        which = "the block" if self.witness.head is None else f"head {self.witness.head}"
        same, more = "the same as stored ({:.9g})", "at least {:.9g}, which the search knew"
        how = (more if _unfinished(self.witness) else same).format(self.witness.value)
        other = "" if self.moved is None else f"; the file names {self.moved}, of the same weights"
        return f"witness: {self.again:.9g} for {which}, {how}{other}"


def _unfinished(witness: Witness) -> bool:
    """Whether the search was killed, or interrupted twice: its value is then the lower bound it had until then."""
    return not bool(witness.measurement.converged.all())


def _chosen(
    request: Request,
    settings: AttentionOptions,
    recalled: tuple[Request, AttentionOptions] | None,
    witness: Witness,
    file: Path,
) -> tuple[Request, AttentionOptions]:
    """The map to open: that of the command; that of the file if the command confirms it or nothing is opened."""
    named = (request, settings) != (Request(), AttentionOptions())
    if recalled is None:
        if not named:
            raise InvalidInput(f"{file} does not say which map it belongs to: name the weights before --witness.")
        return request, settings
    if not named:
        drawn = random_settings(recalled[0].source, recalled[1])
        if drawn is None:
            name = printable(recalled[0].source)
            raise InvalidInput(
                f"{file} names {name} as its map, and a file alone opens nothing: name it yourself, "
                f"as in howsmooth measure {name} --witness {file}."
            )
        if drawn.width != witness.x.shape[-1]:
            raise InvalidInput(f"{file} names a map of width {drawn.width} for tokens of width {witness.x.shape[-1]}.")
        return recalled
    only_named = (request, settings) == (Request(source=request.source), AttentionOptions())
    return recalled if only_named and recalled[0].source == request.source else (request, settings)


def _recalled(source: dict[str, Any], file: Path) -> tuple[Request, AttentionOptions]:
    """The options that were written beside the witness, each of its kind."""
    kinds = get_type_hints(AttentionOptions) | {"source": str, "prefix": str, "layer": int, "seed": int}
    known = all(name in kinds and fits(value, kinds[name]) for name, value in source.items() if name != "sha256")
    if not known or "source" not in source or not isinstance(source.get("sha256", ""), str):
        raise InvalidInput(f"{file} names its map in a way that is not known here: name the weights before --witness.")
    request = {name: source[name] for name in _OF_THE_MAP if name in source}
    settings = {name: value for name, value in source.items() if name in kinds and name not in request}
    check_seed(request.get("seed", 0))
    for name in ("width", "heads", "kv_heads", "window"):
        if name in settings:
            check_count(settings[name], name)
    return Request(**request), AttentionOptions(**settings)
