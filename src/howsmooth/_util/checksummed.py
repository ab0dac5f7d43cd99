"""Safetensors files with a checksum: a SHA-256 of every tensor and every text of the header.

A safetensors file holds named tensors and a few named texts. The checksum is one more text, ``sha256``, over all of the
others: names, dtypes, shapes and numbers of the tensors, names and content of the texts. Accidental damage of any byte
is refused. A checksum is no signature: a program that forges a file also forges its checksum, so that readers still
check the content. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from howsmooth._util.common import digest

CHECKSUM = "sha256"


class Damaged(ValueError):
    """A file that is no safetensors file, or differs from the one that was written."""


def checksummed_bytes(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> bytes:
    """The content of a safetensors file with its checksum."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(stored, {**texts, CHECKSUM: _checksum(stored, texts)})


def read_checksummed(path: Path) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    """Tensors, texts, and whether the file has a checksum; a wrong checksum raises `Damaged`."""
    try:
        with safe_open(path, framework="pt") as file:
            texts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Damaged(str(error)) from error
    stored = texts.pop(CHECKSUM, None)
    if stored is not None and stored != _checksum(tensors, texts):
        raise Damaged("its content is not what was written")
    return tensors, texts, stored is not None


def read_json(text: str) -> dict[str, Any]:
    """The JSON object of a text; `Damaged` for anything else, also for NaN, infinity and very deep nesting."""
    try:
        content = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its header is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise Damaged("its header is no JSON object")
    return content


def _checksum(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    return digest(tensors, "".join(f"{json.dumps([name, text])}\n" for name, text in sorted(texts.items())).encode())


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")
