"""Which theorems hold under a mask follows from what the mask says of itself, however it is written."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import LogitBias
from howsmooth.attention.masks import Maps
from howsmooth.bounds import get, l2_bounds, setting
from howsmooth.nn import ContractiveL2Attention, L2Attention
from howsmooth.nn.invertible.branches import AttentionBranch
from howsmooth.papers.training.model import WithinDocuments

N = 6
PAST = torch.ones(N, N, dtype=torch.bool).tril()
ONE = torch.ones(1, 1, dtype=torch.float64)


class Quiet(LogitBias):
    """Tokens 0 and 1 see each other, so do 2 and 3, …; a user's own mask that says no more than what it adds."""

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        return maps.hide(maps.positions(rows)[:, None] // 2 == maps.positions(cols) // 2)[None]


class Pairs(Quiet):
    """The same mask with its facts."""

    hides_only = keeps_self = True

    def most_seen(self, n: float) -> float:
        return min(n, 2)


class Others(LogitBias):
    """Every token sees the others, not itself."""

    hides_only = True

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor:
        return maps.hide(maps.positions(rows)[:, None] != maps.positions(cols))[None]


def random_l2(mask: LogitBias | Tensor | str | None, heads: int = 2) -> hs.L2SelfAttention:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    return hs.L2SelfAttention(*weights, heads=heads, mask=mask)


def dense(attention: hs.L2SelfAttention, x: Tensor) -> Tensor:
    return torch.func.jacrev(attention)(x).reshape(attention(x).numel(), x.numel())


def test_own_mask_with_its_facts_has_the_bound_of_what_it_lets_see() -> None:
    bound = get("howsmooth.l2_lip_2")
    assert float(bound(hs.L2SelfAttention(ONE, ONE, mask=Pairs()), n=1000)) == l2_bounds.average_lip_2(2, "any")
    attention = random_l2(Pairs())
    upper = float(bound(attention, n=N))
    assert upper < float(bound(random_l2(None), n=N))
    for seed in range(20):
        x = 2 * torch.randn(N, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert float(torch.linalg.matrix_norm(dense(attention, x), 2)) <= upper


@pytest.mark.parametrize("name", ["howsmooth.l2_lip_2", "howsmooth.l2_lower_2"])
def test_own_mask_that_says_nothing_is_refused_what_it_may_break(name: str) -> None:
    with pytest.raises(hs.DoesNotApply, match="nothing is added to the logits"):
        get(name)(random_l2(Quiet()), n=N)


def test_own_mask_that_hides_self_is_looked_at() -> None:
    with pytest.raises(hs.DoesNotApply, match="every token sees itself"):
        get("howsmooth.l2_lip_2")(random_l2(Others()), n=N)


def test_a_token_that_sees_nothing_is_found_under_any_mask() -> None:
    blinkers = hs.RelativeBias(torch.tensor([[-math.inf, -math.inf, 0.0]]))
    alone: list[LogitBias] = [hs.SlidingWindow(1)]
    cases: list[tuple[LogitBias, list[LogitBias], int]] = [(Others(), alone, 0), (blinkers, [], N - 1)]
    for mask, others, blind in cases:
        attention = hs.SelfAttention.random(4, 2, mask=mask, logit_biases=others)
        with pytest.raises(hs.InvalidInput, match=f"token {blind} sees nothing"):
            setting(attention, n=N, over=hs.sets.Ball(1.0))


@pytest.mark.parametrize("mask", [PAST, torch.where(PAST, 0.0, -math.inf), hs.DenseBias(PAST.expand(1, 2, N, N))])
def test_causal_mask_has_the_same_bounds_however_it_is_written(mask: LogitBias | Tensor) -> None:
    for build in (random_l2, lambda mask: hs.SelfAttention.random(4, 2, mask=mask)):
        written, named = (
            {b.name: b.value for b in hs.bounds.table(build(m), n=N, over=hs.sets.Ball(1.0))} for m in (mask, "causal")
        )
        assert written == named


def test_arrays_that_add_nothing_change_no_bound() -> None:
    nothing = hs.DenseBias(torch.zeros(N, N))
    for mask in (None, "causal"):
        plain, more = (hs.SelfAttention.random(4, 2, mask=mask, logit_biases=biases) for biases in ([], [nothing]))
        tables = [{b.name: b.value for b in hs.bounds.table(a, n=N, over=hs.sets.Ball(1.0))} for a in (plain, more)]
        assert tables[0] == tables[1]


def test_causal_mask_with_a_bias_is_no_causal_mask() -> None:
    biased = hs.SelfAttention.random(4, 2, mask="causal", logit_biases=[hs.ALiBi.standard(2)])
    with pytest.raises(hs.DoesNotApply, match="nothing added to the logits"):
        get("howsmooth.masked_mean_field")(biased, over=hs.sets.Ball(1.0))


def test_sigmoid_bound_takes_a_mask_of_zeros_and_infinities() -> None:
    values = [
        float(get("howsmooth.sigmoid")(hs.SigmoidAttention.random(4, 2, mask=mask), n=N, over=hs.sets.Ball(1.0)))
        for mask in (PAST, torch.where(PAST, 0.0, -math.inf))
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize("head", [0, 1])
def test_one_head_under_an_array_keeps_the_upper_end_of_its_mask(head: int) -> None:
    holes = (torch.rand(2, N, N, generator=torch.Generator().manual_seed(1)) < 0.5) | torch.eye(N, dtype=torch.bool)
    block = random_l2(hs.DenseBias(holes))
    weights = block.query_weight[head], block.plain_value[head], block.output_weight[head].T
    alone = hs.L2SelfAttention(*weights, mask=holes[head])
    bound = get("howsmooth.l2_lip_2")
    assert float(bound(block.head(head), n=N)) == float(bound(alone, n=N))


def test_layer_takes_an_own_mask_with_its_facts() -> None:
    layer, x = L2Attention(4, 2).double(), torch.randn(2, N, 4, dtype=torch.float64)
    pairs = torch.arange(N) // 2
    apart = pairs[:, None] != pairs
    torch.testing.assert_close(layer(x, attn_mask=Pairs())[0], layer(x, attn_mask=apart)[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(hs.InvalidInput, match="adds other numbers"):
        layer(x, attn_mask=Quiet())
    with pytest.raises(hs.InvalidInput, match="hides a token from itself"):
        layer(x, attn_mask=Others())


def test_layer_divides_alike_by_a_causal_mask_however_it_is_written() -> None:
    layer, x, past = ContractiveL2Attention(4, 2).eval(), torch.randn(2, 40, 4), torch.ones(40, 40).tril().bool()
    wanted = layer(x, is_causal=True)[0]
    for mask in (~past, hs.DenseBias(past), ~past.expand(4, 40, 40)):
        assert torch.equal(layer(x, attn_mask=mask)[0], wanted)


def test_layer_refuses_a_causal_mask_for_another_number_of_tokens() -> None:
    with pytest.raises(hs.InvalidInput, match="6 tokens"):
        L2Attention(4, 2)(torch.randn(1, N, 4), attn_mask=~PAST[:4, :4])


def test_documents_are_bounded_as_a_window_without_being_one() -> None:
    mask = WithinDocuments(PAST[None], window=3)
    assert not isinstance(mask, hs.SlidingWindow)
    layer = L2Attention(4, 2)
    bounds = [float(layer.lipschitz_bound(N, mask=m).detach()) for m in (mask, hs.SlidingWindow(3))]
    assert bounds[0] == bounds[1] < float(layer.lipschitz_bound(N, mask="causal").detach())


def test_a_branch_takes_no_mask_of_every_item() -> None:
    with pytest.raises(hs.InvalidInput, match="one mask for all items"):
        AttentionBranch(ContractiveL2Attention(4, 2), WithinDocuments(PAST.expand(2, N, N)))
