"""The three answers against a readable forward pass, and the bounds under attack."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence.answer_terms import WINDOWS, examples
from evidence.juries import ROUNDING
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.rounding import parse_format, parse_formats
from howsmooth.rounding.kv_cache import Cache, read_back
from howsmooth.rounding.output_error import _Reach, output_errors_at

FORMATS = "int8,int4,int3[asymmetric],int4[per=channel,group=4],fp8_e4m3,int4[group=4,first=2],int4[rotary=before],int2"


def attention(mask: str | None = "causal", softcap: float | None = None) -> hs.SelfAttention:
    rotary = hs.Rotary.standard(8, base=100.0)
    found = hs.SelfAttention.random(
        32, heads=4, kv_heads=2, seed=1, dtype=torch.float64, mask=mask, rotary=rotary, softcap=softcap
    )
    found.query_weight.mul_(3)
    return found


def tokens(n: int = 20) -> Tensor:
    return torch.randn(n, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def heads_with(f: hs.SelfAttention, x: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
    """Each head's output through its output matrix, by the map's own weights, with keys or values replaced."""
    query, own_key, own_value = f.staged(x[None])
    key = own_key if key is None else key.repeat_interleave(2, dim=0)[None]
    value = own_value if value is None else value.repeat_interleave(2, dim=0)[None]
    return (f._weights(query, key) @ value @ f.output_weight)[0]


def rms(change: Tensor) -> Tensor:
    return change.square().sum(-1).mean(-1).sqrt()


@pytest.mark.parametrize(("mask", "softcap"), [("causal", None), (None, None), ("causal", 2.0)])
def test_actual_change_is_that_of_the_map_and_below_the_proved_bound(mask: str | None, softcap: float | None) -> None:
    f, x, formats = attention(mask, softcap), tokens(), parse_formats(FORMATS)
    found, cache = output_errors_at(f, x, formats), Cache.at(f, x)
    exact = heads_with(f, x, None, None)
    for place, form in enumerate(formats):
        with_keys = heads_with(f, x, cache.rounded("key", form), None) - exact
        with_values = heads_with(f, x, None, cache.rounded("value", form)) - exact
        assert torch.allclose(found.actual[0, place], rms(with_keys), rtol=1e-9)
        assert torch.allclose(found.actual[1, place], rms(with_values), rtol=1e-9)
    assert bool((found.proved >= found.actual).all())
    assert bool((torch.minimum(found.tanh, found.path)[0] >= found.proved[0] * (1 - 1e-12)).all())
    assert torch.allclose(found.size, rms(exact))


def test_first_order_is_the_derivative() -> None:
    f, x = attention(), tokens()
    found = output_errors_at(f, x, parse_formats("int8,int4,int2"))
    off = (found.predicted / found.actual - 1).abs()
    assert torch.allclose(found.predicted[1], found.actual[1], rtol=1e-9)  # the output is linear in the values
    assert float(off[0, 0].max()) < 0.02 < float(off[0, 2].max())


def test_keys_before_rotary_positions_are_rounded_at_position_zero() -> None:
    f, x = attention(), tokens()
    cache, form = Cache.at(f, x), parse_format("int4[rotary=before]")
    plain = f.project(x[None])[1][0, ::2]
    turned = f.key_stages[0](parse_format("int4").rounded(plain))
    assert torch.allclose(cache.rounded("key", form), turned, atol=1e-12)
    assert not torch.allclose(turned, cache.rounded("key", parse_format("int4")), atol=1e-3)


def test_heads_may_have_formats_of_their_own() -> None:
    cache = Cache.at(attention(), tokens())
    form = parse_format("int3")
    mixed = cache.rounded("value", [form, None])
    assert torch.equal(mixed[0], form.rounded(cache.value[:1])[0])
    assert torch.equal(mixed[1], cache.value[1])
    with pytest.raises(InvalidInput, match="have 2 heads, but 3 formats"):
        read_back(cache.key, "key", [form] * 3)


def change_and_bounds(cache: Cache, moved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, value = cache.weights(cache.key), cache.shared(cache.value) @ cache.output
    change = torch.linalg.vector_norm(cache.weights(cache.key + moved) @ value - weights @ value, dim=-1)
    tanh, path = _Reach.of(cache, weights, value, weights @ value).of_keys(cache, cache.shared(moved))
    return change, tanh, path


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize("form", ["tanh", "path"])
def test_ascent_on_the_errors_of_keys_finds_no_violation(mask: str | None, form: str) -> None:
    """The error itself climbs on change ÷ bound, from small and large starts."""
    f, x = attention(mask), tokens(6)
    cache, generator, best = Cache.at(f, x), torch.Generator().manual_seed(3), 0.0
    for size in (0.01, 0.3, 3.0):
        moved = (size * torch.randn(cache.key.shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for _ in range(40):
            change, tanh, path = change_and_bounds(cache, moved)
            ratio = change[:, 1:] / (tanh if form == "tanh" else path)[:, 1:]
            assert float(ratio.detach().max()) <= 1
            best = max(best, float(ratio.detach().max()))
            (uphill,) = torch.autograd.grad(ratio.amax(), moved)
            uphill = uphill.nan_to_num()  # the first token sees itself alone: a root of zero
            step = 0.3 * size * uphill / uphill.abs().amax().clamp_min(1e-300)
            moved = (moved.detach() + step).requires_grad_()
    assert best > 0.8  # the attack bites


@pytest.mark.parametrize("apart", [0.0, 1e-13])
@pytest.mark.parametrize("mask", ["causal", None])
def test_bounds_hold_for_values_that_are_all_the_same(mask: str | None, apart: float) -> None:
    """A text of one word: keys differ by their positions alone, the change is what float64 rounds, and no more."""
    f, x = attention(mask), tokens(40)
    found = output_errors_at(f, x[:1] + apart * x, parse_formats(FORMATS))
    assert bool((found.actual[0] > 0).any())
    assert bool((found.proved >= found.actual).all())
    assert float(found.proved[0].max()) < 1e-10 * float(found.size.max())


def test_bounds_stay_numbers_when_errors_are_beyond_the_range_of_exp() -> None:
    """Logits that move by thousands, where all values are zero: infinity times zero."""
    query, key, output = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    f = hs.SelfAttention(100 * query, 100 * key, torch.zeros_like(key), output, heads=2)
    found = output_errors_at(f, 3 * torch.eye(8, dtype=torch.float64), parse_formats("int2,int3"))
    assert torch.equal(found.proved, torch.zeros_like(found.proved))


def test_tanh_form_is_attained_by_two_tokens() -> None:
    """Weights 1/(1 + e^Δ) and its rest, logits that move by ±Δ: the distance moved is tanh(Δ/2) times the diameter."""
    for half in (0.1, 1.0, 4.0):
        f = hs.SelfAttention.from_bilinear(torch.ones(1, 1).double(), torch.ones(1, 1).double())
        x = torch.tensor([[1.0], [1.0 - half]], dtype=torch.float64)  # logits of the first query: 1 and 1 − Δ
        change, tanh, path = change_and_bounds(Cache.at(f, x), torch.tensor([[[-half], [half]]], dtype=torch.float64))
        assert float(change[0, 0]) == pytest.approx(math.tanh(half / 2) * half, rel=1e-9)
        assert float(tanh[0, 0]) == pytest.approx(float(change[0, 0]), rel=1e-8)
        assert float(path[0, 0]) >= float(change[0, 0])


def test_other_kinds_of_attention_are_refused() -> None:
    sigmoid = hs.SigmoidAttention(*torch.eye(4).repeat(4, 1, 1), heads=2)
    with pytest.raises(DoesNotApply, match="not for sigmoid attention"):
        output_errors_at(sigmoid, torch.randn(3, 4), parse_formats("int8"))


@pytest.mark.parametrize(
    ("label", "form"),
    [
        ("two tokens, 0.5 by 0.001", "path form"),
        ("two tokens, 0.5 by 0.001", "tanh form"),
        ("two tokens, 0.5 by 1", "spread"),
        ("two tokens, 0.5 by 1", "values, each query"),
        ("one token for all", "norm of the weights"),
    ],
)
def test_two_tokens_attain_every_form(label: str, form: str) -> None:
    assert 0.98 <= WINDOWS[label].example(label).shares()[form] <= 1 + ROUNDING


def test_the_path_form_grows_as_weights_do() -> None:
    """A rare token whose key gains: far more than its deviation at the start says."""
    assert 0.55 <= WINDOWS["two tokens, 0.01 by 2"].example("").shares()["path form"] <= 1


def test_no_error_of_keys_or_values_passes_a_bound() -> None:
    assert max(max(example.shares().values()) for example in examples()) <= 1 + ROUNDING
