"""What a scan takes: adapters, lists and datasets of texts, other dtypes and devices; and what it says of bad ones."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import howsmooth as hs
from evidence.scan_faults import TEXT as WORDS
from evidence.scan_faults import make_model
from howsmooth.errors import InvalidInput, MissingPackage
from howsmooth.models import open_model
from howsmooth.scans import units
from howsmooth.scans.run import scan

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 3


def tiny(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=300, n_positions=32))


def values(scanned: Any) -> list[float]:
    return [row["value"] for row in scanned.rows]


OPTIONS: dict[str, Any] = {"lengths": 6, "layers": "1", "bounds": "none", "explain": False}


def test_an_adapter_folder_is_its_base_with_the_adapter_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'howsmooth[adapters]'")
    (tmp_path / "base").mkdir()
    make_model(tmp_path / "base")
    base = AutoModel.from_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query", "value"]))
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "adapter")
    before = {name: weight.clone() for name, weight in wrapped.state_dict().items()}
    text, words = tmp_path / "base" / WORDS, AutoTokenizer.from_pretrained(tmp_path / "base")
    from_folder = scan(tmp_path / "adapter", text, **OPTIONS)
    in_memory = scan(wrapped, text, tokenizer=words, **OPTIONS)
    plain = scan(tmp_path / "base", text, **OPTIONS)
    assert any("is merged into the weights" in note for note in from_folder.notes)
    assert values(from_folder) == pytest.approx(values(in_memory), rel=1e-5)
    assert values(from_folder) != pytest.approx(values(plain), rel=1e-2)
    assert all(torch.equal(weight, before[name]) for name, weight in wrapped.state_dict().items())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"base_model_name_or_path": "no/such-place/at-all"}, "is for the model no/such-place/at-all, which cannot be"),
        ({}, "does not say which model it is for"),
    ],
)
def test_an_adapter_without_its_base_is_one_line(tmp_path: Path, config: dict[str, str], said: str) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'howsmooth[adapters]'")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(InvalidInput, match=said) as refused:
        open_model(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_lists_and_datasets_of_texts_are_read_as_one() -> None:
    model = tiny()
    texts = [TEXT, "Down the rabbit hole."]
    joined = scan(model, "\n\n".join(texts), **OPTIONS)
    assert values(scan(model, texts, **OPTIONS)) == values(joined)
    assert scan(model, texts, **OPTIONS).rows[0]["text"] == "2 given texts"
    assert values(scan(model, [{"body": text} for text in texts], column="body", **OPTIONS)) == values(joined)
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    whole = datasets.Dataset.from_dict({"text": texts})
    assert values(scan(model, whole, **OPTIONS)) == values(joined)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ([{"txt": "a"}], {}, "no column 'text': did you mean 'txt'"),
        ([{"body": "a"}], {}, "no column 'text': it has body"),
        (["a", 3], {}, "text 1 is 3"),
        ([" ", ""], {}, "texts are empty"),
        (7, {}, "is a text, the path of a file, or a list"),
        ({"a": "b"}, {}, "a dictionary is no list of texts"),
        ("a text", {"column": "body"}, "a column is chosen from a dataset"),
        (TEXT, {"device": "cuda:7"}, "the device"),
        (TEXT, {"device": "nowhere"}, "the device"),
        (TEXT, {"device": "meta"}, "nothing can be computed on the meta device"),
        (TEXT, {"dtype": "float8"}, "dtype is auto, float32"),
        (TEXT, {"device_map": "auto"}, "device_map is for weights that are loaded as they are"),
        (TEXT, {"device_map": "auto", "device": "cpu"}, "give one of them"),
    ],
)
def test_bad_input_is_one_line(text: Any, options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        scan("random:gpt2[layers=1,width=16]", text, lengths=4, **options)
    assert "\n" not in str(refused.value)


def test_dtypes_are_what_they_say() -> None:
    opened = open_model("random:gpt2[layers=2,width=16]")
    before = {name: weight.clone() for name, weight in opened.model.state_dict().items()}
    exact = scan(opened, TEXT, dtype="float64", **OPTIONS)
    plain = scan(opened, TEXT, **OPTIONS)
    coarse = scan(opened, TEXT, dtype="bfloat16", **OPTIONS)
    assert {row["dtype"] for row in exact.rows} == {"float64"}
    assert values(exact) == pytest.approx(values(plain), rel=2e-3)
    assert values(coarse) != values(plain)
    assert coarse.rows[0]["precision"] == "bfloat16 weights, computed in float32"
    assert all(torch.equal(weight, before[name]) for name, weight in opened.model.state_dict().items())
    assert opened.in_dtype("auto") is opened


def test_devices_and_dtypes_of_torch_are_taken_too() -> None:
    model = "random:gpt2[layers=2,width=16]"
    by_name = scan(model, TEXT, device="cpu", dtype="bfloat16", **OPTIONS)
    assert values(scan(model, TEXT, device=torch.device("cpu"), dtype=torch.bfloat16, **OPTIONS)) == values(by_name)
    with pytest.raises(InvalidInput, match="dtype is auto, float32"):
        scan(model, TEXT, dtype=torch.int8, **OPTIONS)


def test_bfloat16_weights_are_kept_and_computed_upon_in_float32() -> None:
    model = tiny().to(torch.bfloat16)
    twin = copy.deepcopy(model).float()
    scanned = scan(model, TEXT, dtype="auto", **OPTIONS)
    assert values(scanned) == values(scan(twin, TEXT, **OPTIONS))
    assert scanned.rows[0]["precision"] == "bfloat16 weights, computed in float32"
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_the_same_architecture_with_random_weights_is_a_model_of_its_own(tmp_path: Path) -> None:
    both = scan("random:gpt2[layers=2,width=16,seed=3]", TEXT, reference="random", out=tmp_path / "s.sqlite", **OPTIONS)
    names = {row["model"] for row in both.rows}
    assert names == {"random:gpt2[layers=2,width=16,seed=3]", "random:gpt2[layers=2,width=16,seed=3]@random"}
    alone = scan("random:gpt2[layers=2,width=16,seed=3]@random", TEXT, **OPTIONS)
    assert values(alone) == [row["value"] for row in both.rows if row["model"].endswith("@random")]
    (group,) = hs.reports.groups(both)
    assert group.reference is not None
    assert len(group.reference.rows) == len(group.rows)


def test_a_model_spread_by_a_device_map_is_gathered() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install 'howsmooth[gguf]'")
    model = tiny()
    plain = values(scan(copy.deepcopy(model), TEXT, **OPTIONS))
    spread = accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    assert values(scan(spread, TEXT, **OPTIONS)) == plain
    assert spread.hf_device_map == {"": "cpu"}


def test_a_device_map_is_handed_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'howsmooth[gguf]'")
    make_model(tmp_path)
    plain = values(scan(tmp_path, TEXT, **OPTIONS))
    given = []
    loading = PreTrainedModel.from_pretrained.__func__

    def listening(kind: Any, *args: Any, **options: Any) -> Any:
        given.append(options["device_map"])
        return loading(kind, *args, **options)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(listening))
    for device_map in ("auto", {"": "cpu"}, None):
        assert values(scan(tmp_path, TEXT, device_map=device_map, **OPTIONS)) == plain
    assert given == ["auto", {"": "cpu"}, None]


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ("nonsense", r"cannot be spread by device_map 'nonsense' \(.*but found nonsense\): name devices that are here"),
        ({"": "cuda:7"}, "cannot be spread by device_map .*cuda:7"),
    ],
)
def test_a_device_map_that_cannot_be_is_one_line(tmp_path: Path, device_map: Any, said: str) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'howsmooth[gguf]'")
    make_model(tmp_path)
    with pytest.raises(InvalidInput, match=said) as refused:
        open_model(str(tmp_path), device_map=device_map)
    assert "\n" not in str(refused.value)


def test_a_device_map_without_accelerate_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingPackage, match=r"a device_map needs the package accelerate, .*: pip install"):
        scan(tmp_path, TEXT, device_map="auto", **OPTIONS)


def test_a_model_in_memory_has_its_place(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="one in memory is where it is"):
        scan(tiny(), TEXT, device_map="auto", **OPTIONS)
    with pytest.raises(InvalidInput, match="nothing can be computed on the meta device"):
        scan(tiny(), TEXT, device="meta", **OPTIONS)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: no CUDA-capable device is detected\nframe #0"), r"cannot be brought .*detected\."),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "does not fit in the memory of the device cpu"),
    ],
)
@pytest.mark.parametrize("held", [True, False])
def test_a_device_that_is_gone_or_full_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str, held: bool
) -> None:
    model = tiny() if held else "random:gpt2[layers=1,width=16]"

    def fails(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(nn.Module, "to", fails)
    with pytest.raises(InvalidInput, match=said) as refused:
        scan(model, TEXT, device="cpu", **OPTIONS)
    assert "\n" not in str(refused.value)


def test_a_model_whose_own_device_is_gone_is_one_line() -> None:
    class Gone(GPT2LMHeadModel):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")

    model = Gone(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=300))
    with pytest.raises(InvalidInput, match=r"cannot be read where it is: CUDA error: device-side assert triggered\."):
        scan(model, TEXT, **OPTIONS)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_worker_opens_the_model_in_the_dtype_that_was_asked(tmp_path: Path, dtype: str) -> None:
    make_model(tmp_path)
    asked = open_model(str(tmp_path), dtype=dtype)
    there = units._opened(units.Origin.of(asked))
    assert there is not asked
    assert (there.sha256, there.dtype) == (asked.sha256, dtype)
    assert there.sha256 != open_model(str(tmp_path)).sha256


def test_scans_of_several_settings_are_joined_with_another(tmp_path: Path) -> None:
    store = tmp_path / "s.sqlite"
    for seed, rtol in ((0, 1e-3), (1, 1e-2)):
        scan(f"random:gpt2[layers=2,width=16,seed={seed}]", TEXT, out=store, rtol=rtol, **OPTIONS)
    other = scan("random:gpt2[layers=2,width=16,seed=2]", TEXT, rtol=1e-1, **OPTIONS)
    joined = hs.Scan.joined([hs.Scan.open(store), other])
    assert joined.settings["rtol"] == [1e-3, 1e-2, 1e-1]
    assert len(joined) == len(hs.Scan.open(store)) + len(other)
