"""Facts of masks against the masks written out, entry by entry; and several masks as one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import Chunked, LogitBias
from howsmooth.attention.masks import HIDDEN, Maps, Terms, as_mask
from howsmooth.papers.training.model import WithinDocuments

HEADS = 2


class Silent(LogitBias):
    """A user's own mask that says nothing but what it adds: everyone sees the others, not itself."""

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        return maps.hide(maps.positions(rows)[:, None] != maps.positions(cols))[None]


def documents(n: int) -> WithinDocuments:
    run = torch.arange(n) // 3
    return WithinDocuments(((run[:, None] == run) & torch.ones(n, n, dtype=torch.bool).tril())[None], window=2)


def masks(n: int) -> dict[str, LogitBias]:
    past, draw = torch.ones(n, n, dtype=torch.bool).tril(), torch.Generator().manual_seed(n)
    slopes, table = torch.rand(HEADS, generator=draw), torch.randn(HEADS, 5, generator=draw)
    holes = torch.rand(HEADS, n, n, generator=draw) < 0.5
    blinkers = table.clone()
    blinkers[0, 3:] = HIDDEN
    return {
        "nothing": Terms(),
        "causal": hs.Causal(),
        "window": hs.SlidingWindow(3),
        "chunks": Chunked(2),
        "window both ways": hs.SlidingWindow(2, causal=False),
        "padding": hs.Padding(torch.arange(n) < max(1, n - 2)),
        "documents": documents(n),
        "array of the past": hs.DenseBias(past),
        "past of every head": hs.DenseBias(torch.where(past, 0.0, HIDDEN).expand(1, HEADS, n, n)),
        "past of one head": hs.DenseBias(torch.stack([past, torch.ones_like(past)])),
        "array that hides nothing": hs.DenseBias(torch.zeros(n, n)),
        "array with holes": hs.DenseBias(holes),
        "array with holes beside itself": hs.DenseBias(holes | torch.eye(n, dtype=torch.bool)),
        "array of numbers": hs.DenseBias(torch.randn(n, n, generator=draw)),
        "linear biases": hs.ALiBi(slopes),
        "relative bias": hs.RelativeBias(table),
        "relative bias with blinkers": hs.RelativeBias(blinkers),
        "own": Silent(),
        "causal with biases": Terms([hs.Causal(), hs.ALiBi(slopes)]),
        "causal window twice": Terms([hs.Causal(), hs.SlidingWindow(2), documents(n)]),
        "window in window": Terms([hs.SlidingWindow(2, causal=False), hs.SlidingWindow(3)]),
        "own and self alone": Terms([Silent(), hs.SlidingWindow(1)]),
        "holes in the past": Terms([hs.DenseBias(holes), hs.Causal()]),
        "second head of holes": Terms([hs.DenseBias(holes), hs.ALiBi(slopes)]).of_head(1, HEADS),
    }


def written_out(mask: LogitBias, n: int) -> Tensor:
    """What is added to every logit of every head, one pair of tokens at a time."""
    added, maps = torch.zeros(HEADS, n, n, dtype=torch.float64), Maps.every(1, HEADS, n, torch.zeros(1).double())
    for i in range(n):
        for j in range(n):
            block = mask.block(slice(i, i + 1), slice(j, j + 1), maps)
            added[:, i, j] += 0.0 if block is None else block.expand(HEADS, 1, 1)[:, 0, 0]
    return added


@pytest.mark.parametrize("name", masks(3))
@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_facts_hold_entry_by_entry(name: str, n: int) -> None:
    mask = masks(n)[name]
    added = written_out(mask, n)
    seen, past = added != HIDDEN, torch.ones(n, n, dtype=torch.bool).tril()
    whole = mask.added_to(torch.zeros(HEADS, n, n).double(), Maps.every(1, HEADS, n, torch.zeros(1).double()))
    assert torch.equal(whole, added)
    assert mask.sees_itself(n, HEADS) == bool(seen.diagonal(dim1=-2, dim2=-1).all())
    assert mask.looks_back(n, HEADS) == (not bool((seen & ~past).any()))
    blind = [i for i in range(n) if not bool(seen[:, i].any(-1).all())]
    assert mask.first_blind(n, HEADS) == (blind[0] if blind else None)
    assert not mask.keeps_self or mask.sees_itself(n, HEADS)
    assert not mask.hides_only or bool(((added == 0) | ~seen).all())
    assert mask.hides or bool(seen.all())
    assert not mask.is_causal or torch.equal(added, torch.where(past, 0.0, HIDDEN).double().expand_as(added))
    assert not mask.is_nothing or not added.any()
    assert max(int(seen.sum(-1).max()), int(seen.sum(-2).max())) <= mask.most_seen(n) <= n
    assert mask.sight != "causal" or bool((seen == past).all())
    if mask.sight == "ordered":
        both = (seen.double() @ seen.double().mT) > 0  # two tokens that see the same one
        assert not bool((seen & ~past).any())
        assert not bool((both & past & ~seen).any())
    for start in range(n):
        low, high = mask.key_range(start, n, n)
        assert not seen[:, start:, :low].any()
        assert not seen[:, start:, high:].any()


