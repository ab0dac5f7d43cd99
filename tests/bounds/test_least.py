"""The least upper bound that applies: one number, whoever asks for it, whatever overflows on the way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.attention.stages import TokenDerivative, TokenStage
from howsmooth.bounds import CATALOGUE, Bound, least_upper_bound, setting
from howsmooth.bounds.catalogue import upper_bounds
from howsmooth.bounds.question_setting import Setting
from howsmooth.nn import CosineAttention
from howsmooth.nn.invertible.branches import AttentionBranch
from howsmooth.scans.cell_values import head_values
from howsmooth.scans.plan import ScanSettings
from howsmooth.search.sandwich_search import tightest_upper
from howsmooth.sets import Ball, Everywhere

EYES = torch.eye(2, dtype=torch.float64).repeat(2, 1, 1)


def number_of(value: object, side: str = "upper", name: str = "a.first") -> Bound:
    """An entry of the catalogue whose evaluation gives, or raises, the value."""

    def evaluate(where: Setting) -> Tensor:
        if isinstance(value, Exception):
            raise value
        return torch.tensor(value, dtype=torch.float64)

    return Bound(name, "", "", side, 2, "ball", (), (), evaluate, combine="block")  # type: ignore[arg-type]


def only(monkeypatch: pytest.MonkeyPatch, *bounds: Bound) -> Setting:
    """A setting in which just these bounds are known."""
    for name in list(CATALOGUE):
        monkeypatch.delitem(CATALOGUE, name)
    for bound in bounds:
        monkeypatch.setitem(CATALOGUE, bound.name, bound)
    return setting(hs.SelfAttention.from_bilinear(*EYES), n=4, over=hs.sets.Ball(1.0))


@pytest.mark.parametrize("n", [3, 10**6, 10**160, 10**200])
def test_layers_branches_tables_and_searches_give_the_same_number(n: int) -> None:
    torch.manual_seed(0)
    layer = CosineAttention(4, 2).double()
    attention = layer.map(n=n)
    least = least_upper_bound(setting(attention, n=n))
    assert least is not None
    expected = float(least[1])
    table = hs.bounds.table(attention, n=n, norm=2)
    upper = tightest_upper(attention, n, Everywhere())
    assert upper is not None
    tightest = table.tightest("upper")
    assert tightest is not None
    found = {
        "layer": float(layer.lipschitz_bound(n)),
        "branch": float(AttentionBranch(attention).lipschitz_bound(n)),
        "search": upper.value,
        "table": tightest.value,
    }
    assert found == dict.fromkeys(found, expected)
    assert math.isfinite(expected)
    assert upper.name == least[0].name


def test_a_theorem_that_overflows_is_infinite_in_every_head() -> None:
    attention = hs.CosineAttention(*torch.eye(4, dtype=torch.float64).repeat(4, 1, 1), heads=2)
    bound = hs.bounds.get("qi2023.cosine")
    assert float(bound(attention, n=10**200)) == math.inf
    assert bound(attention, n=10**200, per_head=True).tolist() == [math.inf, math.inf]


def test_a_neighbourhood_beyond_all_numbers_has_an_infinite_bound_beside_finite_ones() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    table = hs.bounds.table(hs.SelfAttention.random(4), over=hs.sets.Around(x, 1e200))
    values = {row.name: row.value for row in table}
    assert values["howsmooth.three_path_ball"] == math.inf
    assert math.isfinite(values["howsmooth.three_path"])


@pytest.mark.parametrize("nothing", [math.nan, math.inf, OverflowError("too large")])
def test_what_says_nothing_is_chosen_only_where_all_say_nothing(
    nothing: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = only(monkeypatch, number_of(nothing), number_of(7.0, name="b.second"))
    assert [(bound.name, float(value)) for bound, value in [least_upper_bound(where)]] == [("b.second", 7.0)]  # type: ignore[misc]
    where = only(monkeypatch, number_of(nothing))
    assert [(bound.name, float(value)) for bound, value in [least_upper_bound(where)]] == [("a.first", math.inf)]  # type: ignore[misc]


def test_lower_bounds_other_norms_and_other_scopes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    where = only(monkeypatch, number_of(1.0, side="lower"), number_of(9.0, name="b.second"))
    assert list(upper_bounds(where)) == ["b.second"]
    assert least_upper_bound(where, norm=math.inf) is None
    assert least_upper_bound(where, scopes=("global",)) is None


def test_of_equal_bounds_the_first_by_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    where = only(monkeypatch, number_of(2.0, name="z.last"), number_of(2.0, name="b.second"))
    least = least_upper_bound(where)
    assert least is not None
    assert least[0].name == "b.second"


def test_a_head_has_its_own_least_bound() -> None:
    attention = hs.SelfAttention.random(8, heads=2, seed=1)
    where = setting(attention, n=6, over=hs.sets.Ball(2.0))
    for head in range(2):
        least, row = least_upper_bound(where, head=head), tightest_upper(attention, 6, Ball(2.0), head=head)
        assert least is not None
        assert row is not None
        smallest = min(float(values[head]) for values in upper_bounds(where, per_head=True).values())
        assert float(least[1]) == row.value == smallest
    with pytest.raises(hs.InvalidInput, match="there is no head 2: choose from 0 to 1"):
        tightest_upper(attention, 6, Ball(2.0), head=2)


class Doubled(TokenStage, TokenDerivative):
    """A stage whose rounding nobody has looked at."""

    def linearize(self, x: Tensor) -> tuple[Tensor, TokenDerivative]:
        return 2 * x, self

    def jvp(self, dx: Tensor) -> Tensor:
        return 2 * dx

    def vjp(self, gy: Tensor) -> Tensor:
        return 2 * gy

    def select(self, index: Tensor) -> TokenDerivative:
        return self

    def to(self, dtype: torch.dtype) -> TokenDerivative:
        return self

    def size(self) -> float:
        return 2.0


def test_what_does_not_apply_is_refused_before_it_is_evaluated() -> None:
    attention: nn.Module = hs.SelfAttention.random(4)
    attention.query_stages.append(Doubled())  # type: ignore[union-attr, operator]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    table = hs.bounds.table(attention, over=x)
    assert [row.name for row in table if row.kind == "upper"] == []
    assert "rounding" in table.refused["howsmooth.three_path"]
    [numbers] = head_values(attention, x, ScanSettings())  # type: ignore[arg-type]
    assert numbers["proved"] is None
