"""Windows: pieces of a text, an image or a sound, as a model reads them, and calls of tokenizers.

Tokenizers are written in Rust and may panic. A panic (a regular expression that backtracks for ever, say) reaches
Python as a `BaseException` that no ``except Exception`` sees, and Rust has by then printed a report of many lines on
the standard error of the process. Here both become one sentence.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from howsmooth._util.common import first_line, out_of_memory
from howsmooth._util.process_lock import alone
from howsmooth.errors import HowsmoothError, InvalidInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPECIAL = 3
"""Token ids below this are special (padding, beginning, end); byte b of a text has the id b + 3."""
_Result = TypeVar("_Result")
_STDERR = 2
_PYTHON = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)
"""The exceptions of Python itself."""


@dataclass(frozen=True)
class Window:
    """One piece of input.

    Attributes:
        ids: the input of the model: token ids ``(1, n)``; of an image its pixels, of a sound its samples or features.
        tokens: the n tokens in words, special ones included.
        start: the number of text tokens (or sound samples) before the piece.
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

        They begin at `spread_starts`: spread over the text, and at the same tokens for every length.
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
                "were requested: give more text or ask for less."
            )
        if starts < count:
            raise InvalidInput(
                f"the text has room for {starts} different window(s) of {length} tokens, but {count} were requested: "
                "give more text or ask for fewer."
            )
        return [self._window(start, inside) for start in spread_starts(len(self.ids), inside, count, seed)]

    def _window(self, start: int, inside: int) -> Window:
        ids = [*self.before, *self.ids[start : start + inside], *self.after]
        return Window(torch.tensor([ids]), words(ids, self.tokenizer), start)


def spread_starts(total: int, inside: int, count: int, seed: int | None) -> list[int]:
    """The starts of ``count`` different windows of ``inside`` tokens in a text of ``total``.

    The text is divided into ``count`` equal parts. The first window begins with the text, each other one at a random
    place of its part (by ``seed``) or at its start. Windows of several lengths therefore begin at the same tokens,
    unless the text is too short.

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
    """The tokens that the tokenizer puts before and after a text."""
    plain = token_ids(tokenizer, "a", add_special_tokens=False)
    whole = token_ids(tokenizer, "a")
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


class Panic(InvalidInput):
    """A library written in Rust has panicked."""


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The ids of a text; `InvalidInput` where the tokenizer cannot read it."""
    return _read(lambda: list(tokenizer(text, **options)["input_ids"]))


def token_names(tokenizer: Any, ids: list[int]) -> list[str]:
    """The tokens of ids as the tokenizer writes them."""
    return _read(lambda: [str(token) for token in tokenizer.convert_ids_to_tokens(ids)])


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of every id by itself."""
    return _read(lambda: [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids])


@alone
def without_panic(call: Callable[[], _Result]) -> _Result:
    """The value of a call; a panic becomes a `Panic`, and its report is not printed."""
    with _captured_stderr() as report:
        try:
            return call()
        except _PYTHON:
            raise
        except BaseException as panic:
            report.truncate(0)
            raise Panic(f"the tokenizer gave up ({first_line(panic)}): take another text or tokenizer.") from panic


def _read(call: Callable[[], _Result]) -> _Result:
    try:
        return without_panic(call)
    except HowsmoothError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = first_line(error, kind=True)
        raise InvalidInput(
            f"the tokenizer cannot read this text ({reason}): take another text or tokenizer."
        ) from error


@contextmanager
def _captured_stderr() -> Iterator[IO[bytes]]:
    """A file that collects standard error of the whole process; its content is printed when the block ends."""
    with tempfile.TemporaryFile(buffering=0) as report:
        try:
            usual = os.dup(_STDERR)
        except OSError:  # a process without standard error
            yield report
            return
        os.dup2(report.fileno(), _STDERR)
        try:
            yield report
        finally:
            os.dup2(usual, _STDERR)
            os.close(usual)
            report.seek(0)
            while content := report.read(2**16):
                os.write(_STDERR, content)
