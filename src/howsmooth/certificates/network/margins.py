"""Lower bounds on the margins of a network on a ball around an input, and the largest certified radius.

The margin between two classes is m(δ) = m⁰ + g·δ + Σ_s a^s·e^s(δ) ≥ m⁰ − ε|g| − Σ_s Σ_j |a^s_j||e^s_j| with the exact
gradient g and the exact derivatives a^s with respect to every remainder, which is of second order in ε.

Proof: docs/theory/certificates-network.md, section "Margins".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import NotNegative, validated
from howsmooth.certificates.network.affine_form import AffineForm, length
from howsmooth.certificates.network.attention_remainder import attend
from howsmooth.certificates.network.parts_ir import (
    ActivationPart,
    AttentionPart,
    LinearPart,
    NormalisationPart,
    Part,
    PoolPart,
    ResidualPart,
    SequenceClassifier,
    read_network,
)
from howsmooth.certificates.network.read_check import check_network, double_copy, preserved_random_state
from howsmooth.certificates.network.taylor_remainders import Remainder, activate, normalise
from howsmooth.errors import InvalidInput
from howsmooth.numerics.roundoff import gamma

_STEPS = 40
_FINENESS = 1e-3
_FARTHEST, _FAR = 4.0, 10.0
"""The largest radius tried, in units of margin over gradient, and in norms of the input plus one."""
LARGEST = 2**29
"""Maximum number of entries in memory at once: 4 GB."""


class LinearisedNetwork:
    """A network around an input of which some tokens move.

    Args:
        parts: of the network, from tokens to logits. x: tokens ``(n, d)``.
        tokens: which move. together: all within one ball, not each within its own.
    """

    def __init__(self, parts: Sequence[Part], x: Tensor, tokens: Sequence[int], together: bool = False):
        self.remainders: list[Remainder] = []
        self.size = float(x.detach().norm())
        self.form = self._through(parts, AffineForm.moving(x.double(), tokens, together))
        self.logits = self.form.value[0]

    def _through(self, parts: Sequence[Part], form: AffineForm) -> AffineForm:
        for part in parts:
            remainder: Remainder | None = None
            match part:
                case LinearPart(weight, bias):
                    form = form.linear(weight, bias)
                case PoolPart(pool):
                    form = form.pool(pool)
                case ResidualPart(branch):
                    form = form.plus(self._through(branch, form))
                case NormalisationPart(eps):
                    form, remainder = normalise(form, eps)
                case ActivationPart(activation):
                    form, remainder = activate(form, activation)
                case AttentionPart(attention):
                    form, remainder = attend(form, attention)
            self.remainders += [] if remainder is None else [remainder]
        return form

    def margins(self, label: int, moves: Tensor, norm: float = 2) -> Tensor:
        """Lower bounds on the margins to all classes when block j of the input moves by at most ``moves[j]``.

        In the 1-norm a ball lies in the Euclidean one of its radius, in the ∞-norm in that of √b times it.
        """
        adjoints = [slope[0, label] - slope[0] for slope in self.form.slopes]
        return self.logits[label] - self.logits - self._decrease(adjoints, moves, norm)

    @torch.no_grad()
    def rounding(self) -> Tensor:
        """Bounds on the rounding errors of the logits in float64, ``(classes,)``.

        It is the share of rounding in `margins`, for single logits: the bound on their moves when nothing moves.
        """
        moves = self.logits.new_zeros(self.form.slopes[0].shape[2])
        return self._decrease([slope[0] for slope in self.form.slopes], moves, norm=2)

    def _decrease(self, adjoints: Sequence[Tensor], moves: Tensor, norm: float) -> Tensor:
        """≥ the decrease of numbers with given derivatives for every source, ``(numbers, m, b)`` each."""
        inner = self.form.slopes[0].shape[-1] ** 0.5 if norm == torch.inf else 1.0
        reach = torch.cat([moves.new_ones(1), inner * moves])
        dual = {2: 2, 1: torch.inf, torch.inf: 1}[norm]
        first = torch.linalg.vector_norm(adjoints[0], ord=dual, dim=-1) if norm != 2 else length(adjoints[0])
        decrease = first @ moves
        for remainder, adjoint in zip(self.remainders, adjoints[1:], strict=True):
            lower, upper = remainder.numbers(reach)
            lengths = remainder.lengths(reach)
            decrease = decrease + _worst(adjoint, lower, upper, lengths)
            reach = torch.cat([reach, lengths])
        noise = 2 * (self.form.rounding + gamma(8) * self.form.size) @ reach
        return decrease * (1 + gamma(2**14)) + noise

    def radius(self, label: int, norm: float = 2) -> tuple[float, int]:
        """The largest radius found within which the class stays, and the class that limits it."""
        moving = self.logits.new_ones(self.form.slopes[0].shape[2])
        others = [c for c in range(len(self.logits)) if c != label]
        slopes = length(self.form.slopes[0][0, label] - self.form.slopes[0][0]) @ moving
        reach = ((self.logits[label] - self.logits) / slopes.clamp_min(1e-300))[others]
        limiting = others[int(reach.argmin())]

        def safe(radius: float) -> bool:
            return bool((self.margins(label, radius * moving, norm)[others] > 0).all())

        low, high = 0.0, min(_FARTHEST * float(reach.min()), _FAR * (1 + self.size))
        if high <= 0 or not safe(0.0):
            return 0.0, limiting
        for _ in range(_STEPS):
            if high - low <= _FINENESS * high:
                break
            middle = 0.5 * (low + high) if low else 0.25 * high
            low, high = (middle, high) if safe(middle) else (low, middle)
        return low, others[int(self.margins(label, high * moving, norm)[others].argmin())]


@validated
@full_precision
@preserved_random_state()
def certified_margins(
    network: SequenceClassifier, x: Tensor, label: int, radius: NotNegative, tokens: Sequence[int] | None = None
) -> Tensor:
    """Lower bounds on the margins of a class to all classes for all inputs near x, ``(classes,)``: a term of a loss.

    Differentiable in x and in the weights of a network in float64. Their negatives are the logits of the worst case,
    whose cross-entropy is an upper bound on that of every input within the radius.

    Args:
        x: tokens ``(n, d)`` or their numbers ``(n,)``. radius: of the ball in which the tokens move together.
        tokens: those that move, all when None.

    >>> from torch import nn
    >>> net = SequenceClassifier([nn.Identity()], nn.Linear(2, 2, bias=False)).double()
    >>> _ = net.classes.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    >>> round(float(certified_margins(net, torch.tensor([[1.0, 0.0]]).double(), 0, 0.25).detach()[1]), 6)
    0.75
    """
    if any(p.dtype != torch.float64 for p in network.parameters()):
        raise InvalidInput("margins are certified in float64: call .double() on the network first.")
    x = x.double() if x.is_floating_point() else x
    hidden = network.placed(network.embed(x))
    moving = range(len(hidden)) if tokens is None else tokens
    parts = read_network(network, len(hidden))
    lines = LinearisedNetwork(parts, hidden, moving, together=True)
    check_network(double_copy(network), x.detach(), parts, lines.logits, lines.rounding(), radius)
    return lines.margins(label, hidden.new_full((1,), radius))


def check_cost(parts: Sequence[Part], n: int, d: int, moving: int) -> None:
    """Refuse, before anything is computed, a network that would take more than `LARGEST` numbers."""
    needed = _cost(parts, n, d, moving * d)[0]
    if needed > LARGEST:
        raise InvalidInput(
            f"{n} tokens of width {d} through this network take {needed / 2**27:.0f} GB, more than "
            f"{LARGEST / 2**27:.0f}: certify a shorter input, fewer layers or a narrower network."
        )


def _cost(parts: Sequence[Part], n: int, d: int, columns: int) -> tuple[int, int, int]:
    """The maximum number of entries in memory, the width and the columns of all slopes at the end."""
    largest = n * d * columns
    for part in parts:
        match part:
            case LinearPart(weight, _):
                d = len(weight)
            case PoolPart():
                n = 1
            case ResidualPart(branch):
                inside, d, columns = _cost(branch, n, d, columns)
                largest = max(largest, inside + n * d * columns)
            case AttentionPart(attention):
                width, logits = attention.output_weight[..., 0].numel(), attention.heads * n
                columns += n * width
                largest, d = max(largest, n * (d * columns + 4 * (logits + width) * n * width)), attention.out_features
            case NormalisationPart() | ActivationPart():
                columns += n * d
        largest = max(largest, 3 * n * d * columns)
    return largest, d, columns


def _worst(adjoint: Tensor, lower: Tensor, upper: Tensor, lengths: Tensor) -> Tensor:
    """−min a·e from the ends of single numbers, or of groups, or from the lengths of blocks; ``(classes,)``."""
    groups = upper.shape[-1]
    if groups == adjoint.shape[-1]:
        apart = torch.maximum(-adjoint * lower, -adjoint * upper).sum(-1)
    else:
        apart = (length(adjoint.unflatten(-1, (groups, -1))) * upper).sum(-1)
    return torch.minimum(apart, length(adjoint) * lengths).sum(-1)
