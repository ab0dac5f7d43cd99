"""A checkpoint larger than the memory that may be used: heads bounded from weights, one layer measured on a text.

`python -m evidence.large_models FOLDER BYTES` does both in a process that may take so many bytes of data (RLIMIT_DATA)
and prints what it found as JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from evidence.tables import table
from howsmooth.sets import Ball

TITLE = "A model larger than memory"
ROOT = Path(__file__).resolve().parents[1]
GB = 10**9
CAP = 2 * GB
TOKENS = 32


@dataclass(frozen=True)
class Shape:
    """Of a Llama; the default has 6.2 GB in bfloat16."""

    width: int = 2048
    inner: int = 8192
    layers: int = 46
    heads: int = 16
    words: int = 8000


def make_checkpoint(folder: Path, shape: Shape) -> int:
    """A Llama in bfloat16, one file per layer, as large models are stored; its size in bytes.

    The layers are the same random matrices, scaled a little differently: their norms differ, and no time is spent on
    drawing billions of numbers.
    """
    from transformers import LlamaConfig

    sizes = {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads}
    config = LlamaConfig(vocab_size=shape.words, hidden_size=shape.width, intermediate_size=shape.inner, **sizes)
    config.save_pretrained(folder)
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw) / columns**0.5).bfloat16()

    ends = {"embed_tokens.weight": matrix(shape.words, shape.width), "norm.weight": torch.ones(shape.width).bfloat16()}
    files = {"ends.safetensors": ends}
    square, up = matrix(shape.width, shape.width), matrix(shape.inner, shape.width)
    down = matrix(shape.width, shape.inner)
    norms = {name: torch.ones(shape.width).bfloat16() for name in ("input_layernorm", "post_attention_layernorm")}
    names = dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"], square)
    layer = names | {"mlp.gate_proj": up, "mlp.up_proj": up, "mlp.down_proj": down} | norms
    index: dict[str, str] = {}
    for number in range(shape.layers):
        scale = 1 + number / shape.layers
        files = {} if number else files
        files[f"layer-{number}.safetensors"] = {
            f"layers.{number}.{name}.weight": (tensor * scale if "norm" not in name else tensor.clone())
            for name, tensor in layer.items()
        }
        for file, tensors in files.items():
            save_file(tensors, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def bound_and_measure(folder: Path, layer: int, tokens: int = TOKENS) -> dict[str, Any]:
    """What the page tells: how many heads have a bound from weights, and the values of one layer's heads on a text."""
    import howsmooth as hs
    from howsmooth.bounds import get, setting
    from howsmooth.models import LayeredModel

    with tempfile.TemporaryDirectory() as scratch:
        model = LayeredModel(folder, scratch)
        bounded = 0
        for number in range(len(model)):
            attention = model.attention(number)
            radius = attention.query_weight.shape[-1] ** 0.5  # tokens after a norm with unit weights
            bound = get("howsmooth.sqrt_n").at(setting(attention, n=tokens, over=Ball(radius)), per_head=True)
            bounded += int(torch.isfinite(bound).sum())
        model.read({"input_ids": torch.arange(3, 3 + tokens)[None]})
        site = model.site(layer)
        values = hs.measure_heads(site.attention, site.x, rtol=1e-2)
    return {
        "bounded": bounded,
        "layer": layer,
        "values": values.value.tolist(),
        "converged": bool(values.converged.all()),
        "error": site.error,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def capped(folder: Path, cap: int) -> dict[str, Any]:
    """`bound_and_measure` of the middle layer in a process with a cap."""
    command = [sys.executable, "-m", "evidence.large_models", str(folder), str(cap)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    answer: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return answer


def parts(progress: Callable[[str], None], shape: Shape | None = None) -> list[str]:
    """The text and table of the documentation page."""
    shape = shape or Shape()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress("writing the checkpoint")
        size = make_checkpoint(folder, shape)
        progress("bounding and measuring")
        began = time.perf_counter()
        found = capped(folder, CAP)
    seconds = time.perf_counter() - began
    return [
        f"A Llama of {shape.layers} layers, width {shape.width} and {shape.heads} heads in bfloat16, one file per "
        f"layer, is written to disk. A process that may have {CAP / GB:g} GB of data (`RLIMIT_DATA`: all that is not "
        "shared with a file on disk; one thread) reads it layer by layer, bounds every head from its weights, lets "
        f"the model read {TOKENS} tokens with activations on disk, and measures the heads of the middle layer.",
        table(
            ["", ""],
            [
                ["size of the checkpoint", f"{size / GB:.2f} GB"],
                ["cap on data", f"{CAP / GB:g} GB"],
                ["peak resident memory, pages of mapped files included", f"{found['peak'] / GB:.2f} GB"],
                ["heads with a finite bound from weights", f"{found['bounded']} of {shape.layers * shape.heads}"],
                [f"heads of layer {found['layer']} measured, all converged", f"{len(found['values'])}"],
                ["relative difference of the map from the model's own output", f"{found['error']:.0e}"],
                ["seconds", f"{seconds:.0f}"],
            ],
        ),
    ]


def _main(folder: str, cap: str) -> int:
    torch.set_num_threads(1)
    import howsmooth.models  # noqa: F401  # libraries are mapped before the cap

    resource.setrlimit(resource.RLIMIT_DATA, (int(cap), int(cap)))
    layers = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    print(json.dumps(bound_and_measure(Path(folder), layers // 2)))
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
