"""The option ``--over`` of commands, and the image of the normalisation before a layer."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from howsmooth.cli.source_options import MapAtTokens, Request
from howsmooth.errors import InvalidInput
from howsmooth.models.probed_norms import norm_before, norm_beside, stored_gain
from howsmooth.sets import SetText
from howsmooth.sets.ellipsoid import Ellipsoid

if TYPE_CHECKING:
    from transformers import PreTrainedModel


OVER = "{}: point, around:0.01, around:1% (of the mean token norm), together:0.01, ball:2, sphere:2, norm, norm:NAME."
"""Help of an option ``--over``."""
_NORM_NAMES = re.compile(r"(norm|\bln)\w*\.weight$", re.IGNORECASE)


def norm_image(site: MapAtTokens, request: Request, over: SetText) -> Ellipsoid | None:
    """The image of the normalisation that ``norm``, ``norm:NAME`` or ``rms:NAME`` means; None for another set."""
    if over.form not in ("norm", "rms"):
        return None
    if over.name is None:
        return layer_tokens(site, request)
    name = over.name.removesuffix(".")
    if f"{name}.weight" not in site.tensors:
        known = sorted(key.removesuffix(".weight") for key in site.tensors if _NORM_NAMES.search(key))
        choices = f": choose from {', '.join(known[:8])}" if known else ""
        raise InvalidInput(f"{site.source} holds no normalisation {name!r}{choices}.")
    return named_norm(site, name, over.form == "rms")


def layer_tokens(site: MapAtTokens, request: Request) -> Ellipsoid:
    """The image of the normalisation before the attention of this layer."""
    if site.model is not None:
        return tokens_before(site.model, request.layer or 0)
    name = norm_beside(site.tensors, request.prefix)
    if name is None:
        raise InvalidInput(f"{site.source} holds no normalisation before this attention: give --over ball:2.")
    # Normalisations without a shift are RMSNorms, and the image of a LayerNorm lies in that of an RMSNorm.
    return named_norm(site, name, rms=f"{name}.bias" not in site.tensors)


def tokens_before(model: PreTrainedModel, layer: int) -> Ellipsoid:
    """The set of all tokens that the attention of a layer can receive: the image of the normalisation before it.

    >>> from transformers import GPT2Config, GPT2Model
    >>> tokens_before(GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9)), 0).radius
    4.0
    """
    norm, x = norm_before(model, layer)
    return Ellipsoid.after(norm, x.shape[-1])


def named_norm(site: MapAtTokens, name: str, rms: bool) -> Ellipsoid:
    """The image of the normalisation of that name in a file or model."""
    weight, shift = site.tensors[f"{name}.weight"], site.tensors.get(f"{name}.bias")
    if site.model is not None:
        return Ellipsoid.after(site.model.get_submodule(name), len(weight))
    gain, known = stored_gain(weight, name, site.source)
    tokens = (Ellipsoid.rms_norm if rms else Ellipsoid.layer_norm)(gain, shift)
    return tokens if known else replace(tokens, origin=f"{tokens.origin} with gain w or 1 + w")