def test_masks_say_as_much_as_is_true_of_them() -> None:
    said = {name: (m.sight, m.hides_only, m.keeps_self, m.most_seen(9)) for name, m in masks(9).items()}
    assert said["nothing"] == ("full", True, True, 9)
    assert said["causal"] == said["array of the past"] == said["past of every head"] == ("causal", True, True, 9)
    assert said["window"] == ("ordered", True, True, 3)
    assert said["window both ways"] == ("any", True, True, 3)
    assert said["padding"] == ("any", True, False, 9)
    assert said["documents"] == said["causal window twice"] == ("ordered", True, True, 2)
    assert said["array that hides nothing"] == ("full", True, True, 9)
    assert said["linear biases"] == said["relative bias"] == said["array of numbers"] == ("full", False, True, 9)
    assert said["causal with biases"] == ("causal", False, True, 9)
    assert said["window in window"] == ("any", True, True, 3)
    assert not Terms([hs.Causal(), hs.ALiBi(torch.ones(HEADS))]).is_causal
    assert Terms([hs.Causal(), hs.DenseBias(torch.zeros(9, 9))]).is_causal


def test_a_mask_that_says_nothing_is_given_no_credit() -> None:
    own = Silent()
    assert (own.sight, own.hides_only, own.keeps_self, own.most_seen(5)) == ("any", False, False, 5)
    assert own.hides
    assert not Terms([own, hs.Causal()]).is_causal
    assert (Terms([own, hs.Causal()]).keeps_self, Terms([own, hs.SlidingWindow(2)]).most_seen(5)) == (False, 2)


def test_windows_know_how_many_are_seen_at_any_length() -> None:
    assert hs.SlidingWindow(3).most_seen(math.inf) == 3
    assert hs.SlidingWindow(3, causal=False).most_seen(math.inf) == 5
    assert as_mask("causal").most_seen(math.inf) == math.inf


def test_terms_of_terms_are_their_terms() -> None:
    causal, window, alibi = hs.Causal(), hs.SlidingWindow(2), hs.ALiBi(torch.ones(2))
    terms = Terms([Terms([causal, window]), Terms(), alibi])
    assert list(terms) == [causal, window, alibi]
    assert not Terms()
    attention = hs.SelfAttention.random(4, 2, mask=terms)
    assert list(attention.terms) == [causal, window, alibi]


def test_terms_are_checked_one_by_one() -> None:
    with pytest.raises(hs.InvalidInput, match="3 slopes"):
        Terms([hs.Causal(), hs.ALiBi(torch.ones(3))]).check(5, 2, 1)


@pytest.mark.slow
def test_map_with_several_masks_is_the_map_with_their_sum() -> None:
    n, x = 6, torch.randn(6, 4, dtype=torch.float64)
    for name, mask in masks(n).items():
        if name == "second head of holes":
            continue
        several = hs.SelfAttention.random(4, 2, dtype=torch.float64, mask=mask, logit_biases=[hs.SlidingWindow(4)])
        added = written_out(Terms([mask, hs.SlidingWindow(4)]), n)
        summed = hs.SelfAttention.random(4, 2, dtype=torch.float64, mask=added)
        torch.testing.assert_close(several(x), summed(x), rtol=1e-12, atol=1e-12)
        values = [float(hs.measure(attention, x, rtol=1e-9)) for attention in (several, summed)]
        assert values[0] == pytest.approx(values[1], rel=1e-8, abs=1e-12), name


def test_masks_that_hide_everything_together_leave_nothing() -> None:
    """Neither does alone: one hides a token from itself, the other from all others."""
    attention = hs.SelfAttention.random(4, 2, mask=Silent(), logit_biases=[hs.SlidingWindow(1)])
    assert not attention(torch.randn(5, 4)).any()
    assert float(hs.measure(attention, torch.randn(5, 4))) == 0
    assert attention.terms.first_blind(5, 2) == 0
    assert Silent().first_blind(5, 2) is hs.SlidingWindow(1).first_blind(5, 2) is None
