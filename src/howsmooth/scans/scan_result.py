"""The result of a scan: rows, and what is shown beside them."""

from __future__ import annotations

import csv
import json
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth._util.common import spreadsheet_safe
from howsmooth._util.display import LARGEST_FRAME, frame, grid
from howsmooth._util.guarantee import Guarantee
from howsmooth._util.optional_deps import need
from howsmooth._util.sqlite_files import MEMORY
from howsmooth._util.validation import validated
from howsmooth.scans.plan import ScanCell
from howsmooth.scans.scan_store import Store, StoreRow

if TYPE_CHECKING:
    import pandas

_IN_NOTEBOOK = 20
_MODELLED = ("head", "attention")
CELL = tuple(each.name for each in fields(ScanCell))


def rounding_of(what: str) -> Guarantee:
    """The guarantee of both ends in cells of a kind, apart from the probability of the upper one: rounding is modelled
    in heads and blocks of attention, and measured in everything else.

    >>> rounding_of("head").name, rounding_of("layer").name
    ('MODELLED', 'MEASURED')
    """
    return Guarantee.MODELLED if what in _MODELLED else Guarantee.MEASURED


class Shares(Mapping[tuple[Any, ...], list[float]]):
    """The shares of tokens of heads by cell, fetched when they are asked for.

    They are most of a store: 196,608 heads at up to 1024 tokens take 0.7 GB.

    Args:
        keys_of: cell → where its shares are.
        fetch: the shares of several pairs of a cell and its key.
    """

    def __init__(self, keys_of: dict[tuple[Any, ...], Any], fetch: Callable[[Sequence[Any]], Iterable[list[float]]]):
        self.keys_of, self._fetch = keys_of, fetch

    def __getitem__(self, cell: tuple[Any, ...]) -> list[float]:
        return self.several([cell])[cell]

    def __contains__(self, cell: object) -> bool:
        return cell in self.keys_of

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.keys_of)

    def __len__(self) -> int:
        return len(self.keys_of)

    def several(self, places: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[float]]:
        """The shares at several places, fetched at once."""
        return dict(zip(places, self._fetch([(cell, self.keys_of[cell]) for cell in places]), strict=True))


def _stored(path: Path, wanted: Sequence[Any]) -> list[list[float]]:
    """The shares of places in scans of a store, which is opened once."""
    with Store.reading(path) as store:
        return list(store.energies((scan, *cell[-4:]) for cell, scan in wanted))


class Joined(ChainMap[tuple[Any, ...], list[float]]):
    """The shares of several scans as one mapping."""

    def several(self, keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[float]]:
        """The shares at several places; every store is opened once."""
        shares: dict[tuple[Any, ...], list[float]] = {}
        for scan in self.maps:
            own_keys = [key for key in keys if key in scan and key not in shares]
            shares |= scan.several(own_keys) if isinstance(scan, Shares) else {key: scan[key] for key in own_keys}
        return shares


