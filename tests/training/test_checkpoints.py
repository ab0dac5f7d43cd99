"""Checkpoints come back bit by bit, are never half-written, and damaged ones are refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from howsmooth.errors import InvalidInput
from howsmooth.small import write_whole
from howsmooth.training import CharacterModel, Checkpoint, Settings
from howsmooth.training.files import Journal

SETTINGS = Settings(attention="contractive-2", depth=1, width=8, heads=2, length=4, batch_tokens=8, steps=30)


def trained() -> tuple[CharacterModel, torch.optim.Optimizer]:
    model = CharacterModel(SETTINGS, symbols=4)
    optimiser = torch.optim.AdamW(model.groups(0.0), fused=True)
    model(torch.tensor([[0, 1, 2, 3]])).square().sum().backward()
    optimiser.step()
    return model, optimiser


def taken() -> Checkpoint:
    model, optimiser = trained()
    return Checkpoint.take(7, SETTINGS, "a\n“", "digest", 1.5, [0.1 + 0.2], model, optimiser)


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path: Path) -> None:
    checkpoint, path = taken(), tmp_path / "c.safetensors"
    checkpoint.save(path)
    found = Checkpoint.load(path)
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
    again = Checkpoint.take(7, SETTINGS, "a\n“", "digest", 1.5, [], model, optimiser)
    names = [name for name in checkpoint.tensors if name != "random"]
    assert sum(name.startswith("optimiser.") for name in names) == 3 * sum(1 for _ in model.parameters())
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}  # the warm start of contractive layers
    assert buffers
    assert buffers <= set(names)
    assert all(torch.equal(again.tensors[name], checkpoint.tensors[name]) for name in names)


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
        Checkpoint.load(path)
    assert path.read_bytes() == before


def test_the_header_can_be_read_without_howsmooth(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    taken().save(path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    assert json.loads(header["__metadata__"]["howsmooth"])["step"] == 7
    assert "model.head.weight" in load_file(path)


def test_the_tensors_of_another_model_are_refused() -> None:
    other = CharacterModel(Settings(width=8, heads=2, length=4, batch_tokens=8), symbols=4)
    with pytest.raises(InvalidInput, match="another model"):
        taken().restore(other)


def test_a_missing_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no checkpoint"):
        Checkpoint.load(tmp_path / "none")


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


def test_a_line_that_a_kill_left_unfinished_is_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    assert journal.rows() == []
    journal.add({"step": 1})
    journal.add({"step": 2})
    with journal.path.open("a") as file:
        file.write('{"step": 3, "tr')
    assert journal.rows() == [{"step": 1}, {"step": 2}]
    journal.keep(lambda row: row["step"] < 2)
    journal.add({"step": 2})
    assert journal.path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_damaged_journal_is_said(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{]\n{}\n")
    with pytest.raises(InvalidInput, match="damaged"):
        Journal(tmp_path / "rows.jsonl").rows()
