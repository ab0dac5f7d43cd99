"""Experiments in their quick size: verdicts against what is known, ledgers that go on, and refusals."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pytest
from matplotlib.figure import Figure

from howsmooth._util.ledger import Ledger
from howsmooth._util.sqlite_files import StoreError
from howsmooth.errors import InvalidInput
from howsmooth.papers import EXPERIMENTS, Experiment, ExperimentOptions, Verdict, reproduce
from howsmooth.papers.experiment import LEDGER, Finding
from howsmooth.papers.figure_style import finish, line, panels
from howsmooth.papers.released_scripts import exponents


class Squares(Experiment):
    """An experiment of four cells that counts what it measures."""

    id, paper, title, claim, setting = "squares", "none", "Squares", "n² grows", "integers"
    minutes = (0, 0, 0)
    takes = frozenset({"models"})

    def __init__(self) -> None:
        self.calls: list[int] = []

    def cells(self, options: ExperimentOptions) -> list[dict[str, Any]]:
        return [{"n": n} for n in range(1, 5)]

    def run(self, options: ExperimentOptions, cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.calls.append(cell["n"])
        yield {"n": cell["n"], "square": cell["n"] ** 2}

    def draw(self, rows: pandas.DataFrame) -> Figure:
        (ax,) = panels(["squares"], "n", "n²", log="")
        line(ax, 0, rows["n"], rows["square"], "measured")
        return finish(ax)

    def judge(self, rows: pandas.DataFrame) -> Finding:
        return Finding(Verdict.CONFIRMED, f"sum {rows['square'].sum()}")


def test_data_pictures_and_verdict_are_kept(tmp_path: Path) -> None:
    found = reproduce(Squares(), ExperimentOptions("quick"), tmp_path)
    assert found.finding.measured == "sum 30"
    assert pandas.read_parquet(found.folder / "rows.parquet")["square"].tolist() == [1, 4, 9, 16]
    assert {path.suffix for path in found.folder.iterdir()} == {".png", ".svg", ".pdf", ".parquet", ".json", ".sqlite"}
    assert json.loads((found.folder / "verdict.json").read_text())["verdict"] == "confirmed"


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    experiment = Squares()
    first = reproduce(experiment, ExperimentOptions("quick"), tmp_path)
    with closing(sqlite3.connect(first.folder / LEDGER)) as db, db:
        db.execute("DELETE FROM items WHERE rowid = 4")
    again = reproduce(experiment, ExperimentOptions("quick"), tmp_path)
    assert experiment.calls == [1, 2, 3, 4, 4]
    pandas.testing.assert_frame_equal(again.rows, first.rows)


@pytest.mark.slow
def test_an_executor_gives_the_rows_of_this_process(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        there = reproduce(
            EXPERIMENTS["not-lipschitz"], ExperimentOptions("quick"), tmp_path / "there", executor=threads
        )
    here = reproduce(EXPERIMENTS["not-lipschitz"], ExperimentOptions("quick"), tmp_path / "here")
    assert there.rows.equals(here.rows)
    cells = []
    for found in (here, there):
        with Ledger.reading(found.folder / LEDGER) as ledger:
            cells.append(ledger.read_json())
    assert cells[0] == cells[1]


def test_a_ledger_of_another_question_is_refused_and_kept(tmp_path: Path) -> None:
    experiment = Squares()
    kept = reproduce(experiment, ExperimentOptions("quick"), tmp_path).folder / LEDGER
    before = kept.read_bytes()
    with pytest.raises(StoreError, match=r"another run .*models"):
        reproduce(experiment, ExperimentOptions("quick", ("gpt2",)), tmp_path)
    assert kept.read_bytes() == before


def test_a_run_that_failed_before_its_first_cell_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidInput, match="In the place of gpt2"):
        reproduce(EXPERIMENTS["growth-text"], ExperimentOptions("quick", ("gpt2",)), tmp_path)
    with pytest.raises(InvalidInput, match="In the place of bert-base-uncased"):
        reproduce(EXPERIMENTS["growth-text"], ExperimentOptions("quick", ("bert-base-uncased",)), tmp_path)


def test_a_choice_that_an_experiment_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no choice of models"):
        reproduce(EXPERIMENTS["lip-two"], ExperimentOptions("quick", ("gpt2",)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["not-lipschitz", "large-radius", "inversion"])
def test_cheap_claims_are_confirmed(tmp_path: Path, name: str) -> None:
    assert reproduce(EXPERIMENTS[name], ExperimentOptions("quick"), tmp_path).finding.verdict is Verdict.CONFIRMED


@pytest.mark.slow
def test_the_printed_power_of_the_bound_on_lip_two_is_passed(tmp_path: Path) -> None:
    found = reproduce(EXPERIMENTS["lip-two"], ExperimentOptions("quick"), tmp_path)
    assert found.finding.verdict is Verdict.OTHER_CONSTANT
    assert (found.rows["measured"] <= found.rows["corrected"]).all()
    assert (found.rows["measured"] > found.rows["printed"]).any()


@pytest.mark.slow
def test_the_released_recipe_grows_faster_than_sigma(tmp_path: Path) -> None:
    found = exponents(reproduce(EXPERIMENTS["released-recipe"], ExperimentOptions("quick"), tmp_path).rows)
    assert found["sigma"] == pytest.approx(0.07, abs=0.03)
    assert found["released"] == pytest.approx(0.24, abs=0.03)


def test_every_experiment_has_cells_that_plain_json_can_hold_and_a_short_module() -> None:
    folder = Path(__import__("howsmooth.papers", fromlist=["papers"]).__file__).parent
    for experiment in EXPERIMENTS.values():
        for size in ("quick", "normal", "full"):
            cells = experiment.cells(ExperimentOptions(size))
            assert len(cells) > 0
            assert len(json.loads(json.dumps(cells))) == len(cells)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 300 for path in folder.glob("*.py"))
