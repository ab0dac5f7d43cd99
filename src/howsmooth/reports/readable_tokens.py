"""Tokens as readers know them, with the spaces that each tokenizer writes in its own way."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import ByteLevel

_SPECIAL = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "<s>", "</s>")


def readable(tokens: Sequence[str]) -> list[str]:
    """Each token with its leading space, so that joining them gives the text; a line break is shown as ↵.

    WordPiece marks the continuation of a word (##), SentencePiece (▁) and byte-level BPE (Ġ) mark its beginning.

    >>> "".join(readable(["[CLS]", "rab", "##bit", "hole"]))
    '[CLS] rabbit hole'
    >>> readable(["Alice", "âĢĻ", "s", "Ġcat", "Ċ"])
    ['Alice', '’', 's', ' cat', '↵']
    """
    if any(token.startswith("##") or token in _SPECIAL[:3] for token in tokens):
        words = [token[2:] if token.startswith("##") else f" {token}" for token in tokens]
        words[0] = tokens[0].removeprefix("##")
    elif any(token.startswith("▁") for token in tokens):
        words = [token.replace("▁", " ") for token in tokens]
    elif any(token[:1] in ("Ġ", "Ċ") for token in tokens):
        words = [ByteLevel().decode([token]) for token in tokens]  # added tokens stay as they are
    else:
        words = list(tokens)
    return [token.replace("\r", "").replace("\n", "↵") for token in words]
