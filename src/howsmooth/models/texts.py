"""Texts that come with the package."""

from __future__ import annotations

from importlib.resources import files


def alice() -> str:
    """Lewis Carroll, *Alice's Adventures in Wonderland* (1865), in the public domain.

    >>> alice()[:55]
    "[Alice's Adventures in Wonderland by Lewis Carroll 1865"
    """
    return (files("howsmooth.models") / "data" / "alice.txt").read_text(encoding="utf-8")
