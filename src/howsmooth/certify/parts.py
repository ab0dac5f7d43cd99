"""Networks of several layers that `howsmooth.certify` reads: what they are made of, and in which order.

A `SequenceClassifier` is a stack of modules between embeddings and classes. Read are linear maps, activations (ReLU,
GELU, SiLU), normalisations (`torch.nn.LayerNorm`, `torch.nn.RMSNorm`, `CentredNorm`), attention (`SelfAttend`, or
anything that offers an attention map), residuals (`Residual`), sequences of them and torch's encoders. What cannot be
read is named, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap
from howsmooth.attention.offers import as_attention
from howsmooth.attention.positions import Rotary
from howsmooth.attention.stages import Scale
from howsmooth.checks import check_count, check_one_of, check_weights, door
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.pieces import AttentionPiece, MLPPiece, NormPiece, Piece, ResidualPiece, read_pieces
from howsmooth.small import first_tensor

POOLS = ("mean", "first")


class CentredNorm(nn.Module):
    """A normalisation that subtracts a token's mean and does not divide: x ↦ γ(x − mean) + β.

    >>> CentredNorm(2)(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.], grad_fn=<AddBackward0>)
    """

    @door
    def __init__(self, width: int):
        super().__init__()
        check_weights(2 * check_count(width, "width", most=2**62), "the normalisation")
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Every token less its mean."""
        return (x - x.mean(-1, keepdim=True)) * self.weight + self.bias


class SelfAttend(nn.Module):
    """Self-attention as a map of one argument: a layer that is called like `torch.nn.MultiheadAttention`, or a map."""

    @door
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """What every token reads from the others."""
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x, need_weights=False)[0]
        return first_tensor(self.layer(x))


class Residual(nn.Module):
    """x ↦ x + branch(x), the branch a sequence of modules.

    >>> Residual(nn.Identity())(torch.ones(2))
    tensor([2., 2.])
    """

    @door
    def __init__(self, *branch: nn.Module):
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        """x plus its branch."""
        return x + self.branch(x)


class SequenceClassifier(nn.Module):
    """Token ids or vectors, layers, a pool over tokens, classes.

    Args:
        layers: modules that map tokens to tokens, see the module.
        classes: reads logits from the pooled token: a linear map, or a sequence with normalisations before it.
        embedding: vectors of token ids; without one the inputs are vectors themselves.
        positions: added to the first tokens, ``(longest, d)``.
        pool: "mean" of all tokens, or the "first".

    >>> net = SequenceClassifier([Residual(CentredNorm(4), nn.Linear(4, 4))], nn.Linear(4, 2), nn.Embedding(9, 4))
    >>> net(torch.tensor([1, 5, 2])).shape
    torch.Size([2])
    """

    positions: Tensor | None

    @door
    def __init__(
        self,
        layers: Iterable[nn.Module],
        classes: nn.Module,
        embedding: nn.Embedding | None = None,
        positions: Tensor | None = None,
        pool: str = "mean",
    ):
        super().__init__()
        self.layers, self.classes, self.embedding = nn.Sequential(*layers), classes, embedding
        self.pool = check_one_of(pool, POOLS, "pool")
        self.register_parameter("positions", None if positions is None else nn.Parameter(positions.clone()))

    def embed(self, tokens: Tensor) -> Tensor:
        """The vectors of token ids; vectors as they are."""
        if tokens.is_floating_point():
            return tokens
        if self.embedding is None:
            raise InvalidInput("this network has no embedding: give it vectors, not token ids.")
        return self.embedding(tokens)

    def placed(self, vectors: Tensor) -> Tensor:
        """Vectors with their positions added."""
        if self.positions is None:
            return vectors
        if vectors.shape[-2] > len(self.positions):
            raise InvalidInput(f"there are {len(self.positions)} positions, but {vectors.shape[-2]} tokens.")
        return vectors + self.positions[: vectors.shape[-2]]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(…, classes)`` of ids ``(…, n)`` or vectors ``(…, n, d)``."""
        hidden = self.layers(self.placed(self.embed(tokens)))
        return self.classes(hidden.mean(-2) if self.pool == "mean" else hidden[..., 0, :])


@dataclass(frozen=True)
class LinearPart:
    """x ↦ Wx + b on every token, in float64."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class DividePart:
    """x ↦ x/(|x|²/d + ε)^½ on every token."""

    eps: float


@dataclass(frozen=True)
class BendPart:
    """An activation, by name, on every number."""

    activation: str


@dataclass(frozen=True)
class AttentionPart:
    """Dot-product attention with linear queries, keys and values, in float64."""

    map: AttentionMap


@dataclass(frozen=True)
class ResidualPart:
    """x ↦ x + branch(x)."""

    branch: tuple[Part, ...]


@dataclass(frozen=True)
class PoolPart:
    """All tokens to one: their mean, or the first."""

    pool: str


Part = LinearPart | DividePart | BendPart | AttentionPart | ResidualPart | PoolPart
_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu"}


def read_network(network: SequenceClassifier, n: int) -> tuple[Part, ...]:
    """The parts of a classifier of n tokens, in the order in which they act."""
    return (
        *_read(network.layers, "layers", n),
        PoolPart(network.pool),
        *_read(network.classes, "classes", 1),
    )


