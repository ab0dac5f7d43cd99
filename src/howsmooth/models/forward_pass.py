"""Running a model as it is defined and listening to its modules, without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from howsmooth._util.common import evaluating, first_line
from howsmooth._util.process_lock import LOCK, alone
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.models.module_names import Site

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_DECODER = "decoder_"
"""How the inputs of a decoder are named beside those of its encoder."""


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
def reference_mode(model: PreTrainedModel, implementation: str = "eager") -> Iterator[None]:
    """The model without dropout, gradients or cache and with eager attention; as it was when the block ends.

    Eager attention is the definition of each model: it alone knows every feature (Gemma 2's soft-cap), and its masks
    are written out. No other thread is in a model meanwhile.
    """
    with LOCK, evaluating(model), torch.no_grad(), ExitStack() as restored:
        configs = list(_with_inner(model.config))
        # Some parts have configurations of their own (encoder and decoder of T5).
        known = {id(config) for config in configs}
        parts: dict[int, Any] = {id(c): c for c in (getattr(m, "config", None) for m in model.modules())}
        own = [c for number, c in parts.items() if number not in known and hasattr(c, "sub_configs")]
        configs += own
        # Setting it on a configuration sets it on those inside it as well, so these are restored after their whole.
        for config in reversed(configs):
            restored.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            if getattr(config, "_experts_implementation", None) not in (None, "eager"):
                # Experts one by one, as they are defined: faster ways know no double precision.
                restored.callback(setattr, config, "_experts_implementation", config._experts_implementation)
                config._experts_implementation = "eager"
            if hasattr(config, "use_cache"):
                restored.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
        for config in (model.config, *own):
            config._attn_implementation = implementation
        yield


def _with_inner(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _with_inner(inner)


def run(model: PreTrainedModel, inputs: Mapping[str, Tensor], **options: bool) -> Any:
    """The model's output on inputs that are brought to its device first."""
    _check_ids(model, inputs)
    try:
        return model(**{name: value.to(model.device) for name, value in inputs.items()}, **options)
    except HowsmoothError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
        raise InvalidInput(
            f"{type(model).__name__} does not take these inputs ({shapes}): {first_line(error)}; check their names, "
            "shapes and kinds, and that they are no longer than the model allows."
        ) from error


def _check_ids(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """Refuse inputs that are no tensors, and token ids that the model has no word for."""
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or not value.numel():
            said = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InvalidInput(f"{name} of a model is a tensor that holds at least one item, got {said}.")
    ids = inputs.get("input_ids")
    if ids is None:
        return
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InvalidInput(f"token ids are whole numbers, got {str(ids.dtype).removeprefix('torch.')}.")
    words = getattr(model.get_input_embeddings(), "num_embeddings", None)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (words is not None and high >= words):
        known = "" if words is None else f": the ids of this {type(model).__name__} go from 0 to {words - 1}"
        raise InvalidInput(f"there is no token with the id {low if low < 0 else high}{known}.")


@contextmanager
def listening(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that are gone when the block ends."""
    with ExitStack() as stack:
        for handle in hooks:
            stack.callback(handle.remove)
        yield


@alone
def record_calls(model: PreTrainedModel, sites: Sequence[Site], inputs: Mapping[str, Tensor]) -> dict[int, Call]:
    """Run the model once in `reference_mode` and keep what each attention block was called with, by layer."""
    calls: dict[nn.Module, Call] = {}

    def hear(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[block] = Call.of(args, kwargs)

    hooks = [site.block.register_forward_pre_hook(hear, with_kwargs=True) for site in sites]
    with listening(hooks), reference_mode(model):
        run(model, inputs)
    return {site.layer: calls[site.block] for site in sites}


@dataclass(frozen=True)
class RealTokens:
    """Which tokens of a single text are no padding, and where they stand.

    Attributes:
        keep: ``(n,)`` booleans, or None when all tokens are real.
        positions: of the real tokens, or None when they are 0, 1, 2, ….
    """

    keep: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> RealTokens:
        """What ``attention_mask`` and ``position_ids`` say."""
        mask, places = inputs.get("attention_mask"), inputs.get("position_ids")
        keep = None if mask is None or mask.dim() != 2 or bool(mask.bool().all()) else mask[0].bool()
        if keep is not None and not bool(keep.any()):
            raise InvalidInput("attention_mask leaves no token to read: give at least one that is no padding.")
        if places is None and keep is not None:
            places = torch.arange(len(keep), device=keep.device)[None]
        if places is None or places.dim() != 2:
            return cls(keep)
        positions = places[0] if keep is None else places[0][keep]
        usual = torch.equal(positions, torch.arange(len(positions), device=positions.device))
        return cls(keep, None if usual else positions)

    @classmethod
    def read_by(cls, module: nn.Module, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> RealTokens:
        """Of the text that a module of the model reads: a decoder beside an encoder has inputs of its own."""
        if getattr(model.config, "is_encoder_decoder", False) and module in set(model.get_decoder().modules()):
            of_decoder = {name: value for name, value in inputs.items() if name.startswith(_DECODER)}
            return cls.of({name.removeprefix(_DECODER): value for name, value in of_decoder.items()})
        return cls.of(inputs)

    def cut(self, tokens: Tensor, name: str) -> Tensor:
        """The real ones of tokens ``(1, n, d)`` that the module ``name`` reads or gives out."""
        if self.keep is None:
            return tokens
        if len(self.keep) != tokens.shape[1]:
            raise InvalidInput(
                f"attention_mask has {len(self.keep)} places, but {name} reads {tokens.shape[1]} tokens, so that it "
                "does not say which of them are padding: cut the input to what is real, and leave the mask out."
            )
        return tokens[:, self.keep]
