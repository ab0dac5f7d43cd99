"""Parts of any network at a real input: its attention blocks, its layers, the whole.

`NetworkTargets` has of a network what `howsmooth.models.targets.Targets` has of a model of transformers; `part_of`
finds one part by a text, and `measure` measures it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from howsmooth._util.validation import (
    Count,
    Positive,
    Probability,
    Seed,
    Size,
    check_options,
    keywords,
    shown,
    validated,
)
from howsmooth.attention.attention_map import MapModule
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.jacobians.attention_operator import DEFAULT_MEMORY
from howsmooth.models.captured_sites import CapturedSite, site
from howsmooth.models.in_memory import model_in_memory
from howsmooth.models.model_inputs import Window, read_input
from howsmooth.models.network_source import is_of_transformers, open_network, read_network
from howsmooth.models.open_source import OpenModel, names_model, open_model
from howsmooth.models.targets import TARGETS, Function, Targets
from howsmooth.network.nodes import Attend, Node, Series
from howsmooth.norms import Measurement
from howsmooth.norms.local_constant import SOLVER_OPTIONS, measure_map
from howsmooth.norms.measurement import NormKind

_WHOLE = ("model", "logits")
_OF_NETWORKS = ("attention", "layer", "model")


class NetworkTargets:
    """The attention blocks, layers and the whole of any network at one input.

    Args:
        model: what `howsmooth.read_network` reads. x: its input.

    Attributes:
        sites: every block of attention with the tokens that it receives.
        skipped: layers without softmax attention; none, since only layers with attention count.

    >>> import torch
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
    ...     def forward(self, x):
    ...         for layer in self.layers:
    ...             x = layer(x)
    ...         return x
    >>> targets = NetworkTargets(Block().eval(), torch.randn(1, 5, 8))
    >>> targets.layers, targets.site(1).name
    (2, 'layers.1.self_attn')
    """

    def __init__(self, model: Any, x: Tensor):
        self.model = open_network(model) if isinstance(model, str | Path) else getattr(model, "_orig_mod", model)
        self.x, self.network = x, read_network(self.model, x)
        self.sites = [
            CapturedSite(number, node.place or f"attention {number}", node.attention, tokens.detach(), 0.0)
            for number, (node, tokens) in enumerate(_attentions(self.network.root, self.network.x))
        ]
        self.skipped: dict[int, str] = {}

    @property
    def layers(self) -> int:
        """The number of attention blocks, which are counted as layers."""
        return len(self.sites)

    def read(self, maps: bool) -> None:
        """Nothing: the network is read when the targets are made."""

    def site(self, layer: int) -> CapturedSite:
        """The attention block of one layer."""
        if not 0 <= layer < self.layers:
            raise InvalidInput(
                f"attention {layer} does not exist: this {self.network.name} has {self.layers} blocks of attention."
            )
        return self.sites[layer]

    def get(self, what: str, layer: int | None = None) -> tuple[MapModule | Function, Tensor]:
        """A part as a function of tokens, and its tokens."""
        if what in _WHOLE:
            return self.network, self.network.x
        if what not in _OF_NETWORKS:
            raise InvalidInput(
                f"of a network that is no model of transformers {', '.join(_OF_NETWORKS)} can be measured, not {what}."
            )
        found = self.site(0 if layer is None else layer)
        if what == "attention":
            return found.attention, found.x
        return self._layer(found)

    def _layer(self, found: CapturedSite) -> tuple[Function, Tensor]:
        """The numbered module that holds a block of attention, as a function of its tokens."""
        numbered = re.match(r"(.*?\b\d+)\b", found.name)
        if numbered is None or not isinstance(self.model, nn.Module):
            raise UnsupportedModel(
                f"the layers of this {self.network.name} are not a list of modules: measure attention or model."
            )
        function, tokens = site(self.model, numbered[1], self.x)
        layer = self.model.get_submodule(numbered[1])
        return read_network(_Called(layer, function), tokens), tokens


class _Called(nn.Module):
    """A layer as its network calls it."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.layer, self.function = layer, function
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with the other arguments of its call."""
        return self.function(x)


def _attentions(node: Node, x: Tensor) -> Iterator[tuple[Attend, Tensor]]:
    """Every attention inside a node with its tokens, when the node reads x."""
    if isinstance(node, Attend):
        yield node, x
    elif isinstance(node, Series):
        for inner in node.nodes:
            yield from _attentions(inner, x)
            x = inner(x).detach()
    else:
        for inner in node.children:
            yield from _attentions(inner, x)


def targets_of(model: Any, x: Any, head: bool = False) -> Targets | NetworkTargets:
    """The parts of a model or network at an input.

    Args:
        model: an `OpenModel`, a model of transformers, a text that names one, or anything that `read_network` reads.
        x: numbers of tokens ``(n,)``, a text, or a tensor that the network takes.
        head: whether a model of transformers is read with its task head.
    """
    if isinstance(model, str | Path) and names_model(str(model)):
        model = open_model(str(model), head=head)
    elif is_of_transformers(model):
        model = model_in_memory(model, head=head)
    if not isinstance(model, OpenModel):
        if not isinstance(x, Tensor):
            raise InvalidInput(f"a network is measured at a tensor, got {shown(x)}.")
        return NetworkTargets(model, x)
    if isinstance(x, Tensor):
        ids = x[None] if x.dim() == 1 or (x.dim() == 3 and model.modality != "text") else x
        return Targets(model, Window(ids, [], 0))
    _, content, _ = read_input(x, model.modality)
    (window,) = model.windows(content, model.usual_length(content))
    return Targets(model, window)


@validated
def part_of(model: Any, x: Any, what: str = "model") -> tuple[MapModule | Function, Tensor]:
    """A part of a model or network as a function of tokens, and its tokens there.

    Args:
        model, x: as in `targets_of`.
        what: "model", "layer:3", "attention:0"; of models of transformers also "residual:3", "mlp:3", "prefix:3",
            "logits".

    >>> import torch
    >>> f, x = part_of("random:gpt2[layers=2,width=16]", torch.tensor([3, 1, 4]), "layer:1")
    >>> f(x).shape
    torch.Size([3, 16])
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:[:\s]\s*(\d{1,6}))?\s*", what)
    kind, number = (match[1], match[2]) if match else ("", None)
    if kind not in TARGETS or (number is None) != (kind in _WHOLE):
        raise InvalidInput(
            f"what is measured is model, logits, or a part with its number such as layer:3 or attention:0, got "
            f"{shown(what)}."
        )
    targets = targets_of(model, x, head=kind == "logits")
    try:
        return targets.get(kind, None if number is None else int(number))
    except UnsupportedModel:
        if kind != "logits" or isinstance(targets, NetworkTargets):
            raise
        network = read_network(targets.model, targets.inputs[targets.model.main_input_name])
        return network, network.x  # a classifier pools its tokens: from word embeddings to logits


