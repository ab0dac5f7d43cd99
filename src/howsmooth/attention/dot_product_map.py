"""Dot-product attention with everything today's transformers put into it, and its cosine, sigmoid and L2 variants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from howsmooth._util.validation import Seed, check_no_nan, check_number, check_tensor, check_weights, validated
from howsmooth.attention.attention_map import AttentionMap, Heads, Stages, check_heads
from howsmooth.attention.masks import LogitBias, Maps, Sight, as_mask
from howsmooth.attention.stages import Multiple, Rotary, Scale, TokenDerivative, TokenStage, UnitNorm
from howsmooth.errors import InvalidInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from howsmooth.attention.composite_map import ComposedAttention

QKNorm = Literal["rms", "l2"] | tuple[TokenStage, TokenStage] | None


class SelfAttention(AttentionMap):
    """Dot-product self-attention f(X) = Σ_h softmax(q_h k_hᵀ) v_h W_h (Vaswani et al. 2017).

    Args:
        query, key, value, output: weights as in `torch.nn.Linear`; ``output=None`` leaves the heads side by side.
        heads, kv_heads: query heads, and key–value heads when fewer (grouped or multi-query attention).
        query_bias, key_bias, value_bias, output_bias: optional vectors.
        mask: None, "causal", booleans (True = may look), logits to add, or a `LogitBias` (`Causal`, `SlidingWindow`,
            `Padding`, …).
        logit_biases: further additive terms: `ALiBi`, `RelativeBias`, …
        rotary: rotary positions applied to queries and keys.
        qk_norm: "rms", "l2", or a pair of stages (`UnitNorm`, `HeadNorm`); applied before the rotation.
        softcap: logits become c·tanh(s/c) before masks and biases.
        scale: factor on the logits; 1/√(head width) when None.

    >>> import torch, howsmooth as hs
    >>> attention = hs.SelfAttention(*torch.eye(4).repeat(4, 1, 1), heads=2, mask="causal")
    >>> attention(torch.ones(3, 4)).shape
    torch.Size([3, 4])
    """

    kind = "dot_product"

    @validated
    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        *,
        heads: int = 1,
        kv_heads: int | None = None,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        value_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        mask: LogitBias | Tensor | str | None = None,
        logit_biases: Sequence[LogitBias] = (),
        rotary: Rotary | None = None,
        qk_norm: QKNorm = None,
        softcap: float | None = None,
        scale: float | None = None,
    ):
        biases = {"query_bias": query_bias, "key_bias": key_bias, "value_bias": value_bias, "output_bias": output_bias}
        terms = [*as_mask(mask), *logit_biases]
        super().__init__(
            query, key, value, output, heads=heads, kv_heads=kv_heads, logit_biases=terms, softcap=softcap, **biases
        )
        width = self.query_weight.shape[1]
        if qk_norm is not None:
            for_query, for_key = _norms(qk_norm, width)
            self.query_stages.append(for_query)
            self.key_stages.append(for_key)
        if rotary is not None:
            self.query_stages.append(rotary)
            self.key_stages.append(rotary)
        self.scale = width**-0.5 if scale is None else float(scale)
        self.query_stages.append(Scale(self.scale))

    @classmethod
    @validated
    def from_bilinear(cls, a: Tensor, v: Tensor, bias: Tensor | None = None, **options: object) -> SelfAttention:
        """One head in the notation of the theory: P_ij ∝ exp(x_jᵀ A x_i + b·x_j), f(X)_i = V Σ_j P_ij x_j.

        >>> import torch, howsmooth as hs
        >>> hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))(torch.zeros(3, 2)).shape
        torch.Size([3, 2])
        """
        if a.dim() != 2 or v.dim() != 2:
            raise InvalidInput(f"A and V must be matrices, got shapes {tuple(a.shape)} and {tuple(v.shape)}.")
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        return cls(a, identity, v, query_bias=bias, scale=1.0, **options)  # type: ignore[arg-type]

    @classmethod
    @validated
    def random(
        cls,
        width: int,
        heads: int = 1,
        *,
        kv_heads: int | None = None,
        seed: Seed = 0,
        dtype: torch.dtype = torch.float32,
        **options: object,
    ) -> SelfAttention:
        """Weights of variance 1/width: tokens of unit variance give queries and keys of unit variance."""
        if not all(isinstance(count, int) and count >= 1 for count in (width, heads)) or width % heads:
            raise InvalidInput(
                f"a width of {width!r} does not split into {heads!r} heads: give positive whole numbers."
            )
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads(heads, kv_heads)
        check_weights(4 * width * width, "random attention")
        generator = torch.Generator().manual_seed(seed)
        shared = width // heads * kv_heads

        def draw(rows: int) -> Tensor:
            return (torch.randn(rows, width, generator=generator, dtype=torch.float64) * width**-0.5).to(dtype)

        weights = draw(width), draw(shared), draw(shared), draw(width)
        return cls(*weights, heads=heads, kv_heads=kv_heads, **options)  # type: ignore[arg-type]

    @classmethod
    @validated
    def from_torch(cls, module: nn.MultiheadAttention, causal: bool = False) -> SelfAttention:
        """The self-attention x ↦ module(x, x, x) of a `torch.nn.MultiheadAttention`, without its dropout."""
        if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
            raise InvalidInput(
                "this nn.MultiheadAttention appends an extra key (add_bias_kv or add_zero_attn), which SelfAttention "
                "does not model: measure it as a function instead, hs.measure(lambda x: module(x, x, x)[0], x)."
            )
        if not module._qkv_same_embed_dim:
            raise InvalidInput("self-attention needs kdim = vdim = embed_dim, but this nn.MultiheadAttention differs.")
        weights = (*module.in_proj_weight.detach().chunk(3), module.out_proj.weight.detach())
        biases: dict[str, Any] = {} if module.out_proj.bias is None else {"output_bias": module.out_proj.bias.detach()}
        if module.in_proj_bias is not None:
            names = ("query_bias", "key_bias", "value_bias")
            biases |= zip(names, module.in_proj_bias.detach().chunk(3), strict=True)
        return cls(*weights, heads=module.num_heads, mask="causal" if causal else None, **biases)

    @classmethod
    @validated
    def from_transformers(cls, model: PreTrainedModel, layer: int) -> SelfAttention | ComposedAttention:
        """The self-attention of one layer of a Hugging Face model; see `howsmooth.models.attention_reader`."""
        from howsmooth.models.attention_reader import from_transformers

        return from_transformers(model, layer)


def _norms(qk_norm: QKNorm, width: int) -> tuple[TokenStage, TokenStage]:
    if qk_norm == "rms":
        return UnitNorm.rms(width), UnitNorm.rms(width)
    if qk_norm == "l2":
        return UnitNorm(eps=1e-12), UnitNorm(eps=1e-12)
    if isinstance(qk_norm, tuple) and len(qk_norm) == 2:
        return qk_norm
    raise InvalidInput(f"qk_norm is 'rms', 'l2' or a pair of stages, got {qk_norm!r}.")


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


class _Shift(LogitBias):
    """The same constant on every logit; None means −ln n, which makes rows of weights sum to about one."""

    sight: Sight = "full"
    keeps_self = True

    def __init__(self, value: float | None):
        super().__init__()
        self.value = None if value is None else check_number(value, "the shift of sigmoid logits")

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        value = -math.log(maps.n) if self.value is None else self.value
        return maps.like.new_full((1, 1, 1), value)


class SigmoidAttention(SelfAttention):
    """P_ij = 1/(1 + exp(−(q_i·k_j + b))) (Ramapuram et al. 2024), b = −ln n unless given.

    Takes the arguments of `SelfAttention`.
    """

    kind = "sigmoid"
    weighting = "sigmoid"

    @validated
    def __init__(self, *weights: Tensor | None, logit_shift: float | None = None, **options: object):
        super().__init__(*weights, **options)  # type: ignore[arg-type]
        self.logit_biases.append(_Shift(logit_shift))


class L2SelfAttention(AttentionMap):
    """F(X) = Σ_h P_h X A_h W^V_h W^O_h with P_ij ∝ exp(−‖W_hᵀ(x_i − x_j)‖²/s), A_h = W_h W_hᵀ/s, s = √(D/H).

    Distances take the place of dot products (Kim, Papamakarios, Mnih 2021). The factor A_h belongs to the definition:
    without it no known Lipschitz bound applies.

    Args:
        query: tied query–key weights, rows as in `torch.nn.Linear`: W_hᵀ stacked over heads, ``(D, D)``.
        value, output: W^V and W^O likewise; ``output=None`` leaves heads side by side.
        heads: H.
        key: keys of their own, which breaks the theory (the map is then not Lipschitz); for counter-examples.
        value_factor: False drops A_h; for counter-examples. It needs ``value`` only.
        mask: as in `SelfAttention`.

    The row term |q_i|² is the same for every key and drops out of the softmax, so that logits are dot products of
    the features (2q_i, −r)/s and (k_j, |k_j|²/r), taken about the mean key and with r the length of the longest one:
    neither changes anything but rounding.

    Attributes:
        plain_value: W^V_h without the factor A_h, ``(heads, v, D)``; ``value_weight`` holds it folded in.
    """

    plain_value: Tensor
    kind = "l2"

    @validated
    def __init__(
        self,
        query: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        *,
        heads: int = 1,
        key: Tensor | None = None,
        value_factor: bool = True,
        mask: LogitBias | Tensor | str | None = None,
    ):
        for weight, name in ((query, "query"), (value, "value")):
            check_tensor(weight, name, dims=(2,))
        if query.dtype != value.dtype:
            raise InvalidInput(f"query and value have the dtypes {query.dtype} and {value.dtype}: convert one of them.")
        keys = query if key is None else key
        super().__init__(query, keys, value, output, heads=heads, logit_biases=as_mask(mask))
        temperature, tied = self.query_weight.shape[1] ** 0.5, self.query_weight
        self.register_buffer("plain_value", self.value_weight)
        if value_factor:
            self.value_weight = self.plain_value @ tied.mT @ tied / temperature
            check_no_nan(self.value_weight, "the product of the value and query weights")
        self.tied, self.value_factor, self.temperature = key is None, value_factor, temperature

    def project_about(self, moved: Tensor) -> Heads:
        """Distances see no constant that queries and keys share."""
        query, key, value = self._project(moved[..., :-1, :])
        if not self.tied:
            query_shift, key_shift, _ = self.project(moved[..., -1:, :])
            query = query + (query_shift - key_shift)
        return query, key, value

    def head(self, head: int) -> Self:
        return super().head(head).replace(plain_value=self.plain_value[head][None])

    def stages(self, query: Tensor, key: Tensor) -> Stages:
        centre = key.detach().mean(-2, keepdim=True)
        length = torch.linalg.vector_norm(key.detach() - centre, dim=-1, keepdim=True).amax(-2, keepdim=True)
        reach = torch.where(length > 0, length, 1.0)
        return (_DistanceQuery(centre, reach, self.temperature),), (_DistanceKey(centre, reach),), ()


class _DistanceQuery(TokenStage):
    def __init__(self, centre: Tensor, reach: Tensor, temperature: float):
        super().__init__()
        self.centre, self.reach, self.factor = centre, reach, 1 / temperature

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        last = -self.reach.expand_as(x[..., :1])
        return torch.cat([2 * (x - self.centre), last], dim=-1) * self.factor, _Padded(2 * self.factor)


class _Padded(Multiple):
    """c·dx with a zero behind it."""

    def jvp(self, dx: Tensor) -> Tensor:
        return torch.nn.functional.pad(super().jvp(dx), (0, 1))

    def vjp(self, gy: Tensor) -> Tensor:
        return super().vjp(gy[..., :-1])


class _DistanceKey(TokenStage):
    def __init__(self, centre: Tensor, reach: Tensor):
        super().__init__()
        self.centre, self.reach = centre, reach

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        key = x - self.centre
        slope = 2 * key / self.reach
        return torch.cat([key, (slope * key).sum(-1, keepdim=True) / 2], dim=-1), _DistanceKeyDerivative(slope)


@dataclass(frozen=True)
class _DistanceKeyDerivative(TokenDerivative):
    slope: Tensor

    def jvp(self, dx: Tensor) -> Tensor:
        return torch.cat([dx, (self.slope * dx).sum(-1, keepdim=True)], dim=-1)

    def vjp(self, gy: Tensor) -> Tensor:
        return gy[..., :-1] + self.slope * gy[..., -1:]

    def size(self) -> Tensor:
        return (1 + self.slope.square().sum(-1, keepdim=True)).sqrt()
