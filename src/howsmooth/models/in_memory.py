"""Models in memory: a transformers model, a pipeline, a compiled or an adapted model.

A copy is measured, in float32 and evaluation mode with eager attention. The caller's model keeps its dtype, hooks,
gradients and device.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from howsmooth._util.common import first_line, foreign_hooks, out_of_memory
from howsmooth._util.optional_deps import need
from howsmooth._util.process_lock import alone
from howsmooth._util.validation import Device, check_device, shown
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.named_models import precision_in_words
from howsmooth.models.open_source import NO_TOKENIZER, OpenModel, describe_model, moved
from howsmooth.models.pretrained_files import (
    processor_of,
    quiet,
)

if TYPE_CHECKING:
    pass

_MODEL = ("modeling_utils", "PreTrainedModel")


@alone
def model_in_memory(
    source: Any, tokenizer: Any = None, *, head: bool = False, device: Device | None = None
) -> OpenModel:
    """A model in memory, ready to be measured.

    Args:
        source: a model of transformers, one wrapped by `torch.compile` or PEFT (active adapters are merged into the
            copy), or a pipeline, which brings its own tokenizer. A model on several devices (device_map) is gathered
            on one. Hooks are dropped, with a note.
        tokenizer: the tokenizer, image processor or feature extractor; by default the one that transformers finds under
            the name of the model. A model of text without a tokenizer reads bytes as token ids, with a note.
        head: with its task head, for "logits".
        device: the device of the measurement; by default that of the model.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300))
    >>> opened = model_in_memory(model)
    >>> opened.name, opened.precision, opened.notes
    ('GPT2LMHeadModel in memory', 'float32', ('the model came without a tokenizer, ...',))
    """
    if _is_of_transformers(source, "pipelines.base", "Pipeline"):
        beside = [getattr(source, name, None) for name in ("tokenizer", "image_processor", "feature_extractor")]
        tokenizer = tokenizer or next((each for each in beside if each is not None), None)
        source = source.model
    if device is not None:
        check_device(device)
    dropped: tuple[str, ...] = ()
    whole = getattr(source, "_orig_mod", source)
    if not isinstance(whole, nn.Module):
        raise InvalidInput(f"model must be a text or a model of transformers, got {shown(source)}.")
    if hasattr(whole, "merge_and_unload") or _is_of_transformers(whole, *_MODEL):
        whole, dropped = _plain(whole)
    if not _is_of_transformers(whole, *_MODEL):
        raise UnsupportedModel(
            f"a model of transformers can be scanned, got {type(source).__name__}: of any other function, "
            "hs.measure takes one input at a time."
        )
    kinds = {str(weight.dtype).removeprefix("torch.") for weight in source.parameters()}
    if any(weight.is_meta for weight in whole.parameters()):
        raise InvalidInput(
            "some weights of the model are on the meta device: load them before measuring; a model whose layers are "
            "offloaded is measured from its folder, by howsmooth.models.LayeredModel."
        )
    if getattr(whole.config, "quantization_config", None) is not None:
        raise UnsupportedModel("the weights of the model are quantised: measure it in full precision.")
    name = whole.config.name_or_path
    if tokenizer is None and name:
        with quiet():
            tokenizer = processor_of(name, whole.main_input_name)
    model: Any = whole if head else whole.base_model
    if getattr(whole.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    model = moved(model.eval(), device or whole.device, torch.float32)
    precision = precision_in_words(" and ".join(sorted(kinds)))
    bytewise = (NO_TOKENIZER,) if tokenizer is None and model.main_input_name == "input_ids" else ()
    label = name or f"{type(whole).__name__} in memory"
    return describe_model(
        label, model, tokenizer, precision, "not stated", notes=(*bytewise, *dropped), reads_bytes=bool(bytewise)
    )


def _is_of_transformers(value: object, module: str, name: str) -> bool:
    """Whether a value is of a class of transformers; a module that is not loaded yet, which takes seconds, has none."""
    loaded = sys.modules.get(f"transformers.{module}")
    return loaded is not None and isinstance(value, getattr(loaded, name))


def _plain(model: Any) -> tuple[Any, tuple[str, ...]]:
    """A copy without foreign hooks and with adapters merged into the weights, and notes on dropped hooks."""
    try:
        twin: Any = copy.deepcopy(model)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise InvalidInput(f"the model cannot be read where it is: {first_line(error)}.") from error
    if hasattr(twin, "merge_and_unload"):  # a model of PEFT
        twin = _merged(twin)
    if (
        getattr(twin, "hf_device_map", None) is not None
    ):  # on several devices: drop the hooks that move tensors between them
        need("accelerate", "a model with a device_map").hooks.remove_hook_from_submodules(twin)
    _uncompile(twin)
    foreign = sum(map(foreign_hooks, twin.modules()))
    for module in twin.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            hooks.clear()
    return twin, (f"forward hooks of the model are left out ({foreign}), with all they change in it",) * bool(foreign)


def _uncompile(model: nn.Module) -> None:
    """Undo `torch.compile` inside the model; refuse any other forward that was set from outside."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(getattr(child, "_orig_mod", None), nn.Module):
                setattr(module, name, child._orig_mod)
    for module in model.modules():
        own = vars(module).pop("forward", None)
        plain = getattr(own, "_torchdynamo_orig_callable", own)  # accelerate's hooks leave the class's own behind
        if own is not None and getattr(plain, "__func__", None) is not type(module).forward:
            raise UnsupportedModel(
                f"a {type(module).__name__} of the model has a forward that was put in from outside: take it out."
            )


def _merged(model: Any) -> Any:
    """A model of PEFT as a plain model: active adapters are merged into its weights, in float32.

    PEFT itself also merges inactive adapters, and rounds the sum to the precision of the weights, unlike the model.
    """
    model = nn.Module.to(model, dtype=torch.float32)
    layers = [each for each in model.modules() if isinstance(getattr(each, "disable_adapters", None), bool)]
    off = {layer.disable_adapters for layer in layers}
    if off != {True}:
        if True in off:
            raise InvalidInput("adapters are switched on in some layers of the model and off in others: merge them.")
        return model.merge_and_unload()
    if any(hasattr(layer, "modules_to_save") for layer in layers):
        raise InvalidInput("adapters with layers of their own (modules_to_save) are switched off: unload them first.")
    for layer in layers:
        if getattr(layer, "merged", False):
            layer.unmerge()
    return model.unload()
