"""The product bound of a whole model, piece by piece (`howsmooth.models.model_pieces`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from howsmooth._util.validation import check_tensor, validated
from howsmooth.bounds.catalogue import least_upper_bound
from howsmooth.bounds.composition import Stack, Stage
from howsmooth.bounds.layer_constants import activation, mlp, normalisation
from howsmooth.bounds.question_setting import setting
from howsmooth.errors import DoesNotApply, InvalidInput, UnsupportedModel
from howsmooth.models.forward_pass import temporary_hooks
from howsmooth.models.model_pieces import AttentionPiece, MLPPiece, NormPiece, Piece, ResidualPiece, read_pieces
from howsmooth.sets.near_sets import Over


@validated
def stack(
    model: nn.Module,
    n: int,
    *,
    variance: float | Mapping[str, float] | None = None,
    over: Over | None = None,
    causal: bool = False,
) -> Stack:
    """The product bound on a model as a map of n tokens: from embeddings to the last hidden states.

    Args:
        model: a `torch.nn.TransformerEncoder` or `TransformerEncoderLayer`, or a BERT- or GPT-2-like model of
            transformers, whose input are then the word embeddings (``inputs_embeds``).
        n: number of tokens.
        variance: floors for the normalisations, by name as `measured_variances` gives them, or one for all. The bound
            then holds for the Jacobian at every input for which each normalisation sees tokens of at least its floor.
        over: the set of the input tokens, such as ``Ball(1.0)``, for a torch encoder whose first attention reads them
            without a normalisation (norm_first=False).
        causal: whether a torch encoder is called with the causal mask.

    >>> encoder = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)
    >>> bound = stack(encoder, n=8)
    >>> [stage.name for stage in bound.stages]
    ['layer 0: x + attention', 'layer 0: x + MLP']
    >>> bound.worst.kind
    'normalisation'
    """
    reading = read_pieces(model, causal=causal)
    floors = _floors([norm.name for norm in reading.norms], variance)
    return Stack(tuple(_stage(piece, n, floors, over) for piece in reading.pieces))


@validated
def measured_variances(model: nn.Module, x: Tensor, *, causal: bool = False) -> dict[str, float]:
    """The smallest token variance (mean square for RMSNorm) that each normalisation sees when the model reads x.

    Args:
        x: tokens ``(n, d)`` or ``(batch, n, d)``, batch first whatever the module; for transformers also token ids,
            ``(n,)`` or ``(batch, n)``.

    >>> import torch
    >>> encoder = nn.TransformerEncoderLayer(4, 1, 8, norm_first=True)
    >>> smallest = measured_variances(encoder, torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.5, 0.5, -0.5, -0.5]]))
    >>> smallest["layer 0: norm before attention"]
    0.25
    """
    check_tensor(x, "x", dims=(2, 3) if x.is_floating_point() or x.is_complex() else (1, 2), floating=x.is_complex())
    reading = read_pieces(model, causal=causal)
    smallest: dict[str, float] = {}

    def hear(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        tokens = args[0].double()
        spreads = tokens.square().mean(-1) if isinstance(module, nn.RMSNorm) else tokens.var(-1, correction=0)
        smallest[name] = min(smallest.get(name, math.inf), float(spreads.min()))

    if x.is_floating_point():
        x = x.to(next(reading.model.parameters()).dtype)
    with temporary_hooks(norm.module.register_forward_pre_hook(partial(hear, norm.name)) for norm in reading.norms):
        for item in x if x.dim() == (3 if x.is_floating_point() else 2) else [x]:
            reading.run(item)
    return smallest


def _stage(piece: Piece, n: float, floors: Mapping[str, float], over: Over | None) -> Stage:
    """The constant of a piece wherever the model can feed it."""
    match piece:
        case ResidualPiece(name, branch):
            return Stage.around(name, [_stage(inner, n, floors, over) for inner in branch])
        case NormPiece(name, module):
            floor, eps = floors.get(name), getattr(module, "eps", None)
            scope = "everywhere" if floor is None else f"token variance ≥ {floor:.3g}"
            note = f"ε = {eps:g}" if eps else ""
            return Stage.of(name, normalisation(module, floor), scope=scope, note=note, kind="normalisation")
        case MLPPiece(name, _, weights, act):
            try:
                known = activation(act)
            except InvalidInput as error:
                raise UnsupportedModel(f"{name}: {error}") from error
            return Stage.of(name, mlp(weights, known), note=f"‖W₂‖·Lip({known.name})·‖W₁‖", kind="MLP")
        case AttentionPiece():
            return _attention(piece, n, over)


def _attention(piece: AttentionPiece, n: float, over: Over | None) -> Stage:
    if piece.norm is None and over is None:
        raise DoesNotApply(
            "the first attention of this encoder reads the tokens without a normalisation (norm_first=False), and "
            "dot-product attention is not Lipschitz on all inputs: give their set (over), such as Ball(1.0)."
        )
    where = setting(piece.map, n=n, over=over if piece.norm is None else piece.norm)
    least = least_upper_bound(where)
    if least is None or where.tokens is None:
        raise DoesNotApply(f"{piece.name}: no theorem bounds this {where.kind} attention on a set.")
    scope = f"{n:g} tokens, |x| ≤ {where.radius:.3g} ({where.tokens.origin})"
    return Stage.of(piece.name, float(least[1]), scope=scope, note=least[0].name, kind="attention")


def _floors(names: Sequence[str], variance: float | Mapping[str, float] | None) -> dict[str, float]:
    if variance is None:
        return {}
    if not isinstance(variance, Mapping):
        return dict.fromkeys(names, float(variance))
    unknown = sorted(set(variance) - set(names))
    if unknown:
        raise InvalidInput(f"there is no normalisation {unknown[0]!r}: choose from {', '.join(names)}.")
    return dict(variance)
