"""Rounded keys and values of real models: proved, predicted and measured, and what a budget of bits is best spent on.

Every function takes a model and windows, so that tests run the same code on a tiny one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import Tensor

from evidence.stories import stories15m
from evidence.tables import table
from howsmooth.models import OpenModel, Window, open_model
from howsmooth.rounding import Format, parse_format, parse_formats
from howsmooth.rounding.allocation import allocate, by_sensitivity, first_and_last, uniform
from howsmooth.rounding.answers import answers
from howsmooth.rounding.caches import PARTS
from howsmooth.rounding.noise import rounding_noise
from howsmooth.rounding.quantising import Check, checked
from howsmooth.rounding.rivals import RIVALS, rivals
from howsmooth.rounding.running import Reader
from howsmooth.rounding.scores import Scores, joined, sampled_scores

TITLE = "Rounded keys and values"
FORMATS = (
    "int8,int6,int4,int3,int2,int8[asymmetric],int4[asymmetric],int3[asymmetric],int4[per=channel],int4[group=16],"
    "int4[per=channel,group=32],int4[first=4],int4[rotary=before],fp8_e4m3,fp8_e5m2,nvfp4,mxfp4,bf16,fp16"
)
SPENT = "int8,int6,int4,int3,int2"
BUDGETS = ("int3", "int4", "int6")
"""Budgets are what these formats take everywhere, so that uniform spends all of it."""
RANKED = "int3"
Step = Callable[[str], None]


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


def head_ratios(opened: OpenModel, windows: Sequence[Window], formats: Sequence[Format], tell: Step) -> list[Ratios]:
    """Proved ÷ actual (median and least) and first order ÷ actual (median, and the median of |ratio − 1|)."""
    proved: list[Tensor] = []
    first: list[Tensor] = []
    wrong = torch.zeros(len(PARTS), len(formats))
    for place, window in enumerate(windows):
        tell(f"{opened.name}: heads in window {place + 1} of {len(windows)}")
        for site in Reader.of(opened.model, opened.inputs(window)).sites:
            found = answers(site, formats)
            wrong += (found.proved < found.actual).sum(-1)
            actual = found.actual.clamp_min(1e-300)
            proved.append(found.proved / actual)
            first.append(found.predicted / actual)
    bound, order = torch.cat(proved, -1), torch.cat(first, -1)
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


def predicted(
    opened: OpenModel, windows: Sequence[Window], formats: Sequence[Format], samples: int, tell: Step
) -> Scores:
    """Sampled scores of all windows."""
    found = []
    for place, window in enumerate(windows):
        tell(f"{opened.name}: scores in window {place + 1} of {len(windows)}")
        reader = Reader.of(opened.model, opened.inputs(window))
        found.append(sampled_scores(reader, formats, samples, seed=place))
    return joined(found)


def direct(opened: OpenModel, windows: Sequence[Window], form: Format, by_head: bool, tell: Step) -> Tensor:
    """KL of rounding one layer's (or head's) keys or values at a time, a pass for each: ``(layers, 2, heads or 1)``."""
    total: Tensor | float = 0.0
    for place, window in enumerate(windows):
        tell(f"{opened.name}: direct KL in window {place + 1} of {len(windows)}")
        reader = Reader.of(opened.model, opened.inputs(window))
        exact, heads = reader.outcome(), reader.sites[0].attention.kv_heads
        alone = [[form if h == head else None for h in range(heads)] for head in range(heads)] if by_head else [form]
        rows = [
            [[reader.damage(exact, reader.outcome({(layer, part): one})) for one in alone] for part in PARTS]
            for layer in range(len(reader.sites))
        ]
        total = total + torch.tensor(rows, dtype=torch.float64)
    assert isinstance(total, Tensor)
    return total / len(windows)


def correlations(guess: Tensor, truth: Tensor) -> list[str]:
    """Spearman's correlation for keys, values and both, ``(layers, 2, …)`` each."""
    pairs = [(guess[:, 0], truth[:, 0]), (guess[:, 1], truth[:, 1]), (guess, truth)]
    return [f"{spearmanr(a.flatten().numpy(), b.flatten().numpy()).statistic:.2f}" for a, b in pairs]


