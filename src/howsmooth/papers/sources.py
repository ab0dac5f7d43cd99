"""Attention maps and tokens for the experiments, by the one grammar of sources."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from howsmooth.attention import AttentionMap
from howsmooth.models import CapturedSite, alice, capture, open_model
from howsmooth.weights import load_attention


@lru_cache(maxsize=1)
def sites(source: str, length: int, text: str | None = None, count: int = 1) -> tuple[tuple[CapturedSite, ...], ...]:
    """Every attention block of a model with the tokens it saw, for each of so many windows."""
    opened = open_model(source)
    windows = opened.windows(alice() if text is None else text, length=length, count=count)
    return tuple(tuple(capture(opened.model, opened.inputs(window))) for window in windows)


def block(source: str, layer: int) -> AttentionMap:
    """The attention of a layer: of a model, or of GPT-2's layers in a safetensors file, which is causal."""
    if Path(source).suffix == ".safetensors":
        return load_attention(source, f"h.{layer}.attn.", heads=12, mask="causal")
    return sites(source, 8)[0][layer].attention
