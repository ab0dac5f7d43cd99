"""Single changes to proofs, and whether a comparison of their terms with the truth notices them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from evidence import answer_terms, ball_terms, curved_terms, lanczos_terms, network_terms, pooled_terms
from evidence.ball_terms import BLOCK, CASES, HEAD, PERTURBATION
from evidence.changes import Mutant, mutants
from evidence.juries import OUTCOMES, SMALL, Example, Jury, Verdict
from evidence.tables import table

TITLE = "Changed proofs"
JUDGED: dict[str, Callable[[], list[Example]]] = {
    "certificates.ball.weight_perturbation": lambda: ball_terms.examples({**PERTURBATION, **HEAD}),
    "certificates.ball.head_ball": lambda: ball_terms.examples(
        {**HEAD, **{f"step {k}: factor": PERTURBATION[f"step {k}: factor"] for k in (0, 1)}}
    ),
    "certificates.ball.block_ball": lambda: ball_terms.examples(BLOCK),
    "certificates.network.taylor_remainders": lambda: network_terms.examples("single"),
    "certificates.network.attention_remainder": lambda: network_terms.examples("attention"),
    "certificates.network.margins": lambda: network_terms.examples("margins"),
    "certificates.ball.nonlinear_ball": curved_terms.examples,
    "certificates.classifier.cls_token": pooled_terms.pools,
    "certificates.classifier.relu_relaxation": pooled_terms.boxes,
    "rounding.output_error": answer_terms.examples,
    "norms.lanczos_bound": lanczos_terms.examples,
}
"""The modules that are changed, and the examples that are compared."""
CHOICES = {
    ("certificates.ball.weight_perturbation", "KEY_STEPS"): "any number of steps",
    ("certificates.ball.weight_perturbation", "_MIN_SHARE"): "any ϑ",
    ("certificates.ball.head_ball", "_STEPS"): "any λ and μ",
    ("certificates.ball.head_ball", "_POWERS"): "any weights of the keys",
    ("certificates.ball.head_ball", "_SINKS"): "any number of sinks",
    ("certificates.ball.head_ball", "_HADAMARD_LIMIT"): "any size",
    ("certificates.ball.head_ball", "_positive"): "any weights θ",
    ("certificates.ball.block_ball", "_SINKS"): "any number of sinks",
    ("certificates.ball.block_ball", "_STEPS"): "any weights a",
    ("certificates.ball.block_ball", "_SHARPNESS"): "any weights a",
    ("certificates.ball.block_ball", "sizes"): "any weights a",
    ("certificates.ball.block_ball", "row_by_row"): "any weights a",
    ("certificates.ball.block_ball", "over_keys"): "any weights a",
    ("certificates.ball.block_ball", "_normalised"): "any weights a",
    ("certificates.ball.block_ball", "_float32_rows"): "any guesses of what is then proved",
    ("certificates.ball.block_ball", "head_shares"): "any guesses of what is then proved",
    ("certificates.network.margins", "_STEPS"): "any radius at which margins are positive",
    ("certificates.network.margins", "_FINENESS"): "any radius at which margins are positive",
    ("certificates.network.margins", "(_FARTHEST, _FAR)"): "any radius at which margins are positive",
    ("certificates.network.margins", "radius"): "any radius at which margins are positive",
    ("certificates.network.margins", "LARGEST"): "memory, no bound",
    ("certificates.network.margins", "check_cost"): "memory, no bound",
    ("certificates.network.margins", "(_SAME_GRADIENT, _NO_GRADIENT)"): "a comparison, no bound",
    ("certificates.network.margins", "_check_gradients"): "a comparison, no bound",
    ("certificates.network.margins", "read_compared"): "a comparison, no bound",
    ("certificates.network.margins", "_cost"): "memory, no bound",
    ("certificates.classifier.cls_token", "_PIECES"): "any number of pieces",
    ("certificates.classifier.relu_relaxation", "_STEEPEST"): "any t",
    ("certificates.classifier.relu_relaxation", "_LEAST"): "any m",
    ("certificates.classifier.relu_relaxation", "towards"): "any guess of where it is to be tight",
    ("norms.lanczos_bound", "(SECTIONS, ROUNDS)"): "any sections",
    ("norms.lanczos_bound", "PRODUCT_ROUNDING"): "what products are taken to lose, measured elsewhere",
}
"""Where every number gives a proof: what is chosen is only how good it is."""
FRAGMENTS = {
    ("certificates.network.attention_remainder", "moves", "`logits - torch.einsum"): "any shift of a row",
    ("certificates.ball.nonlinear_ball", "bound", "`value.value[:, None] - self.mean"): "any centre of the values",
    ("certificates.classifier.relu_relaxation", "of", "near."): "any guess of where it is to be tight",
    ("certificates.classifier.relu_relaxation", "of", "price + share * away"): "any guess of where it is to be tight",
    ("certificates.classifier.relu_relaxation", "of", "away.sqrt()"): "any t",
    ("certificates.classifier.relu_relaxation", "of", "`start - (lower + upper) / 2`"): "any s",
    ("certificates.classifier.relu_relaxation", "of", "`lower + upper`"): "any s",
}
"""The same of single expressions."""
_BINDING = {("certificates.ball.block_ball", "row_by_row", "`-best` without its sign")}
"""What is no choice there."""
_SECOND = "second order in the moves, or an alternative that is not the least"
WHY = {
    ("certificates.network.taylor_remainders", "activate"): "rounding",
    ("certificates.network.taylor_remainders", "multiply"): "rounding",
    (
        "certificates.network.taylor_remainders",
        "_largest_bend",
    ): "terms of opposite signs, bounded by the sum of their sizes",
    ("certificates.network.taylor_remainders", "numbers", "noise"): "rounding",
    (
        "certificates.network.taylor_remainders",
        "numbers",
        "2.3",
    ): "slopes of an activation differ by 1.26 at most, and no remainder attains it",
    ("certificates.network.attention_remainder", "attend"): "rounding",
    ("certificates.network.attention_remainder", "numbers"): "rounding",
    ("certificates.network.margins", "_decrease"): "rounding",
    ("certificates.ball.nonlinear_ball", "logit_moves"): "rounding",
    ("certificates.ball.nonlinear_ball", "of"): "rounding",
    ("certificates.classifier.cls_token", "remainder"): "the last of the pieces weigh a five-hundredth",
    ("certificates.classifier.cls_token", "third_derivative"): "variances between those that examples attain",
    (
        "certificates.classifier.relu_relaxation",
        "_parabola",
    ): "another parabola above ReLU: a steeper one, or with any m",
    ("certificates.classifier.relu_relaxation", "of"): "any t, s, guess, or line above ReLU",
    ("norms.lanczos_bound", "_overlap", "hidden"): "rounding",
    ("norms.lanczos_bound", "_overlap"): "second order: errors times what a run leaves open",
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
        "queries cancel (`tests/certificates/test_head_gram.py`), Cholesky's factorisation with every product rounded "
        "by itself (`tests/certificates/test_proved_eigenvalue.py`), margins of networks in rational numbers where "
        "large numbers cancel (`tests/certificates/test_margins.py`), and bounds where float64 loses most "
        "([Bounds at an input under rounding](point-rounding.md)).",
        "Choices of which each gives a proof, and how many changes concern them; they are not tried.",
        table(["module", "choice", "changes"], [[*where, count] for where, count in free.items()]),
        "Changes that make a term smaller and pass no truth that was found, with the smallest that became of a term, "
        "and why. Corrections of second order in the radius are products of two drifts, what a drift adds to a "
        "spread, log E e^β beside the largest shift, errors times what a run leaves open: no example here is large "
        "enough for them. An alternative that is not the least may have a part that is smaller.",
        table(["where", "change", "smallest term", "why it may"], left),
    ]
