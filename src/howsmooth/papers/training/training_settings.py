"""The settings of a training run: every choice that changes its numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from howsmooth._util.validation import (
    Count,
    NotNegative,
    Positive,
    Seed,
    Size,
    check_fields,
    check_memory,
    check_one_of,
    check_positive,
    shown,
    validated,
)
from howsmooth.errors import InvalidInput
from howsmooth.papers.training.text_batches import Lengths

_Compared = Literal["dot-product", "l2", "l2-untied", "contractive-inf", "contractive-2"]  # by Kim et al. (2021)
Attention = Literal[_Compared, "sigmoid", "cosine", "norm-controlled", "gradient-step"]
ATTENTIONS: tuple[str, ...] = get_args(Attention)
"""The kinds of attention for training."""

_FORMAT = 2
"""Format of the settings in JSON."""
Blocks = Literal["pre-norm", "post-norm", "contractive"]
Schedule = Literal["cosine", "fixed"]


@dataclass(frozen=True)
class TrainingSettings:
    """A character language model and its training.

    Attributes:
        attention: the kind of attention, by its name in `howsmooth.nn.layers.registry`. "l2-untied" has untied keys and
            is not Lipschitz, "contractive-inf" divides L2 attention by its bound in the ∞-norm (Kim et al. 2021),
            "contractive-2" by the sharper one in the 2-norm. LipschitzNorm is excluded: it divides by norms over
            all tokens, so that earlier tokens would depend on later ones.
        blocks: "pre-norm" for x + f(LayerNorm(x)), "post-norm" for LayerNorm(x + f(x)), "contractive" for x + f(x) with
            Lip(f) < 1; None chooses contractive for contractive attention, pre-norm for the others.
        coefficient: the Lipschitz constant that contractive branches are scaled to; in contractive blocks below one.
        window: number of tokens that a token sees, itself and earlier ones; None for all. The constant of L2 attention
            depends on it in place of n.
        lengths: "fixed", "chunks" or "curriculum"; length: the (longest) number of tokens of a piece.
        cycles: number of passes of a curriculum from short to long.
        batch_tokens: characters per step.
        schedule: "cosine" decays the rate to a tenth over the run, "fixed" does not; both after a linear warm-up.
        clip: largest norm of the gradient, 0 for none.

    >>> TrainingSettings(attention="contractive-2").block_kind
    'contractive'
    """

    attention: Attention = "dot-product"
    depth: Count = 2
    width: Count = 128
    heads: Count = 4
    blocks: Blocks | None = None
    coefficient: Positive = 0.9
    window: Count | None = None
    lengths: Lengths = "fixed"
    length: Count = 64
    cycles: Count = 1
    steps: Count = 1000
    batch_tokens: Count = 1024
    rate: Positive = 1e-3
    schedule: Schedule = "cosine"
    warmup: Size = 100
    weight_decay: NotNegative = 0.01
    clip: NotNegative = 1.0
    dropout: NotNegative = 0.0
    seed: Seed = 0

    def __post_init__(self) -> None:
        choices = {"attention": ATTENTIONS, "lengths": get_args(Lengths), "schedule": get_args(Schedule)}
        for name, known in (choices | {"blocks": (*get_args(Blocks), None)}).items():
            check_one_of(getattr(self, name), known, name)
        check_positive(self.rate, "the learning rate")
        check_fields(self)
        if self.width % self.heads:
            raise InvalidInput(f"a width of {self.width} does not split into {self.heads} heads.")
        if self.batch_tokens % self.length:
            raise InvalidInput(
                f"a batch of {self.batch_tokens} tokens does not hold whole pieces of {self.length}: choose "
                "batch_tokens as a multiple of length."
            )
        if self.dropout >= 1:
            raise InvalidInput(f"dropout must be less than 1, got {self.dropout}.")
        if self.block_kind == "contractive" and self.coefficient >= 1:
            raise InvalidInput(
                f"contractive blocks need 0 < coefficient < 1, got {self.coefficient}: only pre-norm and post-norm "
                "blocks may expand."
            )
        if self.blocks == "contractive" and not self.is_contractive:
            raise InvalidInput(
                f"contractive blocks need contractive attention, but {self.attention} attention has no known "
                "constant below one: choose contractive-2 or contractive-inf."
            )

    @property
    def is_contractive(self) -> bool:
        """Return whether the attention is scaled to a constant below one."""
        return self.attention.startswith("contractive")

    @property
    def block_kind(self) -> Blocks:
        """Return the kind of the blocks."""
        return self.blocks or ("contractive" if self.is_contractive else "pre-norm")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step.

        >>> settings = TrainingSettings(steps=100, warmup=10, rate=1.0)
        >>> settings.rate_at(4), settings.rate_at(10), round(settings.rate_at(99), 3)
        (0.5, 1.0, 0.1)
        """
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        if self.schedule == "fixed":
            return self.rate
        through = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * through)))

    def parameters(self, symbols: int) -> int:
        """Return a lower bound of the number of parameters: matrices of attention and MLP, embeddings and head."""
        return self.depth * 12 * self.width**2 + (2 * symbols + self.length) * self.width

    def check_memory(self, symbols: int) -> None:
        """Refuse a run that cannot fit: parameters, gradients, two moments of the optimiser, and activations of each
        block for its gradient; all in float32, as a lower bound."""
        tokens = self.batch_tokens * (self.depth * 8 * self.width + symbols)
        plan = 6 * self.steps if self.lengths == "curriculum" else 0
        check_memory(
            4 * (4 * self.parameters(symbols) + tokens + plan),
            f"a run of depth {shown(self.depth)} and width {shown(self.width)} with {shown(self.batch_tokens)} tokens "
            "in a batch",
            "choose a smaller depth, width, length or batch_tokens",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for JSON."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    @validated
    def from_dict(cls, content: dict[str, Any]) -> TrainingSettings:
        """Read settings from JSON; unknown or missing names are refused."""
        names = {field.name for field in fields(cls)}
        if not isinstance(content, dict):
            raise InvalidInput(f"the settings of a run are a dictionary, got {shown(content)}.")
        content = dict(content)
        if content.pop("format", None) != _FORMAT:
            raise InvalidInput("these settings were written by another version of howsmooth.")
        if content.keys() != names:
            others = ", ".join(sorted(map(str, content.keys() ^ names)))
            raise InvalidInput(f"these are not the settings of a run: {others}.")
        return cls(**content)

    def difference(self, other: TrainingSettings) -> str:
        """Describe the differences, or return an empty string."""
        mine, theirs = self.to_dict(), other.to_dict()
        return ", ".join(f"{name} {mine[name]} ≠ {theirs[name]}" for name in mine if mine[name] != theirs[name])
