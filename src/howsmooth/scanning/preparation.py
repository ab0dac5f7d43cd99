"""From what is asked to what is measured: the model open, windows cut, every batch listed, and the key of a store."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from howsmooth.checks import check_device, check_one_of
from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets, Window, held_model, open_model
from howsmooth.models.input_files import file_named, joined_texts, read_input
from howsmooth.models.named import FULL_PRECISION
from howsmooth.models.opened import content_sha256
from howsmooth.scanning.grammar import Numbers as Places
from howsmooth.scanning.grammar import Selection, parse_lengths, parse_numbers, parse_what
from howsmooth.scanning.memory import check_fits, fitting
from howsmooth.scanning.plan import OF_SOFTMAX, Batch, Settings, make_plan
from howsmooth.scanning.store import Identity

DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")


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
    device: str | None = None,
    dtype: str | None = None,
    column: str | None = None,
) -> Prepared:
    """Open the model and cut the text; arguments as of `howsmooth.scan`."""
    selections = parse_what(what)
    some = None if layers is None else parse_numbers(layers)
    common = None if lengths is None else parse_lengths(lengths)
    model = _opened(model, tokenizer, device, head=any(selection.what == "logits" for selection in selections))
    model = in_dtype(model, dtype)
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


def _opened(model: Any, tokenizer: Any, device: str | None, head: bool) -> OpenModel:
    """What is to be scanned, from wherever it comes."""
    if not isinstance(model, str | Path | OpenModel):
        return held_model(model, tokenizer, head=head, device=device)
    if tokenizer is not None:
        raise InvalidInput("a tokenizer goes with a model in memory: one that is opened by name brings its own.")
    if device is not None:
        check_device(device)
    if not isinstance(model, OpenModel):
        ready = open_model(str(model), head=head)
    elif device is None or model.model.device == torch.device(device):
        return model
    else:
        ready = replace(model, model=copy.deepcopy(model.model))  # the caller's stays where it is
    if device is not None:
        with fitting(1):
            nn.Module.to(ready.model, device)
    return ready


def in_dtype(model: OpenModel, dtype: str | None) -> OpenModel:
    """The model as "auto" has it (weights as stored, computed upon in float32), with weights rounded, or in float64.

    >>> in_dtype(open_model("random:gpt2[layers=1,width=16]"), "bfloat16").precision
    'bfloat16 weights, computed in float32'
    """
    if dtype is None or check_one_of(dtype, DTYPES, "dtype") in ("auto", "float32"):
        return model
    if model.modality != "text" and dtype == "float64":
        raise InvalidInput("float64 is for models of text: leave dtype out.")
    twin = copy.deepcopy(model.model)
    if dtype == "float64":
        return replace(model, model=nn.Module.double(twin), sha256=content_sha256(nn.Module.double(twin)))
    rounded = getattr(torch, dtype)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.copy_(weight.to(rounded).to(weight.dtype))
    return replace(
        model, model=twin, sha256=content_sha256(twin), precision=f"{dtype} weights, computed in {FULL_PRECISION}"
    )


def _storable(name: str) -> str:
    """A name to show: of a file name that is not UTF-8, which SQLite does not take, the wrong bytes become �."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _heads(targets: Targets, selections: Sequence[Selection]) -> list[int]:
    """How many heads each layer has; none where they are not asked for, so that any attention will do."""
    if any(selection.what == "head" for selection in selections):
        without = targets.skipped
        return [0 if layer in without else targets.site(layer).attention.heads for layer in range(targets.layers)]
    return [0] * targets.layers
