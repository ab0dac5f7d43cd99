"""Windows: pieces of a text, an image or a sound, as a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.models.random_models import SPECIAL
from howsmooth.models.tokenizing import token_ids, token_names, token_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Window:
    """One piece of input.

    Attributes:
        ids: what the model reads: token ids ``(1, n)``; of an image its pixels, of a sound its samples or features.
        tokens: the n tokens in words, special ones included.
        start: where the piece begins: the number of text tokens (or sound samples) before it.
    """

    ids: Tensor
    tokens: list[str]
    start: int


def byte_ids(text: str) -> list[int]:
    """The tokens of models without a tokenizer: byte b of the text has the id b + 3.

    >>> byte_ids("hé")
    [107, 198, 172]
    """
    return [byte + SPECIAL for byte in text.encode("utf-8", errors="surrogateescape")]


class TokenisedText:
    """A text as a sequence of tokens, and windows cut from it.

    >>> text = TokenisedText("Down the rabbit hole", None)
    >>> [window] = text.windows(length=6, count=1, seed=None)
    >>> window.tokens
    ['D', 'o', 'w', 'n', ' ', 't']
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer: Any = tokenizer
        if tokenizer is None:
            self.ids, self.before, self.after = byte_ids(text), list[int](), list[int]()
        else:
            self.ids = token_ids(tokenizer, text, verbose=False, add_special_tokens=False)
            self.before, self.after = _special_tokens(tokenizer)

    def __len__(self) -> int:
        return len(self.before) + len(self.ids) + len(self.after)

    def windows(self, length: int, count: int, seed: int | None) -> list[Window]:
        """``count`` different windows of ``length`` tokens, special ones included, in the order of the text.

        They begin where `spread_starts` says: spread over the text, and at the same tokens for every length.
        """
        inside = length - len(self.before) - len(self.after)
        if inside < 1:
            special = len(self.before) + len(self.after)
            raise InvalidInput(
                f"a window of {length} token(s) has no room for text: this model adds {special} special ones, so ask "
                f"for a length of at least {special + 1}."
            )
        if count < 1:
            raise InvalidInput(f"at least one window is cut from a text, got {count}.")
        starts = len(self.ids) - inside + 1
        if starts < 1:
            raise InvalidInput(
                f"the text has {len(self)} tokens with special ones, but windows of {length} "
                "were asked: give more text or ask for less."
            )
        if starts < count:
            raise InvalidInput(
                f"the text has room for {starts} different window(s) of {length} tokens, but {count} were asked: give "
                "more text or ask for fewer."
            )
        return [self._window(start, inside) for start in spread_starts(len(self.ids), inside, count, seed)]

    def _window(self, start: int, inside: int) -> Window:
        ids = [*self.before, *self.ids[start : start + inside], *self.after]
        return Window(torch.tensor([ids]), words(ids, self.tokenizer), start)


def spread_starts(total: int, inside: int, count: int, seed: int | None) -> list[int]:
    """Where ``count`` different windows of ``inside`` tokens begin in a text of ``total``.

    The text is divided into ``count`` equal parts. The first window begins where the text does, and each other one at a
    place of its part that ``seed`` draws, or where the part begins. Windows of several lengths so begin at the same
    tokens, unless the text ends before.

    >>> spread_starts(100, 8, 4, seed=None)
    [0, 25, 50, 75]
    """
    generator = torch.Generator().manual_seed(seed or 0)
    within = torch.zeros(count) if seed is None else torch.rand(count, generator=generator, dtype=torch.float32)
    within[0] = 0.0
    starts = [int((i + float(u)) * total / count) for i, u in enumerate(within)]
    # From the end backwards: a window has room for itself and starts before the next one.
    latest = total - inside
    for i in reversed(range(count)):
        starts[i] = min(starts[i], latest)
        latest = starts[i] - 1
    # When the text is hardly longer than the windows, the first ones may have been pushed over its beginning.
    return [max(start, i) for i, start in enumerate(starts)]


def words(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Token ids in readable form, with spaces as spaces.

    >>> words([107, 198, 172, 1], None)
    ['h', '<c3>', '<a9>', '<1>']
    """
    if tokenizer is None:
        letters = {byte + SPECIAL: chr(byte) for byte in (9, 10, *range(32, 127))}
        return [letters.get(i, f"<{i - SPECIAL:02x}>" if i >= SPECIAL else f"<{i}>") for i in ids]
    raw = token_names(tokenizer, list(ids))
    if any("Ġ" in token or "Ċ" in token for token in raw):  # bytes written as letters (GPT-2 and descendants)
        return token_texts(tokenizer, list(ids))
    return [token.replace("▁", " ") for token in raw]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    plain = token_ids(tokenizer, "a", add_special_tokens=False)
    whole = token_ids(tokenizer, "a")
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []
