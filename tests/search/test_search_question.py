"""A question is checked as a whole before anything is drawn, and its starts follow from it alone."""

from __future__ import annotations

import copy
from copy import deepcopy
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.search import search_question
from howsmooth.search.search_question import Question
from howsmooth.sets import Around, Ball, InputSet

BALL = Ball(1.0)
HEAD = hs.SelfAttention.from_bilinear(-torch.eye(2), torch.eye(2))


def ask(f: Any = HEAD, n: int | None = 4, over: Any = BALL, **options: Any) -> Question:
    return Question.of(f, n, over, **{"starts": 3, "steps": 5} | options)


def test_a_question_knows_the_sizes_whoever_says_them() -> None:
    assert (ask().n, ask().d) == (4, 2)
    near = ask(n=None, over=Around(torch.ones(3, 2), 0.1))
    assert (near.n, near.d) == (3, 2)
    free = ask(torch.sin, n=None, given=(torch.ones(5, 7),))
    assert (free.n, free.d) == (5, 7)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"norm": 3}, "cannot be searched"),
        ({"head": 1}, "there is no head 1"),
        ({"source": [1]}, "source must be a dictionary"),
        ({"source": {"x": torch.ones(1)}}, "source must be made of words"),
        ({"progress": 5}, "progress"),
        ({"starts": 0, "constructions": False}, "nothing to set out from"),
        ({"radius": 2.0}, "takes no argument 'radius'"),
        ({"over": Ball(2.0, width=3)}, "tokens of width 3"),
        ({"over": None}, "no Lipschitz constant on all inputs"),
        ({"over": Ball(1e20)}, "float64 cannot resolve"),
        ({"n": 10**12}, "GiB"),
    ],
)
def test_what_has_no_answer_is_refused_before_a_start_is_built(
    options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_question, "constructions", lambda *args: pytest.fail("built a start"))
    monkeypatch.setattr(search_question, "random_starts", lambda *args: pytest.fail("built a start"))
    with pytest.raises(hs.InvalidInput, match=why):
        hs.worst_case(HEAD, **{"n": 4, "over": BALL} | options)


def test_the_starts_of_a_question_are_those_given_those_of_theorems_and_those_drawn() -> None:
    over: InputSet = Ball(1.0)
    found, notes = search_question.starts_for(ask(given=(torch.full((4, 2), 9.0), torch.zeros(4, 2))))
    names = [start.name for start in found]
    assert names[:2] == ["given 0, brought into the set", "given 1"]
    assert len(notes) == 1
    assert names[2:] == [s.name for s in search_question.constructions(HEAD, over, 4, 2)] + [
        s.name for s in search_question.random_starts(HEAD, over, 4, 2, 3, 0)
    ]
    assert all(over.excess(start.x) < 1e-12 for start in found)


@pytest.mark.parametrize("head", [None, 1])
def test_a_search_converts_its_map_to_float64_once(head: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def counting(value: object, *memo: Any) -> object:
        if isinstance(value, AttentionMap):
            copied.append(value)
        return deepcopy(value, *memo)

    monkeypatch.setattr(copy, "deepcopy", counting)
    hs.worst_case(hs.SelfAttention.random(4, 2), 3, over=BALL, head=head, starts=1, steps=2)
    assert len(copied) == 1


def test_nobody_changes_a_question() -> None:
    with pytest.raises(FrozenInstanceError):
        ask().seconds = 1.0  # type: ignore[misc]
