r"""Text for character language models: the split into training and validation, and the pieces of text in a batch.

A text file is split into its first 90 % to train on and the rest to validate on. A folder, or one file of it, with
parts named ``….train.…`` and ``….valid.…`` (`ptb.train.txt`, `wiki.valid.tokens`) brings its own split; a test part
is never read. The alphabet is the set of all characters of both parts, in the order of their code points; symbol 0 is
the *start* before the first character of a document.

Batches hold fixed windows, chunks with cross-document masks, or a curriculum of lengths.

Every plan predicts a character from those before it: the input of position i is the character before it in its
document, and the start symbol at the first. A batch holds a constant number of tokens, (pieces) × (length), and depends
on the seed and the step alone: a resumed run sees the same batches as an uninterrupted one.

* `Fixed`: windows of n characters at random positions of the text, which is one document.
* `Chunks`: documents in random order, one after the other, cut every n characters (concat-and-chunk); a token sees only
  earlier tokens of its own document.
* `Curriculum`: every document is cut into pieces whose lengths are powers of two, its length in binary (Pouransari et
  al., *Dataset Decomposition*, 2024); a batch holds pieces of one length. Steps go to the lengths in proportion to
  their characters, in cycles from short to long.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from howsmooth._util.validation import Count, Seed, Size, check_fields, check_tensor, validated
from howsmooth.errors import InvalidInput
from howsmooth.models.model_inputs import decoded, read_content

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
        """Return the symbols of a text, i + 1 for the i-th character of the alphabet; others are refused."""
        table = {character: number for number, character in enumerate(self.alphabet, start=1)}
        try:
            return torch.tensor([table[character] for character in text], dtype=torch.int64)
        except KeyError as error:
            raise InvalidInput(
                f"the character {error.args[0]!r} is not in the alphabet the model was trained on."
            ) from None


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
    """Read a text with its line ends unchanged: every character counts."""
    return decoded(read_content(path), str(path))


Lengths = Literal["fixed", "chunks", "curriculum"]
_TEXT, _ORDER = 0, 1  # streams of random numbers: positions of windows, order of pieces


@dataclass(frozen=True)
class TextBatch:
    """Pieces of one length.

    Attributes:
        inputs, targets: ``(pieces, length)`` symbols; target i is the character after input i.
        document: number of each token's document, ``(pieces, length)``, or None when every piece has only one.
    """

    inputs: Tensor
    targets: Tensor
    document: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Return the number of predicted characters."""
        return self.targets.numel()

    def to(self, device: torch.device) -> TextBatch:
        """Return the same pieces on a device."""
        document = None if self.document is None else self.document.to(device)
        return TextBatch(self.inputs.to(device), self.targets.to(device), document)

    def seen(self) -> Tensor | None:
        """Return a mask ``(pieces, n, n)`` of the visible tokens: earlier ones of the same document; None for causal.

        >>> TextBatch(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([[4, 4, 7]])).seen().int()
        tensor([[[1, 0, 0],
                 [1, 1, 0],
                 [0, 0, 1]]], dtype=torch.int32)
        """
        if self.document is None:
            return None
        return (self.document[:, :, None] == self.document[:, None, :]).tril()

    def positions(self) -> Tensor:
        """Return the position of each token in its document's part of the piece, from 0: ``(pieces, length)``.

        >>> TextBatch(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([[4, 4, 7]])).positions()
        tensor([[0, 1, 0]])
        """
        positions = torch.arange(self.inputs.shape[1], device=self.inputs.device).expand(self.inputs.shape)
        if self.document is None:
            return positions
        begins = torch.ones_like(self.document, dtype=torch.bool)
        begins[:, 1:] = self.document[:, 1:] != self.document[:, :-1]
        return positions - torch.where(begins, positions, 0).cummax(1).values


class Plan(ABC):
    """A batch for every step."""

    @abstractmethod
    def batch(self, step: int) -> TextBatch:
        """Return the batch of step 0, 1, …"""

    def length(self, step: int) -> int:
        """Return the length of the pieces of a step."""
        return self.batch(step).inputs.shape[1]


