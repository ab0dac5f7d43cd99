"""What a training run is: every choice that changes its numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from howsmooth.errors import InvalidInput
from howsmooth.training.lengths import LENGTHS, Lengths

Attention = Literal[
    "dot-product",
    "l2",
    "l2-tied",
    "contractive-inf",
    "contractive-2",
    "sigmoid",
    "cosine",
    "norm-controlled",
    "gradient-step",
]
ATTENTIONS: tuple[str, ...] = get_args(Attention)
Blocks = Literal["pre-norm", "post-norm", "contractive"]
Schedule = Literal["cosine", "fixed"]


@dataclass(frozen=True)
class Settings:
    """A character language model and its training.

    Attributes:
        attention: the kind of attention; "l2" has keys of its own and is not Lipschitz, "contractive-inf" divides L2
            attention by its bound in the ∞-norm (Kim et al. 2021), "contractive-2" by the sharper one in the 2-norm.
            LipschitzNorm is not among them: it divides by norms over all tokens, so that under a causal mask the past
            still knows the future.
        blocks: "pre-norm" for x + f(LayerNorm(x)), "post-norm" for LayerNorm(x + f(x)), "contractive" for x + f(x) with
            Lip(f) < 1; None chooses contractive for contractive attention, pre-norm for the others.
        coefficient: the Lipschitz constant that contractive branches are scaled to; in contractive blocks below one.
        window: how many tokens a token sees, itself and those before; None for all. The constant of L2 attention
            depends on it in place of n.
        lengths: "fixed", "chunks" or "curriculum"; length: the (longest) number of tokens of a piece.
        cycles: how many times a curriculum goes from short to long.
        batch_tokens: characters per step.
        schedule: "cosine" decays the rate to a tenth over the run, "fixed" keeps it; both after a linear warm-up.
        clip: largest norm of the gradient, 0 for none.

    >>> Settings(attention="contractive-2").block_kind
    'contractive'
    """

    attention: Attention = "dot-product"
    depth: int = 2
    width: int = 128
    heads: int = 4
    blocks: Blocks | None = None
    coefficient: float = 0.9
    window: int | None = None
    lengths: Lengths = "fixed"
    length: int = 64
    cycles: int = 1
    steps: int = 1000
    batch_tokens: int = 1024
    rate: float = 1e-3
    schedule: Schedule = "cosine"
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _choice("attention", self.attention, ATTENTIONS)
        _choice("lengths", self.lengths, LENGTHS)
        _choice("schedule", self.schedule, get_args(Schedule))
        _choice("blocks", self.blocks, (*get_args(Blocks), None))
        for name in ("depth", "width", "heads", "length", "cycles", "steps", "batch_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.window is not None and self.window < 1:
            raise InvalidInput(f"a window holds at least one token, got {self.window}.")
        if self.width % self.heads:
            raise InvalidInput(f"a width of {self.width} does not split into {self.heads} heads.")
        if self.batch_tokens % self.length:
            raise InvalidInput(
                f"a batch of {self.batch_tokens} tokens does not hold whole pieces of {self.length}: choose "
                "batch_tokens as a multiple of length."
            )
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InvalidInput(f"the learning rate must be positive and finite, got {self.rate}.")
        for name in ("warmup", "weight_decay", "clip", "seed"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidInput(f"{name} must not be negative, got {getattr(self, name)}.")
        if not 0 <= self.dropout < 1:
            raise InvalidInput(f"dropout must be at least 0 and less than 1, got {self.dropout}.")
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            raise InvalidInput(f"the coefficient must be positive and finite, got {self.coefficient}.")
        if self.block_kind == "contractive" and self.coefficient >= 1:
            raise InvalidInput(
                f"contractive blocks need 0 < coefficient < 1, got {self.coefficient}: only pre-norm and post-norm "
                "blocks may expand."
            )
        if self.blocks == "contractive" and not self.is_contractive:
            raise InvalidInput(
                f"contractive blocks need contractive attention, but {self.attention} attention has no certified "
                "constant below one: choose contractive-2 or contractive-inf."
            )

    @property
    def is_contractive(self) -> bool:
        """Whether the attention is scaled to a constant below one."""
        return self.attention.startswith("contractive")

    @property
    def block_kind(self) -> Blocks:
        """What stands around the attention."""
        return self.blocks or ("contractive" if self.is_contractive else "pre-norm")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step.

        >>> settings = Settings(steps=100, warmup=10, rate=1.0)
        >>> settings.rate_at(4), settings.rate_at(10), round(settings.rate_at(99), 3)
        (0.5, 1.0, 0.1)
        """
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        if self.schedule == "fixed":
            return self.rate
        through = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * through)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Settings:
        """From JSON; unknown or missing names are refused."""
        names = {field.name for field in fields(cls)}
        if content.keys() != names:
            raise InvalidInput(f"these are not the settings of a run: {', '.join(sorted(content.keys() ^ names))}.")
        return cls(**content)

    def difference(self, other: Settings) -> str:
        """What differs, in words, or nothing."""
        mine, theirs = self.to_dict(), other.to_dict()
        return ", ".join(f"{name} {mine[name]} ≠ {theirs[name]}" for name in mine if mine[name] != theirs[name])


def _choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise InvalidInput(f"{name} is {', '.join(str(choice) for choice in choices)}, got {value!r}.")
