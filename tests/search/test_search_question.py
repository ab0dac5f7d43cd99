"""A question is checked as a whole before anything is drawn, and its starts follow from it alone.

The theorems' inputs are what the theorems say, lie in the set, and reach the bounds of the catalogue.
"""

from __future__ import annotations

import copy
import math
from copy import deepcopy
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.bounds import get
from howsmooth.bounds.question_setting import query_key, value_matrices
from howsmooth.search import search_question
from howsmooth.search.search_question import KINDS, Question, constructions, random_starts, two_poles
from howsmooth.sets import Around, Ball, Everywhere, InputSet, Normalised, Sphere
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.testing import dense_jacobian

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


F64 = torch.float64
EYE = torch.eye(2, dtype=F64)


def dense_norm(f: object, x: Tensor, norm: float = 2) -> float:
    dense = dense_jacobian(f, x)  # type: ignore[arg-type]
    return float(torch.linalg.matrix_norm(dense, norm))


def named(f: object, over: InputSet, n: int, d: int) -> dict[str, Tensor]:
    return {start.name: start.x for start in constructions(f, over, n, d)}


@pytest.mark.parametrize("mask", [None, "causal"])
def test_both_branches_put_the_outlier_first(mask: str | None) -> None:
    a = torch.diag(torch.tensor([-1.0, 2.0], dtype=F64))
    found = named(hs.SelfAttention.from_bilinear(a, EYE, mask=mask), Ball(3.0), 4, 2)
    low, high = found["two clusters, −γ branch"], found["two clusters, γ/8 branch"]
    assert torch.allclose(low.abs(), 3 * EYE[[0, 0, 0, 0]])
    assert torch.equal(low[0], -low[1])
    assert torch.equal(low[1:], low[1].expand(3, 2))
    assert torch.allclose(high[0].abs(), 3 * EYE[1])
    assert torch.equal(high[1:], high[0].expand(3, 2) / 2)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("seed", range(4))
def test_constructions_reach_the_lower_bounds_of_the_catalogue(mask: str | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, v = (torch.randn(3, 3, dtype=F64, generator=generator) for _ in range(2))
    head = hs.SelfAttention.from_bilinear(a, v, mask=mask)
    best = max(dense_norm(head, x) for x in named(head, Ball(1.5), 9, 3).values())
    for name in ("howsmooth.two_cluster", "howsmooth.equal_tokens", "castin2024.lower_sqrt_n"):
        bound = float(get(name)(head, n=9, over=hs.sets.Ball(1.5)).nan_to_num())
        assert bound <= best * (1 + 1e-12)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("seed", range(6))
def test_two_poles_reach_what_their_proof_says(mask: str | None, seed: int) -> None:
    """‖J‖ ≥ √((n−2)/2)·p·|V(x₁−x₂)|·|w|, from moving the poles apart along w (unmasked: every other token alike)."""
    generator = torch.Generator().manual_seed(seed)
    a, v = (torch.randn(4, 4, dtype=F64, generator=generator) for _ in range(2))
    head = hs.SelfAttention.from_bilinear(a, v, torch.randn(4, dtype=F64, generator=generator), mask=mask)
    tokens = Ellipsoid.layer_norm(torch.rand(4, generator=generator) + 0.5, torch.randn(4, generator=generator))
    n = 20
    x = two_poles(head, tokens, n)
    assert Normalised(tokens).excess(x) < 1e-12
    weights = head.weights(x)[0][2:]
    assert torch.allclose(weights[:, 0], weights[:, 1], rtol=1e-9)
    query, key, bias = query_key(head)
    push = key[0].mT @ (query[0] @ x[-1] + bias[0])
    apart = float((value_matrices(head)[0] @ (x[0] - x[1])).norm() * push.norm())
    proved = float((weights[:, 0].square().sum() / 2).sqrt()) * apart
    assert proved <= dense_norm(head, x) * (1 + 1e-12)
    if mask is None:
        assert proved > 0.5 * dense_norm(head, x)


def test_two_poles_are_rougher_than_two_clusters_by_a_factor_like_a() -> None:
    """A = −I, V = I, R² = 8, so a = 8: √(n/2)·a against √n for one outlier with all the weight."""
    head = hs.SelfAttention.from_bilinear(-EYE, EYE)
    found = named(head, Ball(8**0.5), 32, 2)
    poles = dense_norm(head, found["two poles"])
    assert poles >= (30 / 2) ** 0.5 * 8
    assert poles > 3 * max(dense_norm(head, x) for name, x in found.items() if "clusters" in name)
    assert poles <= float(get("howsmooth.unified")(head, n=32, over=hs.sets.Ball(8**0.5)))


def test_the_tight_input_reaches_the_l2_bounds() -> None:
    one = torch.ones(1, 1, dtype=F64)
    for mask in (None, "causal"):
        line = hs.L2SelfAttention(2 * one, one, mask=mask)
        x = named(line, Everywhere(), 25, 1)["tight input"]
        assert dense_norm(line, x, math.inf) == pytest.approx(float(get("howsmooth.l2_tight_lower")(line, n=25)))
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(6, 6, dtype=F64, generator=generator) for _ in range(3))
    block = hs.L2SelfAttention(*weights, heads=2)
    bounds = get("howsmooth.l2_lower_2")(block, n=9, per_head=True)
    found = named(block, Everywhere(), 9, 6)
    for head in range(2):
        value = float(hs.measure_heads(block, found[f"tight input, head {head}"]).value[head])
        assert value >= float(bounds[head]) * (1 - 1e-9)


