"""Run a model as it is defined and record the calls of its modules; the model is unchanged afterwards.

The layers of every architecture call the attention interface of transformers: they hand query, key, value, mask and
scale to a function looked up by name in the ``AttentionInterface``. While `attention_calls` is open that name is ours:
each call is recorded and computed by the model's own eager function, so that the model's output is unchanged. Masks are
registered as well; otherwise they would arrive as None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from howsmooth._util.common import evaluating, first_line
from howsmooth._util.process_lock import LOCK, alone
from howsmooth.errors import HowsmoothError, InvalidInput, UnsupportedModel
from howsmooth.models.module_names import AttentionSite

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


Inputs = Mapping[str, Tensor]
"""The keyword arguments of a model for one text, image or sound."""
_DECODER = "decoder_"
"""The prefix of a decoder's inputs, beside those of its encoder."""
_NAME = "howsmooth_listening"


@dataclass(frozen=True)
class Call:
    """The arguments of a module: its tokens, ``(batch, n, d)``, and all others."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with these arguments; tokens are the first, or named as in transformers."""
        if args:
            return cls(args[0], args[1:], kwargs)
        rest = dict(kwargs)
        return cls(rest.pop("hidden_states"), (), rest)


@contextmanager
def changed(target: object, **values: Any) -> Iterator[None]:
    """Other values for attributes of a configuration or module of transformers while the block runs.

    Attributes are the only way that transformers offers to run a model without cache, or a single layer of it.
    """
    with ExitStack() as restored:
        for name, value in values.items():
            inherited = name not in vars(target) and callable(getattr(type(target), name, None))
            restore = (delattr, target, name) if inherited else (setattr, target, name, getattr(target, name))
            restored.callback(*restore)
            setattr(target, name, value)
        yield


def use_eager_attention(model: PreTrainedModel) -> None:
    """Let a model that belongs to this package compute attention as its architecture defines it, for good."""
    # `set_attn_implementation` leaves models unchanged whose source it cannot read.
    model.config._attn_implementation = "eager"


@contextmanager
def reference_mode(model: PreTrainedModel, implementation: str = "eager") -> Iterator[None]:
    """The model without dropout, gradients or cache and with eager attention; restored when the block ends.

    Eager attention is the definition of each model: it alone knows every feature (Gemma 2's soft-cap), and its masks
    are written out. No other thread runs a model meanwhile.
    """
    with LOCK, evaluating(model), torch.no_grad(), ExitStack() as stack:
        # Some parts have configurations of their own (encoder and decoder of T5).
        own: list[Any] = [
            c for c in (getattr(module, "config", None) for module in model.modules()) if hasattr(c, "sub_configs")
        ]
        configs = {id(inner): inner for config in own for inner in _with_inner(config)}
        # Setting a configuration also sets those inside it, so these are changed before their whole and restored after.
        for config in reversed(configs.values()):
            settings: dict[str, Any] = {"_attn_implementation": implementation}
            if getattr(config, "_experts_implementation", None) not in (None, "eager"):
                # Experts one by one, as they are defined: faster ways know no double precision.
                settings["_experts_implementation"] = "eager"
            if hasattr(config, "use_cache"):
                settings["use_cache"] = False
            stack.enter_context(changed(config, **settings))
        yield


