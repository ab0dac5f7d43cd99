"""The product bound of a whole model, node by node (`howsmooth.network`)."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_tensor, validated
from howsmooth.attention import AttentionMap
from howsmooth.attention.stages import TokenStage
from howsmooth.bounds.catalogue import least_upper_bound
from howsmooth.bounds.composition import Stack, Stage
from howsmooth.bounds.layer_constants import gated_mlp, layer_norm, linear_constant, rms_norm_constant
from howsmooth.bounds.question_setting import setting
from howsmooth.errors import DoesNotApply, InvalidInput, UnsupportedModel
from howsmooth.jacobians.linear_moves import MoveJacobian
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation, Norm, Softmax
from howsmooth.models.network_source import read_network
from howsmooth.network.activations import ACTIVATIONS
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
from howsmooth.network.reader import Network, read_function
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.sets.near_sets import Over, as_set


@validated
def stack(
    model: Any,
    n: int | None = None,
    *,
    x: Tensor | None = None,
    variance: float | Mapping[str, float] | None = None,
    over: Over | None = None,
    causal: bool = False,
) -> Stack:
    """The product bound on a network as a map of its input: tokens, pixels, or word embeddings.

    Args:
        model: anything that `howsmooth.read_network` reads: a module, a model of transformers (from word embeddings to
            the last hidden states, or to logits where it has a head), an ONNX file. A network, already read, as well.
        n: number of tokens, where the network takes any; x: an input, for networks of which nothing else tells its
            shape.
        variance: floors for the normalisations, by name as `measured_variances` gives them, or one for all. The bound
            then holds for the Jacobian at every input for which each normalisation sees tokens of at least its floor.
        over: the set of the input tokens, such as ``Ball(1.0)``, for a network whose first attention, or first gate,
            reads them without a normalisation.
        causal: whether a torch encoder is called with the causal mask.

    >>> encoder = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True).eval()
    >>> bound = stack(encoder, n=8)
    >>> [stage.name for stage in bound.stages]
    ['x + self_attn', 'x + MLP']
    >>> bound.worst.kind
    'normalisation'
    """
    root, tokens = _read(model, n, x, causal)
    floors = _floors([name for name, _ in _norms(root)], variance)
    region = None if over is None else as_set(over, tokens.shape[-1]).ellipsoid(tokens.shape[-1])
    return Stack(tuple(_Walk(len(tokens), floors).stages(root, region)[0]))


@validated
def measured_variances(model: Any, x: Tensor, *, causal: bool = False) -> dict[str, float]:
    """The smallest token variance (mean square for RMSNorm) that each normalisation sees when the model reads x.

    Args:
        x: tokens ``(n, d)`` or ``(batch, n, d)``, numbers of tokens, ``(n,)`` or ``(batch, n)``, or a batch of images.

    >>> encoder = nn.TransformerEncoderLayer(4, 1, 8, norm_first=True).eval()
    >>> smallest = measured_variances(encoder, torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.5, 0.5, -0.5, -0.5]]))
    >>> smallest["norm1"]
    0.25
    """
    check_tensor(x, "x", dims=(2, 3, 4) if x.is_floating_point() or x.is_complex() else (1, 2), floating=x.is_complex())
    smallest: dict[str, float] = {}
    for item in _items(model, x):
        root, tokens = _read(model, None, item, causal)
        for name, seen in _seen(root, tokens):
            smallest[name] = min(smallest.get(name, math.inf), seen)
    return smallest


def _items(model: Any, x: Tensor) -> list[Tensor]:
    """The items of a batch as the model takes one: torch's encoders as ``(n, d)``, whichever axis they batch."""
    if x.dim() == (2 if x.is_floating_point() else 1):
        return [x]
    alone = not x.is_floating_point() or isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer)
    return list(x) if alone else [item[None] for item in x]


