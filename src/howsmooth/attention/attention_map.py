"""The base of all attention maps: projections, stages, logits, weights, output."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_positive
from howsmooth.attention.masks import LogitBias, Maps, Terms, softmax
from howsmooth.attention.stages import Chain, TokenStage
from howsmooth.errors import InvalidInput

Heads = tuple[Tensor, Tensor, Tensor]
Stages = tuple[Sequence[TokenStage], Sequence[TokenStage], Sequence[TokenStage]]
_NARROW = 256
"""Number of columns of all projections up to which one product is faster than three."""


class MapModule(nn.Module, ABC):
    """A map as a value: changed copies are made by `replace`, and nothing is assigned to its fields from outside."""

    kind: str
    heads: int

    @property
    @abstractmethod
    def in_features(self) -> int:
        """Width of a token."""

    @property
    @abstractmethod
    def out_features(self) -> int:
        """Width of an output token."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Floating dtype of the weights."""

    def replace(self, **fields: Any) -> Self:
        """A copy with other weights, biases, masks or numbers of heads; all other tensors and modules are shared.

        >>> import howsmooth as hs
        >>> attention = hs.SelfAttention.random(4, heads=2)
        >>> twice = attention.replace(output_weight=2 * attention.output_weight)
        >>> torch.equal(twice(torch.ones(3, 4)), 2 * attention(torch.ones(3, 4)))
        True
        """
        other = copy.copy(self)
        own = {name: dict(vars(self)[name]) for name in ("_buffers", "_modules", "_parameters")}
        vars(other).update(own)
        for name, value in fields.items():
            if not hasattr(self, name):
                raise InvalidInput(f"{type(self).__name__} has no field {name}.")
            several = isinstance(getattr(self, name), nn.ModuleList)
            setattr(other, name, nn.ModuleList(value) if several else value)
        return other

    def in_dtype(self, dtype: torch.dtype) -> Self:
        """This map in another floating dtype (itself when nothing changes)."""
        return self if dtype == self.dtype else copy.deepcopy(self).to(dtype)


