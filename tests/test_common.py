"""What every room borrows: files, digests, modes, outputs, errors."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from howsmooth._util.common import (
    Busy,
    digest,
    distinct_files,
    evaluating,
    exclusive,
    file_digest,
    first_line,
    first_tensor,
    relative_error,
    same_file,
)
from howsmooth._util.sqlite_files import StoreError
from howsmooth.errors import InvalidInput
from howsmooth.papers.training import CharacterModel, TrainingSettings
from howsmooth.papers.training.loop import bits_per_character, locked
from howsmooth.papers.training.text_batches import TextBatch
from howsmooth.scans.scan_store import STORE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.csv"
    path.write_text("mine")
    return path


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_links_lead_to_the_same_file(file: Path, tmp_path: Path, link: object) -> None:
    link(file, tmp_path / "b.csv")  # type: ignore[operator]
    with pytest.raises(InvalidInput, match=r"--export .*b\.csv is also --text, which it would overwrite"):
        distinct_files(read=[("--text", file)], written=[("--export", tmp_path / "b.csv")])


def test_two_names_of_a_file_that_is_not_there_yet_are_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "folder")
    assert same_file(tmp_path / "folder" / "x", tmp_path / "other" / "." / "x")
    with pytest.raises(InvalidInput, match="is also --out"):
        distinct_files([], [("--out", tmp_path / "folder" / "x"), ("--export", tmp_path / "other" / "x")])


def test_a_link_that_leads_nowhere_yet_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert same_file(tmp_path / "link", tmp_path / "x")


def test_different_files_and_missing_ones_pass(file: Path, tmp_path: Path) -> None:
    distinct_files([("--text", file), ("--config", None)], [("--out", tmp_path / "s.sqlite"), ("--export", None)])


def test_a_digest_is_that_of_the_bytes_written_out() -> None:
    tensors = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor(True), "none": torch.zeros(0, 3)}
    written = b"words" + b"a torch.bool ()\n\x01" + b"b torch.float32 (1, 2)\n" + tensors["b"].numpy().tobytes()
    written += b"none torch.float32 (0, 3)\n"
    assert digest(tensors, b"words") == hashlib.sha256(written).hexdigest()


def test_a_digest_sees_tensors_that_lie_in_memory_in_another_order() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest({"a": matrix.mT}) == digest({"a": matrix.mT.contiguous()}) != digest({"a": matrix.reshape(3, 2)})
    assert digest({"a": matrix.bfloat16()}) != digest({"a": matrix.half()})


def test_the_digest_of_a_file_is_that_of_its_content(file: Path) -> None:
    assert file_digest(file) == hashlib.sha256(b"mine").hexdigest()


def test_every_part_is_in_its_own_mode_again_also_after_an_error() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Dropout().eval()).train()
    net[1].eval()
    with pytest.raises(TypeError), evaluating(net):
        net("no tensor, and nothing that dropout takes")
    assert [part.training for part in net.modules()] == [True, True, False]


def test_validating_leaves_a_frozen_part_of_a_model_frozen() -> None:
    model = CharacterModel(TrainingSettings(width=8, heads=2, depth=1, length=4), 5).train()
    model.blocks[0].eval()
    bits_per_character(model, TextBatch(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long), None))
    model.attention_bound(4)
    assert model.training
    assert not any(part.training for part in model.blocks[0].modules())


def test_the_first_tensor_may_lie_deep() -> None:
    """As in the output of a module that returns a tuple of what goes on and a pair of what it has kept."""
    first = torch.ones(2)
    assert first_tensor(((None, [first]), torch.zeros(3))) is first


def test_an_error_relative_to_nothing_is_infinite_and_that_of_nan_no_number() -> None:
    one, zero = torch.ones(3), torch.zeros(3)
    assert relative_error(one, zero) == relative_error(2 * one, one, offset=one) == math.inf
    assert relative_error(one, one, offset=one) == relative_error(zero, zero) == 0
    assert math.isnan(relative_error(one * math.nan, one))


def test_the_first_line_of_an_error_cannot_command_a_terminal() -> None:
    assert first_line(ValueError("a\x1b[2J.\nb")) == "a�[2J"
    assert first_line(ValueError(""), kind=True) == "ValueError"
    assert first_line(OSError("at /copy/x"), hidden="/copy/", kind=True) == "OSError: at x"


def test_a_lock_is_held_once_and_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.lock"
    with exclusive(path):
        assert path.read_bytes() == b""
        with pytest.raises(Busy, match="held by another process"), exclusive(path):
            pass
    assert not path.exists()
    with exclusive(path):
        pass


def test_a_lock_keeps_another_process_out_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    hold = (
        "import sys, pathlib, howsmooth._util.common as small\n"
        "with small.exclusive(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(Busy), exclusive(path):
            pass
        other.kill()
        other.wait()
        with exclusive(path):
            pass


@pytest.mark.parametrize("planted", ["link", "content", "folder"])
def test_what_is_no_lock_is_left_as_it_is(file: Path, tmp_path: Path, planted: str) -> None:
    path = tmp_path / "scan.sqlite.lock"
    if planted == "link":
        path.symlink_to(file)
    elif planted == "content":
        path.write_text("mine")
    else:
        path.mkdir()
    with pytest.raises(InvalidInput, match="is in the way"), exclusive(path):
        pass
    with pytest.raises(StoreError, match="is in the way"), STORE.only_writer(tmp_path / "scan.sqlite"):
        pass
    assert file.read_text() == "mine"
    assert path.is_dir() or path.read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="locks are the system's own there")
@pytest.mark.parametrize("missing", [errno.ENOSYS, errno.ENOLCK])
def test_without_locks_nothing_is_written_and_nothing_left(
    tmp_path: Path, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(missing, os.strerror(missing))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="its file system has no locks"), exclusive(tmp_path / "x.lock"):
        pass
    said = r"cannot write to .* \(its file system has no locks\): choose another --out"
    with pytest.raises(StoreError, match=said), STORE.only_writer(tmp_path / "scan.sqlite"):
        pass
    with pytest.raises(InvalidInput, match="its file system has no locks"), locked(tmp_path / "training"):
        pass
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_lock_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError), exclusive(tmp_path / "x.lock"):
        pass
    tmp_path.chmod(0o700)


def test_a_folder_that_is_a_file_is_one_sentence(file: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot write"), locked(file):
        pass
    with pytest.raises(StoreError, match="cannot write"), STORE.only_writer(file / "scan.sqlite"):
        pass