def _read(model: Any, n: int | None, x: Tensor | None, causal: bool) -> tuple[Node, Tensor]:
    """A network without operations that are left to automatic differentiation, and its tokens."""
    if isinstance(n, int):
        check_count(n, "n", most=2**20)
    if _is_half(model):
        model = copy.deepcopy(model).float()
    network = _read_causal(model, n, x) if causal else read_network(model, x, n=n)
    network.check_complete("a bound on a whole network")
    if x is None or network is not model:
        return network.root, network.x
    if x.numel() != network.x.numel():
        raise InvalidInput(f"the network was read at {tuple(network.x.shape)} tokens, got x of shape {tuple(x.shape)}.")
    return network.root, x.reshape(network.x.shape).to(network.x)


def _is_half(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())


def _read_causal(model: Any, n: int | None, x: Tensor | None) -> Network:
    """A torch encoder that is called with the causal mask."""
    layer = model.layers[0] if isinstance(model, nn.TransformerEncoder) else model
    if not isinstance(layer, nn.TransformerEncoderLayer):
        raise InvalidInput("causal is for torch encoders: other networks know their own mask.")
    if x is None:
        x = torch.randn(n or 8, layer.self_attn.embed_dim, generator=torch.Generator().manual_seed(0))
    x = x.to(next(model.parameters()).dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[-2], dtype=x.dtype)
    with torch.no_grad():
        return read_function(lambda tokens: model(tokens, mask), x, root=model)


def _norms(root: Node) -> Iterator[tuple[str, Norm]]:
    """Every normalisation by its name."""
    for node in root.walk():
        if isinstance(node, Tokenwise):
            for stage, place in zip(node.stages, node.places, strict=True):
                if isinstance(stage, Norm):
                    yield place or "normalisation", stage


def _seen(node: Node, x: Tensor) -> Iterator[tuple[str, float]]:
    """The smallest variance or mean square that each normalisation inside a node sees at x."""
    match node:
        case Series():
            for inner in node.nodes:
                yield from _seen(inner, x)
                x = inner(x).detach()
        case Tokenwise():
            for stage, place in zip(node.stages, node.places, strict=True):
                if isinstance(stage, Norm):
                    wide = x.double()
                    spread = wide.var(-1, correction=0) if stage.centred else wide.square().mean(-1)
                    yield place or "normalisation", float(spread.min())
                x = stage(x).detach()
        case _:
            for inner in node.children:
                yield from _seen(inner, x)


