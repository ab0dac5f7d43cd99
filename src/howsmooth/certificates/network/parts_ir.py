"""Networks of several layers and the parts that certificates read of them.

A `SequenceClassifier` is a stack of modules between embeddings and classes: linear maps, activations (ReLU, GELU,
SiLU), normalisations (`torch.nn.LayerNorm`, `torch.nn.RMSNorm`, `CentredNorm`), attention (`SelfAttend`, or a layer
with an attention map), residuals (`Residual`), sequences of them and torch's encoders. A module is read at each of
its occurrences by the formula of its class; a subclass that overrides the formula and a module with hooks are refused
by name (`howsmooth.attention.conversion`). `howsmooth.certificates.network.read_check` compares parts and
network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from howsmooth._util.common import first_tensor
from howsmooth._util.validation import check_count, check_one_of, check_weights, validated
from howsmooth.attention import AttentionMap, LogitBias
from howsmooth.attention.conversion import as_attention_map, change_of, known_base
from howsmooth.errors import InvalidInput, UnsupportedModel

POOLS = ("mean", "first")


class CentredNorm(nn.Module):
    """A normalisation that subtracts a token's mean and does not divide: x ↦ γ(x − mean) + β.

    >>> CentredNorm(2)(torch.tensor([1.0, 3.0]))
    tensor([-1.,  1.], grad_fn=<AddBackward0>)
    """

    @validated
    def __init__(self, width: int):
        super().__init__()
        check_weights(2 * check_count(width, "width", most=2**62), "the normalisation")
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Every token less its mean."""
        return (x - x.mean(-1, keepdim=True)) * self.weight + self.bias


class SelfAttend(nn.Module):
    """Self-attention as a map of one argument: a layer that is called like `torch.nn.MultiheadAttention`, or a map."""

    @validated
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Self-attention of the tokens."""
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x, need_weights=False)[0]
        return first_tensor(self.layer(x))


class Residual(nn.Module):
    """x ↦ x + branch(x), the branch a sequence of modules.

    >>> Residual(nn.Identity())(torch.ones(2))
    tensor([2., 2.])
    """

    @validated
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

    @validated
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
class NormalisationPart:
    """x ↦ x/(|x|²/d + ε)^½ on every token."""

    eps: float


@dataclass(frozen=True)
class ActivationPart:
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


Part = LinearPart | NormalisationPart | ActivationPart | AttentionPart | ResidualPart | PoolPart
_KINDS: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, Residual, SelfAttend, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention),
    *(nn.Identity, nn.Dropout, nn.Linear, nn.LayerNorm, nn.RMSNorm, CentredNorm, nn.ReLU, nn.GELU, nn.SiLU),
)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
}
_FUSED = {1: "relu", 2: "gelu"}
"""The activation that torch's encoder layers run when gradients are off, by their own number for it."""


def read_network(network: SequenceClassifier, n: int) -> tuple[Part, ...]:
    """The parts of a classifier of n tokens, in the order in which they act."""
    check_unchanged(network, SequenceClassifier, "the network")
    for name, module in network.named_modules():
        if isinstance(module, parametrizations._SpectralNorm) and module.training:
            raise InvalidInput(f"{name}, a spectral norm in training mode, changes at every call: call .eval() first.")
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float64)
    return (
        *_Reader(n, dtype).read(network.layers, "layers"),
        PoolPart(network.pool),
        *_Reader(1, dtype).read(network.classes, "classes"),
    )


def check_unchanged(module: nn.Module, base: type, name: str) -> None:
    """Refuse a module that may compute something else than its base class does."""
    change = change_of(module, base)
    if change is not None:
        way_out = ": remove them first" if "hooks" in change else ""
        raise UnsupportedModel(f"{name}, a {type(module).__name__} {change}, has no certificate{way_out}.")


