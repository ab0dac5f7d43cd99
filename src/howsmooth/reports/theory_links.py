"""Links from a report to the documentation: pages of the theory, and the page of every bound."""

from __future__ import annotations

import re
from dataclasses import dataclass

from howsmooth.bounds.catalogue import CATALOGUE, SCOPES

THEORY = {
    "glossary": ("Glossary", "every word of this page in one paragraph"),
    "measuring": ("Measuring", "what σ is, and what its lower and upper ends promise"),
    "theory/three-path": ("The three-path bound", "the upper bound at one input, called three-path here"),
    "theory/dot-product": ("Dot-product attention", "growth like √n on bounded sets, and lower bounds"),
    "theory/mean-field": ("Mean field", "measures instead of sequences: bounds that do not grow with n"),
    "theory/l2-attention": ("L2 attention", "the attention that is Lipschitz everywhere"),
    "theory/other-attentions": ("Other attentions", "sigmoid, cosine, normalised queries and keys"),
    "theory/composition": ("Composition", "residuals, MLPs, normalisation and whole stacks"),
    "theory/errata": ("Errata", "printed forms that are false, each with a counter-example"),
}
"""Path of a page of the documentation → its name and subject."""

_BOUNDS = {
    "theory/three-path": ("howsmooth.three_path", "howsmooth.local", "howsmooth.softmax_jacobian"),
    "theory/mean-field": ("howsmooth.mean_field", "howsmooth.masked_mean_field", "castin2024.mean_field"),
    "theory/l2-attention": ("howsmooth.l2_lip_2", "kim2021.lip_2"),
    "theory/other-attentions": ("howsmooth.sigmoid", "ramapuram2024.local", "howsmooth.cosine", "howsmooth.qk_norm"),
}
_PAGES = {bound: page for page, bounds in _BOUNDS.items() for bound in bounds}


_WORDS = {
    "howsmooth.three_path": "three-path bound",
    "howsmooth.local": "local bound, head by head",
    "howsmooth.softmax_jacobian": "softmax Jacobian, centred",
    "howsmooth.three_path_ball": "three-path bound on the set",
    "howsmooth.sqrt_n": "√n bound",
    "howsmooth.mean_field": "mean-field bound, for every n",
    "howsmooth.masked_mean_field": "masked mean-field bound",
    "howsmooth.unified": "unified bound",
    "howsmooth.l2_lip_2": "L2 attention, everywhere",
    "howsmooth.qk_norm": "normalised queries and keys",
    "howsmooth.cosine_mean_field": "cosine attention, for every n",
    "castin2024.sqrt_n": "√n bound",
    "castin2024.mean_field": "mean-field bound",
    "kim2021.lip_2": "L2 attention, everywhere",
    "dasoulas2021.joint": "joint bound",
    "nair2025.ball": "bound on a ball",
    "nair2025.softmax_half": "softmax is ½-Lipschitz",
    "yudin2025.softmax_jacobian": "softmax Jacobian",
    "ramapuram2024.local": "sigmoid attention, at the input",
    "furuya2026.nonexpansive": "gradient steps do not expand",
}


def bound_in_words(name: str) -> str:
    """A bound in words, with its paper unless it is a bound of this project.

    >>> bound_in_words("castin2024.sqrt_n"), bound_in_words("howsmooth.sqrt_n")
    ('√n bound (Castin 2024)', '√n bound')
    """
    words = _WORDS.get(name, name.split(".")[-1].replace("_", " "))
    paper = re.fullmatch(r"([a-z]+)(\d{4})", name.split(".")[0])
    return words if paper is None else f"{words} ({paper[1].capitalize()} {paper[2]})"


@dataclass(frozen=True)
class Links:
    """Names of pages → addresses, and names of bounds → facts about them."""

    pages: dict[str, str]
    bounds: dict[str, dict[str, str]]


def theory_links(documentation: str | None) -> Links:
    """Addresses below that of the documentation; without it pages are named but not linked.

    >>> theory_links("https://example.org/docs").pages["theory/three-path"]
    'https://example.org/docs/theory/three-path/'
    >>> theory_links(None).bounds["howsmooth.three_path"]
    {'where': 'at the input', 'reference': 'howsmooth', 'page': 'theory/three-path', 'words': 'three-path bound'}
    """
    pages = {} if documentation is None else {name: f"{documentation.rstrip('/')}/{name}/" for name in THEORY}
    bounds = {
        name: {
            "where": SCOPES[bound.scope],
            "reference": bound.reference,
            "page": _PAGES.get(name, "theory/dot-product"),
            "words": bound_in_words(name),
        }
        for name, bound in CATALOGUE.items()
        if (bound.side, bound.norm) == ("upper", 2)
    }
    return Links(pages, bounds)
