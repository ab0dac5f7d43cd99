"""Every attention block of a model at a real input, as a map that has just reproduced the model's own output there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import first_tensor, relative_error
from howsmooth._util.process_lock import alone
from howsmooth._util.validation import validated
from howsmooth.attention import AttentionMap, ComposedAttention
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.attention_interface import AttentionCall, attention_calls
from howsmooth.models.attention_reader import read_attention
from howsmooth.models.forward_pass import Call, RealTokens, listening, reference_mode, run
from howsmooth.models.module_names import CONVENTIONS, Site, attention_site, attention_sites, no_such_layer
from howsmooth.models.traced_attention import find_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-5
"""Largest relative difference between the map and the model at the captured input, in single precision."""


@dataclass(frozen=True)
class CapturedSite:
    """An attention block and the input it really saw.

    Attributes:
        layer: counted from 0.
        name: dotted path of the block in the model.
        attention: the block as a map, its output projection included, nothing around it.
        x: ``(n, d)``: the tokens it received, without padding.
        error: relative difference between ``attention(x)`` and the model's own output at x.
    """

    layer: int
    name: str
    attention: AttentionMap | ComposedAttention
    x: Tensor
    error: float


@validated
@alone
def capture(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], layers: Iterable[int] | None = None
) -> list[CapturedSite]:
    """Run the model once and return every attention block with the tokens it saw.

    Each map has reproduced the model at these tokens: queries, keys, values, weights and output agree to `TOLERANCE`.
    Architectures in `MODEL_TYPES` are read by name; any other is read through transformers' attention socket, if its
    queries, keys and values are linear in the tokens up to rotary positions. The model is left as it was.

    Args:
        model: in float32 or float64.
        inputs: keyword arguments of the model for one text, image or sound; padding is cut off.
        layers: which to keep; the model is not run beyond the last of them. None for all.

    Raises:
        UnsupportedModel: a block computes something that the map does not.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99))
    >>> for site in capture(model, {"input_ids": torch.tensor([[5, 7, 11]])}):
    ...     print(site.name, tuple(site.x.shape), site.error < 1e-6)
    h.0.attn (3, 32) True
    h.1.attn (3, 32) True
    """
    check_request(model, inputs)
    wanted = None if layers is None else list(layers)
    if model.config.model_type in CONVENTIONS:
        sites = attention_sites(model) if wanted is None else [attention_site(model, each) for each in {*wanted}]
        captured = _capture_by_name(model, inputs, sites, to_the_end=wanted is None)
    else:
        listened = enumerate(find_attention(model, inputs))
        captured = {
            number: _compared(model, number, *attention, RealTokens.read_by(attention.call.module, model, inputs))
            for number, attention in listened
        }
        for layer in wanted or ():
            if layer not in captured:
                raise no_such_layer(model, layer, len(captured))
    return [captured[layer] for layer in (sorted(captured) if wanted is None else wanted)]


class _Heard(Exception):
    """Every layer asked for has been captured: what the model does above them is nobody's question."""