@dataclass(frozen=True)
class _Walk:
    """The constants of nodes, each wherever the network can feed it.

    Attributes:
        n: number of tokens of the input. floors: variances that normalisations see at least, by name.
    """

    n: int
    floors: Mapping[str, float]

    def stages(
        self, node: Node, region: Ellipsoid | None, n: int | None = None
    ) -> tuple[list[Stage], Ellipsoid | None]:
        """The stages of a node, and the set of its outputs where one is known."""
        n = self.n if n is None else n
        match node:
            case Series():
                every: list[Stage] = []
                for inner in node.nodes:
                    some, region = self.stages(inner, region, n)
                    n = _tokens_behind(inner, n)
                    every += some
                return every, region
            case Skip():
                return [], region
            case Tokenwise():
                return self._tokenwise(node, region)
            case Attend():
                return [self._attention(node, region, n)], None
            case Parallel():
                return [self._sum(node, region, n)], None
            case Beside():
                return self._beside(node, region, n)
            case Rearrange():
                like = torch.empty(1, int(node.index.max()) + 1)
                size = float(MoveJacobian(like, node.index, node.factor).size())
                return [] if size == 1 else [Stage.of(_name(node.place, "rearrangement"), size)], None
            case MixTokens():
                return [Stage.of(_name(node.place, "mixture of tokens"), linear_constant(node.matrix))], None
            case Multiply() | Unread():
                what = str(node) if isinstance(node, Unread) else f"a product in {node.place or 'the network'}"
                raise DoesNotApply(f"{what}: no theorem bounds it on a set.")
        raise DoesNotApply(f"{type(node).__name__}: no theorem bounds it on a set.")

    def _sum(self, node: Parallel, region: Ellipsoid | None, n: int) -> Stage:
        branches = [self.stages(inner, region, n)[0] for inner in node.nodes if not isinstance(inner, Skip)]
        skips = len(node.nodes) - len(branches)
        inside = " + ".join(["x"] * skips + [_inside(branch) for branch in branches])
        names = [stage.name for branch in branches for stage in branch]
        layer = next((name.partition(": ")[0] for name in names if ": " in name), "")
        return Stage.summed(f"{layer}: {inside}" if layer else inside, branches, skips)

    def _beside(self, node: Beside, region: Ellipsoid | None, n: int) -> tuple[list[Stage], Ellipsoid | None]:
        parts = [self.stages(inner, region, n) for inner in node.nodes]
        squares = Stage.summed("", [stages + stages for stages, _ in parts], 0)
        regions = [image for _, image in parts]
        stage = Stage(_name(node.place, "side by side"), squares.log10 / 2, note="√(sum of squares)")
        if any(image is None for image in regions):
            return [stage], None
        radius = math.hypot(*(image.radius for image in regions if image is not None))
        return [stage], Ellipsoid.ball(radius, sum(image.width for image in regions if image is not None), "features")

    def _tokenwise(self, node: Tokenwise, region: Ellipsoid | None) -> tuple[list[Stage], Ellipsoid | None]:
        """Normalisations by themselves, what stands between them as one stage."""
        made: list[Stage] = []
        run: list[TokenStage] = []
        start: Ellipsoid | None = region
        for stage, place in zip(node.stages, node.places, strict=True):
            if not isinstance(stage, Norm):
                start = region if not run else start
                run.append(stage)
                region = _image(stage, region)
                continue
            made += self._run(run, node.place, start)
            run = []
            made.append(self._norm(stage, place))
            image = Ellipsoid.layer_norm if stage.centred else Ellipsoid.rms_norm
            gain = torch.ones(stage.width) if stage.gain is None else stage.gain.detach()
            region = image(gain, None if stage.shift is None else stage.shift.detach())
        return made + self._run(run, node.place, start), region

    def _norm(self, norm: Norm, place: str) -> Stage:
        name = place or "normalisation"
        floor = self.floors.get(name)
        gain = torch.ones(norm.width) if norm.gain is None else norm.gain
        constant = (layer_norm if norm.centred else rms_norm_constant)(gain, norm.eps, floor)
        spread = "variance" if norm.centred else "mean square"
        scope = "everywhere" if floor is None else f"token {spread} ≥ {floor:.3g}"
        return Stage.of(_name(place, "norm"), constant, scope=scope, note=f"ε = {norm.eps:g}", kind="normalisation")

    def _run(self, run: Sequence[TokenStage], place: str, region: Ellipsoid | None) -> list[Stage]:
        if not run:
            return []
        total, words = 1.0, list[str]()
        position = 0
        while position < len(run):
            stage = run[position]
            following = run[position + 1] if position + 1 < len(run) else None
            if isinstance(stage, Affine) and isinstance(following, GatedActivation):
                total *= self._gate(stage, following, place, region)
                words.append(f"gate by {following.name}")
                position, region = position + 2, None
                continue
            constant, word = _constant(stage, place)
            total, position, region = total * constant, position + 1, _image(stage, region)
            words.append(word)
        bent = any(isinstance(stage, Activation | GatedActivation | Softmax) for stage in run)
        kind = "MLP" if bent else "map"
        return [Stage.of(_name(place, kind), total, note="·".join(reversed(words)), kind=kind)]

    def _gate(self, inner: Affine, gate: GatedActivation, place: str, region: Ellipsoid | None) -> float:
        half = len(inner.weight) // 2
        if gate.name not in ACTIVATIONS:
            raise UnsupportedModel(f"the gate in {place or 'this network'} opens by a function that is not known.")
        if region is None:
            raise DoesNotApply(
                f"the gated MLP in {place or 'this network'} reads tokens of any size, and a product of two functions "
                "of a token is not Lipschitz on all inputs: give their set (over), such as Ball(1.0)."
            )
        weight, bias = inner.weight.detach(), None if inner.bias is None else inner.bias.detach()
        biases = (None, None) if bias is None else (bias[:half], bias[half:])
        eye = torch.eye(half, dtype=torch.float64)
        return gated_mlp(
            weight[:half], weight[half:], eye, gate.name, region.radius, gate_bias=biases[0], up_bias=biases[1]
        )

    def _attention(self, node: Attend, region: Ellipsoid | None, n: int) -> Stage:
        name = _name(node.place, "attention")
        if not isinstance(node.attention, AttentionMap):
            raise DoesNotApply(f"{name}: no theorem bounds {node.attention.kind} attention on a set.")
        if region is None:
            raise DoesNotApply(
                f"{name} reads tokens without a normalisation before it, and dot-product attention is not Lipschitz on "
                "all inputs: give their set (over), such as Ball(1.0), where it is the first."
            )
        where = setting(node.attention, n=n, over=region)
        least = least_upper_bound(where)
        if least is None or where.tokens is None:
            raise DoesNotApply(f"{name}: no theorem bounds this {where.kind} attention on a set.")
        scope = f"{n:g} tokens, |x| ≤ {where.radius:.3g} ({where.tokens.origin})"
        return Stage.of(name, float(least[1]), scope=scope, note=least[0].name, kind="attention")


