"""Preparation of a scan: the model open, windows cut, every batch listed, and the key of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets, Window, open_model
from howsmooth.models.model_inputs import file_named, joined_texts, read_input
from howsmooth.models.open_source import model_in_memory
from howsmooth.scans.memory_checks import check_fits, fitting
from howsmooth.scans.plan import OF_SOFTMAX, CellBatch, make_plan
from howsmooth.scans.scan_grammar import Selection, parse_lengths, parse_numbers, parse_what
from howsmooth.scans.scan_options import ScanOptions, ScanSettings
from howsmooth.scans.scan_store import Identity


@dataclass(frozen=True)
class Prepared:
    """A scan before its first number.

    Attributes:
        model, settings: the open model, and the settings that decide its numbers.
        plan: every batch.
        cut: length → the windows of the text.
        at_hand: (length, window) → the targets of windows that the model has read already.
        identity: the key of a store.
        notes: on the options.
    """

    model: OpenModel
    settings: ScanSettings
    plan: list[CellBatch]
    cut: dict[int, list[Window]]
    at_hand: dict[tuple[int, int], Targets]
    identity: Identity
    notes: tuple[str, ...]


def prepare(model: Any, text: Any, options: ScanOptions) -> Prepared:
    """Open the model and cut the text; arguments as of `howsmooth.scan`."""
    settings, selections = options.settings, parse_what(options.what)
    layers = None if options.layers is None else parse_numbers(options.layers)
    common = None if options.lengths is None else parse_lengths(options.lengths)
    model = _opened(model, options, head=any(selection.what == "logits" for selection in selections))
    dataset = None
    if text is not None and not isinstance(text, str | Path):
        dataset, text = joined_texts(text, options.column)
    elif options.column is not None:
        raise InvalidInput("a column is chosen from a dataset: leave it out for a text or a file.")
    text, notes = (text, ()) if dataset else file_named(text)
    name, content, digest = read_input(text, model.modality)
    common = common or (model.usual_length(content),)
    needed = sorted({length for selection in selections for length in selection.lengths or common})
    cut = {length: model.windows(content, length, settings.windows, settings.seed) for length in needed}
    for length in needed:
        check_fits(model, length)
    with fitting(needed[0]):
        first = Targets(model, cut[needed[0]][0])
        heads = _heads(first, selections)
    without = first.skipped
    plan = make_plan(selections, common, settings.windows, heads, layers, without)
    if without and any(selection.what in OF_SOFTMAX for selection in selections):
        notes = (*notes, f"{'; '.join(without.values())}: skipped")
    identity = Identity(
        model=_storable(model.name),
        model_sha256=model.sha256,
        precision=model.precision,
        text=_storable(dataset or name),
        text_sha256=digest,
        settings=settings,
        howsmooth=version("howsmooth"),
    )
    return Prepared(model, settings, plan, cut, {(needed[0], 0): first}, identity, tuple(notes))


def _opened(model: Any, options: ScanOptions, head: bool) -> OpenModel:
    """The model to scan, whatever its source is."""
    device, dtype, device_map, tokenizer = options.device, options.dtype, options.device_map, options.tokenizer
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
    """The number of heads of each layer; 0 where none is requested, so that any attention is accepted."""
    if any(selection.what == "head" for selection in selections):
        without = targets.skipped
        return [0 if layer in without else targets.site(layer).attention.heads for layer in range(targets.layers)]
    return [0] * targets.layers