class Fixed(Plan):
    """Windows of ``length`` characters at random positions of one document."""

    @validated
    def __init__(self, text: Tensor, length: Count, batch_tokens: Count, seed: Seed):
        self.targets, self.inputs = _symbols(text, "text"), _before(text)
        self.n, self.pieces, self.seed = length, batch_tokens // length, seed
        _check_longer(len(text), length)

    def batch(self, step: int) -> TextBatch:
        generator = _generator(self.seed, _TEXT, step)
        starts = torch.randint(len(self.targets) - self.n + 1, (self.pieces, 1), generator=generator)
        index = starts + torch.arange(self.n)
        return TextBatch(self.inputs[index], self.targets[index])


class Chunks(Plan):
    """Documents one after the other, cut every ``length`` characters; attention stays within a document."""

    @validated
    def __init__(self, parts: Sequence[Tensor], length: Count, batch_tokens: Count, seed: Seed):
        self.n, self.pieces, self.seed = length, batch_tokens // length, seed
        self.targets, self.inputs, self.owner, self.begins = _joined(parts)
        self._streams = dict[int, Tensor]()
        self.sizes = torch.tensor([len(document) for document in parts])
        _check_longer(len(self.targets), length)

    def batch(self, step: int) -> TextBatch:
        size = self.n * self.pieces
        index = _endless(self._stream, step * size, size, len(self.targets))
        shape = (self.pieces, self.n)
        # A chunk may contain two passes over a text: documents of the next pass have other numbers.
        passes = torch.arange(step * size, (step + 1) * size) // len(self.targets)
        owner = self.owner[index] + passes * len(self.sizes)
        return TextBatch(self.inputs[index].view(shape), self.targets[index].view(shape), owner.view(shape))

    def _stream(self, epoch: int) -> Tensor:
        """Return all positions of the text, document by document in the random order of this pass."""
        if epoch not in self._streams:
            order = torch.randperm(len(self.sizes), generator=_generator(self.seed, _ORDER, epoch))
            sizes = self.sizes[order]
            shift = (self.begins[order] - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
            previous = {epoch - 1: self._streams[epoch - 1]} if epoch - 1 in self._streams else {}
            self._streams = previous | {epoch: torch.arange(len(self.targets)) + shift}
        return self._streams[epoch]


class Curriculum(Plan):
    """Pieces of one power of two per batch, short to long, in ``cycles`` rounds over ``steps`` steps."""

    @validated
    def __init__(
        self, parts: Sequence[Tensor], length: Count, batch_tokens: Count, seed: Seed, steps: Count, cycles: Count = 1
    ):
        if length & (length - 1) or batch_tokens % length:
            raise InvalidInput(
                f"a curriculum needs a longest length that is a power of two and divides the tokens of a batch, got "
                f"{length} and {batch_tokens}."
            )
        if not 1 <= cycles <= steps:
            raise InvalidInput(f"a curriculum of {steps} steps has between 1 and {steps} cycles, got {cycles}.")
        self.seed, self.batch_tokens = seed, batch_tokens
        self.targets, self.inputs, _, begins = _joined(parts)
        starts: dict[int, list[int]] = defaultdict(list)
        for begin, document in zip(begins.tolist(), parts, strict=True):
            for at, size in powers(len(document), length):
                starts[size].append(begin + at)
        self.buckets = {size: torch.tensor(starts[size]) for size in sorted(starts)}
        self.order = _short_to_long({size: size * len(at) for size, at in self.buckets.items()}, steps, cycles)

    def length(self, step: int) -> int:
        return int(self.order[step])

    def batch(self, step: int) -> TextBatch:
        if not 0 <= step < len(self.order):
            raise InvalidInput(f"the curriculum was made for {len(self.order)} steps; there is no step {step}.")
        size = self.length(step)
        number = int((self.order[:step] == size).sum())
        pieces = self.batch_tokens // size
        index = self._pieces(size, number * pieces, pieces)[:, None] + torch.arange(size)
        return TextBatch(self.inputs[index], self.targets[index])

    def _pieces(self, size: int, begin: int, count: int) -> Tensor:
        """Return items begin … begin + count − 1 of the endless stream of a bucket."""
        starts = self.buckets[size]
        return starts[_endless(partial(_permutation, len(starts), self.seed, size), begin, count, len(starts))]


@validated
def plan(
    corpus: Corpus, lengths: Lengths, length: Count, batch_tokens: Count, seed: Seed, steps: Count, cycles: Count = 1
) -> Plan:
    """Make the plan of a run over the training part."""
    if lengths == "fixed":
        return Fixed(corpus.encode(corpus.train), length, batch_tokens, seed)
    parts = [corpus.encode(document) for document in documents(corpus.train)]
    if lengths == "chunks":
        return Chunks(parts, length, batch_tokens, seed)
    return Curriculum(parts, length, batch_tokens, seed, steps, cycles)


@validated
def validation(corpus: Corpus, lengths: Lengths, length: Count, limit: Count | None = None) -> TextBatch:
    """Cut the validation part (its first ``limit`` characters) into pieces of one length; each character occurs once.

    Fixed lengths have windows of one document, the others chunks with cross-document masks. The remainder after the
    last full piece is dropped, except in texts shorter than one piece.
    """
    text = corpus.valid if limit is None else corpus.valid[:limit]
    cut = [text] if lengths == "fixed" else documents(text)
    targets, inputs, owner, _ = _joined([corpus.encode(piece) for piece in cut])
    length = min(length, len(targets))
    size = len(targets) // length * length
    rows = [column[:size].view(-1, length) for column in (inputs, targets, owner)]
    return TextBatch(rows[0], rows[1], None if lengths == "fixed" else rows[2])


@validated
def powers(length: Size, longest: Count) -> list[tuple[int, int]]:
    """Return the pieces of a document as (position, size): sizes are powers of two up to ``longest``, largest first.

    >>> powers(11, 64), powers(11, 4)
    ([(0, 8), (8, 2), (10, 1)], [(0, 4), (4, 4), (8, 2), (10, 1)])
    """
    pieces, begin = list[tuple[int, int]](), 0
    while begin < length:
        size = min(longest, 1 << ((length - begin).bit_length() - 1))
        pieces.append((begin, size))
        begin += size
    return pieces


def _short_to_long(characters: dict[int, int], steps: int, cycles: int) -> Tensor:
    """Return a length for every step: ascending in each cycle, each in proportion to its characters."""
    sizes = torch.tensor(list(characters))
    share = torch.tensor([characters[int(size)] for size in sizes], dtype=torch.float64).cumsum(0)
    through = torch.arange(steps, dtype=torch.float64) * cycles / steps % 1.0
    return sizes[torch.searchsorted(share / share[-1], through, right=True).clamp(max=len(sizes) - 1)]


def _check_longer(characters: int, length: int) -> None:
    if characters < length:
        raise InvalidInput(f"the text to train on has {characters} characters, fewer than a length of {length}.")


def _before(text: Tensor) -> Tensor:
    """Return the inputs of a document: the start, then all characters but the last."""
    return torch.cat([torch.full((1,), START), text[:-1]])


def _symbols(text: Tensor, name: str) -> Tensor:
    """Check a row of symbols."""
    check_tensor(text, name, dims=(1,), floating=False)
    if text.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(f"{name} must hold symbols, whole numbers as of `Corpus.encode`, got {text.dtype}.")
    return text


def _joined(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return targets, inputs and document numbers of all documents in sequence, and the start of each."""
    if not len(parts):
        raise InvalidInput("there is no document to train on or to validate with.")
    sizes = torch.tensor([len(_symbols(document, "a document")) for document in parts])
    owner = torch.arange(len(parts)).repeat_interleave(sizes)
    return torch.cat(list(parts)), torch.cat([_before(document) for document in parts]), owner, sizes.cumsum(0) - sizes


def _endless(order: Callable[[int], Tensor], begin: int, count: int, size: int) -> Tensor:
    """Return items begin … begin + count − 1 of an endless stream: all ``size`` items in one order after the other."""
    epochs = range(begin // size, (begin + count - 1) // size + 1)
    return torch.cat([order(epoch)[max(0, begin - epoch * size) : begin + count - epoch * size] for epoch in epochs])


@lru_cache(maxsize=64)
def _permutation(count: int, seed: int, size: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=_generator(seed, _ORDER + size, epoch))


def _generator(seed: int, stream: int, number: int) -> torch.Generator:
    """Return an independent generator for every (seed, stream, number)."""
    mixed = np.random.SeedSequence([seed, stream, number]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]) >> 1)
