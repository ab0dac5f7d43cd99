"""From a model and a text to output errors, predicted damage, an allocation of formats, and its check."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howsmooth._util.annotations import PlainText
from howsmooth._util.common import rounded
from howsmooth._util.display import step_bar
from howsmooth._util.ledger import Ledger
from howsmooth._util.validation import Count, Device, Seed, validated
from howsmooth.attention.conversion import plain_map
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.models import OpenModel, Window, alice, open_model
from howsmooth.models.open_source import Dtype
from howsmooth.rounding.allocation import Allocation, Unit, allocate, check_budget, first_and_last, uniform
from howsmooth.rounding.kv_cache import PARTS
from howsmooth.rounding.number_formats import Format, parse_formats
from howsmooth.rounding.output_error import OutputErrors, output_errors
from howsmooth.rounding.rounded_model import (
    RoundedModel,
    Scores,
    check_finite_weights,
    check_text_model,
    sampled_scores,
)

Choices = Mapping[str, Allocation | None]
Tensors = dict[str, Tensor]
ERRORS = ("actual", "predicted", "tanh", "path", "proved")
Step = Callable[[str], None]
_SHOWN = 8
"""Maximum number of rows that a text shows."""


@dataclass(frozen=True)
class Check:
    """An allocation, run on windows it was not chosen on.

    Attributes:
        name: "allocation", "uniform" or "first and last".
        damage: KL in nats per token (or 1 − cosine) of every window. loss: in nats, of every window; none of encoders.
    """

    name: str
    allocation: Allocation | None
    damage: tuple[float, ...]
    loss: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean damage."""
        return sum(self.damage) / len(self.damage)

    @property
    def error(self) -> float:
        """Its standard error over windows."""
        return (
            float(torch.tensor(self.damage, dtype=torch.float64).std() / len(self.damage) ** 0.5)
            if len(self.damage) > 1
            else 0
        )

    @property
    def perplexity(self) -> float | None:
        """Of the windows together."""
        return math.exp(sum(self.loss) / len(self.loss)) if self.loss else None


