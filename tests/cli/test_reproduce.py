"""`howsmooth reproduce` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from howsmooth.cli import app
from howsmooth.errors import InvalidInput
from howsmooth.papers import EXPERIMENTS, ExperimentOptions
from howsmooth.papers.l2_theorems import NotLipschitz

run = CliRunner().invoke


def test_without_a_name_the_experiments_are_listed() -> None:
    listed = json.loads(run(app, ["reproduce", "--json"]).stdout)["experiments"]
    assert [one["id"] for one in listed] == list(EXPERIMENTS)
    assert all(one["claim"] and one["setting"] and one["paper"] for one in listed)


@pytest.mark.slow
def test_one_experiment_prints_its_verdict_and_keeps_its_files(tmp_path: Path) -> None:
    result = run(app, ["reproduce", "not-lipschitz", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "Verdict: confirmed" in result.stdout
    assert (tmp_path / "not-lipschitz" / "quick" / "not-lipschitz.pdf").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["lip-infinty"], "did you mean 'lip-infinity'"),
        (["lip-two", "--quick", "--full"], "not both"),
        (["lip-two", "--all"], "not both"),
        (["lip-two", "--model", "gpt2"], "no choice of models"),
        (["language-models", "--full"], "hours"),
        (["growth-text", "--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_questions_are_refused_in_one_line(tmp_path: Path, options: list[str], said: str) -> None:
    result = run(app, ["reproduce", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_estimate_is_said_before_anything_starts(tmp_path: Path) -> None:
    result = run(app, ["reproduce", "language-models", "--full", "--out", str(tmp_path / "out")])
    assert "About 1,000 hours (42 days) on two cores." in result.stderr
    assert "--yes" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "substitute"), [("bert-base-uncased", "minilm"), ("openai-community/gpt2", "smollm2")]
)
def test_a_model_that_cannot_be_had_names_what_can_and_what_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, substitute: str
) -> None:
    def missing(source: str) -> None:
        raise InvalidInput(f"cannot load the model {source!r}: the hub cannot be reached.")

    monkeypatch.setattr("howsmooth.papers.experiment_inputs.open_model", missing)
    result = run(app, ["reproduce", "growth-text", "--quick", "--model", model, "--out", str(tmp_path)])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert f"cannot load the model {model!r}" in said
    assert f"In the place of {model.rpartition('/')[2]} this experiment takes {substitute} (" in said
    assert "untrained" in said
    assert len(result.stderr.strip().splitlines()) <= 2


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, done = EXPERIMENTS["not-lipschitz"], list[int]()
    run_cell = experiment.run

    def stopping(asked: ExperimentOptions, cell: dict[str, int]) -> Iterable[dict[str, int]]:
        if len(done) == 5:
            done.append(-1)
            raise KeyboardInterrupt
        done.append(cell["n"])
        return run_cell(asked, cell)

    monkeypatch.setattr(experiment, "run", stopping)
    ask = ["reproduce", experiment.id, "--quick", "--out", str(tmp_path)]
    assert run(app, ask).exit_code == 130
    assert not (tmp_path / experiment.id / "quick" / "verdict.json").exists()
    again = run(app, ask)
    assert again.exit_code == 0
    assert "Verdict: confirmed" in again.stdout
    assert len(done) == len(experiment.cells(ExperimentOptions("quick"))) + 1


@pytest.mark.slow
def test_pictures_need_no_latex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("matplotlib.texmanager.TexManager.__new__", lambda *given: pytest.fail("LaTeX was asked for"))
    result = run(app, ["reproduce", "not-lipschitz", "--quick", "--json", "--out", str(tmp_path)])
    assert json.loads(result.stdout)["reproduced"][0]["verdict"] == "confirmed"
    assert (tmp_path / "not-lipschitz" / "quick" / "not-lipschitz.svg").is_file()


@pytest.mark.slow
def test_a_text_is_kept_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = EXPERIMENTS["not-lipschitz"]
    monkeypatch.setattr(experiment, "takes", frozenset({"text"}))
    (tmp_path / "novel.txt").write_text("Call me Ishmael. " * 100)
    ask = ["reproduce", experiment.id, "--quick", "--out", str(tmp_path), "--json", "--text"]
    told = json.loads(run(app, [*ask, str(tmp_path / "novel.txt")]).stdout)["reproduced"][0]["text"]
    assert told.startswith("1700 characters, sha256 ")
    (tmp_path / "other.txt").write_text("Call me Ahab. " * 100)
    assert "belongs to another run" in run(app, [*ask, str(tmp_path / "other.txt")]).stderr


@pytest.mark.slow
def test_verdicts_are_printed_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(NotLipschitz):
        id = "other"

        def run(self, options: ExperimentOptions, cell: dict[str, int]) -> Iterable[dict[str, int]]:
            raise KeyboardInterrupt

    first = EXPERIMENTS["not-lipschitz"]
    for name in list(EXPERIMENTS)[::-1]:  # restored in reverse: the order of the experiments stays
        monkeypatch.delitem(EXPERIMENTS, name)
    monkeypatch.setitem(EXPERIMENTS, first.id, first)
    monkeypatch.setitem(EXPERIMENTS, "other", Stopped())
    result = run(app, ["reproduce", "--all", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 130
    assert "Verdict: confirmed" in result.stdout
