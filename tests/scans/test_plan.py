"""Which cells a scan consists of."""

from __future__ import annotations

from itertools import product

import pytest

from howsmooth.errors import InvalidInput
from howsmooth.scans.plan import ScanCell, ScanSettings, make_plan, parse_what


def cells(what: str, lengths: tuple[int, ...] = (8,), windows: int = 1, **options: object) -> list[ScanCell]:
    return [c for b in make_plan(parse_what(what), lengths, windows, [3, 3], **options) for c in b.cells()]  # type: ignore[arg-type]


def test_the_plan_is_the_product_of_layers_heads_lengths_and_windows() -> None:
    found = cells("head", (8, 16), windows=2)
    assert len(found) == len(set(found))
    assert set(found) == {ScanCell("head", *place) for place in product((0, 1), (0, 1, 2), (8, 16), (0, 1))}


def test_every_window_is_visited_once_so_that_one_forward_pass_serves_all_layers() -> None:
    places = [(cell.length, cell.window) for cell in cells("head,attention,model", (16, 8), windows=3)]
    visits = [place for i, place in enumerate(places) if i == 0 or places[i - 1] != place]
    assert visits == [(8, 0), (8, 1), (8, 2), (16, 0), (16, 1), (16, 2)]


def test_choices_in_brackets_win_over_those_for_all() -> None:
    found = cells("head[layers=1,heads=0,2],attention[lengths=4]", layers=(0,))
    assert found == [ScanCell("attention", 0, None, 4, 0), ScanCell("head", 1, 0, 8, 0), ScanCell("head", 1, 2, 8, 0)]


def test_choices_of_the_same_kind_are_joined_without_repeating_a_cell() -> None:
    found = cells("head[layers=0,heads=0,1],head[layers=0,heads=1,2]")
    assert [cell.head for cell in found] == [0, 1, 2]


def test_the_whole_model_has_no_layer() -> None:
    assert cells("model", layers=(1,)) == [ScanCell("model", None, None, 8, 0)]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("head[layers=2]", "layer 2 does not exist: this model has 2 layers, 0 to 1"),
        ("head[heads=1-3]", "head 3 does not exist: layer 0 has 3 heads, 0 to 2"),
        ("mlp[heads=0]", "heads are chosen for what=head, not for mlp"),
    ],
)
def test_places_that_do_not_exist_are_refused(what: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        cells(what)


@pytest.mark.parametrize(
    "settings",
    [
        *({"rtol": 0.0}, {"rtol": 1.0}, {"confidence": 1.0}, {"seed": -1}, {"windows": 0}, {"bounds": "some"}),
        *({"rtol": "x"}, {"rtol": float("nan")}, {"confidence": None}, {"seed": 2**64}, {"seed": 10**5000}),
        *({"seed": 1.5}, {"seed": True}, {"windows": 10**30}, {"windows": "3"}, {"explain": 1}, {"bounds": [1]}),
    ],
)
def test_settings_without_an_answer_are_refused(settings: dict) -> None:
    with pytest.raises(InvalidInput) as refused:
        ScanSettings(**settings)
    assert len(str(refused.value)) < 200