def check_attention_unchanged(module: nn.Module, name: str) -> None:
    """Refuse an attention layer or map whose formula, or that of a module inside it, was overridden.

    A foreign class that defines ``attention_map`` or ``attached_map`` answers for its formula. Masks may be of any
    class: certificates read the terms that they add to the logits.
    """
    base = known_base(module)
    mro = type(module).__mro__
    defines_map = any({"attention_map", "attached_map"} & vars(cls).keys() for cls in mro[: mro.index(base)])
    check_unchanged(module, type(module) if defines_map else base, name)
    if defines_map:
        return
    for inner_name, inner in module.named_modules():
        if inner is module or "parametrizations" in inner_name or isinstance(inner, LogitBias):
            continue
        if known_base(inner) is nn.Module:
            raise UnsupportedModel(f"{name}.{inner_name}, a {type(inner).__name__}, has no certificate.")
        check_unchanged(inner, known_base(inner), f"{name}.{inner_name}")


def unchanged_attention(module: object, name: str, n: int | None) -> AttentionMap | None:
    """The map that a layer offers, refused by `check_attention_unchanged`; None without one."""
    if isinstance(module, AttentionMap | nn.MultiheadAttention) or hasattr(module, "attention_map"):
        check_attention_unchanged(module, name)  # type: ignore[arg-type]
    return as_attention_map(module, n)


