"""What is measured: attention blocks with inputs, random and real, and the same maps as plain torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs

TokenMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """An attention block and the tokens it is measured at."""

    name: str
    attention: hs.SelfAttention
    x: Tensor
    causal: bool = False

    def double(self) -> Case:
        """The same case in float64."""
        attention = self.attention.in_dtype(torch.float64)
        assert isinstance(attention, hs.SelfAttention)
        return Case(self.name, attention, self.x.double(), self.causal)


def random_case(n: int, width: int = 768, heads: int = 12, causal: bool = False, seed: int = 0) -> Case:
    """Gaussian weights of variance 1/width and Gaussian tokens of variance 1."""
    attention = hs.SelfAttention.random(width, heads, seed=seed, mask="causal" if causal else None)
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(seed + 1))
    name = f"random weights, {heads} heads × {width // heads}, n = {n}{', causal' if causal else ''}"
    return Case(name, attention, x, causal)


def minilm_cases(n: int, layers: Sequence[int]) -> Iterator[Case]:
    """Layers of all-MiniLM-L6-v2 (12 heads × 32) at the tokens they see when the model reads n tokens of Alice."""
    from howsmooth.models import alice, attention_inputs, open_model
    from howsmooth.models.attention_reader import from_transformers

    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    inputs = attention_inputs(model, tokenizer, alice(), n, layers)
    for layer in layers:
        yield Case(f"MiniLM layer {layer}, Alice, n = {n}", from_transformers(model, layer), inputs[layer][0])


def math_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """`scaled_dot_product_attention` with its math kernel: the others have no forward mode."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=causal, scale=scale)[0]


def block_function(case: Case) -> TokenMap:
    """The block as most code writes it: linear layers around `scaled_dot_product_attention`."""
    a = case.attention
    assert a.kv_heads == a.heads
    weights = [w.flatten(0, 1) for w in (a.query_weight, a.key_weight, a.value_weight)]
    biases = [None if b is None else b.flatten() for b in (a.query_bias, a.key_bias, a.value_bias)]
    output = a.output_weight.flatten(0, 1).T

    def block(x: Tensor) -> Tensor:
        query, key, value = (
            F.linear(x, w, b).unflatten(-1, (a.heads, -1)).transpose(0, 1) for w, b in zip(weights, biases, strict=True)
        )
        mixed = math_attention(query, key, value, case.causal, a.scale)
        return F.linear(mixed.transpose(0, 1).flatten(1), output, a.output_bias)

    return block


def head_functions(case: Case) -> list[TokenMap]:
    """Each head's map x ↦ W_h f_h(x), with nothing of the other heads in it."""

    def of_head(h: int) -> TokenMap:
        a = case.attention
        one = hs.SelfAttention(
            a.query_weight[h],
            a.key_weight[h],
            a.value_weight[h],
            a.output_weight[h].T,
            query_bias=None if a.query_bias is None else a.query_bias[h],
            key_bias=None if a.key_bias is None else a.key_bias[h],
            value_bias=None if a.value_bias is None else a.value_bias[h],
            scale=a.scale,
        )
        return block_function(Case(case.name, one, case.x, case.causal))

    return [of_head(h) for h in range(case.attention.heads)]
