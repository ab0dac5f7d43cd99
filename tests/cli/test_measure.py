"""`howsmooth measure` prints what the library measures, and one line when it cannot."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import howsmooth as hs
from howsmooth.cli import app
from howsmooth.cli.source_options import unit_rms_tokens
from howsmooth.testing import dense_jacobian
from tests.cli.command import Command

MEASURE = Command("measure")
run, answer, refusal = MEASURE.run, MEASURE.json, MEASURE.refusal
SMALL = ["--width", "16", "--heads", "2", "--length", "12"]


def tokens(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_norm(attention: hs.SelfAttention, x: Tensor) -> float:
    """σ_max of the Jacobian that autograd writes out in float64."""
    matrix = torch.autograd.functional.jacobian(attention.in_dtype(torch.float64), x.double())
    return float(torch.linalg.matrix_norm(matrix.reshape(x.numel(), x.numel()), 2))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "layer.safetensors"
    drawn = {f"{name}_proj.weight": tokens(8, 8, seed) / 3 for seed, name in enumerate("qkvo")}
    save_file({f"layers.{i}.self_attn.{k}": (1 + i) * t for i in (0, 1) for k, t in drawn.items()}, path)
    return path


LAYER = ("--prefix", "layers.1.self_attn.", "--heads", "2")


def test_json_of_a_random_configuration_equals_the_library_and_dense_svd() -> None:
    found = answer("random", *SMALL, "--causal", "--seed", 5)
    seeds = found["setting"]["seeds"]
    attention = hs.SelfAttention.random(16, 2, seed=seeds["weights"], mask="causal")
    x = unit_rms_tokens(12, 16, seeds["tokens"]).float()
    assert found["block"]["value"] == float(hs.measure(attention, x, seed=seeds["solver"]))
    assert found["heads"]["value"] == hs.measure_heads(attention, x, seed=seeds["solver"]).value.tolist()
    assert found["block"]["value"] == pytest.approx(dense_norm(attention, x), rel=1e-5)
    assert found["setting"]["mask"] == "causal"


def test_the_three_seeds_differ() -> None:
    seeds = answer("random", *SMALL)["setting"]["seeds"]
    assert len(set(seeds.values())) == 3


@pytest.mark.parametrize("norm", ["2", "inf", "1", "fro"])
def test_every_norm_equals_the_dense_matrix(norm: str) -> None:
    found = answer("random", *SMALL, "--norm", norm, "--what", "block", "--dtype", "float64")
    seeds = found["setting"]["seeds"]
    attention = hs.SelfAttention.random(16, 2, seed=seeds["weights"], dtype=torch.float64)
    x = unit_rms_tokens(12, 16, seeds["tokens"])
    matrix = dense_jacobian(attention, x)
    order = {"2": 2, "1": 1, "inf": math.inf, "fro": "fro"}[norm]
    assert found["block"]["value"] == pytest.approx(float(torch.linalg.matrix_norm(matrix, order)), rel=1e-10)


def test_flags_win_over_a_preset() -> None:
    gpt2 = answer("random", "--like", "gpt2", "--length", 4, "--what", "block")["setting"]
    assert (gpt2["d"], gpt2["heads"], gpt2["mask"], gpt2["n"]) == (768, 12, "causal", 4)
    llama = answer("random", "--like", "llama", "--length", 3, "--width", 64, "--no-causal", "--what", "heads")[
        "setting"
    ]
    assert (llama["d"], llama["kv_heads"], llama["mask"], llama["positions"]) == (64, 8, "none", "rotary")


@pytest.mark.parametrize(
    "option", [["--causal"], ["--window", "3"], ["--rope"], ["--alibi"], ["--softcap", "0.5"], ["--qk-norm", "l2"]]
)
def test_every_option_changes_the_map(option: list[str]) -> None:
    plain, changed = answer("random", *SMALL), answer("random", *SMALL, *option)
    assert abs(plain["block"]["value"] / changed["block"]["value"] - 1) > 1e-3


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_tokens_of_every_format_give_the_same_dense_value(weights: Path, tmp_path: Path, suffix: str) -> None:
    x, path = tokens(6, 8, seed=9), tmp_path / f"x{suffix}"
    if suffix == ".npy":
        np.save(path, x.numpy())
    else:
        torch.save(x, path) if suffix == ".pt" else save_file({"hidden": x}, path)
    found = answer(weights, *LAYER, "--input", path, "--window", 2)
    drawn = [2 * tokens(8, 8, seed) / 3 for seed in range(4)]
    attention = hs.SelfAttention(*drawn, heads=2, mask=hs.SlidingWindow(2, causal=False))
    assert found["block"]["value"] == pytest.approx(dense_norm(attention, x), rel=1e-10)


def test_a_batch_gives_one_value_per_input(weights: Path, tmp_path: Path) -> None:
    x = torch.stack([tokens(5, 8, seed=1), tokens(5, 8, seed=2)])
    save_file({"a": x, "b": x + 1}, tmp_path / "x.safetensors")
    args = (weights, *LAYER, "--input", tmp_path / "x.safetensors", "--input-name", "a")
    found = answer(*args)
    drawn = [2 * tokens(8, 8, seed) / 3 for seed in range(4)]
    attention = hs.SelfAttention(*drawn, heads=2)
    assert found["block"]["value"] == pytest.approx([dense_norm(attention, item) for item in x], rel=1e-10)
    assert "input 1, head 1" in run(*args).stdout
    assert "the tensors 'a', 'b'" in refusal(*args[:-2])


@pytest.mark.slow
def test_real_gpt2_weights_equal_the_map_built_by_hand(shared_dir: Path) -> None:
    path = shared_dir / "weights" / "gpt2_attention_layers_0_6_11.safetensors"
    found = answer(path, "--prefix", "h.6.attn.", "--heads", 12, "--causal", "--length", 32)
    raw = load_file(path)
    query, key, value = raw["h.6.attn.c_attn.weight"].T.chunk(3)
    b_query, b_key, b_value = raw["h.6.attn.c_attn.bias"].chunk(3)
    attention = hs.SelfAttention(
        query,
        key,
        value,
        raw["h.6.attn.c_proj.weight"].T,
        heads=12,
        query_bias=b_query,
        key_bias=b_key,
        value_bias=b_value,
        mask="causal",
    )
    seeds = found["setting"]["seeds"]
    x = unit_rms_tokens(32, 768, seeds["tokens"]).float()
    assert found["block"]["value"] == float(hs.measure(attention, x, seed=seeds["solver"]))
    assert found["heads"]["value"] == hs.measure_heads(attention, x, seed=seeds["solver"]).value.tolist()
    assert found["block"]["lower"] <= found["block"]["value"] <= found["block"]["upper"]
    assert "random tokens of unit RMS" in found["setting"]["input"]


def test_the_table_says_what_every_number_is() -> None:
    out = run("random", *SMALL, "--length", 40, "--explain", "-k", 2).stdout
    for part in ("n = 40", "d = 16", "2 heads", "mask none", "float32", "seed 0", "(estimate)", "lower bound"):
        assert part in out
    for part in (
        "≥",
        "≤",
        "with probability 99 %, rounding modelled",
        "value path, score path (estimates)",
        "value share",
        "sink",
        "next singular values",
    ):
        assert part in out


def test_explanation_in_json_equals_the_library() -> None:
    found = answer("random", *SMALL, "--explain", "--what", "heads")
    seeds = found["setting"]["seeds"]
    attention = hs.SelfAttention.random(16, 2, seed=seeds["weights"])
    story = hs.explain(attention, unit_rms_tokens(12, 16, seeds["tokens"]).float(), per_head=True, seed=seeds["solver"])
    assert found["explanation"]["heads"]["value_path"]["value"] == story.value_path.value.tolist()
    assert found["explanation"]["heads"]["sink_token"] == story.sink_token.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["attention,head", "attention"])
def test_a_figure_is_written(tmp_path: Path, what: str) -> None:
    found = answer("random", *SMALL, "--what", what, "--figure", tmp_path / "f.png")
    assert found["figure"] == str(tmp_path / "f.png")
    assert imread(tmp_path / "f.png").std() > 0.05


def test_what_did_not_converge_exits_with_one_and_says_no() -> None:
    result = run("random", "--width", 32, "--heads", 2, "--length", 64, "--rtol", "1e-9", "--what", "block")
    assert result.exit_code == 1
    assert " no " in result.stdout


def test_wrong_requests_are_one_line(weights: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.zeros((4, 9)))
    np.save(tmp_path / "ids.npy", np.arange(8).reshape(1, 8))
    np.save(tmp_path / "flat.npy", np.zeros(8))
    broken = load_file(weights)
    broken["layers.1.self_attn.k_proj.weight"][2, 3] = float("nan")
    save_file(broken, tmp_path / "nan.safetensors")
    assert "no file" in refusal(tmp_path / "missing.safetensors")
    assert "neither" in refusal("gpt5")
    assert "'layers.0.self_attn.', 'layers.1.self_attn.'" in refusal(weights, "--heads", 2)
    assert "'layers.7.'" in refusal(weights, "--heads", 2, "--prefix", "layers.7.")
    assert "how many heads" in refusal(weights, *LAYER[:2])
    assert "do not split into 3 heads" in refusal(weights, *LAYER[:3], 3)
    assert "9 wide" in refusal(weights, *LAYER, "--input", tmp_path / "wide.npy")
    assert "int64" in refusal(weights, *LAYER, "--input", tmp_path / "ids.npy")
    assert "shape (8,)" in refusal(weights, *LAYER, "--input", tmp_path / "flat.npy")
    assert "NaN" in refusal(tmp_path / "nan.safetensors", *LAYER)
    assert "--no-such-option" in refusal("random", "--no-such-option")
    assert "--norm" in refusal("random", "--norm", "3")
    assert "'red'" in refusal("random", "--like", "red")
    assert "neither" in refusal("random[width=8]")
    assert "'random:nosuch' is neither" in refusal("random:nosuch")
    assert "'--width'" in refusal("random", "--width", "wide")
    assert "--like" in refusal(weights, *LAYER, "--like", "gpt2")
    assert "--what is attention, head" in refusal("random", "--what", "layer")
    assert "--length is one number" in refusal("random", "--length", "4,8")
    assert "memory" in refusal("random", "--memory", "lots")
    assert "picture" in refusal("random", "--figure", tmp_path / "f.docx")
    assert "rtol" in refusal("random", "--rtol", "0", "--length", 300)
    assert "k, start and stop_at" in refusal("random", "-k", 2, "--norm", "fro")
    assert "positive, got -5" in refusal("random", "--rope-base", "-5")
    assert "--explain" in refusal("random", "--explain", "--norm", "1")
    assert "--width" in refusal(weights, *LAYER, "--width", 8)
    assert "--prefix" in refusal("random", "--prefix", "h.0.")


class _Payload:
    def __init__(self, folder: str):
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


def test_pickled_code_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"q_proj.weight": _Payload(str(tmp_path / "made"))}, tmp_path / "evil.pt")
    assert "pickled Python objects" in refusal(tmp_path / "evil.pt", "--heads", 2)
    assert "pickled Python objects" in refusal("random", "--input", tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def test_debug_adds_the_traceback() -> None:
    assert "Traceback" not in run("random:nosuch").stderr
    assert "Traceback" in run("random:nosuch", "--debug").stderr


def _process(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "howsmooth", *args], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_module_prints_nothing_but_json() -> None:
    done = _process("measure", "random", "--width", "8", "--heads", "2", "--length", "5", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["setting"]["n"] == 5


@pytest.mark.slow
def test_the_module_refuses_in_one_line() -> None:
    done = _process("measure", "nothing-here.pt")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_help_and_version_of_the_app() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).stdout == f"howsmooth {hs.__version__}\n"
    for command in ([], ["measure"], ["demo"]):
        result = runner.invoke(app, [*command, "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.stdout
    assert "Examples" in runner.invoke(app, ["measure", "--help"]).stdout


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.slow
@pytest.mark.usefixtures("usual_signals")
def test_interruption_is_one_line_and_130() -> None:
    """SIGINT reaches a real process half a second into work that takes minutes."""
    script = (
        "import os, signal, sys, threading\n"
        "from howsmooth.cli import main\n"
        "sys.argv[1:] = 'measure random --width 512 --heads 8 --length 8192 --rtol 1e-6'.split()\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "howsmooth: interrupted\n")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("random", "--width", 0), "--width"),
        (("random", "--heads", 0), "--heads"),
        (("random", "--kv-heads", -1), "--kv-heads"),
        (("random", "--width", 99_999_999_999_999_999_999), "lower --width"),
        (("random", "--width", "9" * 6000), "--width"),
        (("random", "--heads", 3), "a width of 64 does not split into 3 heads"),
        (("random", "--scale", "nan"), "--scale is a finite number, got nan"),
        (("random", "--softcap", "inf"), "--softcap is a finite number"),
        (("a" * 5000,), "is neither a weights file"),
    ],
)
def test_impossible_sizes_are_one_clear_line(args: tuple[object, ...], said: str) -> None:
    assert said in refusal(*args)
