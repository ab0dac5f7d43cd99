"""Weight files give the attention their framework computes, and nothing in them is ever run."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.models.module_names import find_blocks
from howsmooth.models.weight_files import load_attention, load_tokens

WIDTH, HEADS, N = 16, 4, 7


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _projections() -> dict[str, Tensor]:
    names = ("query", "key", "value", "output")
    weights = {f"{name}.weight": _draw(WIDTH, WIDTH, seed=i) / 4 for i, name in enumerate(names)}
    return weights | {f"{name}.bias": _draw(WIDTH, seed=10 + i) for i, name in enumerate(names)}


def _renamed(prefix: str, *names: str) -> dict[str, Tensor]:
    new = dict(zip(("query", "key", "value", "output"), names, strict=True))
    return {prefix + new[k.split(".")[0]] + "." + k.split(".")[1]: t for k, t in _projections().items()}


def _reference(x: Tensor, causal: bool) -> Tensor:
    """Multi-head attention written head by head, independent of the package."""
    p = _projections()
    q, k, v = (x @ p[f"{name}.weight"].T + p[f"{name}.bias"] for name in ("query", "key", "value"))
    outs, size = [], WIDTH // HEADS
    for h in range(HEADS):
        part = slice(h * size, (h + 1) * size)
        scores = q[:, part] @ k[:, part].T / size**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(N, N).triu(1).bool(), float("-inf"))
        outs.append(scores.softmax(-1) @ v[:, part])
    return torch.cat(outs, -1) @ p["output.weight"].T + p["output.bias"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
@pytest.mark.parametrize(
    "names",
    [
        ("query", "key", "value", "output"),
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        ("q_proj", "k_proj", "v_proj", "out_proj"),
        ("self.query", "self.key", "self.value", "output.dense"),
        ("q_lin", "k_lin", "v_lin", "out_lin"),
    ],
)
def test_separate_projections_give_the_reference_attention(
    tmp_path: Path, names: tuple[str, ...], suffix: str, causal: bool
) -> None:
    path, tensors = tmp_path / f"w{suffix}", _renamed("layer.3.", *names)
    save_file(tensors, path) if suffix == ".safetensors" else torch.save(tensors, path)
    x = _draw(N, WIDTH, seed=99)
    found = load_attention(path, heads=HEADS, mask="causal" if causal else None)
    torch.testing.assert_close(found(x), _reference(x, causal), rtol=1e-12, atol=1e-12)


def test_conv1d_weights_have_their_heads_in_columns(tmp_path: Path) -> None:
    p = _projections()
    parts = [p[f"{name}.weight"].T for name in ("query", "key", "value")]
    fused = {
        "h.0.attn.c_attn.weight": torch.cat(parts, 1).contiguous(),
        "h.0.attn.c_attn.bias": torch.cat([p[f"{name}.bias"] for name in ("query", "key", "value")]),
        "h.0.attn.c_proj.weight": p["output.weight"].T.contiguous(),
        "h.0.attn.c_proj.bias": p["output.bias"],
        "h.0.attn.bias": torch.ones(1, 1, N, N),
        "h.0.mlp.c_proj.weight": torch.zeros(3, 3),
    }
    save_file(fused, tmp_path / "gpt2.safetensors")
    x = _draw(N, WIDTH, seed=99)
    found = load_attention(tmp_path / "gpt2.safetensors", "h.0.attn", heads=HEADS, mask="causal")
    torch.testing.assert_close(found(x), _reference(x, True), rtol=1e-12, atol=1e-12)


def test_multihead_attention_state_dict_gives_the_module(tmp_path: Path) -> None:
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64).eval()
    torch.nn.init.normal_(module.in_proj_bias, generator=torch.Generator().manual_seed(0))
    torch.save({"state_dict": module.state_dict(), "step": 3}, tmp_path / "mha.pt")
    x = _draw(1, N, WIDTH, seed=1)
    found = load_attention(tmp_path / "mha.pt", heads=HEADS)
    torch.testing.assert_close(found(x), module(x, x, x)[0].detach(), rtol=1e-12, atol=1e-12)


def test_grouped_heads_are_read_off_the_shapes(tmp_path: Path) -> None:
    tensors = _renamed("", "q_proj", "k_proj", "v_proj", "o_proj")
    for name in ("k_proj", "v_proj"):
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"][: WIDTH // 2].clone()
        tensors[f"{name}.bias"] = tensors[f"{name}.bias"][: WIDTH // 2].clone()
    save_file(tensors, tmp_path / "gqa.safetensors")
    assert load_attention(tmp_path / "gqa.safetensors", heads=HEADS).kv_heads == HEADS // 2


def test_heads_stored_in_the_metadata_are_used(tmp_path: Path) -> None:
    save_file(_projections(), tmp_path / "w.safetensors", metadata={"heads": "4"})
    assert load_attention(tmp_path / "w.safetensors").heads == 4
    with pytest.raises(hs.InvalidInput, match="at least 1, got 0"):
        load_attention(tmp_path / "w.safetensors", heads=0)


def test_bert_names_are_found_once_at_the_outer_prefix() -> None:
    names = _renamed("encoder.layer.0.attention.", "self.query", "self.key", "self.value", "output.dense")
    assert list(find_blocks(names)) == ["encoder.layer.0.attention."]


@pytest.mark.parametrize("extra", ["q_norm.weight", "sinks", "q_proj.lora_A.weight", "rotary_emb.inv_freq"])
def test_tensors_that_change_the_map_are_refused(tmp_path: Path, extra: str) -> None:
    tensors = _renamed("a.", "q_proj", "k_proj", "v_proj", "o_proj") | {f"a.{extra}": torch.ones(2)}
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(hs.UnsupportedModel, match="rotary" if "rotary" in extra else "more than plain attention"):
        load_attention(tmp_path / "w.safetensors", heads=HEADS)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    tensors = _projections() | {"key.weight": torch.ones(WIDTH, WIDTH, dtype=torch.int8)}
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(hs.UnsupportedModel, match="int8"):
        load_attention(tmp_path / "w.safetensors", heads=HEADS)


class _Payload:
    """Unpickled with code allowed, it would make a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_pickled_code_is_refused_and_not_run(tmp_path: Path, writer: str) -> None:
    victim, path = tmp_path / "made", tmp_path / "evil.pt"
    content = _projections() | {"extra": _Payload(victim)}
    if writer == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(hs.InvalidInput, match="pickled Python objects"):
        load_attention(path, heads=HEADS)
    assert not victim.exists()
    if writer == "pickle":  # the payload is live: plain unpickling does run it
        pickle.loads(path.read_bytes())
        assert victim.is_dir()


