"""Which set of inputs the options of a command name: balls, what a layer's own normalisation gives out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth.bounds.tokens import TokenSet
from howsmooth.cli.sources import Request, Site
from howsmooth.errors import InvalidInput
from howsmooth.models.conventions import attention_site
from howsmooth.models.listening import listening, record_calls
from howsmooth.weights import find_blocks
from howsmooth.worstcase.sets import Normalised

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE = torch.tensor([[5, 3, 7, 2]])
_NEXT_TO_ATTENTION = ("ln_1", "input_layernorm", "layernorm_before", "self_attn_layer_norm", "layer_norm1", "norm1")
"""How frameworks call the normalisation that stands before attention, beside it in the same layer."""


def positive_numbers(text: str, option: str) -> list[float]:
    """``1,2,5`` in rising order.

    >>> positive_numbers("2, 0.5", "--radius")
    [0.5, 2.0]
    """
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = [math.nan]
    if not all(math.isfinite(number) and number > 0 for number in found):
        raise InvalidInput(f"{option} takes positive numbers such as 0.5,1,2, got {text!r}.")
    return found


def layer_tokens(site: Site, request: Request) -> TokenSet:
    """What the normalisation before the attention of this layer can give out."""
    if site.model is not None:
        return tokens_before(site.model, request.layer or 0)
    blocks = find_blocks(site.tensors)
    prefixes = [prefix for prefix in blocks if request.prefix is None or prefix == request.prefix.rstrip(".") + "."]
    layer = prefixes[0].removesuffix(".").rpartition(".")[0] if len(prefixes) == 1 else ""
    for name in (f"{layer}.{norm}".lstrip(".") for norm in _NEXT_TO_ATTENTION):
        if f"{name}.weight" in site.tensors:
            shift = site.tensors.get(f"{name}.bias")
            # Normalisations without a shift are RMSNorms, and what a LayerNorm gives out lies in the set of an RMSNorm.
            make = TokenSet.after_rms_norm if shift is None else TokenSet.after_layer_norm
            return make(site.tensors[f"{name}.weight"], shift)
    raise InvalidInput(f"{site.source} holds no normalisation before this attention: give --radius as a number.")


def tokens_before(model: PreTrainedModel, layer: int) -> TokenSet:
    """The set of all tokens that the attention of a layer can receive: the image of the normalisation before it.

    The model runs once on a few tokens; the normalisation is the module whose output the attention receives. Its gain
    and shift are read off at constant tokens, since some classes multiply by 1 + weight and some named LayerNorm do not
    subtract the mean; the tokens that were heard must lie in the set.

    >>> from transformers import GPT2Config, GPT2Model
    >>> tokens_before(GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9)), 0).radius
    4.0
    """
    heard: list[tuple[nn.Module, Tensor]] = []

    def hear(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            heard.append((module, output))

    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    with listening(module.register_forward_hook(hear) for module in norms):
        x = record_calls(model, [attention_site(model, layer)], {"input_ids": _PROBE})[layer].hidden
    for module, output in reversed(heard):
        if output.shape == x.shape and torch.equal(output, x):
            found = _image(module, x.shape[-1])
            if Normalised(found).excess(x[0].double()) <= 1e-4 * found.radius:
                return found
    raise InvalidInput(
        f"the attention of layer {layer} of this {type(model).__name__} does not receive the output of a LayerNorm or "
        "RMSNorm: give --radius as a number."
    )


@torch.no_grad()
def _image(norm: Any, width: int) -> TokenSet:
    """A LayerNorm gives out its shift at constant tokens, an RMSNorm its gain and shift."""
    like = next(norm.parameters(), torch.zeros(()))
    shift, constant = (norm(torch.full((1, width), value).to(like))[0].double() for value in (0.0, 1024.0))
    if torch.allclose(constant, shift, atol=1e-3):
        gain = getattr(norm, "weight", None)
        return TokenSet.after_layer_norm(torch.ones(width) if gain is None else gain.detach(), shift)
    return TokenSet.after_rms_norm(constant - shift, shift)