@dataclass(frozen=True, repr=False)
class Quantisation:
    """The effect of rounding on a model and a text.

    ``actual`` changes are measured; first orders, damages and allocations are estimates; the bounds ``proved`` are
    upper ends of the actual changes, with the guarantee `OutputErrors.proved_holds`.

    Attributes:
        model, precision: names to show.
        causal: a language model, whose damage is KL; otherwise an encoder's, 1 − cosine.
        formats, bits: what was tried, and bits per cached number.
        errors: name → ``(layers, 2, formats, heads)``, root mean squares over tokens and windows.
        scores: of all windows.
        checks: allocations on other windows, the exact model first; empty without a budget.
    """

    model: str
    precision: str
    causal: bool
    formats: tuple[Format, ...]
    bits: tuple[float, ...]
    errors: dict[str, Tensor]
    scores: Scores
    checks: tuple[Check, ...] = ()

    def __repr__(self) -> str:
        lines = [
            f"{row['format']} {row['what']}s: {self.damage_name} ≈ {rounded(row['kl'], digits=3)}, change of heads ≤ "
            f"{rounded(row['proved'], ROUND_CEILING, 3)} × actual in the median, {OutputErrors.proved_holds.words()}"
            for row in self.totals()[:_SHOWN]
        ]
        more = 2 * len(self.formats) - _SHOWN
        return "\n".join([f"{self.model}: rounded keys and values", *lines, *[f"… {more} more rows"] * (more > 0)])

    @property
    def damage_name(self) -> str:
        """The name of the damage in tables."""
        return "KL" if self.causal else "1 − cosine"

    @property
    def allocation(self) -> Allocation | None:
        """The one that was chosen."""
        return next((check.allocation for check in self.checks if check.name == "allocation"), None)

    def totals(self) -> list[dict[str, Any]]:
        """One row per format and part, everything rounded to it: medians over heads of proved and predicted ÷ actual,
        the predicted damage with its standard error, and the layer that suffers most."""
        rows = []
        for index, form in enumerate(self.formats):
            for part, name in enumerate(PARTS):
                actual = self.errors["actual"][:, part, index]
                moved = actual > 0
                ratios = {"proved": 1.0, "predicted": 1.0}
                if bool(moved.any()):
                    ratios = {
                        what: float((self.errors[what][:, part, index] / actual)[moved].median()) for what in ratios
                    }
                damage, error = self.scores.damage(self.scores.products[:, :, part, index].sum((1, 2)))
                layer = int(self.scores.by_layer[:, part, index].argmax())
                about = {"format": form.name, "what": name, "bits": self.bits[index], "most_in": layer}
                rows.append(about | ratios | {"kl": float(damage), "kl_error": float(error)})
        return rows

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer, head, part and format; ``kl`` is the damage through this head alone, per token."""
        damage, error = self.scores.damage(self.scores.products)
        layers, parts, forms, heads = map(range, damage.shape)
        return [
            {
                "layer": layer,
                "head": head,
                "kv_head": head // self.scores.group,
                "what": PARTS[part],
                "format": self.formats[form].name,
                "bits": self.bits[form],
                **{
                    name: float(self.errors[name][layer, part, form, head])
                    for name in ("actual", "predicted", "proved")
                },
                "proved_holds": OutputErrors.proved_holds.name.lower(),
                "size": float(self.errors["size"][layer, head]),
                "kl": float(damage[layer, part, form, head]),
                "kl_error": float(error[layer, part, form, head]),
            }
            for layer, head, part, form in product(layers, heads, parts, forms)
        ]


@validated
def quantise(
    model: str | OpenModel,
    text: PlainText | None = None,
    *,
    formats: str = "int8,int4",
    budget: float | None = None,
    per: Unit = "part",
    length: Count = 128,
    windows: Count = 4,
    samples: Count = 24,
    seed: Seed = 0,
    check: Count | None = None,
    device: Device | None = None,
    dtype: Dtype | None = None,
    out: Path | None = None,
    resume: bool = True,
    progress: Step | None = None,
) -> Quantisation:
    """Measure, predict and prove what rounded keys and values do to a model, and choose formats within a budget.

    Args:
        model: as `howsmooth.models.open_model` takes it.
        text: what is read; None for Alice in Wonderland.
        formats: between commas, see `howsmooth.rounding.number_formats`.
        budget: bits per cached number, scales included; None chooses nothing.
        per: what has a format of its own: see `howsmooth.rounding.allocation.allocate`.
        length, windows: of the pieces of text on which damage is predicted.
        samples: backward passes for each window.
        check: windows, none of which overlaps one of those, on which the choice is run; as many by default.
        device, dtype: where the model computes and with which weights, as of `howsmooth.models.open_model`.
        out: a ledger in which a stopped run is resumed. resume: use its items.
        progress: called with the next step; a notebook shows a bar without it.

    >>> quantisation = quantise("random:llama[layers=2,width=32]", formats="int8,int4", budget=6, length=16, windows=2)
    >>> row = quantisation.rows()[0]
    >>> row["what"], row["format"], row["actual"] <= row["proved"], [check.name for check in quantisation.checks]
    ('key', 'int8', True, ['exact', 'uniform', 'first and last', 'allocation'])
    """
    tried = 0 if budget is None else windows if check is None else check
    chosen, tell = tuple(parse_formats(formats)), progress or step_bar(windows + tried) or (lambda label: None)
    opened = _opened(model, device, dtype)
    check_text_model(opened.model)
    check_finite_weights(opened.model)
    words = alice() if text is None else text
    learnt, held_out = _cut(opened, words, length, windows, tried, seed)
    run = {
        "model": opened.sha256,
        "text": hashlib.sha256(words.encode(errors="surrogatepass")).hexdigest(),
        "formats": [one.name for one in chosen],
        "length": length,
        "samples": samples,
        "howsmooth": version("howsmooth"),
    }

    @lru_cache(maxsize=1)
    def captured(index: int) -> RoundedModel:
        return RoundedModel.of(opened.model, opened.inputs(learnt[index]))

    def numbers(index: int) -> Tensors:
        rounded = captured(index)
        if budget is not None:  # before the work begins
            check_budget(budget, chosen, _bits(chosen, _sizes(rounded), length))
        tell(f"window {index + 1} of {len(learnt)}: errors and scores")
        return window_numbers(rounded, chosen, samples, seed + index)

    def outcomes(index: int) -> Tensors:
        tell(f"checking on window {index + 1} of {len(held_out)}")
        model = captured(len(learnt) - 1)  # the last one: of a window that only checks no sites are needed
        return window_outcomes(model.on(opened.inputs(held_out[index])), choices)

    with Ledger.writing(out, run, resume) as ledger:
        stored = [
            ledger.tensors(f"window at {window.start}, seed {seed + index}", partial(numbers, index))
            for index, window in enumerate(learnt)
        ]
        result = gathered(opened, chosen, stored, length)
        if budget is None:
            return result
        given = result.scores.by_cache, result.formats, result.bits, budget
        choices: Choices = {
            "exact": None,
            "uniform": uniform(*given),
            "first and last": first_and_last(*given),
            "allocation": allocate(*given, per),
        }
        named = json.dumps([None if choice is None else choice.choice.tolist() for choice in choices.values()])
        digest = hashlib.sha256(named.encode()).hexdigest()
        checked = [
            ledger.tensors(f"check at {window.start} of {digest}", partial(outcomes, index))
            for index, window in enumerate(held_out)
        ]
    return replace(result, checks=checks(choices, checked))


def _opened(model: str | OpenModel, device: Device | None, dtype: Dtype | None) -> OpenModel:
    """The model with its head; without, where its architecture has none that speaks (T5's encoder)."""
    if isinstance(model, OpenModel):
        return model.on(device).in_dtype(dtype)
    try:
        return open_model(model, head=True, device=device, dtype=dtype)
    except HowsmoothError:
        raise
    except ValueError:  # transformers knows no language model of this architecture
        return open_model(model, device=device, dtype=dtype)


def _cut(
    opened: OpenModel, words: PlainText, length: int, windows: int, tried: int, seed: int
) -> tuple[list[Window], list[Window]]:
    """Windows to learn from and, evenly between them, windows to try on; no token is in one of each."""
    count = windows + tried
    for way in (seed, None):  # where windows drawn in a short text overlap, they are spread evenly
        cut = opened.windows(words, length, count, way)
        places = {int((i + 0.5) * count / tried) for i in range(tried)}
        learnt, held_out = ([cut[i] for i in range(count) if (i in places) == held] for held in (False, True))
        if all(abs(one.start - other.start) >= length for one in learnt for other in held_out):
            return learnt, held_out
    raise InvalidInput(
        f"the text is too short to check a choice on what it was not made on: {windows} and {tried} windows take "
        f"{count} × {length} tokens; give more text, or ask for fewer or shorter windows."
    )


def window_numbers(reader: RoundedModel, formats: Sequence[Format], samples: int, seed: int) -> Tensors:
    """Output errors of every layer and scores of the model in one window."""
    changes = [output_errors(site, formats) for site in reader.sites]
    scores = sampled_scores(reader, formats, samples, seed)
    stacked = {name: torch.stack([getattr(one, name) for one in changes]) for name in (*ERRORS, "size")}
    return stacked | {"products": scores.products, "sizes": torch.tensor(_sizes(reader))}


def _sizes(reader: RoundedModel) -> list[int]:
    """Heads, key–value heads, whether the model is causal, and the width of a head."""
    attention = plain_map(reader.sites[0].attention, "rounding")
    return [attention.heads, attention.kv_heads, int(reader.causal), attention.key_weight.shape[1]]


def _bits(formats: Sequence[Format], sizes: Sequence[int], length: int) -> tuple[float, ...]:
    return tuple(form.bits_per_number(sizes[3], length, sizes[1]) for form in formats)


def gathered(opened: OpenModel, formats: Sequence[Format], windows: Sequence[Tensors], length: int) -> Quantisation:
    """The windows of a run together."""
    sizes = windows[0]["sizes"].tolist()
    heads, kv_heads, causal, _ = sizes
    means = {name: torch.stack([one[name] for one in windows]).square().mean(0).sqrt() for name in (*ERRORS, "size")}
    products = torch.cat([one["products"] for one in windows])
    return Quantisation(
        opened.name,
        opened.precision,
        bool(causal),
        tuple(formats),
        _bits(formats, sizes, length),
        means,
        Scores(products, length if causal else 1, heads // kv_heads),
    )


def window_outcomes(reader: RoundedModel, choices: Choices) -> Tensors:
    """The damage of every choice in one window, and the loss of a language model."""
    exact, damage, loss = reader.outcome(), list[float](), list[float]()
    for choice in choices.values():
        outcome = exact if choice is None else reader.outcome(choice.assignment)
        damage.append(reader.damage(exact, outcome))
        loss += [reader.loss(outcome)] if reader.causal else []
    return {name: torch.tensor(some, dtype=torch.float64) for name, some in (("damage", damage), ("loss", loss))}


def checks(choices: Choices, windows: Sequence[Tensors]) -> tuple[Check, ...]:
    """Every choice over the windows it was run on."""
    if not windows:
        return ()
    damage = torch.stack([one["damage"] for one in windows], -1).tolist()
    loss = torch.stack([one["loss"] for one in windows], -1).tolist() or [[] for _ in choices]
    return tuple(
        Check(name, choice, tuple(damages), tuple(losses))
        for (name, choice), damages, losses in zip(choices.items(), damage, loss, strict=True)
    )
