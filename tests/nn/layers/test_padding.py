"""Padding of every layer under every mask: outputs and all gradients finite, and those of the text without padding."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import howsmooth as hs
from howsmooth import nn as layers
from howsmooth.attention import LogitBias
from howsmooth.attention.masks import Terms, as_mask
from howsmooth.bounds import l2_bounds
from howsmooth.bounds.l2_bounds import block_lip_2
from howsmooth.nn.layers.attention_layer import AttentionLayer, CallMasks
from howsmooth.nn.layers.l2_layers import average_2

LAYER_KINDS: dict[str, Callable[[int, int], AttentionLayer]] = {
    "l2": layers.L2Attention,
    "contractive-2": layers.ContractiveL2Attention,
    "contractive-inf": lambda d, h: layers.ContractiveL2Attention(d, h, norm="inf"),
    "contractive-kim": lambda d, h: layers.ContractiveL2Attention(d, h, norm="inf", bound="kim2021"),
    "dot-product": layers.DotProductAttention,
    "sigmoid": layers.SigmoidAttention,
    "cosine": layers.CosineAttention,
    "norm-controlled": layers.NormControlledAttention,
    "gradient-step": lambda d, h: layers.GradientStepAttention(d, h, context_size=5),
    "lipschitz-norm": layers.LipschitzNormAttention,
}
N, D, H = 6, 4, 2
MASKS: dict[str, LogitBias | None] = {
    "none": None,
    "causal": hs.Causal(),
    "window": hs.SlidingWindow(2),
    "window both ways": hs.SlidingWindow(2, causal=False),
    "array": hs.DenseBias(torch.ones(N, N, dtype=torch.bool).tril() & ~torch.ones(N, N, dtype=torch.bool).tril(-3)),
}
PADDING = {
    "left": [True, True, True, False, False, False],
    "right": [False, False, False, True, True, True],
    "middle": [False, True, True, True, False, False],
    "both": [True, True, False, False, True, True],
    "all": [True] * 6,
}


def formula(layer: AttentionLayer, x: Tensor, look: Tensor, terms: Terms) -> Tensor:
    """The layer written out for one text ``(n, d)`` without padding; ``look`` says who sees whom."""
    n = len(x)
    hidden = torch.zeros(n, n, dtype=x.dtype).masked_fill(~look, -math.inf)
    if isinstance(layer, layers.GradientStepAttention):
        out = torch.zeros_like(x)
        for matrix, context in zip(layer.matrix, layer.context, strict=True):
            points = context @ matrix.T
            step = layer.step * 2 / points.square().sum(1).max()
            out = out + (x - step * torch.softmax(x @ points.T, 1) @ points) / H
        return out
    if isinstance(layer, layers.L2Attention):
        weights = [w.view(H, -1, D) for w in (layer.qk_proj.weight, layer.v_proj.weight, layer.out_proj.weight.T)]
        out, s = torch.zeros_like(x), (D / H) ** 0.5
        for query, value, output in zip(*weights, strict=True):
            z = x @ query.T
            p = torch.softmax(-(z[:, None] - z[None]).square().sum(-1) / s + hidden, 1)
            out = out + p @ z @ (query @ value.T @ output) / s
        return out * divided(layer, weights, CallMasks(n, terms))
    query, key, value = (part.view(n, H, -1).transpose(0, 1) for part in (x @ layer.in_proj.weight.T).chunk(3, 1))
    width, size = D // H, 1.0
    if isinstance(layer, layers.CosineAttention):
        query, key, value = (t / (t.square().sum(-1, keepdim=True) + layer.eps).sqrt() for t in (query, key, value))
        logits = query @ key.mT
    elif isinstance(layer, layers.LipschitzNormAttention):
        whole, k, v = query.flatten(1).norm(dim=1), key.norm(dim=-1).amax(-1), value.norm(dim=-1).amax(-1)
        logits = query @ key.mT / torch.stack([whole * k, whole * v, k * v]).amax(0)[:, None, None]
    elif isinstance(layer, layers.NormControlledAttention):
        logits, size = query @ key.mT / width, 1 / 3
    else:
        logits = query @ key.mT / width**0.5
    sigmoid = isinstance(layer, layers.SigmoidAttention)
    weights = torch.sigmoid(logits - math.log(n) + hidden) if sigmoid else torch.softmax(logits + hidden, -1)
    return size * (weights @ value).transpose(0, 1).flatten(1) @ layer.out_proj.weight.T


def divided(layer: layers.L2Attention, weights: list[Tensor], sight: CallMasks) -> Tensor | float:
    """c over the bound, for the contractive kinds."""
    if not isinstance(layer, layers.ContractiveL2Attention):
        return 1.0
    if layer.norm == 2:
        return layer.coefficient / block_lip_2(*weights, average_2(sight))  # type: ignore[call-arg, arg-type]
    bound = l2_bounds.l2_lip_inf if layer.bound == "howsmooth" else l2_bounds.lip_inf
    return layer.coefficient / bound(*weights, sight.terms.most_seen(sight.n))  # type: ignore[call-arg, arg-type]


MASKED = [(kind, mask) for kind in LAYER_KINDS for mask in MASKS if kind != "lipschitz-norm" or mask == "none"]


@pytest.mark.parametrize(("kind", "mask"), MASKED)
def test_padded_texts_have_outputs_and_gradients_of_the_texts_alone(kind: str, mask: str) -> None:
    layer = LAYER_KINDS[kind](D, H).double().eval()
    x = torch.randn(len(PADDING) + 1, N, D, dtype=torch.float64, requires_grad=True)
    padded = torch.tensor([[False] * N, *PADDING.values()])
    u = torch.randn_like(x)
    wanted = [x, *layer.parameters()]
    out = layer(x, key_padding_mask=padded, attn_mask=torch_mask(MASKS[mask]))[0]
    found = torch.autograd.grad((out * u).sum(), wanted)
    assert all(bool(each.isfinite().all()) for each in (out, *found))
    assert not out[padded].any()
    assert not found[0][padded].any()
    terms = as_mask(MASKS[mask])
    total = x.new_zeros(())
    for item, keep in enumerate(~padded):
        if bool(keep.any()):
            text = formula(layer, x[item][keep], seen(MASKS[mask])[keep][:, keep], terms)  # type: ignore[arg-type]
            torch.testing.assert_close(out[item][keep], text, rtol=1e-10, atol=1e-10)
            total = total + (text * u[item][keep]).sum()
    expected = torch.autograd.grad(total, wanted)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def torch_mask(mask: LogitBias | None) -> LogitBias | Tensor | None:
    return ~mask.bias[0, 0] if isinstance(mask, hs.DenseBias) else mask


def seen(mask: LogitBias | None) -> Tensor:
    """Who sees whom, written out."""
    far = torch.arange(N)[:, None] - torch.arange(N)
    if isinstance(mask, hs.DenseBias):
        return mask.bias.view(N, N).bool()
    if isinstance(mask, hs.SlidingWindow):
        return (far < 2) & ((far >= 0) if mask.causal else (far > -2))
    return far >= 0 if isinstance(mask, hs.Causal) else torch.ones(N, N, dtype=torch.bool)


@pytest.mark.parametrize("kind", ["l2", "contractive-l2", "cosine", "sigmoid", "norm-controlled", "dot-product"])
def test_replaced_gpt2_trains_on_a_batch_padded_on_the_left(kind: str) -> None:
    """Losses and gradients are finite, and those of the two texts one by one."""
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = layers.replace_attention(GPT2LMHeadModel(config), kind).double().eval()
    ids, mask = torch.randint(0, 50, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 3] = -100  # its prediction comes from padding

    def gradients(*calls: tuple[Tensor, Tensor]) -> list[Tensor]:
        rows = torch.cat([logits[:, :-1].flatten(0, 1) for logits, _ in calls])
        loss = torch.nn.functional.cross_entropy(rows, torch.cat([wanted[:, 1:].flatten() for _, wanted in calls]))
        return list(torch.autograd.grad(loss, list(model.parameters())))

    found = gradients((model(ids, attention_mask=mask, position_ids=positions).logits, labels))
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    texts = [row[keep][None] for row, keep in zip(ids, mask.bool(), strict=True)]
    for a, b in zip(found, gradients(*((model(text).logits, text) for text in texts)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_steps_of_points_at_zero_have_finite_gradients() -> None:
    layer = layers.GradientStepAttention(4, 2, context_size=3)
    for size in (0.0, 1e-30):
        torch.nn.init.constant_(layer.context, size)
        x = torch.randn(5, 4, requires_grad=True)
        out = layer(x)[0]
        gradients = torch.autograd.grad(out.sum(), [x, *layer.parameters()])
        assert all(bool(each.isfinite().all()) for each in (out, *gradients))


def test_masks_and_padding_that_leave_nothing_give_zero() -> None:
    layer = layers.DotProductAttention(4, 2).double()
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    own = torch.eye(3, dtype=torch.bool)  # nobody sees itself, and token 1 alone is there to be seen
    out = layer(x, attn_mask=own, key_padding_mask=torch.tensor([[True, False, True]]))[0]
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert not out.any()
    assert not gradient.any()
