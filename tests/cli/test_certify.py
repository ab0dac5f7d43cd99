"""`howsmooth certify` prints what the library proves."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import howsmooth as hs
from howsmooth.cli.source_options import unit_rms_tokens
from tests.certificates.test_robust_radius import HEADS, tensors
from tests.cli.command import Command

CERTIFY = Command("certify")
cli = import_module("howsmooth.cli.certify")
run, answer, refusal = CERTIFY.run, CERTIFY.json, CERTIFY.refusal
SMALL = ["--width", "8", "--heads", "2", "--length", "5"]


@pytest.mark.slow
def test_json_of_a_random_map_equals_the_library() -> None:
    found = answer("random", *SMALL, "--over", "around:0.01")
    seeds = found["setting"]["seeds"]
    attention, x = hs.SelfAttention.random(8, 2, seed=seeds["weights"]), unit_rms_tokens(5, 8, seeds["tokens"]).float()
    assert found["block"]["upper"] == float(hs.certify(attention, hs.sets.Around(x, 0.01)).upper)
    assert found["heads"]["lower"] == hs.certify(attention, x, per_head=True).lower.tolist()
    assert found["heads"]["radius"] == 0.01


def test_table_says_what_is_proved() -> None:
    done = run("random", *SMALL, "--what", "heads")
    assert done.exit_code == 0
    assert "upper bound (proved)" in done.stdout
    assert "cholesky" in done.stdout
    assert "head 1" in done.stdout


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    net, images = tmp_path / "net.safetensors", tmp_path / "images.safetensors"
    save_file(tensors(0), net, metadata={"architecture": "normalised by mean 0.1 and std 0.5; 2 heads x 8"})
    pictures = torch.randint(0, 256, (4, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = hs.PatchTransformer(tensors(0), HEADS, 0.1, 0.5)(pictures.double() / 255).argmax(-1)
    labels[1] = (labels[1] + 1) % 3
    save_file({"images": pictures, "labels": labels.to(torch.uint8)}, images)
    return net, images


@pytest.mark.slow
def test_images_that_are_classified_correctly_are_listed_with_radius_and_attack(files: tuple[Path, Path]) -> None:
    net, images = files
    found = answer(net, "--images", images, "--distance", 2)
    assert [row["image"] for row in found] == [0, 2, 3]
    for row in found:
        assert 0 < row["radius"] < row["attacked"]
        assert row["label"] == row["predicted"]
    table = run(net, "--images", images, "--count", 1)
    assert table.exit_code == 0
    assert "1 images classified correctly: mean certified radius" in table.stdout


def test_attack_can_be_left_out(files: tuple[Path, Path]) -> None:
    net, images = files
    (row,) = answer(net, "--images", images, "--count", 1, "--no-attack")
    assert row["attacked"] is None


@pytest.mark.slow
def test_an_interrupted_run_is_resumed(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (net, images), kept = files, tmp_path / "radii.sqlite"
    whole = answer(net, "--images", images, "--no-attack", "--out", kept)
    with closing(sqlite3.connect(kept)) as db, db:  # stopped before it wrote the last image
        db.execute("DELETE FROM items WHERE rowid = (SELECT max(rowid) FROM items)")
    done: list[int] = []
    sound = cli.certify_patches

    def counted(*args: object) -> hs.Robustness:
        done.append(1)
        return sound(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cli, "certify_patches", counted)
    again = answer(net, "--images", images, "--no-attack", "--out", kept)
    assert len(done) == 1
    assert [row["radius"] for row in again] == [row["radius"] for row in whole]
    assert "norm 2 ≠ inf" in refusal(net, "--images", images, "--distance", "inf", "--no-attack", "--out", kept)
    assert "is also SOURCE, which it would overwrite" in refusal(net, "--images", images, "--out", net)
    assert "give --images" in refusal("random", *SMALL, "--out", kept)
    (old := tmp_path / "radii.jsonl").write_text('{"network": "a"}\n')
    assert "no sound ledger" in refusal(net, "--images", images, "--out", old)
    anew = answer(net, "--images", images, "--no-attack", "--out", kept, "--no-resume")
    assert [row["radius"] for row in anew] == [row["radius"] for row in whole]
    assert len(done) == 1 + len(whole)


def test_long_work_is_said_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_LONG", 0.0)
    assert "this takes about" in run("random", *SMALL, "--what", "heads").stderr
    assert "this takes about" in run("random", *SMALL, "--what", "block").stderr


@pytest.mark.parametrize("radius", ["-1", "nan", "inf"])
def test_a_radius_that_is_no_distance_is_refused(radius: str) -> None:
    done = run("random", *SMALL, "--over", f"around:{radius}")
    assert done.exit_code == 2
    assert "names no set" in done.stderr


def test_what_cannot_be_certified_is_refused_in_one_line(files: tuple[Path, Path]) -> None:
    net, images = files
    assert "--images" in refusal("random", *SMALL, "--count", 2)
    assert "images and labels" in refusal(net, "--images", net)
    assert "how pixels are normalised" in refusal(images, "--images", images, "--heads", 2)
    assert answer("random", *SMALL, "--softcap", 2, "--over", "around:0.1")["block"]["methods"] == [
        "sum of heads: curved paths"
    ]
    assert "certify takes point" in refusal("random", *SMALL, "--over", "ball:1")
    assert "one distance" in refusal("random", *SMALL, "--over", "around:1,2")


@pytest.mark.slow
def test_a_report_gets_a_section_of_every_head(tmp_path: Path) -> None:
    done = run("random", *SMALL, "--what", "heads", "--report", path := tmp_path / "proved.html")
    assert done.exit_code == 0
    assert f"report: {path}" in done.stdout
    page = path.read_text(encoding="utf-8")
    assert page.count("<tr><td>") == 2 * 4
    assert "(1 % of the mean token norm)" in page


def test_a_report_is_about_heads_and_is_refused_before_any_work(files: tuple[Path, Path], tmp_path: Path) -> None:
    net, images = files
    assert "leave out --images" in refusal(net, "--images", images, "--report", tmp_path / "proved.html")
    (mine := tmp_path / "mine.html").write_text("mine")
    assert "no report of howsmooth" in refusal("random", *SMALL, "--report", mine)
