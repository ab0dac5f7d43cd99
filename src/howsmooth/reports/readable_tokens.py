"""Tokens as people read them: with the spaces that tokenizers write in their own ways."""

from __future__ import annotations

from collections.abc import Sequence

_SPECIAL = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "<s>", "</s>")


def readable(tokens: Sequence[str]) -> list[str]:
    """Each token with its leading space, so that joining them gives the text; a line break is shown as ↵.

    WordPiece marks what continues a word (##), SentencePiece (▁) and byte-level BPE (Ġ) mark what begins one.

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
        words = [_from_bytes(token) for token in tokens]
    else:
        words = list(tokens)
    return [token.replace("\r", "").replace("\n", "↵") for token in words]


def _byte_letters() -> dict[str, int]:
    """The letters with which byte-level BPE writes bytes: printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_letters()


def _from_bytes(token: str) -> str:
    if any(letter not in _BYTES for letter in token):  # added tokens are written as they are
        return token
    return bytes(_BYTES[letter] for letter in token).decode("utf-8", errors="replace")
