"""Every attention block of a model at a real input, as a map that reproduces the model's own output there.

Architectures without an entry in the table are read by tracing (`howsmooth.models.traced_attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_tensor, relative_error
from howsmooth._util.process_lock import alone
from howsmooth._util.validation import shown, validated
from howsmooth.attention import (
    AttentionMap,
    ComposedAttention,
    CrossAttention,
    SelfAttention,
)
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.attention_reader import read_attention
from howsmooth.models.forward_pass import (
    AttentionCall,
    Inputs,
    RealTokens,
    attention_calls,
    record_calls,
    recorded_calls,
    reference_mode,
    run_model,
    temporary_hooks,
)
from howsmooth.models.model_inputs import token_ids, token_names
from howsmooth.models.module_names import CONVENTIONS, AttentionSite, attention_site, attention_sites, no_such_layer
from howsmooth.models.open_source import longest
from howsmooth.models.traced_attention import FoundAttention, find_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


TOLERANCE = 1e-5
"""Largest relative difference between the map and the model at the captured input, in single precision."""


@dataclass(frozen=True)
class CapturedSite:
    """An attention block and its input in one run of the model.

    Attributes:
        layer: counted from 0.
        name: dotted path of the block in the model.
        attention: the block as a map, its output projection included, nothing around it.
        x: ``(n, d)``: the tokens it received, without padding.
        error: relative difference between ``attention(x)`` and the model's own output at x.
    """

    layer: int
    name: str
    attention: AttentionMap | ComposedAttention
    x: Tensor
    error: float


@dataclass(frozen=True)
class CapturedCross:
    """A block of cross-attention and its inputs in one run of the model.

    Attributes:
        layer: counted from 0 among the blocks of cross-attention.
        name: dotted path of the block in the model.
        attention: the block as a map of two sequences; ``attention.in_decoder(encoder)`` and
            ``attention.in_encoder(decoder)`` are its sides.
        decoder, encoder: ``(n, d)`` and ``(m, d)``: the tokens it received.
        error: relative difference between the map and the model's own output there.
    """

    layer: int
    name: str
    attention: CrossAttention
    decoder: Tensor
    encoder: Tensor
    error: float


@validated
@alone
def capture(model: PreTrainedModel, inputs: Inputs, layers: Iterable[int] | None = None) -> list[CapturedSite]:
    """Run the model once and return every attention block with its input.

    Each map reproduces the model at these tokens: queries, keys, values, weights and output agree to `TOLERANCE`.
    Architectures in `MODEL_TYPES` are read by name; any other is read through transformers' attention interface, if its
    queries, keys and values are linear in the tokens up to rotary positions. The model is unchanged afterwards.

    Args:
        model: in float32 or float64.
        inputs: keyword arguments of the model for one text, image or sound; padding is cut off.
        layers: the layers to capture; the model is not run beyond the last of them. None for all.

    Raises:
        UnsupportedModel: a block has a feature that the map lacks.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99))
    >>> for site in capture(model, {"input_ids": torch.tensor([[5, 7, 11]])}):
    ...     print(site.name, tuple(site.x.shape), site.error < 1e-6)
    h.0.attn (3, 32) True
    h.1.attn (3, 32) True
    """
    check_request(model, inputs)
    wanted = None if layers is None else list(layers)
    if model.config.model_type in CONVENTIONS:
        sites = attention_sites(model) if wanted is None else [attention_site(model, each) for each in {*wanted}]
        captured = _capture_by_name(model, inputs, sites, to_the_end=wanted is None)
    else:
        captured = {}
        for number, found in enumerate(find_attention(model, inputs, SelfAttention)):
            real = RealTokens.read_by(found.call.module, model, inputs)
            captured[number] = _compared(model, number, found, found.call, real)
        for layer in wanted or ():
            if layer not in captured:
                raise no_such_layer(model, layer, len(captured))
    return [captured[layer] for layer in (sorted(captured) if wanted is None else wanted)]


class _Captured(Exception):
    """All requested layers are captured, so that the layers above them need not run."""


def _capture_by_name(
    model: PreTrainedModel, inputs: Inputs, sites: Sequence[AttentionSite], to_the_end: bool
) -> dict[int, CapturedSite]:
    real = RealTokens.of(inputs)
    calls: dict[nn.Module, AttentionCall] = {}
    owners = {site.owner for site in sites}
    of_output = {site.submodule(site.names.output): site for site in sites}
    captured: dict[int, CapturedSite] = {}

    def on_call(call: AttentionCall) -> None:
        if call.module in owners:
            calls[call.module] = call

    def on_output(projection: nn.Module, args: Any, output: Tensor) -> None:
        # Compared at once and freed: the weights of all layers together would not fit into memory.
        site = of_output[projection]
        x, call = entered.pop(site.block).hidden, calls.pop(site.owner, None)
        found = FoundAttention(site.path, read_attention(model, site, real.positions), x, x, output)
        captured[site.layer] = _compared(model, site.layer, found, call, real)
        if not to_the_end and len(captured) == len(sites):
            raise _Captured

    hooks = [projection.register_forward_hook(on_output) for projection in of_output]
    entries = recorded_calls(site.block for site in sites)
    with entries as entered, temporary_hooks(hooks), attention_calls(model, on_call), suppress(_Captured):
        run_model(model, inputs)
    return captured


def _compared(
    model: PreTrainedModel, layer: int, found: FoundAttention, call: AttentionCall | None, real: RealTokens
) -> CapturedSite:
    """The site, once the map reproduces the output and, where the interface was called, all intermediate tensors."""
    attention: Any = found.attention
    x, output = (real.cut(tokens, found.name) for tokens in (found.x, found.output))
    with torch.no_grad():
        error = relative_error(attention(x), output, attention.output_bias)
        errors = {"output": error}
        if call is not None:
            ours: tuple[Tensor, ...] = (*attention.staged(x), attention.weights(x))
            theirs: tuple[Tensor, ...] = call.real_tokens(real.keep)
            if isinstance(attention, ComposedAttention):  # its queries and keys have another order of coordinates
                ours, theirs = ((one[0] @ one[1].mT, *one[2:]) for one in (ours, theirs))
            stages = ("queries", "keys", "values", "weights") if len(ours) == 4 else ("logits", "values", "weights")
            errors |= dict(zip(stages, map(relative_error, ours, theirs), strict=True))
    _refuse_difference(model, layer, found.name, errors)
    return CapturedSite(layer, found.name, attention, x[0].detach(), error)


def _refuse_difference(model: PreTrainedModel, layer: int, name: str, errors: Mapping[str, float]) -> None:
    for stage, difference in errors.items():
        if not difference <= TOLERANCE:
            raise UnsupportedModel(
                f"the {stage} of layer {layer} ({name}) as read from {type(model).__name__} differ from the model's "
                f"own by a relative {difference:.1e}: a feature of it is not modelled, so measure it as a function "
                "instead."
            )


@validated
@alone
def capture_cross(model: PreTrainedModel, inputs: Inputs) -> list[CapturedCross]:
    """Run a model once and return every cross-attention with the tokens of decoder and encoder that it received.

    Blocks are found through transformers' attention interface, so that any architecture will do whose queries, keys and
    values are linear in the tokens. Each map reproduces the model's weights and output to `TOLERANCE`.

    Args:
        model: with its encoder and decoder, in float32 or float64.
        inputs: keyword arguments of the model for one text or sound, without padding, for both parts
            (``input_ids`` and ``decoder_input_ids``, …).

    >>> import howsmooth as hs
    >>> from transformers import T5Config, T5Model
    >>> sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    >>> model = T5Model(T5Config(**sizes, decoder_start_token_id=0))
    >>> ids = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[0, 3]])}
    >>> [block] = capture_cross(model, ids)
    >>> tuple(block.decoder.shape), tuple(block.encoder.shape)
    ((2, 16), (4, 16))
    >>> hs.measure(block.attention.in_encoder(block.decoder), block.encoder).value.shape
    torch.Size([])
    """
    check_request(model, inputs)
    padded = [
        name for name in ("attention_mask", "decoder_attention_mask") if not bool(inputs.get(name, torch.ones(1)).all())
    ]
    if padded:
        raise InvalidInput(f"cross-attention is captured without padding ({padded[0]}): cut the input to real tokens.")
    return [_compared_cross(model, *numbered) for numbered in enumerate(find_attention(model, inputs, CrossAttention))]


def _compared_cross(model: PreTrainedModel, layer: int, found: FoundAttention) -> CapturedCross:
    attention: Any = found.attention
    with torch.no_grad():
        error = relative_error(attention(found.x, found.keys), found.output, attention.attention.output_bias)
        of_weights = relative_error(attention.weights(found.x, found.keys), found.call.weights)
    _refuse_difference(model, layer, found.name, {"output": error, "weights": of_weights})
    return CapturedCross(layer, found.name, attention, found.x[0].detach(), found.keys[0].detach(), error)


def check_request(model: PreTrainedModel, inputs: Inputs) -> None:
    """Refuse models outside transformers, half precision and several items at once."""
    if getattr(getattr(model, "config", None), "model_type", None) is None:
        raise UnsupportedModel(
            f"{type(model).__name__} is not a transformers model: take the input of one of its modules with "
            "models.site(module, path, x) and measure it as a function."
        )
    if model.dtype not in (torch.float32, torch.float64):
        raise UnsupportedModel(
            f"the model computes in {str(model.dtype).removeprefix('torch.')}, too coarsely to compare the map with "
            "it: convert it with model.float()."
        )
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() and len(value) != 1:
            raise InvalidInput(f"{name} holds {len(value)} items, but one text, image or sound is captured at a time.")


@validated
@alone
def site(module: nn.Module, path: str, *args: Any, **kwargs: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Any submodule as a function of its input in one run: ``hs.measure(*site(module, path, x))``.

    The module runs once on the given arguments. The first tensor argument of the submodule is x; its other arguments
    stay fixed, except those that are the same tensor (as in self-attention, ``f(x, x, x)``). A batch of one loses
    its batch axis. Of several calls the first counts.

    >>> import torch, howsmooth as hs
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    >>> f, x = site(layer, "linear1", torch.randn(1, 5, 8))
    >>> expected = float(torch.linalg.matrix_norm(layer.linear1.weight.detach(), 2))
    >>> abs(float(hs.measure(f, x, rtol=1e-5)) - expected) < 1e-4
    True
    """
    try:
        inner = module.get_submodule(path)
    except AttributeError:
        known = ", ".join(name for name, _ in module.named_children())
        raise InvalidInput(
            f"{type(module).__name__} has no module at {path!r}: give a dotted path that begins with one of {known}."
        ) from None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(inner: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))

    # A transformers model must not fill a cache, to which every later call would add.
    mode: Any = reference_mode(module) if hasattr(module, "config") else torch.no_grad()  # type: ignore[arg-type]
    with temporary_hooks([inner.register_forward_pre_hook(record, with_kwargs=True)]), mode:
        module(*args, **kwargs)
    if not calls:
        raise InvalidInput(f"the module at {path!r} was not called when {type(module).__name__} ran: choose another.")
    inner_args, inner_kwargs = calls[0]
    given = (*inner_args, *inner_kwargs.values())
    x = next((a for a in given if isinstance(a, Tensor) and a.is_floating_point()), None)
    if x is None:
        raise InvalidInput(f"the module at {path!r} receives no floating-point tensor: choose one that comes later.")
    single = x.dim() == 3 and len(x) == 1

    @alone
    def function(y: Tensor) -> Tensor:
        y = y[None] if single else y
        moved = [y if a is x else a for a in inner_args]
        output = first_tensor(inner(*moved, **{k: y if a is x else a for k, a in inner_kwargs.items()}))
        return output[0] if single else output

    return function, (x[0] if single else x).detach()


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of the attention of each layer.

    Attributes:
        tokens: the text as the model reads it, special tokens included.
        ids: ``(1, n)``.
        hidden: layer → ``(1, n, d)``; ``inputs[layer]`` is short for it.
    """

    tokens: list[str]
    ids: Tensor
    hidden: dict[int, Tensor]

    def __getitem__(self, layer: int) -> Tensor:
        return self.hidden[layer]


@validated
@alone
def attention_inputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: str | Sequence[int] | Tensor,
    length: int | None = None,
    layers: Iterable[int] | None = None,
) -> AttentionInputs:
    """The input of every attention block on a window of text: after the layer's own normalisation, if it comes first.

    Dropout is off, and the model is unchanged afterwards.

    Args:
        model: a model that `from_transformers` can read.
        tokenizer: of that model; None when ``text`` is a list of token ids.
        text: the window begins at its first character; or token ids.
        length: number of tokens, special ones included; None for all of the text.
        layers: the layers to record; None for all.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99))
    >>> attention_inputs(model, None, [5, 7, 11], layers=[1])[1].shape
    torch.Size([1, 3, 32])
    """
    if tokenizer is not None and not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InvalidInput(f"tokenizer must be one of transformers, or None for token ids, got {shown(tokenizer)}.")
    if getattr(model, "main_input_name", None) is None:
        raise UnsupportedModel(f"{type(model).__name__} is not a transformers model: pass one of token ids.")
    if model.main_input_name != "input_ids":
        raise UnsupportedModel(
            f"{type(model).__name__} does not read text but {model.main_input_name!r}: pass a model of token ids."
        )
    sites = attention_sites(model) if layers is None else [attention_site(model, layer) for layer in layers]
    if length is not None and length < 1:
        raise InvalidInput(f"a window holds at least one token, got length={length}.")
    ids = _token_ids(tokenizer, text, length)
    limit = longest(model, tokenizer)
    if length is not None and len(ids) < length:
        raise InvalidInput(
            f"the text has {len(ids)} tokens, but length={length} was requested: give more text or ask for less."
        )
    if len(ids) > limit:
        raise InvalidInput(f"{len(ids)} tokens were requested, but this {type(model).__name__} takes at most {limit}.")
    tokens = [str(i) for i in ids] if tokenizer is None else token_names(tokenizer, ids)
    batch = torch.tensor([ids])
    calls = record_calls(model, sites, {"input_ids": batch})
    return AttentionInputs(tokens, batch, {layer: call.hidden.detach() for layer, call in calls.items()})


def _token_ids(
    tokenizer: PreTrainedTokenizerBase | None, text: str | Sequence[int] | Tensor, length: int | None
) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise InvalidInput("a text needs a tokenizer: pass the model's, or pass token ids instead of text.")
        cut = {} if length is None else {"truncation": True, "max_length": length}
        ids = token_ids(tokenizer, text, verbose=False, **cut)
    else:
        batch = torch.as_tensor(text)
        if batch.dim() == 2 and len(batch) == 1:
            batch = batch[0]
        if batch.dim() != 1:
            raise InvalidInput(f"token ids have shape (n,), got {tuple(batch.shape)}: pass one text at a time.")
        ids = [int(i) for i in batch][:length]
    if not ids:
        raise InvalidInput("there are no tokens to run the model on: give a text or ids that are not empty.")
    return ids
