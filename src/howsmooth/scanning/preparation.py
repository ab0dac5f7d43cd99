"""From what is asked to what is measured: the model open, windows cut, every batch listed, and the key of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets, Window, held_model, open_model
from howsmooth.models.input_files import file_named, read_input
from howsmooth.scanning.grammar import Numbers as Places
from howsmooth.scanning.grammar import Selection, parse_lengths, parse_numbers, parse_what
from howsmooth.scanning.memory import check_fits, fitting
from howsmooth.scanning.plan import Batch, Settings, make_plan
from howsmooth.scanning.store import Identity
from howsmooth.small import first_line


@dataclass(frozen=True)
class Prepared:
    """A scan before its first number.

    Attributes:
        model, settings: what is measured, and how.
        plan: every batch.
        cut: length → the windows of the text.
        at_hand: (length, window) → what the model did there, of those that it has read.
        identity: the key of a store.
        said: notes on what was asked.
    """

    model: OpenModel
    settings: Settings
    plan: list[Batch]
    cut: dict[int, list[Window]]
    at_hand: dict[tuple[int, int], Targets]
    identity: Identity
    said: tuple[str, ...]


def prepare(
    model: Any,
    text: str | Path | None,
    lengths: Places | None,
    layers: Places | None,
    what: str | Sequence[str],
    settings: Settings,
    *,
    tokenizer: Any = None,
    device: str | None = None,
) -> Prepared:
    """Open the model and cut the text; arguments as of `howsmooth.scan`."""
    selections = parse_what(what)
    some = None if layers is None else parse_numbers(layers)
    common = None if lengths is None else parse_lengths(lengths)
    model = _opened(model, tokenizer, device, head=any(selection.what == "logits" for selection in selections))
    text, said = file_named(text)
    name, content, digest = read_input(text, model.modality)
    common = common or (model.usual_length(content),)
    needed = sorted({length for selection in selections for length in selection.lengths or common})
    cut = {length: model.windows(content, length, settings.windows, settings.seed) for length in needed}
    for length in needed:
        check_fits(model, length)
    with fitting(needed[0]):
        first = Targets(model, cut[needed[0]][0])
        heads = _heads(first, selections)
    plan = make_plan(selections, common, settings.windows, heads, some)
    identity = Identity(
        model=_storable(model.name),
        model_sha256=model.sha256,
        precision=model.precision,
        text=_storable(name),
        text_sha256=digest,
        settings=settings,
        howsmooth=version("howsmooth"),
    )
    return Prepared(model, settings, plan, cut, {(needed[0], 0): first}, identity, tuple(said))


def _opened(model: Any, tokenizer: Any, device: str | None, head: bool) -> OpenModel:
    """What is to be scanned, from wherever it comes."""
    if not isinstance(model, str | Path | OpenModel):
        return held_model(model, tokenizer, head=head, device=device)
    if tokenizer is not None:
        raise InvalidInput("a tokenizer goes with a model in memory: one that is opened by name brings its own.")
    ready = model if isinstance(model, OpenModel) else open_model(str(model), head=head)
    if device is not None:
        try:
            nn.Module.to(ready.model, device)
        except (RuntimeError, AssertionError) as error:
            raise InvalidInput(f"the device {device!r} cannot be used: {first_line(error)}.") from error
    return ready


def _storable(name: str) -> str:
    """A name to show: of a file name that is not UTF-8, which SQLite does not take, the wrong bytes become �."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _heads(targets: Targets, selections: Sequence[Selection]) -> list[int]:
    """How many heads each layer has; none where they are not asked for, so that any attention will do."""
    if any(selection.what == "head" for selection in selections):
        return [site.attention.heads for site in targets.sites]
    return [0] * targets.layers
