"""Lower bounds on the margins of a network on a ball around an input, and the largest certified radius.

The margin between two classes is m(δ) = m⁰ + g·δ + Σ_s a^s·e^s(δ) ≥ m⁰ − ε|g| − Σ_s Σ_j |a^s_j||e^s_j| with the exact
gradient g and the exact derivatives a^s with respect to every remainder, which is of second order in ε.

Proof: docs/theory/certificates-network.md, section "Margins".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import random_stream
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import NotNegative, validated
from howsmooth.attention import AttentionMap
from howsmooth.attention.stages import TokenStage
from howsmooth.certificates.network.affine_form import AffineForm, length
from howsmooth.certificates.network.attention_remainder import attend
from howsmooth.certificates.network.taylor_remainders import (
    CERTIFIED_ACTIVATIONS,
    Remainder,
    activate,
    multiply,
    normalise,
)
from howsmooth.certificates.read_module import agrees_within, near_point, preserved_random_state, read_classifier
from howsmooth.errors import HowsmoothError, InvalidInput, UnsupportedModel
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation, Norm
from howsmooth.network.nodes import (
    Attend,
    Beside,
    MixTokens,
    Multiply,
    Node,
    Parallel,
    Rearrange,
    Series,
    Skip,
    Tokenwise,
    Unread,
)
from howsmooth.network.reader import Network, gradients
from howsmooth.numerics.roundoff import gamma

_STEPS = 40
_FINENESS = 1e-3
_FARTHEST, _FAR = 4.0, 10.0
"""The largest radius tried, in units of margin over gradient, and in norms of the input plus one."""
LARGEST = 2**29
"""Maximum number of entries in memory at once: 4 GB."""
_SAME_GRADIENT, _NO_GRADIENT = 1e-6, 1e-9
"""Differences of gradients of logits that are rounding: relative to each, and to the largest."""


class LinearisedNetwork:
    """A network around an input of which some tokens move.

    Args:
        root: the network, from tokens to one token of logits. x: tokens ``(n, d)``.
        tokens: which move. together: all within one ball, not each within its own.
    """

    def __init__(self, root: Node, x: Tensor, tokens: Sequence[int], together: bool = False):
        self.remainders: list[Remainder] = []
        self.size = float(x.detach().norm())
        self.form = self._through(root, AffineForm.moving(x.double(), tokens, together))
        self.logits = self.form.value[0]

    def _through(self, node: Node, form: AffineForm) -> AffineForm:
        """The form behind a node."""
        match node:
            case Series():
                for inner in node.nodes:
                    form = self._through(inner, form)
            case Tokenwise():
                for stage in node.stages:
                    form = self._staged(stage, form, node)
            case Parallel():
                branches = self._branches(node.nodes, form)
                form = branches[0]
                for branch in branches[1:]:
                    form = form.plus(branch)
            case Beside():
                form = AffineForm.beside(self._branches(node.nodes, form))
            case Multiply():
                form, remainder = multiply(*self._branches(node.nodes, form))
                self.remainders.append(remainder)
            case Rearrange():
                form = form.rearranged(node.index, node.factor, node.constant)
            case MixTokens():
                form = form.mixed(node.matrix)
            case Attend():
                form, attended = attend(form, plain_attention(node))
                self.remainders.append(attended)
            case Unread():
                raise UnsupportedModel(f"{node} has no certificate.")
            case _:
                assert isinstance(node, Skip)
        return form

    def _branches(self, nodes: Sequence[Node], form: AffineForm) -> list[AffineForm]:
        """The forms behind several nodes on the same tokens, each with the sources of all of them."""
        made: list[AffineForm] = []
        for node in nodes:
            made.append(self._through(node, form if not made else form.with_sources_of(made[-1])))
        return [one.with_sources_of(made[-1]) for one in made]

    def _staged(self, stage: TokenStage, form: AffineForm, node: Node) -> AffineForm:
        match stage:
            case Affine():
                return form.linear(stage.weight.double(), _double(stage.bias))
            case Diagonal():
                return form.linear(_diagonal(stage.gain, form.value.shape[-1]), _double(stage.shift))
            case Norm():
                return self._normalised(stage, form)
            case Activation():
                form, remainder = activate(form, certified_activation(stage.name, node))
                self.remainders.append(remainder)
                return form
            case GatedActivation():
                return self._gated(stage, form, node)
        raise UnsupportedModel(f"{type(stage).__name__} in {node.place or 'the network'} has no certificate.")

    def _gated(self, stage: GatedActivation, form: AffineForm, node: Node) -> AffineForm:
        """An activation of the first half of every token times the second half."""
        half = form.value.shape[-1] // 2
        opened, remainder = activate(form.channels(0, half), certified_activation(stage.name, node))
        self.remainders.append(remainder)
        form, product = multiply(opened, form.channels(half, 2 * half).with_sources_of(opened))
        self.remainders.append(product)
        return form

    def _normalised(self, norm: Norm, form: AffineForm) -> AffineForm:
        """A centring matrix, a division, the gain and the shift, each where there is one."""
        eye = torch.eye(norm.width, dtype=torch.float64)
        if norm.centred:
            form = form.linear(eye - 1 / norm.width, None)
        form, remainder = normalise(form, norm.eps)
        self.remainders.append(remainder)
        if norm.gain is None and norm.shift is None:
            return form
        return form.linear(eye if norm.gain is None else norm.gain.double()[:, None] * eye, _double(norm.shift))

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


def certified_activation(name: str, node: Node) -> str:
    """An activation with bounded remainders; `UnsupportedModel` for another."""
    if name not in CERTIFIED_ACTIVATIONS:
        raise UnsupportedModel(
            f"the activation {name or 'without a name'} in {node.place or 'this network'} has no certificate, only "
            f"{', '.join(CERTIFIED_ACTIVATIONS)} have."
        )
    return name


def plain_attention(node: Attend) -> AttentionMap:
    """Dot-product attention with linear queries, keys and values, in float64; `UnsupportedModel` for another."""
    attention = node.attention
    if not isinstance(attention, AttentionMap):
        strange = [f"{attention.kind} attention"]
    else:
        stages = (*attention.query_stages, *attention.key_stages, *attention.value_stages)
        strange = [type(stage).__name__ for stage in stages if not stage.linear]
        if attention.kind != "dot_product":
            strange = [f"{attention.kind} attention"]
        elif attention.softcap is not None:
            strange = ["a soft-cap"]
    if strange:
        raise UnsupportedModel(f"{strange[0]} in {node.place or 'this network'} has no certificate inside a network.")
    assert isinstance(attention, AttentionMap)
    return attention.in_dtype(torch.float64)


@validated
@full_precision
@preserved_random_state()
def certified_margins(
    network: nn.Module, x: Tensor, label: int, radius: NotNegative, tokens: Sequence[int] | None = None
) -> Tensor:
    """Lower bounds on the margins of a class to all classes for all inputs near x, ``(classes,)``: a term of a loss.

    Differentiable in x and in the weights of a network in float64. Their negatives are the logits of the worst case,
    whose cross-entropy is an upper bound on that of every input within the radius.

    Args:
        network: a classifier of one sequence. x: tokens ``(n, d)`` or their numbers ``(n,)``.
        radius: of the ball in which the tokens move together. tokens: those that move, all when None.

    >>> from torch import nn
    >>> from howsmooth.certificates import SequenceClassifier
    >>> net = SequenceClassifier([nn.Identity()], nn.Linear(2, 2, bias=False)).double()
    >>> _ = net.classes.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    >>> round(float(certified_margins(net, torch.tensor([[1.0, 0.0]]).double(), 0, 0.25).detach()[1]), 6)
    0.75
    """
    if any(p.dtype != torch.float64 for p in network.parameters()):
        raise InvalidInput("margins are certified in float64: call .double() on the network first.")
    with torch.no_grad():
        read_compared(network, x.detach())
    read = read_classifier(network, x, check=False, attached=True)
    n = len(read.x)
    moving = range(n) if tokens is None else tokens
    lines = LinearisedNetwork(read.root, read.x, moving, together=True)
    if torch.is_grad_enabled():
        _check_gradients(lines.logits, read, dict(network.named_parameters()) | {"the input": x})
    return lines.margins(label, read.x.new_full((1,), radius))


def read_compared(model: Any, x: Tensor) -> Network:
    """A classifier as nodes that compute what it does; differences below the rounding errors of its logits are none.

    Logits that do not depend on the input but for rounding have derivatives that only seem to differ.
    """
    try:
        return read_classifier(model, x)
    except UnsupportedModel as refusal:
        try:
            network = read_classifier(model, x, check=False)
            check_cost(network.root, len(network.x), network.x.shape[1], moving=1)
            for point in (network.x, near_point(network.x, 0.0)):
                limit = 2 * float(LinearisedNetwork(network.root, point, [0]).rounding().amax())
                if not agrees_within(network, point, limit):
                    raise refusal
        except HowsmoothError:
            raise refusal from None
        return network


def _check_gradients(logits: Tensor, read: Network, sources: Mapping[str, Tensor]) -> None:
    """Refuse a network of which a weight, read as a fixed number, would go without its gradient."""
    followed = {name: tensor for name, tensor in sources.items() if tensor.requires_grad}
    if not followed or not logits.requires_grad:
        return
    tensors, u = list(followed.values()), torch.randn(logits.shape, generator=random_stream(0, "gradients")).double()
    its = gradients(read.function, read.x, u, tensors)
    mine = torch.autograd.grad(logits @ u, tensors, retain_graph=True, allow_unused=True, materialize_grads=True)
    largest = max(float(slope.norm()) for slope in its)
    for name, found, right in zip(followed, mine, its, strict=True):
        if not float((found - right).norm()) <= _SAME_GRADIENT * float(right.norm()) + _NO_GRADIENT * largest:
            raise UnsupportedModel(
                f"{name} was read as a number that does not change, so that margins would go without its gradient: "
                "call .requires_grad_(False) on it."
            )


def check_cost(root: Node, n: int, d: int, moving: int) -> None:
    """Refuse, before anything is computed, a network that would take more than `LARGEST` numbers."""
    needed = _cost(root, n, d, moving * d)[0]
    if needed > LARGEST:
        raise InvalidInput(
            f"{n} tokens of width {d} through this network take {needed / 2**27:.0f} GB, more than "
            f"{LARGEST / 2**27:.0f}: certify a shorter input, fewer layers or a narrower network."
        )


def _cost(node: Node, n: int, d: int, columns: int) -> tuple[int, int, int, int]:
    """The maximum number of entries in memory; the tokens, their width and the columns of all slopes at the end."""
    largest = n * d * columns
    match node:
        case Series():
            for inner in node.nodes:
                inside, n, d, columns = _cost(inner, n, d, columns)
                largest = max(largest, inside)
        case Parallel() | Beside() | Multiply():
            ends = []
            for inner in node.nodes:
                inside, *end, columns = _cost(inner, n, d, columns)
                largest = max(largest, inside + n * d * columns)
                ends.append(end)
            n, d = ends[0][0], sum(end[1] for end in ends) if isinstance(node, Beside) else ends[0][1]
            columns += n * d if isinstance(node, Multiply) else 0
        case Tokenwise():
            for stage in node.stages:
                if isinstance(stage, Affine):
                    d = len(stage.weight)
                elif isinstance(stage, GatedActivation):
                    d //= 2
                    columns += 2 * n * d
                elif isinstance(stage, Activation | Norm):
                    columns += n * d
                largest = max(largest, 3 * n * d * columns)
        case Rearrange():
            n, d = node.index.shape
        case MixTokens():
            n = len(node.matrix)
        case Attend():
            attention = plain_attention(node)
            width, logits = attention.output_weight[..., 0].numel(), attention.heads * n
            columns += n * width
            largest = max(largest, n * (d * columns + 4 * (logits + width) * n * width))
            d = attention.out_features
    return max(largest, 3 * n * d * columns), n, d, columns


def _diagonal(gain: Tensor | float, width: int) -> Tensor:
    eye = torch.eye(width, dtype=torch.float64)
    gains = torch.as_tensor(gain, dtype=torch.float64)
    return gains.expand(width)[:, None] * eye


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def _worst(adjoint: Tensor, lower: Tensor, upper: Tensor, lengths: Tensor) -> Tensor:
    """−min a·e from the ends of single numbers, or of groups, or from the lengths of blocks; ``(classes,)``."""
    groups = upper.shape[-1]
    if groups == adjoint.shape[-1]:
        apart = torch.maximum(-adjoint * lower, -adjoint * upper).sum(-1)
    else:
        apart = (length(adjoint.unflatten(-1, (groups, -1))) * upper).sum(-1)
    return torch.minimum(apart, length(adjoint) * lengths).sum(-1)
