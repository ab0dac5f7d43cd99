"""`howsmooth scan` prints what the library measures, keeps it, and says in one line what is wrong."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from evidence.scan_faults import TEXT
from howsmooth.cli.scan import default_store
from howsmooth.scans import Scan, Store
from howsmooth.scans import run as scan_run
from howsmooth.scans import scan as run_scan
from tests.cli.command import Command

SCAN = Command("scan")
run, rows, refusal = SCAN.run, SCAN.json, SCAN.refusal
TINY = "random:bert[layers=2,width=16,heads=2]"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores go to an empty folder, and the hub is not asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.slow
def test_json_is_a_list_of_the_rows_that_the_library_gives(folder: Path) -> None:
    asked = ("--text", folder / TEXT, "--length", "6,12", "--windows", 2, "--layers", 1, "--what", "heads,attention")
    found = rows(folder, *asked, "--out", "s.sqlite")
    expected = run_scan(
        str(folder), folder / TEXT, lengths=[6, 12], windows=2, layers=[1], what=["head", "attention"]
    ).rows
    assert len(found) == 2 * 2 * (4 + 1)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine | {"seconds": 0} == theirs | {"seconds": 0}
    assert Scan.open("s.sqlite").rows == found


@pytest.mark.slow
def test_the_summary_names_the_roughest_head_its_growth_and_the_store() -> None:
    result = run(TINY, "--length", "8,16,…,32")
    assert result.exit_code == 0, result.output
    found = Scan.open(default_store(TINY)).rows
    worst = max((row for row in found if row["length"] == 32), key=lambda row: row["value"])
    assert f"Layer {worst['layer']}, head {worst['head']}" in result.stdout
    assert "n^" in result.stdout
    assert str(default_store(TINY)) in result.stdout


def test_a_second_run_measures_nothing_and_prints_the_same() -> None:
    first, second = rows(TINY, "--length", 8), rows(TINY, "--length", 8)
    assert first == second  # the seconds too: they are those of the first run


def test_no_resume_measures_anew_with_other_settings() -> None:
    rows(TINY, "--length", 8)
    assert "--no-resume to measure it anew" in refusal(TINY, "--length", 8, "--rtol", 0.1)
    assert {row["rtol"] for row in rows(TINY, "--length", 8, "--rtol", 0.1, "--no-resume")} == {0.1}


def test_a_config_file_is_overridden_by_flags(folder: Path) -> None:
    Path("scan.toml").write_text(
        f'model = "{folder}"\ntext = "{folder / TEXT}"\nlength = [6, 12]\nwindows = 2\nexplain = false\n'
        'what = "head[layers=0,heads=1]"\nout = "from-config.sqlite"\n'
    )
    found = rows("--config", "scan.toml", "--windows", 1)
    assert [(row["length"], row["window"], row["layer"], row["head"]) for row in found] == [(6, 0, 0, 1), (12, 0, 0, 1)]
    assert found[0]["value_path"] is None
    assert Path("from-config.sqlite").is_file()


def test_exports_hold_the_rows() -> None:
    names = ["rows.csv", "rows.json", "rows.parquet"]
    found = rows(TINY, "--length", 8, *(part for name in names for part in ("--export", name)))
    assert json.loads(Path("rows.json").read_text()) == found
    with Path("rows.csv").open(newline="") as file:
        assert [float(row["value"]) for row in csv.DictReader(file)] == [row["value"] for row in found]
    assert pd.read_parquet("rows.parquet")["value"].tolist() == [row["value"] for row in found]


def test_cells_that_do_not_converge_give_exit_code_1() -> None:
    result = run(TINY, "--length", 200, "--layers", 0, "--rtol", 1e-12, "--json")
    assert result.exit_code == 1
    assert not all(row["converged"] for row in json.loads(result.stdout))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no model is named"),
        (["nosuch/model-anywhere"], "nosuch/model-anywhere"),
        ([TINY, "--length", "8,…,100"], "doubling does not lead to 100"),
        ([TINY, "--length", "1024"], "at most 512"),
        ([TINY, "--layers", "0-7"], "layer 2 does not exist"),
        ([TINY, "--layers", "0-40000000"], "no model has layers up to 40000000"),
        ([TINY, "--what", "head[heads=0-40000000]"], "no model has heads up to 40000000"),
        ([TINY, "--length", "9" * 5000], "lengths are numbers of tokens"),
        (
            [TINY, "--seed", "99999999999999999999"],
            "'--seed': Input should be less than or equal to 9223372036854775807",
        ),
        ([TINY, "--out", ":memory:"], "out is the name of a file"),
        ([TINY, "--out", "file:x?mode=memory"], "out is the name of a file"),
        ([TINY, "--what", "tails"], "cannot be measured: choose from head"),
        ([TINY, "--what", "head[heads=9]"], "head 9 does not exist"),
        ([TINY, "--bounds", "some"], "'none' or 'proved' or 'cheap' or 'all'"),
        ([TINY, "--rtol", "2"], "rtol is a relative accuracy"),
        ([TINY, "--export", "rows.xlsx"], "cannot export to rows.xlsx"),
        ([TINY, "--text", "missing.txt"], "missing.txt"),
        ([TINY, "--config", "missing.toml"], "missing.toml"),
    ],
)
def test_a_wrong_request_is_one_clear_line(args: list[str], said: str) -> None:
    assert said in refusal(*args)
    assert not Path("howsmooth-output").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"short", "windows of 64"), (b"\xff\xd8\xff\xe0 binary", "not a text in UTF-8"), (b"", "is empty")],
)
def test_a_text_that_cannot_be_read_is_one_clear_line(content: bytes, said: str) -> None:
    Path("text.txt").write_bytes(content)
    assert said in refusal(TINY, "--text", "text.txt", "--length", 64)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("length = ", "is not TOML"),
        ("lenght = 8", "sets 'lenght', which is no option of a scan"),
        ('windows = "three"', "sets windows to 'three'"),
        ("explain = 1", "sets explain to 1"),
        ('layers = ["a"]', "layers must be a text or a whole number"),
        ("layers = [1.5]", "layers must be a text or a whole number"),
        ("what = [1]", "what must be a text"),
        ("length = []", "lengths are numbers of tokens"),
        ("seed = 99999999999999999999", "seed must be a whole number"),
        ("windows = " + "9" * 5000, "is not TOML"),
        ('model = "a\\u0000b"', "a text with a zero byte"),
        ('text = "a\\u0000b"', "a text with a zero byte"),
        ("x = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        (f"windows = {list(range(10000))}", "sets windows to [0, 1, 2"),
    ],
)
def test_a_wrong_config_file_is_one_clear_line(content: str, said: str) -> None:
    Path("scan.toml").write_text(content)
    line = refusal(*([] if content.startswith("model") else [TINY]), "--config", "scan.toml")
    assert said in line
    assert len(line) < 300


def test_a_store_in_use_is_one_clear_line() -> None:
    with Store.writing("s.sqlite"):
        assert "another scan is writing to s.sqlite" in refusal(TINY, "--length", 8, "--out", "s.sqlite")


@pytest.mark.parametrize(
    "args",
    [
        ["--out", "e.csv", "--export", "e.csv"],
        ["--out", "s.sqlite", "--text", "n.csv", "--export", "link.csv"],
        ["--out", "s.sqlite", "--export", "n.csv", "--export", "./n.csv"],
        ["--out", "n.csv", "--text", "n.csv"],
        ["--out", "s.sqlite", "--config", "c.json", "--export", "c.json"],
    ],
)
def test_nothing_that_is_read_or_written_is_overwritten(args: list[str]) -> None:
    Path("n.csv").write_text("a text to read " * 20)
    Path("c.json").write_text("")
    Path("link.csv").symlink_to("n.csv")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    assert "would overwrite: choose another name" in refusal(TINY, "--length", 8, *args)
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_no_file_of_the_model_is_overwritten(folder: Path) -> None:
    before = (folder / "config.json").read_bytes()
    assert "is also MODEL" in refusal(folder, "--length", 8, "--export", folder / "config.json")
    assert (folder / "config.json").read_bytes() == before


def test_a_store_that_vanishes_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = scan_run.measure_batch

    def removing(*args: object) -> object:
        Path("s.sqlite").unlink(missing_ok=True)
        return measured(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(scan_run, "measure_batch", removing)
    said = refusal(TINY, "--length", 8, "--out", "s.sqlite")
    assert "s.sqlite was removed, renamed or replaced" in said


@pytest.mark.parametrize("before", [0, 4])
def test_an_interruption_before_the_first_batch_says_what_is_kept(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if before:
        rows(TINY, "--length", 8, "--out", "s.sqlite")

    def interrupted(*args: object, **options: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(scan_run, "open_model", interrupted)
    done = run(TINY, "--length", 8, "--out", "s.sqlite")
    assert done.exit_code == 130
    said = "nothing new was measured; the 4 cells in s.sqlite are kept" if before else "nothing was measured yet"
    assert done.stderr.splitlines() == [f"howsmooth: interrupted: {said}."]


@pytest.mark.slow
def test_measuring_anew_that_is_interrupted_keeps_the_old_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    old = rows(TINY, "--length", 8, "--out", "s.sqlite")
    measured, count = scan_run.measure_batch, iter(range(9))

    def interrupted(*args: object) -> object:
        if next(count) == 1:
            raise KeyboardInterrupt
        return measured(*args)  # type: ignore[arg-type]

    anew = (TINY, "--length", 8, "--out", "s.sqlite", "--no-resume", "--rtol", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(scan_run, "measure_batch", interrupted)
        done = run(*anew)
    assert done.exit_code == 130
    assert "2 of 4 cells are kept" in done.stderr
    assert Scan.open("s.sqlite").rows == old
    assert rows(*anew) == Scan.open("s.sqlite").rows != old


@pytest.mark.slow
@pytest.mark.usefixtures("usual_signals")
def test_control_c_says_what_is_kept_and_how_to_go_on() -> None:
    code = "from howsmooth.cli import app; app()"
    command = [
        sys.executable,
        "-c",
        code,
        "scan",
        TINY,
        "--length",
        "8,16,…,512",
        "--windows",
        "20",
        "--out",
        "s.sqlite",
    ]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
    )
    while not Path("s.sqlite").is_file() or not _kept():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    (line,) = said.splitlines()
    assert (
        line
        == f"howsmooth: interrupted: {_kept()} of 560 cells are kept in s.sqlite; the same command goes on from there."
    )


def _kept() -> int:
    try:
        return len(Scan.open("s.sqlite"))
    except OSError:  # not yet made
        return 0
