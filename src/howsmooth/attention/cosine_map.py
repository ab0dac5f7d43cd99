"""Scaled cosine attention: queries, keys and values brought to one length."""

from __future__ import annotations

from torch import Tensor

from howsmooth._util.validation import validated
from howsmooth.attention.dot_product_map import SelfAttention
from howsmooth.attention.stages import Scale, UnitNorm
from howsmooth.errors import InvalidInput


class CosineAttention(SelfAttention):
    """ν·softmax(τ q̂ k̂ᵀ) v̂ with t̂ = t/√(|t|² + ε) (LipsFormer, Qi et al. 2023).

    Args:
        temperature: τ. value_scale: ν. eps: ε.
        normalize_values: False gives the cosine attention of Swin v2, for which the published bound does not hold.

    Takes the other arguments of `SelfAttention`, except ``scale`` and ``qk_norm``.
    """

    kind = "cosine"

    @validated
    def __init__(
        self,
        *weights: Tensor | None,
        temperature: float = 1.0,
        value_scale: float = 1.0,
        eps: float = 1e-6,
        normalize_values: bool = True,
        **options: object,
    ):
        if "scale" in options or "qk_norm" in options:
            raise InvalidInput("cosine attention has a temperature and its own norms: leave out scale and qk_norm.")
        norms = (UnitNorm(eps), UnitNorm(eps))
        super().__init__(*weights, qk_norm=norms, scale=temperature, **options)  # type: ignore[arg-type]
        self.temperature, self.value_scale, self.eps = temperature, value_scale, eps
        self.normalize_values = normalize_values
        self.value_stages.append(UnitNorm(eps, length=value_scale) if normalize_values else Scale(value_scale))
