"""Why a map is rough: which path, which token, which direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.display import card
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import Positive, Probability, Seed, Size, validated
from howsmooth.attention import as_attention_map
from howsmooth.attention.attention_map import MapModule
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import jacobian
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY, AttentionJacobian
from howsmooth.jacobians.closed_or_autodiff import closed_jacobian
from howsmooth.jacobians.composite_operator import CompositeJacobian
from howsmooth.norms import Measurement, operator_norm
from howsmooth.norms.local_constant import in_tokens, solve
from howsmooth.norms.relative_condition import with_scale
from howsmooth.norms.small_matrices import spectral

_BLOCK_ENTRIES = 2**22
"""Entries of the vectors held for one chunk of token blocks."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """The parts of the norm of an attention map at an input.

    ``…`` stands for the shape of the batch, ``()`` for a single input; heads follow on request.

    Attributes:
        total: the local Lipschitz constant itself, with its top singular vectors.
        value_path: norm with the weights P held fixed: P ⊗ WV. Grows with the attention sink.
        score_path: norm with the values held fixed: what moves through the weights.
        value_share: uᵀJ_value v/σ for the top singular vectors u, v: the share of σ = uᵀJv that the value path has in
            the worst direction. The rest is the score path's (and the gate's, if there is one); below 0 or above 1
            they work against each other.
        sink: largest column sum of P per head, ``(…, heads)``: the attention one token receives, between 1 and n for
            softmax weights; ‖P‖₂ ≤ √sink.
        sink_token: the position of that token.
        entropy: mean entropy of the rows of P in nats, per head.
        input_energy: |v_j|² of the top right singular vector, ``(…, n)``: where a perturbation does most. Sums to one.
        output_energy: |u_i|² of the top left singular vector: where it shows.
        influence: ‖J_ij‖₂ for output token i and input token j, ``(…, n, n)``, estimates without ends, or None when not
            requested.
        gate_path: norm with attention held fixed: what moves through an output gate; None where there is none.
    """

    total: Measurement
    value_path: Measurement
    score_path: Measurement
    value_share: Tensor
    sink: Tensor
    sink_token: Tensor
    entropy: Tensor
    input_energy: Tensor
    output_energy: Tensor
    influence: Tensor | None = None
    gate_path: Measurement | None = None

    def __repr__(self) -> str:
        paths = {"value path": self.value_path, "score path": self.score_path, "gate path": self.gate_path}
        lines = [f"{name}: {m!r}" for name, m in paths.items() if m is not None]
        shares = ", ".join(f"{100 * share:.0f} %" for share in self.value_share.reshape(-1).tolist())
        return "\n".join([f"total: {self.total!r}", *lines, f"through the values: {shares} of the total (estimate)"])

    def _repr_html_(self) -> str:
        sinks = zip(self.sink.reshape(-1).tolist(), self.sink_token.reshape(-1).tolist(), strict=True)
        shares = self.value_share.reshape(-1).tolist()
        facts = [
            ("value path", f"{repr(self.value_path).partition(';')[0]}): the weights held fixed"),
            ("score path", f"{repr(self.score_path).partition(';')[0]}): what moves through the weights"),
            ("through the values", ", ".join(f"{100 * share:.0f} %" for share in shares)),
            ("sink", ", ".join(f"token {token} receives {amount:.3g}" for amount, token in sinks)),
            ("entropy, nats", ", ".join(f"{nats:.3g}" for nats in self.entropy.reshape(-1).tolist())),
        ]
        return card(repr(self.total), facts, self.total.notes)


@validated
@full_precision
def explain(
    attention: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    per_head: bool = False,
    influence: bool = True,
    rtol: Positive = 1e-3,
    seed: Seed = 0,
    confidence: Probability = 0.99,
    memory: Size = DEFAULT_MEMORY,
) -> Explanation:
    """Measure an attention map and say where its roughness comes from.

    The Jacobian is the sum of a value path, a score path and, behind an output gate, the gate's own path, so that
    total ≤ value_path + score_path + gate_path.

    Args:
        attention: an attention map, a layer of `howsmooth.nn` or `torch.nn.MultiheadAttention`.
        x: ``(n, d)`` or ``(batch, n, d)``.
        per_head: explain every head by itself.
        influence: also compute the n × n map of token influences.
        rtol, seed, confidence, memory: as in `howsmooth.measure`.

    >>> import torch, howsmooth as hs
    >>> x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    >>> story = hs.explain(hs.SelfAttention.random(8, heads=2, mask="causal"), x)
    >>> bool(story.influence[0, 5] == 0)  # the first token cannot see the last
    True
    """
    known = as_attention_map(attention, *x.shape[-2:-1], kind=MapModule)
    if known is None:
        raise InvalidInput(
            f"explain needs an attention map, got {type(attention).__name__}: build one with hs.SelfAttention(...), "
            ".from_torch or .from_transformers; token_influence and measure take any function."
        )
    operator = closed_jacobian(known, x, per_head=per_head, reduced=per_head, memory=memory)
    options: dict[str, Any] = {"rtol": rtol, "seed": seed, "confidence": confidence}
    total = operator_norm(operator, **options)
    assert total.left is not None
    assert total.right is not None
    by_value = (total.left * operator.along("value").matvec(total.right)).sum((-2, -1))
    lifted = with_scale(in_tokens(operator, total), operator, x, known)
    assert lifted.left is not None
    assert lifted.right is not None
    gated = operator.along("gate") if isinstance(operator, CompositeJacobian) and operator.gates is not None else None
    sums = operator.mixing.column_sums().unflatten(0, (*x.shape[:-2], known.heads))
    sink = sums.max(-1)
    return Explanation(
        total=lifted,
        value_path=solve(operator.along("value"), **options),
        score_path=solve(operator.along("score"), **options),
        value_share=by_value / total.value.clamp_min(torch.finfo(torch.float64).tiny),
        sink=sink.values,
        sink_token=sink.indices,
        entropy=operator.mixing.entropy().unflatten(0, (*x.shape[:-2], known.heads)),
        input_energy=lifted.right.square().sum(-1),
        output_energy=lifted.left.square().sum(-1),
        influence=_influence(operator, max(rtol, 1e-2), seed) if influence else None,
        gate_path=None if gated is None else solve(gated, **options),
    )


@validated
@full_precision
def token_influence(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    per_head: bool = False,
    head: int | None = None,
    rtol: Positive = 1e-2,
    seed: Seed = 0,
    memory: Size = DEFAULT_MEMORY,
) -> Tensor:
    """‖J_ij‖₂ for every output token i and input token j: ``(…, n, n)``, estimates without ends.

    Attention maps use their closed form; other functions need a dense Jacobian, hence a small input.

    Args:
        per_head: every head by itself, ``(…, heads, n, n)``.
        head: this head alone, ``(…, n, n)``.
        rtol: relative accuracy of each entry.
    """
    attention = as_attention_map(f, *x.shape[-2:-1], kind=MapModule)
    if attention is None:
        return _dense_influence(f, x)
    if head is None:
        operator = closed_jacobian(attention, x, per_head=per_head, reduced=per_head, memory=memory)
        return _influence(operator, rtol, seed)
    if not -attention.heads <= head < attention.heads:
        raise InvalidInput(f"there is no head {head}: the attention has {attention.heads}, counted from 0.")
    operator = closed_jacobian(attention, x, per_head=True, reduced=True, memory=memory)
    index = torch.arange(operator.batch_size, device=operator.device).unflatten(0, operator.batch_shape)[..., head]
    maps = [_influence_of_one(operator.subset(item[None]), rtol, seed)[0] for item in index.reshape(-1)]
    return torch.stack(maps).reshape(*index.shape, *maps[0].shape)


def _dense_influence(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    operator = jacobian(f, x)
    into, out = operator.in_shape, operator.out_shape
    if len(into) != 2 or len(out) != 2:
        raise InvalidInput(f"token influence needs tokens in and out, but f maps {into} to {out}.")
    return spectral(operator.dense().unflatten(-1, into).unflatten(-3, out).transpose(-3, -2))


def _influence(operator: AttentionJacobian | CompositeJacobian, rtol: float, seed: int) -> Tensor:
    items = operator.batch_shape[:-1] if operator.by_head else operator.batch_shape
    maps_per_item = operator.batch_shape[-1] if operator.by_head else 1
    maps = torch.arange(operator.batch_size, device=operator.device).split(maps_per_item)
    influences = [_influence_of_one(operator.subset(index), rtol, seed) for index in maps]
    return torch.stack(influences).reshape(*items, *influences[0].shape)


def _influence_of_one(operator: AttentionJacobian | CompositeJacobian, rtol: float, seed: int) -> Tensor:
    n = operator.out_shape[0]
    chunk = max(
        1,
        _BLOCK_ENTRIES
        // (operator.in_shape[0] * max(operator.in_shape[1], operator.out_shape[1]) * operator.batch_size),
    )
    rows = (slice(start, min(start + chunk, n)) for start in range(0, n, chunk))
    norms = [operator_norm(operator.token_blocks(some), rtol=rtol, seed=seed).value for some in rows]
    full = torch.cat(norms)  # (n, n) or (n, heads, n)
    return full.transpose(0, 1) if operator.by_head else full
