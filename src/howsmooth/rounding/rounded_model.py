r"""A model with rounded keys and values, through transformers' attention interface: its damage, run and predicted.

A language model is compared by its distribution of the next token: KL(p‖p̃) in nats per token, and its perplexity. An
encoder has no such distribution (and no cache): its sentence embedding is compared, the mean of its last hidden states,
by 1 − cosine. Both are called the *damage* of a rounding.

A few backward passes predict it. Let p be the distributions of the next token and y a sample of all of them (y_t ∼ p_t,
independently). The scores ∇ log p(y_t) have mean zero and are independent over t, and the second-order term of KL(p‖p̃)
is half their variance along the change, so for changes δo of the outputs of attention heads, summed over the text,

.. math:: \mathrm{KL} \approx \tfrac12\,\mathbb E_y\Big[\big\langle \nabla_o \textstyle\sum_t \log p(y_t),\
          \delta o\big\rangle^2\Big].

One backward pass per sample y gives the gradient at the output of every head, and products with δo score all layers,
heads, keys or values and formats at once. δo is the change of the head at its inputs by rounding that cache alone,
found by the model's own attention function: an n × n product for each format, no pass through the model.

For the embedding ê of unit length of an encoder 1 − cosine = ½|δê|² = ½ E_z ⟨∇_o⟨z, ê⟩, δo⟩² with z ∼ N(0, I).

Scores of parts add: for heads, layers, keys and values together the sum of their scores is squared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import random_stream
from howsmooth._util.validation import Count, Seed, validated
from howsmooth.attention import Rotary
from howsmooth.attention.conversion import plain_map
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import CapturedSite, capture
from howsmooth.models.captured_sites import check_request
from howsmooth.models.forward_pass import attention_computed_by, eager_attention, run_model
from howsmooth.rounding.kv_cache import PARTS, Cache, Choice, key_rotary, read_back
from howsmooth.rounding.number_formats import Format

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
        rotaries = tuple(key_rotary(plain_map(site.attention, "rounding")) for site in sites)
        return cls(model, inputs, rotaries, causal, sites)

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
        return mean / mean.norm()

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
        return eager_attention(module)(module, query, key, value, *args, **options)

    return attend


@dataclass(frozen=True)
class Scores:
    """Products of sampled scores with changes of heads.

    Attributes:
        products: ``(samples, layers, 2, formats, heads)``, keys first; over several windows samples are joined.
        tokens: of one window: damage is per token.
        group: how many query heads share a key.
    """

    products: Tensor
    tokens: int
    group: int

    def damage(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted damage and its standard error for products that were summed over parts, samples first."""
        squares = products.square() / (2 * self.tokens)
        return squares.mean(0), squares.std(0) / len(squares) ** 0.5

    @property
    def by_head(self) -> Tensor:
        """Predicted damage through each query head alone, ``(layers, 2, formats, heads)``."""
        return self.damage(self.products)[0]

    @property
    def by_cache(self) -> Tensor:
        """Predicted damage of rounding each key–value head, ``(layers, 2, formats, kv_heads)``."""
        return self.damage(self.products.unflatten(-1, (-1, self.group)).sum(-1))[0]

    @property
    def by_layer(self) -> Tensor:
        """Predicted damage of rounding all keys or all values of a layer, ``(layers, 2, formats)``."""
        return self.damage(self.products.sum(-1))[0]


@validated
def sampled_scores(reader: RoundedModel, formats: Sequence[Format], samples: Count = 24, seed: Seed = 0) -> Scores:
    """The scores of every layer, head, part and format, in one forward and ``samples`` backward passes.

    >>> from howsmooth.models import open_model
    >>> from howsmooth.rounding import parse_formats
    >>> opened = open_model("random:llama[layers=2,width=32]", head=True)
    >>> [window] = opened.windows("Down the rabbit hole", length=12)
    >>> rounded = RoundedModel.of(opened.model, opened.inputs(window))
    >>> scores = sampled_scores(rounded, parse_formats("int8,int4"), samples=4)
    >>> scores.by_layer.shape, bool((scores.by_layer[..., 0] < scores.by_layer[..., 1]).all())
    (torch.Size([2, 2, 2]), True)
    """
    changes, probes = list[Tensor](), list[Tensor]()
    layers = Layers(len(reader.sites))

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        attention, layer = eager_attention(module), layers.next()

        def output_of(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
            return attention(module, query, key, value, *args, **options)

        output, weights = output_of(key, value)
        with torch.no_grad():  # of rounding keys or values alone, (2, formats, n, heads, v)
            keys = [read_back(key, "key", form, reader.rotaries[layer], layer) for form in formats]
            values = [read_back(value, "value", form, None, layer) for form in formats]
            rounded = [*((one, value) for one in keys), *((key, one) for one in values)]
            moved = torch.cat([output_of(*held)[0] - output for held in rounded])
            changes.append(moved.view(len(PARTS), len(formats), moved.shape[1], query.shape[1], -1))
        probe = torch.zeros_like(output, requires_grad=True)
        probes.append(probe)
        return output + probe, weights

    with attention_computed_by(reader.model, attend), torch.enable_grad():
        output = run_whole(reader)
        layers.check_all(reader.model)
        target = output.logits[0] if reader.causal else reader.read(output)
        outcome = reader.read(output).detach()
        products = []
        for cotangent in _cotangents(reader, outcome, target.dtype, samples, seed):
            gradients = torch.autograd.grad(target, probes, cotangent, retain_graph=True)
            products.append(torch.stack([_product(*pair) for pair in zip(changes, gradients, strict=True)]))
    attention = reader.sites[0].attention
    return Scores(torch.stack(products), reader.tokens, attention.heads // attention.kv_heads)


def _cotangents(reader: RoundedModel, outcome: Tensor, dtype: torch.dtype, samples: int, seed: int) -> Iterator[Tensor]:
    """For every sample the score with respect to the logits, 1_y − p, or a direction for the embedding."""
    generator = random_stream(seed, "scores")
    if not reader.causal:
        yield from torch.randn(samples, len(outcome), generator=generator, dtype=dtype).to(outcome.device)
        return
    probability = outcome.exp()
    drawn = torch.multinomial(probability.cpu(), samples, replacement=True, generator=generator).to(outcome.device)
    less = -probability.to(dtype)
    for words in drawn.T:
        yield less.scatter_add(1, words[:, None], torch.ones_like(less[:, :1]))


def _product(change: Tensor, gradient: Tensor) -> Tensor:
    """⟨gradient, δo⟩ of every head, ``(2, formats, heads)``."""
    gradient = gradient.reshape(change.shape[2:])
    return torch.einsum("pfnhv,nhv->pfh", change.double(), gradient.double())
