"""The plan of a scan: its options, a small language for what is measured, and the batches that are measured together.

Selections are written ``0,2-4``, ``8,16,…,512`` and ``head[layers=0-5,heads=3]``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from howsmooth._util.sqlite_files import MEMORY
from howsmooth._util.validation import Device, Seed, check_count, check_fields, check_positive, shown
from howsmooth.engines import Engine
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.open_source import DeviceMap, Dtype
from howsmooth.models.targets import TARGETS

Numbers = str | int | Iterable[int]
BoundsWanted = Literal["none", "proved", "cheap", "all"]
_MAX_WINDOWS = 10**6


@dataclass(frozen=True)
class ScanProgress:
    """The progress of a scan: cells stored, cells requested, and a label for the next step; ``work`` weighs cells by
    their length."""

    cells: int
    total: int
    work: float
    label: str


@dataclass(frozen=True)
class ScanSettings:
    """All that decides the numbers of a scan beside model, text and cell.

    Attributes:
        rtol, confidence: as in `howsmooth.measure`.
        seed: of the solver's start in every cell, and of the windows.
        windows: the number of windows of each length that are cut from the text; it decides where they begin.
        explain: also the value and score paths.
        bounds: "none", "proved" (the three-path bound alone), "cheap" or "all".
    """

    rtol: float = 1e-3
    confidence: float = 0.99
    seed: Seed = 0
    windows: int = 1
    explain: bool = True
    bounds: BoundsWanted = "cheap"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.rtol < 1:
            raise InvalidInput(f"rtol is a relative accuracy between 0 and 1, got {self.rtol}.")
        if not 0 <= self.confidence < 1:
            raise InvalidInput(f"confidence is a probability below 1, got {self.confidence}.")
        if not 1 <= self.windows <= _MAX_WINDOWS:
            limits = f"from 1 to {_MAX_WINDOWS} windows of each length, got {shown(self.windows)}"
            raise InvalidInput(f"a scan needs at least one window and has {limits}.")

    def to_json(self) -> str:
        """Equal settings give equal texts."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class ScanOptions(ScanSettings):
    """The keyword arguments of `howsmooth.scan`: those of `ScanSettings`, and these.

    Attributes:
        lengths: numbers of tokens, special ones included: 128 (the default), [64, 128] or "8,16,…,512".
        layers: "0,2-4" or a list; None for all.
        what: "head", "attention", "residual", "mlp", "layer", "prefix", "model" or "logits", one or several, each with
            an optional choice: "head[layers=0-5,heads=3]".
        out: a store file, in which a stopped scan is resumed; None to store nothing.
        resume: use the cells of this scan in the store; otherwise measure them anew.
        tokenizer: of a model in memory, where transformers does not find it by the model's name.
        device: where to measure, for example "cuda"; by default the device of the model.
        dtype: "auto" (weights as they are stored, computed upon in float32), "float64" for the arithmetic, or
            "bfloat16" or "float16" to round the weights first.
        device_map: of a model that is opened by name: passed to ``from_pretrained`` of transformers ("auto", or module
            → device), which needs accelerate. Measured modules must not be offloaded.
        column: the column of a dataset, "text" by default.
        reference: "random" to measure the same architecture with random weights as well, in the same store, as a
            baseline for training. Its rows are those of MODEL@random, and a report shows them beside the others.
        progress: called before every batch and at the end; with workers, whenever one has answered. A notebook shows a
            bar without it.
        executor: any `concurrent.futures.Executor` that measures instead of this process, which alone writes; or a
            `howsmooth.engines.Engine` of one.
        jobs: the number of units that are measured at a time; without an executor, by as many processes (1: by this
            one).
        timeout: seconds after which a unit is abandoned with its worker; not in this process.
        shard: "i/N" for part i of N of this scan, in a store of its own, or "slurm" for that of a task of a job array;
            `howsmooth.scans.merge` joins them.
    """

    lengths: Numbers | None = None
    layers: Numbers | None = None
    what: str | Sequence[str] = "head"
    out: Path | str | None = None
    resume: bool = True
    tokenizer: Any = None
    device: Device | None = None
    dtype: Dtype | None = None
    device_map: DeviceMap | None = None
    column: str | None = None
    reference: Literal["random"] | None = None
    progress: Callable[[ScanProgress], object] | None = None
    executor: Executor | Engine | None = None
    jobs: int | None = None
    timeout: float | None = 3600.0
    shard: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        out = str(self.out)
        if self.out is not None and (not out.strip() or out == MEMORY or out.startswith("file:")):
            raise InvalidInput(f"out is the name of a file, got {out!r}: leave it out to store nothing.")
        if self.timeout is not None:
            check_positive(self.timeout, "timeout")
        if self.executor is None and self.jobs is not None:
            check_count(self.jobs, "jobs", most=1024)

    @property
    def settings(self) -> ScanSettings:
        """The options that decide the numbers."""
        return ScanSettings(**{field.name: getattr(self, field.name) for field in fields(ScanSettings)})

    @property
    def engine(self) -> Executor | Engine | None:
        """The engine or executor that measures; None for this process."""
        return Engine(jobs=self.jobs) if self.executor is None and (self.jobs or 1) > 1 else self.executor