@pytest.mark.parametrize(
    "over",
    [
        Ball(1.5),
        Sphere(1.5),
        Ball(0.0),
        Normalised(Ellipsoid.layer_norm(torch.tensor([0.5, 1.0, 2.0, 1.0]))),
        Normalised(Ellipsoid.layer_norm(torch.tensor([0.5, 1.0, 2.0, 1.0])), surface=True),
        Around(torch.ones(7, 4), 0.1),
        Around(torch.ones(7, 4), 0.1, per_token=False),
    ],
    ids=lambda over: str(over.describe()),
)
def test_every_start_lies_in_the_set(over: InputSet) -> None:
    maps = (
        hs.SelfAttention.random(4, 2, dtype=F64),
        hs.L2SelfAttention(torch.eye(4, dtype=F64), torch.eye(4, dtype=F64), heads=2),
        torch.tanh,
    )
    for f in maps:
        found = [*constructions(f, over, 7, 4), *random_starts(f, over, 7, 4, 8, seed=0)]
        assert len(found) >= 9
        for start in found:
            assert start.x.shape == (7, 4)
            assert over.excess(start.x) < 1e-12, start.name


def test_random_starts_are_of_every_kind_and_depend_on_the_seed_alone() -> None:
    head = hs.SelfAttention.random(6, 2)
    few, many = (random_starts(head, Ball(2.0), 9, 6, count, seed=3) for count in (4, 9))
    assert [start.name.split(", ")[1] for start in few] == list(KINDS)
    for a, b in zip(few, many, strict=False):
        assert torch.equal(a.x, b.x)
        assert a.name == b.name
    others = random_starts(head, Ball(2.0), 9, 6, 4, seed=4)
    assert not any(torch.equal(a.x, b.x) for a, b in zip(few, others, strict=True))
    clusters = many[1].x
    assert 2 <= len(clusters.unique(dim=0)) <= 4
    assert torch.linalg.matrix_rank(many[2].x) == 2
    assert float(many[3].x.norm(dim=-1).max()) < 2.0


def test_one_token_has_only_itself() -> None:
    assert list(named(hs.SelfAttention.random(4), Ball(1.0), 1, 4)) == ["equal tokens"]
    assert "two poles" not in named(hs.SelfAttention.random(4), Ball(1.0), 2, 4)
