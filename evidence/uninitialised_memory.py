"""Functions that fill tensors they created without a value, measured while memory holds NaN and large numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import howsmooth as hs
from evidence.tables import table

TITLE = "Memory that nothing has written"
Map = Callable[[Tensor], Tensor]
RIGHT = 1e-3
"""The relative accuracy that `hs.measure` is asked for."""


def halves(h: Tensor) -> Tensor:
    """Keys put together from two parts, as in DeepSeek V2 and V3, and something made of them."""
    out, half = h.new_empty(h.shape), h.shape[-1] // 2
    out[..., :half].copy_(h[..., :half])
    out[..., half:].copy_(h[..., half:])
    return (out @ h.mT).softmax(-1) @ out


def by_rows(h: Tensor) -> Tensor:
    """``torch.empty`` filled row by row."""
    out = torch.empty(h.shape, dtype=h.dtype)
    for row, values in enumerate(h):
        out[row] = values.sin()
    return out.exp()


def added_up(h: Tensor) -> Tensor:
    """``empty_like``, filled, then changed in place."""
    out = torch.empty_like(h)
    out[:] = h
    out.add_(h.flip(0)).mul_(0.5)
    return out.cos()


def resized(h: Tensor) -> Tensor:
    """A tensor of no elements, resized and filled."""
    return h.new_empty(0).resize_(h.shape).copy_(h).tanh()


def turned_back(h: Tensor) -> Tensor:
    """A permutation and its inverse, which is written into ``empty_like``, as in mixtures of experts."""
    order = h.detach()[:, 0].argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return (h[order] * torch.arange(1.0, len(order) + 1, dtype=h.dtype)[:, None]).sin()[back]


def deepseek_layer(n: int = 6) -> tuple[Map, Tensor]:
    """A decoder layer of DeepSeek V3 with random weights, and tokens for it, in float32: its norms compute in that."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    config = DeepseekV3Config(**sizes, **latent, num_hidden_layers=1, vocab_size=32, attn_implementation="eager")
    layer = DeepseekV3DecoderLayer(config, 0).eval().requires_grad_(False)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    places, x = torch.arange(n)[None], torch.randn(n, 16)
    turns = DeepseekV3RotaryEmbedding(config)(x[None], places)
    mask = torch.full((1, 1, n, n), -math.inf).triu(1)

    def f(x: Tensor) -> Tensor:
        result: Tensor = layer(x[None], attention_mask=mask, position_embeddings=turns, position_ids=places)[0]
        return result

    return f, x


PLAIN: dict[str, Map] = {
    "two halves of `new_empty`": halves,
    "rows of `empty`": by_rows,
    "`empty_like`, `add_`, `mul_`": added_up,
    "`resize_`": resized,
    "inverse permutation": turned_back,
}


def tokens() -> Tensor:
    """The input of the plain functions."""
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def soil(value: float, like: Tensor) -> None:
    """Fill memory with a number and give it back, in blocks of the sizes that small maps ask for."""
    sizes = [like.numel() * part // 4 for part in (1, 2, 4, 8)]
    blocks = [torch.full((size,), value, dtype=like.dtype) for size in sizes for _ in range(20)]
    del blocks


@contextmanager
def every_new_tensor_is_nan() -> Iterator[None]:
    """Torch fills every tensor that is created without a value with NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that have no deterministic version
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@contextmanager
def memory(kind: str, like: Tensor) -> Iterator[None]:
    """Memory as it comes ("fresh"), soiled with a number, or NaN wherever nothing was written."""
    if kind == "unwritten is NaN":
        with every_new_tensor_is_nan():
            yield
    else:
        if kind != "fresh":
            soil(float(kind), like)
        yield


KINDS = ("fresh", "nan", "1e30", "1.5", "unwritten is NaN")


def norm(f: Map, x: Tensor) -> float:
    """By autograd in reverse mode, row by row, and a singular value decomposition."""
    dense = torch.autograd.functional.jacobian(lambda z: f(z.clone()), x)
    return float(torch.linalg.matrix_norm(dense.reshape(-1, x.numel()).double(), 2))


def right(f: Map, x: Tensor, truth: float) -> bool:
    """Whether a measurement is converged, as near to the truth as it says, and has the truth between its ends."""
    m = hs.measure(f, x, rtol=RIGHT)
    between = float(m.lower) <= truth * (1 + 1e-9) and truth <= float(m.upper) * (1 + 1e-9)
    return bool(m.converged) and abs(float(m) - truth) <= RIGHT * truth and between


def right_by_torch(f: Map, x: Tensor) -> bool:
    """Whether one product by ``torch.func.linearize`` is that of ``torch.func.jvp``: the control."""
    v = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            product = torch.func.linearize(f, x)[1](v)
        except (RuntimeError, IndexError):  # an index that nothing has written
            return False
    return torch.allclose(product, torch.func.jvp(f, (x,), (v,))[1], rtol=1e-4, atol=1e-4)


def count(f: Map, x: Tensor, kind: str, times: int, judge: Callable[[], bool]) -> int:
    """How many of so many judgements are favourable in one kind of memory."""
    favourable = 0
    for _ in range(times):
        with memory(kind, x):
            favourable += judge()
    return favourable


def parts(progress: Callable[[str], None] = lambda text: None, times: int = 100, most: int = 1000) -> list[str]:
    """The page."""
    rows = []
    every = {name: (f, tokens()) for name, f in PLAIN.items()} | {"DeepSeek V3 layer": deepseek_layer()}
    for place, (name, (f, x)) in enumerate(every.items()):
        truth = norm(f, x)
        for kind in KINDS:
            progress(f"{name}, {kind}")
            tries = most if place == 0 else times
            ours = count(f, x, kind, tries, lambda: right(f, x, truth))  # noqa: B023
            torchs = count(f, x, kind, min(times, 40), lambda: right_by_torch(f, x))  # noqa: B023
            rows.append([name, kind, f"{ours} of {tries}", f"{torchs} of {min(times, 40)}"])
    head = ["function", "memory", "`hs.measure` right", "`torch.func.linearize` right"]
    return [
        "Functions that create a tensor without a value and write into it, 6 tokens, the layer in float32 and the "
        "others in float64. Before each measurement memory is left as it is (*fresh*), or blocks of the sizes that the "
        "function uses are filled with a number and given back, or torch fills every tensor that has no value yet with "
        "NaN. *Right*: converged, within 10⁻³ of the singular value decomposition of autograd's Jacobian, which lies "
        "between the two ends. Last column, the control: one product of `torch.func.linearize` by itself equals that "
        "of `torch.func.jvp`. Why the two differ is in [accuracy](../accuracy.md).",
        table(head, rows),
    ]
