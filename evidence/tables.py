"""Markdown tables for the documentation, with the machine and versions they were made on."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "evidence"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [[1, 2.5]]))
    | a | b |
    | --- | --- |
    | 1 | 2.5 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write(name: str, title: str, parts: Iterable[str]) -> Path:
    """Write one page of evidence and return its path."""
    made_with = f"Made by `make verify` with Python {platform.python_version()} and torch {torch.__version__}."
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.md"
    path.write_text("\n\n".join([f"# {title}", *parts, made_with]) + "\n", encoding="utf-8")
    return path
