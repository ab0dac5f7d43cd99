"""`certify`: a proof at an input, on a ball around it, or of a class; with its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR
from time import perf_counter
from typing import Any, overload

import torch
from torch import Tensor, nn

from howsmooth._util.common import rounded
from howsmooth._util.display import card
from howsmooth._util.guarantee import Guarantee, weakest, with_guarantees
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import (
    check_count,
    check_finite,
    check_one_of,
    check_tensor,
    validated,
)
from howsmooth.attention import AttentionMap
from howsmooth.certificates.ball.on_ball import check_one_input, enclose_block_around, enclose_heads_around
from howsmooth.certificates.classifier.patch_transformer import PatchTransformer
from howsmooth.certificates.classifier.robust_radius import BallMargins, Classifier
from howsmooth.certificates.network.margins import LinearisedNetwork, check_cost, read_compared
from howsmooth.certificates.network.sequence_classifier import SequenceClassifier
from howsmooth.certificates.point.enclosure import enclose_block, enclose_heads
from howsmooth.certificates.point.head_gram import HeadsAt
from howsmooth.certificates.read_module import preserved_random_state, read_folded, read_map
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.sets import Around, Box, Point

BALLS = ("token", "frobenius")
NORMS = (2, 1, torch.inf)
_SHOWN = 8
"""Maximum number of heads that a text shows."""


class _Result:
    """Fields, and the same as plain numbers and strings."""

    def to_dict(self) -> dict[str, Any]:
        """All fields and guarantees as plain numbers and strings, tensors and tuples as lists."""
        names = ("lower_holds", "upper_holds", "radius_holds")
        holds = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return {name: _plain(value) for name, value in (vars(self) | holds).items()}


def _plain(value: Any) -> Any:
    match value:
        case Guarantee():
            return value.name.lower()
        case Tensor():
            return value.tolist()
        case tuple():
            return list(value)
    return value


@dataclass(frozen=True, eq=False, repr=False)
class Certificate(_Result):
    """An enclosure of ‖J‖₂ of every map at an input, or over a ball around it, with a proved upper end.

    Attributes:
        lower: ≤ the maximum of ‖J‖₂ over the set, found at the input itself. upper: ≥ that maximum; it holds in exact
            arithmetic, rounding included.
        methods: the proof of the upper end of each map.
        radius: of the ball; 0 at the input. ball: "token" (every token moves by at most the radius) or "frobenius".
        per_head: whether the maps are the heads. seconds: time taken. notes: further remarks.
        lower_holds: the guarantee of the lower ends: PROVED as the upper ends are, or MODELLED where a map is too
            large for a proof from below and its lower end is that of `howsmooth.measure`.

    >>> import torch, howsmooth as hs
    >>> hs.certify(hs.SelfAttention.from_bilinear(torch.eye(2), torch.eye(2)), torch.eye(2))  # doctest: +ELLIPSIS
    ‖J‖₂ at the input: ≥ 1..., ≤ 1..., proved (cholesky, ... s)
    """

    lower: Tensor
    upper: Tensor
    methods: tuple[str, ...]
    radius: float
    ball: str
    per_head: bool
    seconds: float
    notes: tuple[str, ...] = ()
    lower_holds: Guarantee = Guarantee.PROVED

    @property
    def upper_holds(self) -> Guarantee:
        """The guarantee of the upper ends."""
        return Guarantee.PROVED

    @property
    def ratio(self) -> Tensor:
        """Upper over lower end."""
        return self.upper / self.lower

    def ends(self, index: int = 0) -> str:
        """Both ends of one map with their guarantees, rounded outwards."""
        lower, upper = (float(end.reshape(-1)[index]) for end in (self.lower, self.upper))
        below, above = f"≥ {rounded(lower, ROUND_FLOOR)}", f"≤ {rounded(upper, ROUND_CEILING)}"
        return with_guarantees(below, above, self.lower_holds, self.upper_holds)

    def __repr__(self) -> str:
        if not self.per_head:
            return f"{self._name}: {self.ends()} ({self.methods[0]}, {self.seconds:.2g} s)"
        heads = [f"head {head}: {self.ends(head)} ({method})" for head, method in enumerate(self.methods[:_SHOWN])]
        more = len(self.methods) - _SHOWN
        return "\n".join([f"{self._name}, {self.seconds:.2g} s", *heads, *[f"… {more} more heads"] * (more > 0)])

    def _repr_html_(self) -> str:
        names = [f"head {head}" if self.per_head else "block" for head in range(len(self.methods))]
        facts = [(name, f"{self.ends(number)} ({self.methods[number]})") for number, name in enumerate(names)]
        return card(self._name, facts, self.notes)

    @property
    def _name(self) -> str:
        if not self.radius:
            return "‖J‖₂ at the input"
        near = {"token": "every token within", "frobenius": "all tokens together within"}.get(self.ball, "a box within")
        return f"maximum of ‖J‖₂ with {near} {rounded(self.radius, digits=4)} of the input"


@dataclass(frozen=True, repr=False)
class Robustness(_Result):
    """A radius within which a network's class is proved not to change.

    Attributes:
        label: the class. predicted: the network's class; the radius is 0 where it differs from the label.
        radius: proved, in the requested norm. limiting: the class that limits it, None without one.
        seconds: time taken. notes: further remarks.

    >>> Robustness(3, 3, 0.01234567, 5, 0.2)
    class 3 does not change within radius 0.012345, proved (limited by class 5, 0.2 s)
    """

    label: int
    predicted: int
    radius: float
    limiting: int | None
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def radius_holds(self) -> Guarantee:
        """The guarantee of the radius."""
        return Guarantee.PROVED

    def __repr__(self) -> str:
        limit = "" if self.limiting is None else f"limited by class {self.limiting}, "
        return f"{self._name} ({limit}{self.seconds:.2g} s)"

    def _repr_html_(self) -> str:
        limit = "none" if self.limiting is None else str(self.limiting)
        facts = [("predicted class", str(self.predicted)), ("limited by class", limit)]
        return card(self._name, facts, self.notes)

    @property
    def _name(self) -> str:
        radius = rounded(self.radius, ROUND_FLOOR)
        return f"class {self.label} does not change within radius {radius}, {self.radius_holds.words()}"


@overload
def certify(
    f: nn.Module | str,
    over: Tensor,
    label: int,
    *,
    ball: str = "token",
    tokens: Sequence[int] | None = None,
    norm: float = 2,
) -> Robustness: ...
@overload
def certify(
    f: Callable[[Tensor], Tensor],
    over: Tensor | Around | Box,
    label: None = None,
    *,
    per_head: bool = False,
) -> Certificate: ...
@validated
@full_precision
@torch.inference_mode(False)
@torch.no_grad()
def certify(
    f: Callable[..., Any] | str,
    over: Tensor | Around | Box,
    label: int | None = None,
    *,
    ball: str = "token",
    tokens: Sequence[int] | None = None,
    per_head: bool = False,
    norm: float = 2,
) -> Certificate | Robustness:
    r"""A proof about ``f`` at an input or on a set around it.

    Without a label, for an attention map: :math:`\mathrm{lower} \le \|J\|_2 \le \mathrm{upper}` at the input, or the
    upper end for every input of the set around it; the upper end is proved, rounding included, and so is the lower end
    but for large maps (``lower_holds``; `howsmooth.certificates.point.enclosure`,
    `howsmooth.certificates.ball.on_ball`). With a label: the largest radius
    found for which no input within it has another class (`howsmooth.certificates.classifier.robust_radius` for one
    layer read at its class token, `howsmooth.certificates.network.margins` for any other).

    Args:
        f: an attention map or a module that computes one, such as `torch.nn.MultiheadAttention`. With a label a
            classifier: a module of torch, a model of transformers or a text that names one, such as the path of an ONNX
            file (`howsmooth.read_network`); a `PatchTransformer` has a proof of its own.
        over: `Point`, `Around` or `Box` of `howsmooth.sets`; tokens ``(n, d)`` are their `Point`. With a label the
            input of the classifier: vectors ``(n, d)``, numbers of tokens ``(n,)``, whose vectors then move, or pixels.
            Everything is computed in float64.
        label: the class that is to stay; the radius is 0 where the network says another.
        ball: with a label: "token", every token within the radius of its own place, or "frobenius", all together.
        tokens: with a label: the tokens that move, all when None.
        per_head: one enclosure for every head x ↦ W_h f_h(x) instead of one for the block.
        norm: in which inputs are near, with a label: 2, 1 or inf.

    >>> import torch, howsmooth as hs
    >>> attention = hs.SelfAttention.random(8, heads=2, mask="causal")
    >>> x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    >>> proof, near = hs.certify(attention, x), hs.certify(attention, hs.sets.Around(x, 0.01))
    >>> bool(proof.lower <= hs.measure(attention, x, rtol=1e-6).value <= proof.upper), bool(proof.ratio < 1.01)
    (True, True)
    >>> bool(proof.upper <= near.upper <= 1.2 * proof.upper)
    True
    """
    if label is not None:
        if not isinstance(over, Tensor) or per_head:
            raise InvalidInput(
                "with a label the radius is the result: give the input alone, without a set or per_head."
            )
        check_tensor(over, "x", floating=isinstance(f, PatchTransformer))
        if over.is_floating_point():
            check_finite(over, "x")
        label = check_count(label, "label", least=0)
        check_one_of(norm, NORMS, "norm")
        if not isinstance(f, PatchTransformer):
            return certify_network(f, over, label, ball, tokens, norm)
        if tokens is not None or ball != "token":
            raise InvalidInput("an image moves as a whole: leave out ball and tokens.")
        if over.dim() > 2:
            raise InvalidInput(f"one image is certified at a time, got {tuple(over.shape[:-2])} of them.")
        return certify_patches(read_folded(f, over), f.patches(over.double()), label, norm)
    if isinstance(f, PatchTransformer | SequenceClassifier):
        raise InvalidInput("a network is certified for a class: pass its label.")
    if tokens is not None or ball != "token":
        raise InvalidInput("ball and tokens are for a label: give Around(x, eps, per_token=…, moving=…) instead.")
    x = over if isinstance(over, Tensor) else over.x
    check_one_input(x)
    attention = read_map(f, x)
    if attention is None:
        raise UnsupportedModel(
            f"without a label an attention map is certified, and this {type(f).__name__} computes more than attention: "
            "pass the label of a class."
        )
    region = Point(x) if isinstance(over, Tensor) else over
    return certify_tokens(attention, region, per_head=per_head)


def certify_tokens(attention: AttentionMap, over: Around | Box, *, per_head: bool = False) -> Certificate:
    """The certificate of an attention map on a set around an input."""
    start = perf_counter()
    x, moves = over.x, over.moves
    moving = bool(moves.any())
    at = HeadsAt(attention, x, stored=moving)
    if per_head:
        ends = enclose_heads_around(at, moves) if moving else enclose_heads(at)
    else:
        ends = [enclose_block_around(at, moves) if moving else enclose_block(at)]
    table = torch.tensor([(end.lower, end.upper) for end in ends], dtype=torch.float64)
    lower, upper = table.unbind(1) if per_head else table[0]
    notes = _precision(x)
    ball = "box" if isinstance(over, Box) else BALLS[not over.per_token]
    if ball == "frobenius" and moving and len(x) > 1:
        notes.append("proved on the larger ball in which every token moves by the radius")
    if ball == "box":
        notes.append("proved on the balls that hold the box of every token")
    return Certificate(
        lower,
        upper,
        tuple(end.method for end in ends),
        over.eps or 0.0,
        ball,
        per_head,
        perf_counter() - start,
        tuple(notes),
        weakest(*(e.lower_holds for e in ends)),
    )


def certify_patches(network: Classifier, tokens: Tensor, label: int, norm: float = 2) -> Robustness:
    """The certificate of an image by a folded network."""
    start = perf_counter()
    predicted, notes = _predicted(network(tokens), label)
    radius, limiting = (0.0, predicted) if notes else BallMargins(network, tokens, label, norm).radius()
    return Robustness(label, predicted, radius, limiting, perf_counter() - start, notes)


@preserved_random_state()
def certify_network(
    model: Callable[..., Any] | str, x: Tensor, label: int, ball: str, tokens: Sequence[int] | None, norm: float
) -> Robustness:
    """The certificate of a network of several layers, with the arguments of `certify`."""
    start = perf_counter()
    check_one_of(ball, BALLS, "ball")
    network = read_compared(model, x)
    n, d = network.x.shape
    moved = _moving_tokens(n, tokens)
    check_cost(network.root, n, d, len(moved))
    lines = LinearisedNetwork(network.root, network.x, moved, together=ball == "frobenius")
    predicted, notes = _predicted(lines.logits, label)
    radius, limiting = (0.0, predicted) if notes else lines.radius(label, norm=norm)
    if radius == 0 and not notes:
        notes = ("vacuous: rounding alone may change the class",)
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    stored = next((one for one in (x, *weights) if one.is_floating_point()), network.x)
    if network.coarsest != torch.float64:
        notes = (*notes, "the network rounds a part to float32 by itself: proved of the same network without that")
    return Robustness(label, predicted, radius, limiting, perf_counter() - start, (*_precision(stored), *notes))


def _precision(x: Tensor) -> list[str]:
    return ["computed in float64"] if x.dtype != torch.float64 else []


def _predicted(logits: Tensor, label: int) -> tuple[int, tuple[str, ...]]:
    """The class of an input, with a note if it is not the label."""
    classes, predicted = len(logits), int(logits.argmax())
    if label >= classes:
        raise InvalidInput(f"label is one of {classes} classes, 0 to {classes - 1}, got {label}.")
    if predicted == label:
        return predicted, ()
    return predicted, (f"the class of this input is {predicted}, not {label}: no radius keeps it",)


def _moving_tokens(n: int, tokens: Sequence[int] | None) -> list[int]:
    moved = list(range(n)) if tokens is None else [check_count(t, "tokens", least=0, most=n - 1) for t in tokens]
    if not moved or len(set(moved)) < len(moved):
        raise InvalidInput(f"tokens names those that move, each once and at least one, got {tokens}.")
    return moved