def ranking(
    opened: OpenModel, scores: Scores, truth: Tensor, windows: Sequence[Window], form: Format, place: int
) -> str:
    """The predicted damage and its rivals against the direct one, layer by layer."""
    guess = scores.by_layer[:, :, place]
    rows = [["predicted KL", *correlations(guess, truth), f"{float((guess / truth).median()):.2f}"]]
    found = [rivals(Reader.of(opened.model, opened.inputs(window)).sites, form) for window in windows]
    for name in RIVALS:
        mean = torch.stack([one[name] for one in found]).mean(0)
        rows.append([name, *correlations(mean, truth), "–"])
    return table(["ranked by", "keys", "values", "together", "median predicted ÷ direct"], rows)


def spending(
    opened: OpenModel, scores: Scores, windows: Sequence[Window], learnt: Sequence[Window], length: int, tell: Step
) -> str:
    """Allocations of equal bits on held-out windows."""
    formats = parse_formats(SPENT)
    reader = Reader.of(opened.model, opened.inputs(learnt[0]))
    attention = reader.sites[0].attention
    bits = [form.bits_per_number(attention.key_weight.shape[1], length, attention.kv_heads) for form in formats]
    found, others, rows = scores.by_cache, rivals(reader.sites, parse_format("int4")), []
    for budget in (bits[[form.name for form in formats].index(name)] for name in BUDGETS):
        choices = {
            "allocation, per head": allocate(found, formats, bits, budget, "head"),
            "allocation": allocate(found, formats, bits, budget, "part"),
            "uniform": uniform(found, formats, bits, budget),
            "first and last N": first_and_last(found, formats, bits, budget),
            **{name: by_sensitivity(others[name], found, formats, bits, budget) for name in RIVALS if name != "ends"},
        }
        tell(f"{opened.name}: {budget:.4g} bits")
        checks = checked(opened, windows, {"exact": None, **choices})
        ours = next(check for check in checks if check.name == "allocation")
        rows += [_spent(budget, check, ours) for check in checks if check.allocation is not None]
    head = [
        "budget",
        "choice",
        "bits",
        "predicted KL",
        "KL",
        "± 95 %",
        "KL less that of the allocation, ± 95 %",
        "perplexity",
    ]
    return table(head, rows)


def _spent(budget: float, check: Check, ours: Check) -> list[str]:
    assert check.allocation is not None
    apart = torch.tensor(check.damage).double() - torch.tensor(ours.damage).double()
    wide = 1.96 * float(apart.std()) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    return [
        f"{budget:.4g}",
        check.name,
        f"{check.allocation.bits:.3f}",
        f"{check.allocation.damage:.4g}",
        f"{check.mean:.4g}",
        f"{1.96 * check.error:.2g}",
        f"{float(apart.mean()):+.2g} ± {wide:.2g}",
        f"{check.perplexity:.4g}" if check.perplexity is not None else "–",
    ]


def sinks(opened: OpenModel, windows: Sequence[Window], tell: Step) -> str:
    """KL with everything in int4 and int3, and with the first tokens kept exact."""
    rows = []
    for base in ("int4", "int3"):
        damage: dict[int, list[list[float]]] = {}
        for window in windows:
            tell(f"{opened.name}: first tokens, {base}")
            reader = Reader.of(opened.model, opened.inputs(window))
            exact, layers = reader.outcome(), range(len(reader.sites))
            for first in (0, 1, 4):
                form = parse_format(f"{base}[first={first}]")
                kinds = [("key",), ("value",), PARTS]
                runs = [{(layer, part): form for layer in layers for part in parts} for parts in kinds]
                damage.setdefault(first, []).append([reader.damage(exact, reader.outcome(one)) for one in runs])
        for first, values in damage.items():
            mean = torch.tensor(values).mean(0).tolist()
            rows.append([base, first, *(f"{value:.4g}" for value in mean)])
    return table(["format", "first tokens exact", "KL, keys", "KL, values", "KL, both"], rows)


