"""Rounded keys and values of real models: proved, predicted and measured, and what a budget of bits is best spent on.

Every function takes a model and windows, so that tests run the same code on a tiny one. What is found of a window is
kept as soon as it is known in the file that ``HOWSMOOTH_KEPT`` names, from where a run that was stopped goes on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor

from evidence.rounded_caches_ascents import attack_table
from evidence.rounded_caches_defaults import default_ranking
from evidence.rounded_caches_direct import correlations, direct, direct_by_window
from evidence.rounded_caches_sinks import PICTURES, sink_damage, sink_picture, sink_table
from evidence.rounded_caches_spending import SPENT, Spending, run_choices, spending_table
from evidence.rounded_caches_windows import Step, in_windows, stored_window
from evidence.rounding_baselines import RIVALS, joined, rivals
from evidence.stories import stories15m
from evidence.tables import table
from howsmooth.models import CapturedSite, OpenModel, Window, open_model
from howsmooth.rounding import Format, parse_format, parse_formats
from howsmooth.rounding.activation_noise import ActivationNoise, rounding_noise
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.output_error import output_errors
from howsmooth.rounding.quantisation import Tensors
from howsmooth.rounding.rounded_model import RoundedModel, Scores, sampled_scores

TITLE = "Rounded keys and values"
FORMATS = (
    "int8,int6,int4,int3,int2,int8[asymmetric],int4[asymmetric],int3[asymmetric],int4[per=channel],int4[group=16],"
    "int4[per=channel,group=32],int4[first=4],int4[rotary=before],fp8_e4m3,fp8_e5m2,nvfp4,mxfp4,bf16,fp16"
)
RANKED = "int3"
ORDERS = ("int8", "int4", "int3")
QUANTILES = (0.9, 0.99, 1.0)
ABOUT = """Heads by themselves in all windows; what takes passes through the model in at most eight of them.
`predicted KL` of a choice is the sum over caches; intervals are over windows (1.96 standard errors)."""
PASSES = 8
"""Windows for what takes passes through the model: heads by themselves are looked at in all of them."""


@dataclass(frozen=True)
class Ratios:
    """Of one format and part over all heads and windows."""

    format: str
    part: str
    heads: int
    violations: int
    proved: float
    closest: float
    first_order: float
    off: float
    quantiles: tuple[float, ...]
    within: float


def head_ratios(opened: OpenModel, windows: Sequence[Window], formats: Sequence[Format], tell: Step) -> list[Ratios]:
    """Proved ÷ actual (median and least) and first order ÷ actual: its median, the median and other quantiles of
    |ratio − 1|, and the share of heads within 10 %."""
    names = ("actual", "predicted", "proved")

    def of(reader: RoundedModel, window: Window) -> Tensors:
        found = [output_errors(site, formats) for site in reader.sites]
        return {name: torch.cat([getattr(one, name) for one in found], -1) for name in names}

    found = in_windows(opened, windows, "heads", [form.name for form in formats], of, tell)
    actual, first, proved = (torch.cat([one[name] for one in found], -1) for name in names)
    wrong = (proved < actual).sum(-1)
    bound, order = (some / actual.clamp_min(1e-300) for some in (proved, first))
    return [
        Ratios(
            form.name,
            part,
            bound.shape[-1],
            int(wrong[p, f]),
            float(bound[p, f].median()),
            float(bound[p, f].min()),
            float(order[p, f].median()),
            float((order[p, f] - 1).abs().median()),
            tuple(torch.quantile((order[p, f] - 1).abs(), torch.tensor(QUANTILES, dtype=order.dtype)).tolist()),
            float(((order[p, f] - 1).abs() <= 0.1).double().mean()),
        )
        for f, form in enumerate(formats)
        for p, part in enumerate(PARTS)
    ]


def ratio_table(ratios: Sequence[Ratios]) -> str:
    """The ratios of all formats."""
    columns = ["format", "of", "heads × windows", "violations", "proved ÷ actual", "least", "first order ÷ actual"]
    rows = []
    for one in ratios:
        numbers = [f"{one.proved:.3g}", f"{one.closest:.3g}", f"{one.first_order:.3f}", f"{one.off:.2%}"]
        rows.append([one.format, f"{one.part}s", one.heads, one.violations, *numbers])
    return table([*columns, "off by"], rows)


def order_table(ratios: Sequence[Ratios]) -> str:
    """How far first order is off on most heads and on the worst, for keys in the formats of `ORDERS`."""
    rows = [
        [one.format, one.heads, *(f"{cut:.2%}" for cut in (one.off, *one.quantiles)), f"{one.within:.2%}"]
        for one in ratios
        if one.part == "key" and one.format in ORDERS
    ]
    cuts = [f"{share:.0%} of heads" for share in QUANTILES[:-1]]
    return table(["keys in", "heads × windows", "median", *cuts, "most", "within 10 %"], rows)


def predicted(
    opened: OpenModel, windows: Sequence[Window], formats: Sequence[Format], samples: int, tell: Step
) -> Scores:
    """Sampled scores of all windows."""

    def of(reader: RoundedModel, window: Window) -> Tensors:
        scores = sampled_scores(reader, formats, samples, seed=window.start)
        return {"products": scores.products, "sizes": torch.tensor([scores.tokens, scores.group])}

    found = in_windows(opened, windows, "scores", [samples, *(form.name for form in formats)], of, tell)
    return joined([Scores(one["products"], *one["sizes"].tolist()) for one in found])


def mean_rivals(opened: OpenModel, windows: Sequence[Window], form: Format, tell: Step) -> dict[str, Tensor]:
    """Every rival, mean over windows, name → ``(layers, 2)``."""

    def of(reader: RoundedModel, window: Window) -> Tensors:
        return rivals(reader.sites, form)

    found = in_windows(opened, windows, "rivals", form.name, of, tell)
    return {name: torch.stack([one[name] for one in found]).mean(0) for name in RIVALS}


def ranking(guess: Tensor, truth: Tensor, others: dict[str, Tensor]) -> str:
    """The predicted damage and its rivals against the direct one, layer by layer, ``(layers, 2)`` each."""
    rows = [["predicted KL", *correlations(guess, truth), f"{float((guess / truth).median()):.2f}"]]
    rows += [[name, *correlations(others[name], truth), "–"] for name in RIVALS]
    return table(["ranked by", "keys", "values", "together", "median predicted ÷ direct"], rows)


def ranking_by_size(scores: Scores, truth: Tensor, place: int) -> str:
    """How many windows and samples the ranking takes; ``truth`` is ``(windows, layers, 2)``, ``place`` of the format.

    The direct KL is that of the same windows. Means over all disjoint sets of so many windows.
    """
    windows, layers = len(truth), truth.shape[1]
    products = scores.products.sum(-1)[:, :, :, place].unflatten(0, (windows, -1))
    rows = []
    for count in (size for size in (1, 2, 4, 8, 16) if windows % size == 0):
        for samples in sorted({max(products.shape[1] // 3, 2), products.shape[1]}):
            found = []
            for some, exact in zip(products.split(count), truth.split(count), strict=True):
                guess = scores.damage(some[:, :samples].flatten(0, 1))[0]
                found.append([float(one) for one in correlations(guess, exact.mean(0))])
            least = torch.tensor(found).amin(0).tolist()
            mean = torch.tensor(found).mean(0).tolist()
            rows.append([count, samples, *(f"{a:.2f} ({b:.2f})" for a, b in zip(mean, least, strict=True))])
    return table(["windows", "samples each", f"keys, {layers} layers: mean (least)", "values", "together"], rows)


def noise_table(opened: OpenModel, window: Window, dtype: str) -> tuple[str, list[str]]:
    """The noise of low precision layer by layer, and Spearman with the ratio."""

    def find() -> Tensors:
        return vars(rounding_noise(opened, window, dtype))

    numbers = stored_window(opened, window, "noise", dtype, find)
    found = ActivationNoise(**numbers)
    rows = [
        [
            row["layer"],
            f"{row['actual']:.3g}",
            f"{row['predicted'] / row['actual']:.2f}",
            f"{row['actual_token']:.3g}",
            f"{row['predicted_token'] / row['actual_token']:.2f}",
            "embedding" if row["source"] < 0 else f"layer {row['source']} ({row['share']:.0%})",
        ]
        for row in found.rows()
    ]
    head = ["layer", "noise", "predicted ÷ actual", "median token", "predicted ÷ actual ", "largest share"]
    said = [
        f"{spearmanr(found.predicted.numpy(), found.actual.numpy()).statistic:.3f}",
        f"{spearmanr(found.predicted_token.numpy(), found.actual_token.numpy()).statistic:.3f}",
        f"{float((found.predicted_token / found.actual_token).median()):.2f}",
    ]
    return table(head, rows), said


def study(
    opened: OpenModel,
    learn: str,
    held: str,
    length: int,
    windows: int,
    samples: int,
    by_head: bool,
    tell: Step,
    rival_windows: int = 1,
    picture: Path | None = None,
    defaults: dict[str, int] | None = None,
) -> list[str]:
    """All tables of one model: heads in all windows, what takes passes through the model in `PASSES` of them.

    ``picture``: where that of the first tokens goes; None draws none. ``defaults``: what the command's own run has in
    place of its settings.
    """
    every, apart = opened.windows(learn, length, windows, 0), max(1, windows // PASSES)
    learnt, kept = every[::apart], opened.windows(held, length, windows, 0)[::apart]
    width = opened.model.config.hidden_size // opened.model.config.num_attention_heads
    fitting = [one for one in parse_formats(FORMATS) if one.per != "token" or width % (one.group or width) == 0]
    ratios = head_ratios(opened, every, fitting, tell)
    spent, form = parse_formats(SPENT), parse_format(RANKED)
    scores = predicted(opened, learnt, spent, samples, tell)
    truth = direct_by_window(opened, learnt, form, False, tell).sum(-1)
    spending, some = Spending.of(opened, scores, length), kept[::2]
    run = run_choices(opened, kept, spending.choices(), "choices", tell)
    first = sink_damage(opened, some, tell)
    others = mean_rivals(opened, learnt[:rival_windows], form, tell)
    run += run_choices(opened, kept, spending.rival_choices(others), "choices of rivals", tell)
    place = spent.index(form)
    four = _four(RoundedModel.of(opened.model, opened.inputs(opened.windows(learn, 32, 1, 0)[0])).sites)
    parts = [
        f"## {opened.name}, {windows} windows of {length} tokens of WikiText-2 ({opened.precision})",
        "Change of each head's output, keys or values rounded: proved ÷ actual and first order ÷ actual.",
        ratio_table(ratios),
        "The same head by head: |first order ÷ actual − 1| of keys.",
        order_table(ratios),
        "Errors that climb on change ÷ bound inside the cell of a format, at 32 tokens in layers "
        f"{', '.join(str(site.layer) for site in four)}: above 1 would be a violation.",
        attack_table(four, tell),
        f"Spearman's correlation with the KL of rounding one layer to {RANKED} at a time, in {len(learnt)} of the "
        f"windows with {samples} samples each (rivals: in {rival_windows} of them).",
        ranking(scores.by_layer[:, :, place], truth.mean(0), others),
        "The same for fewer windows and samples: means over disjoint sets of windows, the least in brackets.",
        ranking_by_size(scores, truth, place),
        default_ranking(opened, learn, RANKED, tell, **(defaults or {})),
    ]
    if by_head:
        few = min(len(learnt), 4)
        alone = direct(opened, learnt[:few], form, True, tell)
        own = Scores(scores.products[: few * samples], scores.tokens, scores.group)
        guess = own.by_cache[:, :, place]
        parts.append(
            f"One head at a time ({alone.numel()} caches, {few} windows): Spearman "
            f"{', '.join(correlations(guess, alone))} for keys, "
            f"values and together; median predicted ÷ direct {float((guess / alone).median()):.2f}."
        )
    parts.append(f"Equal bits, chosen on these windows and run on {len(kept)} of the test text.")
    parts.append(spending_table(run))
    parts += [f"What the first tokens carry, everything rounded, {len(some)} windows.", sink_table(first)]
    return parts if picture is None else [*parts, sink_picture(first, opened, picture)]


def _four(sites: Sequence[CapturedSite]) -> list[CapturedSite]:
    """Four layers, the first and the last among them."""
    return [sites[place] for place in sorted({round(k * (len(sites) - 1) / 3) for k in range(4)})]


def texts() -> tuple[str, str]:
    """WikiText-2, validation and test."""
    folder = Path(os.environ.get("HOWSMOOTH_SHARED") or Path(__file__).resolve().parents[2] / "shared") / "data"
    return (folder / "wikitext2-valid.txt").read_text(), (folder / "wikitext2-test.txt").read_text()


def parts(tell: Step) -> list[str]:
    """The page. HOWSMOOTH_SAMPLE=1 makes it from few and short windows."""
    sample = bool(os.environ.get("HOWSMOOTH_SAMPLE"))
    length, windows, samples = (64, 2, 16) if sample else (256, 16, 24)
    learn, held = texts()
    smollm2 = open_model("smollm2", head=True)
    picture = PICTURES / "sink-tokens.png"
    found = [ABOUT, *study(smollm2, learn, held, length, windows, samples, False, tell, picture=picture)]
    tell("smollm2: noise")
    whole = open_model("smollm2")
    noise, said = noise_table(whole, whole.windows(learn, 64, 1, 0)[0], "bf16")
    found += [
        "## SmolLM2 in bfloat16, 64 tokens",
        f"Spearman of predicted and actual noise over layers: {said[0]} (norm of all tokens), {said[1]} (median "
        f"token); median ratio for the median token {said[2]}. Matrix products in bfloat16 are torch's on this CPU.",
        noise,
    ]
    sizes = (128, 8, 16) if sample else (256, 16, 24)
    picture = PICTURES / "sink-tokens-stories15m.png"
    return found + study(stories15m(), learn[:400_000], held[:400_000], *sizes, True, tell, 2, picture)
