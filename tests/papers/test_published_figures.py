"""The figures that are known from elsewhere, met by the experiments: exponents, √n, and the tightness of Lip_∞."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest
import torch
from torch.func import jacrev

import howsmooth as hs
from howsmooth.papers import EXPERIMENTS, ExperimentOptions, Verdict, released_scripts
from howsmooth.papers.experiment_inputs import RANDOM_GPT2
from howsmooth.papers.l2_theorems import KNOWN_ASCENTS
from howsmooth.papers.released_scripts import exponents, quantities


def test_both_quantities_equal_those_of_the_dense_jacobian() -> None:
    attention = hs.SelfAttention.random(6, heads=2, mask="causal").in_dtype(torch.float64)
    x = torch.randn(5, 6, dtype=torch.float64)
    j = jacrev(attention)(x).reshape(30, 30)
    found = quantities(attention, x)
    assert found["sigma"] == pytest.approx(float(torch.linalg.matrix_norm(j, 2)), rel=1e-3)
    assert found["released"] == pytest.approx(float((j.T @ attention(x).flatten()).norm().sqrt()), rel=1e-9)


def test_dropout_keeps_the_mean_and_one_draw_is_a_map() -> None:
    attention = hs.SelfAttention.random(8, heads=2, mask="causal")
    x = torch.randn(6, 8)
    dropped = [released_scripts.with_dropout(attention, seed)(x) for seed in range(400)]
    assert torch.equal(dropped[0], released_scripts.with_dropout(attention, 0)(x))
    assert not torch.allclose(dropped[0], attention(x))
    assert torch.allclose(torch.stack(dropped).mean(0), attention(x), atol=0.15 * float(attention(x).abs().max()))


def test_heads_cut_by_rows_are_heads_of_the_transposed_weights() -> None:
    whole = torch.randn(3, 8, 8)
    attention = hs.SelfAttention(*whole, torch.eye(8), heads=2, mask="causal")
    rows = released_scripts.cut_by_rows(attention)
    assert torch.equal(rows.query_weight[1], whole[0][:, 4:].T)
    assert torch.equal(released_scripts.cut_by_rows(rows).key_weight, attention.key_weight)


def test_a_variant_that_moves_the_exponent_is_not_confirmed() -> None:
    steady = [
        {"place": place, "variant": variant, "n": n, "sigma": n**0.07, "released": n**0.07}
        for place, variants in released_scripts.VARIANTS.items()
        for variant in variants
        for n in (8, 16, 32)
    ]
    assert EXPERIMENTS["recipe-variants"].judge(pandas.DataFrame(steady)).verdict is Verdict.CONFIRMED
    moved = [row | {"sigma": row["n"] ** 0.2} if row["variant"] == "dropout on" else row for row in steady]
    finding = EXPERIMENTS["recipe-variants"].judge(pandas.DataFrame(moved))
    assert finding.verdict is Verdict.NOT_CONFIRMED
    assert "dropout on: 0.20 and 0.07" in finding.measured
    assert "1 of 12" in finding.measured


@pytest.mark.slow
def test_adversarial_inputs_of_causal_heads_reach_root_n_at_both_ends() -> None:
    cell = {"model": RANDOM_GPT2, "layer": 6, "heads": 2, "lengths": (27, 97)}
    rows = pandas.DataFrame(EXPERIMENTS["adversarial"].run(ExperimentOptions("quick"), cell))
    share = rows["sigma"] / rows["value_norm"] / rows["n"] ** 0.5
    assert share.between(0.95, 1.05).all()
    assert EXPERIMENTS["adversarial"].judge(rows).verdict is Verdict.CONFIRMED


def test_gpt2s_own_heads_are_read_from_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    width = 24
    names = {"c_attn.weight": (width, 3 * width), "c_attn.bias": (3 * width,), "c_proj.weight": (width, width)}
    names |= {"c_proj.bias": (width,)}
    save_file({f"h.6.attn.{name}": torch.randn(shape) for name, shape in names.items()}, tmp_path / "gpt2.safetensors")
    cell = {"model": str(tmp_path / "gpt2.safetensors"), "layer": 6, "heads": 1, "lengths": (27, 97)}
    rows = pandas.DataFrame(EXPERIMENTS["adversarial"].run(ExperimentOptions("quick"), cell))
    assert (rows["sigma"] <= rows["upper"]).all()
    assert (rows["sigma"] >= rows["lower"] * (1 - 1e-9)).all()


@pytest.mark.slow
def test_the_tightness_of_lip_infinity_agrees_with_known_ascents() -> None:
    cells = EXPERIMENTS["lip-infinity"].cells(ExperimentOptions("quick"))
    assert [cell["n"] for cell in cells] == [10, 100, 1000]
    for cell in cells[:2]:
        [row] = EXPERIMENTS["lip-infinity"].run(ExperimentOptions("quick"), cell)
        best = max(row["random"], row["construction"])
        assert best == pytest.approx(KNOWN_ASCENTS[cell["n"]], rel=5e-3)
        assert row["lower"] * (1 - 1e-9) <= best <= row["kim"]


def test_a_model_with_fewer_layers_is_measured_at_its_last() -> None:
    cell = {"model": "random:bert[layers=2,width=16]", "layers": (3, 6), "length": 8, "windows": 1}
    rows = EXPERIMENTS["growth-text"].run(ExperimentOptions("quick"), cell)
    assert [row["layer"] for row in rows] == [1]
    assert all(row["converged"] for row in rows)


@pytest.mark.slow
def test_variants_of_a_small_model_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(released_scripts.PLACES, released_scripts._CAUSAL, ("random:gpt2[layers=2,width=16]", 1))
    for variant in released_scripts.VARIANTS[released_scripts._CAUSAL]:
        cell = {"place": released_scripts._CAUSAL, "variant": variant, "seed": 0, "n": 8, "windows": 1}
        [row] = EXPERIMENTS["recipe-variants"].run(ExperimentOptions("quick"), cell)
        assert row["sigma"] > 0
        assert row["released"] > 0


def test_every_quick_experiment_says_that_it_fits_into_minutes() -> None:
    assert sum(experiment.minutes[0] for experiment in EXPERIMENTS.values()) <= 15


def test_exponents_are_those_of_the_rows() -> None:
    rows = pandas.DataFrame([{"n": n, "sigma": 2 * n**0.07, "released": n**0.24} for n in (8, 16, 32, 64)])
    assert exponents(rows) == pytest.approx({"sigma": 0.07, "released": 0.24})


@pytest.mark.parametrize(("deep", "verdict"), [(3.4, Verdict.CONFIRMED), (3.6, Verdict.NOT_CONFIRMED)])
def test_contractive_attention_must_catch_up_with_depth(deep: float, verdict: Verdict) -> None:
    bits = {"dot-product": (3.2, 3.2), "l2": (3.3, 3.3), "contractive-2": (3.6, deep), "contractive-inf": (3.6, 3.6)}
    rows = [
        {"attention": kind, "depth": depth, "bits": value, "width": 64, "steps": 400}
        for kind, both in bits.items()
        for depth, value in zip((1, 3), both, strict=True)
    ]
    assert EXPERIMENTS["language-models"].judge(pandas.DataFrame(rows)).verdict is verdict
