"""Worst sequences of real tokens, against all sequences there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.errors import InvalidInput
from howsmooth.search import worst_case
from howsmooth.sets import Tokens
from howsmooth.testing import dense_jacobian

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def transformed(width: int, n: int) -> Tokens:
    """Learned positions, then a LayerNorm, as before the first attention of a language model."""
    positions, norm = 0.3 * draw(n, width, seed=9), nn.LayerNorm(width, dtype=F64)
    return Tokens(2 * draw(6, width, seed=1), transform=lambda e: norm(e + positions))


def worst_of_all(f: nn.Module, over: Tokens, n: int) -> float:
    ids = torch.tensor(list(itertools.product(range(len(over.matrix)), repeat=n)))
    with torch.no_grad():
        x = over.sequence(ids)
    return max(float(hs.measure(f, part).value.max()) for part in x.split(256))


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_the_search_finds_the_worst_of_all_sequences(mask: str | None, seed: int) -> None:
    f = hs.SelfAttention.random(4, 2, seed=seed, dtype=F64, mask=mask)
    over, n = Tokens(3 * draw(6, 4, seed=seed)), 4
    exact = worst_of_all(f, over, n)
    witness = worst_case(f, n, over=over, starts=6, steps=30)
    assert witness.value == pytest.approx(exact, rel=1e-9)
    alone = worst_case(f, n, over=over, starts=6, steps=30, constructions=False)
    assert alone.value == pytest.approx(exact, rel=1e-9)


@pytest.mark.slow
def test_the_search_goes_through_a_transform() -> None:
    f, n = hs.SelfAttention.random(4, seed=1, dtype=F64, mask="causal"), 4
    over = transformed(4, n)
    witness = worst_case(f, n, over=over, starts=6, steps=30)
    assert witness.value == pytest.approx(worst_of_all(f, over, n), rel=1e-9)


@pytest.mark.slow
def test_functions_of_sequences_are_searched_too() -> None:
    weights = draw(3, 3, seed=2)
    over, n = Tokens(draw(5, 3, seed=3)), 3

    def f(x: Tensor) -> Tensor:
        return torch.tanh(x @ weights) * x.sum()

    ids = torch.tensor(list(itertools.product(range(5), repeat=n)))
    dense = torch.vmap(torch.func.jacrev(f))(over.sequence(ids)).reshape(len(ids), 9, 9)
    witness = worst_case(f, n, over=over, starts=4, steps=20)
    assert witness.value == pytest.approx(float(torch.linalg.matrix_norm(dense, 2).max()), rel=1e-6)


def test_witnesses_are_sequences_of_the_vocabulary() -> None:
    f = hs.SelfAttention.random(4, dtype=F64)
    over = Tokens(draw(50, 4))
    witness = worst_case(f, 12, over=over, starts=4, steps=10)
    assert witness.ids is not None
    assert witness.ids.shape == (12,)
    assert torch.equal(witness.x, over.matrix[witness.ids])
    assert over.excess(witness.x) == 0
    assert witness.over == {"set": "tokens", "vocabulary": 50, "transformed": False}
    dense = dense_jacobian(f, witness.x)
    assert witness.value == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-9)
    bound = hs.bounds.get("howsmooth.unified")(f, n=12, over=over)
    assert witness.value <= float(bound)


@pytest.mark.slow
def test_the_search_is_the_same_for_the_same_seed_and_never_loses_its_start() -> None:
    f = hs.SelfAttention.random(4, dtype=F64)
    over = Tokens(draw(50, 4))
    first, second = (worst_case(f, 8, over=over, starts=3, steps=12, seed=5) for _ in range(2))
    assert first.ids is not None
    assert second.ids is not None
    assert torch.equal(first.ids, second.ids)
    assert first.history == sorted(first.history)
    again = worst_case(f, over=over, start=first.ids, starts=0, steps=1, constructions=False)
    assert again.value >= first.value * (1 - 1e-12)
    assert again.start == "given"


def test_a_vocabulary_of_one_token_leaves_no_choice() -> None:
    f = hs.SelfAttention.random(4, dtype=F64)
    witness = worst_case(f, 3, over=Tokens(torch.ones(1, 4)), starts=2, steps=3)
    assert witness.ids is not None
    assert witness.ids.tolist() == [0, 0, 0]


def test_bad_questions_about_sequences_are_refused() -> None:
    f = hs.SelfAttention.random(4, dtype=F64)
    over = Tokens(draw(5, 4))
    with pytest.raises(InvalidInput, match="width 3"):
        worst_case(f, 4, over=Tokens(draw(5, 3)))
    with pytest.raises(InvalidInput, match="vector of 4 token ids"):
        worst_case(f, 4, over=over, start=draw(4, 4))
    with pytest.raises(InvalidInput, match="between 0 and 4"):
        worst_case(f, 4, over=over, start=torch.tensor([0, 1, 2, 5]))
