"""Which set of inputs the options of a command name: balls, what a layer's own normalisation gives out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from howsmooth.cli.source_options import MapAtTokens, Request
from howsmooth.errors import InvalidInput
from howsmooth.models.norm_before import norm_before, norm_beside, stored_gain
from howsmooth.sets import TokenSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def positive_numbers(text: str, option: str) -> list[float]:
    """``1,2,5`` in rising order.

    >>> positive_numbers("2, 0.5", "--radius")
    [0.5, 2.0]
    """
    numbers = numbers_in(text)
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise InvalidInput(f"{option} takes positive numbers such as 0.5,1,2, got {text!r}.")
    return numbers


def numbers_in(text: str) -> list[float]:
    """Numbers between commas in rising order; NaN alone where one of them is none."""
    try:
        return sorted({float(number) for number in text.split(",")})
    except ValueError:
        return [math.nan]


def layer_tokens(site: MapAtTokens, request: Request) -> TokenSet:
    """What the normalisation before the attention of this layer can give out."""
    if site.model is not None:
        return tokens_before(site.model, request.layer or 0)
    name = norm_beside(site.tensors, request.prefix)
    if name is None:
        raise InvalidInput(f"{site.source} holds no normalisation before this attention: give --radius as a number.")
    # Normalisations without a shift are RMSNorms, and what a LayerNorm gives out lies in the set of an RMSNorm.
    return named_norm(site, name, rms=f"{name}.bias" not in site.tensors)


def tokens_before(model: PreTrainedModel, layer: int) -> TokenSet:
    """The set of all tokens that the attention of a layer can receive: the image of the normalisation before it.

    >>> from transformers import GPT2Config, GPT2Model
    >>> tokens_before(GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9)), 0).radius
    4.0
    """
    norm, x = norm_before(model, layer)
    return TokenSet.after(norm, x.shape[-1])


def named_norm(site: MapAtTokens, name: str, rms: bool) -> TokenSet:
    """What the normalisation of that name in a file or model can give out."""
    weight, shift = site.tensors[f"{name}.weight"], site.tensors.get(f"{name}.bias")
    if site.model is not None:
        return TokenSet.after(site.model.get_submodule(name), len(weight))
    gain, known = stored_gain(weight, name, site.source)
    tokens = (TokenSet.after_rms_norm if rms else TokenSet.after_layer_norm)(gain, shift)
    return tokens if known else replace(tokens, origin=f"{tokens.origin} with gain w or 1 + w")
