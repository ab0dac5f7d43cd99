"""The normalisation that stands before an attention: in a model by listening, in a file of weights by its name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth.errors import InvalidInput
from howsmooth.models.forward_pass import listening, record_calls
from howsmooth.models.module_names import attention_site
from howsmooth.models.probed_norms import read_norm
from howsmooth.models.self_check import random_inputs
from howsmooth.models.weight_files import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 4
_NEXT_TO_ATTENTION = ("ln_1", "input_layernorm", "layernorm_before", "self_attn_layer_norm", "layer_norm1", "norm1")
"""How frameworks call the normalisation that stands before attention, beside it in the same layer."""
_IN_DOUBT = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Names that models with gains of w and models with gains of 1 + w share."""
_WIDTH = 8


def norm_before(model: PreTrainedModel, layer: int) -> tuple[nn.Module, Tensor]:
    """The normalisation whose output the attention of a layer receives, and what it gave out, ``(n, d)``.

    The model runs once on a few random tokens; the normalisation is the module whose output the attention receives, if
    its answers are those of a LayerNorm or RMSNorm (`read_norm`).

    >>> from transformers import GPT2Config, GPT2Model
    >>> norm_before(GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9)), 0)[0].normalized_shape
    (16,)
    """
    heard: list[tuple[nn.Module, Tensor]] = []

    def hear(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            heard.append((module, output))

    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    with listening(module.register_forward_hook(hear) for module in norms):
        x = record_calls(model, [attention_site(model, layer)], random_inputs(model, _TOKENS))[layer].hidden
    for module, output in reversed(heard):
        if output.shape == x.shape and torch.equal(output, x):
            with suppress(InvalidInput):  # not every module with norm in its name is one
                read_norm(module, x.shape[-1])
                return module, x[0]
    raise InvalidInput(
        f"the attention of layer {layer} of this {type(model).__name__} does not receive the output of a LayerNorm or "
        "RMSNorm: give --over ball:2."
    )


def norm_beside(tensors: Mapping[str, Tensor], prefix: str | None) -> str | None:
    """The name of the normalisation before the attention block with this prefix, or before the only one."""
    known = [block for block in find_blocks(tensors) if prefix is None or block == prefix.rstrip(".") + "."]
    layer = known[0].removesuffix(".").rpartition(".")[0] if len(known) == 1 else ""
    names = (f"{layer}.{norm}".lstrip(".") for norm in _NEXT_TO_ATTENTION)
    return next((name for name in names if f"{name}.weight" in tensors), None)


def stored_gain(weight: Tensor, name: str, file: str) -> tuple[Tensor, bool]:
    """The gain of a normalisation in a file of weights, in float64, and whether it is known.

    Tensors alone do not say whether the gain is the weight w or 1 + w (Gemma, Nemotron, Qwen3-Next). A config.json
    beside the file names the classes to ask. Otherwise only the names that such models use are in doubt; the answer is
    then the larger of |w| and |1 + w| in every coordinate, so that its image holds both.
    """
    extra, gain = _adds_one(file, name), weight.double()
    if extra is None:
        return torch.maximum(gain.abs(), (1 + gain).abs()), False
    return (1 + gain if extra else gain), True


def _adds_one(source: str, name: str) -> bool | None:
    """Whether the gain of a normalisation in a weights file is 1 + weight; None when that cannot be known."""
    try:
        kind = str(json.loads(Path(source).with_name("config.json").read_text(encoding="utf-8"))["model_type"])
        if not kind.isidentifier():
            return None
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None if name.rpartition(".")[2] in _IN_DOUBT else False
    answers = set()
    for entry in vars(module).values():
        if isinstance(entry, type) and issubclass(entry, nn.Module) and "norm" in entry.__name__.lower():
            with suppress(Exception):  # classes that take other arguments, or do something else
                norm: Any = entry(_WIDTH)
                norm.weight.data.uniform_(0.25, 0.75)
                answers.add(not torch.equal(read_norm(norm).gain, norm.weight.detach().double()))
    return answers.pop() if len(answers) == 1 else None if answers else False
