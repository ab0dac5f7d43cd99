"""What the report says is what the rows say."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import linregress

import howsmooth as hs
from howsmooth.reports import group_headline, groups
from howsmooth.reports import report as write_report
from howsmooth.reports.findings import bound_distances, ends, growths, methods, readable, why
from howsmooth.reports.page import embedded, page
from howsmooth.reports.payload import group_data, pack_shares
from howsmooth.reports.scan_groups import Group
from tests.reports.measured import Measured, stored

TINY = {"model": "m", "what": "head", "layer": 0, "head": 0, "length": 8, "value": 1.0}


@pytest.fixture(scope="module")
def scan() -> Measured:
    return stored()


@pytest.fixture(scope="module")
def group(scan: Measured) -> Group:
    (found,) = groups(scan)
    return found


def test_headline_names_the_roughest_head_by_how_much_and_why(scan: Measured, group: Group) -> None:
    rows = [row for row in scan.rows if (row["what"], row["length"]) == ("head", 128)]
    values = np.zeros((6, 12))
    for row in rows:
        values[row["layer"], row["head"]] = max(values[row["layer"], row["head"]], row["value"])
    layer, head = np.unravel_index(values.argmax(), values.shape)
    worst = max(rows, key=lambda row: row["value"])
    said = group_headline(group)
    assert said.startswith(f"Layer {layer}, head {head} of minilm [float32] is the roughest of 72 heads: at n = 128 ")
    assert f"by {values.max():.3g} ε, {values.max() / np.median(values):.2g} times the median head." in said
    assert f"{100 * worst['value_share']:.0f} % of it goes through the value path" in said
    token = scan.tokens["minilm", 128, worst["window"]][worst["sink_token"]]
    assert f"“{token}” at position {worst['sink_token']} receives {100 * worst['sink'] / 128:.0f} % of all" in said


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.9, "90 % of it goes through the value path: the token at position 3 receives 50 % of all attention."),
        (0.2, "80 % of it goes through the score path, where the attention weights themselves move; the token"),
        (1.1, "The value path makes all of it, against the score path; "),
        (-0.1, "The score path makes all of it, against the value path; "),
        (1.001, "100 % of it goes through the value path: "),
    ],
)
def test_a_sink_explains_only_a_rough_value_path(share: float, said: str) -> None:
    (found,) = groups([TINY | {"value_share": share, "sink": 4.0, "sink_token": 3}])
    assert why(found.rows[0], found).startswith(said)


def test_a_scan_that_stopped_amid_a_length_is_judged_by_the_last_whole_one(scan: Measured) -> None:
    kept = [row for row in scan.rows if row["length"] < 128 or (row["layer"] < 2 and row["what"] == "head")]
    (found,) = groups(kept)
    assert "is the roughest of 72 heads: at n = 64 tokens" in group_headline(found)
    assert dict(methods(found))["gaps"] == "Not every length is complete: n = 128 has 24 of 72 heads."
    assert "n = 128 has 24 of 72 heads." in page([found])
    assert "gaps" not in dict(methods(groups(scan)[0]))


def test_exponents_equal_those_of_scipy_and_errors_are_not_smaller(scan: Measured, group: Group) -> None:
    fits = growths(group)
    assert len(fits) == 78
    for cell in [("head", 3, 3), ("head", 0, 7), ("attention", 5, None)]:
        rows = [row for row in scan.rows if (row["what"], row["layer"], row["head"]) == cell]
        line = linregress(np.log([row["length"] for row in rows]), np.log([row["value"] for row in rows]))
        assert fits[cell].exponent == pytest.approx(line.slope, rel=1e-9)
        means = {n: np.mean([np.log(row["value"]) for row in rows if row["length"] == n]) for n in group.lengths}
        steps = np.diff(list(means.values())) / np.diff(np.log(list(means)))
        bend = np.sqrt(np.mean((steps - line.slope) ** 2))
        assert fits[cell].error == pytest.approx(max(bend, line.stderr), rel=1e-9)


def growing(values: Callable[[int], float], lengths: Sequence[int], windows: int = 1) -> list[dict[str, Any]]:
    """Rows of one head whose values are a function of n, the same in all windows."""
    head = {"model": "m", "what": "head", "layer": 0, "head": 0}
    return [head | {"length": n, "window": w, "value": values(n)} for n in lengths for w in range(windows)]


@pytest.mark.parametrize("windows", [1, 3, 1000])
def test_no_exponent_of_values_that_bend_is_said_to_be_sure(windows: int) -> None:
    lengths = (16, 32, 64, 128)
    (bent,) = growths(groups(growing(lambda n: n**0.5 / (1 + n / 50), lengths, windows))[0]).values()
    steps = np.diff(np.log([n**0.5 / (1 + n / 50) for n in lengths])) / np.log(2)
    assert bent.error is not None
    assert bent.error >= 0.5 * np.abs(steps - bent.exponent).max()
    (barely,) = growths(groups(growing(lambda n: n**0.5 * (1 + n / 1e4), lengths, windows))[0]).values()
    assert not str(barely).endswith("± 0.00")
    (power,) = growths(groups(growing(lambda n: 3 * n**0.5, lengths, windows))[0]).values()
    assert str(power) == "n^0.50 ± 0.00"


def test_two_lengths_tell_nothing_about_the_law() -> None:
    (fit,) = growths(groups(growing(lambda n: n**0.5, (16, 32), windows=8))[0]).values()
    assert (str(fit), fit.error) == ("n^0.50", None)


def test_windows_are_counted() -> None:
    few, many = growing(lambda n: 1.0, (16, 32), windows=3), growing(lambda n: 1.0, (64,), windows=1)
    assert dict(methods(groups(few)[0]))["windows per length"] == "3"
    assert dict(methods(groups(few + many)[0]))["windows per length"] == "3 of n = 16, 3 of n = 32, 1 of n = 64"


def test_distances_are_ratios_to_the_measured_values(scan: Measured, group: Group) -> None:
    found = {one.name: one for one in bound_distances(group.roughest("head"))}
    best: dict[tuple[int, int], dict] = {}
    for row in scan.rows:
        key = (row["layer"], row["head"])
        if (row["what"], row["length"]) == ("head", 128) and row["value"] > best.get(key, {"value": 0})["value"]:
            best[key] = row
    ratios = [row["proved"] / row["value"] for row in best.values()]
    proved = found["howsmooth.three_path"]
    assert (proved.smallest, proved.largest) == (min(ratios), max(ratios))
    assert proved.middle == pytest.approx(float(np.median(ratios)))
    assert min(one.smallest for one in found.values()) >= 1
    local = [json.loads(row["bounds"])["howsmooth.local"] / row["value"] for row in best.values()]
    assert found["howsmooth.local"].largest == max(local)


def test_bounds_that_overflow_are_left_out() -> None:
    (found,) = groups([TINY | {"proved": math.inf, "bounds": {"a": None, "b": math.inf, "c": 3.0}}])
    assert [(one.name, one.middle) for one in bound_distances(found.rows)] == [("c", 3.0)]


def test_ends_are_rounded_outwards_and_say_how_sure_they_are() -> None:
    row = {"lower": 1.234567, "upper": 1.234561, "confidence": 0.99}
    assert ends(row) == "≥ 1.2345, ≤ 1.2346 with probability 99 %, rounding modelled"
    assert ends(row | {"confidence": 1.0}) == "≥ 1.2345, ≤ 1.2346, rounding modelled"
    assert ends(row | {"what": "layer"}) == "≥ 1.2345, ≤ 1.2346 with probability 99 %, rounding measured"
    assert ends(row | {"upper": None}) == ends(row | {"upper": math.inf}) == "≥ 1.2345, rounding modelled"


def test_methods_list_every_setting(scan: Measured, group: Group) -> None:
    found = dict(methods(group))
    first = scan.rows[0]
    assert found["weights, sha256"] == first["model_sha256"]
    assert found["text, sha256"] == first["text_sha256"]
    assert (found["layers"], found["lengths n"], found["windows per length"]) == ("0–5", "8, 16, 32, 64, 128", "2")
    assert (found["requested relative accuracy"], found["seed of the solver"]) == ("0.001", "0")
    assert (found["arithmetic"], found["confidence of each upper end"]) == ("float32", "0.99")
    assert found["precision of the weights"] == "float32"
    assert found["howsmooth"] == first["howsmooth"]
    assert found["cells"] == "780, of which 780 reached that accuracy"


def test_models_texts_and_precisions_are_kept_apart(scan: Measured) -> None:
    rows = [TINY, TINY | {"precision": "4-bit"}, TINY | {"text_sha256": "a"}, TINY | {"model": "other"}]
    assert [(g.model, g.precision, len(g.rows)) for g in groups(rows)] == [
        ("m", "", 1),
        ("m", "4-bit", 1),
        ("m", "", 1),
        ("other", "", 1),
    ]


def test_tokens_are_found_by_text_where_a_store_has_several() -> None:
    rows = [TINY | {"text_sha256": name} for name in "ab"]
    tokens = {("m", "a", 8, 0): ["one"], ("m", "b", 8, 0): ["two"]}
    first, second = groups(Measured(rows, tokens))  # type: ignore[arg-type]
    assert (first.tokens[8, 0], second.tokens[8, 0]) == (["one"], ["two"])


def test_cells_without_a_number_are_left_out_and_nothing_at_all_is_refused() -> None:
    assert len(groups([TINY, TINY | {"head": 1, "value": math.nan}])[0].rows) == 1
    with pytest.raises(hs.InvalidInput, match="holds no measured cell"):
        groups([])
    with pytest.raises(hs.InvalidInput, match="lacks 'value'"):
        groups([{"model": "m", "what": "head", "length": 8}])
    with pytest.raises(hs.InvalidInput, match="there is no scan at"):
        groups("nowhere.sqlite")


def test_packed_shares_unpack_to_what_they_were() -> None:
    shares = np.random.default_rng(0).dirichlet(np.ones(50))
    found = np.frombuffer(base64.b64decode(pack_shares(shares.tolist())), dtype="<u2") / 65535
    assert np.abs(found - shares).max() <= 0.5 / 65535 + 1e-12


def test_tokens_read_like_the_text() -> None:
    assert "".join(readable(["▁So", "▁she", "▁con", "sid", "ered"])) == " So she considered"
    assert "".join(readable(["[CLS]", "her", "eyes", "##ight", "[SEP]"])) == "[CLS] her eyesight [SEP]"
    raw = "café ’s\n".encode()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(b if b in printable else 256 + others.index(b)) for b in raw]
    cut = letters.index("Ġ")
    assert "".join(readable(["".join(letters[:cut]), "".join(letters[cut:])])) == "café ’s↵"
    assert readable(["plain", "words"]) == ["plain", "words"]


def test_embedded_data_cannot_leave_its_element() -> None:
    nasty = {"a</script>": "<!-- <script> & \" '"}
    said = embedded(nasty)
    assert not re.search("[<>&]", said)
    assert json.loads(said) == nasty


def test_hidden_characters_are_written_out_in_the_page() -> None:
    hidden = "\x1b[2J \u202eevil\u2066 \x9b \u2028 \ud800 \\u001b"
    said = json.loads(embedded({"tokens": [hidden, "نیم\u200cفاصله", "👩\u200d🔬"]}))["tokens"]
    assert said[0] == "⟨U+001B⟩[2J ⟨U+202E⟩evil⟨U+2066⟩ ⟨U+009B⟩ ⟨U+2028⟩ ⟨U+D800⟩ \\u001b"
    assert said[1:] == ["نیم\u200cفاصله", "👩\u200d🔬"]  # joiners are part of the word


def test_names_turn_no_page_around() -> None:
    rows = [row | {"model": "a\u202eb\x1b", "text": "c\u2067"} for row in growing(lambda n: 1.0, (8,))]
    whole = page(groups(rows), documentation="https://example.org/\udcff")
    assert whole.encode()
    assert "a⟨U+202E⟩b⟨U+001B⟩" in whole
    assert not re.search("[\u202e\u2067\x1b]", whole)


@pytest.mark.slow
def test_the_page_of_a_demo_is_below_five_megabytes(scan: Measured) -> None:
    """Two models, one of 30 layers × 9 heads at six lengths up to 256 with three windows, all with energies."""
    heads = [row for row in scan.rows if row["what"] == "head" and row["head"] < 9 and row["window"] == 0]
    at = {(row["layer"], row["head"], row["length"]): row for row in heads}
    big = Measured(list(scan.rows), dict(scan.tokens), dict(scan.energies))
    for layer in range(30):
        for head in range(9):
            for length in (8, 16, 32, 64, 128, 256):
                energy = np.random.default_rng(layer).dirichlet(np.ones(length)).tolist()
                for window in range(3):
                    place = {"model": "big", "layer": layer, "length": length, "window": window}
                    big.rows.append(at[layer % 6, head, min(length, 128)] | place)
                    big.energies["big", layer, head, length, window] = energy
                    big.tokens["big", length, window] = ["token"] * length
    size = len(page(groups(big)).encode())
    assert 1_000_000 < size < 5_000_000


def test_energies_beyond_their_room_leave_out_the_later_windows() -> None:
    rows = [TINY | {"head": head, "length": 4096, "window": window} for head in range(60) for window in range(4)]
    energies = {("m", 0, head, 4096, window): [1 / 4096] * 4096 for head in range(60) for window in range(4)}
    (packed,) = group_data(groups(Measured(rows, {}, energies)))  # type: ignore[arg-type]
    assert {key.rpartition("/")[2] for key in packed["energies"]} == {"0", "1"}
    assert len(packed["energies"]) == 120


def test_a_wrong_ending_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hs.InvalidInput, match=r"use \.html"):
        write_report([TINY], tmp_path / "report.pdf")
    with pytest.raises(hs.InvalidInput, match="does not exist"):
        write_report([TINY], tmp_path / "no" / "report.html")