def _read(module: nn.Module, name: str, n: int) -> tuple[Part, ...]:
    match module:
        case nn.Sequential():
            return tuple(part for key, inner in module.named_children() for part in _read(inner, f"{name}.{key}", n))
        case Residual():
            return (ResidualPart(_read(module.branch, f"{name}.branch", n)),)
        case nn.Identity() | nn.Dropout():
            if isinstance(module, nn.Dropout) and module.training and module.p > 0:
                raise InvalidInput(f"{name} is dropout in training mode: call .eval() first.")
            return ()
        case nn.Linear():
            return (LinearPart(module.weight.double(), _double(module.bias)),)
        case nn.LayerNorm() | nn.RMSNorm() | CentredNorm():
            return _norm(module)
        case SelfAttend():
            return _read(module.layer, f"{name}.layer", n)
        case nn.TransformerEncoder() | nn.TransformerEncoderLayer():
            return tuple(part for piece in read_pieces(module).pieces for part in _piece(piece, name, n))
        case nn.GELU() if module.approximate != "none":
            raise UnsupportedModel(f"{name}, GELU by its {module.approximate} formula, has no certificate.")
    if type(module) in _ACTIVATIONS:
        return (BendPart(_ACTIVATIONS[type(module)]),)
    attention = as_attention(module, n)
    if attention is None:
        raise UnsupportedModel(f"{name}, a {type(module).__name__}, has no certificate.")
    return (AttentionPart(_checked(_attached(module, attention, n), name)),)


def _attached(module: nn.Module, attention: AttentionMap, n: int) -> AttentionMap:
    """The map of a layer on weights that autograd still follows, where it is asked to; a snapshot elsewhere."""
    if not torch.is_grad_enabled():
        return attention
    if isinstance(module, nn.MultiheadAttention):
        weights = [*module.in_proj_weight.chunk(3), module.out_proj.weight.T]
        biases = [] if module.in_proj_bias is None else [*module.in_proj_bias.chunk(3), module.out_proj.bias]
        names = ("query", "key", "value", "output")
        for name, weight in zip(names, weights, strict=True):
            setattr(attention, f"{name}_weight", weight.reshape(getattr(attention, f"{name}_weight").shape))
        for name, bias in zip(names, biases, strict=bool(biases)):
            setattr(attention, f"{name}_bias", bias.reshape(getattr(attention, f"{name}_bias").shape))
        return attention
    attached = getattr(module, "attached_map", None)
    return attached(None, n) if callable(attached) else attention


def _piece(piece: Piece, name: str, n: int) -> tuple[Part, ...]:
    match piece:
        case NormPiece(_, module):
            return _read(module, f"{name}, {piece.name}", n)
        case AttentionPiece(_, attention, _):
            return _read(attention, f"{name}, {piece.name}", n)
        case ResidualPiece(_, branch):
            return (ResidualPart(tuple(part for inner in branch for part in _piece(inner, name, n))),)
        case MLPPiece(label, layers, _, act):
            first, last = (_read(layer, f"{name}, {label}", n) for layer in layers)
            return (*first, _activation(act, f"{name}, {label}"), *last)


def _activation(act: object, name: str) -> BendPart:
    functions = {nn.functional.relu: "relu", nn.functional.gelu: "gelu", nn.functional.silu: "silu"}
    known = _ACTIVATIONS.get(type(act)) or functions.get(act)  # type: ignore[arg-type, call-overload]
    if known is None:
        raise UnsupportedModel(f"{name}: its activation has no certificate, only ReLU, GELU and SiLU have.")
    return BendPart(known)


def _norm(module: nn.LayerNorm | nn.RMSNorm | CentredNorm) -> tuple[Part, ...]:
    """A centring matrix, a division, the gain and the shift, each where there is one."""
    weight = module.weight
    shape = tuple(weight.shape) if weight is not None else tuple(module.normalized_shape)
    if len(shape) != 1:
        raise UnsupportedModel(f"a normalisation over {len(shape)} axes has no certificate.")
    d = shape[0]
    eye = torch.eye(d, dtype=torch.float64)
    gain = torch.ones(d, dtype=torch.float64) if weight is None else weight.double()
    shift = _double(getattr(module, "bias", None))
    if isinstance(module, nn.RMSNorm):
        dtype = torch.float32 if weight is None else weight.dtype
        eps = torch.finfo(dtype).eps if module.eps is None else module.eps
        return DividePart(eps), LinearPart(gain[:, None] * eye, shift)
    centre = eye - 1 / d
    if isinstance(module, CentredNorm):
        return (LinearPart(gain[:, None] * centre, shift),)
    return LinearPart(centre, None), DividePart(module.eps), LinearPart(gain[:, None] * eye, shift)


def _checked(attention: AttentionMap, name: str) -> AttentionMap:
    stages = (*attention.query_stages, *attention.key_stages, *attention.value_stages)
    strange = [type(stage).__name__ for stage in stages if not isinstance(stage, Scale | Rotary)]
    if attention.kind != "dot_product":
        strange = [f"{attention.kind} attention"]
    elif attention.softcap is not None:
        strange = ["a soft-cap"]
    if strange:
        raise UnsupportedModel(f"{name}: {strange[0]} has no certificate inside a network.")
    return attention.in_dtype(torch.float64)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()
