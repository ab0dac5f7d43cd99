"""Witness files name their map: the entry in the file, and the way back to the map."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from howsmooth._util.annotations import fits
from howsmooth._util.common import digest, printable
from howsmooth._util.validation import check_count, check_seed
from howsmooth.attention import AttentionMap
from howsmooth.cli.source_options import MapAtTokens, MapOptions, mask_name, positions_name, random_options
from howsmooth.errors import InvalidInput
from howsmooth.search.initial_vectors import norm_at
from howsmooth.search.witness import Witness

_ACCURACY = 1e-3
"""Of a measurement, by which it may lie below what an unfinished search knew."""
_SAME = 1e-9
"""Relative difference that rounding can make between two machines, far below what other weights make."""
_OF_THE_INPUT = ("text", "input", "input_name", "length")
"""Options that do not name a map."""


def map_entry(options: MapOptions, attention: AttentionMap) -> dict[str, Any]:
    """The entry of a witness file about its map: the options that name it, and the hash of its weights."""
    if options.names_model:
        options = replace(options, layer=options.layer or 0)
    named = {name: value for name, value in vars(options).items() if value is not None and name not in _OF_THE_INPUT}
    return named | {"sha256": map_sha256(attention)}


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
    def open(cls, file: Path, options: MapOptions) -> Replay:
        """The witness of a file, with the map that the command names.

        A file may come from anywhere, so that it opens nothing by itself: a model, a folder or a weights file must be
        named by the command too. Random weights are drawn as the file states. When both name the same SOURCE and the
        command has no other option, the options are those of the file. Refuses a map with other weights than those
        of the witness.
        """
        if any(getattr(options, name) is not None for name in ("input", "text", "length")):
            raise InvalidInput("--witness holds the tokens: leave out --input, --text and --length.")
        witness = Witness.load(file)
        recalled = _stored_options(witness.source, file) if witness.source else None
        options = _chosen(options, recalled, witness, file)
        site = replace(options, length=None if options.names_model else "1").open()
        moved = None if recalled is None or recalled.source == options.source else printable(recalled.source)
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


def _chosen(options: MapOptions, recalled: MapOptions | None, witness: Witness, file: Path) -> MapOptions:
    """The map to open: that of the command; that of the file if the command confirms it or nothing is opened."""
    if options != MapOptions():
        only_named = options == MapOptions(options.source)
        return recalled if recalled is not None and only_named and recalled.source == options.source else options
    if recalled is None:
        raise InvalidInput(f"{file} does not say which map it belongs to: name the weights before --witness.")
    drawn = random_options(recalled)
    if drawn is None:
        name = printable(recalled.source)
        raise InvalidInput(
            f"{file} names {name} as its map, and a file alone opens nothing: name it yourself, "
            f"as in howsmooth measure {name} --witness {file}."
        )
    if drawn.width != witness.x.shape[-1]:
        raise InvalidInput(f"{file} names a map of width {drawn.width} for tokens of width {witness.x.shape[-1]}.")
    return recalled


def _stored_options(source: dict[str, Any], file: Path) -> MapOptions:
    """The options that were written beside the witness, each of its kind."""
    kinds = {name: kind for name, kind in get_type_hints(MapOptions).items() if name not in _OF_THE_INPUT}
    named = {name: value for name, value in source.items() if name != "sha256"}
    known = all(name in kinds and fits(value, kinds[name]) for name, value in named.items())
    if not known or "source" not in source or not isinstance(source.get("sha256", ""), str):
        raise InvalidInput(f"{file} names its map in a way that is not known here: name the weights before --witness.")
    check_seed(named.get("seed", 0))
    for name in ("width", "heads", "kv_heads", "window"):
        if name in named:
            check_count(named[name], name)
    return MapOptions(**named)
