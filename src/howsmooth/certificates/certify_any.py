"""`certify`: a proof at an input, on a ball around it, or of a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import overload

import torch
from torch import Tensor, nn

from howsmooth._util.guarantee import weakest
from howsmooth._util.torch_globals import full_precision
from howsmooth._util.validation import (
    check_count,
    check_finite,
    check_one_of,
    check_tensor,
    validated,
)
from howsmooth.attention import AttentionMap
from howsmooth.certificates.ball.on_ball import enclose_block_around, enclose_heads_around
from howsmooth.certificates.certificate import Certificate, Robustness
from howsmooth.certificates.classifier.patch_transformer import PatchTransformer
from howsmooth.certificates.classifier.robust_radius import BallMargins, Classifier
from howsmooth.certificates.network.margins import LinearisedNetwork, check_cost
from howsmooth.certificates.network.parts_ir import (
    SequenceClassifier,
    read_network,
    unchanged_attention,
)
from howsmooth.certificates.network.read_check import (
    check_network,
    double_copy,
    preserved_random_state,
    read_folded,
    read_map,
)
from howsmooth.certificates.point.enclosure import enclose_block, enclose_heads
from howsmooth.certificates.point.head_gram import HeadsAt
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.jacobians.function_checks import check_tokens
from howsmooth.sets import Around, Box, Point

BALLS = ("token", "frobenius")
NORMS = (2, 1, torch.inf)


@overload
def certify(
    f: PatchTransformer | SequenceClassifier,
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
    f: Callable[[Tensor], Tensor],
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
    layer read at its class token, `howsmooth.certificates.network.margins` for several).

    Args:
        f: an attention map or a `torch.nn.MultiheadAttention`; with a label a `PatchTransformer` or a
            `SequenceClassifier`.
        over: `Point`, `Around` or `Box` of `howsmooth.sets`; tokens ``(n, d)`` are their `Point`. With a label an image
            of pixels between 0 and 1, or tokens or their numbers ``(n,)``. Everything is computed in float64.
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
    start = perf_counter()
    if isinstance(over, Tensor):
        check_tensor(over, "x", floating=not isinstance(f, SequenceClassifier))
        if over.is_floating_point():
            check_finite(over, "x")
    if label is not None:
        if not isinstance(over, Tensor) or per_head:
            raise InvalidInput(
                "with a label the radius is the result: give the input alone, without a set or per_head."
            )
        x = over
        label = check_count(label, "label", least=0)
        if isinstance(f, SequenceClassifier):
            return certify_sequence(f, x, label, ball=ball, tokens=tokens, norm=norm)
        if tokens is not None or ball != "token":
            raise InvalidInput("an image moves as a whole: leave out ball and tokens.")
        return _robustness(f, x, label, norm, start)
    if isinstance(f, PatchTransformer | SequenceClassifier):
        raise InvalidInput("a network is certified for a class: pass its label.")
    if tokens is not None or ball != "token":
        raise InvalidInput("ball and tokens are for a label: give Around(x, eps, per_token=…, moving=…) instead.")
    x = over if isinstance(over, Tensor) else over.x
    attention = unchanged_attention(f, "f", x.shape[-2] if x.dim() > 1 else None)
    if attention is None:
        raise UnsupportedModel(
            f"certify takes an attention map, a PatchTransformer or a SequenceClassifier, not {type(f).__name__}."
        )
    check_tokens(x)
    if x.dim() != 2:
        raise InvalidInput(f"one input (n, d) is certified at a time, got shape {tuple(x.shape)}.")
    assert isinstance(f, nn.Module)
    region = Point(x) if isinstance(over, Tensor) else over
    return certify_tokens(read_map(f, x, region.eps or 0.0), region, per_head=per_head)


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
    lower, upper = (torch.tensor(e, dtype=torch.float64) for e in zip(*((e.lower, e.upper) for e in ends), strict=True))
    notes = ["computed in float64"] if x.dtype != torch.float64 else []
    ball = "box" if isinstance(over, Box) else BALLS[not over.per_token]
    if ball == "frobenius" and moving and len(x) > 1:
        notes.append("proved on the larger ball in which every token moves by the radius")
    if ball == "box":
        notes.append("proved on the balls that hold the box of every token")
    return Certificate(
        lower if per_head else lower[0],
        upper if per_head else upper[0],
        tuple(e.method for e in ends),
        over.eps or 0.0,
        ball,
        per_head,
        perf_counter() - start,
        tuple(notes),
        weakest(*(e.lower_holds for e in ends)),
    )


def _robustness(f: object, x: Tensor, label: int, norm: float, start: float) -> Robustness:
    if not isinstance(f, PatchTransformer):
        raise UnsupportedModel(
            f"{type(f).__name__} has no certificate for a class: a PatchTransformer and a SequenceClassifier have."
        )
    if x.dim() > 2:
        raise InvalidInput(f"one image is certified at a time, got {tuple(x.shape[:-2])} of them.")
    return certify_patches(read_folded(f, x), f.patches(x.double()), label, norm, start)


def certify_patches(
    network: Classifier, tokens: Tensor, label: int, norm: float = 2, start: float | None = None
) -> Robustness:
    """The certificate of an image by a folded network."""
    check_one_of(norm, NORMS, "norm")
    start = perf_counter() if start is None else start
    classes = len(network.direct)
    if label >= classes:
        raise InvalidInput(f"label is one of {classes} classes, 0 to {classes - 1}, got {label}.")
    if tokens.dim() != 2:
        raise InvalidInput(f"one image is certified at a time, got {tuple(tokens.shape[:-2])} of them.")
    predicted = int(network(tokens).argmax())
    if predicted != label:
        notes = (f"the class of this image is {predicted}, not {label}: no radius keeps it",)
        return Robustness(label, predicted, 0.0, predicted, perf_counter() - start, notes)
    radius, limiting = BallMargins(network, tokens, label, norm).radius()
    return Robustness(label, predicted, radius, limiting, perf_counter() - start)


@preserved_random_state()
def certify_sequence(
    network: SequenceClassifier,
    x: Tensor,
    label: int,
    *,
    ball: str = "token",
    tokens: Sequence[int] | None = None,
    norm: float = 2,
) -> Robustness:
    """The certificate of a network of several layers, with the arguments of `certify`."""
    start = perf_counter()
    check_one_of(norm, NORMS, "norm")
    check_one_of(ball, BALLS, "ball")
    if x.dim() != 1 + x.is_floating_point():
        raise InvalidInput(f"tokens (n, d) or their numbers (n,) are certified, got shape {tuple(x.shape)}.")
    double = double_copy(network)
    at = x.double() if x.is_floating_point() else x
    hidden = double.placed(double.embed(at))
    moved = _moving_tokens(len(hidden), tokens)
    parts = read_network(double, len(hidden))
    check_cost(parts, hidden.shape[0], hidden.shape[1], len(moved))
    lines = LinearisedNetwork(parts, hidden, moved, together=ball == "frobenius")
    classes, predicted = len(lines.logits), int(lines.logits.argmax())
    if label >= classes:
        raise InvalidInput(f"label is one of {classes} classes, 0 to {classes - 1}, got {label}.")
    held = x if x.is_floating_point() else network.embedding.weight  # type: ignore[union-attr]
    notes = ["computed in float64"] if held.dtype != torch.float64 else []
    if predicted != label:
        check_network(double, at, parts, lines.logits, lines.rounding(), 0.0)
        notes.append(f"the class of this input is {predicted}, not {label}: no radius keeps it")
        return Robustness(label, predicted, 0.0, predicted, perf_counter() - start, tuple(notes))
    radius, limiting = lines.radius(label, norm=norm)
    check_network(double, at, parts, lines.logits, lines.rounding(), radius)
    if radius == 0:
        notes.append("vacuous: rounding alone may change the class")
    return Robustness(label, predicted, radius, limiting, perf_counter() - start, tuple(notes))


def _moving_tokens(n: int, tokens: Sequence[int] | None) -> list[int]:
    moved = list(range(n)) if tokens is None else [check_count(t, "tokens", least=0, most=n - 1) for t in tokens]
    if not moved or len(set(moved)) < len(moved):
        raise InvalidInput(f"tokens names those that move, each once and at least one, got {tokens}.")
    return moved
