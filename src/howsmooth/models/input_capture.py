"""The hidden states that attention receives: one text through a model, one tensor per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from howsmooth._util.process_lock import alone
from howsmooth._util.validation import shown, validated
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.forward_pass import record_calls
from howsmooth.models.module_names import attention_site, attention_sites
from howsmooth.models.open_source import longest
from howsmooth.models.text_windows import token_ids, token_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