def _capture_by_name(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], sites: Sequence[Site], to_the_end: bool
) -> dict[int, CapturedSite]:
    real = RealTokens.of(inputs)
    tokens: dict[nn.Module, Tensor] = {}
    calls: dict[nn.Module, AttentionCall] = {}
    owners = {site.owner for site in sites}
    of_output = {site.submodule(site.names.output): site for site in sites}
    captured: dict[int, CapturedSite] = {}

    def on_entry(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens[block] = Call.of(args, kwargs).hidden

    def on_call(call: AttentionCall) -> None:
        if call.module in owners:
            calls[call.module] = call

    def on_output(projection: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        # Compared at once and let go: the weights of all layers together would not fit into memory.
        site = of_output[projection]
        x, call = tokens.pop(site.block), calls.pop(site.owner, None)
        attention = read_attention(model, site, real.positions)
        captured[site.layer] = _compared(model, site.layer, site.path, attention, x, output, call, real)
        if not to_the_end and len(captured) == len(sites):
            raise _Heard

    hooks = [site.block.register_forward_pre_hook(on_entry, with_kwargs=True) for site in sites]
    hooks += [projection.register_forward_hook(on_output) for projection in of_output]
    with listening(hooks), attention_calls(model, on_call), suppress(_Heard):
        run(model, inputs)
    return captured


def _compared(
    model: PreTrainedModel,
    layer: int,
    name: str,
    attention: AttentionMap | ComposedAttention,
    x: Tensor,
    output: Tensor,
    call: AttentionCall | None,
    real: RealTokens,
) -> CapturedSite:
    """The site, once the map has reproduced the output and, where the socket was heard, every part on the way to it."""
    x, output = (real.cut(tokens, name) for tokens in (x, output))
    with torch.no_grad():
        error = relative_error(attention(x), output, attention.output_bias)
        errors = {"output": error}
        if call is not None:
            ours: tuple[Tensor, ...] = (*attention.staged(x), attention.weights(x))
            theirs: tuple[Tensor, ...] = call.kept(real.keep)
            if isinstance(attention, ComposedAttention):  # the order of the coordinates of queries and keys is its own
                ours, theirs = ((one[0] @ one[1].mT, *one[2:]) for one in (ours, theirs))
            stages = ("queries", "keys", "values", "weights") if len(ours) == 4 else ("logits", "values", "weights")
            errors |= dict(zip(stages, map(relative_error, ours, theirs), strict=True))
    for stage, difference in errors.items():
        if not difference <= TOLERANCE:
            raise UnsupportedModel(
                f"the {stage} of layer {layer} ({name}) as read from {type(model).__name__} differ from the model's "
                f"own by a relative {difference:.1e}: a feature of it is not modelled, so measure it as a function "
                "instead."
            )
    return CapturedSite(layer, name, attention, x[0].detach(), error)


def check_request(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> None:
    """Refuse what cannot be captured: no transformers model, half precision, several items at once."""
    if getattr(getattr(model, "config", None), "model_type", None) is None:
        raise UnsupportedModel(
            f"{type(model).__name__} is not a transformers model: take the input of one of its modules with "
            "models.site(module, path, x) and measure it as a function."
        )
    if model.dtype not in (torch.float32, torch.float64):
        raise UnsupportedModel(
            f"the model computes in {str(model.dtype).removeprefix('torch.')}, too coarsely to compare the map with "
            "it: convert it with model.float()."
        )
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() and len(value) != 1:
            raise InvalidInput(f"{name} holds {len(value)} items, but one text, image or sound is captured at a time.")


@validated
@alone
def site(module: nn.Module, path: str, *args: Any, **kwargs: Any) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Any submodule as a function of what it really received: ``hs.measure(*site(module, path, x))``.

    The module runs once on the given arguments. The first tensor that the submodule was called with is x; whatever else
    it received stays fixed, except arguments that were that same tensor (as in self-attention, ``f(x, x, x)``). A batch
    of one is taken out of its batch. Of several calls the first counts.

    >>> import torch, howsmooth as hs
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    >>> f, x = site(layer, "linear1", torch.randn(1, 5, 8))
    >>> expected = float(torch.linalg.matrix_norm(layer.linear1.weight.detach(), 2))
    >>> abs(float(hs.measure(f, x, rtol=1e-5)) - expected) < 1e-4
    True
    """
    try:
        inner = module.get_submodule(path)
    except AttributeError:
        known = ", ".join(name for name, _ in module.named_children())
        raise InvalidInput(
            f"{type(module).__name__} has no module at {path!r}: give a dotted path that begins with one of {known}."
        ) from None
    heard: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def hear(inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        heard.append((args, kwargs))

    # A transformers model must not fill a cache, to which every later call would add.
    mode: Any = reference_mode(module) if hasattr(module, "config") else torch.no_grad()  # type: ignore[arg-type]
    with listening([inner.register_forward_pre_hook(hear, with_kwargs=True)]), mode:
        module(*args, **kwargs)
    if not heard:
        raise InvalidInput(f"the module at {path!r} was not called when {type(module).__name__} ran: choose another.")
    inner_args, inner_kwargs = heard[0]
    given = (*inner_args, *inner_kwargs.values())
    x = next((a for a in given if isinstance(a, Tensor) and a.is_floating_point()), None)
    if x is None:
        raise InvalidInput(f"the module at {path!r} receives no floating-point tensor: choose one that comes later.")
    single = x.dim() == 3 and len(x) == 1

    @alone
    def function(y: Tensor) -> Tensor:
        y = y[None] if single else y
        moved = [y if a is x else a for a in inner_args]
        output = first_tensor(inner(*moved, **{k: y if a is x else a for k, a in inner_kwargs.items()}))
        return output[0] if single else output

    return function, (x[0] if single else x).detach()
