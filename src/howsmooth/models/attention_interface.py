"""The attention interface of transformers, which the layers of every architecture call.

Models hand query, key, value, mask and scale to a function looked up by name in the ``AttentionInterface``. While
`attention_calls` is open that name is ours: each call is recorded and computed by the model's own eager function, so
that the model's output is unchanged. Masks are registered as well; otherwise they would arrive as None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from howsmooth._util.process_lock import LOCK
from howsmooth.errors import UnsupportedModel
from howsmooth.models.forward_pass import reference_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "howsmooth_listening"


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
