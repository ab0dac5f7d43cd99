"""Layers of each model type as maps in closed form, composed of normalisations, attention and MLP.

A table of names, like `howsmooth.models.module_names`, lists the normalisations, the modules of the MLP and the order
of the sums. A composed layer is compared with the layer's own output, and its derivative with autograd, before use
(`howsmooth.models.closed_parts`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from howsmooth.attention import AttentionMap
from howsmooth.attention.stages import TokenDerivative, TokenStage, UnitNorm
from howsmooth.errors import UnsupportedModel
from howsmooth.jacobians.closed_maps import ClosedAttention, ClosedMap, Parallel, Series, Skip, Tokenwise
from howsmooth.jacobians.tokenwise import Activation, Affine, Diagonal, GatedActivation
from howsmooth.models.module_names import submodule
from howsmooth.models.probed_norms import read_norm

Order = Literal["before", "after", "beside"]


@dataclass(frozen=True)
class Wiring:
    """The parts of a layer, as paths inside it.

    Attributes:
        norms: the normalisations of attention and of the MLP.
        inner: the first linear map of the MLP; of a gated MLP the gate and the gated map, or both fused.
        act: the activation.
        outer: the last linear map of the MLP.
        orders: positions of the norms: "before" (x + f(norm x), twice), "after" (norm(x + f(x)), twice) or "beside"
            (x + f(norm x) + g(norm x)); of several the first that reproduces the layer.
        ends: the last modules of the two branches before the sum: norms (Gemma 2) or scales (DINOv2).
    """

    norms: tuple[str, str]
    inner: tuple[str, ...]
    act: str
    outer: str
    orders: tuple[Order, ...] = ("before",)
    ends: tuple[str, str] | None = None


_GATED = ("mlp.gate_proj", "mlp.up_proj"), "mlp.act_fn", "mlp.down_proj"
_LLAMA = Wiring(("input_layernorm", "post_attention_layernorm"), *_GATED)
_SANDWICH = Wiring(
    ("input_layernorm", "pre_feedforward_layernorm"),
    *_GATED,
    ends=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_BERT = Wiring(
    ("attention.output.LayerNorm", "output.LayerNorm"),
    ("intermediate.dense",),
    "intermediate.intermediate_act_fn",
    "output.dense",
    ("after",),
)
_VIT = Wiring(("layernorm_before", "layernorm_after"), ("mlp.fc1",), "mlp.activation_fn", "mlp.fc2")
_OPT = Wiring(("self_attn_layer_norm", "final_layer_norm"), ("fc1",), "activation_fn", "fc2", ("before", "after"))
_T5 = Wiring(
    ("layer.0.layer_norm", "layer.1.layer_norm"),
    ("layer.1.DenseReluDense.wi",),
    "layer.1.DenseReluDense.act",
    "layer.1.DenseReluDense.wo",
)

WIRINGS: dict[str, tuple[Wiring, ...]] = {
    **dict.fromkeys(["bert", "camembert", "electra", "roberta", "xlm-roberta"], (_BERT,)),
    **dict.fromkeys(["gemma", "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3"], (_LLAMA,)),
    **dict.fromkeys(["gemma2", "gemma3_text"], (_SANDWICH,)),
    **dict.fromkeys(["deit", "vit"], (_VIT,)),
    "dinov2": (replace(_VIT, norms=("norm1", "norm2"), ends=("layer_scale1", "layer_scale2")),),
    "distilbert": (
        Wiring(("sa_layer_norm", "output_layer_norm"), ("ffn.lin1",), "ffn.activation", "ffn.lin2", ("after",)),
    ),
    "gpt2": (Wiring(("ln_1", "ln_2"), ("mlp.c_fc",), "mlp.act", "mlp.c_proj"),),
    "gpt_neox": (Wiring(_LLAMA.norms, ("mlp.dense_h_to_4h",), "mlp.act", "mlp.dense_4h_to_h", ("beside", "before")),),
    "mpnet": (replace(_BERT, norms=("attention.LayerNorm", "output.LayerNorm")),),
    **dict.fromkeys(["opt", "whisper"], (_OPT,)),
    "phi": (Wiring(("input_layernorm",) * 2, ("mlp.fc1",), "mlp.activation_fn", "mlp.fc2", ("beside",)),),
    "phi3": (replace(_LLAMA, inner=("mlp.gate_up_proj",), act="mlp.activation_fn"),),
    "starcoder2": (replace(_LLAMA, inner=("mlp.c_fc",), act="mlp.act", outer="mlp.c_proj"),),
    "t5": (_T5, replace(_T5, inner=("layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"))),
    "wav2vec2": (
        Wiring(
            ("layer_norm", "final_layer_norm"),
            ("feed_forward.intermediate_dense",),
            "feed_forward.intermediate_act_fn",
            "feed_forward.output_dense",
            ("after", "before"),
        ),
    ),
}
"""Model type → wirings of its layers; of several the first whose modules exist counts."""


@dataclass(frozen=True)
class ClosedLayer:
    """The parts of a layer that can be measured, each as one map."""

    residual: ClosedMap
    mlp: ClosedMap
    layer: ClosedMap


class Norm(TokenStage):
    """LayerNorm or RMSNorm of single tokens."""

    def __init__(self, gain: Tensor, shift: Tensor | None, eps: float, centred: bool):
        super().__init__()
        self.unit, self.shift, self.centred = UnitNorm.rms(len(gain), eps, gain), shift, centred

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        y, derivative = self.unit.linearize(x - x.mean(-1, keepdim=True) if self.centred else x)
        return y if self.shift is None else y + self.shift.to(x), replace(derivative, centred=self.centred)


def closed_layers(kind: str, layer: nn.Module, attention: AttentionMap) -> list[ClosedLayer]:
    """A layer in every order that its wiring allows; `UnsupportedModel` when its modules differ from the table."""
    wirings = [wiring for wiring in WIRINGS.get(kind, ()) if _fits(wiring, layer)]
    if not wirings:
        raise UnsupportedModel(f"the parts of a {type(layer).__name__} and their order are not in the table.")
    wiring = wirings[0]
    mlp = _mlp(wiring, layer)
    first, second = (Tokenwise(norm_stage(layer.get_submodule(path))) for path in wiring.norms)
    ends = [_end(layer, None if wiring.ends is None else wiring.ends[i]) for i in range(2)]
    return [_in_order(order, ClosedAttention(attention), mlp, (first, second), ends) for order in wiring.orders]


def _fits(wiring: Wiring, layer: nn.Module) -> bool:
    paths = (*wiring.norms, *wiring.inner, wiring.outer, *(wiring.ends or ()))
    return all(submodule(layer, path) is not None for path in paths)


def _in_order(
    order: Order, attention: ClosedMap, mlp: ClosedMap, norms: tuple[ClosedMap, ClosedMap], ends: list[list[ClosedMap]]
) -> ClosedLayer:
    if order == "after":
        residual = Series(Parallel(Skip(), Series(attention, *ends[0])), norms[0])
        return ClosedLayer(residual, mlp, Series(residual, Parallel(Skip(), Series(mlp, *ends[1])), norms[1]))
    branches = [Series(norm, f, *end) for norm, f, end in zip(norms, (attention, mlp), ends, strict=True)]
    first: ClosedMap = Parallel(Skip(), branches[0])
    if order == "beside":
        return ClosedLayer(first, mlp, Parallel(Skip(), *branches))
    return ClosedLayer(first, mlp, Series(first, Parallel(Skip(), branches[1])))


def _mlp(wiring: Wiring, layer: nn.Module) -> ClosedMap:
    parts = [read_affine(layer.get_submodule(path)) for path in wiring.inner]
    outer = read_affine(layer.get_submodule(wiring.outer))
    inner = parts[0]
    if len(parts) == 2:
        biases = [part.bias for part in parts]
        given = [b for b in biases if b is not None]
        if len(given) == 1:
            raise UnsupportedModel("one half of a gated MLP has a bias and the other none.")
        inner = Affine(torch.cat([part.weight for part in parts]), torch.cat(given) if given else None)
    act: Any = attrgetter(wiring.act)(layer)
    gated = len(inner.weight) == 2 * outer.weight.shape[1]
    return Tokenwise(inner, GatedActivation(act) if gated else Activation(act), outer)


def _end(layer: nn.Module, path: str | None) -> list[ClosedMap]:
    """The maps at the end of a branch, before the sum."""
    multiplier = getattr(layer, "residual_multiplier", None)  # Granite
    if multiplier is not None:
        return [Tokenwise(Diagonal(float(multiplier)))]
    if path is None:
        return []
    module = layer.get_submodule(path)
    if isinstance(scale := getattr(module, "lambda1", None), Tensor):
        return [Tokenwise(Diagonal(scale.detach()))]
    return [Tokenwise(norm_stage(module))]


def read_affine(module: nn.Module) -> Affine:
    """A linear map of tokens; the weights are the module's own."""
    from transformers.pytorch_utils import Conv1D

    if not isinstance(module, nn.Linear | Conv1D):
        raise UnsupportedModel(f"{type(module).__name__} is no plain linear map.")
    weight = module.weight.detach().T if isinstance(module, Conv1D) else module.weight.detach()
    return Affine(weight, None if module.bias is None else module.bias.detach())


def norm_stage(module: nn.Module) -> Norm:
    """A normalisation of single tokens, as `read_norm` finds it, in the precision of its weight."""
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None:
        raise UnsupportedModel(f"{type(module).__name__} is not a LayerNorm or RMSNorm of single tokens.")
    norm = read_norm(module)
    shift = None if getattr(module, "bias", None) is None else norm.shift.to(weight)
    return Norm(norm.gain.to(weight), shift, float(eps), norm.centred)