def _with_inner(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _with_inner(inner)


def run_model(model: PreTrainedModel, inputs: Inputs, **options: bool) -> Any:
    """The model's output on inputs, which are moved to its device."""
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


def _check_ids(model: PreTrainedModel, inputs: Inputs) -> None:
    """Refuse inputs that are no tensors, and token ids outside the vocabulary."""
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or not value.numel():
            given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InvalidInput(f"{name} of a model is a tensor that holds at least one item, got {given}.")
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
def temporary_hooks(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that are removed when the block ends."""
    with ExitStack() as stack:
        for handle in hooks:
            stack.callback(handle.remove)
        yield


@contextmanager
def recorded_calls(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Call]]:
    """The last call of each module while the block runs."""
    calls: dict[nn.Module, Call] = {}

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[module] = Call.of(args, kwargs)

    with temporary_hooks(module.register_forward_pre_hook(record, with_kwargs=True) for module in modules):
        yield calls


@alone
def record_calls(model: PreTrainedModel, sites: Sequence[AttentionSite], inputs: Inputs) -> dict[int, Call]:
    """Run the model once in `reference_mode` and return the call of each attention block, by layer."""
    with recorded_calls(site.block for site in sites) as calls, reference_mode(model):
        run_model(model, inputs)
    return {site.layer: calls[site.block] for site in sites}


@dataclass(frozen=True)
class RealTokens:
    """The tokens of a single text that are no padding, and their positions.

    Attributes:
        keep: ``(n,)`` booleans, or None when all tokens are real.
        positions: of the real tokens, or None when they are 0, 1, 2, ….
    """

    keep: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def of(cls, inputs: Inputs) -> RealTokens:
        """The real tokens by ``attention_mask`` and ``position_ids``."""
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
    def read_by(cls, module: nn.Module, model: PreTrainedModel, inputs: Inputs) -> RealTokens:
        """The real tokens of the text that a module reads: a decoder beside an encoder has inputs of its own."""
        if getattr(model.config, "is_encoder_decoder", False) and module in set(model.get_decoder().modules()):
            of_decoder = {name: value for name, value in inputs.items() if name.startswith(_DECODER)}
            return cls.of({name.removeprefix(_DECODER): value for name, value in of_decoder.items()})
        return cls.of(inputs)

    def cut(self, tokens: Tensor, name: str) -> Tensor:
        """The real ones of tokens ``(1, n, d)`` that the module ``name`` reads or returns."""
        if self.keep is None:
            return tokens
        if len(self.keep) != tokens.shape[1]:
            raise InvalidInput(
                f"attention_mask has {len(self.keep)} places, but {name} reads {tokens.shape[1]} tokens, so that it "
                "does not say which of them are padding: cut the input to what is real, and leave the mask out."
            )
        return tokens[:, self.keep]


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention interface.

    Attributes:
        module: the calling module.
        query: ``(1, heads, n, k)``, after normalisation and rotation, times the scale of the logits.
        key, value: ``(1, kv_heads, n, ·)``, not repeated.
        bias: mask and position bias that are added to the logits, ``(1, heads or 1, n, n)``, or None.
        softcap: of the logits, or None.
        weights: ``(1, heads, n, n)``.
        output: ``(1, n, heads · v)``, the input of the output projection.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    softcap: float | None
    weights: Tensor
    output: Tensor

    def real_tokens(self, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value (shared ones repeated) and weights, without padding."""
        group = self.query.shape[1] // self.key.shape[1]
        tokens = (self.query, self.key.repeat_interleave(group, dim=1), self.value.repeat_interleave(group, dim=1))
        if keep is None:
            return (*tokens, self.weights)
        query, key, value = (t[..., keep, :] for t in tokens)
        return query, key, value, self.weights[..., keep, :][..., keep]


@contextmanager
def attention_calls(model: PreTrainedModel, record: Callable[[AttentionCall], None]) -> Iterator[None]:
    """`reference_mode` in which ``record`` receives every call of the attention interface.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2Model
    >>> model, shapes = GPT2Model(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9)), []
    >>> with attention_calls(model, lambda call: shapes.append(tuple(call.query.shape))):
    ...     _ = model(input_ids=torch.tensor([[1, 2, 3]]))
    >>> shapes
    [(1, 2, 3, 4), (1, 2, 3, 4)]
    """

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        output, weights = eager_attention(module)(module, query, key, value, mask, *args, **options)
        scale, softcap, positions = (options.get(name) for name in ("scaling", "softcap", "position_bias"))
        scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
        bias = mask if positions is None else positions if mask is None else mask + positions
        record(AttentionCall(module, scaled, key, value, bias, softcap, weights, output.flatten(2)))
        return output, weights

    with attention_computed_by(model, attend):
        yield


def eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The function that defines the computation of an attention module."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModel(
            f"{type(module).__name__} has no eager attention to compare with: measure it as a function instead."
        )
    return eager


@contextmanager
def attention_computed_by(
    model: PreTrainedModel, attend: Callable[..., tuple[Tensor, Tensor | None]]
) -> Iterator[None]:
    """`reference_mode` in which ``attend`` computes attention; it takes the arguments of an eager function."""
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with LOCK:  # the table of names belongs to the process
        # Models look masks up in the table that `register` writes, from which nothing can be removed; this entry has no
        # effect of its own.
        AttentionMaskInterface.register(_NAME, eager_mask)
        ALL_ATTENTION_FUNCTIONS[_NAME] = attend
        try:
            with reference_mode(model, _NAME):
                yield
        finally:
            del ALL_ATTENTION_FUNCTIONS[_NAME]
