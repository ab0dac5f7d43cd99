"""Attention maps and tokens for the experiments, from the same sources that every command takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from howsmooth.attention import AttentionMap
from howsmooth.attention.conversion import plain_map
from howsmooth.bounds import get
from howsmooth.errors import InvalidInput
from howsmooth.models import CapturedSite, OpenModel, alice, capture, open_model
from howsmooth.models.weight_files import load_attention

RANDOM_BERT, RANDOM_GPT2 = (f"random:{kind}[layers=12,width=768,heads=12]" for kind in ("bert", "gpt2"))
SUBSTITUTES = {
    "bert-base-uncased": (
        f"minilm (BERT's architecture with 6 layers of width 384, distilled and fine-tuned: other weights, other "
        f"numbers) or {RANDOM_BERT} (BERT's size, untrained)"
    ),
    "gpt2": (
        f"smollm2 (trained and causal, but a Llama with rotary positions and weights rounded to 4 bits) or "
        f"{RANDOM_GPT2} (GPT-2's size, untrained)"
    ),
}
"""The papers' models → substitutes where the hub cannot be reached, and their differences."""
ONE = torch.ones(1, 1, dtype=torch.float64)


@lru_cache(maxsize=1)
def experiment_model(source: str) -> OpenModel:
    """Open a model and cache it until another is requested; the error for a missing one names substitutes.

    >>> experiment_model("random:gpt2[layers=1,width=8,heads=2]").modality
    'text'
    """
    try:
        return open_model(source)
    except InvalidInput as error:
        name = source.rpartition("/")[2]
        if name not in SUBSTITUTES:
            raise
        raise InvalidInput(f"{error} In the place of {name} this experiment takes {SUBSTITUTES[name]}.") from error


def sites(
    source: str, layers: Iterable[int], length: int, text: str | None = None, count: int = 1
) -> Iterator[list[CapturedSite]]:
    """Yield some attention blocks of a model with their input tokens, for each of ``count`` windows."""
    model = experiment_model(source)
    for window in model.windows(alice() if text is None else text, length=length, count=count):
        yield capture(model.model, model.inputs(window), layers)


def bound_values(names: dict[str, str], attention: AttentionMap, **where: Any) -> dict[str, float]:
    """Evaluate bounds of the catalogue: column → name becomes column → number."""
    return {column: float(get(name)(attention, **where)) for column, name in names.items()}


def attention_block(source: str, layer: int) -> AttentionMap:
    """Read the attention of a layer: of a model, or of GPT-2's layers in a safetensors file, which is causal."""
    if Path(source).suffix == ".safetensors":
        return load_attention(source, f"h.{layer}.attn.", heads=12, mask="causal")
    [[site]] = sites(source, [layer], 8)
    return plain_map(site.attention, "this experiment")
