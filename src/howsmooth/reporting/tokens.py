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
        found = [_word_piece(token, first=place == 0) for place, token in enumerate(tokens)]
    elif any(token.startswith("▁") for token in tokens):
        found = [token.replace("▁", " ") for token in tokens]
    elif any(token[:1] in ("Ġ", "Ċ") for token in tokens):
        found = [_from_bytes(token) for token in tokens]
    else:
        found = list(tokens)
    return [token.replace("\r", "").replace("\n", "↵") for token in found]


def _word_piece(token: str, first: bool) -> str:
    return token[2:] if token.startswith("##") else token if first else " " + token


def _byte_letters() -> dict[str, int]:
    """The letters with which byte-level BPE writes bytes: printable ones stand for themselves."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_letters()


def _from_bytes(token: str) -> str:
    if any(letter not in _BYTES for letter in token):  # added tokens are written as they are
        return token
    return bytes(_BYTES[letter] for letter in token).decode("utf-8", errors="replace")