@validated
def measure(
    f: Callable[..., Any] | str | Path | OpenModel,
    x: Tensor | str | Path,
    norm: NormKind = 2,
    k: Count = 1,
    rtol: Positive = 1e-3,
    seed: Seed = 0,
    *,
    what: str | None = None,
    confidence: Probability = 0.99,
    memory: Size = DEFAULT_MEMORY,
    skip: float = 0.0,
    **solver: Any,
) -> Measurement:
    """The local Lipschitz constant of a map, or of a part of a model or network, at an input.

    Args:
        f: an attention map, a layer, or any function or module of x. A model of transformers, a text that names a
            network (``"minilm"``, ``"net.onnx"``), or, with ``what``, any network.
        x: the input of f; of a model of transformers numbers of tokens ``(n,)`` or a text.
        what: the part: "model" (closed forms for all that can be read of it), "layer:3", "attention:0", …; by default
            f itself.
        norm, k, rtol, seed, confidence, memory, skip, solver: as in `howsmooth.norms.local_constant.measure_map`.

    >>> import torch, howsmooth as hs
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> m = hs.measure(layer, torch.randn(1, 5, 8), what="model")
    >>> bool(m.lower <= m.value <= m.upper)
    True
    """
    check_options(solver, [*SOLVER_OPTIONS, *keywords(measure)], "measure")
    if what is not None or isinstance(f, str | Path | OpenModel) or is_of_transformers(f):
        f, x = part_of(f, x, what or "model")
    if not isinstance(x, Tensor):
        raise InvalidInput(f"a map is measured at tokens (n, d), got {shown(x)}: a text is for a model that reads one.")
    options: dict[str, Any] = {"confidence": confidence, "memory": memory, "skip": skip, **solver}
    return measure_map(f, x, norm, k, rtol, seed, **options)
