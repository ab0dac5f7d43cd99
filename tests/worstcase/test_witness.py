"""Witnesses survive the disk: written whole or not at all, read back as they were, and nothing else is read."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.small import write_whole
from howsmooth.worstcase import Embeddings, Witness, worst_case

HEAD = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))


@pytest.fixture(scope="module")
def witness() -> Witness:
    return worst_case(HEAD, 4, radius=1.5, starts=2, steps=5)


@pytest.mark.parametrize("norm", [2, math.inf])
def test_what_is_saved_is_read_back(norm: float, tmp_path: Path) -> None:
    before = worst_case(HEAD, 4, radius=1.5, starts=2, steps=5, norm=norm)
    before.source["model"] = "random"
    before.save(tmp_path / "w.safetensors")
    after = Witness.load(tmp_path / "w.safetensors")
    assert torch.equal(after.x, before.x)
    assert after.x.dtype == torch.float64
    for name in ("value", "norm", "head", "over", "start", "history", "seed", "steps", "seconds", "stopped", "source"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.ids is None
    assert repr(after.measurement) == repr(before.measurement)
    assert float(after.measurement.upper) == float(before.measurement.upper)
    if norm == 2:
        assert after.measurement.right is not None
        assert before.measurement.right is not None
        assert torch.equal(after.measurement.right, before.measurement.right)
    assert float(hs.measure(HEAD, after.x, norm=norm)) == before.value


def test_token_ids_are_kept(tmp_path: Path) -> None:
    matrix = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    before = worst_case(HEAD, 3, over=Embeddings(matrix), starts=1, steps=2)
    before.save(tmp_path / "w.safetensors")
    after = Witness.load(tmp_path / "w.safetensors")
    assert before.ids is not None
    assert after.ids is not None
    assert torch.equal(after.ids, before.ids)


def test_a_witness_speaks_for_itself(witness: Witness) -> None:
    assert "‖J‖₂ = " in repr(witness)
    assert "4 × 2" in repr(witness)


def test_an_existing_file_stays_whole_when_the_space_runs_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(InvalidInput, match=r"cannot write .*File too large"):
            write_whole(path, bytes(10**6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left behind"


def test_a_folder_that_cannot_be_written_to_is_one_clear_error(witness: Witness, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot write"):
        witness.save(tmp_path / "missing" / "w.safetensors")
    with pytest.raises(InvalidInput, match="cannot write"):
        witness.save(tmp_path)  # a folder


def test_files_that_are_no_witness_are_refused(witness: Witness, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no file"):
        Witness.load(tmp_path / "missing.safetensors")
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"no safetensors at all")
    with pytest.raises(InvalidInput, match="damaged"):
        Witness.load(path)
    path.write_bytes(b"")
    with pytest.raises(InvalidInput, match="damaged"):
        Witness.load(path)
    save_file({"x": torch.zeros(2, 2)}, path)
    with pytest.raises(InvalidInput, match="no witness"):
        Witness.load(path)
    witness.save(path)
    whole = path.read_bytes()
    for share in (0.1, 0.5, 0.95):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(InvalidInput, match="damaged"):
            Witness.load(path)


@pytest.mark.parametrize("story", ["{}", "not json", json.dumps({"norm": 2, "measurement": None})])
def test_files_changed_by_hand_are_refused(story: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = {"x": torch.zeros(2, 2), "history": torch.zeros(1)}
    save_file(tensors, path, {"format": "howsmooth witness 1", "witness": story})
    with pytest.raises(InvalidInput, match="another version"):
        Witness.load(path)