def noise_table(opened: OpenModel, window: Window, dtype: str) -> tuple[str, list[str]]:
    """The noise of low precision layer by layer, and Spearman with the ratio."""
    found = rounding_noise(opened, window, dtype)
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
    opened: OpenModel, learn: str, held: str, length: int, windows: int, samples: int, by_head: bool, tell: Step
) -> list[str]:
    """All tables of one model."""
    learnt = opened.windows(learn, length, windows, 0)
    kept = opened.windows(held, length, windows, 0)
    width = opened.model.config.hidden_size // opened.model.config.num_attention_heads
    fitting = [one for one in parse_formats(FORMATS) if one.per != "token" or width % (one.group or width) == 0]
    ratios = head_ratios(opened, learnt, fitting, tell)
    spent = parse_formats(SPENT)
    scores = predicted(opened, learnt, spent, samples, tell)
    form = parse_format(RANKED)
    truth = direct(opened, learnt, form, False, tell).sum(-1)
    ranks = ranking(opened, scores, truth, learnt[:2], form, spent.index(form))
    heads = f"{opened.name}, {windows} windows of {length} tokens of WikiText-2, {samples} samples each"
    parts = [
        f"## {heads} ({opened.precision})",
        "Change of each head's output, keys or values rounded: proved ÷ actual and first order ÷ actual.",
        ratio_table(ratios),
        f"Spearman's correlation with the KL of rounding one layer to {RANKED} at a time, on the same windows.",
        ranks,
    ]
    if by_head:
        alone = direct(opened, learnt, form, True, tell)
        guess = scores.by_cache[:, :, spent.index(form)]
        parts.append(
            f"One head at a time ({alone.numel()} caches): Spearman {', '.join(correlations(guess, alone))} for keys, "
            f"values and together; median predicted ÷ direct {float((guess / alone).median()):.2f}."
        )
    parts.append("Equal bits, chosen on the windows above and run on as many windows of the test text.")
    parts.append(spending(opened, scores, kept, learnt, length, tell))
    parts += ["What the first tokens carry, everything rounded.", sinks(opened, kept, tell)]
    return parts


def texts() -> tuple[str, str]:
    """WikiText-2, validation and test."""
    folder = Path(os.environ.get("HOWSMOOTH_SHARED") or Path(__file__).resolve().parents[2] / "shared") / "data"
    return (folder / "wikitext2-valid.txt").read_text(), (folder / "wikitext2-test.txt").read_text()


def parts(tell: Step) -> list[str]:
    """The page. HOWSMOOTH_SAMPLE=1 makes it from few and short windows."""
    sample = bool(os.environ.get("HOWSMOOTH_SAMPLE"))
    length, windows, samples = (64, 2, 16) if sample else (256, 16, 24)
    learn, held = texts()
    sizes = (128, 8, 16) if sample else (256, 16, 24)
    found = study(stories15m(), learn[:400_000], held[:400_000], *sizes, True, tell)
    smollm2 = open_model("smollm2", head=True)
    found += study(smollm2, learn, held, length, windows, samples, False, tell)
    tell("smollm2: noise")
    whole = open_model("smollm2")
    noise, said = noise_table(whole, whole.windows(learn, 64, 1, 0)[0], "bf16")
    found += [
        "## SmolLM2 in bfloat16, 64 tokens",
        f"Spearman of predicted and actual noise over layers: {said[0]} (norm of all tokens), {said[1]} (median "
        f"token); median ratio for the median token {said[2]}. Matrix products in bfloat16 are torch's on this CPU.",
        noise,
    ]
    return found
