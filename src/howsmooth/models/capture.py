"""Running a model as it is defined and listening to its attention blocks, without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth.models.conventions import Site

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Call:
    """What an attention block was called with: the tokens it saw, ``(batch, n, d)``, and everything else."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Tokens come first, or under the name that transformers gives them."""
        if args:
            return cls(args[0], args[1:], kwargs)
        rest = dict(kwargs)
        return cls(rest.pop("hidden_states"), (), rest)


@contextmanager
def reference_mode(model: PreTrainedModel) -> Iterator[None]:
    """The model without dropout, without gradients and with eager attention; as it was when the block ends.

    Eager attention is the definition of each model: it alone knows every feature (Gemma 2's soft-cap), and its masks
    are written out.
    """
    modes = [(module, module.training) for module in model.modules()]
    configs = list(_with_parts(model.config))
    implementations = [config._attn_implementation for config in configs]
    try:
        model.eval()
        model.config._attn_implementation = "eager"
        with torch.no_grad():
            yield
    finally:
        # Setting it on a configuration sets it on its parts as well, so parts are restored after their whole.
        for config, implementation in zip(configs, implementations, strict=True):
            config._attn_implementation = implementation
        for module, mode in modes:
            module.training = mode


def _with_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _with_parts(part)


def record_calls(model: PreTrainedModel, sites: Sequence[Site], inputs: Mapping[str, Tensor]) -> dict[int, Call]:
    """Run the model once in `reference_mode` and keep what each attention block was called with, by layer."""
    calls: dict[int, Call] = {}

    def listener(layer: int) -> Any:
        def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[layer] = Call.of(args, kwargs)

        return listen

    no_cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with ExitStack() as stack:
        stack.enter_context(reference_mode(model))
        for site in sites:
            handle = site.block.register_forward_pre_hook(listener(site.layer), with_kwargs=True)
            stack.callback(handle.remove)
        model(**{name: value.to(model.device) for name, value in inputs.items()}, **no_cache)
    return calls
