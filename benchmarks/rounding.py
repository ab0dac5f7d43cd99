"""The damage of rounded caches, predicted at once or found by a pass for each."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.report import Section, Table, Target
from howsmooth.models import alice, open_model
from howsmooth.rounding import parse_formats
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.rounded_model import RoundedModel, sampled_scores

TEXT = """KL of the next token for rounding each layer × key–value head × keys or values × 4 formats by itself.
*Predicted*: one forward and 24 backward passes score all of them. *Direct*: a forward pass for each, with its KL; the
seconds are those of the number of passes it takes, each as long as the shortest of those that were run. The two take
turns in three rounds."""
FORMATS, SAMPLES, LEAST, ROUNDS = "int8,int4,int3,fp8_e4m3", 24, 10.0, 3


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Time both ways in one run."""
    name, length = ("random:llama[layers=2,width=64]", 32) if quick else ("smollm2", 64)
    opened, formats = open_model(name, head=True), parse_formats(FORMATS)
    [window] = opened.windows(alice(), length, 1)
    report("capturing")
    reader = RoundedModel.of(opened.model, opened.inputs(window))
    exact = reader.outcome()
    predicted, each = float("inf"), float("inf")
    for turn in range(ROUNDS):
        report(f"predicted, round {turn + 1}")
        begun = time.perf_counter()
        scores = sampled_scores(reader, formats, SAMPLES)
        predicted = min(predicted, time.perf_counter() - begun)
        report(f"direct, round {turn + 1}")
        for form in formats:
            begun = time.perf_counter()
            reader.damage(exact, reader.outcome({(0, PARTS[0]): form}))
            each = min(each, time.perf_counter() - begun)
    passes = scores.by_cache.numel() + 1
    gain = passes * each / predicted
    columns = ["model", "n", "caches × formats", "predicted", "seconds", "direct", "seconds ", "times faster"]
    ways = [f"1 + {SAMPLES} passes", f"{predicted:.2f}", f"{passes} passes", f"{passes * each:.1f}"]
    row = [name, length, passes - 1, *ways, f"{gain:.1f}"]
    section = Section("rounding", "Rounded caches", TEXT, [Table(columns, [[str(cell) for cell in row]])])
    what = f"KL of all roundings, {name}, n = {length}"
    section.targets = [Target(what, f"≥ {LEAST:g}× faster", f"{gain:.0f}×", gain >= LEAST)]
    return section
