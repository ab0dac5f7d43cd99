"""An allocation in the words of the engines that serve models.

Each engine takes less than an allocation can say, and what it cannot take is refused rather than rounded off:

    vllm        one quantised dtype, and a list of layers that keep the model's own:
                ``--kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers 0 1 23``
    modelopt    a quantiser for the keys and one for the values of every layer: ``quant_cfg`` of
                ``modelopt.torch.quantization.quantize``, a list as since version 0.44
    llama.cpp   one type for all keys and one for all values: ``--cache-type-k q8_0 --cache-type-v q4_0``
    json        everything

The syntax is that of the documentation of each engine (vLLM: "Quantized KV Cache"; NVIDIA Model Optimizer:
``QuantizerCfgListConfig``; llama.cpp: ``llama-server --help``), read and checked for form; that of Model Optimizer was
also run with the engine, version 0.47.0.
Engines round in ways of their own: vLLM scales fp8 by one number per tensor, llama.cpp in blocks of 32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from howsmooth.errors import InvalidInput
from howsmooth.rounding.allocation import Allocation
from howsmooth.rounding.caches import PARTS
from howsmooth.rounding.formats import Format

_NATIVE = ("bf16", "fp16")
_VLLM = {"fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
_LLAMA_CPP = {"bf16": "bf16", "fp16": "f16", "int8": "q8_0", "int4": "q4_0", "int4[asymmetric]": "q4_1"}
_MODELOPT: dict[str, dict[str, Any]] = {
    "fp8_e4m3": {"num_bits": (4, 3)},
    "fp8_e5m2": {"num_bits": (5, 2)},
    "int8": {"num_bits": 8},
    "int4": {"num_bits": 4},
    "nvfp4": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
}


def check_engine(engine: str, formats: tuple[Format, ...] | list[Format], per: str) -> None:
    """Refuse formats and units that an engine has no word for, before anything is run."""
    if engine not in EXPORTS:
        raise InvalidInput(f"there is no export to {engine!r}: choose from {', '.join(EXPORTS)}.")
    if engine == "json":
        return
    known: Mapping[str, Any] = {"vllm": _VLLM, "llama.cpp": _LLAMA_CPP}.get(engine, _MODELOPT)
    allowed = list(dict.fromkeys([*known, *_NATIVE] if engine != "llama.cpp" else known))
    for form in formats:
        if _plain(form) not in allowed:
            raise InvalidInput(f"{engine} has no {form.name}: give formats among {', '.join(allowed)}.")
        if form.first or form.rotary == "before":
            raise InvalidInput(
                f"{engine} rounds all tokens, keys after rotary positions: leave first and rotary out of {form.name}."
            )
    if engine == "vllm" and len({form for form in formats if form.base not in _NATIVE}) > 1:
        raise InvalidInput("vllm takes one quantised format beside bf16 or fp16: give --formats fp8_e4m3,bf16.")
    needed = {"vllm": ("layer",), "llama.cpp": ("model",), "modelopt": ("model", "layer", "part")}[engine]
    if per not in needed:
        raise InvalidInput(f"{engine} takes formats per {' or '.join(needed)}, not per {per}: add --per {needed[-1]}.")


def _plain(form: Format) -> str:
    """The name without what engines decide for themselves: groups and scopes."""
    return form.base if form.symmetric else f"{form.base}[asymmetric]"


def to_json(allocation: Allocation, model: str) -> str:
    """Everything, as JSON."""
    layers = [
        {"layer": layer, **{part: [one.name for one in allocation.assignment[layer, part]] for part in PARTS}}  # type: ignore[union-attr]
        for layer in range(len(allocation.choice))
    ]
    content = {"model": model, "bits": allocation.bits, "predicted": allocation.damage, "layers": layers}
    return json.dumps(content, indent=2)


def to_vllm(allocation: Allocation, model: str) -> str:
    """The arguments of ``vllm serve``."""
    by_layer = [row[0] for row in allocation.by_layer("key")]
    skipped = [str(layer) for layer, name in enumerate(by_layer) if name in _NATIVE]
    dtype = next((_VLLM[_base(name)] for name in by_layer if name not in _NATIVE), None)
    if dtype is None:
        return f"vllm serve {model} --kv-cache-dtype auto"
    more = f" --kv-cache-dtype-skip-layers {' '.join(skipped)}" if skipped else ""
    return f"vllm serve {model} --kv-cache-dtype {dtype}{more}"


def to_modelopt(allocation: Allocation, model: str) -> str:
    """A ``quant_cfg`` for ``modelopt.torch.quantization.quantize``, as Python."""
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for part in PARTS:
        for layer, row in enumerate(allocation.by_layer(part)):
            if row[0] not in _NATIVE:
                name = f"*layers.{layer}.*{part[0]}_bmm_quantizer"
                rules.append({"quantizer_name": name, "cfg": _MODELOPT[_base(row[0])], "enable": True})
    lines = ",\n".join(f"        {rule!r}" for rule in rules)
    return f'{{\n    "quant_cfg": [\n{lines},\n    ],\n    "algorithm": "max",\n}}'


def to_llama_cpp(allocation: Allocation, model: str) -> str:
    """The arguments of ``llama-server``; quantised values need flash attention."""
    key, value = (
        next(_LLAMA_CPP[_plain(form)] for form in allocation.formats if form.name == allocation.by_layer(part)[0][0])
        for part in PARTS
    )
    return f"llama-server --flash-attn on --cache-type-k {key} --cache-type-v {value}"


def _base(name: str) -> str:
    return name.partition("[")[0]


EXPORTS: dict[str, Callable[[Allocation, str], str]] = {
    "vllm": to_vllm,
    "modelopt": to_modelopt,
    "llama.cpp": to_llama_cpp,
    "json": to_json,
}
"""Engine → what it reads."""
