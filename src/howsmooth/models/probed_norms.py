r"""Gain, shift and kind of a normalisation, read from outputs of the module rather than from its name.

Classes called LayerNorm may not centre (T5), and gains may be :math:`1 + w` instead of :math:`w` (Gemma, Nemotron). So
a module is probed: at zero it returns its shift β, at a constant token β again when it centres and γ + β when it does
not. With the gain that its weight explains, its outputs at random tokens of many sizes must be

.. math:: \gamma\circ\frac{z}{\sqrt{|z|^2/d+\varepsilon}} + \beta, \qquad z = x \text{ or } x - \bar x,

for some ε ≥ 0, the same for every token at any position. A module with other outputs is refused.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from howsmooth.errors import InvalidInput
from howsmooth.models.forward_pass import record_calls, temporary_hooks
from howsmooth.models.model_inputs import random_inputs
from howsmooth.models.module_names import attention_site, find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LARGE = 2.0**14
_SIZES = (1e-8, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
_TOKENS = 8
_TOLERANCE = 1e-4
"""Many models round to float32 inside, and ε still shows at the large token; the kinds differ by far more."""
_RUN_LENGTH = 4
_NEXT_TO_ATTENTION = ("ln_1", "input_layernorm", "layernorm_before", "self_attn_layer_norm", "layer_norm1", "norm1")
"""Names of the normalisation before attention, beside it in the same layer."""
_IN_DOUBT = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Names that models with gains of w and models with gains of 1 + w share."""
_WIDTH = 8


@dataclass(frozen=True)
class NormImage:
    """x ↦ gain∘z/√(|z|²/d + ε) + shift with z = x, or x less its mean when ``centred``; vectors in float64."""

    gain: Tensor
    shift: Tensor
    centred: bool


@torch.no_grad()
def read_norm(norm: nn.Module, width: int | None = None) -> NormImage:
    """Gain, shift and kind of a normalisation of single tokens.

    Args:
        width: of the tokens, for a module without weights.

    >>> norm = read_norm(nn.LayerNorm(4))
    >>> norm.centred, norm.gain
    (True, tensor([1., 1., 1., 1.], dtype=torch.float64))
    """
    probed = _frozen(norm)
    width = _width(norm) or width
    if width is None:
        raise InvalidInput(f"the width of this {type(norm).__name__} is not known: give the width of its tokens.")
    shift, constant = (_output(norm, probed, torch.full((1, width), size))[0] for size in (0.0, _LARGE))
    scale = max(1e-30, float((_output(norm, probed, _LARGE * _random(width)) - shift).abs().max()))
    centred = bool((constant - shift).abs().max() <= _TOLERANCE * scale)
    for gain in _explanations(probed, width):
        image = NormImage(gain, _exact(probed, shift), centred)
        if _explains(image, norm, probed, scale):
            return image
    raise _refused(norm)


def _frozen(norm: nn.Module) -> nn.Module:
    named = any("norm" in kind.__name__.lower() for kind in type(norm).__mro__)
    if not isinstance(norm, nn.Module) or not named:
        raise _refused(norm)
    shape = _normalized_shape(norm)
    if len(shape) > 1:
        raise InvalidInput(f"normalisation must act on single tokens, but this one acts on {shape}.")
    gated = len(inspect.signature(norm.forward).parameters) != 1  # a gate scales its output
    if isinstance(norm, _NormBase | nn.GroupNorm) or gated:
        raise _refused(norm)
    return copy.deepcopy(norm).to("cpu", torch.float64).eval()


def _width(norm: nn.Module) -> int | None:
    for given in (getattr(norm, "weight", None), *norm.parameters(), *norm.buffers()):
        if isinstance(given, Tensor) and given.dim() == 1:
            return len(given)
    return next(iter(_normalized_shape(norm)), None)


def _normalized_shape(norm: nn.Module) -> tuple[int, ...]:
    """The axes of a normalisation of torch; empty where the module does not give them."""
    shape: Any = getattr(norm, "normalized_shape", ())
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _output(norm: nn.Module, probed: nn.Module, x: Tensor) -> Tensor:
    """The output of the module at tokens (…, n, d), in float64; refused when it is no array of their shape."""
    like: Any = next(probed.parameters(), torch.zeros((), dtype=torch.float64))
    try:
        output = probed(x.to(like) if like.is_floating_point() else x.double())
    except Exception as error:
        raise _refused(norm) from error
    if not isinstance(output, Tensor) or output.shape != x.shape or not bool(output.isfinite().all()):
        raise _refused(norm)
    return output.double()


