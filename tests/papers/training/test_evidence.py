"""The recorded comparisons, on models small enough for a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evidence.training_curriculum as curriculum
import evidence.training_depth as depth
import evidence.training_grid as grid
from howsmooth.papers.training import Corpus, Intervals, load_model
from howsmooth.testing import dense_jacobian

CORPUS = Corpus.split("to be, or not to be: that is the question.\n\nwhether 'tis nobler in the mind\n\n" * 30)
TINY = {"width": 8, "heads": 2, "length": 16, "batch_tokens": 32, "steps": 6, "warmup": 1}


def quiet(text: str) -> None:
    pass


@pytest.mark.slow
def test_the_grid_page_compares_all_kinds_and_goes_on_where_it_was(tmp_path: Path) -> None:
    base = replace(grid.BASE, **TINY)  # type: ignore[arg-type]
    wanted = grid.grids(base, depths=(1,), seeds=(0, 1))
    found = grid.run(tmp_path, CORPUS, wanted, quiet)
    assert {name: len(results) for name, results in found.items()} == {
        "pre-norm": 10, "contractive": 4, "pre-norm, window 4": 8, "contractive, window 4": 4,
    }  # fmt: skip
    again: list[str] = []
    assert grid.run(tmp_path, CORPUS, wanted, again.append) == found
    assert again == []
    page = grid.summary(found, wanted)
    lines = page.splitlines()[2:]
    assert [line.split("|")[1].strip(" `") for line in lines] == [
        "dot-product", "l2-untied", "l2", "contractive-inf", "contractive-2", "contractive-inf", "contractive-2",
        "dot-product", "l2", "contractive-inf", "contractive-2", "contractive-inf", "contractive-2",
    ]  # fmt: skip
    assert "none" in lines[1]  # untied L2 attention has no bound
    assert "0.9" in lines[6]
    assert len(grid.gaps(found, (1,)).splitlines()) == 6
    allowed = grid.run(tmp_path, CORPUS, grid.constants(base, depths=(1,), seeds=(0,)), quiet)
    costs = [line.split("|")[1].strip() for line in grid.costs(found, allowed, 1).splitlines()[2:]]
    assert costs[:4] == ["0.9", "2", "5", "20"]
    assert "–" in costs[4]  # tied L2 attention has another bound for every seed
    grid.draw(found, wanted, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_the_depth_page_names_what_did_not_train(tmp_path: Path) -> None:
    base = replace(depth.BASE, **TINY)  # type: ignore[arg-type]
    found = depth.run(tmp_path, CORPUS, depth.grids(base, depths=(1,)), quiet)
    results = [result for some in found.values() for result in some]
    assert len(results) == 7
    limit = depth.single_character_bits(CORPUS)
    bad = [
        replace(result, valid_bits=bits)
        for result, bits in zip(results, (None, limit + 0.1, limit - 0.1), strict=False)
    ]
    assert depth.untrained(bad, CORPUS) == [
        "`dot-product` in 1 post-norm blocks",
        "`l2` in 1 post-norm blocks",
    ]


@pytest.mark.slow
def test_the_curriculum_page_measures_every_block_at_every_length(tmp_path: Path) -> None:
    arms = curriculum.arms(replace(curriculum.BASE, **TINY, depth=2))  # type: ignore[arg-type]
    runs = curriculum.run(tmp_path, CORPUS, arms, (0,), Intervals(report=2, validate=2, validate_on=100), quiet)
    rows = curriculum.smoothness(runs, CORPUS, [4, 16])
    assert len(rows) == 3 * 2 * 2
    assert len(curriculum.learning(runs)) == 3 * 3
    curriculum.draw(runs, rows, tmp_path / "figure.png")
    curriculum.write_rows(tmp_path / "rows.csv", rows)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 13
    assert len(curriculum.results_table(runs).splitlines()) == 5
    assert len(curriculum.sigma_table(rows).splitlines()) == 8


def test_sigma_is_the_norm_of_the_dense_jacobian(tmp_path: Path) -> None:
    settings = curriculum.arms(replace(curriculum.BASE, **TINY, depth=1))["chunks"]  # type: ignore[arg-type]
    runs = curriculum.run(tmp_path, CORPUS, {"chunks": settings}, (0,), Intervals(), quiet)
    model, _ = load_model(runs["chunks"][0][1])
    valid = CORPUS.encode(CORPUS.valid)
    x = model.blocks[0].norms[0](model.stream(valid[None, 1:7])[0]).detach().double()[0]  # type: ignore[operator, index]
    attention = model.blocks[0].attention.double()  # type: ignore[operator, union-attr]
    dense = dense_jacobian(lambda y: attention(y, is_causal=True)[0], x)
    (found,) = curriculum.sigma(load_model(runs["chunks"][0][1])[0], CORPUS, 6, windows=1)
    assert found == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-3)
