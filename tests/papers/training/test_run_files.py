"""Checkpoints come back bit by bit, are never half-written, and damaged ones are refused."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from evidence.damaged_files import checkpoint_case, outcomes
from howsmooth._util.checksummed import checksummed_bytes, read_checksummed
from howsmooth._util.common import write_whole
from howsmooth.errors import InvalidInput
from howsmooth.papers.training import CharacterModel, Corpus, Intervals, TrainingSettings, train
from howsmooth.papers.training.loop import load_model
from howsmooth.papers.training.run_files import TrainingCheckpoint, TrainingStatus, run_tensors

SETTINGS = TrainingSettings(attention="contractive-2", depth=1, width=8, heads=2, length=4, batch_tokens=8, steps=30)


def trained() -> tuple[CharacterModel, torch.optim.Optimizer]:
    model = CharacterModel(SETTINGS, symbols=4)
    optimiser = torch.optim.AdamW(model.groups(0.0), fused=True)
    model(torch.tensor([[0, 1, 2, 3]])).square().sum().backward()
    optimiser.step()
    return model, optimiser


def taken() -> TrainingCheckpoint:
    model, optimiser = trained()
    return TrainingCheckpoint(7, SETTINGS, "a\n“", "digest", 1.5, [0.1 + 0.2], run_tensors(model, optimiser))


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path: Path) -> None:
    checkpoint, path = taken(), tmp_path / "c.safetensors"
    checkpoint.save(path)
    found = TrainingCheckpoint.load(path)
    assert vars(found) | {"tensors": 0} == vars(checkpoint) | {"tensors": 0}
    assert found.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in checkpoint.tensors.items())
    assert [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]


def test_restoring_brings_back_model_optimiser_and_random_numbers() -> None:
    checkpoint = taken()
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, optimiser = trained()
    checkpoint.restore(model, optimiser)
    assert torch.equal(torch.rand(3), expected)
    again = run_tensors(model, optimiser)
    names = [name for name in checkpoint.tensors if name != "random"]
    assert sum(name.startswith("optimiser.") for name in names) == 3 * sum(1 for _ in model.parameters())
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}  # the warm start of contractive layers
    assert buffers
    assert buffers <= set(names)
    assert all(torch.equal(again[name], checkpoint.tensors[name]) for name in names)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "foreign", "pickle"])
def test_a_damaged_checkpoint_is_refused_and_left_alone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c.safetensors"
    taken().save(path)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[-100] ^= 1
        path.write_bytes(content)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("not a checkpoint " * 50)
    elif damage == "foreign":
        save_file({"w": torch.ones(2)}, path)
    else:
        torch.save({"step": 7}, path)
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="damaged or no checkpoint"):
        TrainingCheckpoint.load(path)
    assert path.read_bytes() == before


def test_the_header_can_be_read_without_howsmooth(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    taken().save(path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    assert json.loads(header["__metadata__"]["howsmooth"])["step"] == 7
    assert "model.head.weight" in load_file(path)


def test_the_tensors_of_another_model_are_refused() -> None:
    other = CharacterModel(TrainingSettings(width=8, heads=2, length=4, batch_tokens=8), symbols=4)
    with pytest.raises(InvalidInput, match="another model"):
        taken().restore(other)


def test_a_missing_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no checkpoint"):
        TrainingCheckpoint.load(tmp_path / "none")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidInput, match=r"cannot write .*No space left.*--resume"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot write"):
        write_whole(tmp_path / "none" / "file", b"new")


def test_a_resumed_run_comes_to_the_numbers_that_it_always_had(tmp_path: Path) -> None:
    """The numbers were recorded by an earlier version."""
    corpus = Corpus.split("to be or not to be, that is the question " * 20)
    few = TrainingSettings(
        attention="contractive-2", depth=1, width=4, heads=2, length=4, batch_tokens=16, steps=12, warmup=2
    )

    def stop(status: TrainingStatus) -> None:
        if status.step == 5:
            raise KeyboardInterrupt

    intervals = Intervals(save=5, report=5)
    with pytest.raises(KeyboardInterrupt):
        train(corpus, few, tmp_path, intervals=intervals, progress=stop)
    assert load_model(tmp_path)[1].step == 5
    result = train(corpus, few, tmp_path, resume=True, intervals=intervals)
    assert result.train_bits == pytest.approx(3.8585456565178884, rel=1e-6)
    assert result.valid_bits == pytest.approx(4.168775873346162, rel=1e-6)
    assert result.valid_bits == pytest.approx(train(corpus, few).valid_bits, rel=1e-6)
    assert load_model(tmp_path)[1].step == 12


@pytest.mark.parametrize("entry", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize(
    "wrong", [torch.zeros(1), torch.zeros(0), torch.zeros(9, 9), torch.zeros((), dtype=torch.float64), None, "nan"]
)
def test_an_optimiser_that_does_not_fit_is_refused_before_anything_is_written(
    entry: str, wrong: torch.Tensor | str | None, tmp_path: Path
) -> None:
    """The fused optimiser of torch writes past the end of a short tensor."""
    checkpoint, path = taken(), tmp_path / "c.safetensors"
    name = f"optimiser.head.weight.{entry}"
    if wrong is None:
        del checkpoint.tensors[name]
    elif isinstance(wrong, str):
        checkpoint.tensors[name] = torch.full_like(checkpoint.tensors[name], float(wrong))
    else:
        checkpoint.tensors[name] = wrong
    checkpoint.save(path)
    torch.manual_seed(5)
    model, optimiser = trained()
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with pytest.raises(InvalidInput, match=r"optimiser"):
        TrainingCheckpoint.load(path).restore(model, optimiser)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("wrong", ["missing", "short", "dtype", "noise", "stranger", "model dtype", "infinite"])
def test_tensors_that_do_not_fit_are_refused(wrong: str) -> None:
    checkpoint = taken()
    tensors = checkpoint.tensors
    if wrong == "missing":
        del tensors["random"]
    elif wrong == "short":
        tensors["random"] = tensors["random"][:-1]
    elif wrong == "dtype":
        tensors["random"] = tensors["random"].float()
    elif wrong == "noise":
        tensors["random"] = torch.full_like(tensors["random"], 255)
    elif wrong == "stranger":
        tensors["optimiser.no.such.parameter.exp_avg"] = torch.zeros(2)
    elif wrong == "model dtype":
        tensors["model.head.weight"] = tensors["model.head.weight"].double()
    else:
        tensors["model.head.weight"][0, 0] = float("inf")
    with pytest.raises(InvalidInput, match="the checkpoint holds"):
        checkpoint.restore(*trained())


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 31},
        {"step": -1},
        {"step": "7"},
        {"step": None},
        {"seconds": -1.0},
        {"seconds": "long"},
        {"losses": [1.0] * 8},
        {"losses": ["1"]},
        {"alphabet": "aa"},
        {"alphabet": 5},
        {"settings": {}},
        {"settings": []},
        {"format": "howsmooth training checkpoint 1"},
        {"format": "howsmooth training checkpoint 3"},
        {"extra": 1},
    ],
)
@pytest.mark.parametrize("seal", [True, False])
def test_a_header_that_no_run_writes_is_refused(wrong: dict[str, object], seal: bool, tmp_path: Path) -> None:
    """With a checksum that fits, as a forger makes it, and without one."""
    path = tmp_path / "c.safetensors"
    checkpoint = taken()
    checkpoint.save(path)
    tensors, texts, _ = read_checksummed(path)
    text = {"howsmooth": json.dumps(json.loads(texts["howsmooth"]) | wrong)}
    path.write_bytes(checksummed_bytes(tensors, text) if seal else save(tensors, text))
    with pytest.raises(InvalidInput, match="damaged or no checkpoint"):
        TrainingCheckpoint.load(path)


def test_a_step_beyond_the_last_is_no_finished_run(tmp_path: Path) -> None:
    replace(taken(), step=401).save(tmp_path / "checkpoint.safetensors")
    with pytest.raises(InvalidInput, match="step 401 of 30"):
        load_model(tmp_path)


def test_changed_bytes_are_refused_or_harmless() -> None:
    found = outcomes(checkpoint_case(), trials=60)
    assert found["refused"] + found["same content"] == 60, found
    assert found["refused"] > 50


def test_links_planted_beside_a_checkpoint_are_not_followed(tmp_path: Path) -> None:
    folder, secret = tmp_path / "run", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("mine")
    path = folder / "checkpoint.safetensors"
    for name in (f".checkpoint.safetensors-{os.getpid()}", f".checkpoint.safetensors.{os.getpid()}.tmp"):
        (folder / name).symlink_to(secret)
    path.symlink_to(secret)
    taken().save(path)
    assert secret.read_text() == "mine"
    assert not path.is_symlink()
    assert TrainingCheckpoint.load(path).step == 7


@pytest.mark.parametrize(
    "wrong", [{"width": 10**20, "heads": 1}, {"depth": 10**20}, {"batch_tokens": 64 * 10**20}, {"width": 2**30}]
)
def test_a_run_that_cannot_fit_is_refused_with_an_estimate(wrong: dict[str, int]) -> None:
    corpus = Corpus.split("to be or not to be " * 50)
    with pytest.raises(InvalidInput, match=r"needs about .* GiB"):
        train(corpus, TrainingSettings(**wrong))  # type: ignore[arg-type]


def test_settings_say_in_which_format_they_are_written() -> None:
    for name in ("l2", "l2-untied"):
        settings = TrainingSettings(attention=name)  # type: ignore[arg-type]
        assert TrainingSettings.from_dict(settings.to_dict()) == settings
    for other in (1, 3, None):
        with pytest.raises(InvalidInput, match="another version"):
            TrainingSettings.from_dict(TrainingSettings().to_dict() | {"format": other})
