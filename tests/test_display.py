"""Results show themselves in a notebook: the numbers with their ends, as text that nothing in it can turn into code."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth._util import display as notebook
from howsmooth.reports import groups
from howsmooth.reports.page import page as write_page
from howsmooth.rounding.quantisation import quantise
from howsmooth.scans import scan_result

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 6
MODEL = "random:gpt2[layers=1,width=16,heads=2]"
NASTY = "<script>alert(1)</script>&'\""


class Reader(HTMLParser):
    """Tags in the order they are opened, and the text between them; every tag must be closed."""

    def __init__(self, shown: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(shown)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def read(result: Any) -> Reader:
    reader = Reader(result._repr_html_())
    assert set(reader.tags) <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "p"}
    return reader


@pytest.fixture
def block() -> tuple[hs.SelfAttention, torch.Tensor]:
    return hs.SelfAttention.random(8, heads=2), torch.randn(6, 8)


@pytest.fixture(scope="module")
def scan() -> hs.Scan:
    return hs.scan(MODEL, TEXT, lengths=[8, 12])


def test_a_measurement_shows_its_ends_and_what_compares(block: Any) -> None:
    measured = hs.measure(*block)
    title, *cells = read(measured).cells
    assert title == f"‖J‖₂ = {float(measured):.4g}"
    said = dict(zip(cells[::2], cells[1::2], strict=True))
    ends = re.fullmatch(r"≥ (\S+), ≤ (\S+?)(?: with probability \S+ %)?, rounding modelled", said["ends"])
    assert ends is not None
    assert float(ends[1]) <= float(measured) <= float(ends[2])
    assert said["converged"] == "1 of 1"
    assert f"relative condition {float(measured.relative):.3g}" in cells


def test_measurements_of_heads_show_their_range(block: Any) -> None:
    measured = hs.measure_heads(*block)
    low, high = float(measured.value.min()), float(measured.value.max())
    assert f"of 2 maps = {low:.4g} … {high:.4g}" in read(measured).cells[0]
    assert "2 of 2" in read(measured).cells


def test_notes_are_text(block: Any) -> None:
    measured = hs.measure(*block)
    noted = type(measured)(**(vars(measured) | {"notes": (NASTY,)}))
    assert NASTY in read(noted).cells
    assert "<script" not in noted._repr_html_()


def test_an_explanation_shows_paths_sink_and_entropy(block: Any) -> None:
    story = hs.explain(*block, per_head=True)
    cells = read(story).cells
    assert {"value path", "score path", "through the values", "sink", "entropy, nats"} <= {*cells}
    shares = cells[cells.index("through the values") + 1]
    assert shares == ", ".join(f"{100 * share:.0f} %" for share in story.value_share.tolist())
    assert f"token {int(story.sink_token[0])} receives" in cells[cells.index("sink") + 1]


def test_a_table_has_a_row_for_every_bound_and_says_what_was_left_out(block: Any) -> None:
    attention, x = block
    table = hs.bounds.table(attention, over=hs.sets.Point(x, within=hs.sets.Ball(4.0)), n=6)
    reader = read(table)
    assert reader.tags.count("tr") == len(table) + 1
    assert all(row.name in reader.cells and row.written in reader.cells for row in table)
    assert f"{len(table.refused)} bounds do not apply here: .refused says why." in reader.cells


def test_growth_shows_its_sentence_and_the_evidence_for_every_law() -> None:
    grown = hs.growth([1.0, 2.1, 3.9, 8.2], [2, 4, 8, 16])
    cells = read(grown).cells
    assert cells[0] == repr(grown)
    assert grown.sentence in cells
    assert {law.name for law in grown.laws} <= {*cells}


def test_a_witness_says_that_it_is_a_lower_bound(block: Any) -> None:
    witness = hs.worst_case(block[0], 3, over=hs.sets.Ball(1.0), starts=1, steps=3)
    cells = read(witness).cells
    assert f"{witness.value:.6g}" in cells[0]
    assert any(cell.startswith("The lower end holds") for cell in cells)
    assert witness.start in cells


def test_a_comparison_shows_what_has_changed_first(scan: hs.Scan) -> None:
    changed = [row | {name: 3 * row[name] for name in ("value", "lower", "upper")} for row in scan.rows if row["head"]]
    rougher = hs.Scan([row for row in scan.rows if not row["head"]] + changed)
    compared = hs.compare(scan, rougher, names=["one", NASTY])
    reader = read(compared)
    assert reader.cells[0] == compared.headline()
    assert NASTY in reader.cells
    assert reader.cells[reader.cells.index("factor") + 1] == "layer 0, head 1"
    assert reader.tags.count("tr") == len(compared.changes) + 1


def test_a_scan_is_its_whole_report(scan: hs.Scan) -> None:
    shown = scan._repr_html_()
    (page,) = re.findall(r'^<iframe srcdoc="([^"]*)" width="100%" height="720" style="[^"]*"></iframe>$', shown)
    assert html.unescape(page) == write_page(groups(scan))
    assert "How smooth is random:gpt2" in page


def test_a_scan_too_large_for_a_notebook_shows_its_roughest_rows(
    scan: hs.Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_result, "LARGEST_FRAME", 1000)
    named = hs.Scan([row | {"model": NASTY} for row in scan.rows])
    reader = read(named)
    roughest = max(row["value"] for row in scan.rows)
    assert reader.cells[0] == f"{len(scan)} cells, the roughest first"
    first = reader.cells[8 : 8 + 7]
    assert (first[0], first[5]) == (NASTY, f"{roughest:.4g}")
    assert read(hs.Scan([])).cells[0] == "0 cells, the roughest first"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The states that the kernel of a notebook would show under the running cell, as text and as HTML."""
    states: list[dict[str, str]] = []

    class ZMQInteractiveShell:
        pass

    class Shell(ZMQInteractiveShell):
        """As Colab has it."""

    def update(drawn: Any) -> None:
        states.append(drawn._repr_mimebundle_([], []))

    kernel: Any = ModuleType("IPython")
    kernel.get_ipython = Shell
    display: Any = ModuleType("IPython.display")
    display.display = lambda first, display_id: SimpleNamespace(update=update)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook, "_SECONDS", 0.0)
    return states


