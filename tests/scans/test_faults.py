"""Scans that are killed, interrupted or run out of disk lose nothing, and end as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from evidence.scan_faults import Size, contents, disturb, kill_repeatedly, measure, start

pytestmark = pytest.mark.slow
SIZE = Size(lengths="6,8", windows=5, what="head,attention")
CELLS = 2 * 5 * 2 * (4 + 1)
Content = dict[tuple[object, ...], tuple[object, ...]]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Content:
    out = tmp_path_factory.mktemp("whole") / "scan.sqlite"
    measure(folder, out, SIZE)
    found = contents(out)
    assert len(found) == CELLS
    return found


def test_two_kills_lose_and_change_nothing(folder: Path, tmp_path: Path, whole: Content) -> None:
    out = tmp_path / "scan.sqlite"
    story = kill_repeatedly(folder, out, SIZE, kills=2, longest=0.3)
    assert (story.lost, story.changed) == (0, 0)
    assert story.begun_again <= 2  # the batch that each kill cut off
    assert story.kept[-1] < CELLS
    measure(folder, out, SIZE)
    assert contents(out) == whole


def test_a_full_disk_is_said_in_one_line_and_the_scan_goes_on_later(
    folder: Path, tmp_path: Path, whole: Content
) -> None:
    out = tmp_path / "scan.sqlite"
    process = start(folder, out, SIZE, most_bytes=160_000)
    _, last_words = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = last_words.splitlines()
    assert line.startswith(f"cannot write to {out}")
    assert "free some space and run the same command again" in line
    kept = contents(out)
    assert 0 < len(kept) < CELLS
    assert kept.items() <= whole.items()
    measure(folder, out, SIZE)
    assert contents(out) == whole


def test_control_c_keeps_every_finished_batch(folder: Path, tmp_path: Path, whole: Content) -> None:
    out = tmp_path / "scan.sqlite"
    process = start(folder, out, SIZE, held=True)
    lines, _ = disturb(process, signal.SIGINT, delay=0.4)
    assert process.returncode == 130
    kept = contents(out)
    batches = {cell[0:2] + cell[3:5] for cell in kept}
    assert len(lines) - 1 <= len(batches) <= len(lines)  # all that were begun; the last if it was just finished
    measure(folder, out, SIZE)
    assert contents(out) == whole
