"""An allocation in the words of the engines that serve models.

Each engine takes less than an allocation can say. What has no word there is refused; where the word means other groups
or scales than were measured, a comment in the export says so:

    vllm        one quantised dtype, and a list of layers that keep the model's own:
                ``--kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers 0 1 23``
    modelopt    a quantiser for the keys and one for the values of every layer: ``quant_cfg`` of
                ``modelopt.torch.quantization.quantize``, a list as since version 0.44
    llama.cpp   one type for all keys and one for all values: ``--cache-type-k q8_0 --cache-type-v q4_0``
    json        everything

The syntax is that of the documentation of each engine (vLLM: "Quantized KV Cache"; NVIDIA Model Optimizer:
``QuantizerCfgListConfig`` and ``QuantizerAttributeConfig``; llama.cpp: ``llama-server --help``), read and checked for
form; that of Model Optimizer was also run with the engine, version 0.47.0.

Model Optimizer sees keys and values as ``(batch, heads, n, width)``. In ``block_sizes`` numbers along an axis share a
scale, so many of them or (None) all: ``{-1: None}`` is a scale per token and head, ``{-2: 16}`` one per channel and run
of 16 tokens. ``"type": "dynamic"`` takes scales from the numbers themselves, as here, not from a calibration. Scales
are float32 there and float16 here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from howsmooth.errors import InvalidInput
from howsmooth.rounding.allocation import Allocation
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.number_formats import Format

_NATIVE = ("bf16", "fp16")
_LLAMA_BLOCK = 32


@dataclass(frozen=True)
class Word:
    """A format in the words of an engine, and a sentence on how the engine's differs, empty where it does not."""

    value: Any
    differs: str = ""


def in_vllm(form: Format) -> Word | None:
    """fp8 is cast, unless a checkpoint brings one scale per tensor.

    >>> in_vllm(Format("fp8_e4m3", 8, "cast", "none"))
    Word(value='fp8_e4m3', differs='')
    """
    if form.base not in ("fp8_e4m3", "fp8_e5m2"):
        return None
    differs = f"vLLM casts to {form.base} with a scale per tensor at most, not one per {form.per}"
    return Word(form.base, "" if form.per == "none" else differs)


def in_llama_cpp(form: Format) -> Word | None:
    """Integers come in blocks of 32 along a token; those of four symmetric bits reach from −8 to 7.

    >>> in_llama_cpp(Format("int8", 8, "integer", "token", group=32))
    Word(value='q8_0', differs='')
    """
    if form.base in _NATIVE:
        return Word({"bf16": "bf16", "fp16": "f16"}[form.base])
    names = {("int8", True): "q8_0", ("int4", True): "q4_0", ("int4", False): "q4_1"}
    name = names.get((form.base, form.symmetric))
    if name is None:
        return None
    differs = []
    if (form.per, form.group) != ("token", _LLAMA_BLOCK):
        differs.append(f"has a scale for {_LLAMA_BLOCK} numbers of a token, not for {_sharing(form)}")
    if name == "q4_0":
        differs.append("rounds to −8 … 7, not to −7 … 7")
    return Word(name, f"{name} {' and '.join(differs)}" if differs else "")


def in_modelopt(form: Format) -> Word | None:
    """A ``QuantizerAttributeConfig``; fp8 without a scale is e4m3 with the constant largest number 448.

    >>> in_modelopt(Format("int4", 4, "integer", "token", group=16)).value
    {'num_bits': 4, 'type': 'dynamic', 'block_sizes': {-1: 16}}
    """
    if form.base == "nvfp4":
        blocks = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
        nested: dict[str, Any] = {"num_bits": (2, 1), "block_sizes": blocks}
        return Word(nested, "Model Optimizer takes the scale of the whole tensor in nvfp4 from its calibration")
    bits = {"int8": 8, "int4": 4, "fp8_e4m3": (4, 3)}.get(form.base)
    if bits is None or not form.symmetric:
        return None
    if form.per == "none":
        return Word({"num_bits": bits, "use_constant_amax": True})
    word: dict[str, Any] = {"num_bits": bits, "type": "dynamic"}
    if form.per != "tensor":
        word["block_sizes"] = {-1 if form.per == "token" else -2: form.group}
    fixed = f"Model Optimizer takes groups of {form.group} in windows of one length only"
    return Word(word, fixed if form.group is not None else "")


