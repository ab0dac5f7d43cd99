"""Inputs of models: texts and other files, with their names and hashes, and the windows that a model reads of them.

Tokenizers are written in Rust and may panic. A panic (a regular expression that backtracks for ever, say) reaches
Python as a `BaseException` that no ``except Exception`` sees, and Rust has by then printed a report of many lines on
the standard error of the process. Here both become one sentence.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from howsmooth._util.common import first_line, out_of_memory, printable
from howsmooth._util.process_lock import alone
from howsmooth._util.validation import did_you_mean, shown
from howsmooth.errors import HowsmoothError, InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SPECIAL = 3
"""Token ids below this are special (padding, beginning, end); byte b of a text has the id b + 3."""
_Result = TypeVar("_Result")
_STDERR = 2
_PYTHON = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)
"""The exceptions of Python itself."""
LARGEST_TEXT = 64 * 2**20
"""Bytes of the largest text that is read: all of it is turned into tokens before windows are cut."""
LARGEST_FILE = 2**30
"""Bytes of the largest image or sound."""


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
        special = len(self.before) + len(self.after)
        inside = length - special
        if inside < 1:
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
        return _read(lambda: [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in ids])
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


def alice() -> str:
    """Lewis Carroll, *Alice's Adventures in Wonderland* (1865), in the public domain.

    >>> alice()[:55]
    "[Alice's Adventures in Wonderland by Lewis Carroll 1865"
    """
    return (files("howsmooth.models") / "data" / "alice.txt").read_text(encoding="utf-8")


def read_content(path: Path, limit: int = LARGEST_FILE) -> bytes:
    """The bytes of a plain file: no folder, no pipe or device that may never end, and none that is too large."""
    name = printable(str(path))
    try:
        # Opened without waiting, so that a pipe without a writer is noticed too.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise InvalidInput(f"{name} is not a plain file but a pipe or device: give a file.")
            if about.st_size > limit:
                raise InvalidInput(
                    f"{name} has {about.st_size / 2**20:.0f} MB, but at most {limit // 2**20} are read: cut a part out."
                )
            return file.read(limit)
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {name}: check the path.") from None
    except IsADirectoryError:
        raise InvalidInput(f"{name} is a folder: give a file.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidInput(f"{name} cannot be read ({printable(reason)}): check the path.") from None


def decoded(content: bytes, name: str) -> str:
    """A text in UTF-8 that holds more than spaces."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidInput(f"{printable(name)} is not a text in UTF-8: give plain text.")
    if not text.strip():
        raise InvalidInput(f"{printable(name)} is empty: give a text to read.")
    return text


def read_text(path: Path) -> str:
    """The text in a file."""
    return decoded(read_content(path, LARGEST_TEXT), str(path))


def file_named(source: str | Path | None) -> tuple[str | Path | None, tuple[str, ...]]:
    """A string that names a file as its path, with a note about it; anything else unchanged.

    >>> file_named("Drink me")
    ('Drink me', ())
    """
    if isinstance(source, str) and os.path.exists(source):  # False where a text is too long for a name
        return Path(source), (f"{printable(source)} is the name of a file, so what was read is its content",)
    return source, ()


def joined_texts(source: object, column: str | None = None) -> tuple[str, str]:
    """The texts of a list, or of a column of a dataset, joined into one, with a name for it.

    Args:
        source: strings, or rows with names, such as a dataset of Hugging Face.
        column: the column of the rows; "text" by default.

    >>> joined_texts(["Drink me", "Eat me"])
    ('2 given texts', 'Drink me\\n\\nEat me')
    """
    wanted = "text" if column is None else column
    names = getattr(source, "column_names", None)
    if names is not None:
        _check_column(wanted, names)
    if isinstance(source, Mapping):
        raise InvalidInput(f"a dictionary is no list of texts: choose one of {', '.join(map(str, source))}.")
    if not isinstance(source, Iterable):
        raise InvalidInput(
            f"what a model reads is a text, the path of a file, or a list or dataset of texts, not {shown(source)}."
        )
    texts, size = list[str](), 0
    for row in source:
        if isinstance(row, Mapping):
            _check_column(wanted, row)
            row = row[wanted]
        if not isinstance(row, str):
            raise InvalidInput(f"a list of texts holds texts, but text {len(texts)} is {shown(row)}.")
        texts.append(row)
        size += len(row)
        if size >= LARGEST_TEXT:
            break
    if not any(text.strip() for text in texts):
        raise InvalidInput("the texts are empty: give some to read.")
    return f"{len(texts)} given texts", "\n\n".join(texts)


def _check_column(wanted: str, names: Iterable[object]) -> None:
    known = [str(name) for name in names]
    if wanted not in known:
        hint = did_you_mean(wanted, known) or f": it has {', '.join(known)}."
        raise InvalidInput(f"the dataset has no column {wanted!r}{hint}")


def read_input(source: str | Path | None, modality: str = "text") -> tuple[str, str | Path, str]:
    """Name, content (of an image or sound its path) and sha256 of the input of a model of this modality.

    Args:
        source: a text, the path of a file (also as a string, where there is such a file), or None for Alice in
            Wonderland.
        modality: "text", "image" or "audio".

    >>> read_input("Drink me")[:2]
    ('given text', 'Drink me')
    """
    source, _ = file_named(source)
    if source is not None and not isinstance(source, str | Path):
        raise InvalidInput(f"what a model reads is a text or the path of a file, not {type(source).__name__}.")
    if modality != "text":
        if not isinstance(source, Path):
            raise InvalidInput(f"this model reads {modality}, not text: give the path of an {modality} file.")
        return source.name, source, hashlib.sha256(read_content(source, LARGEST_FILE)).hexdigest()
    if source is None:
        name, content = "Alice in Wonderland", alice().encode()
    elif isinstance(source, Path):
        name, content = source.name, read_content(source, LARGEST_TEXT)
    else:
        name, content = "given text", _encoded(source)
    return name, decoded(content, name), hashlib.sha256(content).hexdigest()


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidInput("the text holds halves of surrogate pairs, which UTF-8 cannot hold: remove them.") from None


def random_inputs(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """Random token ids, a random image or random audio, whichever the model takes; the same in every call."""
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    if model.main_input_name == "input_ids":
        return {"input_ids": torch.randint(config.vocab_size, (1, length), generator=generator)}
    if model.main_input_name == "pixel_values":
        size = config.image_size
        shape = (config.num_channels, *((size, size) if isinstance(size, int) else size))
    elif model.main_input_name == "input_values":
        shape = (samples_of_frames(length, config.conv_kernel, config.conv_stride),)
    elif model.main_input_name == "input_features":
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    else:
        raise UnsupportedModel(
            f"{type(model).__name__} takes {model.main_input_name!r}, but only token ids, images and audio can be "
            "checked."
        )
    return {model.main_input_name: torch.randn(1, *shape, generator=generator).to(model.dtype)}


def samples_of_frames(frames: int, kernels: Sequence[int], strides: Sequence[int]) -> int:
    """The number of audio samples from which a stack of convolutions makes this many frames.

    >>> samples_of_frames(3, kernels=[10, 3], strides=[5, 2])
    40
    """
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        frames = (frames - 1) * stride + kernel
    return frames
