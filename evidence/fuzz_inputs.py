"""Files to give to commands: sound ones, damaged ones, hostile ones, and configurations of every wrong type."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from evidence.scan_faults import TEXT, make_model
from howsmooth.certificates import PatchTransformer
from howsmooth.cli import app
from howsmooth.papers.training import Corpus, TrainingSettings, train
from howsmooth.scans import scan

HOSTILE = "\x1b]52;c;cHduZWQ=\x1b\\\x1b[2J\u202e\x9b31m<b>[bold]$x_{"
"""Escapes that write to the clipboard and clear the screen, a direction mark, C1, HTML, rich markup, TeX."""
CONFIGURATIONS = 120
"""How many TOML files there are, most of them wrong."""
_VALUES = (
    '"x"', '""', "1", "-1", "0", "1.5", "nan", "true", "[]", "[1]", '["a"]', "[[1]]", "[1.5]", "{a = 1}", '"\\u0000"',
    "99999999999999999999999", "1979-05-27", '"8,12"', '"head"', '["head", "layer"]', "[8, 12]", "1e-3", '"none"',
    '"\\u001b[2J"', '"../../x"', "1e999", '"head[layers=0]"',
)  # fmt: skip
_KEYS = (
    *("model", "text", "lengths", "windows", "layers", "what", "out", "rtol", "confidence", "seed", "bounds"),
    *("explain", "unknown", "threads"),
)


def make_inputs(folder: Path) -> None:
    """Everything that commands may be given to read. All numbers are drawn from fixed seeds."""
    folder.mkdir()
    model = folder / "model"
    model.mkdir()
    make_model(model)
    words = (model / TEXT).read_text(encoding="utf-8")
    (model / TEXT).rename(folder / "words.txt")
    scan(str(model), folder / "words.txt", lengths="8,12", what="head,attention", out=folder / "store.sqlite")
    _texts(folder, words)
    shutil.copytree(model, folder / HOSTILE)
    scan(str(folder / HOSTILE), folder / f"{HOSTILE}.txt", lengths="8,12", out=folder / "hostile.sqlite")
    _weights(folder)
    _network(folder)
    _stores(folder)
    _configurations(folder)
    corpus = Corpus.split("to be or not to be, that is the question " * 60)
    settings = TrainingSettings(depth=1, width=8, heads=2, length=8, batch_tokens=32, steps=4, warmup=1)
    train(corpus, settings, folder / "run")
    (folder / "empty").mkdir()


def digests(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _texts(folder: Path, words: str) -> None:
    (folder / "play.txt").write_text("to be or not to be, that is the question " * 60, encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("w1", encoding="utf-8")
    (folder / "latin.txt").write_bytes("schön ".encode("latin-1") * 100)
    (folder / "nul.txt").write_bytes(b"w1 \0 w2 " * 50)
    (folder / "hostile.txt").write_text(f"{HOSTILE} </script><script>alert(1)</script> " * 20, encoding="utf-8")
    (folder / "=cmd().txt").write_text(words[:500], encoding="utf-8")
    (folder / f"{HOSTILE}.txt").write_text(words[:500], encoding="utf-8")
    os.symlink("words.txt", folder / "link.txt")
    os.symlink("nowhere", folder / "dangling.txt")


def _weights(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    names = [f"attn.{name}_proj.weight" for name in "qkvo"]
    tensors = {name: torch.randn(8, 8, generator=draw) for name in names}
    save_file(tensors | {"ln_1.weight": torch.ones(8), "ln_1.bias": torch.zeros(8)}, folder / "weights.safetensors")
    save_file(tensors | {names[0]: torch.full((8, 8), torch.nan)}, folder / "nan.safetensors")
    save_file(tensors | {names[0]: torch.randn(8, 5, generator=draw)}, folder / "shapes.safetensors")
    save_file({"x": torch.randn(6, 8, generator=draw)}, folder / "tokens.safetensors")
    whole = (folder / "weights.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "garbage.safetensors").write_bytes(random.Random(0).randbytes(4000))
    (folder / "garbage.gguf").write_bytes(b"GGUF" + random.Random(1).randbytes(4000))
    torch.save(tensors, folder / "weights.pt")
    np.save(folder / "tokens.npy", np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32))
    np.save(folder / "batch.npy", np.random.default_rng(0).normal(size=(2, 6, 8)))
    np.save(folder / "wide.npy", np.ones((6, 9)))
    np.save(folder / "words.npy", np.array(["a", "b"]))
    np.save(folder / "flat.npy", np.ones(3))
    (folder / "damaged.wav").write_bytes(b"RIFF\x10\0\0\0WAVEfmt ")
    (folder / "damaged.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    search = ["worst-case", "random", "--width", "8", "--heads", "2", "--over", "ball:2", "--length", "4"]
    found = CliRunner().invoke(app, [*search, "--starts", "2", "--steps", "5", "--out", str(folder / "search")])
    assert found.exit_code == 0, found.output
    (witness,) = (folder / "search").glob("*.safetensors")
    kept = witness.rename(folder / "witness.safetensors").read_bytes()
    (folder / "witness-cut.safetensors").write_bytes(kept[:-9])
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}), encoding="utf-8")


def _network(folder: Path) -> None:
    """A tiny vision transformer as `howsmooth certify --images` reads it, and images of its own classes."""
    draw = torch.Generator().manual_seed(1)
    layer, width, hidden, classes = "transformer.layers.0.", 8, 6, 3
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embedding": (1, 5, width),
        "to_patch_embedding.1": (width, 4),
        f"{layer}0.fn.norm": (width,),
        **{f"{layer}0.fn.fn.to_{name}": (width, width) for name in ("q", "k", "v", "out.0")},
        f"{layer}1.fn.norm": (width,),
        f"{layer}1.fn.fn.net.0": (hidden, width),
        f"{layer}1.fn.fn.net.3": (width, hidden),
        "mlp_head.0": (width,),
        "mlp_head.1": (classes, width),
    }
    tensors = {}
    for name, shape in shapes.items():
        bare = name in ("cls_token", "pos_embedding")
        tensors[name if bare else f"{name}.weight"] = torch.randn(*shape, generator=draw)
        if not bare and name[-1] not in "qkv":
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=draw)
    save_file(tensors, folder / "network.safetensors", {"about": "2 heads; pixels with mean 0.1 and std 0.5"})
    images = torch.rand(3, 4, 4, generator=draw)
    labels = PatchTransformer.open(folder / "network.safetensors")(images).argmax(-1)
    save_file({"images": images, "labels": labels}, folder / "images.safetensors")


def _stores(folder: Path) -> None:
    whole = (folder / "store.sqlite").read_bytes()
    (folder / "cut.sqlite").write_bytes(whole[: len(whole) // 3])
    (folder / "text.sqlite").write_text("this is no store", encoding="utf-8")
    (folder / "empty.sqlite").touch()
    damaged = bytearray(whole)
    for place in random.Random(2).sample(range(100, len(whole)), 40):
        damaged[place] ^= 0xFF
    (folder / "damaged.sqlite").write_bytes(damaged)
    (folder / "page.html").write_bytes(whole)  # a store by the name of a page
    with sqlite3.connect(folder / "other.sqlite") as other:
        other.execute("CREATE TABLE t (a)")
    other.close()


def _configurations(folder: Path) -> None:
    draw = random.Random(3)
    for number in range(CONFIGURATIONS):
        lines = [f"{key} = {draw.choice(_VALUES)}" for key in draw.sample(_KEYS, draw.randint(1, 3))]
        (folder / f"wrong{number}.toml").write_text("\n".join(lines), encoding="utf-8")
    sound = 'model = "inputs/model"\ntext = "inputs/words.txt"\nlengths = [8]\nwhat = "head"\n'
    (folder / "right.toml").write_text(sound, encoding="utf-8")
    (folder / "nested.toml").write_text("a = " + "[" * 3000 + "]" * 3000, encoding="utf-8")
    (folder / "broken.toml").write_text("lengths = [8,\nwhat", encoding="utf-8")
