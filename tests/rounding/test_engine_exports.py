"""Exports in the words of engines: what they read, what a comment says, what is refused."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
import torch

from howsmooth.errors import InvalidInput
from howsmooth.models import open_model
from howsmooth.rounding import parse_formats
from howsmooth.rounding.allocation import Allocation
from howsmooth.rounding.engine_exports import EXPORTS, check_engine, in_modelopt
from howsmooth.rounding.number_formats import stored_scale

TINY = "random:llama[layers=2,width=32,heads=4,kv_heads=2]"


def chosen(names: str, choice: list[list[list[int]]]) -> Allocation:
    return Allocation(tuple(parse_formats(names)), torch.tensor(choice), 6.0, 0.1)


def test_vllm_gets_one_dtype_and_the_layers_to_skip() -> None:
    made = chosen("fp8_e4m3,bf16", [[[1, 1], [1, 1]], [[0, 0], [0, 0]], [[1, 1], [1, 1]]])
    assert EXPORTS["vllm"](made, "org/model") == (
        "vllm serve org/model --kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers 0 2"
    )
    exact = chosen("fp8_e4m3,bf16", [[[1], [1]]])
    assert EXPORTS["vllm"](exact, "m") == "vllm serve m --kv-cache-dtype auto"


def test_modelopt_gets_a_quantiser_for_every_layer_and_part() -> None:
    made = chosen("nvfp4,fp8_e4m3,bf16", [[[2], [1]], [[0], [2]]])
    read = ast.literal_eval(EXPORTS["modelopt"](made, "m"))
    assert read["quant_cfg"] == [
        {"quantizer_name": "*", "enable": False},
        {
            "quantizer_name": "*layers.1.*k_bmm_quantizer",
            "cfg": {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}},
            "enable": True,
        },
        {
            "quantizer_name": "*layers.0.*v_bmm_quantizer",
            "cfg": {"num_bits": (4, 3), "use_constant_amax": True},
            "enable": True,
        },
    ]


def test_model_optimizer_enables_what_the_export_names() -> None:
    """With the engine itself, on a CPU; its nvfp4 needs a GPU."""
    engine = pytest.importorskip("modelopt.torch.quantization", reason="needs nvidia-modelopt")
    made = chosen("fp8_e4m3,int4,bf16", [[[0, 0], [2, 2]], [[1, 1], [0, 0]]])
    opened = open_model(TINY, head=True)
    ids = torch.arange(3, 11)[None]
    settings = ast.literal_eval(EXPORTS["modelopt"](made, "m"))
    rounding = engine.quantize(opened.model, settings, lambda model: model(input_ids=ids))
    enabled = {
        name: module.num_bits
        for name, module in rounding.named_modules()
        if type(module).__name__ == "TensorQuantizer" and module.is_enabled
    }
    place = "model.layers.{}.self_attn.{}_bmm_quantizer".format
    assert enabled == {place(0, "k"): (4, 3), place(1, "k"): 4, place(1, "v"): (4, 3)}


def test_llama_cpp_gets_one_type_for_keys_and_one_for_values() -> None:
    made = chosen("int8,int4[asymmetric]", [[[0], [1]], [[0], [1]]])
    assert EXPORTS["llama.cpp"](made, "m").endswith("--cache-type-k q8_0 --cache-type-v q4_1")


def as_modelopt_rounds(x: torch.Tensor, word: dict[str, Any]) -> torch.Tensor:
    """``TensorQuantizer`` by its documentation, but with scales of integers in float16, as here."""
    bits, blocks = word["num_bits"], word.get("block_sizes", {0: None, 1: None, 2: None, 3: None})
    if word.get("use_constant_amax"):
        return x.to(torch.float8_e4m3fn).to(x)
    (axis, size), *rest = blocks.items()
    parts = [x] if rest or size is None else list(x.split(size, dim=axis))
    most = 2 ** (bits - 1) - 1 if isinstance(bits, int) else 448.0
    found = []
    for part in parts:
        scale = part.abs().amax(tuple(blocks), keepdim=True) / most
        scale = stored_scale(scale) if isinstance(bits, int) else scale
        steps = part / scale
        nearest = steps.round().clamp(-most, most) if isinstance(bits, int) else steps.to(torch.float8_e4m3fn).to(x)
        found.append(scale * nearest)
    return torch.cat(found, dim=axis)


NO = None
TABLE: dict[str, tuple[str | None, str | None, str | None]] = {
    "bf16": ("", "", ""),
    "fp16": ("", "", ""),
    "fp8_e4m3": ("", "", NO),
    "fp8_e5m2": ("", NO, NO),
    "fp8_e4m3[per=token]": ("not one per token", "", NO),
    "fp8_e4m3[per=channel]": ("not one per channel", "", NO),
    "fp8_e4m3[per=tensor]": ("not one per tensor", "", NO),
    "fp8_e5m2[per=tensor]": ("not one per tensor", NO, NO),
    "fp8_e4m3[per=token,group=16]": ("not one per token", "windows of one length", NO),
    "int8": (NO, "", "not for all numbers of a token"),
    "int8[per=channel]": (NO, "", "not for all tokens of a channel"),
    "int8[per=tensor]": (NO, "", "not for a whole tensor"),
    "int8[group=16]": (NO, "windows of one length", "not for 16 numbers of a token"),
    "int8[group=32]": (NO, "windows of one length", ""),
    "int8[per=channel,group=32]": (NO, "windows of one length", "not for 32 tokens of a channel"),
    "int8[asymmetric]": (NO, NO, NO),
    "int6": (NO, NO, NO),
    "int4": (NO, "", "not for all numbers of a token"),
    "int4[per=channel]": (NO, "", "not for all tokens of a channel"),
    "int4[per=tensor]": (NO, "", "not for a whole tensor"),
    "int4[group=16]": (NO, "windows of one length", "not for 16 numbers of a token"),
    "int4[group=32]": (NO, "windows of one length", "rounds to −8 … 7, not to −7 … 7"),
    "int4[per=channel,group=16]": (NO, "windows of one length", "not for 16 tokens of a channel"),
    "int4[asymmetric]": (NO, NO, "not for all numbers of a token"),
    "int4[asymmetric,group=32]": (NO, NO, ""),
    "int4[asymmetric,per=channel]": (NO, NO, "not for all tokens of a channel"),
    "int3": (NO, NO, NO),
    "int2": (NO, NO, NO),
    "nvfp4": (NO, "from its calibration", NO),
    "mxfp4": (NO, NO, NO),
}
"""Of vLLM, Model Optimizer, llama.cpp: "" has the format exactly, a text says what differs, NO has no such format."""
UNITS = {"vllm": "layer", "modelopt": "part", "llama.cpp": "model"}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", TABLE)
def test_an_engine_has_a_format_exactly_or_says_what_differs_or_refuses_it(name: str, place: int) -> None:
    (engine, per), said, formats = list(UNITS.items())[place], TABLE[name][place], parse_formats(name)
    if said is None:
        with pytest.raises(InvalidInput, match=f"{engine} has no"):
            check_engine(engine, formats, per)
        return
    check_engine(engine, formats, per)
    notes = [line for line in EXPORTS[engine](chosen(name, [[[0], [0]]]), "m").splitlines() if line.startswith("#")]
    assert len(notes) == bool(said)
    assert said in "".join(notes)


@pytest.mark.parametrize("place", range(3))
def test_formats_that_an_engine_has_exactly_are_different_words(place: int) -> None:
    """Two formats with one word are not both exact, whether they differ in bits, groups or scales."""
    exact = [name for name, said in TABLE.items() if said[place] == "" and name not in ("bf16", "fp16")]
    exports = {name: list(EXPORTS.values())[place](chosen(name, [[[0], [0]]]), "m") for name in exact}
    assert len(set(exports.values())) == len(exact) > 0


def test_groups_and_channels_are_different_words_in_modelopt() -> None:
    written = [name for name, said in TABLE.items() if said[1] is not None and name not in ("bf16", "fp16")]
    assert len({EXPORTS["modelopt"](chosen(name, [[[0], [0]]]), "m") for name in written}) == len(written)


CHECKED = [name for name, said in TABLE.items() if said[1] is not None and name not in ("bf16", "fp16", "nvfp4")]


@pytest.mark.parametrize("name", CHECKED)
def test_the_words_for_modelopt_mean_the_format(name: str) -> None:
    [form] = parse_formats(name)
    word = in_modelopt(form)
    assert word is not None
    x = torch.randn(1, 3, 37, 32)
    torch.testing.assert_close(as_modelopt_rounds(x, word.value), form.rounded(x))


def test_json_gets_everything() -> None:
    made = chosen("int8,int4", [[[0, 1], [1, 1]]])
    assert json.loads(EXPORTS["json"](made, "m"))["layers"] == [
        {"layer": 0, "key": ["int8", "int4"], "value": ["int4", "int4"]}
    ]


@pytest.mark.parametrize(
    ("engine", "formats", "per", "said"),
    [
        ("vllm", "int4,bf16", "layer", "vllm has no int4"),
        ("vllm", "fp8_e4m3,bf16", "part", "vllm takes formats per layer, not per part"),
        ("vllm", "fp8_e4m3,fp8_e5m2", "layer", "one quantised format"),
        ("vllm", "fp8_e4m3,fp8_e4m3[per=token]", "layer", "one quantised format"),
        ("vllm", "fp8_e4m3,bf16[first=4]", "layer", "leave first and rotary out of bf16"),
        ("modelopt", "int8[rotary=before]", "part", "keys after rotary positions"),
        ("llama.cpp", "int8,int4", "layer", "per model, not per layer"),
        ("llama.cpp", "int3", "model", "llama.cpp has no int3"),
        ("modelopt", "int8", "head", "not per head"),
        ("modelopt", "fp8_e5m2", "part", "modelopt has no fp8_e5m2"),
        ("modelopt", "int4[asymmetric]", "part", "modelopt has no int4"),
        ("tensorrt", "int8", "part", "choose from vllm, modelopt, llama.cpp, json"),
    ],
)
def test_what_an_engine_cannot_take_is_refused(engine: str, formats: str, per: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_engine(engine, parse_formats(formats), per)
