"""From what is asked to what is measured: the model open, windows cut, every batch listed, and the key of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from howsmooth._util.validation import Device
from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets, Window, open_model
from howsmooth.models.in_memory import model_in_memory
from howsmooth.models.input_files import file_named, joined_texts, read_input
from howsmooth.models.open_source import DeviceMap, Dtype
from howsmooth.scans.memory_checks import check_fits, fitting
from howsmooth.scans.plan import OF_SOFTMAX, Batch, Settings, make_plan
from howsmooth.scans.scan_grammar import Numbers as Places
from howsmooth.scans.scan_grammar import Selection, parse_lengths, parse_numbers, parse_what
from howsmooth.scans.scan_store import Identity


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
    text: Any,
    lengths: Places | None,
    layers: Places | None,
    what: str | Sequence[str],
    settings: Settings,
    *,
    tokenizer: Any = None,
    device: Device | None = None,
    dtype: Dtype | None = None,
    device_map: DeviceMap | None = None,
    column: str | None = None,
) -> Prepared:
    """Open the model and cut the text; arguments as of `howsmooth.scan`."""
    selections = parse_what(what)
    some = None if layers is None else parse_numbers(layers)
    common = None if lengths is None else parse_lengths(lengths)
    head = any(selection.what == "logits" for selection in selections)
    model = _opened(model, tokenizer, device, dtype, device_map, head)
    called = None
    if text is not None and not isinstance(text, str | Path):
        called, text = joined_texts(text, column)
    elif column is not None:
        raise InvalidInput("a column is chosen from a dataset: leave it out for a text or a file.")
    text, said = (text, ()) if called else file_named(text)
    name, content, digest = read_input(text, model.modality)
    name = called or name
    common = common or (model.usual_length(content),)
    needed = sorted({length for selection in selections for length in selection.lengths or common})
    cut = {length: model.windows(content, length, settings.windows, settings.seed) for length in needed}
    for length in needed:
        check_fits(model, length)
    with fitting(needed[0]):
        first = Targets(model, cut[needed[0]][0])
        heads = _heads(first, selections)
    without = first.skipped
    plan = make_plan(selections, common, settings.windows, heads, some, without)
    if without and any(selection.what in OF_SOFTMAX for selection in selections):
        said = (*said, f"{'; '.join(without.values())}: skipped")
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


def _opened(
    model: Any, tokenizer: Any, device: Device | None, dtype: Dtype | None, device_map: DeviceMap | None, head: bool
) -> OpenModel:
    """What is to be scanned, from wherever it comes."""
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise InvalidInput("a tokenizer goes with a model in memory: one that is opened by name brings its own.")
        return open_model(str(model), head=head, device=device, dtype=dtype, device_map=device_map)
    if device_map is not None:
        raise InvalidInput("a device_map spreads a model that is opened by name: one in memory is where it is.")
    if not isinstance(model, OpenModel):
        return model_in_memory(model, tokenizer, head=head, device=device).in_dtype(dtype)
    if tokenizer is not None:
        raise InvalidInput("a tokenizer goes with a model in memory: one that is open has its own.")
    return model.on(device).in_dtype(dtype)


def _storable(name: str) -> str:
    """A name to show: of a file name that is not UTF-8, which SQLite does not take, the wrong bytes become �."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _heads(targets: Targets, selections: Sequence[Selection]) -> list[int]:
    """How many heads each layer has; none where they are not asked for, so that any attention will do."""
    if any(selection.what == "head" for selection in selections):
        without = targets.skipped
        return [0 if layer in without else targets.site(layer).attention.heads for layer in range(targets.layers)]
    return [0] * targets.layers
