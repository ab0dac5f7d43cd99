"""Dot-product attention and its variants: other stages after the projections, or another divisor of the logits.

Each layer trains the weights of an attention map of `howsmooth.attention`; the map defines the stages and their theory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth import attention
from howsmooth._util.validation import check_number, check_positive, validated
from howsmooth.attention import Rotary, SelfAttention
from howsmooth.attention.autodiff_maps import divisor_of
from howsmooth.attention.stages import Chain
from howsmooth.errors import InvalidInput
from howsmooth.nn.layers.attention_layer import CallMasks, Mask, ProjectedAttention, ProjectedTokens, glorot
from howsmooth.nn.layers.weight_norms import SpectralCaps


class DotProductAttention(ProjectedAttention):
    """Plain dot-product attention (Vaswani et al. 2017), the baseline; arguments as in `AttentionLayer`.

    It is Lipschitz on bounded sets only, so `lipschitz_bound` needs a radius.

    >>> layer = DotProductAttention(8, num_heads=2)
    >>> bool(layer.lipschitz_bound(n=16, radius=1.0) > 0)
    True
    >>> layer.lipschitz_bound(n=16)
    Traceback (most recent call last):
    howsmooth.errors.DoesNotApply: dot-product attention is not Lipschitz on all of space: give the radius of a ball...
    """

    refusal = (
        "dot-product attention is not Lipschitz on all of space: give the radius of a ball that holds every token, or "
        "use L2Attention"
    )
    map_class: type[SelfAttention] = SelfAttention
    """The class of the layer's attention map."""

    def make_weights(self, bias: bool) -> None:
        self.in_proj = glorot(self.embed_dim, self.embed_dim, parts=3, bias=bias)
        self.out_proj = glorot(self.embed_dim, self.embed_dim, bias=bias)
        self.set_rotary(None)

    def set_rotary(self, rotary: Rotary | None) -> None:
        """Rotate queries and keys by their positions, or do not."""
        self.rotary = rotary
        core = self.map()  # its stages have no weights of their own
        self.weighting = core.weighting
        self.query_stages, self.key_stages, self.value_stages = core.query_stages, core.key_stages, core.value_stages

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            is_angle = self.rotary is not None and tensor is self.rotary.frequencies  # useless in half precision
            return tensor.to(converted.device) if is_angle else converted

        return super()._apply(convert, recurse)

    def options(self) -> dict[str, Any]:
        """Return the arguments of the map besides weights, mask and rotary positions."""
        return {}

    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        tokens = map(self.by_head, self.in_proj(x).chunk(3, dim=-1))
        stages: tuple[Any, ...] = (self.query_stages, self.key_stages, self.value_stages)
        return ProjectedTokens(*(Chain.through(each, t)[0] for each, t in zip(stages, tokens, strict=True)))

    def attached_map(self, mask: Mask, n: int | None) -> SelfAttention:
        query, key, value = self.in_proj.weight.chunk(3)
        options: dict[str, Any] = {"heads": self.num_heads, "mask": mask, "rotary": self.rotary, **self.options()}
        if self.in_proj.bias is not None:
            options |= zip(("query_bias", "key_bias", "value_bias"), self.in_proj.bias.chunk(3), strict=True)
            options["output_bias"] = self.out_proj.bias[:]
        return self.map_class(query, key, value, self.out_proj.weight, **options)


class SigmoidAttention(DotProductAttention):
    """Weights σ(q·k/√k + b), each by itself (Ramapuram et al. 2024); b = −ln n unless ``logit_shift`` is given.

    Padded tokens do not count in n. Lipschitz on bounded sets only: `lipschitz_bound` needs a radius.

    >>> import torch
    >>> SigmoidAttention(8, num_heads=2)(torch.zeros(3, 8))[0].shape
    torch.Size([3, 8])
    """

    refusal = (
        "sigmoid attention is not Lipschitz on all of space: give the radius of a ball that holds every token, or use "
        "L2Attention"
    )
    map_class = attention.SigmoidAttention

    @validated
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = False,
        batch_first: bool = True,
        dropout: float = 0.0,
        *,
        logit_shift: float | None = None,
    ):
        self.logit_shift = None if logit_shift is None else check_number(logit_shift, "logit_shift")
        super().__init__(embed_dim, num_heads, bias, batch_first, dropout)

    def options(self) -> dict[str, Any]:
        return {"logit_shift": self.logit_shift}

    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        heads = super().project(x, masks)
        like = heads.query
        if self.logit_shift is None and masks.keep is not None:
            shift = -masks.keep.sum(-1).clamp(min=1).to(like.dtype).log()[:, None, None, None]
        else:
            shift = like.new_full((1, 1, 1, 1), -math.log(masks.n) if self.logit_shift is None else self.logit_shift)
        return replace(heads, shift=shift)