class AttentionMap(MapModule):
    """Multi-head attention x ↦ Σ_h O_h(x) W_h + b: the block with its output projection, nothing around it.

    For each head the projected tokens q_i, k_j, v_j pass token-wise stages (normalisation, rotation, scale); then

        S_ij = cap(q_i · k_j) + bias_ij,   P = weights(S),   O_i = Σ_j P_ij v_j.

    Residual, LayerNorm and dropout are not part of the map. A query that sees no key has output zero and derivative
    zero. Weights follow `torch.nn.Linear`: ``(out_features, in_features)``.

    Attributes:
        query_weight: ``(heads, k, d)``; key_weight ``(kv_heads, k, d)``; value_weight ``(kv_heads, v, d)``.
        output_weight: ``(heads, v, d_out)``: each head's own slice of the output projection.
        weighting: "softmax", or "sigmoid" for weights that are not normalised over the keys.
        softcap: logits become c·tanh(s/c) before masks and biases, when set.
    """

    query_weight: Tensor
    key_weight: Tensor
    value_weight: Tensor
    output_weight: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None
    kind = "attention"
    weighting = "softmax"

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor | None = None,
        *,
        heads: int = 1,
        kv_heads: int | None = None,
        logit_biases: Iterable[LogitBias] = (),
        softcap: float | None = None,
        **biases: Tensor | None,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads(heads, kv_heads)
        inputs = {"query": (query, heads), "key": (key, kv_heads), "value": (value, kv_heads)}
        for name, (weight, groups) in inputs.items():
            _check_matrix(name, weight)
            width = query.shape[1]
            if weight.shape[1] != width:
                raise InvalidInput(
                    f"the {name} weight takes {weight.shape[1]} features, but the query weight takes {width}."
                )
            if weight.shape[0] % groups:
                raise InvalidInput(f"{weight.shape[0]} {name} features do not split into {groups} heads.")
        if query.shape[0] * kv_heads != key.shape[0] * heads:
            raise InvalidInput(
                f"queries are {query.shape[0] // heads} wide per head but keys are {key.shape[0] // kv_heads}: "
                "their dot product needs equal widths (check heads and kv_heads)."
            )
        mixed = value.shape[0] // kv_heads * heads
        output = torch.eye(mixed, dtype=value.dtype, device=value.device) if output is None else output
        _check_matrix("output", output)
        if output.shape[1] != mixed:
            raise InvalidInput(f"the output weight must have shape (d_out, {mixed}), got {tuple(output.shape)}.")
        if softcap is not None:
            check_positive(softcap, "a logit soft-cap", ": None leaves it out")
        self.heads, self.kv_heads, self.softcap = heads, kv_heads, softcap
        for name, (weight, groups) in inputs.items():
            self.register_buffer(f"{name}_weight", weight.reshape(groups, -1, width))
            bias = _checked_bias(name, biases.pop(f"{name}_bias", None), len(weight))
            self.register_buffer(f"{name}_bias", None if bias is None else bias.reshape(groups, -1))
        self.register_buffer("output_weight", output.T.reshape(heads, -1, output.shape[0]))
        self.register_buffer("output_bias", _checked_bias("output", biases.pop("output_bias", None), len(output)))
        if biases:
            raise InvalidInput(f"attention has biases of query, key, value and output, but no {', '.join(biases)}.")
        self.logit_biases = nn.ModuleList(Terms(logit_biases))
        self.query_stages, self.key_stages, self.value_stages = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()

    @property
    def in_features(self) -> int:
        return self.query_weight.shape[-1]

    @property
    def out_features(self) -> int:
        return self.output_weight.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.query_weight.dtype

    def stages(self, query: Tensor, key: Tensor) -> Stages:
        """The token stages of queries, keys and values (which may depend on the projected tokens; see L2 attention)."""
        return tuple(self.query_stages), tuple(self.key_stages), tuple(self.value_stages)  # type: ignore[arg-type]

    @property
    def input_weights(self) -> Heads:
        """The weights of queries, keys and values."""
        return self.query_weight, self.key_weight, self.value_weight

    @property
    def input_biases(self) -> tuple[Tensor | None, ...]:
        """Their biases."""
        return self.query_bias, self.key_bias, self.value_bias

    @property
    def terms(self) -> Terms:
        """Masks and additive biases of the logits, as one."""
        return Terms(self.logit_biases)  # type: ignore[arg-type]

    def head(self, head: int) -> Self:
        """x ↦ W_h f_h(x) as a map of its own, without the output bias, as `howsmooth.measure_heads` measures it.

        >>> import howsmooth as hs
        >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
        >>> block = hs.SelfAttention.random(8, heads=2)
        >>> torch.allclose(block.head(0)(x) + block.head(1)(x), block(x), atol=1e-6)
        True
        """
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < self.heads:
            raise InvalidInput(f"there is no head {head}: choose from 0 to {self.heads - 1}.")
        shared = head * self.kv_heads // self.heads
        numbers = dict.fromkeys(("query_weight", "query_bias", "output_weight"), head)
        numbers |= dict.fromkeys(("key_weight", "key_bias", "value_weight", "value_bias"), shared)
        stacked = {name: getattr(self, name) for name in numbers}
        fields: dict[str, Any] = {name: t[numbers[name]][None] for name, t in stacked.items() if t is not None}
        for name in ("query_stages", "key_stages", "value_stages"):
            fields[name] = [stage.of_head(head) for stage in getattr(self, name)]
        terms = self.terms.of_head(head, self.heads)
        return self.replace(**fields, output_bias=None, logit_biases=terms, heads=1, kv_heads=1)

    def project(self, x: Tensor) -> Heads:
        """Queries, keys and values before their stages, each ``(batch, heads, n, ·)``; shared keys are repeated."""
        return self._project(x, self.input_biases)

    def project_about(self, moved: Tensor) -> Heads:
        """As `project`, less every constant on which no derivative depends, so that a far centre loses no digits.

        Softmax weights do not change with a constant on all keys, nor their derivative with one on all values: both are
        taken about a centre, without biases, unless a stage or a soft-cap depends on it.

        Args:
            moved: ``(batch, n + 1, d)``, tokens less their centre, and behind them the centre itself.
        """

        def about(projected: Tensor, bias: Tensor | None, is_free: bool) -> Tensor:
            tokens, shift = projected[..., :-1, :], projected[..., -1:, :]
            return tokens if is_free else tokens + (shift if bias is None else shift + self.per_head(bias)[:, None])

        query, key, value = map(about, self._project(moved), self.input_biases, (False, *self.ignores_constants))
        return query, key, value

    @property
    def ignores_constants(self) -> tuple[bool, bool]:
        """Whether a constant on all projected keys, or on all projected values, leaves the derivative as it is."""
        softmax = self.weighting == "softmax"
        return (
            softmax and self.softcap is None and all(stage.scale is not None for stage in self.key_stages),
            softmax and all(stage.scale is not None for stage in self.value_stages),
        )

    def _project(self, x: Tensor, biases: Sequence[Tensor | None] = (None, None, None)) -> Heads:
        weights = self.input_weights
        flat, widths = [weight.to(x).flatten(0, 1) for weight in weights], [math.prod(w.shape[:2]) for w in weights]
        narrow = sum(widths) <= _NARROW
        projected = (x @ torch.cat(flat).mT).split(widths, dim=-1) if narrow else [x @ weight.mT for weight in flat]

        def heads_of(projected: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            heads = projected.unflatten(-1, weight.shape[:2]).transpose(1, 2)
            return self.per_head(heads if bias is None else heads + bias[:, None], dim=1)

        query, key, value = map(heads_of, projected, weights, biases)
        return query, key, value

    def per_head(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """A tensor of key–value heads, along ``dim``, repeated for each query head that shares them."""
        shared = self.heads // tensor.shape[dim]
        return tensor if shared == 1 else tensor.repeat_interleave(shared, dim=dim)

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights P, ``(batch, heads, n, n)`` (no batch axis when x has none)."""
        return batched(lambda x: self._weights(*self.staged(x)[:2]), x)

    def forward(self, x: Tensor) -> Tensor:
        """The map at x, ``(n, d)`` or ``(batch, n, d)``. Readable and differentiable; builds the n × n weights."""
        return batched(self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        query, key, value = self.staged(x)  # (batch, heads, n, ·)
        return self.projected_out(self._weights(query, key) @ value)

    def projected_out(self, mixed: Tensor) -> Tensor:
        """Σ_h O_h W_h + b from the outputs O of the heads, ``(batch, heads, n, v)``."""
        out = (mixed @ self.output_weight).sum(1)
        return out if self.output_bias is None else out + self.output_bias

    def staged(self, x: Tensor) -> Heads:
        """Queries, keys and values as they enter the logits, ``(batch, heads, n, ·)``, for x with a batch axis."""
        if x.dim() != 3 or x.shape[-1] != self.in_features:
            shape = tuple(x.shape[1:] if len(x) == 1 else x.shape)
            raise InvalidInput(f"attention takes tokens of width {self.in_features}, got shape {shape}.")
        projected = self.project(x)
        stages = self.stages(projected[0], projected[1])
        query, key, value = (Chain.through(*pair)[0] for pair in zip(stages, projected, strict=True))
        return query, key, value

    def _weights(self, query: Tensor, key: Tensor) -> Tensor:
        logits = self._logits(query, key)
        return torch.sigmoid(logits) if self.weighting == "sigmoid" else softmax(logits)

    def _logits(self, query: Tensor, key: Tensor) -> Tensor:
        batch, heads, n, _ = query.shape
        scores, terms = query @ key.mT, self.terms
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        terms.check(n, heads, batch)
        return terms.added_to(scores.flatten(0, 1), Maps.every(batch, heads, n, query)).unflatten(0, (batch, heads))

    def extra_repr(self) -> str:
        grouped = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        return (
            f"{self.in_features} → {self.out_features}, heads={self.heads}{grouped}, "
            f"width={self.query_weight.shape[1]}, {str(self.dtype).removeprefix('torch.')}"
        )


def batched(function: Callable[..., Tensor], *sequences: Tensor) -> Tensor:
    """A function of tensors with a batch axis at tensors that have one, or have none."""
    if sequences[0].dim() > 2:
        return function(*sequences)
    return function(*(x[None] for x in sequences))[0]


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse query heads that do not split evenly among the key–value heads."""
    whole = all(isinstance(count, int) for count in (heads, kv_heads))
    if not whole or heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise InvalidInput(f"heads ({heads!r}) must be a positive whole multiple of kv_heads ({kv_heads!r}).")


def _check_matrix(name: str, weight: object) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise InvalidInput(
            f"the {name} weight must be a floating (out_features, in_features) matrix, got {_described(weight)}."
        )
    if 0 in weight.shape:
        raise InvalidInput(f"the {name} weight has shape {tuple(weight.shape)}: no size may be zero.")


def _checked_bias(name: str, bias: Tensor | None, size: int) -> Tensor | None:
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (size,) or not bias.is_floating_point()):
        raise InvalidInput(f"the {name} bias must be a floating vector of {size} entries, got {_described(bias)}.")
    return bias


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
