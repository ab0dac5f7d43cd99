"""Files of a run that survive: written whole or not at all, or line by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from howsmooth._util.checksummed import Damaged, read_json
from howsmooth._util.common import unwritable, write_whole
from howsmooth._util.validation import check_count
from howsmooth.errors import InvalidInput


class Journal:
    """Rows of numbers, one JSON object per line, in the order of their steps."""

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a line that a killed process has left unfinished is passed over."""
        if not self.path.is_file():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        try:
            rows = [read_json(line) for line in lines[:-1]]
            for row in rows:
                check_count(row.get("step"), "step", least=0)
            return rows
        except (Damaged, InvalidInput) as error:
            why = str(error).rstrip(".")
            raise InvalidInput(f"{self.path} is damaged ({why}): move it away to go on without its rows.") from None

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the other rows, and any unfinished line."""
        write_whole(self.path, "".join(_line(row) for row in self.rows() if wanted(row)).encode())

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(row))
        except OSError as error:
            raise unwritable(self.path, error) from error


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
