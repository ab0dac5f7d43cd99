r"""The damage of every rounding, predicted from a few backward passes.

Let p be the distributions of the next token and y a sample of all of them (y_t ∼ p_t, independently). The scores
∇ log p(y_t) have mean zero and are independent over t, and the second-order term of KL(p‖p̃) is half their variance
along the change, so for changes δo of the outputs of attention heads, summed over the text,

.. math:: \mathrm{KL} \approx \tfrac12\,\mathbb E_y\Big[\big\langle \nabla_o \textstyle\sum_t \log p(y_t),\
          \delta o\big\rangle^2\Big].

One backward pass per sample y gives the gradient at the output of every head, and products with δo score all layers,
heads, keys or values and formats at once. δo is what rounding that cache alone does to the head at the inputs it has,
found by the model's own attention function: an n × n product for each format, no pass through the model.

For the embedding ê of unit length of an encoder 1 − cosine = ½|δê|² = ½ E_z ⟨∇_o⟨z, ê⟩, δo⟩² with z ∼ N(0, I).

Scores of parts add: for heads, layers, keys and values together the sum of their scores is squared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import random_stream
from howsmooth._util.validation import Count, Seed, validated
from howsmooth.models.forward_pass import attention_computed_by, eager_attention
from howsmooth.rounding.kv_cache import PARTS, read_back
from howsmooth.rounding.number_formats import Format
from howsmooth.rounding.rounded_model import Layers, RoundedModel, run_whole


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
    rotaries, layers = reader.rotaries, Layers(len(reader.sites))

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        attention, layer = eager_attention(module), layers.next()
        output, weights = attention(module, query, key, value, *args, **options)
        changes.append(
            _changes(attention, module, query, key, value, args, options, output, formats, rotaries[layer], layer)
        )
        probe = torch.zeros_like(output, requires_grad=True)
        probes.append(probe)
        return output + probe, weights

    with attention_computed_by(reader.model, attend), torch.enable_grad():
        output = run_whole(reader)
        layers.check_all(reader.model)
        target = output.logits[0] if reader.causal else reader.read(output)
        with torch.no_grad():
            outcome = reader.read(output)
        products = []
        for cotangent in _cotangents(reader, outcome, target.dtype, samples, seed):
            gradients = torch.autograd.grad(target, probes, cotangent, retain_graph=True)
            products.append(
                torch.stack([_product(change, gradient) for change, gradient in zip(changes, gradients, strict=True)])
            )
    group = reader.sites[0].attention.heads // reader.sites[0].attention.kv_heads
    return Scores(torch.stack(products), reader.tokens, group)


@torch.no_grad()
def _changes(
    attention: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    args: tuple[Any, ...],
    options: dict[str, Any],
    output: Tensor,
    formats: Sequence[Format],
    rotary: Any,
    layer: int,
) -> Tensor:
    """The change of the heads by rounding keys or values alone, ``(2, formats, n, heads, v)``."""
    query, key, value, output = (t.detach() for t in (query, key, value, output))
    heads = query.shape[1]
    changes = []
    for part in PARTS:
        for form in formats:
            held = (
                read_back(key, part, form, rotary, layer) if part == "key" else key,
                read_back(value, part, form, None, layer) if part == "value" else value,
            )
            moved = attention(module, query, *held, *args, **options)[0] - output
            changes.append(moved.reshape(moved.shape[1], heads, -1))
    return torch.stack(changes).unflatten(0, (len(PARTS), len(formats)))


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
