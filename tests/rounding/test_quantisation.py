"""Whole runs: rows that are what the library finds, and stores that go on."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from howsmooth._util.sqlite_files import StoreError
from howsmooth.errors import InvalidInput
from howsmooth.models import open_model
from howsmooth.rounding import parse_formats, quantisation, rounded_model
from howsmooth.rounding.output_error import output_errors
from howsmooth.rounding.quantisation import quantise
from howsmooth.rounding.rounded_model import RoundedModel, sampled_scores

TINY = "random:llama[layers=2,width=32,heads=4,kv_heads=2]"
QUICK = {"formats": "int8,int4,int2", "length": 12, "windows": 2, "samples": 3}


def test_rows_are_what_answers_and_scores_give() -> None:
    rows = quantise(TINY, **QUICK | {"windows": 1}).rows()
    assert len(rows) == 2 * 4 * 2 * 3
    opened, formats = open_model(TINY, head=True), parse_formats("int8,int4,int2")
    from howsmooth.models import alice

    [window] = opened.windows(alice(), 12, 1, 0)
    reader = RoundedModel.of(opened.model, opened.inputs(window))
    found = [output_errors(site, formats) for site in reader.sites]
    scores = sampled_scores(reader, formats, 3, 0).by_head
    for row in rows:
        part, form = ("key", "value").index(row["what"]), ["int8", "int4", "int2"].index(row["format"])
        here = (part, form, row["head"])
        assert row["kv_head"] == row["head"] // 2
        assert row["actual"] == pytest.approx(float(found[row["layer"]].actual[here]))
        assert row["proved"] == pytest.approx(float(found[row["layer"]].proved[here]))
        assert row["kl"] == pytest.approx(float(scores[(row["layer"], *here)]))
        assert row["actual"] <= row["proved"]


def test_a_budget_is_kept_and_checked_on_windows_that_were_not_learnt_from() -> None:
    found = quantise(TINY, budget=5.0, per="head", **QUICK)
    names = [check.name for check in found.checks]
    assert names == ["exact", "uniform", "first and last", "allocation"]
    assert found.checks[0].mean == 0
    for check in found.checks[1:]:
        assert check.allocation is not None
        assert check.allocation.bits <= 5.0
        assert len(check.damage) == len(check.loss) == 2
        assert check.perplexity is not None
        assert check.mean > 0


@pytest.mark.parametrize(("letters", "windows", "tried"), [(48, 2, 2), (75, 1, 4), (75, 4, 1), (100, 3, 3)])
def test_no_token_is_in_a_window_of_each_kind(letters: int, windows: int, tried: int) -> None:
    """Drawn windows would overlap in so short a text."""
    opened = open_model(TINY, head=True)
    learnt, held_out = quantisation._cut(opened, "x" * letters, 12, windows, tried, seed=0)
    assert (len(learnt), len(held_out)) == (windows, tried)
    read = [{place for w in some for place in range(w.start, w.start + 12)} for some in (learnt, held_out)]
    assert not read[0] & read[1]


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real, calls = tmp_path / "s.sqlite", quantisation.window_numbers, []

    def stopping(*args: object) -> dict[str, torch.Tensor]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(quantisation, "window_numbers", stopping)
    with pytest.raises(KeyboardInterrupt):
        quantise(TINY, out=out, **QUICK)
    found = quantise(TINY, out=out, **QUICK)
    assert len(calls) == 3  # the first window was kept
    assert found.rows() == quantise(TINY, **QUICK).rows()
    assert len(calls) == 5
    quantise(TINY, out=out, **QUICK)
    assert len(calls) == 5
    quantise(TINY, out=out, resume=False, **QUICK)
    assert len(calls) == 7


def test_a_run_stopped_while_it_checks_its_choice_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said, again = tmp_path / "s.sqlite", list[str](), list[str]()
    whole = quantise(TINY, budget=5.0, **QUICK)

    def stop(label: str) -> None:
        said.append(label)
        if label == "checking on window 2 of 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise(TINY, budget=5.0, out=out, progress=stop, **QUICK)
    assert len(said) == 4
    found = quantise(TINY, budget=5.0, out=out, progress=again.append, **QUICK)
    assert again == ["checking on window 2 of 2"]
    assert (found.rows(), found.checks[-1].damage) == (whole.rows(), whole.checks[-1].damage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "windows"),
    [({"budget": 6.0}, 2), ({"budget": 5.0, "seed": 1}, 4)],
)
def test_other_settings_are_other_numbers_in_the_store(tmp_path: Path, change: dict[str, Any], windows: int) -> None:
    """Nothing is taken from a run whose settings decide other numbers; another budget only checks anew."""
    out, said = tmp_path / "s.sqlite", list[str]()
    quantise(TINY, budget=5.0, out=out, **QUICK)
    found = quantise(TINY, out=out, progress=said.append, **QUICK | change)
    assert len(said) == windows
    assert found.rows() == quantise(TINY, **QUICK | change).rows()
    said.clear()
    quantise(TINY, budget=5.0, out=out, progress=said.append, **QUICK)
    assert said == []  # the first run is still there


def test_a_ledger_with_other_settings_is_refused_and_stays(tmp_path: Path) -> None:
    """Nothing is taken from a run whose settings decide other numbers."""
    out, said = tmp_path / "s.sqlite", list[str]()
    found = quantise(TINY, out=out, **QUICK).rows()
    with pytest.raises(StoreError, match=r"another run \(there ≠ here: samples 3 ≠ 5\)"):
        quantise(TINY, out=out, **QUICK | {"samples": 5})
    assert quantise(TINY, out=out, progress=said.append, **QUICK).rows() == found
    assert said == []


@pytest.mark.parametrize("budget", [None, 5.0])
def test_a_window_is_captured_once_and_a_window_that_only_checks_never(
    monkeypatch: pytest.MonkeyPatch, budget: float | None
) -> None:
    captured, real = list[str](), rounded_model.capture

    def counted(model: Any, inputs: Any) -> Any:
        captured.append(str(inputs["input_ids"].tolist()))
        return real(model, inputs)

    monkeypatch.setattr(rounded_model, "capture", counted)
    found = quantise(TINY, budget=budget, **QUICK)
    assert len(captured) == len(set(captured)) == QUICK["windows"]
    assert len(found.checks) == (0 if budget is None else 4)


def test_a_choice_checked_without_capture_is_damaged_as_a_captured_one() -> None:
    opened = open_model(TINY, head=True)
    first, second = (opened.inputs(window) for window in opened.windows("Down the rabbit hole, again", 12, 2, 0))
    assignment = {(layer, part): parse_formats("int4")[0] for layer in range(2) for part in ("key", "value")}
    captured, other = RoundedModel.of(opened.model, second), RoundedModel.of(opened.model, first).on(second)
    assert torch.equal(captured.outcome(assignment), other.outcome(assignment))
    with pytest.raises(InvalidInput, match="another length"):
        other.on({"input_ids": second["input_ids"][:, :5]})


def test_a_damaged_window_is_named(tmp_path: Path) -> None:
    out = tmp_path / "s.sqlite"
    quantise(TINY, out=out, **QUICK)
    with sqlite3.connect(out) as db:
        db.execute("UPDATE items SET content = zeroblob(length(content)) WHERE rowid = 2")
    db.close()
    with pytest.raises(StoreError, match=r"window at \d+, seed 1 in .* is not what was written"):
        quantise(TINY, out=out, **QUICK)


def test_files_that_are_no_ledgers_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE a (b)")
    db.close()
    text = tmp_path / "text.txt"
    text.write_text("not a database at all, but long enough to be taken for one" * 30)
    for path, said in ((other, "no ledger of this version"), (text, "no sound ledger")):
        with pytest.raises(StoreError, match=said):
            quantise(TINY, out=path, **QUICK)


def test_encoders_are_measured_by_their_embedding() -> None:
    found = quantise("random:bert[layers=2,width=32]", budget=5.0, **QUICK)
    assert (found.causal, found.damage_name) == (False, "1 − cosine")
    assert found.checks[-1].perplexity is None
    assert 0 < found.checks[-1].mean < 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 2.0}, "below the smallest format"),
        ({"budget": 30.0}, "above the largest format"),
        ({"formats": "int5"}, "there is no format"),
        ({"formats": "int4[group=3]"}, "do not divide the 8 of a head"),
        ({"text": "too short", "length": 200}, "give more text or ask for less"),
        ({"text": 47 * "x", "budget": 5.0}, "too short to check a choice on what it was not made on"),
        ({"check": 0, "budget": 5.0}, "check"),
    ],
)
def test_bad_requests_are_one_sentence(options: dict, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as error:
        quantise(TINY, **{**QUICK, **options})
    assert "\n" not in str(error.value)
