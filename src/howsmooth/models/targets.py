"""Targets of a measurement in a model: an attention block, and the parts of the network around it, at a real input.

Every target is a function of tokens ``(n, d)`` and its input in the model. The model runs once on the window; the
arguments of each layer (masks, positions) are recorded, and the functions call the same modules with them. Each
function reproduces the model's own output at its tokens before it is returned. Targets of listed architectures have
their Jacobian in closed form (`howsmooth.models.model_part`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_tensor, relative_error
from howsmooth._util.process_lock import LOCK, alone
from howsmooth._util.validation import validated
from howsmooth.attention import AttentionMap
from howsmooth.attention.composite_map import Composite
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.captured_sites import TOLERANCE, CapturedSite, capture
from howsmooth.models.forward_pass import Call, RealTokens, recorded_calls, reference_mode, run_model, temporary_hooks
from howsmooth.models.model_inputs import Window
from howsmooth.models.model_part import ModelPart
from howsmooth.models.module_names import (
    CONVENTIONS,
    attention_sites,
    layer_modules,
    layers_without_softmax,
    no_such_layer,
)
from howsmooth.models.open_source import OpenModel

Function = Callable[[Tensor], Tensor]

TARGETS = ("attention", "residual", "mlp", "layer", "prefix", "model", "logits")
"""The targets, from the smallest part to the whole."""
_OF_MLPS = ("mlp", "residual")
_NO_ARGUMENTS = Call(torch.empty(0), (), {})

_MLPS = (
    ("mlp",),
    ("intermediate", "output.dense"),  # BERT and its relatives, MPNet
    ("fc1", "activation_fn", "fc2"),  # OPT, Whisper
    ("ffn",),  # DistilBERT
    ("feed_forward",),  # Wav2Vec2
    ("layer.1.DenseReluDense",),  # T5
)
"""The modules of a layer's MLP, as paths inside the layer; the first that fits is taken, then checked."""


@validated
def target(
    open_model: OpenModel, what: str, layer: int | None = None, window: Window | None = None
) -> tuple[AttentionMap | Composite | Function, Tensor]:
    """A part of the model and its input at a window, for `hs.measure`.

    Args:
        open_model: from `open_model`.
        what: "attention" (the block: heads and output projection), "residual" (the residual stream from before to after
            attention, with the layer's normalisation), "mlp" (the MLP by itself), "layer", "prefix" (from the tokens
            that enter the first layer to the output of ``layer``), "model" (from there to the last hidden state) or
            "logits" (to the output of the head; the model must have been opened with ``head=True``).
        layer: counted from 0; not used by "model" and "logits".
        window: from `OpenModel.windows`.

    >>> import howsmooth as hs
    >>> from howsmooth.models import open_model
    >>> opened = open_model("random:gpt2[layers=2,width=16]")
    >>> [window] = opened.windows("Down the rabbit hole", length=8, count=1, seed=0)
    >>> f, x = target(opened, "layer", 1, window)
    >>> x.shape, f(x).shape
    (torch.Size([8, 16]), torch.Size([8, 16]))
    """
    if window is None:
        raise InvalidInput("a target is measured at a window: cut one with open_model.windows(text, length).")
    return Targets(open_model, window, mlps=what in _OF_MLPS).get(what, layer)