def share_of(state: dict[str, str]) -> float:
    """The filled share of a bar, which is 40 characters long and has a label."""
    bar, label = state["text/plain"][:40], state["text/plain"][40:]
    assert label.strip()
    return (bar.count("━") + 0.5 * bar.count("╸")) / 40


WORK: dict[str, Callable[..., Any]] = {
    "scan": lambda **told: hs.scan(MODEL, TEXT, lengths=8, **told),
    "worst_case": lambda **told: hs.worst_case(
        hs.SelfAttention.random(4), 3, over=hs.sets.Ball(1.0), starts=1, steps=3, **told
    ),
    "quantise": lambda **told: quantise(MODEL, TEXT, formats="int8", length=8, windows=2, samples=2, **told),
}


@pytest.mark.parametrize("name", list(WORK))
def test_long_work_has_a_bar_in_a_notebook(shown: list[dict[str, str]], name: str) -> None:
    WORK[name]()
    shares = [share_of(state) for state in shown]
    assert len(shares) >= 2
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1


@pytest.mark.parametrize("name", list(WORK))
def test_a_callback_replaces_the_bar(shown: list[dict[str, str]], name: str) -> None:
    heard: list[Any] = []
    WORK[name](progress=lambda *now: heard.append(now))
    assert heard
    assert shown == []


def test_elsewhere_there_is_no_bar() -> None:
    assert not notebook.in_notebook()
    assert (notebook.scan_bar(), notebook.search_bar(), notebook.step_bar(3)) == (None, None, None)


def test_labels_of_a_bar_are_text(shown: list[dict[str, str]]) -> None:
    label = f"[red]{NASTY}\x1b"
    notebook.bar()(0.5, label)
    (state,) = shown
    assert share_of(state) == 0.5
    assert state["text/plain"][40:].strip() == f"[red]{NASTY}�"
    assert Reader(state["text/html"]).tags == ["pre", "span"]
    assert f"[red]{NASTY}�" in "".join(Reader(state["text/html"]).cells)
