"""Safetensors files under a seal: a SHA-256 of every tensor and of every word of the header.

A safetensors file holds named tensors and a few named texts. The seal is one text more, ``sha256``, over all of the
others: names, dtypes, shapes and numbers of the tensors, names and content of the texts. What is damaged by chance is
refused, whatever byte it is. A seal is no signature: whoever writes a file on purpose writes its seal too, so that what
a sealed file says is still to be checked by those who read it. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

SEAL = "sha256"


class Damaged(ValueError):
    """A file that is no safetensors file, or not what was written."""


def sealed(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> bytes:
    """The content of a safetensors file with its seal."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(kept, {**texts, SEAL: digest(kept, texts)})


def opened(path: Path) -> tuple[dict[str, Tensor], dict[str, str], bool]:
    """Tensors, texts, and whether they were under a seal; a broken seal is `Damaged`."""
    try:
        with safe_open(path, framework="pt") as file:
            texts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise Damaged(str(error)) from error
    seal = texts.pop(SEAL, None)
    if seal is not None and seal != digest(tensors, texts):
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


def digest(tensors: Mapping[str, Tensor], texts: Mapping[str, str] | None = None) -> str:
    """SHA-256 of texts and tensors, by name."""
    found = hashlib.sha256()
    for name, text in sorted((texts or {}).items()):
        found.update(json.dumps([name, text]).encode() + b"\n")
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode("utf-8", "surrogatepass"))
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return found.hexdigest()


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")