@dataclass(frozen=True)
class Scan:
    """Measured cells.

    Attributes:
        rows: one flat dictionary per cell; ``bounds`` is a dictionary by name, None for a bound that overflows;
            ``lower_holds`` and ``upper_holds`` name the guarantees of the ends (`rounding_of`).
        tokens: (model, text_sha256, length, window) → the tokens of the window; also under (model, length, window)
            where the model has read one text only.
        energies: (model, text_sha256, layer, head, length, window) → the share of each token in the worst direction of
            that head; also without text_sha256 as above.
        settings: name → value of every setting; a list where the models of a store were scanned with several.
        notes: what else the reader should know, such as names of weights that were repaired when the model was opened.
        failures: what could not be measured, each with its reasons; only where workers measured.
    """

    rows: list[StoreRow]
    tokens: dict[tuple[Any, ...], list[str]] = field(default_factory=dict, repr=False)
    energies: Mapping[tuple[Any, ...], list[float]] = field(default_factory=dict, repr=False)
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    failures: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    @validated
    def open(cls, path: Path | str) -> Scan:
        """All that a store holds; the shares of tokens are read from it when they are asked for."""
        with Store.reading(path) as store:
            return cls.of(store)

    @classmethod
    @validated
    def of(cls, store: Store, scan: int | None = None, asked: Collection[ScanCell] | None = None) -> Scan:
        """The cells of an open store: all, those of one scan by its number, or of those the ones that are asked for."""
        in_memory = store.path == MEMORY
        lengths = None if asked is None else {cell.length for cell in asked}
        rows = [_with_guarantees(row) for row in store.rows(scan, lengths, energies=in_memory)]
        if asked is not None:
            rows = [row for row in rows if ScanCell(*(row[name] for name in CELL)) in asked]
        scans = store.scans(scan)
        texts = Counter(about["model"] for about in scans)
        numbers = {(about["model_sha256"], about["text_sha256"]): about["id"] for about in scans}
        shown = {(row["model_sha256"], row["text_sha256"], row["length"], row["window"]) for row in rows}

        tokens: dict[tuple[Any, ...], list[str]] = {}
        for window in store.windows(scan):
            cut = (window["length"], window["window"])
            if (window["model_sha256"], window["text_sha256"], *cut) in shown:
                for key in _keys(window, texts):
                    tokens[*key, *cut] = window["tokens"]
        energies: dict[tuple[Any, ...], Any] = {}
        for row in rows:
            energy = row.pop("input_energy")
            if energy is not None and row["what"] == "head":
                kept = energy if in_memory else numbers[row["model_sha256"], row["text_sha256"]]
                for key in _keys(row, texts):
                    energies[*key, *(row[name] for name in CELL[1:])] = kept
        shares = energies if in_memory else Shares(energies, partial(_stored, Path(store.path)))
        return cls(rows, tokens, shares, _merged([about["settings"] for about in scans]))

    @classmethod
    @validated
    def joined(cls, scans: Sequence[Scan]) -> Scan:
        """Scans of several models as one, for one report."""
        tokens = {key: content for scan in scans for key, content in scan.tokens.items()}
        rows = [row for scan in scans for row in scan.rows]
        shares: list[Any] = [scan.energies for scan in scans]
        return cls(rows, tokens, Joined(*shares), _merged([scan.settings for scan in scans]))

    def __len__(self) -> int:
        return len(self.rows)

    def to_pandas(self) -> pandas.DataFrame:
        """One line per cell; ``bounds`` as JSON text. Layers and heads are nullable integers."""
        pd = need("pandas", "a data frame")
        frame = pd.DataFrame(self._flat())
        whole = [name for name in ("layer", "head", "sink_token") if name in frame]
        return frame.astype(dict.fromkeys(whole, "Int64"))

    def to_csv(self, path: Path | str) -> None:
        """A table with a header; empty where there is no number. No text in it is taken for a formula."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.rows[0]) if self.rows else ["model"])
            writer.writeheader()
            writer.writerows({name: spreadsheet_safe(cell) for name, cell in row.items()} for row in self._flat())

    def to_json(self, path: Path | str) -> None:
        """A list with one object per cell."""
        Path(path).write_text(self.json() + "\n", encoding="utf-8")

    def json(self) -> str:
        """The rows as JSON text."""
        return json.dumps(self.rows, indent=2, ensure_ascii=False, allow_nan=False)

    def to_parquet(self, path: Path | str) -> None:
        """A Parquet file; ``bounds`` as JSON text."""
        pyarrow = need("pyarrow", "a Parquet file")
        need("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self._flat()), path)

    def report(self, path: Path | str) -> None:
        """One HTML file that opens offline."""
        from howsmooth.reports import report

        report(self, path)

    def _repr_html_(self) -> str:
        """The report itself, where it fits into a notebook; otherwise the roughest rows."""
        from howsmooth.reports.page import page
        from howsmooth.reports.scan_groups import groups

        if self.rows and len(text := page(groups(self))) <= LARGEST_FRAME:
            return frame(text)
        names = ("model", "what", "layer", "head", "length", "value", "relative")
        roughest = sorted(self.rows, key=lambda row: -row["value"])[:_IN_NOTEBOOK]
        rows = [[_cell_text(row.get(name)) for name in names] for row in roughest]
        return grid(f"{len(self.rows)} cells, the roughest first", names, rows, ["scan.report('page.html') has all."])

    def _flat(self) -> list[StoreRow]:
        return [row | {"bounds": json.dumps(row["bounds"])} for row in self.rows]


def _with_guarantees(row: StoreRow) -> StoreRow:
    held = rounding_of(row["what"]).name.lower()
    return row | {"lower_holds": held, "upper_holds": held}


def _cell_text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _keys(row: StoreRow, texts: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Under which names something of a scan is found: model and text, and the model alone where it has read one."""
    whole = (row["model"], row["text_sha256"])
    return [whole, whole[:1]] if texts[row["model"]] == 1 else [whole]


def _merged(several: list[dict[str, Any]]) -> dict[str, Any]:
    """The value that all share under each name, or the list of values.

    >>> _merged([{"seed": 0, "rtol": 0.001}, {"seed": 0, "rtol": 0.01}])
    {'seed': 0, 'rtol': [0.001, 0.01]}
    >>> _merged([{"rtol": [0.001, 0.01]}, {"rtol": 0.1}])
    {'rtol': [0.001, 0.01, 0.1]}
    """
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for settings in several for name in settings):
        given = [settings[name] for settings in several if name in settings]
        values = list(
            dict.fromkeys(each for value in given for each in (value if isinstance(value, list) else [value]))
        )
        merged[name] = values[0] if len(values) == 1 else values
    return merged