@dataclass(frozen=True)
class _Reader:
    """Reads modules that act on n tokens, in a network of a floating dtype."""

    n: int
    dtype: torch.dtype

    def read(self, module: nn.Module, name: str) -> tuple[Part, ...]:
        kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
        if kind is not None:
            check_unchanged(module, kind, name)
        match module:
            case nn.Sequential():
                return self._in_turn(module, name)
            case Residual():
                return (ResidualPart(self.read(module.branch, f"{name}.branch")),)
            case nn.Identity() | nn.Dropout():
                if isinstance(module, nn.Dropout) and module.training and module.p > 0:
                    raise InvalidInput(f"{name} is dropout in training mode: call .eval() first.")
                return ()
            case nn.Linear():
                return (LinearPart(module.weight.double(), _double(module.bias)),)
            case nn.LayerNorm() | nn.RMSNorm() | CentredNorm():
                return self._norm(module, name)
            case SelfAttend():
                return self.read(module.layer, f"{name}.layer")
            case nn.TransformerEncoder():
                return self._encoder(module, name)
            case nn.TransformerEncoderLayer():
                return self._encoder_layer(module, name)
            case nn.ReLU():
                return (ActivationPart("relu"),)
            case nn.SiLU():
                return (ActivationPart("silu"),)
            case nn.GELU():
                if module.approximate != "none":
                    raise UnsupportedModel(f"{name}, GELU by its {module.approximate} formula, has no certificate.")
                return (ActivationPart("gelu"),)
        return self._attention(module, name)

    def _in_turn(self, modules: nn.Module, name: str) -> tuple[Part, ...]:
        """The parts of a container, whose own dictionary, unlike ``named_children``, has repeated modules too."""
        inside = modules._modules.items()
        return tuple(part for key, inner in inside if inner is not None for part in self.read(inner, f"{name}.{key}"))

    def _encoder(self, encoder: nn.TransformerEncoder, name: str) -> tuple[Part, ...]:
        if not isinstance(encoder.layers, nn.ModuleList):
            raise UnsupportedModel(f"{name}.layers, a {type(encoder.layers).__name__}, has no certificate.")
        check_unchanged(encoder.layers, nn.ModuleList, f"{name}.layers")
        last = () if encoder.norm is None else self.read(encoder.norm, f"{name}.norm")
        return (*self._in_turn(encoder.layers, f"{name}.layers"), *last)

    def _encoder_layer(self, layer: nn.TransformerEncoderLayer, name: str) -> tuple[Part, ...]:
        def read(*names: str) -> tuple[Part, ...]:
            return tuple(part for key in names for part in self.read(getattr(layer, key), f"{name}.{key}"))

        attend = (*read("self_attn"), *read("dropout1"))
        bend = self._activation(layer, name)
        mlp = (*read("linear1"), bend, *read("dropout", "linear2", "dropout2"))
        first, second = read("norm1"), read("norm2")
        if layer.norm_first:
            return ResidualPart((*first, *attend)), ResidualPart((*second, *mlp))
        return ResidualPart(attend), *first, ResidualPart(mlp), *second

    def _activation(self, layer: nn.TransformerEncoderLayer, name: str) -> ActivationPart:
        act = layer.activation
        found = self.read(act, f"{name}.activation") if isinstance(act, nn.Module) else ()
        names = [activation for activation, function in ACTIVATIONS.items() if function is act]
        bend = found[0] if len(found) == 1 else ActivationPart("".join(names))
        if not isinstance(bend, ActivationPart) or not bend.activation:
            raise UnsupportedModel(f"{name}: its activation has no certificate, only ReLU, GELU and SiLU have.")
        if _FUSED.get(layer.activation_relu_or_gelu, bend.activation) != bend.activation:
            raise UnsupportedModel(
                f"{name}: its activation was replaced by {bend.activation}, but without gradients torch still runs "
                f"{_FUSED[layer.activation_relu_or_gelu]}: pass the activation when the layer is made."
            )
        return bend

    def _attention(self, module: nn.Module, name: str) -> tuple[Part, ...]:
        attention = unchanged_attention(module, name, self.n)
        if attention is None:
            raise UnsupportedModel(f"{name}, a {type(module).__name__}, has no certificate.")
        return (AttentionPart(_checked(_attached(module, attention, self.n), name)),)

    def _norm(self, module: nn.LayerNorm | nn.RMSNorm | CentredNorm, name: str) -> tuple[Part, ...]:
        """A centring matrix, a division, the gain and the shift, each where there is one."""
        weight = module.weight
        shape = tuple(weight.shape) if weight is not None else tuple(module.normalized_shape)
        if len(shape) != 1:
            raise UnsupportedModel(f"{name}, a normalisation over {len(shape)} axes, has no certificate.")
        d = shape[0]
        eye = torch.eye(d, dtype=torch.float64)
        gain = torch.ones(d, dtype=torch.float64) if weight is None else weight.double()
        shift = _double(getattr(module, "bias", None))
        if isinstance(module, nn.RMSNorm):
            eps = rms_eps(self.dtype if weight is None else weight.dtype) if module.eps is None else module.eps
            return NormalisationPart(eps), LinearPart(gain[:, None] * eye, shift)
        centre = eye - 1 / d
        if isinstance(module, CentredNorm):
            return (LinearPart(gain[:, None] * centre, shift),)
        return LinearPart(centre, None), NormalisationPart(module.eps), LinearPart(gain[:, None] * eye, shift)


def rms_eps(dtype: torch.dtype) -> float:
    """The default epsilon of a `torch.nn.RMSNorm`: that of the dtype it computes in, or of float32 if that is smaller.

    >>> rms_eps(torch.float16) == torch.finfo(torch.float32).eps
    True
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _attached(module: nn.Module, attention: AttentionMap, n: int) -> AttentionMap:
    """The map of a layer on weights that autograd tracks, while gradients are enabled; a snapshot elsewhere."""
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


def _checked(attention: AttentionMap, name: str) -> AttentionMap:
    stages = (*attention.query_stages, *attention.key_stages, *attention.value_stages)
    strange = [type(stage).__name__ for stage in stages if not stage.linear]
    if attention.kind != "dot_product":
        strange = [f"{attention.kind} attention"]
    elif attention.softcap is not None:
        strange = ["a soft-cap"]
    if strange:
        raise UnsupportedModel(f"{name}: {strange[0]} has no certificate inside a network.")
    return attention.in_dtype(torch.float64)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()
