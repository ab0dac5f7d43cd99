"""Witnesses survive the disk: written whole or not at all, read back as they were, and nothing else is read."""

from __future__ import annotations

import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

import howsmooth as hs
from evidence.damaged_files import outcomes, witness_case
from howsmooth._util.checksummed import checksummed_bytes, read_checksummed
from howsmooth._util.common import write_whole
from howsmooth.errors import InvalidInput
from howsmooth.search import Witness, worst_case
from howsmooth.sets import Tokens

FIRST_FORMAT = Path(__file__).parent / "data" / "witness-1.safetensors"
HEAD = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))


@pytest.fixture(scope="module")
def witness() -> Witness:
    return worst_case(HEAD, 4, over=hs.sets.Ball(1.5), starts=2, steps=5)


@pytest.mark.parametrize("norm", [2, math.inf])
def test_what_is_saved_is_read_back(norm: float, tmp_path: Path) -> None:
    before = worst_case(HEAD, 4, over=hs.sets.Ball(1.5), starts=2, steps=5, norm=norm)
    before.source["model"] = "random"
    before.save(tmp_path / "w.safetensors")
    after = Witness.load(tmp_path / "w.safetensors")
    assert torch.equal(after.x, before.x)
    assert after.x.dtype == torch.float64
    for name in ("value", "norm", "head", "over", "start", "history", "seed", "steps", "seconds", "stopped", "source"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.ids is None
    assert repr(after.measurement) == repr(replace(before.measurement, scale=None))  # files do not hold f(X)
    assert float(after.measurement.upper) == float(before.measurement.upper)
    if norm == 2:
        assert after.measurement.right is not None
        assert before.measurement.right is not None
        assert torch.equal(after.measurement.right, before.measurement.right)
    assert float(hs.measure(HEAD, after.x, norm=norm)) == before.value


def test_token_ids_are_kept(tmp_path: Path) -> None:
    matrix = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    before = worst_case(HEAD, 3, over=Tokens(matrix), starts=1, steps=2)
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
    save_file({"over": torch.zeros(2, 2)}, path)
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


def test_a_witness_of_the_first_format_still_opens() -> None:
    """Written by the version before, which found the number below."""
    found = Witness.load(FIRST_FORMAT)
    assert found.value == 3.5654473449249044
    assert found.source["source"] == "random[width=4,heads=2]"
    assert float(hs.measure(hs.SelfAttention.random(4, 2), found.x)) == pytest.approx(found.value, rel=1e-9)


WRONG: list[dict[str, object]] = [
    {"value": None},
    {"value": "x"},
    {"value": -1.0},
    {"seed": 1e30},
    {"seed": "x"},
    {"steps": -1},
    {"seconds": "long"},
    {"stopped": "never"},
    {"head": "first"},
    {"start": 5},
    {"over": []},
    {"source": 5},
    {"norm": 3},
    {"norm": [2]},
    {"measurement": {}},
    {"measurement": 5},
    {"extra": 1},
]
WRONG_MEASUREMENTS: list[dict[str, object]] = [
    {"dtype": "nn"},
    {"dtype": "load"},
    {"dtype": 5},
    {"value": None},
    {"lower": 1e300},
    {"values": "x"},
    {"values": []},
    {"notes": [5]},
    {"confidence": 2},
    {"converged": "yes"},
    {"products": 1.5},
    {"norm": "inf"},
]


@pytest.mark.parametrize("seal", [True, False])
@pytest.mark.parametrize("wrong", [*WRONG, *({"measurement": part} for part in WRONG_MEASUREMENTS)], ids=str)
def test_a_story_of_wrong_kinds_is_refused(
    wrong: dict[str, object], seal: bool, witness: Witness, tmp_path: Path
) -> None:
    """With a seal that fits, as a forger makes it, and in the first format, which had none."""
    path = tmp_path / "w.safetensors"
    witness.save(path)
    tensors, texts, _ = read_checksummed(path)
    story = json.loads(texts["witness"])
    for name, value in wrong.items():
        both = name == "measurement" and isinstance(value, dict) and value
        story[name] = story[name] | value if both else value  # type: ignore[operator]
    texts |= {"witness": json.dumps(story)} | ({} if seal else {"format": "howsmooth witness 1"})
    path.write_bytes(checksummed_bytes(tensors, texts) if seal else save(tensors, texts))
    with pytest.raises(InvalidInput, match="another version"):
        Witness.load(path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("x", torch.tensor(1.0)),
        ("x", torch.zeros(0, 2)),
        ("x", torch.full((4, 2), math.nan)),
        ("x", torch.zeros(4, 2, dtype=torch.int64)),
        ("history", torch.zeros(2, 2, dtype=torch.float64)),
        ("ids", torch.zeros(3)),
        ("ids", torch.full((4,), -1)),
        ("left", torch.full((4, 2), math.inf)),
        ("stranger", torch.zeros(1)),
    ],
)
def test_tensors_of_wrong_kinds_are_refused(name: str, tensor: torch.Tensor, witness: Witness, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    witness.save(path)
    tensors, texts, _ = read_checksummed(path)
    path.write_bytes(checksummed_bytes(tensors | {name: tensor}, texts))
    with pytest.raises(InvalidInput, match="another version"):
        Witness.load(path)


@pytest.mark.parametrize("story", ["[" * 100_000, '{"a":' * 100_000, "5", "NaN", '{"value": NaN}'])
def test_a_story_without_a_bottom_or_a_number_is_refused(story: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = {"x": torch.zeros(2, 2), "history": torch.zeros(1)}
    path.write_bytes(checksummed_bytes(tensors, {"format": "howsmooth witness 2", "witness": story}))
    with pytest.raises(InvalidInput, match="another version"):
        Witness.load(path)


def test_changed_bytes_are_refused_or_harmless() -> None:
    found = outcomes(witness_case(), trials=60)
    assert found["refused"] + found["same content"] == 60, found
    assert found["refused"] > 50


def test_links_planted_beside_a_witness_are_not_followed(witness: Witness, tmp_path: Path) -> None:
    folder, secret = tmp_path / "out", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("mine")
    path = folder / "w.safetensors"
    for name in (f".w.safetensors-{os.getpid()}", f".w.safetensors.{os.getpid()}.tmp"):
        (folder / name).symlink_to(secret)
    path.symlink_to(secret)
    witness.save(path)
    assert secret.read_text() == "mine"
    assert not path.is_symlink()
    assert Witness.load(path).value == witness.value


def test_a_source_that_no_file_can_hold_is_refused_before_the_search(tmp_path: Path) -> None:
    for source in ({"a": torch.ones(2)}, {"a": math.nan}, 5):
        with pytest.raises(InvalidInput, match="source"):
            worst_case(HEAD, 4, over=hs.sets.Ball(1.0), starts=1, steps=1, source=source, save=tmp_path / "w")  # type: ignore[arg-type]
