"""A check that a map reproduces the model's own attention.

The model runs once on random tokens. A copy of the attention block is called again in double precision with the
recorded arguments (positions, mask), on its own tokens and on larger ones, whose logits are large enough that a wrong
scale, soft-cap or mask cannot hide behind nearly uniform weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import relative_error
from howsmooth.attention import ComposedAttention, SelfAttention
from howsmooth.errors import UnsupportedModel
from howsmooth.models.forward_pass import Call, record_calls, reference_mode, temporary_hooks
from howsmooth.models.module_names import AttentionSite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rotations = dict[int, tuple[Tensor, Tensor]]
"""Identity of a rounded tensor → that tensor (a reference keeps its identity unique) and the same unrounded."""
TOLERANCE = 1e-4
"""Largest relative difference (Frobenius norm, without the output bias) between the map and the model's own output."""
_TOKENS = 24
_LONGEST = 512
_LARGE_LOGIT = 4.0


def check_against_model(
    model: PreTrainedModel, site: AttentionSite, attention: SelfAttention | ComposedAttention
) -> None:
    """Raise `UnsupportedModel` when the map differs from the model's own attention by more than `TOLERANCE`."""
    for name, weight in attention.named_buffers():
        if weight.is_floating_point() and "logit_biases" not in name and not bool(torch.isfinite(weight).all()):
            raise UnsupportedModel(
                f"the {name.replace('_', ' ')} of layer {site.layer} of {type(model).__name__} holds NaN or infinite "
                "values: the file is damaged, or training diverged."
            )
    with _unrounded_rotations(model) as unrounded_by_id:
        call = record_calls(model, [site], random_inputs(model, _length(model, attention)))[site.layer]
    exact = copy.deepcopy(attention).to("cpu", torch.float64)
    with reference_mode(model):
        block = copy.deepcopy(site.block).to("cpu", torch.float64)
        seen = _double(call.hidden, unrounded_by_id)
        for tokens in (seen, _large_tokens(exact, seen)):
            output = _own_output(AttentionSite(site.layer, block, site.names), call, tokens, unrounded_by_id)
            error = relative_error(exact(tokens), output, exact.output_bias)
            if not error <= TOLERANCE:
                raise UnsupportedModel(
                    f"the attention of layer {site.layer} as read from {type(model).__name__} differs from what the "
                    f"model computes by a relative {error:.1e}: a feature of it is not modelled, so measure it as "
                    "a function instead."
                )


def random_inputs(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """Random token ids, a random image or random audio, whichever the model takes; the same in every call."""
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    if model.main_input_name == "input_ids":
        return {"input_ids": torch.randint(config.vocab_size, (1, length), generator=generator)}
    if model.main_input_name == "pixel_values":
        size = config.image_size
        shape = (config.num_channels, *((size, size) if isinstance(size, int) else size))
    elif model.main_input_name == "input_values":
        shape = (samples_of_frames(length, config.conv_kernel, config.conv_stride),)
    elif model.main_input_name == "input_features":
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    else:
        raise UnsupportedModel(
            f"{type(model).__name__} takes {model.main_input_name!r}, but only token ids, images and audio can be "
            "checked."
        )
    return {model.main_input_name: torch.randn(1, *shape, generator=generator).to(model.dtype)}


def samples_of_frames(frames: int, kernels: Sequence[int], strides: Sequence[int]) -> int:
    """The number of audio samples from which a stack of convolutions makes this many frames.

    >>> samples_of_frames(3, kernels=[10, 3], strides=[5, 2])
    40
    """
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        frames = (frames - 1) * stride + kernel
    return frames


def _length(model: PreTrainedModel, attention: SelfAttention | ComposedAttention) -> int:
    """Enough tokens to see past a sliding window, unless it is very long."""
    past = attention.terms.most_seen(math.inf) + 8
    wanted = max(_TOKENS, int(past)) if past <= _LONGEST else _TOKENS
    # RoBERTa counts positions from 2.
    return max(2, min(wanted, getattr(model.config, "max_position_embeddings", wanted + 2) - 2))


def _large_tokens(attention: SelfAttention | ComposedAttention, like: Tensor) -> Tensor:
    """Random tokens, scaled so that logits have a root mean square of about four."""
    tokens = torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=like.dtype)
    if isinstance(attention, ComposedAttention):
        query, key, _ = attention.staged(tokens)
        size = float((query @ key.mT).square().mean().sqrt())
    else:
        query, key, _ = attention.project(tokens)
        size = float((query @ key.mT).square().mean().sqrt()) * attention.scale
    return tokens * (_LARGE_LOGIT / size) ** 0.5 if size > 0 else tokens


def _own_output(site: AttentionSite, call: Call, tokens: Tensor, unrounded_by_id: Rotations) -> Tensor:
    """The output of the block's output projection when the block is called on ``tokens``."""
    outputs: list[Tensor] = []
    projection = site.submodule(site.names.output)
    with temporary_hooks([projection.register_forward_hook(lambda module, args, output: outputs.append(output))]):
        site.block(tokens, *_double(call.args, unrounded_by_id), **_double(call.kwargs, unrounded_by_id))
    return outputs[-1]


def _double(value: Any, unrounded_by_id: Rotations) -> Any:
    """Every floating tensor inside ``value`` in double precision on the CPU."""
    if isinstance(value, Tensor):
        value = unrounded_by_id.get(id(value), (value, value))[1].cpu()
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_double(item, unrounded_by_id) for item in value)
    if isinstance(value, dict):
        return {name: _double(item, unrounded_by_id) for name, item in value.items()}
    return value


@contextmanager
def _unrounded_rotations(model: PreTrainedModel) -> Iterator[Rotations]:
    """Collect the cosines and sines of rotary positions before the model rounds them to its own precision.

    Half precision has about three digits, too few for the tolerance.
    """
    unrounded_by_id: Rotations = {}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        exact = module.forward(args[0].double(), *args[1:], **kwargs)
        if isinstance(output, Tensor):  # complex numbers, which no model rounds
            return
        unrounded_by_id.update(
            {id(rounded): (rounded, unrounded) for rounded, unrounded in zip(output, exact, strict=True)}
        )

    rotary = [module for path, module in model.named_modules() if path.split(".")[-1] == "rotary_emb"]
    with temporary_hooks(module.register_forward_hook(record, with_kwargs=True) for module in rotary):
        yield unrounded_by_id
