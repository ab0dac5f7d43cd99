"""L2 self-attention (Kim, Papamakarios, Mnih 2021): distances instead of dot products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from howsmooth._util.validation import check_no_nan, check_tensor, validated
from howsmooth.attention.attention_map import AttentionMap, Heads, Stages
from howsmooth.attention.masks import LogitBias, as_mask
from howsmooth.attention.stages import Multiple, TokenDerivative, TokenStage
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
