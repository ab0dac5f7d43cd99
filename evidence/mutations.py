"""Single changes to proofs, and whether a comparison of their terms with the truth notices them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from evidence import answer_terms, ball_terms, certificate_terms, curved_terms, network_terms, pooled_terms
from evidence.ball_terms import BLOCK, CASES, HEAD, TILTS
from evidence.changes import Mutant, mutants
from evidence.juries import OUTCOMES, SMALL, Example, Jury, Verdict
from evidence.tables import table

TITLE = "Changed proofs"
_OWN = ("high", "low", "drift", "query blocks")
_OTHERS = ("mean of all others", "directed change", "key blocks")
JUDGED: dict[str, Callable[[], list[Example]]] = {
    "certify.rows": lambda: ball_terms.examples(HEAD),
    "certify.tilts": lambda: ball_terms.examples({**TILTS, **{name: HEAD[name] for name in _OWN}}),
    "certify.apart": lambda: ball_terms.examples({"change": HEAD["change"]}),
    "certify.others": lambda: ball_terms.examples({name: HEAD[name] for name in _OTHERS}),
    "certify.ball": lambda: ball_terms.examples(
        {**HEAD, **{f"step {k}: factor": TILTS[f"step {k}: factor"] for k in (0, 1)}}
    ),
    "certify.block_ball": lambda: ball_terms.examples(BLOCK),
    "certify.remainders": lambda: network_terms.examples("single"),
    "certify.attention_remainder": lambda: network_terms.examples("attention"),
    "certify.deep": lambda: network_terms.examples("margins"),
    "certify.curved": curved_terms.examples,
    "certify.pooled": pooled_terms.pools,
    "certify.relaxation": pooled_terms.boxes,
    "rounding.answers": answer_terms.examples,
    "norms.certificate": certificate_terms.examples,
}
"""The modules that are changed, and the examples that are compared."""
CHOICES = {
    ("certify.tilts", "STEPS"): "any number of steps",
    ("certify.tilts", "_LEAST_SHARE"): "any ϑ",
    ("certify.apart", "_STEPS"): "any λ and μ",
    ("certify.ball", "_POWERS"): "any weights of the keys",
    ("certify.ball", "_SINKS"): "any number of sinks",
    ("certify.ball", "_TWISTED"): "any size",
    ("certify.ball", "_bounded"): "any weights θ",
    ("certify.block_ball", "_SINKS"): "any number of sinks",
    ("certify.block_ball", "_STEPS"): "any weights a",
    ("certify.block_ball", "_SHARP"): "any weights a",
    ("certify.block_ball", "sizes"): "any weights a",
    ("certify.block_ball", "row_by_row"): "any weights a",
    ("certify.block_ball", "over_keys"): "any weights a",
    ("certify.block_ball", "_parts"): "any weights a",
    ("certify.block_ball", "_quick"): "any guesses of what is then proved",
    ("certify.block_ball", "shares"): "any guesses of what is then proved",
    ("certify.deep", "_STEPS"): "any radius at which margins are positive",
    ("certify.deep", "_FINENESS"): "any radius at which margins are positive",
    ("certify.deep", "(_FARTHEST, _FAR)"): "any radius at which margins are positive",
    ("certify.deep", "radius"): "any radius at which margins are positive",
    ("certify.deep", "LARGEST"): "memory, no bound",
    ("certify.deep", "check_cost"): "memory, no bound",
    ("certify.deep", "_cost"): "memory, no bound",
    ("certify.pooled", "_PIECES"): "any number of pieces",
    ("certify.relaxation", "_STEEPEST"): "any t",
    ("certify.relaxation", "_LEAST"): "any m",
    ("certify.relaxation", "towards"): "any guess of where it is to be tight",
    ("norms.certificate", "(SECTIONS, ROUNDS)"): "any sections",
    ("norms.certificate", "PRODUCT_ROUNDING"): "what products are taken to lose, measured elsewhere",
}
"""Where every number gives a proof: what is chosen is only how good it is."""
FRAGMENTS = {
    ("certify.attention_remainder", "moves", "`logits - torch.einsum"): "any shift of a row",
    ("certify.curved", "bound", "`value.value[:, None] - self.mean"): "any centre of the values",
    ("certify.relaxation", "of", "near."): "any guess of where it is to be tight",
    ("certify.relaxation", "of", "price + share * away"): "any guess of where it is to be tight",
    ("certify.relaxation", "of", "away.sqrt()"): "any t",
    ("certify.relaxation", "of", "`start - (lower + upper) / 2`"): "any s",
    ("certify.relaxation", "of", "`lower + upper`"): "any s",
}
"""The same of single expressions."""
_BINDING = {("certify.block_ball", "row_by_row", "`-best` without its sign")}
"""What is no choice there."""
_SECOND = "second order in the moves, or an alternative that is not the least"
WHY = {
    ("certify.remainders", "bend"): "rounding",
    ("certify.remainders", "numbers", "noise"): "rounding",
    (
        "certify.remainders",
        "numbers",
        "2.3",
    ): "slopes of an activation differ by 1.26 at most, and no remainder attains it",
    ("certify.attention_remainder", "attend"): "rounding",
    ("certify.attention_remainder", "numbers"): "rounding",
    ("certify.deep", "_lost"): "rounding",
    ("certify.curved", "logit_moves"): "rounding",
    ("certify.curved", "of"): "rounding",
    ("certify.pooled", "remainder"): "the last of the pieces weigh a five-hundredth",
    ("certify.pooled", "third"): "variances between those that examples attain",
    ("certify.relaxation", "_parabola"): "another parabola above ReLU: a steeper one, or with any m",
    ("certify.relaxation", "of"): "any t, s, guess, or line above ReLU",
    ("norms.certificate", "_overlap", "hidden"): "rounding",
    ("norms.certificate", "_overlap"): "second order: errors times what a run leaves open",
}
"""Why a change that makes a term smaller may pass; the first that fits, and `_SECOND` elsewhere."""


def verdicts(module: str, every: int = 1) -> Iterator[Verdict]:
    """Of every mutant of a module, or of some."""
    jury = Jury(JUDGED[module]())
    for number, mutant in enumerate(mutants(module)):
        if number % every == 0:
            yield judged(jury, mutant)


def judged(jury: Jury, mutant: Mutant) -> Verdict:
    """The verdict of a jury, unless what is changed is a choice."""
    here = mutant.module, mutant.place
    if here in CHOICES and (*here, mutant.what) not in _BINDING:
        return Verdict(mutant, "any proves", CHOICES[here])
    for (module, place, fragment), choice in FRAGMENTS.items():
        if (module, place) == here and fragment in mutant.what:
            return Verdict(mutant, "any proves", choice)
    return jury.verdict(mutant)


def why(mutant: Mutant) -> str:
    """Why a change that makes a term smaller may pass."""
    here = mutant.module, mutant.place
    fits = (
        reason
        for (module, place, *fragment), reason in WHY.items()
        if (module, place) == here and all(text in mutant.what for text in fragment)
    )
    return next(fits, _SECOND)


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    found = {}
    for module in JUDGED:
        progress(module)
        found[module] = list(verdicts(module))
    rows = [[module, len(some), *(Counter(v.outcome for v in some)[name] for name in OUTCOMES)]
            for module, some in found.items()]  # fmt: skip
    every = [v for some in found.values() for v in some]
    left = [
        [f"`{v.mutant.module}.{v.mutant.place}`", v.mutant.what, v.by, why(v.mutant)]
        for v in every
        if v.outcome == "smaller"
    ]
    free = Counter((v.mutant.module, v.by) for v in every if v.outcome == "any proves")
    return [
        "One change at a time to the modules that prove bounds: every number halved and doubled, every sum a "
        "difference and back, every summand left out, every least a most. On small maps the terms of the changed proof "
        "are compared with the largest truth of their own part that a search meets: changes of Jacobians on "
        f"{len(CASES)} balls, remainders of Taylor's formula and margins of networks, derivatives of heads that are "
        "not linear, third derivatives, ReLU itself, outputs of heads whose caches are rounded, and norms of maps "
        "whose starts are as unlucky as their confidence allows. A change is caught where a truth is above its term, "
        "or nothing is computed any more; it is not smaller where no term of any example has lost more than "
        f"{SMALL:g} of itself, which leaves changes that make the proof looser, or concern rounding alone.",
        table(["module", "changes", *OUTCOMES], rows),
        "What is rounding has tests of its own, in which it counts: the Jacobian of a head in 50 digits where "
        "queries cancel (`tests/certify/test_gram.py`), Cholesky's factorisation with every product rounded by itself "
        "(`tests/certify/test_proved_norm.py`), margins of networks in rational numbers where large numbers cancel "
        "(`tests/certify/test_deep.py`), and bounds where float64 loses most "
        "([Bounds at an input under rounding](point-rounding.md)).",
        "Choices of which each gives a proof, and how many changes concern them; they are not tried.",
        table(["module", "choice", "changes"], [[*where, count] for where, count in free.items()]),
        "Changes that make a term smaller and pass no truth that was found, with the smallest that became of a term, "
        "and why. Corrections of second order in the radius are products of two drifts, what a drift adds to a "
        "spread, log E e^β beside the largest tilt, errors times what a run leaves open: no example here is large "
        "enough for them. An alternative that is not the least may have a part that is smaller.",
        table(["where", "change", "smallest term", "why it may"], left),
    ]
