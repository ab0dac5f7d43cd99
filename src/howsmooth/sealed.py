"""Safetensors files under a seal: a SHA-256 of every tensor and of every word of the header.

A safetensors file holds named tensors and a few named texts. The seal is one text more, ``sha256``, over all of the
others: names, dtypes, shapes and numbers of the tensors, names and content of the texts. What is damaged by chance is
refused, whatever byte it is. A seal is no signature: whoever writes a file on purpose writes its seal too, so that what
a sealed file says is still to be checked by those who read it. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from howsmooth.small import digest

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
