"""Weights and configurations that are not the model's: each is refused or repaired, and never made up."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import capture, open_model
from tests.cli.command import Command
from tests.models.tiny import TINY

Tensors = dict[str, Tensor]
INPUTS = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}
QUERY = "h.0.attn.c_attn.weight"


def saved(folder: Path, kind: str = "gpt2") -> Any:
    model = TINY[kind].build().float()
    model.save_pretrained(folder)
    return model


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone().contiguous() for name, tensor in change(load_file(path)).items()}
    save_file(tensors, path, {"format": "pt"})


def configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def foreign_prefix(tensors: Tensors) -> Tensors:
    return {f"foo.{name}": tensor for name, tensor in tensors.items()}


def one_tensor(tensors: Tensors) -> Tensors:
    return {QUERY: tensors[QUERY]}


def without_one(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != QUERY}


def renamed_layer(tensors: Tensors) -> Tensors:
    return {name.replace("h.1.", "h.7."): tensor for name, tensor in tensors.items()}


def transposed(tensors: Tensors) -> Tensors:
    return tensors | {QUERY: tensors[QUERY].T}


def compiled(tensors: Tensors) -> Tensors:
    return {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}


def parallel(tensors: Tensors) -> Tensors:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def both_and_nested(tensors: Tensors) -> Tensors:
    return {f"module._orig_mod.{name.replace('.attn.', '._orig_mod.attn.')}": t for name, t in tensors.items()}


def with_base_prefix(tensors: Tensors) -> Tensors:
    return {f"_orig_mod.transformer.{name}": tensor for name, tensor in tensors.items()}


def inside_base_prefix(tensors: Tensors) -> Tensors:
    return {f"transformer._orig_mod.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            foreign_prefix,
            r"of 28 tensors 28 are missing, first .* and 25 more, while 26 of the file fit nowhere, first foo",
        ),
        (one_tensor, r"of 28 tensors 27 are missing"),
        (without_one, r"of 28 tensors 1 are missing, first h\.0\.attn\.c_attn\.weight: give the weights"),
        (renamed_layer, r"of 28 tensors 12 are missing, first h\.1\.attn.*11 of the file fit nowhere, first h\.7"),
        (transposed, r"of 28 tensors 1 have another shape, first h\.0\.attn\.c_attn\.weight"),
    ],
)
def test_weights_of_another_model_are_refused(
    change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(InvalidInput, match=message) as caught:
        open_model(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [compiled, parallel, both_and_nested, with_base_prefix, inside_base_prefix])
def test_names_of_wrappers_are_repaired_and_said(change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    model = saved(tmp_path)
    plain = open_model(str(tmp_path))
    rewrite(tmp_path, change)
    first, second = open_model(str(tmp_path)), open_model(str(tmp_path))
    assert plain.notes == ()
    assert any("was taken out of the names of 28 weights" in note for note in first.notes)
    assert first.sha256 == second.sha256 == plain.sha256
    assert torch.equal(first.model.h[1].attn.c_attn.weight, model.h[1].attn.c_attn.weight)


def test_a_name_with_and_without_wrapper_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {f"module.{QUERY}": tensors[QUERY]})
    with pytest.raises(InvalidInput, match=r"hold 'h\.0\.attn\.c_attn\.weight' twice"):
        open_model(str(tmp_path))


def test_missing_pooler_is_said_and_the_model_is_the_same_each_time(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("pooler.")})
    state = torch.get_rng_state()
    first, second = open_model(str(tmp_path)), open_model(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.sha256 == second.sha256
    assert first.notes == (
        "2 weights that nothing measured uses are not in the file (pooler.dense.bias, pooler.dense.weight)",
    )


def test_a_head_in_the_file_is_said_and_a_missing_one_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(TINY["bert"].build().config)
    model.save_pretrained(tmp_path / "with")
    assert "5 tensors of the file are not used" in "".join(open_model(str(tmp_path / "with")).notes)
    assert open_model(str(tmp_path / "with"), head=True).notes == ()
    saved(tmp_path / "without", "bert")
    configure(tmp_path / "without", architectures=["BertForMaskedLM"])
    with pytest.raises(InvalidInput, match=r"6 are missing, first cls\.predictions"):
        open_model(str(tmp_path / "without"), head=True)


def test_missing_decoder_does_not_matter_to_an_encoder(tmp_path: Path) -> None:
    model = transformers.T5Model(transformers.T5Config(**TINY["t5"].options, decoder_start_token_id=0))
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("decoder.")})
    first, second = open_model(str(tmp_path)), open_model(str(tmp_path))
    assert first.sha256 == second.sha256
    assert torch.equal(first.model.final_layer_norm.weight, model.encoder.final_layer_norm.weight)


def test_biases_that_the_configuration_denies_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    configure(tmp_path, attention_bias=False)
    with pytest.raises(
        InvalidInput, match=r"8 tensors of layers that have no place for them, first layers\.0\.self_attn"
    ):
        open_model(str(tmp_path))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {QUERY: torch.full_like(tensors[QUERY], float("nan"))})
    with pytest.raises(InvalidInput, match=r"the weight h\.0\.attn\.c_attn\.weight holds NaN or infinity"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("kind", ["l2", "cosine"])
def test_models_with_layers_of_howsmooth_open_as_what_they_are(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(TINY["gpt2"].build().config).eval()
    hs.nn.replace_attention(model, kind).save_pretrained(tmp_path)
    first, second = open_model(str(tmp_path)), open_model(str(tmp_path))
    assert first.sha256 == second.sha256
    with torch.no_grad():
        expected = model.transformer(**INPUTS).last_hidden_state
        assert torch.equal(first.model(**INPUTS).last_hidden_state, expected)
        logits = open_model(str(tmp_path), head=True).model(**INPUTS).logits
        assert torch.equal(logits, model(**INPUTS).logits)
    rewrite(tmp_path, lambda tensors: dict(list(tensors.items())[1:]))
    with pytest.raises(InvalidInput, match="do not fit the model"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "said", "label"),
    [
        (torch.bfloat16, None, "bfloat16 weights, computed in float32"),
        (torch.float16, "float32", "float16 weights, computed in float32"),
        (torch.float32, "uint8", "float32"),
        (torch.float64, "float32", "float64 weights, computed in float32"),
    ],
)
def test_precision_is_that_of_the_tensors(dtype: torch.dtype, said: str | None, label: str, tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    configure(tmp_path, dtype=said)
    assert open_model(str(tmp_path)).precision == label


def test_precision_names_all_kinds_of_tensors(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {QUERY: tensors[QUERY].bfloat16()})
    assert open_model(str(tmp_path)).precision == "float32 and bfloat16 weights, computed in float32"


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {QUERY: (10 * tensors[QUERY]).to(torch.int8)})
    with pytest.raises(UnsupportedModel, match=r"c_attn\.weight is stored as int8: quantised weights"):
        open_model(str(tmp_path))


def test_implementation_named_in_the_file_does_not_win(tmp_path: Path) -> None:
    saved(tmp_path)
    plain = open_model(str(tmp_path)).sha256
    configure(tmp_path, _attn_implementation="org/kernel", attn_implementation="org/kernel")
    opened = open_model(str(tmp_path))
    assert opened.model.config._attn_implementation == "eager"
    assert opened.sha256 == plain
    assert len(capture(opened.model, INPUTS)) == 2


def test_index_may_name_neither_pickles_nor_files_elsewhere(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "decoy.safetensors")
    torch.save(model.state_dict(), tmp_path / "model" / "x.bin")
    os.link(tmp_path / "model" / "decoy.safetensors", tmp_path / "private.safetensors")
    for name in (
        "x.bin",
        "../private.safetensors",
        str(tmp_path / "private.safetensors"),
        "..\\private.safetensors",
        5,
    ):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), name)}))
        with pytest.raises(InvalidInput, match="but weights are read only from safetensors files beside it"):
            open_model(str(tmp_path / "model"))
    for content in ("", "[]", '{"weight_map": 3}', "[" * 100_000, '{"weight_map": {}}', '{"weight_map": {"a": {}}}'):
        index.write_text(content)
        with pytest.raises(InvalidInput, match="is damaged"):
            open_model(str(tmp_path / "model"))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), "decoy.safetensors")}))
    assert torch.equal(open_model(str(tmp_path / "model")).model.h[0].attn.c_attn.weight, model.h[0].attn.c_attn.weight)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), "gone.safetensors")}))
    with pytest.raises(InvalidInput, match=r"1 of the 1 files that its index names are missing, first 'gone"):
        open_model(str(tmp_path / "model"))


def test_other_weights_named_in_the_configuration_are_not_read(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    saved(tmp_path / "other", "bert")
    configure(tmp_path / "model", transformers_weights="../other/model.safetensors")
    opened = open_model(str(tmp_path / "model"))
    assert torch.equal(opened.model.h[0].attn.c_attn.weight, model.h[0].attn.c_attn.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_layer": 10**9}, r"sets n_layer to 1e\+09, but the weights are 28 tensors"),
        ({"n_layer": 1e300}, r"sets n_layer to 1e\+300"),
        ({"num_labels": 10**9}, r"sets num_labels to 1e\+09"),
        ({"n_embd": 4 * 10**6}, r"describes a model of .* numbers, but the weights hold"),
        ({"vocab_size": 10**12}, r"describes a model of .* numbers, but the weights hold"),
        ({"n_layer": 3}, r"of 40 tensors 12 are missing"),
        ({"n_layer": "two"}, "cannot load the model"),
    ],
)
def test_absurd_configurations_are_refused_at_once(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    configure(tmp_path, **settings)
    begun = time.monotonic()
    with pytest.raises(InvalidInput, match=message) as caught:
        open_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 20  # they took minutes, or all memory


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "[" * 100_000, '{"model_type": []}', '{"model_type": "gpt2\\u001b[2J"}']
)
def test_damaged_configurations_are_refused_in_one_line(content: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidInput) as caught:
        open_model(str(tmp_path))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("most", ["x", None, -5, [], 1e400])
def test_tokenizers_with_an_odd_longest_text_are_opened_or_refused(most: Any, tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "alice"]))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": most}))
    if most is None or most == 1e400:
        assert open_model(str(tmp_path)).limit == 512
    else:
        with pytest.raises(InvalidInput, match="longest text of its tokenizer"):
            open_model(str(tmp_path))


def test_nothing_but_a_string_names_a_model() -> None:
    for spec in (None, 5, Path("minilm")):
        with pytest.raises(InvalidInput, match="spec must be a text"):
            open_model(spec)  # type: ignore[arg-type]


def gguf_file(path: Path, without: str = "") -> None:
    """A Llama of one layer with a tokenizer of bytes, in float32."""
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(0)
    words = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(26))]
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([2, 3, 3, *[1] * 26])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    square, wide = (32, 32), (48, 32)
    shapes = {f"blk.0.attn_{part}.weight": square for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}.weight": wide for part in ("gate", "up")} | {"blk.0.ffn_down.weight": wide[::-1]}
    shapes |= {f"{name}.weight": (32,) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    shapes |= {f"{name}.weight": (len(words), 32) for name in ("token_embd", "output")}
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(name, torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOWSMOOTH_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("_own_cache")
def test_code_beside_a_gguf_file_is_not_run_even_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gguf_file(tmp_path / "m.gguf")
    mark = tmp_path / "ran.txt"
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).write_text('ran')\nclass T: pass\n")
    auto = {"AutoTokenizer": ["evil.T", "evil.T"], "AutoConfig": "evil.T", "AutoModelForCausalLM": "evil.T"}
    for name in ("tokenizer_config", "config"):
        content = {"auto_map": auto, "tokenizer_class": "T", "model_type": "evil"}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))
    opened = open_model(str(tmp_path / "m.gguf"))
    assert not mark.exists()
    assert "custom code" not in "".join(capfd.readouterr())
    assert (opened.model.config.model_type, opened.precision) == ("llama", "F32 (GGUF), computed in float32")
    assert len(capture(opened.model, INPUTS)) == 1
    assert open_model(str(tmp_path / "m.gguf")).sha256 == opened.sha256


@pytest.mark.usefixtures("_own_cache")
def test_gguf_file_without_a_weight_is_refused(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", without="blk.0.attn_k.weight")
    with pytest.raises(InvalidInput, match=r"1 are missing, first model\.layers\.0\.self_attn\.k_proj\.weight"):
        open_model(str(tmp_path / "m.gguf"))
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.usefixtures("_own_cache")
def test_a_damaged_gguf_file_is_named_without_the_place_of_its_copy(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes([245, 124, 101, 34]) * 1000)
    with pytest.raises(InvalidInput, match=r"^m\.gguf cannot be read as a GGUF model: ") as refused:
        open_model(str(tmp_path / "m.gguf"))
    assert str(tmp_path) not in str(refused.value)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("shards", [1, 2])
def test_models_of_the_hub_are_read_from_its_cache(
    shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, commit = tmp_path / "models--some--thing", "0" * 40
    model = TINY["gpt2"].build().float()
    model.save_pretrained(repository / "snapshots" / commit, max_shard_size="1GB" if shards == 1 else "40KB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    opened = open_model("some/thing")
    assert torch.equal(opened.model.h[1].attn.c_attn.weight, model.h[1].attn.c_attn.weight)
    assert len(list((repository / "snapshots" / commit).glob("*.safetensors"))) >= shards


def test_commands_say_what_was_repaired(tmp_path: Path) -> None:
    saved(tmp_path / "model", "bert")
    letters = [chr(97 + i) for i in range(26)]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    rewrite(tmp_path / "model", compiled)
    (tmp_path / "text.txt").write_text("a b c d e f g h i j k l")
    text = ["--text", str(tmp_path / "text.txt")]
    said = "'_orig_mod' was taken out of the names of"
    scanned = Command("scan").run(str(tmp_path / "model"), *text, "--length", 8, "--out", tmp_path / "s.sqlite")
    assert f"note: {said}" in scanned.stderr
    measured = Command("measure").run(str(tmp_path / "model"), *text, "--length", 8, "--what", "block")
    assert f"note: {said}" in " ".join(measured.stdout.split())
