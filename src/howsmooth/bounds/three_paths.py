r"""The three paths of an attention Jacobian at an input, for every attention map.

A head takes tokens through token-wise maps :math:`q_i(x_i), k_j(x_j), v_j(x_j)` (projection, bias, rotation,
normalisation; :math:`M^q_i, M^k_j, M^v_j` their derivatives), has logits :math:`s_{ij} = q_i \cdot k_j` (soft-capped or
not, plus constants), weights P and output :math:`W o_i,\ o_i = \sum_j P_{ij} v_j`. With the **slopes**

.. math:: S_{ij} = P_{ij} \ (\text{softmax}),\quad P_{ij}(1-P_{ij}) \ (\text{sigmoid}),\quad
          \text{times } 1 - \tanh^2(s_{ij}/c) \text{ under a soft-cap,}

the Jacobian at token i, applied to tangents Y, is value path + diagonal score path + cross score path:

.. math:: W\sum_j P_{ij} M^v_j y_j \;+\; W\Big[\sum_j S_{ij} (v_j - m_i) k_j^\top\Big] M^q_i y_i
          \;+\; W\sum_j S_{ij} (v_j - m_i)\,(q_i \cdot M^k_j y_j),

where :math:`m_i = o_i` for softmax and 0 for sigmoid. Proof: for sigmoid :math:`dP_{ij} = S_{ij}\,ds_{ij}`, hence
:math:`\sum_j dP_{ij} v_j = \sum_j S_{ij} v_j\,ds_{ij}`. For softmax with cap slopes :math:`c_{ij}`,
:math:`dP_{ij} = P_{ij}(c_{ij}ds_{ij} - \sum_l P_{il}c_{il}ds_{il})`, hence
:math:`\sum_j dP_{ij}v_j = \sum_j P_{ij}c_{ij}\,ds_{ij}\,(v_j - o_i)`. Finally
:math:`ds_{ij} = k_j\cdot M^q_iy_i + q_i\cdot M^k_jy_j`, and the product rule adds :math:`\sum_j P_{ij} M^v_jy_j`. ∎

Only norms are wanted, so W and the projections are replaced by the triangular factors of their QR decompositions: a
head of width k lives in k dimensions whatever the width of the tokens. All arithmetic is float64, and differentiable in
x. How far rounding may have moved each part is kept beside it (`howsmooth.bounds.point_error`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap
from howsmooth.attention.masks import Maps, softmax
from howsmooth.attention.stages import Chain, TokenStage
from howsmooth.bounds.point_error import Radii, Traced, logit_radius, projected, through, weight_radii
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.numerics.roundoff import UNIT, gamma, norm_allowance

_Tensors = TypeVar("_Tensors", "_Vectors", Traced)
LEAST = 1e-300
_Weights = tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]
GROUP_SIZE = 2**19
"""Most entries of the n × n weights, or of n matrices of size k × k, that are held at once over several heads."""


@dataclass(frozen=True)
class Paths:
    r"""The factors of the three paths, for a group of g maps (one head of one input each).

    When the derivative :math:`M^q` is the same for all tokens, ``pull`` holds :math:`M^{q\top}k_j` and ``pull_map`` is
    None; else ``pull`` holds :math:`k_j` and ``pull_map`` every :math:`M^q_i`. Likewise ``push`` for
    :math:`M^{k\top}q_i` and ``push_map`` for :math:`M^k_j`.

    Attributes:
        scores: the logits with everything added, −∞ where a token is hidden, ``(g, n, n)``.
        weights: P. slopes: S.
        tokens: the inputs, ``(g, n, d)``.
        value: :math:`Wv_j`, ``(g, n, m)`` (up to a common shift when softmax makes it irrelevant).
        mean: :math:`Wm_i`, ``(g, n, m)``.
        value_map: :math:`WM^v_j`, ``(g, n or 1, m, r)``.
        pull, pull_map: what a query feels of each key: ``(g, n, r)`` and None, or ``(g, n, k)`` and ``(g, n, k, r)``.
        push, push_map: what a key feels of each query, likewise.
        radii: how far all of this may be from what it stands for.
        softmax: whether the weights of a row sum to one. shiftable: whether a common shift of all keys changes nothing.
        heads: which head each map is, ``(g,)``. folded: whether W is the output matrix, and not the identity.
    """

    scores: Tensor
    weights: Tensor
    slopes: Tensor
    tokens: Tensor
    value: Tensor
    mean: Tensor
    value_map: Tensor
    pull: Tensor
    pull_map: Tensor | None
    push: Tensor
    push_map: Tensor | None
    radii: Radii
    softmax: bool
    shiftable: bool
    heads: Tensor
    folded: bool

    @cached_property
    def seen(self) -> Tensor:
        """Whether query i sees key j, ``(g, n, n)``."""
        return self.scores != float("-inf")

    @cached_property
    def upper_weights(self) -> Tensor:
        """P⁺: no true weight is larger, ``(g, n, n)``."""
        return self._raised(self.weights, self.radii.weights, 1.0)

    @cached_property
    def upper_slopes(self) -> Tensor:
        """S⁺: no true slope is larger, ``(g, n, n)``."""
        if self.slopes is self.weights:
            return self.upper_weights
        return self._raised(self.slopes, self.radii.slopes, 1.0 if self.softmax else 0.25)

    def _raised(self, numbers: Tensor, radius: Tensor, most: float) -> Tensor:
        with torch.enable_grad():  # kept, whoever asks first
            raised = (numbers + LEAST) * radius.exp()[..., None]  # what is smaller than LEAST may have become zero
            return raised.clamp(max=most).masked_fill(~self.seen, 0.0)

    @property
    def allowance(self) -> float:
        """Factor that covers the rounding of norms, and of the sums of a few of them."""
        widths = (self.value, self.pull, self.push, self.tokens, self.value_map)
        return 1 + norm_allowance(self.weights.shape[-1], max(tensor.shape[-1] for tensor in widths))

    def query_block(self, maps: Tensor, i: Tensor, vectors: Tensor | None = None) -> Tensor:
        r""":math:`W[\sum_j S_{ij}(v_j - m_i)k_j^\top]M^q_i` for pairs (map, i), ``(pairs, m, r)``.

        ``vectors`` (mixed by P like the values) stand in for :math:`Wv_j` when given.
        """
        value = self.value if vectors is None else vectors
        mean = self.mean[maps, i] if vectors is None else (self.weights[maps, i][:, None] @ vectors[maps])[:, 0]
        centred = value[maps] - mean[:, None]
        block = (centred * self.slopes[maps, i][..., None]).mT @ self.pull[maps]
        return block if self.pull_map is None else block @ self.pull_map[maps, i]

    def key_block(self, maps: Tensor, j: Tensor, loads: Tensor) -> Tensor:
        r""":math:`M^{k\top}_j(\sum_i S^+_{ij}\lambda_iq_iq_i^\top)M^k_j` for pairs (map, j); the loads are λ."""
        felt = self.push[maps] if self.push_map is None else self.push[maps] @ self.push_map[maps, j]
        return (felt * (self.upper_slopes[maps, :, j] * loads[maps])[..., None]).mT @ felt

    def pull_distances(self, centres: Tensor) -> Tensor:
        r""":math:`|M^{q\top}_i(k_j - c_i)|` for all i and j, ``(g, n, n)``; centres are given as ``pull`` is."""
        return distances(centres, self.pull, self.pull_map)

    def push_lengths(self) -> Tensor:
        r""":math:`|M^{k\top}_jq_i|` for all i and j, ``(g, n, n)``."""
        if self.push_map is None:
            return self.push.norm(dim=-1, keepdim=True).expand_as(self.weights)
        return distances(torch.zeros_like(self.push), self.push, self.push_map).mT


def paths(attention: AttentionMap, x: Tensor, folded: bool = True, reduced: bool = True) -> Iterator[Paths]:
    """The paths at x, ``(n, d)`` or ``(batch, n, d)``, in groups of maps (heads running fastest).

    Args:
        folded: W is the head's slice of the output matrix; the identity when False.
        reduced: replace W and the projections by triangular factors, which leaves norms as they are.

    >>> import howsmooth as hs
    >>> head = hs.SelfAttention.random(6, heads=2, mask="causal")
    >>> [group.weights.shape for group in paths(head, torch.ones(3, 6))]
    [torch.Size([2, 3, 3])]
    """
    for (group,) in PathsAt(attention, x).groups((folded,), reduced):
        yield group


class PathsAt:
    """The paths of a map at x, ``(n, d)`` or ``(batch, n, d)``, in several forms.

    Args:
        stored: keep the attention weights of all heads, so that several passes evaluate them once.
    """

    def __init__(self, attention: AttentionMap, x: Tensor, stored: bool = False):
        check_tokens(x)
        if x.shape[-1] != attention.in_features:
            raise InvalidInput(f"the tokens are {x.shape[-1]} wide, but the attention takes {attention.in_features}.")
        self.attention = attention = attention.in_dtype(torch.float64)
        self.x, self.stored = x, stored
        self.tokens = x.double().reshape(-1, *x.shape[-2:])
        batch, n, _ = self.tokens.shape
        attention.terms.check(n, attention.heads, batch)
        self.projected = [vectors.flatten(0, 1) for vectors in attention.project(self.tokens)]
        self.stages = attention.stages(self.projected[0], self.projected[1])
        self.staged = [Chain.through(*each) for each in zip(self.stages, self.projected, strict=True)]
        self._maps = Maps.every(batch, attention.heads, n, self.projected[0])

    @property
    def _softmax(self) -> bool:
        return self.attention.weighting == "softmax"

    @cached_property
    @torch.no_grad()
    def _traced(self) -> list[Traced]:
        """Queries, keys and values with bounds on their rounding."""
        start = projected(self.attention, self.tokens, [vectors.detach() for vectors in self.projected])
        return [through(*each) for each in zip(self.stages, start, strict=True)]

    @cached_property
    def _stored_weights(self) -> _Weights:
        return self._evaluate(slice(None))

    def _evaluate(self, span: slice) -> _Weights:
        query, key = (at[span] for at, _ in self.staged[:2])
        dots, scores, weights, slopes = _weights(self.attention, query, key, self._maps.select(span))
        with torch.no_grad():
            logits = logit_radius(_some(self._traced[0], span), _some(self._traced[1], span), dots, scores)
            omega = weight_radii(logits, self.tokens.shape[1], self._softmax, self.attention.softcap)
        return scores, weights, slopes, omega

    def weights(self, span: slice = slice(None)) -> _Weights:
        """Logits, P and S of some maps, and the radii of P and S."""
        if not self.stored:
            return self._evaluate(span)
        scores, weights, slopes, (first, second) = self._stored_weights
        part = weights[span]
        return scores[span], part, part if slopes is weights else slopes[span], (first[span], second[span])

    def groups(self, foldings: Sequence[bool] = (True,), reduced: bool = True) -> Iterator[tuple[Paths, ...]]:
        """Every group of maps, once for each of the ``foldings``."""
        attention, (batch, n, _) = self.attention, self.tokens.shape
        weights_in = (attention.query_weight, attention.key_weight, attention.value_weight)
        factors = [_per_map(weight.mT, len(self.projected[0]), batch, reduced).mT for weight in weights_in]
        lost = [_factoring(attention.in_features, factor.shape[-2], reduced) for factor in factors]
        query, key, value = map(
            _Vectors.behind_stages, self.stages, self.staged, self.projected, factors, self._traced, lost
        )
        softmax = self._softmax
        shiftable = softmax and attention.softcap is None
        sides = [value.behind_output(attention, batch, reduced) if folded else value for folded in foldings]
        if softmax:  # a common shift of the values moves every m_i alike; without it differences lose fewer digits
            sides = [side.centred() for side in sides]
        pulls = (replace(key, at=key.at - key.at.mean(-2, keepdim=True)) if shiftable else key).felt_by(query)
        pushes = query.felt_by(key)
        widest = max(side.at.shape[-1] for side in (pulls, pushes, *sides))
        step = max(1, GROUP_SIZE // (n * max(n, widest**2)))
        for first in range(0, len(query.at), step):
            span = slice(first, first + step)
            maps, pull, push = self._maps.select(span), _some(pulls, span), _some(pushes, span)
            scores, weights, slopes, omega = self.weights(span)
            groups = []
            for values, folded in zip((_some(side, span) for side in sides), foldings, strict=True):
                mean = weights @ values.at if softmax else torch.zeros_like(values.at)
                felt = (pull.at, _varying(pull.maps), push.at, _varying(push.maps))
                radii = Radii(*omega, values.radius, pull.radius, push.radius, values.lean, pull.lean, push.lean)
                seen = (scores, weights, slopes, self.tokens[maps.batch])
                groups.append(
                    Paths(*seen, values.at, mean, values.maps, *felt, radii, softmax, shiftable, maps.heads, folded)
                )
            yield tuple(groups)


@dataclass(frozen=True)
class _Vectors:
    """Queries, keys or values and the derivative that leads to them, with the radii of both, ``(g, n)``."""

    at: Tensor
    maps: Tensor
    radius: Tensor
    lean: Tensor

    @classmethod
    def behind_stages(
        cls,
        stages: Sequence[TokenStage],
        behind: tuple[Tensor, Chain],
        raw: Tensor,
        factor: Tensor,
        traced: Traced,
        lost: float,
    ) -> _Vectors:
        """From projected tokens, and the factor of their projection, which is ``lost`` off."""
        at, chain = behind
        with torch.no_grad():
            lean = traced.map_radius(factor, lost)
        return cls(at, _derivative(stages, chain, raw, factor), traced.radius, lean)

    def behind_output(self, attention: AttentionMap, batch: int, reduced: bool) -> _Vectors:
        """The same behind the output matrix."""
        output = _per_map(attention.output_weight.mT, len(self.at), batch, reduced)
        with torch.no_grad():
            size, k = output.norm(dim=(-2, -1))[:, None], self.at.shape[-1]
            factored = _factoring(attention.out_features, k, reduced)
            lost = gamma(k) * (self.at.abs() @ output.abs().mT).norm(dim=-1) + factored * size * self.at.norm(dim=-1)
            lean = size * (self.lean + (gamma(k) + factored) * self.maps.norm(dim=(-2, -1)))
        return _Vectors(self.at @ output.mT, output[:, None] @ self.maps, size * self.radius + lost, lean)

    def centred(self) -> _Vectors:
        """The same less the mean of each map."""
        at = self.at - self.at.mean(-2, keepdim=True)
        return replace(self, at=at, radius=self.radius + UNIT * at.detach().norm(dim=-1))

    def felt_by(self, others: _Vectors) -> _Vectors:
        """The effect of these tokens on later ones: through the derivative they share, or the two apart."""
        sizes = self.at.detach().norm(dim=-1)
        radius, lean = self.radius + UNIT * sizes, others.lean
        if _varying(others.maps) is not None:
            return replace(others, at=self.at, radius=radius)
        gain = others.maps.detach().norm(dim=(-2, -1))
        radius = (gain + lean) * radius + sizes * (lean + gamma(self.at.shape[-1]) * gain)
        return _Vectors(self.at @ others.maps[:, 0], others.maps, radius, torch.zeros_like(lean))


def _varying(maps: Tensor) -> Tensor | None:
    """The derivatives of all tokens; None where they share one."""
    return maps if maps.shape[1] > 1 else None


def _factoring(tall: int, short: int, reduced: bool) -> float:
    """Relative backward error of the triangular factor of a tall matrix; nothing where none was taken."""
    return gamma(8 * tall * short) if reduced and tall > short else 0.0


def _some(tensors: _Tensors, maps: slice) -> _Tensors:
    """The tensors of some of the maps."""
    return replace(tensors, **{name: tensor[maps] for name, tensor in vars(tensors).items()})


def scatter(weights: Tensor, vectors: Tensor, centres: Tensor) -> Tensor:
    r""":math:`\sum_j w_{ij}(v_j-c_i)(v_j-c_i)^\top`, ``(g, n, k, k)``, by one product with all pairs of coordinates.

    >>> scatter(torch.ones(1, 1, 2), torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[2.0]]]))
    tensor([[[[2.]]]])
    """
    first = weights @ vectors - 0.5 * weights.sum(-1, keepdim=True) * centres
    left, right = torch.stack([first, centres], dim=-1), torch.stack([centres, first], dim=-2)
    return _minus_product(mixed_pairs(weights, vectors, vectors), left, right)


def cross_scatter(weights: Tensor, left: Tensor, centres: Tensor, right: Tensor) -> Tensor:
    r""":math:`\sum_j w_{ij}(l_j-c_i)r_j^\top`, ``(g, n, a, b)``."""
    return _minus_product(mixed_pairs(weights, left, right), centres[..., None], (weights @ right)[..., None, :])


def distances(centres: Tensor, vectors: Tensor, maps: Tensor | None = None) -> Tensor:
    """|M_iᵀ(v_j − c_i)| for all pairs, ``(g, n, n)``; |v_j − c_i| when there are no maps."""
    if maps is None:
        size = torch.maximum(centres.detach().abs().amax((-2, -1)), vectors.detach().abs().amax((-2, -1)))
        unit = torch.exp2(size.clamp_min(LEAST).log2().floor())[:, None, None]  # squares neither overflow nor vanish
        return unit * torch.cdist(centres / unit, vectors / unit, compute_mode="donot_use_mm_for_euclid_dist")
    step = max(1, GROUP_SIZE // vectors.numel())
    bands = [slice(start, start + step) for start in range(0, vectors.shape[1], step)]
    between = ((vectors[:, None] - centres[:, rows, None]) @ maps[:, rows] for rows in bands)
    return torch.cat([vector.norm(dim=-1) for vector in between], dim=1)


def mixed_pairs(weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    r""":math:`\sum_j w_{ij}\,l_jr_j^\top`, ``(g, n, a, b)``."""
    pairs = (left[..., :, None] * right[..., None, :]).flatten(-2)
    return (weights @ pairs).unflatten(-1, (left.shape[-1], right.shape[-1]))


def _minus_product(matrices: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """matrices − left @ right, written over the matrices."""
    matrices.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), alpha=-1)
    return matrices


def _weights(attention: AttentionMap, query: Tensor, key: Tensor, maps: Maps) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The products q·k, logits, P and S of some maps; 1 − σ and 1 − tanh² in forms without cancellation."""
    dots = scores = query @ key.mT
    slopes: Tensor | None = None
    if attention.softcap is not None:
        ratio = scores / attention.softcap
        decay = torch.exp(-2 * ratio.abs())
        scores, slopes = attention.softcap * torch.tanh(ratio), 4 * decay / (1 + decay).square()
    scores = attention.terms.added_to(scores, maps)
    if attention.weighting == "sigmoid":
        weights = torch.sigmoid(scores)
        bare = weights * torch.sigmoid(-scores)
    else:
        weights = bare = softmax(scores)
    return dots.detach(), scores, weights, bare if slopes is None else bare * slopes


def _per_map(matrices: Tensor, maps: int, batch: int, reduced: bool) -> Tensor:
    """The matrix of each map; when reduced the factor R of its QR decomposition, |matrix·y| = |R·y|, if it is tall."""
    if reduced and matrices.shape[-2] > matrices.shape[-1]:
        matrices = torch.linalg.qr(matrices, mode="reduced" if matrices.requires_grad else "r").R
    return matrices.repeat_interleave(maps // batch // len(matrices), dim=0).repeat(batch, 1, 1)


def _derivative(stages: Sequence[TokenStage], chain: Chain, raw: Tensor, weight: Tensor) -> Tensor:
    """The derivative of projection and stages, ``(g, 1, k, r)`` when all tokens share it, else ``(g, n, k, r)``."""
    if all(stage.scale is not None for stage in stages):
        return chain.jvp(weight)[:, None]
    count, n, _ = raw.shape
    width = chain.jvp(raw).shape[-1]
    rows = torch.eye(width, dtype=raw.dtype, device=raw.device)[:, None, None].expand(-1, count, n, -1)
    return chain.vjp(rows).permute(1, 2, 0, 3) @ weight[:, None]
