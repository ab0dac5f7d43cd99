"""L2 self-attention (Kim, Papamakarios, Mnih 2021): distances instead of dot products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention.base import AttentionMap, Stages
from howsmooth.attention.masks import LogitBias, as_mask
from howsmooth.attention.stages import TokenDerivative, TokenStage
from howsmooth.errors import InvalidInput


class L2SelfAttention(AttentionMap):
    """F(X) = Σ_h P_h X A_h W^V_h W^O_h with P_ij ∝ exp(−‖W_hᵀ(x_i − x_j)‖²/s), A_h = W_h W_hᵀ/s, s = √(D/H).

    The factor A_h belongs to the definition: without it no known Lipschitz bound applies.

    Args:
        query: tied query–key weights, rows as in `torch.nn.Linear`: W_hᵀ stacked over heads, ``(D, D)``.
        value, output: W^V and W^O likewise; ``output=None`` leaves heads side by side.
        heads: H.
        key: keys of their own, which breaks the theory (the map is then not Lipschitz); for counter-examples.
        value_factor: False drops A_h; for counter-examples. It needs ``value`` only.
        mask: as in `SelfAttention`.

    The row term |q_i|² is the same for every key and drops out of the softmax, so that logits are dot products of
    the features (2q_i, −1)/s and (k_j, |k_j|²), taken about the mean key, which changes nothing but rounding.

    Attributes:
        plain_value: W^V_h without the factor A_h, ``(heads, v, D)``; ``value_weight`` holds it folded in.
    """

    plain_value: Tensor
    kind = "l2"

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
        if query.dim() != 2 or value.dim() != 2 or heads < 1 or query.shape[0] % heads or value.shape[0] % heads:
            raise InvalidInput(
                f"L2 attention needs matrices whose rows split into {heads} heads, got query {tuple(query.shape)} "
                f"and value {tuple(value.shape)}."
            )
        temperature = (query.shape[0] / heads) ** 0.5
        effective = value
        if value_factor:
            tied = query.reshape(heads, -1, query.shape[1])
            values = value.reshape(heads, -1, value.shape[1])
            effective = (values @ tied.mT @ tied / temperature).reshape(value.shape)
        super().__init__(
            query, query if key is None else key, effective, output, heads=heads, logit_biases=as_mask(mask)
        )
        self.register_buffer("plain_value", value.reshape(heads, -1, value.shape[1]))
        self.tied, self.value_factor, self.temperature = key is None, value_factor, temperature

    def stages(self, query: Tensor, key: Tensor) -> Stages:
        centre = key.detach().mean(-2, keepdim=True)
        return (_DistanceQuery(centre, self.temperature),), (_DistanceKey(centre),), ()


class _DistanceQuery(TokenStage, TokenDerivative):
    def __init__(self, centre: Tensor, temperature: float):
        super().__init__()
        self.centre, self.factor = centre, 1 / temperature

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        ones = torch.ones_like(x[..., :1])
        return torch.cat([2 * (x - self.centre), -ones], dim=-1) * self.factor, self

    def jvp(self, dx: Tensor) -> Tensor:
        return torch.nn.functional.pad(2 * self.factor * dx, (0, 1))

    def vjp(self, gy: Tensor) -> Tensor:
        return 2 * self.factor * gy[..., :-1]

    def select(self, index: Tensor) -> TokenDerivative:
        return self


class _DistanceKey(TokenStage):
    def __init__(self, centre: Tensor):
        super().__init__()
        self.centre = centre

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        key = x - self.centre
        return torch.cat([key, key.square().sum(-1, keepdim=True)], dim=-1), _DistanceKeyDerivative(key)


@dataclass(frozen=True)
class _DistanceKeyDerivative(TokenDerivative):
    key: Tensor

    def jvp(self, dx: Tensor) -> Tensor:
        return torch.cat([dx, 2 * (self.key * dx).sum(-1, keepdim=True)], dim=-1)

    def vjp(self, gy: Tensor) -> Tensor:
        return gy[..., :-1] + 2 * self.key * gy[..., -1:]

    def select(self, index: Tensor) -> TokenDerivative:
        return _DistanceKeyDerivative(self.key[index])
