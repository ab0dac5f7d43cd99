"""Cross-attention of models with an encoder and a decoder, and the tokens of both that it really sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from howsmooth._util.common import relative_error
from howsmooth._util.process_lock import alone
from howsmooth._util.validation import validated
from howsmooth.attention import CrossAttention
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.captured_sites import TOLERANCE, check_request
from howsmooth.models.traced_attention import FoundCross, find_every

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class CapturedCross:
    """A block of cross-attention and what it really saw.

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
def capture_cross(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[CapturedCross]:
    """Run a model once and return every cross-attention with the tokens of decoder and encoder that it saw.

    Blocks are found through transformers' attention socket, so that any architecture will do whose queries, keys and
    values are linear in the tokens. Each map has reproduced the model's weights and output to `TOLERANCE`.

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
    crossings = [found for found in find_every(model, inputs) if isinstance(found, FoundCross)]
    if not crossings:
        raise UnsupportedModel(
            f"no cross-attention was found in {type(model).__name__} (model type {model.config.model_type!r}): it has "
            "none, or computes it without transformers' attention interface."
        )
    return [_compared(model, number, found) for number, found in enumerate(crossings)]


def _compared(model: PreTrainedModel, layer: int, found: FoundCross) -> CapturedCross:
    attention, decoder, encoder = found.attention, found.decoder, found.encoder
    with torch.no_grad():
        error = relative_error(attention(decoder, encoder), found.output, attention.attention.output_bias)
        of_weights = relative_error(attention.weights(decoder, encoder), found.call.weights)
    if not max(error, of_weights) <= TOLERANCE:
        raise UnsupportedModel(
            f"the cross-attention {found.name} as read from {type(model).__name__} differs from the model's own by a "
            f"relative {max(error, of_weights):.1e}: a feature of it is not modelled."
        )
    return CapturedCross(layer, found.name, attention, decoder[0].detach(), encoder[0].detach(), error)
