"""What `howsmooth quantise` reaches as it is: its own run at its own settings against a pass for every layer."""

from __future__ import annotations

import inspect

from evidence.rounded_caches_direct import correlations, direct
from evidence.rounded_caches_windows import Step, kept_file
from howsmooth.models import OpenModel
from howsmooth.rounding import parse_format, quantise


def default_ranking(opened: OpenModel, text: str, form: str, tell: Step, **settings: int) -> str:
    """Spearman of the command's predicted KL with the direct one, in the windows that it reads; in one sentence.

    ``settings`` replaces what the command has by default.
    """
    usual = {name: inspect.signature(quantise).parameters[name].default for name in ("length", "windows", "samples")}
    settings = usual | settings
    path = kept_file()
    out = None if path is None else path.with_name(f"{path.stem}-{opened.sha256[:12]}-{form}.sqlite")
    found = quantise(opened, text, formats=form, out=out, progress=tell, **settings)  # type: ignore[arg-type]
    windows = opened.windows(text, settings["length"], settings["windows"], 0)
    truth = direct(opened, windows, parse_format(form), False, tell).squeeze(-1)
    guess = found.scores.by_layer[:, :, 0]
    ranks = ", ".join(correlations(guess, truth))
    return (
        f"`howsmooth quantise` as it is ({settings['windows']} windows of {settings['length']} tokens, "
        f"{settings['samples']} samples), {form}: Spearman {ranks} for keys, values and together, median predicted ÷ "
        f"direct {float((guess / truth).median()):.2f}."
    )