class CosineAttention(DotProductAttention):
    """Scaled cosine attention ν·softmax(τ q̂ k̂ᵀ) v̂, t̂ = t/√(|t|² + ε) (LipsFormer, Qi et al. 2023).

    Values are normalised too: otherwise no global constant exists. The bound grows as ε^{−½}.

    Args:
        temperature: τ. value_scale: ν. eps: ε > 0.
        embed_dim, num_heads, bias, batch_first, dropout: as in `AttentionLayer`.

    >>> bool(CosineAttention(8, num_heads=2).lipschitz_bound(n=16).isfinite())
    True
    """

    map_class = attention.CosineAttention

    @validated
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = False,
        batch_first: bool = True,
        dropout: float = 0.0,
        *,
        temperature: float = 1.0,
        value_scale: float = 1.0,
        eps: float = 1e-2,
    ):
        self.temperature = check_number(temperature, "temperature")
        self.value_scale = check_number(value_scale, "value_scale")
        self.eps = check_positive(eps, "eps")
        super().__init__(embed_dim, num_heads, bias, batch_first, dropout)

    def options(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "value_scale": self.value_scale, "eps": self.eps}


class NormControlledAttention(DotProductAttention):
    """Dot-product attention with capped norms (Newhouse et al. 2025): logits q·k/d_head, output × 1/3.

    Call `cap_` after every step of the optimiser: no spectral norm of a weight then exceeds ``cap``. Lipschitz on
    bounded sets only, so `lipschitz_bound` needs a radius; with weights of norm one and tokens in the unit ball
    a = 1/d_head.

    Args:
        cap: largest spectral norm of the four weight matrices.
        embed_dim, num_heads, bias, batch_first, dropout: as in `AttentionLayer`.

    >>> import torch
    >>> layer = NormControlledAttention(8, num_heads=2)
    >>> _ = torch.nn.init.normal_(layer.out_proj.weight, std=9.0)
    >>> layer.cap_()
    >>> round(float(torch.linalg.matrix_norm(layer.out_proj.weight.detach(), 2)), 5)
    1.0
    """

    @validated
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = False,
        batch_first: bool = True,
        dropout: float = 0.0,
        *,
        cap: float = 1.0,
    ):
        cap = check_positive(cap, "cap")
        super().__init__(embed_dim, num_heads, bias, batch_first, dropout)
        self.cap = cap
        self.cap_()

    def options(self) -> dict[str, Any]:
        return {"scale": 1 / self.head_dim}

    def combine(self, mixed: Tensor, masks: CallMasks) -> Tensor:
        return super().combine(mixed / 3, masks)

    def attached_map(self, mask: Mask, n: int | None) -> SelfAttention:
        attention_map = super().attached_map(mask, n)
        return attention_map.replace(output_weight=attention_map.output_weight / 3)

    def cap_(self) -> None:
        """Clip the singular values of all weights at ``cap``, in place."""
        SpectralCaps(self, self.cap).exact()


class LipschitzNormAttention(ProjectedAttention):
    """softmax(QKᵀ/c)V with the divisor c of Dasoulas, Scaman and Virmaux (2021): Lipschitz on all of space.

    c = max(‖Q‖_F‖K‖, ‖Q‖_F‖V‖, ‖K‖‖V‖), ‖K‖ and ‖V‖ being the longest token of each, head by head. c depends
    on all tokens, so every token influences every other: masks are refused, padding is not. The bound holds for
    every n.

    Arguments as in `AttentionLayer`; ``bias`` adds one to the output only, which the map omits.

    >>> bool(LipschitzNormAttention(8, num_heads=2).lipschitz_bound(n=16).isfinite())
    True
    """

    def make_weights(self, bias: bool) -> None:
        self.in_proj = glorot(self.embed_dim, self.embed_dim, parts=3)
        self.out_proj = glorot(self.embed_dim, self.embed_dim, bias=bias)

    def project(self, x: Tensor, masks: CallMasks) -> ProjectedTokens:
        if masks.terms:
            raise InvalidInput(_NO_MASKS)
        query, key, value = map(self.by_head, self.in_proj(x).chunk(3, dim=-1))
        divisor = divisor_of(query, key, value)  # padded tokens are zero, and zero is never the longest
        return ProjectedTokens(query / torch.where(divisor > 0, divisor, 1.0)[..., None, None], key, value)

    def attached_map(self, mask: Mask, n: int | None) -> nn.Module:
        if mask is not None:
            raise InvalidInput(_NO_MASKS)
        weights = *self.in_proj.weight.chunk(3), self.out_proj.weight
        return attention.LipschitzNormAttention(*weights, heads=self.num_heads)


_NO_MASKS = (
    "the divisor of LipschitzNorm depends on all tokens, hidden ones included: leave the mask out, or use L2Attention."
)
