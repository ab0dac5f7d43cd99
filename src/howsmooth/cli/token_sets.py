"""Which set of inputs the options of a command name: balls, what a layer's own normalisation gives out."""

from __future__ import annotations

import importlib
import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth.cli.sources import Request, Site
from howsmooth.errors import InvalidInput
from howsmooth.models.conventions import attention_site
from howsmooth.models.norm_images import read_norm
from howsmooth.models.running import listening, record_calls
from howsmooth.sets import Normalised, TokenSet
from howsmooth.weights import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE = torch.tensor([[5, 3, 7, 2]])
_NEXT_TO_ATTENTION = ("ln_1", "input_layernorm", "layernorm_before", "self_attn_layer_norm", "layer_norm1", "norm1")
"""How frameworks call the normalisation that stands before attention, beside it in the same layer."""
_IN_DOUBT = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Names that models with gains of w and models with gains of 1 + w share."""
_WIDTH = 8


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
            # Normalisations without a shift are RMSNorms, and what a LayerNorm gives out lies in the set of an RMSNorm.
            return named_norm(site, name, rms=f"{name}.bias" not in site.tensors)
    raise InvalidInput(f"{site.source} holds no normalisation before this attention: give --radius as a number.")


def tokens_before(model: PreTrainedModel, layer: int) -> TokenSet:
    """The set of all tokens that the attention of a layer can receive: the image of the normalisation before it.

    The model runs once on a few tokens; the normalisation is the module whose output the attention receives. What it
    does is read off its answers (`TokenSet.after`), and the tokens that were heard must lie in the set.

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
            with suppress(InvalidInput):  # not every module with norm in its name is one
                found = TokenSet.after(module, x.shape[-1])
                if Normalised(found).excess(x[0].double()) <= 1e-4 * found.radius:
                    return found
    raise InvalidInput(
        f"the attention of layer {layer} of this {type(model).__name__} does not receive the output of a LayerNorm or "
        "RMSNorm: give --radius as a number."
    )


def named_norm(site: Site, name: str, rms: bool) -> TokenSet:
    """What the normalisation of that name in a file or model can give out.

    Tensors alone do not say whether the gain is the weight w or 1 + w (Gemma, Nemotron, Qwen3-Next). A model answers
    itself, and a config.json beside the file names the classes to ask. Otherwise only the names that such models use
    are in doubt; the set then has the larger of |w| and |1 + w| in every coordinate, so that it holds both images.
    """
    weight, shift = site.tensors[f"{name}.weight"], site.tensors.get(f"{name}.bias")
    if site.model is not None:
        return TokenSet.after(site.model.get_submodule(name), len(weight))
    extra = _adds_one(site.source, name)
    gain = weight.double()
    if extra is None:
        gain = torch.maximum(gain.abs(), (1 + gain).abs())
    elif extra:
        gain = 1 + gain
    found = (TokenSet.after_rms_norm if rms else TokenSet.after_layer_norm)(gain, shift)
    return found if extra is not None else replace(found, origin=f"{found.origin} with gain w or 1 + w")


def _adds_one(source: str, name: str) -> bool | None:
    """Whether the gain of a normalisation in a weights file is 1 + weight; None when that cannot be known."""
    try:
        kind = str(json.loads(Path(source).with_name("config.json").read_text(encoding="utf-8"))["model_type"])
        if not kind.isidentifier():
            return None
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None if name.rpartition(".")[2] in _IN_DOUBT else False
    found = set()
    for entry in vars(module).values():
        if isinstance(entry, type) and issubclass(entry, nn.Module) and "norm" in entry.__name__.lower():
            with suppress(Exception):  # classes that take other arguments, or do something else
                norm: Any = entry(_WIDTH)
                norm.weight.data.uniform_(0.25, 0.75)
                found.add(not torch.equal(read_norm(norm).gain, norm.weight.detach().double()))
    return found.pop() if len(found) == 1 else None if found else False
