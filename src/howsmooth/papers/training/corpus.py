"""Text for character language models: reading, the split into training and validation, documents, the alphabet.

A text file is split into its first 90 % to train on and the rest to validate on. A folder, or one file of it, with
parts named ``….train.…`` and ``….valid.…`` (`ptb.train.txt`, `wiki.valid.tokens`) brings its own split; a test part
is never read. The alphabet is the set of all characters of both parts, in the order of their code points; symbol 0 is
the *start* before the first character of a document.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from howsmooth._util.validation import check_count, check_fields, validated
from howsmooth.errors import InvalidInput

TRAINED_SHARE = 0.9
START = 0
"""The symbol before the first character of a document."""


@dataclass(frozen=True)
class Corpus:
    """A training text, a validation text, and a description of the split.

    >>> corpus = Corpus.split("to be or not to be")
    >>> corpus.train, corpus.valid, corpus.alphabet
    ('to be or not to ', 'be', ' benort')
    >>> corpus.encode("bet")
    tensor([2, 3, 7])
    """

    train: str
    valid: str
    how: str

    def __post_init__(self) -> None:
        check_fields(self)
        for name, text in (("train", self.train), ("validate", self.valid)):
            if len(text) < 2:
                raise InvalidInput(
                    f"there is too little text to {name} on ({len(text)} characters): give a longer file."
                )

    @classmethod
    @validated
    def split(cls, text: str) -> Corpus:
        """Split a text: the first 90 % to train on, the rest to validate on."""
        cut = int(TRAINED_SHARE * len(text))
        return cls(text[:cut], text[cut:], f"first {TRAINED_SHARE:.0%} of the text to train, the rest to validate")

    @classmethod
    @validated
    def read(cls, path: Path | str) -> Corpus:
        """Read a text file, or a folder (or one file of it) with parts named train and valid."""
        path = Path(path)
        split = _parts(path)
        if split is None:
            return cls.split(_read(path))
        train, valid = split
        return cls(_read(train), _read(valid), f"{train.name} to train, {valid.name} to validate")

    @cached_property
    def alphabet(self) -> str:
        """Return all characters, in the order of their code points; symbol i + 1 is the i-th of them."""
        return "".join(sorted(set(self.train) | set(self.valid)))

    @property
    def symbols(self) -> int:
        """Return the number of symbols: the characters and the start."""
        return len(self.alphabet) + 1

    @cached_property
    def sha256(self) -> str:
        """Return the hash of both parts and their split."""
        digest = hashlib.sha256(self.train.encode("utf-8", "surrogatepass"))
        digest.update(b"\0valid\0" + self.valid.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def encode(self, text: str) -> Tensor:
        """Return the symbols of a text, 1 … ; characters outside the alphabet are refused."""
        return encode(text, self.alphabet)


@validated
def encode(text: str, alphabet: str) -> Tensor:
    """Return the symbols of the characters, i + 1 for the i-th of the alphabet."""
    table = {character: number for number, character in enumerate(alphabet, start=1)}
    try:
        return torch.tensor([table[character] for character in text], dtype=torch.int64)
    except KeyError as error:
        raise InvalidInput(
            f"the character {error.args[0]!r} is not in the alphabet the model was trained on."
        ) from None


@validated
def decode(symbols: Sequence[int], alphabet: str) -> str:
    """Return the characters of symbols; the start symbol has none.

    >>> decode([0, 1, 2], "ab")
    'ab'
    """
    for symbol in symbols:
        check_count(symbol, "a symbol", least=0, most=len(alphabet))
    return "".join(alphabet[symbol - 1] for symbol in symbols if symbol != START)


@validated
def documents(text: str) -> list[str]:
    r"""Cut the text into documents, whose concatenation is the text.

    Documents are paragraphs (each with the blank line that ends it), or lines in a text without blank lines.

    >>> documents("A:\nyes\n\nB:\nno\n"), documents("one\ntwo\n")
    (['A:\nyes\n\n', 'B:\nno\n'], ['one\n', 'two\n'])
    """
    ends = [match.end() for match in re.finditer(r"\n(?:[ \t\r]*\n)+", text)]
    if not ends:
        return text.splitlines(keepends=True)
    cuts = [0, *ends] if ends[-1] == len(text) else [0, *ends, len(text)]
    return [text[begin:end] for begin, end in pairwise(cuts)]


def _parts(path: Path) -> tuple[Path, Path] | None:
    """Find the training and validation files of a path, or None for a text to be split."""
    if not path.exists():
        raise InvalidInput(
            f"there is no file or folder {path}: give a text file, or a folder with ptb.train.txt and so on."
        )
    if path.is_dir():
        training = sorted(file for file in path.iterdir() if file.is_file() and ".train." in file.name)
        if len(training) != 1:
            raise InvalidInput(
                f"{path} holds {len(training)} files named ….train.…, not one: give a text file, or a folder with one "
                "training and one validation file such as ptb.train.txt and ptb.valid.txt."
            )
        train = training[0]
    else:
        train = path.with_name(re.sub(r"\.(valid|test)\.", ".train.", path.name))
        if ".train." not in train.name:
            return None
    valid = train.with_name(train.name.replace(".train.", ".valid."))
    for file in (train, valid):
        if not file.is_file():
            raise InvalidInput(f"{file} is missing: training needs it beside {path.name}.")
    return train, valid


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line ends unchanged: every character counts
            return file.read()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not a text in UTF-8 ({error.reason} at byte {error.start}).") from None