def _random(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, width, generator=generator, dtype=torch.float64)
    return x + torch.linspace(-2, 2, _TOKENS, dtype=torch.float64)[:, None]  # with means of every sign


def _explanations(probed: nn.Module, width: int) -> list[Tensor]:
    """Gains that the module's weight would explain: w, 1 + w, 1."""
    weight, one = getattr(probed, "weight", None), torch.ones(width, dtype=torch.float64)
    if not isinstance(weight, Tensor) or weight.shape != (width,):
        return [one]
    return [weight.detach().double(), 1 + weight.detach().double(), one]


def _exact(probed: nn.Module, shift: Tensor) -> Tensor:
    """The bias itself, where the module returns it at zero up to rounding."""
    bias = getattr(probed, "bias", None)
    if isinstance(bias, Tensor) and bias.shape == shift.shape:
        exact = bias.detach().double()
        if bool((exact - shift).abs().max() <= 1e-6 * (1 + float(exact.abs().max()))):
            return exact
    return shift


def _explains(image: NormImage, norm: nn.Module, probed: nn.Module, scale: float) -> bool:
    """Whether the module agrees with the image at tokens of many sizes, for one ε."""
    x = _random(len(image.gain))
    z = x - x.mean(-1, keepdim=True) if image.centred else x
    unit = z / z.square().mean(-1, keepdim=True).sqrt()
    limit, slack = image.gain * unit, _TOLERANCE * scale
    for size in _SIZES:
        output = _output(norm, probed, size * x) - image.shift
        together = _output(norm, probed, size * x[None])[0] - image.shift
        alone = _output(norm, probed, size * x[:1]) - image.shift
        if not bool((together - output).abs().max() <= slack and (alone - output[:1]).abs().max() <= slack):
            return False
        # Short of the limit by a factor between 0 and 1, which is 1 for large tokens.
        square = limit.square().sum(-1, keepdim=True)
        share = (output * limit).sum(-1, keepdim=True) / square.clamp_min(1e-300)
        beyond = bool((share > 1 + _TOLERANCE).any() or (share < -_TOLERANCE).any())
        if beyond or bool((output - share * limit).abs().max() > slack):
            return False
        if size >= 1e4 and bool((share < 1 - _TOLERANCE).any()):
            return False
    return True


def _refused(norm: object) -> InvalidInput:
    return InvalidInput(f"{type(norm).__name__} is not a LayerNorm or RMSNorm of single tokens: give a radius instead.")


def norm_before(model: PreTrainedModel, layer: int) -> tuple[nn.Module, Tensor]:
    """The normalisation whose output is the input of a layer's attention, and this output, ``(n, d)``.

    The model runs once on a few random tokens; the module whose output the attention receives must be a LayerNorm or
    RMSNorm (`read_norm`).

    >>> from transformers import GPT2Config, GPT2Model
    >>> norm_before(GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=9)), 0)[0].normalized_shape
    (16,)
    """
    outputs: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs.append((module, output))

    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    with temporary_hooks(module.register_forward_hook(record) for module in norms):
        x = record_calls(model, [attention_site(model, layer)], random_inputs(model, _RUN_LENGTH))[layer].hidden
    for module, output in reversed(outputs):
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
    """The gain of a normalisation in a weight file, in float64, and whether it is known.

    Tensors alone do not show whether the gain is the weight w or 1 + w (Gemma, Nemotron, Qwen3-Next). A config.json
    beside the file names the classes to probe. Otherwise only the names in such models are in doubt; the gain is then
    the larger of |w| and |1 + w| in every coordinate, so that the image contains both.
    """
    extra, gain = _adds_one(file, name), weight.double()
    if extra is None:
        return torch.maximum(gain.abs(), (1 + gain).abs()), False
    return (1 + gain if extra else gain), True


def _adds_one(source: str, name: str) -> bool | None:
    """Whether the gain of a normalisation in a weight file is 1 + weight; None when it is unknown."""
    try:
        kind = str(json.loads(Path(source).with_name("config.json").read_text(encoding="utf-8"))["model_type"])
        if not kind.isidentifier():
            return None
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None if name.rpartition(".")[2] in _IN_DOUBT else False
    kinds = set()
    for entry in vars(module).values():
        if isinstance(entry, type) and issubclass(entry, nn.Module) and "norm" in entry.__name__.lower():
            with suppress(Exception):  # classes that take other arguments, or do something else
                norm: Any = entry(_WIDTH)
                norm.weight.data.uniform_(0.25, 0.75)
                kinds.add(not torch.equal(read_norm(norm).gain, norm.weight.detach().double()))
    return kinds.pop() if len(kinds) == 1 else None if kinds else False