def _tokens_behind(node: Node, n: int) -> int:
    """The number of tokens behind a node."""
    match node:
        case Rearrange():
            return len(node.index)
        case MixTokens():
            return len(node.matrix)
        case Series():
            for inner in node.nodes:
                n = _tokens_behind(inner, n)
        case Parallel() | Beside() | Multiply():
            return _tokens_behind(node.nodes[0], n)
    return n


def _constant(stage: TokenStage, place: str) -> tuple[float, str]:
    """The Lipschitz constant of a stage everywhere, and its formula."""
    match stage:
        case Affine():
            return linear_constant(stage.weight), "‖W‖"
        case Diagonal():
            return float(torch.as_tensor(stage.gain, dtype=torch.float64).detach().abs().max()), "max|γ|"
        case Softmax():
            return 0.5, "½"
        case Activation():
            if stage.name not in ACTIVATIONS:
                raise UnsupportedModel(
                    f"the activation in {place or 'this network'} computes none of {', '.join(ACTIVATIONS)}."
                )
            return ACTIVATIONS[stage.name].lipschitz, f"Lip({stage.name})"
    raise UnsupportedModel(f"{type(stage).__name__} in {place or 'this network'} has no Lipschitz constant here.")


def _image(stage: TokenStage, region: Ellipsoid | None) -> Ellipsoid | None:
    """The ball in which the images of tokens lie; None where it is not known."""
    if region is None:
        return None
    match stage:
        case Affine():
            shift = 0.0 if stage.bias is None else float(stage.bias.detach().double().norm())
            radius = linear_constant(stage.weight) * region.radius + shift
            return Ellipsoid.ball(radius, len(stage.weight), "linear map") if radius > 0 else None
        case Diagonal():
            shift = 0.0 if stage.shift is None else float(stage.shift.detach().double().norm())
            radius = _constant(stage, "")[0] * region.radius + shift
            return Ellipsoid.ball(radius, region.width, "scaled tokens") if radius > 0 else None
    return None


def _name(place: str, kind: str) -> str:
    """A place as layer and part: "encoder.layer.0: attention.self"."""
    match = re.match(r"(.*?\b\d+)\b\.?(.*)", place)
    if match is None:
        return f"{place}" if place else kind
    return f"{match[1]}: {match[2] or kind}"


def _inside(branch: Sequence[Stage]) -> str:
    """A branch in short: its attention or MLP."""
    main = next((stage for stage in branch if stage.kind in ("attention", "MLP")), branch[-1] if branch else None)
    if main is None:
        return "x"
    return main.name.partition(": ")[2] or main.name


def _floors(names: Sequence[str], variance: float | Mapping[str, float] | None) -> dict[str, float]:
    if variance is None:
        return {}
    if not isinstance(variance, Mapping):
        return dict.fromkeys(names, float(variance))
    unknown = sorted(set(variance) - set(names))
    if unknown:
        raise InvalidInput(f"there is no normalisation {unknown[0]!r}: choose from {', '.join(dict.fromkeys(names))}.")
    return dict(variance)
