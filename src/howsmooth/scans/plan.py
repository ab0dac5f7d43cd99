"""The plan of a scan: batches of cells that are measured together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.scans.scan_grammar import Selection

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
        raise UnsupportedModel("no layer of this model has softmax attention: scan what=layer instead.")
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