class Targets:
    """All targets of one window; the model reads it at the first request, or by `read`.

    Args:
        mlps: whether inputs and outputs of MLPs are recorded, which "mlp" and "residual" need.

    Attributes:
        modules: the modules of the layers.

    >>> from howsmooth.models import open_model
    >>> opened = open_model("random:bert[layers=2,width=16]")
    >>> [window] = opened.windows("Down the rabbit hole", length=8, count=1, seed=0)
    >>> Targets(opened, window).layers
    2
    """

    @validated
    @alone
    def __init__(self, open_model: OpenModel, window: Window, mlps: bool = True):
        self.model, self.inputs = open_model.model, open_model.inputs(window)
        if RealTokens.of(self.inputs).keep is not None:
            raise InvalidInput("targets are measured without padding: cut the window to its real tokens.")
        listed = self.model.config.model_type in CONVENTIONS
        self._sites = None if listed else capture(self.model, self.inputs)
        self.modules = self._layer_modules()
        self._mlps = [_mlp(layer) if mlps else None for layer in self.modules]
        self._calls: dict[nn.Module, Call] = {}
        self._outputs: dict[nn.Module, Tensor] = {}
        self._tail: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._output: Any = None

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return len(self.modules)

    @property
    def sites(self) -> list[CapturedSite]:
        """The attention blocks, captured at the first request; the same run records the arguments of the functions."""
        with LOCK:
            if self._sites is None:
                with self._recording() if self._output is None else nullcontext():
                    self._sites = capture(self.model, self.inputs)
            return self._sites

    @property
    def skipped(self) -> dict[int, str]:
        """The layers of a hybrid stack that have no softmax attention, each with a reason."""
        return {} if self.model.config.model_type not in CONVENTIONS else layers_without_softmax(self.model)

    def site(self, layer: int) -> CapturedSite:
        """The attention block of one layer."""
        by_layer = {site.layer: site for site in self.sites}
        if layer not in by_layer:
            raise UnsupportedModel(f"{self.skipped[layer]}: measure the whole layer instead.")
        return by_layer[layer]

    def read(self, maps: bool) -> None:
        """Run the model on the window now, once for all targets; ``maps``: attention is among them."""
        if maps:
            _ = self.sites
        else:
            self._run()

    @alone
    def get(self, what: str, layer: int | None = None) -> tuple[AttentionMap | Composite | Function, Tensor]:
        """A target; see `target`."""
        if what not in TARGETS:
            raise InvalidInput(f"what is measured is one of {', '.join(TARGETS)}, got {what!r}.")
        if what in ("model", "logits"):
            self._run()
            return self._whole(what)
        if layer is None or not 0 <= layer < self.layers:
            raise no_such_layer(self.model, layer, self.layers)
        if what == "attention":
            site = self.site(layer)
            return site.attention, site.x
        self._run()
        if what == "mlp":
            return self._mlp_function(layer)
        if what == "residual":
            x = self._input(layer)
            return ModelPart(self._residual(layer), x, [self.modules[layer]]), x
        first = 0 if what == "prefix" else layer
        return self._checked(
            what, self.modules[first : layer + 1], self._input(first), self._outputs[self.modules[layer]]
        )

    def _layer_modules(self) -> list[nn.Module]:
        """The layers: the members of the model's list of modules that hold its attention blocks."""
        known = self._sites
        every = layer_modules(self.model) if known is None else None
        if every is not None:
            return list(every)
        paths = [s.path for s in attention_sites(self.model)] if known is None else [s.name for s in known]
        numbered = [re.match(r"(.*?\b\d+)\b", path) for path in paths]
        if not all(numbered):
            raise UnsupportedModel(f"{type(self.model).__name__} holds no list of layers: measure 'attention' only.")
        layers = [self.model.get_submodule(match[1]) for match in numbered if match is not None]
        if len(set(layers)) != len(layers):
            raise UnsupportedModel(
                f"the layers of {type(self.model).__name__} share their modules, so that a call does not tell which "
                "layer it belongs to: measure its attention, models.capture(…)."
            )
        return layers

    def _run(self) -> None:
        """Run the model on the window, unless it has run."""
        if self._output is None:
            with self._recording(), reference_mode(self.model):
                run_model(self.model, self.inputs)

    @cached_property
    def _bodies(self) -> list[nn.Module]:
        """The model without its head, and models inside it that hold its layers: OPT's head calls only the latter."""
        models = [module for module in self.model.base_model.modules() if hasattr(module, "base_model_prefix")]
        return [module for module in models if self.modules[-1] in module.modules()]

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record inputs and outputs of the layers and their MLPs while the model runs."""
        modules = [*self.modules, *(module for mlp in self._mlps if mlp for module in mlp)]
        recorded = {*modules, *self._bodies}
        inside = {module for layer in self.modules for module in layer.modules()}
        leaves = {m for m in self.model.modules() if m not in inside and not list(m.children())}
        last = self.modules[-1]

        def on_exit(module: nn.Module, args: Any, output: Any) -> None:
            if module in recorded:
                self._outputs[module] = first_tensor(output)
            elif last in self._outputs and args and isinstance(output, Tensor) and isinstance(args[0], Tensor):
                self._tail.append((module, args[0], output))
            if module is self.model:
                self._output = output

        hooks = [module.register_forward_hook(on_exit) for module in recorded | leaves | {self.model}]
        with temporary_hooks(hooks), recorded_calls(modules) as self._calls:
            yield

    def _input(self, layer: int) -> Tensor:
        return self._calls[self.modules[layer]].hidden[0].detach()

    def _chain(self, modules: list[nn.Module]) -> Function:
        """The modules one after the other, each called as the model called it; those behind the layers on tokens."""
        calls = [(module, self._calls.get(module, _NO_ARGUMENTS)) for module in modules]

        @alone
        def function(x: Tensor) -> Tensor:
            x = x[None]
            for module, call in calls:
                x = first_tensor(module(x, *call.args, **call.kwargs))
            return x[0]

        return function

    def _checked(self, what: str, modules: list[nn.Module], x: Tensor, output: Tensor) -> tuple[Function, Tensor]:
        function = self._chain(modules)
        with torch.no_grad():
            ours = function(x)
        same_size = ours.numel() == output.numel()
        error = relative_error(ours, output.reshape(ours.shape)) if same_size else float("inf")
        if not error <= TOLERANCE:
            raise UnsupportedModel(
                f"the {what} of this {type(self.model).__name__} is more than its modules one after the other "
                f"(relative difference {error:.1e}): measure another part of it."
            )
        return ModelPart(function, x, modules), x

    def _mlp_modules(self, layer: int) -> list[nn.Module]:
        modules = self._mlps[layer]
        if modules is None or modules[0] not in self._calls:
            raise UnsupportedModel(
                f"no MLP was found in layer {layer} of this {type(self.model).__name__}: measure its attention or the "
                "whole layer."
            )
        return modules

    def _mlp_function(self, layer: int) -> tuple[Function, Tensor]:
        modules = self._mlp_modules(layer)
        hidden = self._calls[modules[0]].hidden
        x = hidden.reshape(-1, hidden.shape[-1]).detach()  # OPT drops the batch axis
        return self._checked("mlp", modules, x, self._outputs[modules[-1]])

    def _residual(self, layer: int) -> Function:
        """The layer up to its MLP: the input of the MLP where normalisation comes last, else the layer without MLP.

        Where the layer ends in a normalisation (BERT), its MLP receives the normalised sum of tokens and attention.
        Where it ends in a sum (GPT-2, Llama), the sum without the MLP's term is the residual stream after attention,
        also when MLP and attention stand side by side (GPT-NeoX).
        """
        mlp = self._mlp_modules(layer)
        run_layer = self._chain([self.modules[layer]])
        norm_last = self._ends_in_norm(layer)

        @alone
        def function(x: Tensor) -> Tensor:
            inputs: list[Tensor] = []
            if norm_last:
                hook = mlp[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
            else:
                hook = mlp[-1].register_forward_hook(lambda module, args, output: _silenced(output))
            with temporary_hooks([hook]):
                output = run_layer(x)
            return inputs[0].reshape(x.shape) if norm_last else output

        return function

    def _ends_in_norm(self, layer: int) -> bool:
        """Whether the layer's output is the output of one of its normalisations."""
        module = self.modules[layer]
        outputs: list[Any] = []
        norms = [inner for inner in module.modules() if "norm" in type(inner).__name__.lower()]
        hooks = (norm.register_forward_hook(lambda norm, args, output: outputs.append(output)) for norm in norms)
        with temporary_hooks(hooks), torch.no_grad():
            call = self._calls[module]
            last = first_tensor(module(call.hidden, *call.args, **call.kwargs))
        return any(output is last for output in outputs)

    def _whole(self, what: str) -> tuple[Function, Tensor]:
        """All layers and the modules behind them, found by following the tensor from the last layer to the output."""
        hidden = next((self._outputs[body] for body in self._bodies if body in self._outputs), None)
        wanted = hidden if what == "model" else self._output.get("logits")
        if wanted is None and what == "model":
            raise UnsupportedModel(f"{type(self.model).__name__} does not call its body: open it with head=False.")
        if wanted is None:
            raise InvalidInput("this model has no head that gives logits: open it with head=True, or measure 'model'.")
        tensor, tail = self._outputs[self.modules[-1]], list[nn.Module]()
        for module, x, output in self._tail:
            if _same(tensor, wanted):
                break
            if _same(x, tensor):
                tail.append(module)
                tensor = output
        return self._checked(what, [*self.modules, *tail], self._input(0), wanted)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def _silenced(output: Any) -> Any:
    """The output of an MLP with zeros for its tokens; other outputs (the scores of a router) are unchanged."""
    if isinstance(output, tuple):
        return (_silenced(output[0]), *output[1:])
    return torch.zeros_like(output)


def _mlp(layer: nn.Module) -> list[nn.Module] | None:
    for paths in _MLPS:
        with suppress(AttributeError):
            return [layer.get_submodule(path) for path in paths]
    return None
