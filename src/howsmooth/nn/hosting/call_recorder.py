"""Recording of the calls of attention layers while a model trains: their tokens, masks and other arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth._util.common import first_tensor
from howsmooth.attention import Causal, ComposedAttention, DenseBias, LogitBias, SelfAttention
from howsmooth.attention.masks import Maps
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.attention_reader import read_attention
from howsmooth.models.module_names import CONVENTIONS, AttentionSite, attention_sites
from howsmooth.nn.hosting.adapter import TransformersMask
from howsmooth.nn.layers.attention_layer import AttentionLayer, CallMasks, without_autocast

RecordedMap = tuple[Callable[[Tensor], Tensor], Tensor]
_ATTENTION = (AttentionLayer, nn.MultiheadAttention)
_REPEATING: ContextVar[bool] = ContextVar("repeating", default=False)
"""Whether the current call repeats a recorded one; recorders ignore it."""
_CACHES = {"past_key_values": None, "layer_past": None, "use_cache": False}


@dataclass(frozen=True)
class RecordedCall:
    """One call of a module.

    Attributes:
        module: the called module. site: its place, when it is the attention of a transformers model.
        args, kwargs: its arguments; the first floating tensor holds the tokens.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: AttentionSite | None = None

    @property
    def tokens(self) -> Tensor:
        """Return the first floating tensor among the arguments."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                return value
        raise InvalidInput(f"{type(self.module).__name__} receives no floating-point tensor: name another module.")

    def repeat(self, x: Tensor, **changed: Any) -> Any:
        """Repeat the call with other tokens, with parameters in at least float32."""
        old, precise = self.tokens, torch.promote_types(x.dtype, torch.float32)

        def put(value: Any) -> Any:
            if value is old:
                return x.to(precise)
            return value.to(precise) if isinstance(value, Tensor) and value.is_floating_point() else value

        args = tuple(put(value) for value in self.args)
        kwargs = {name: put(value) for name, value in self.kwargs.items()} | changed
        kwargs |= {name: value for name, value in _CACHES.items() if name in kwargs}
        state = {name: put(tensor) for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers())}
        token = _REPEATING.set(True)
        try:
            with without_autocast(x), sdpa_kernel(SDPBackend.MATH):  # the only kernel that can be differentiated twice
                return functional_call(self.module, state, args, kwargs)
        finally:
            _REPEATING.reset(token)

    def output(self, x: Tensor) -> Tensor:
        """Repeat the call with other tokens, and return its first tensor."""
        return first_tensor(self.repeat(x))


class CallRecorder:
    """Hooks on attention layers, or on any modules, that record the last call of each while ``open``.

    Only calls with gradients are recorded, so that evaluation between steps is ignored.

    Args:
        model: any module.
        layers: dotted paths of modules; None for all attention layers: those of `howsmooth.nn`,
            `torch.nn.MultiheadAttention`, and the blocks of transformers models that `howsmooth.models` can read.

    >>> recorder = CallRecorder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    >>> list(recorder.modules)
    ['self_attn']
    """

    def __init__(self, model: nn.Module, layers: Iterable[str] | None = None):
        self.modules, self.sites = _find(model, layers)
        self.calls: dict[str, RecordedCall] = {}
        self.open = True
        hooks = ((module, partial(self._record, name)) for name, module in self.modules.items())
        self._hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]

    @torch.compiler.disable  # a compiled model breaks its graph here and passes its real inputs
    def _record(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.open and torch.is_grad_enabled() and not _REPEATING.get():
            self.calls[name] = RecordedCall(module, args, kwargs, self.sites.get(name))

    def take(self, record_next: bool = True) -> dict[str, RecordedCall]:
        """Return the calls since the last time by name, and record those that follow, or do not."""
        calls, self.calls, self.open = self.calls, {}, record_next
        return calls

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.calls = [], {}


def _find(model: nn.Module, layers: Iterable[str] | None) -> tuple[dict[str, nn.Module], dict[str, AttentionSite]]:
    everything = dict(model.named_modules())
    if layers is not None:
        wanted = [layers] if isinstance(layers, str) else list(layers)
        missing = [name for name in wanted if name not in everything]
        if missing or not wanted:
            raise InvalidInput(f"{type(model).__name__} has no module at {missing or wanted}: give dotted paths.")
        return {name: everything[name] for name in wanted}, {}
    sites = {site.path: site for site in _sites(model)}
    ours = [name for name, module in everything.items() if isinstance(module, _ATTENTION)]
    modules = {name: everything[name] for name in ours} | {path: site.block for path, site in sites.items()}
    if not modules:
        raise UnsupportedModel(
            f"no attention was found in this {type(model).__name__}: name the modules with layers=[...]."
        )
    return modules, sites


def _sites(model: Any) -> list[AttentionSite]:
    if getattr(getattr(model, "config", None), "model_type", None) not in CONVENTIONS:
        return []
    try:
        sites = attention_sites(model)
    except UnsupportedModel:  # all replaced, or several stacks
        return []
    # When some blocks have been replaced, the others are not counted from 0.
    return [replace(site, layer=getattr(site.owner, "layer_idx", site.layer) or 0) for site in sites]


def attention_of(model: nn.Module, call: RecordedCall) -> RecordedMap | None:
    """Return the attention of a call as a map in closed form, and its first text, ``(n, d)``, without padding.

    None for a module that is no attention layer.
    """
    if call.site is not None:
        return _block(model, call, call.site)
    if isinstance(call.module, _ATTENTION):
        return _layer(call)
    return None


def _layer(call: RecordedCall) -> RecordedMap:
    layer: Any = call.module
    given = inspect.signature(layer.forward).bind(*call.args, **call.kwargs).arguments
    query = given["query"]
    if any(given.get(name) is not None and given[name] is not query for name in ("key", "value")):
        raise InvalidInput("this layer attends to tokens of another sequence, but only self-attention can be measured.")
    x = query[None] if query.dim() == 2 else query if layer.batch_first else query.transpose(0, 1)
    given_masks = given.get("attn_mask"), given.get("is_causal", False), given.get("key_padding_mask")
    tokens, mask = _first_text(x, layer.num_heads, *given_masks)
    if isinstance(layer, AttentionLayer):
        return layer.map(mask, n=len(tokens)), tokens
    attention = SelfAttention.from_torch(layer)
    attention.logit_biases.extend([] if mask is None else [mask])
    return attention, tokens


def _first_text(
    x: Tensor, heads: int, mask: Tensor | LogitBias | None, causal: bool, padding: Tensor | None
) -> tuple[Tensor, LogitBias | None]:
    """Return the real tokens of the first item of a batch that has some, and their masks in one term."""
    masks = CallMasks.of((*x.shape[:2], heads), mask, causal, padding)
    keeps = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if masks.keep is None else masks.keep
    real = keeps.any(-1)
    if not bool(real.any()):
        raise InvalidInput("the batch holds only padding.")
    item = int(real.int().argmax())
    keep = keeps[item]
    tokens = x[item][keep].detach()
    if not masks.terms or masks.terms.is_causal:
        return tokens, Causal() if masks.terms else None
    maps = Maps.every(item + 1, heads, masks.n, x.float()).select(slice(item * heads, (item + 1) * heads))
    added = masks.terms.added_to(torch.zeros(heads, masks.n, masks.n, device=x.device), maps)
    return tokens, DenseBias(added[:, keep][:, :, keep])


def _block(model: Any, call: RecordedCall, site: AttentionSite) -> RecordedMap:
    given = inspect.signature(site.block.forward).bind(*call.args, **call.kwargs).arguments
    x, causal = given["hidden_states"], bool(getattr(site.owner, "is_causal", False))
    seen = TransformersMask.of(given.get("attention_mask"), x.shape[:2], x.shape[1], causal)
    attention = read_attention(model, site)
    plain = attention.attention if isinstance(attention, ComposedAttention) else attention
    tokens, mask = _first_text(x, plain.heads, seen.mask, seen.causal, seen.padding)
    terms = [term for term in attention.terms if not term.hides_only] + ([] if mask is None else [mask])
    plain = plain.replace(logit_biases=terms)
    return attention.replace(attention=plain) if isinstance(attention, ComposedAttention) else plain, tokens