SCANNED = ("head", *TARGETS)
"""The kinds of maps that a scan measures: every head, and the targets of `howsmooth.models.target`."""
_PLURALS = {"heads": "head", "layers": "layer", "prefixes": "prefix", "mlps": "mlp", "block": "attention"}
_PARAMETERS = ("layers", "heads", "lengths")
_DOTS = ("…", "...")
_NUMBER = "[0-9]{1,12}"
_LARGEST = 10**12
_MOST = 100_000
"""More layers, heads or lengths than anything has: a range is not written out further."""


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
        return _rising(text, wrong)
    numbers: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(rf"\s*({_NUMBER})\s*(?:-\s*({_NUMBER})\s*)?", piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise wrong
        if last > _MOST:
            raise InvalidInput(f"no model has {name} up to {last}: name those that are there, for example 0,2-4.")
        numbers |= set(range(first, last + 1))
    return tuple(sorted(numbers))


def parse_lengths(text: Numbers) -> tuple[int, ...]:
    """Numbers of tokens; dots, … or ..., continue up to the number that follows.

    They double where doubling leads there, and otherwise go on in equal steps.

    >>> parse_lengths("8,16,…,128"), parse_lengths("2,4,...,10"), parse_lengths([100, 50])
    ((8, 16, 32, 64, 128), (2, 4, 6, 8, 10), (50, 100))
    """
    wrong = InvalidInput(f"lengths are numbers of tokens such as 64,128, 8,16,…,512 or 2,4,…,100, got {shown(text)}.")
    if not isinstance(text, str):
        return _rising(text, wrong, least=1)
    pieces = [piece.strip() for piece in text.split(",")]
    lengths: list[int] = []
    for piece, following in zip(pieces, [*pieces[1:], ""], strict=True):
        if piece in _DOTS and lengths and re.fullmatch(_NUMBER, following):
            lengths += _continued(lengths, int(following), text)
        elif re.fullmatch(_NUMBER, piece) and int(piece) >= 1:
            lengths.append(int(piece))
        else:
            raise wrong
    return tuple(sorted(set(lengths)))


def _continued(before: Sequence[int], last: int, text: str) -> list[int]:
    """The numbers that dots replace between the numbers before them and the one after."""
    doubled = [before[-1]]
    while 2 * doubled[-1] < last:
        doubled.append(2 * doubled[-1])
    if 2 * doubled[-1] == last:
        return doubled[1:]
    step = before[-1] - before[-2] if len(before) > 1 else 0
    if step > 0 and last > before[-1] and (last - before[-1]) % step == 0:
        if (last - before[-1]) // step > _MOST:
            raise InvalidInput(f"{shown(text)} stands for more lengths than anything has: take larger steps.")
        return list(range(before[-1] + step, last, step))
    raise InvalidInput(
        f"doubling does not lead to {last} in {shown(text)}, nor do equal steps: write for example 8,16,…,512 or "
        "2,4,…,100."
    )


def _rising(given: object, wrong: InvalidInput, least: float = -math.inf) -> tuple[int, ...]:
    """A number, or several, in rising order."""
    numbers = list(islice(given if isinstance(given, Iterable) else [given], _MOST))
    if not numbers or not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        raise wrong
    if min(numbers) < least or max(numbers) > _LARGEST:
        raise wrong
    return tuple(sorted(set(numbers)))


def parse_what(text: str | Sequence[str]) -> tuple[Selection, ...]:
    """Kinds of maps, each with an optional choice in brackets.

    >>> parse_what("heads[layers=0-2,5,heads=3], layer")
    (Selection(what='head', layers=(0, 1, 2, 5), heads=(3,), lengths=None), Selection(what='layer', ...))
    """
    if not isinstance(text, str) and not (isinstance(text, Sequence) and all(isinstance(one, str) for one in text)):
        raise InvalidInput(f"what to measure is a text such as head,layer or a list of texts, got {shown(text)}.")
    whole = text if isinstance(text, str) else ",".join(text)
    selections = []
    for piece in map(str.strip, re.split(r",(?![^\[]*\])", whole)):
        match = re.fullmatch(r"([\w-]+)\s*(?:\[(.*)\])?", piece)
        name = _PLURALS.get(match[1], match[1]) if match else ""
        if match is None or name not in SCANNED:
            raise InvalidInput(
                f"{shown(piece)} cannot be measured: choose from {', '.join(SCANNED)}, with a choice in brackets if "
                "you like, for example head[layers=0-5,heads=3]."
            )
        selections.append(Selection(name, **_choices(match[2] or "", piece)))
    return tuple(dict.fromkeys(selections))


def _choices(text: str, whole: str) -> dict[str, tuple[int, ...]]:
    """``layers=0-2,5,heads=3`` by name; what has no name belongs to the name before it."""
    given: dict[str, list[str]] = {}
    name = ""
    for choice in filter(None, map(str.strip, text.split(","))):
        if "=" in choice:
            name, _, choice = map(str.strip, choice.partition("="))
        if name not in _PARAMETERS:
            raise InvalidInput(
                f"{shown(whole)}: brackets choose {', '.join(_PARAMETERS)}, for example [layers=0-5,heads=3]."
            )
        given.setdefault(name, []).append(choice)
    return {
        name: parse_lengths(",".join(parts)) if name == "lengths" else parse_numbers(",".join(parts), name)
        for name, parts in given.items()
    }


_WITHOUT_LAYER = ("model", "logits")


OF_SOFTMAX = ("head", "attention")
"""Maps of a layer that exist only where its attention takes a softmax."""


@dataclass(frozen=True)
class ScanCell:
    """One number of a scan."""

    what: str
    layer: int | None
    head: int | None
    length: int
    window: int


@dataclass(frozen=True)
class CellBatch:
    """Cells that are measured in one call: the heads of a layer, or one map by itself."""

    what: str
    layer: int | None
    heads: tuple[int | None, ...]
    length: int
    window: int

    @property
    def work(self) -> float:
        """The approximate cost: products are made of the n × n weights and of n × d tokens."""
        return self.length * (self.length + 256.0)

    def cells(self) -> Iterator[ScanCell]:
        """The cells, head by head."""
        for head in self.heads:
            yield ScanCell(self.what, self.layer, head, self.length, self.window)


def make_plan(
    selections: Sequence[Selection],
    lengths: Sequence[int],
    windows: int,
    heads: Sequence[int],
    layers: Sequence[int] | None = None,
    without: Mapping[int, str] | None = None,
) -> list[CellBatch]:
    """Every batch of a scan, short inputs first; window by window, so that one forward pass serves all layers.

    Args:
        selections: what to measure, each with its own layers, heads and lengths where it names some.
        lengths, windows: of the text.
        heads: how many heads each layer of the model has.
        layers: of all selections that name none; None for every layer.
        without: layers that have no softmax attention, with the reason; they are left out unless asked for by number.

    >>> [(batch.layer, batch.heads) for batch in make_plan([Selection("head")], [8], windows=1, heads=[2, 2])]
    [(0, (0, 1)), (1, (0, 1))]
    """
    wanted: dict[tuple[int, str, int | None], set[int | None]] = {}
    for selection in selections:
        for layer in _with_softmax(selection, _layers(selection, layers, len(heads)), layers, without or {}):
            of_layer = _heads(selection, heads, layer)
            for length in selection.lengths or lengths:
                wanted.setdefault((length, selection.what, layer), set()).update(of_layer)
    batches = [
        CellBatch(what, layer, tuple(sorted(chosen, key=_order)), length, window)
        for (length, what, layer), chosen in wanted.items()
        for window in range(windows)
    ]
    return sorted(batches, key=lambda batch: (batch.length, batch.window, _order(batch.layer)))


def _with_softmax(
    selection: Selection, chosen: Sequence[int | None], named: Sequence[int] | None, without: Mapping[int, str]
) -> Sequence[int | None]:
    """The layers that have what is asked for."""
    if selection.what not in OF_SOFTMAX:
        return chosen
    refused = [layer for layer in chosen if layer in without]
    if refused and (named is not None or selection.layers is not None):
        raise UnsupportedModel(f"{without[refused[0] or 0]}: choose other layers, or what=layer.")
    if len(refused) == len(chosen):
        raise UnsupportedModel("no layer of this model has softmax attention: scan what=layer or what=model instead.")
    return [layer for layer in chosen if layer not in without]


def _order(number: int | None) -> int:
    return -1 if number is None else number


def _layers(selection: Selection, layers: Sequence[int] | None, count: int) -> Sequence[int | None]:
    if selection.what in _WITHOUT_LAYER:
        return [None]
    chosen = selection.layers if selection.layers is not None else layers
    missing = [layer for layer in chosen or () if not 0 <= layer < count]
    if missing:
        raise InvalidInput(f"layer {missing[0]} does not exist: this model has {count} layers, 0 to {count - 1}.")
    return range(count) if chosen is None else chosen


def _heads(selection: Selection, heads: Sequence[int], layer: int | None) -> Sequence[int | None]:
    if selection.what != "head" or layer is None:
        if selection.heads is not None:
            raise InvalidInput(f"heads are chosen for what=head, not for {selection.what}: leave them out.")
        return [None]
    missing = [head for head in selection.heads or () if not 0 <= head < heads[layer]]
    if missing:
        raise InvalidInput(
            f"head {missing[0]} does not exist: layer {layer} has {heads[layer]} heads, 0 to {heads[layer] - 1}."
        )
    return range(heads[layer]) if selection.heads is None else selection.heads