_ENGINES: dict[str, tuple[Callable[[Format], Word | None], str, tuple[str, ...]]] = {
    "vllm": (in_vllm, "fp8_e4m3, fp8_e5m2, bf16, fp16", ("layer",)),
    "modelopt": (in_modelopt, "fp8_e4m3, int8, int4, nvfp4, bf16, fp16", ("model", "layer", "part")),
    "llama.cpp": (in_llama_cpp, "bf16, fp16, int8, int4, int4[asymmetric]", ("model",)),
}
"""The names of formats in an engine, the formats that it has, and the units for which it takes one."""


def _sharing(form: Format) -> str:
    """The numbers that share a scale, in words."""
    if form.per == "tensor":
        return "a whole tensor"
    of = "numbers of a token" if form.per == "token" else "tokens of a channel"
    return f"{'all' if form.group is None else form.group} {of}"


def check_engine(engine: str, formats: Sequence[Format], per: str) -> None:
    """Refuse formats and units that an engine has no word for, before anything is run."""
    if engine not in EXPORTS:
        raise InvalidInput(f"there is no export to {engine!r}: choose from {', '.join(EXPORTS)}.")
    if engine == "json":
        return
    word, names, needed = _ENGINES[engine]
    for form in formats:
        if form.base not in _NATIVE and word(form) is None:
            raise InvalidInput(f"{engine} has no {form.name}: give formats among {names}.")
        if form.first or form.rotary == "before":
            raise InvalidInput(
                f"{engine} rounds all tokens, keys after rotary positions: leave first and rotary out of {form.name}."
            )
    if engine == "vllm" and len({form for form in formats if form.base not in _NATIVE}) > 1:
        raise InvalidInput("vllm takes one quantised format beside bf16 or fp16: give --formats fp8_e4m3,bf16.")
    if per not in needed:
        raise InvalidInput(f"{engine} takes formats per {' or '.join(needed)}, not per {per}: add --per {needed[-1]}.")


def _word(say: Callable[[Format], Word | None], allocation: Allocation, name: str) -> Word:
    """The word for a format of an allocation."""
    word = next(say(form) for form in allocation.formats if form.name == name)
    if word is None:
        raise InvalidInput(f"this engine has no {name}: export to json, or choose other formats.")
    return word


def _with_notes(text: str, words: Iterable[Word]) -> str:
    """An export below comments on what differs in the engine."""
    notes = dict.fromkeys(word.differs for word in words if word.differs)
    return "\n".join([*(f"# {note}." for note in notes), text])


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
    words = [_word(in_vllm, allocation, name) for name in by_layer if name not in _NATIVE]
    if not words:
        return f"vllm serve {model} --kv-cache-dtype auto"
    more = f" --kv-cache-dtype-skip-layers {' '.join(skipped)}" if skipped else ""
    return _with_notes(f"vllm serve {model} --kv-cache-dtype {words[0].value}{more}", words)


def to_modelopt(allocation: Allocation, model: str) -> str:
    """A ``quant_cfg`` for ``modelopt.torch.quantization.quantize``, as Python."""
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    words = []
    for part in PARTS:
        for layer, row in enumerate(allocation.by_layer(part)):
            if row[0] not in _NATIVE:
                words.append(_word(in_modelopt, allocation, row[0]))
                name = f"*layers.{layer}.*{part[0]}_bmm_quantizer"
                rules.append({"quantizer_name": name, "cfg": words[-1].value, "enable": True})
    lines = ",\n".join(f"        {rule!r}" for rule in rules)
    return _with_notes(f'{{\n    "quant_cfg": [\n{lines},\n    ],\n    "algorithm": "max",\n}}', words)


def to_llama_cpp(allocation: Allocation, model: str) -> str:
    """The arguments of ``llama-server``; quantised values need flash attention."""
    words = [_word(in_llama_cpp, allocation, allocation.by_layer(part)[0][0]) for part in PARTS]
    key, value = (word.value for word in words)
    return _with_notes(f"llama-server --flash-attn on --cache-type-k {key} --cache-type-v {value}", words)


EXPORTS: dict[str, Callable[[Allocation, str], str]] = {
    "vllm": to_vllm,
    "modelopt": to_modelopt,
    "llama.cpp": to_llama_cpp,
    "json": to_json,
}
"""Engine → what it reads."""
