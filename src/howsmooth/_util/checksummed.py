"""Files under a seal: safetensors, with a SHA-256 of every tensor and every word of the header, and lines of a run.

A safetensors file holds named tensors and a few named texts. The seal is one text more, ``sha256``, over all of the
others: names, dtypes, shapes and numbers of the tensors, names and content of the texts. What is damaged by chance is
refused, whatever byte it is. A seal is no signature: whoever writes a file on purpose writes its seal too, so that what
a sealed file says is still to be checked by those who read it. Nothing is ever unpickled.

The lines of a run that may be interrupted are JSON objects, one for each thing that is done, each under a seal over the
line and the run that it belongs to; the first line is the run itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from howsmooth._util.common import digest, exclusive, printable, unwritable
from howsmooth.errors import InvalidInput

SEAL = "sha256"


class Damaged(ValueError):
    """A file that is no safetensors file, or not what was written."""


def sealed(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> bytes:
    """The content of a safetensors file with its seal."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(kept, {**texts, SEAL: _seal(kept, texts)})


def opened(path: Path) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    """Tensors, texts, and whether they were under a seal; a broken seal is `Damaged`."""
    try:
        with safe_open(path, framework="pt") as file:
            texts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Damaged(str(error)) from error
    seal = texts.pop(SEAL, None)
    if seal is not None and seal != _seal(tensors, texts):
        raise Damaged("its content is not what was written")
    return tensors, texts, seal is not None


def read_json(text: str) -> dict[str, Any]:
    """The JSON object of a text; `Damaged` for anything else, NaN, infinity and bottomless nesting among it."""
    try:
        content = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its header is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise Damaged("its header is no JSON object")
    return content


def _seal(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    return digest(tensors, "".join(f"{json.dumps([name, text])}\n" for name, text in sorted(texts.items())).encode())


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


@dataclass(frozen=True)
class Lines:
    """A file of lines, open for more; see `resumed`."""

    path: Path
    run: Mapping[str, Any]
    rows: list[dict[str, Any]]

    def add(self, row: dict[str, Any]) -> None:
        """Write one line more."""
        try:
            with self.path.open("ab") as file:
                file.write(_line(row, self.run))
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.rows.append(row)


@contextmanager
def resumed(path: Path, run: Mapping[str, Any]) -> Iterator[Lines]:
    """The lines that a run has written so far, for no other process meanwhile; a file that is not there is made.

    A last line that was cut short is taken away. Every other change, and a file of another run, is refused.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for _ in range(2):
    ...         with resumed(Path(folder) / "a.jsonl", {"norm": 2}) as lines:
    ...             lines.add({"image": len(lines.rows)})
    ...     print(lines.rows)
    [{'image': 0}, {'image': 1}]
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(path.with_name(f"{path.name}.lock")))
            content = path.read_bytes() if path.exists() else b""
            rows, whole = _read_lines(path, content, run)
            if whole < len(content):
                os.truncate(path, whole)
            if not whole:
                path.write_bytes(_line(run, {}))
        except OSError as error:
            raise unwritable(path, error) from error
        yield Lines(path, run, rows)


def _read_lines(path: Path, content: bytes, run: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The rows of a file and how many of its bytes are whole lines."""
    first = _line(run, {})
    *lines, torn = content.split(b"\n")
    if lines[0] + b"\n" != first if lines else not first.startswith(torn):
        raise InvalidInput(
            f"{printable(str(path))} cannot be resumed: it belongs to another network, norm, file of images or "
            "version, or to no run at all; give --resume another name."
        )
    rows = [_row(line, run) for line in lines[1:]]
    if None in rows:
        number = rows.index(None) + 2
        raise InvalidInput(
            f"line {number} of {printable(str(path))} is not what was written: remove it, and it is done again."
        )
    return [row for row in rows if row is not None], len(content) - len(torn)


def _row(line: bytes, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a line says; None where it is not what was written."""
    try:
        row = read_json(line.decode())
    except (Damaged, UnicodeDecodeError):
        return None
    row.pop(SEAL, None)
    return row if _line(row, run) == line + b"\n" else None


def _line(row: Mapping[str, Any], run: Mapping[str, Any]) -> bytes:
    """One line, its seal last."""
    seal = hashlib.sha256(json.dumps([run, row], sort_keys=True).encode()).hexdigest()
    return json.dumps({**row, SEAL: seal}).encode() + b"\n"
