"""`howsmooth reproduce` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from howsmooth.cli import app
from howsmooth.papers import EXPERIMENTS

run = CliRunner().invoke


def test_without_a_name_the_experiments_are_listed() -> None:
    listed = json.loads(run(app, ["reproduce", "--json"]).stdout)["experiments"]
    assert [one["id"] for one in listed] == list(EXPERIMENTS)
    assert all(one["claim"] and one["setting"] and one["paper"] for one in listed)


def test_one_experiment_prints_its_verdict_and_keeps_its_files(tmp_path: Path) -> None:
    result = run(app, ["reproduce", "not-lipschitz", "--quick", "--output", str(tmp_path)])
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
    result = run(app, ["reproduce", *options, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "out").exists()
