"""The catalogue: every entry knows where it holds, and refuses elsewhere in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import howsmooth as hs
from howsmooth.bounds import CATALOGUE, get, setting
from howsmooth.bounds.catalogue import SCOPES
from howsmooth.sets import Around, Ball, Point

HEAD = hs.SelfAttention.from_bilinear(-torch.eye(3), torch.eye(3))


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_entry_is_complete(name: str) -> None:
    bound = CATALOGUE[name]
    assert bound.name == name
    assert "." in name
    assert bound.side in ("upper", "lower")
    assert bound.norm in (2, math.inf, "token")
    assert bound.scope in SCOPES
    assert len(bound.reference) > 5
    assert bound.statement.count("{") == bound.statement.count("}")
    assert all(len(assumption.sentence) > 10 for assumption in bound.assumptions)
    assert set(bound.required) <= {"x", "eps", "n", "tokens"}


def test_every_paper_of_the_issue_has_entries() -> None:
    modules = {name.partition(".")[0] for name in CATALOGUE}
    assert modules >= {
        "castin2024", "kim2021", "yudin2025", "nair2025", "ramapuram2024", "qi2023", "dasoulas2021", "furuya2026",
        "howsmooth",
    }  # fmt: skip


def test_a_refusal_names_the_assumption_and_the_nearest_bound_that_applies() -> None:
    masked = hs.SelfAttention.from_bilinear(-torch.eye(3), torch.eye(3), mask="causal")
    with pytest.raises(hs.DoesNotApply) as error:
        get("castin2024.mean_field")(masked, n=5, over=hs.sets.Ball(1.0))
    message = str(error.value)
    assert "assumes that logits depend on the tokens alone" in message
    assert "the nearest bound that does apply is" in message
    named = message.rsplit("apply is ", 1)[1].split(" ")[0]
    assert math.isfinite(float(get(named)(masked, n=5, over=hs.sets.Ball(1.0))))


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(hs.DoesNotApply, match=r"castin2024\.sqrt_n needs n and a set"):
        get("castin2024.sqrt_n")(HEAD)
    with pytest.raises(hs.DoesNotApply, match="give an input, or n and a set"):
        get("castin2024.sqrt_n")(HEAD)


def test_the_wrong_kind_of_attention_is_named() -> None:
    l2 = hs.L2SelfAttention(torch.eye(3), torch.eye(3))
    with pytest.raises(hs.DoesNotApply, match="is for dot_product attention, not l2"):
        get("castin2024.sqrt_n")(l2, n=4, over=hs.sets.Ball(1.0))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(hs.InvalidInput, match=r"choose from .*castin2024\.sqrt_n"):
        get("castin2023.sqrt_n")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (lambda: {"n": 4, "over": Ball(0.0)}, "a ball of positive radius"),
        (lambda: {"n": 4, "over": Ball(math.inf)}, "a radius must be finite and not negative"),
        (lambda: {"n": 0, "over": Ball(1.0)}, "n must be a whole number of tokens"),
        (lambda: {"n": -3, "over": Ball(1.0)}, "n must be a whole number of tokens"),
        (lambda: {"n": 2.5, "over": Ball(1.0)}, "n must be a whole number of tokens"),
        (lambda: {"n": math.nan, "over": Ball(1.0)}, "n must be a whole number of tokens"),
        (lambda: {"over": torch.ones(4, 3), "n": 5}, "the input has 4 tokens, but n=5"),
        (lambda: {"over": Point(torch.ones(4, 3), within=Ball(1.0))}, "outside the radius"),
        (lambda: {"over": Around(torch.ones(4, 3), -1.0)}, "eps must be finite and not negative"),
        (lambda: {"over": torch.ones(4, 2)}, "2 wide, but the attention takes 3"),
        (lambda: {"over": torch.ones(2, 4, 3)}, r"one input, \(n, d\), got shape"),
        (lambda: {"over": torch.full((4, 3), math.nan)}, "NaN"),
        (lambda: {"n": 4, "over": 1.0}, "over"),
        (lambda: {"n": 4, "over": nn.LayerNorm(5)}, "width 5, but the attention takes 3"),
        (lambda: {"n": 4, "over": nn.ReLU()}, "not a LayerNorm or RMSNorm"),
    ],
)
def test_bad_questions_get_one_clear_sentence(where: Callable[[], dict], message: str) -> None:
    with pytest.raises(hs.InvalidInput, match=message) as error:
        setting(HEAD, **where())
    assert "\n" not in str(error.value)


def test_weights_with_nan_are_refused() -> None:
    broken = hs.SelfAttention.from_bilinear(torch.full((3, 3), math.inf), torch.eye(3))
    with pytest.raises(hs.InvalidInput, match="the weight query_weight holds 9 NaN"):
        setting(broken, n=4, over=hs.sets.Ball(1.0))


def test_a_mask_where_a_token_sees_nothing_is_refused() -> None:
    blind = torch.ones(4, 4, dtype=torch.bool)
    blind[2] = False
    masked = hs.SelfAttention.from_bilinear(-torch.eye(3), torch.eye(3), mask=blind)
    with pytest.raises(hs.InvalidInput, match="token 2 sees nothing"):
        get("howsmooth.sqrt_n")(masked, n=4, over=hs.sets.Ball(1.0))
    padded = hs.SelfAttention.from_bilinear(-torch.eye(3), torch.eye(3), mask=hs.Padding(torch.arange(4) < 3))
    with pytest.raises(hs.InvalidInput, match=r"token 3 sees nothing.*padded"):
        get("howsmooth.sqrt_n")(padded, n=4, over=hs.sets.Ball(1.0))


def test_a_plain_module_is_refused_and_a_torch_attention_is_read() -> None:
    with pytest.raises(hs.InvalidInput, match="bounds need an attention map"):
        setting(nn.Linear(3, 3), n=4, over=hs.sets.Ball(1.0))
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2).eval()
    assert float(get("howsmooth.sqrt_n")(module, n=4, over=hs.sets.Ball(1.0))) > 0


def test_masks_are_told_apart() -> None:
    def masked(mask) -> hs.SelfAttention:
        return hs.SelfAttention.random(4, heads=2, mask=mask)

    hidden_self = ~torch.eye(3, dtype=torch.bool)
    last_blind = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    cases = [
        (None, False, False, True, None),
        ("causal", True, True, True, None),
        (hs.SlidingWindow(2), True, False, True, None),
        (torch.ones(3, 3, dtype=torch.bool), False, False, True, None),
        (torch.zeros(3, 3), False, False, True, None),
        (hidden_self, True, False, False, None),
        (last_blind, True, False, False, 2),
        (torch.where(hidden_self, 0.0, -math.inf), True, False, False, None),
    ]
    for mask, hidden, causal, own, blind in cases:
        terms = masked(mask).terms
        assert terms.hides is hidden
        assert terms.is_causal is causal
        assert terms.sees_itself(3, heads=2) is own
        assert terms.first_blind(3, heads=2) == blind
