"""The result of a scan: rows, and what is shown beside them."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from howsmooth.scanning.store import Store

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]


@dataclass(frozen=True)
class Scan:
    """Measured cells.

    Attributes:
        rows: one flat dictionary per cell; ``bounds`` is a dictionary by name, None for a bound that overflows.
        tokens: (model, text_sha256, length, window) → the tokens of the window; also under (model, length, window)
            where the model has read one text only.
        energies: (model, text_sha256, layer, head, length, window) → the share of each token in the worst direction of
            that head; also without text_sha256 as above.
        settings: name → value of every setting; a list where the models of a store were scanned with several.
    """

    rows: list[Row]
    tokens: dict[tuple[Any, ...], list[str]] = field(default_factory=dict, repr=False)
    energies: dict[tuple[Any, ...], list[float]] = field(default_factory=dict, repr=False)
    settings: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path | str) -> Scan:
        """All that a store holds."""
        with Store.reading(path) as store:
            return cls.of(store)

    @classmethod
    def of(cls, store: Store, wanted: Callable[[Row], bool] = lambda row: True) -> Scan:
        """The cells of an open store, or those that are wanted."""
        scans = store.scans()
        texts = Counter(scan["model"] for scan in scans)
        tokens: dict[tuple[Any, ...], list[str]] = {}
        energies: dict[tuple[Any, ...], list[float]] = {}

        def keep(table: dict[tuple[Any, ...], Any], row: Row, place: tuple[Any, ...], content: Any) -> None:
            table[row["model"], row["text_sha256"], *place] = content
            if texts[row["model"]] == 1:
                table[row["model"], *place] = content

        for window in store.windows():
            keep(tokens, window, (window["length"], window["window"]), window["tokens"])
        rows = []
        for row in filter(wanted, store.rows()):
            energy = row.pop("input_energy")
            if energy is not None and row["what"] == "head":
                keep(energies, row, (row["layer"], row["head"], row["length"], row["window"]), energy)
            rows.append(row)
        return cls(rows, tokens, energies, _merged([scan["settings"] for scan in scans]))

    def __len__(self) -> int:
        return len(self.rows)

    def to_pandas(self) -> pandas.DataFrame:
        """One line per cell; ``bounds`` as JSON text. Layers and heads are nullable integers."""
        import pandas as pd

        frame = pd.DataFrame(self._flat())
        whole = [name for name in ("layer", "head", "sink_token") if name in frame]
        return frame.astype(dict.fromkeys(whole, "Int64"))

    def to_csv(self, path: Path | str) -> None:
        """A table with a header; empty where there is no number."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.rows[0]) if self.rows else ["model"])
            writer.writeheader()
            writer.writerows(self._flat())

    def to_json(self, path: Path | str) -> None:
        """A list with one object per cell."""
        Path(path).write_text(self.json() + "\n", encoding="utf-8")

    def json(self) -> str:
        """The rows as JSON text."""
        return json.dumps(self.rows, indent=2, ensure_ascii=False, allow_nan=False)

    def to_parquet(self, path: Path | str) -> None:
        """A Parquet file; ``bounds`` as JSON text."""
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self._flat()), path)

    def report(self, path: Path | str) -> None:
        """One HTML file that opens offline."""
        from howsmooth.reporting import write_report

        write_report(self, path)

    def _flat(self) -> list[Row]:
        return [row | {"bounds": json.dumps(row["bounds"])} for row in self.rows]


def _merged(several: list[dict[str, Any]]) -> dict[str, Any]:
    """The value that all share under each name, or the list of values.

    >>> _merged([{"seed": 0, "rtol": 0.001}, {"seed": 0, "rtol": 0.01}])
    {'seed': 0, 'rtol': [0.001, 0.01]}
    """
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for settings in several for name in settings):
        values = list(dict.fromkeys(settings[name] for settings in several if name in settings))
        merged[name] = values[0] if len(values) == 1 else values
    return merged
