"""Running a model with rounded keys and values, through transformers' attention interface, and the resulting damage.

A language model is compared by its distribution of the next token: KL(p‖p̃) in nats per token, and its perplexity. An
encoder has no such distribution (and no cache): its sentence embedding is compared, the mean of its last hidden states,
by 1 − cosine. Both are called the *damage* of a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth._util.validation import validated
from howsmooth.attention import Rotary
from howsmooth.attention.conversion import plain_map
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import CapturedSite, capture
from howsmooth.models.captured_sites import check_request
from howsmooth.models.forward_pass import attention_computed_by, eager_attention, run_model
from howsmooth.rounding.kv_cache import PARTS, Cache, Choice, read_back

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Choices = Choice | Sequence[Choice]
Assignment = Mapping[tuple[int, str], Choices]
"""(layer, "key" or "value") → a format for all heads or one for each; what is missing is kept as it is."""
Attend = Callable[..., tuple[Tensor, Tensor | None]]
_ROWS = 8


@dataclass(frozen=True)
class RoundedModel:
    """A model on one text, run with rounded keys and values.

    Attributes:
        model: in evaluation mode, with its head when it is a language model.
        inputs: keyword arguments for one text.
        rotaries: the rotary positions of the keys of every layer.
        causal: whether it is a language model, compared by its next token; otherwise an encoder.
        sites: its attention blocks at that text; empty where the text was not captured, see `on`.
    """

    model: PreTrainedModel
    inputs: Mapping[str, Tensor]
    rotaries: tuple[Rotary | None, ...]
    causal: bool
    sites: Sequence[CapturedSite] = ()

    @classmethod
    @validated
    def of(cls, model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> RoundedModel:
        """Capture the attention of a model on one text.

        >>> from howsmooth.models import open_model
        >>> opened = open_model("random:llama[layers=2,width=32]", head=True)
        >>> [window] = opened.windows("Down the rabbit hole", length=12)
        >>> RoundedModel.of(opened.model, opened.inputs(window)).causal
        True
        """
        check_request(model, inputs)
        check_text_model(model)
        if inputs["input_ids"].shape[-1] < 2:
            raise InvalidInput("the text is too short: rounding needs windows of at least two tokens.")
        sites = capture(model, inputs)
        causal = Cache.of(sites[0]).causal
        if causal and model.get_output_embeddings() is None:
            raise InvalidInput(f"{type(model).__name__} has no language-model head: open it with head=True.")
        stages = [plain_map(site.attention, "rounding").key_stages for site in sites]
        rotaries = [next((stage for stage in some if isinstance(stage, Rotary)), None) for some in stages]
        return cls(model, inputs, tuple(rotaries), causal, sites)

    def on(self, inputs: Mapping[str, Tensor]) -> RoundedModel:
        """This model on another text of the same length, which is not captured."""
        if inputs["input_ids"].shape != self.inputs["input_ids"].shape:
            raise InvalidInput("the other text has another length: capture it, for its positions are others.")
        return replace(self, inputs=inputs, sites=())

    @property
    def tokens(self) -> int:
        """The number of tokens that the damage is a mean over: all of a text, or one embedding."""
        return int(self.inputs["input_ids"].shape[-1]) if self.causal else 1

    def outcome(self, assignment: Assignment | None = None) -> Tensor:
        """Log-probabilities of the next token, ``(n, words)``, or the embedding of unit length, in float64."""
        layers = Layers(len(self.rotaries))
        with attention_computed_by(self.model, rounding(self.rotaries, assignment or {}, layers)):
            outcome = self.read(run_whole(self))
        layers.check_all(self.model)
        return outcome

    def read(self, output: Any) -> Tensor:
        """The outcome, from the output of the model."""
        if self.causal:
            return torch.log_softmax(output.logits[0].double(), dim=-1)
        mean = output.hidden_states[-1][0].double().mean(0)
        return mean / torch.linalg.vector_norm(mean)

    def damage(self, exact: Tensor, rounded: Tensor) -> float:
        """KL in nats per token, or 1 − cosine, between two outcomes."""
        if self.causal:  # in blocks that stay in the processor's cache: several times faster than at once
            blocks = zip(exact.split(_ROWS), rounded.split(_ROWS), strict=True)
            return max(sum(float((p.exp() * (p - q)).sum()) for p, q in blocks) / len(exact), 0.0)
        return float((exact - rounded).square().sum() / 2)

    def loss(self, outcome: Tensor) -> float:
        """Mean negative log-likelihood of the text's own next tokens, in nats; perplexity is its exponential."""
        ids = self.inputs["input_ids"][0].to(outcome.device)
        return -float(outcome[:-1].gather(1, ids[1:, None]).mean())


def check_text_model(model: PreTrainedModel) -> None:
    """Refuse models of images and sounds."""
    if model.main_input_name != "input_ids":
        raise UnsupportedModel(
            f"{type(model).__name__} reads {model.main_input_name!r}: rounding is measured on models of text."
        )


def check_finite_weights(model: PreTrainedModel) -> None:
    """Refuse a model with NaN or infinity in its weights, naming the first: its caches would hold them."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise InvalidInput(f"{name} holds NaN or infinity, which cannot be rounded: check the model's weights.")


def run_whole(reader: RoundedModel) -> Any:
    """The output of the model on its text; an encoder gives its hidden states as well."""
    return run_model(reader.model, reader.inputs, output_hidden_states=not reader.causal)


class Layers:
    """The attention block that is called: blocks are called in their order, each once."""

    def __init__(self, count: int, called: int = 0):
        self.count, self.called = count, called

    def next(self) -> int:
        """The number of the block that is called."""
        if self.called == self.count:
            raise UnsupportedModel(f"the model computes attention more often than in its {self.count} blocks.")
        self.called += 1
        return self.called - 1

    def check_all(self, model: PreTrainedModel) -> None:
        """Refuse a model of which some attention did not pass the socket: nothing would have been rounded there."""
        if self.called != self.count:
            raise UnsupportedModel(
                f"{type(model).__name__} computes the attention of {self.count - self.called} of its {self.count} "
                "layers past transformers' attention interface, where keys and values cannot be rounded."
            )


def rounding(rotaries: Sequence[Rotary | None], assignment: Assignment, layers: Layers) -> Attend:
    """Attention that reads keys and values back from a cache in the assigned formats."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = layers.next()
        key, value = (
            read_back(held, part, assignment.get((layer, part)), rotaries[layer], layer)
            for held, part in zip((key, value), PARTS, strict=True)
        )
        output, weights = eager_attention(module)(module, query, key, value, *args, **options)
        return output, weights

    return attend