def test_an_object_array_is_refused_and_not_run(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([_Payload(tmp_path / "made")], dtype=object), allow_pickle=True)
    with pytest.raises(hs.InvalidInput, match=r"cannot be read as \.npy"):
        load_tokens(tmp_path / "x.npy")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npy"])
def test_a_damaged_file_is_a_clear_error(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x{suffix}").write_text("this is not a tensor file")
    with pytest.raises(hs.InvalidInput, match="damaged"):
        load_tokens(tmp_path / f"x{suffix}")


def test_real_gpt2_layers_are_found_and_one_must_be_chosen(shared_dir: Path) -> None:
    path = shared_dir / "weights" / "gpt2_attention_layers_0_6_11.safetensors"
    with pytest.raises(hs.InvalidInput, match=r"'h\.0\.attn\.', 'h\.11\.attn\.', 'h\.6\.attn\.'"):
        load_attention(path, heads=12)
    with pytest.raises(hs.InvalidInput, match="how many heads"):
        load_attention(path, "h.6.attn.")
    assert load_attention(path, "h.6.attn.", heads=12, mask="causal").in_features == 768


def _cyclic() -> dict[str, object]:
    content: dict[str, object] = {}
    content["again"] = content
    return content


def _deep() -> object:
    content: object = torch.ones(2)
    for _ in range(100):
        content = {"a": content}
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: {"x": torch.eye(3).to_sparse()}, "'x' in odd.pt is sparse"),
        (lambda: {"x": torch.eye(3).to_sparse_csr()}, "'x' in odd.pt is sparse"),
        (lambda: {"x": torch.empty(3, device="meta")}, "'x' in odd.pt is without data"),
        (lambda: {"x": torch.ones(1).expand(10**12)}, "'x' in odd.pt is stretched over more numbers than are stored"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "odd.pt"),
        (_cyclic, "nests dictionaries more than 32 deep, or one holds itself"),
        (_deep, "nests dictionaries more than 32 deep"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(nested|Sparse|sparse).*:UserWarning")
def test_odd_tensors_are_refused_in_one_line(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content(), tmp_path / "odd.pt")
    with pytest.raises(InvalidInput, match=message) as caught:
        load_tokens(tmp_path / "odd.pt")
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)


def test_array_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    content = (tmp_path / "x.npy").read_bytes()
    small, large = b"(2, 3), }" + b" " * 12, b"(200000000000, 3), }".ljust(21)
    assert small in content
    (tmp_path / "x.npy").write_bytes(content.replace(small, large))
    with pytest.raises(InvalidInput, match=r"cannot be read as \.npy: it is damaged"):
        load_tokens(tmp_path / "x.npy")


def test_arrays_are_read_whole(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(3, 4))
    np.save(tmp_path / "x.npy", array)
    tokens = load_tokens(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes(b"changed")
    assert torch.equal(tokens, torch.tensor(array))


@pytest.mark.slow
def test_many_blocks_are_listed_in_a_short_line_and_quickly(tmp_path: Path) -> None:
    blocks = {f"h.{i}.c_attn.weight": torch.zeros(1, 3) for i in range(20_000)}
    save_file(blocks, tmp_path / "many.safetensors")
    begun = time.monotonic()
    with pytest.raises(
        InvalidInput, match=r"holds several attention blocks: choose a prefix .* and 19976 more"
    ) as caught:
        load_attention(tmp_path / "many.safetensors", heads=1)
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - begun < 10  # it took minutes: each name was looked for in a tuple


def test_advice_of_torch_to_load_without_safety_is_not_passed_on(tmp_path: Path) -> None:
    for content in (pickle.dumps({"x": os.path.join}), b"\x80\x02garbage", b"PK\x03\x04garbage"):
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(InvalidInput) as caught:
            load_tokens(tmp_path / "x.pt")
        assert "weights_only" not in str(caught.value)
