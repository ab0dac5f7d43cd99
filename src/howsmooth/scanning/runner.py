"""From a model and a text to measured cells, kept one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from howsmooth.checks import check_options, door
from howsmooth.errors import InvalidInput
from howsmooth.kinds import Words
from howsmooth.models import OpenModel, Targets, Window, open_model
from howsmooth.models.input_files import file_named, read_input
from howsmooth.scanning.cells import Numbers, head_numbers, map_numbers
from howsmooth.scanning.grammar import Numbers as Places
from howsmooth.scanning.grammar import Selection, parse_lengths, parse_numbers, parse_what
from howsmooth.scanning.memory import check_fits, fitting
from howsmooth.scanning.plan import Batch, Cell, Settings, make_plan
from howsmooth.scanning.results import Scan
from howsmooth.scanning.store import MEMORY, Identity, Store


@dataclass(frozen=True)
class Progress:
    """How far a scan is: cells kept, cells asked for, and what is measured next; ``work`` weighs cells by length."""

    cells: int
    total: int
    work: float
    label: str


@door
def scan(
    model: str | OpenModel,
    text: Words | Path | None = None,
    *,
    lengths: Places | None = None,
    windows: int = 1,
    layers: Places | None = None,
    what: str | Sequence[str] = "head",
    out: Path | str | None = None,
    resume: bool = True,
    progress: Callable[[Progress], None] | None = None,
    **settings: Any,
) -> Scan:
    """Measure a model on a text: every cell of what × layers × heads × lengths × windows.

    Args:
        model: a named model, a folder, a hub id, or what `howsmooth.models.open_model` gives.
        text: the text itself, the path of a file (an image or .wav where the model reads such; also as a string, when
            there is a file of that name), or None for Alice in Wonderland.
        lengths: numbers of tokens, special ones included: 128 (the default), [64, 128] or "8,16,…,512".
        windows: how many windows of each length are cut from the text.
        layers: "0,2-4" or a list; None for all.
        what: "head", "attention", "residual", "mlp", "layer", "prefix", "model" or "logits", one or several, each with
            an optional choice: "head[layers=0-5,heads=3]".
        out: a store file, in which a stopped scan is taken up again; None to keep nothing.
        resume: keep what the store has of this scan; otherwise measure it anew.
        progress: called before every batch and at the end.
        settings: rtol, confidence, seed, explain, bounds: see `howsmooth.scanning.Settings`.

    Returns:
        A `Scan` with the cells asked for.

    >>> found = scan("random:bert[layers=2,width=32]", lengths=16, layers="0-1", what="head[heads=1],attention")
    >>> [(row["layer"], row["what"], row["lower"] <= row["value"] <= row["upper"]) for row in found.rows]
    [(0, 'attention', True), (0, 'head', True), (1, 'attention', True), (1, 'head', True)]
    """
    check_options(settings, [option.name for option in fields(Settings)], "scan")
    if out is not None and (not str(out).strip() or str(out) == MEMORY or str(out).startswith("file:")):
        raise InvalidInput(f"out is the name of a file, got {str(out)!r}: leave it out to keep nothing.")
    chosen, selections = Settings(windows=windows, **settings), parse_what(what)
    some = None if layers is None else parse_numbers(layers)
    common = None if lengths is None else parse_lengths(lengths)
    if not isinstance(model, OpenModel):
        model = open_model(model, head=any(selection.what == "logits" for selection in selections))
    text, said = file_named(text)
    name, content, digest = read_input(text, model.modality)
    common = common or (model.usual_length(content),)
    needed = sorted({length for selection in selections for length in selection.lengths or common})
    cut = {length: model.windows(content, length, chosen.windows, chosen.seed) for length in needed}
    for length in needed:
        check_fits(model, length)
    with fitting(needed[0]):
        first = Targets(model, cut[needed[0]][0])
        heads = _heads(first, selections)
    plan = make_plan(selections, common, chosen.windows, heads, some)
    identity = Identity(
        model=_storable(model.name),
        model_sha256=model.sha256,
        precision=model.precision,
        text=_storable(name),
        text_sha256=digest,
        settings=chosen,
        howsmooth=version("howsmooth"),
    )
    with Store.writing(MEMORY if out is None else out) as store:
        number = store.begin(identity, resume)
        at_hand = {(needed[0], 0): first}
        run(model, plan, cut, at_hand, chosen, store, number, progress or (lambda now: None))
        asked = {cell for batch in plan for cell in batch.cells()}
        store.finish(number)
        return replace(Scan.of(store, number, asked), notes=(*model.notes, *said))


def run(
    model: OpenModel,
    plan: Sequence[Batch],
    cut: dict[int, list[Window]],
    at_hand: dict[tuple[int, int], Targets],
    settings: Settings,
    store: Store,
    number: int,
    progress: Callable[[Progress], None],
) -> None:
    """Measure every batch of which a cell is missing, and keep it before the next begins.

    What the model did in a window is asked once: ``at_hand`` has the windows it has read, and gives them up.
    """
    asked = {cell for batch in plan for cell in batch.cells()}
    kept = asked & store.cells(number)
    missing = [batch for batch in plan if not kept.issuperset(batch.cells())]
    work, all_work = 0.0, sum(map(_work, missing)) or 1.0

    def tell(label: str) -> None:
        progress(Progress(len(kept), len(asked), work / all_work, label))

    try:
        for (length, place), batches in groupby(missing, key=lambda batch: (batch.length, batch.window)):
            tell(f"n = {length}, window {place}: reading")
            window, of_window = cut[length][place], list(batches)
            with fitting(length):
                targets = at_hand.pop((length, place), None) or Targets(model, window)
                targets.read(maps=any(batch.what in ("head", "attention") for batch in of_window))
            for batch in of_window:
                tell(_label(batch))
                with fitting(length):
                    found = measure_batch(targets, batch, settings)
                store.add(number, window.start, window.tokens, found)
                kept.update(batch.cells())
                work += _work(batch)
    except KeyboardInterrupt:
        kept = asked & store.cells(number)  # the last batch may have been kept a moment ago
        tell("interrupted")
        raise
    work = all_work
    tell("done")


def measure_batch(targets: Targets, batch: Batch, settings: Settings) -> list[tuple[Cell, Numbers]]:
    """The cells of a batch with their numbers.

    All heads of a layer are measured even if some are asked for: their random starts are drawn together, and a number
    must not depend on what else is asked for.
    """
    if batch.what == "head":
        assert batch.layer is not None
        site = targets.sites[batch.layer]
        of_heads = head_numbers(site.attention, site.x, settings)
        return [(cell, of_heads[cell.head]) for cell in batch.cells() if cell.head is not None]
    numbers = map_numbers(*targets.get(batch.what, batch.layer), settings)
    return [(cell, numbers) for cell in batch.cells()]


def _storable(name: str) -> str:
    """A name to show: of a file name that is not UTF-8, which SQLite does not take, the wrong bytes become �."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _heads(targets: Targets, selections: Sequence[Selection]) -> list[int]:
    """How many heads each layer has; none where they are not asked for, so that any attention will do."""
    if any(selection.what == "head" for selection in selections):
        return [site.attention.heads for site in targets.sites]
    return [0] * targets.layers


def _work(batch: Batch) -> float:
    """What a batch costs, roughly: products are made of the n × n weights and of n × d tokens."""
    return batch.length * (batch.length + 256.0)


def _label(batch: Batch) -> str:
    where = "" if batch.layer is None else f" of layer {batch.layer}"
    return f"n = {batch.length}, window {batch.window}: {'heads' if batch.what == 'head' else batch.what}{where}"
