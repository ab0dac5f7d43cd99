"""A small model in a folder, with a text to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from evidence.scan_faults import TEXT, make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT (2 layers of 4 heads, at most 64 tokens) with a tokenizer of sixty words."""
    place = tmp_path_factory.mktemp("model")
    make_model(place)
    return place


@pytest.fixture(scope="session")
def text(folder: Path) -> Path:
    """3000 words that the tokenizer knows."""
    return folder / TEXT
