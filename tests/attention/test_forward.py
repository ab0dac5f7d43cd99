"""The readable forward passes against independent implementations: torch's own attention, and formulas written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import howsmooth as hs
from evidence import attention_cases as cases
from howsmooth.attention import DenseBias, UnitNorm
from howsmooth.attention.masks import Maps

NAN = float("nan")


def sdpa(attention: hs.SelfAttention, x: Tensor, mask: Tensor | None, **options: object) -> Tensor:
    query, key, value = (_by_hand(attention, x, part) for part in ("query", "key", "value"))
    group = attention.heads // attention.kv_heads
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    out = mixed.transpose(0, 1).reshape(len(x), -1) @ attention.output_weight.flatten(0, 1)
    return out if attention.output_bias is None else out + attention.output_bias


def _by_hand(attention: hs.SelfAttention, x: Tensor, part: str) -> Tensor:
    weight, bias = getattr(attention, f"{part}_weight"), getattr(attention, f"{part}_bias")
    out = x @ weight.flatten(0, 1).T
    out = out if bias is None else out + bias.flatten()
    return out.reshape(len(x), weight.shape[0], -1).transpose(0, 1)


@pytest.mark.parametrize("mask", ["none", "causal", "window", "two-sided window", "boolean", "additive", "per head"])
@pytest.mark.parametrize("heads", cases.HEADS)
def test_dot_product_equals_scaled_dot_product_attention(mask: str, heads: tuple[int, int]) -> None:
    attention, x = cases.build("dot_product", mask, *heads, "none", True, "plain"), cases.tokens()
    n = len(x)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    explicit = {
        "none": None,
        "causal": j <= i,
        "window": (j <= i) & (j > i - 3),
        "two-sided window": (i - j).abs() < 2,
    }
    arrays = [term.bias for term in attention.terms if isinstance(term, DenseBias)]
    expected = sdpa(attention, x, explicit.get(mask, arrays[0][0] if arrays else None))
    seen = ~expected.isnan()  # torch gives NaN where a query sees nothing; we give the bias alone
    torch.testing.assert_close(attention(x)[seen], expected[seen], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_from_torch_equals_the_module(bias: bool, causal: bool, batch_first: bool) -> None:
    module = nn.MultiheadAttention(24, 4, bias=bias, batch_first=batch_first, dropout=0.1).double().eval()
    if bias:
        nn.init.normal_(module.in_proj_bias)
        nn.init.normal_(module.out_proj.bias)
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    source = x if batch_first else x.transpose(0, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64) if causal else None
    expected = module(source, source, source, attn_mask=mask, need_weights=False)[0]
    found = hs.SelfAttention.from_torch(module, causal=causal)(x)
    torch.testing.assert_close(found, expected if batch_first else expected.transpose(0, 1), rtol=1e-12, atol=1e-12)


def test_from_torch_refuses_what_it_cannot_represent() -> None:
    with pytest.raises(hs.InvalidInput, match="extra key"):
        hs.SelfAttention.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True))
    with pytest.raises(hs.InvalidInput, match="kdim"):
        hs.SelfAttention.from_torch(nn.MultiheadAttention(8, 2, kdim=4))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_l2_attention_equals_the_definition_of_kim_et_al(mask: str) -> None:
    torch.manual_seed(0)
    n, width, heads = 5, 6, 2
    w, wv, wo = torch.randn(3, width, width, dtype=torch.float64)
    x = torch.randn(n, width, dtype=torch.float64) + 3
    s, k = math.sqrt(width / heads), width // heads
    parts = []
    for h in range(heads):
        tied = w[h * k : (h + 1) * k].T  # D × D/H
        logits = -torch.cdist(x @ tied, x @ tied).square() / s
        if mask == "causal":
            logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        factor = tied @ tied.T / s
        parts.append(logits.softmax(-1) @ x @ factor @ wv[h * k : (h + 1) * k].T)
    expected = torch.cat(parts, dim=-1) @ wo.T
    attention = hs.L2SelfAttention(w, wv, wo, heads=heads, mask=None if mask == "none" else mask)
    torch.testing.assert_close(attention(x), expected, rtol=1e-11, atol=1e-11)


def test_l2_attention_does_not_lose_digits_far_from_the_origin() -> None:
    torch.manual_seed(0)
    weights = torch.randn(2, 8, 8)
    x = torch.randn(10, 8)
    near, far = hs.L2SelfAttention(*weights).weights(x), hs.L2SelfAttention(*weights).weights(x + 100)
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-4)


def test_sigmoid_attention_equals_its_formula() -> None:
    attention, x = cases.build("sigmoid", "causal", 1, 1, "none", False, "plain"), cases.tokens()
    query, key, value = x @ attention.query_weight[0].T, x @ attention.key_weight[0].T, x @ attention.value_weight[0].T
    weights = torch.sigmoid(query @ key.T / 2 - math.log(len(x))).tril()
    torch.testing.assert_close(attention(x), weights @ value @ attention.output_weight[0])


def test_cosine_attention_equals_its_formula() -> None:
    attention, x = cases.build("cosine", "none", 1, 1, "none", False, "plain"), cases.tokens()

    def unit(t: Tensor) -> Tensor:
        return t / (t.square().sum(-1, keepdim=True) + 0.1).sqrt()

    query, key, value = (
        unit(x @ w[0].T) for w in (attention.query_weight, attention.key_weight, attention.value_weight)
    )
    expected = 2.0 * (3.0 * query @ key.T).softmax(-1) @ value @ attention.output_weight[0]
    torch.testing.assert_close(attention(x), expected)


def test_softcap_bounds_the_logits_before_the_mask() -> None:
    attention, x = cases.build("dot_product", "causal", 1, 1, "none", False, "softcap"), cases.tokens()
    logits = (x @ attention.query_weight[0].T) @ (x @ attention.key_weight[0].T).T / 2
    capped = 1.5 * torch.tanh(logits / 1.5)
    expected = capped.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    torch.testing.assert_close(attention.weights(x)[0], expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_multiplication_of_complex_numbers(interleaved: bool) -> None:
    rotary = hs.Rotary.standard(6, base=100.0, interleaved=interleaved)
    x = torch.randn(4, 8, dtype=torch.float64)
    pairs = x[:, :6].reshape(4, 3, 2) if interleaved else torch.stack([x[:, :3], x[:, 3:6]], dim=-1)
    angle = torch.arange(4)[:, None] * 100.0 ** (-torch.arange(0, 6, 2) / 6)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    expected = turned.reshape(4, 6) if interleaved else torch.cat([turned[..., 0], turned[..., 1]], dim=-1)
    torch.testing.assert_close(rotary(x), torch.cat([expected, x[:, 6:]], dim=-1), rtol=1e-6, atol=1e-6)


def test_rotary_logits_depend_on_relative_position_only() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, dtype=torch.float64) for _ in range(3)]
    token = torch.randn(8, dtype=torch.float64).expand(9, 8)
    bare = hs.SelfAttention(*weights, rotary=hs.Rotary.standard(8))
    query, key, _ = bare.staged(token[None])
    logits = (query @ key.mT)[0, 0]
    for offset in range(-4, 5):
        diagonal = logits.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert hs.ALiBi.standard(8).slopes.tolist() == pytest.approx([2.0**-k for k in range(1, 9)])
    assert len(hs.ALiBi.standard(12).slopes) == 12


def test_relative_bias_is_looked_up_by_offset() -> None:
    table = torch.arange(10.0).reshape(2, 5)
    block = hs.RelativeBias(table).block(slice(0, 4), slice(0, 4), Maps.every(1, 2, 4, table))
    expected = torch.tensor([[2, 3, 4, 4], [1, 2, 3, 4], [0, 1, 2, 3], [0, 0, 1, 2]], dtype=torch.float32)
    torch.testing.assert_close(block, torch.stack([expected, expected + 5]))


def test_rms_norm_equals_torch() -> None:
    gain = torch.randn(6, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(UnitNorm.rms(6, 1e-2, gain)(x), F.rms_norm(x, (6,), gain, 1e-2))


@pytest.mark.parametrize("mask", ["causal", hs.SlidingWindow(3)])
def test_masks_do_not_leak_the_future(mask: object) -> None:
    attention = hs.SelfAttention.random(8, heads=2, dtype=torch.float64, mask=mask)
    x = torch.randn(6, 8, dtype=torch.float64)
    changed = x.clone()
    changed[4:] += 1
    torch.testing.assert_close(attention(x)[:4], attention(changed)[:4], rtol=0, atol=0)
    assert (attention(x)[4:] - attention(changed)[4:]).abs().min() > 0


def test_grouped_heads_equal_repeated_heads() -> None:
    torch.manual_seed(0)
    query, key, value, output = (torch.randn(r, 12, dtype=torch.float64) for r in (12, 6, 6, 12))
    grouped = hs.SelfAttention(query, key, value, output, heads=4, kv_heads=2)
    repeat = [w.reshape(2, 3, 12).repeat_interleave(2, 0).reshape(12, 12) for w in (key, value)]
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), hs.SelfAttention(query, *repeat, output, heads=4)(x))


SQUARE = torch.eye(4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, heads=3), "do not split into 3 heads"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, heads=4, kv_heads=3), "multiple of kv_heads"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE[:2], SQUARE), "equal widths"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE[:, :2], SQUARE), "takes 2 features"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE.long()), "floating"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, SQUARE[:, :3]), "output weight must have shape"),
        (
            lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, query_bias=torch.ones(3)),
            "query bias must be a floating vector of 4 entries",
        ),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, softcap=0.0), "soft-cap must be positive"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, mask="full"), "a mask is None"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, mask=torch.ones(2, 3)), "a mask has shape"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, mask=torch.ones(2, 2).long()), "holds booleans"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, mask=torch.full((2, 2), math.inf)), "NaN or \\+inf"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, qk_norm="layer"), "qk_norm must be"),
        (lambda: hs.SlidingWindow(0), "window must be at least 1"),
        (lambda: hs.Rotary.standard(3), "must be even"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, rotary=hs.Rotary.standard(6))(SQUARE), "need 6 coordinates"),
        (lambda: hs.SelfAttention.random(8, mask=hs.ALiBi.standard(2))(torch.ones(3, 8)), "2 slopes"),
        (lambda: hs.RelativeBias(torch.ones(2, 4)), "2·reach"),
        (lambda: hs.L2SelfAttention(SQUARE, SQUARE, heads=3), "split into 3 heads"),
        (lambda: hs.SelfAttention.random(8, heads=3), "does not split"),
    ],
)
def test_bad_settings_are_one_clear_error(build, message: str) -> None:
    with pytest.raises(hs.InvalidInput, match=message):
        build()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hs.SelfAttention.random(0), "a width of 0 does not split"),
        (lambda: hs.SelfAttention.random(8, 2, kv_heads=-1), r"multiple of kv_heads \(-1\)"),
        (lambda: hs.SelfAttention.random(8, 2, kv_heads=0), r"multiple of kv_heads \(0\)"),
        (lambda: hs.SelfAttention.random(8, 2.0), "heads must be a whole number"),
        (lambda: hs.SelfAttention(torch.eye(4), torch.eye(4), torch.eye(4), heads=0), r"heads \(0\)"),
        (lambda: hs.SelfAttention(*torch.zeros(3, 4, 0)), "query weight has shape .4, 0.: no size may be zero"),
        (lambda: hs.SelfAttention(*torch.eye(4).repeat(3, 1, 1), torch.zeros(0, 4)), "output weight has shape"),
        (lambda: hs.SelfAttention([1.0], torch.eye(4), torch.eye(4)), "query must be a torch.Tensor, not list"),
        (
            lambda: hs.SelfAttention(*torch.eye(4).repeat(3, 1, 1), query_bias=[0.0] * 4),
            "query_bias must be a",
        ),
        (lambda: hs.SelfAttention.random(4, scale=NAN), "scale .* finite number, got nan"),
        (lambda: hs.SelfAttention.random(4, softcap=0), "soft-cap must be positive and finite, got 0"),
        (lambda: hs.SelfAttention.random(4, softcap=NAN), "soft-cap must be positive and finite, got nan"),
        (lambda: hs.SelfAttention.random(4, softcap=float("inf")), "got inf: None leaves it out"),
        (lambda: hs.CosineAttention(*torch.eye(4).repeat(3, 1, 1), temperature=NAN), "finite number, got nan"),
        (lambda: hs.CosineAttention(*torch.eye(4).repeat(3, 1, 1), eps=-1.0), "eps that is not negative"),
        (lambda: hs.SigmoidAttention(*torch.eye(4).repeat(3, 1, 1), logit_shift=NAN), "shift of sigmoid logits"),
        (lambda: hs.L2SelfAttention(torch.zeros(0, 4), torch.eye(4)), "every size must be at least 1"),
        (lambda: hs.ALiBi.standard(0), "heads must be at least 1"),
        (lambda: hs.ALiBi(torch.tensor([NAN])), "slopes holds 1 NaN"),
        (lambda: hs.Rotary(torch.tensor([NAN])), "frequencies holds 1 NaN"),
        (lambda: hs.Rotary.standard(4, base=0.0), "base of rotary positions"),
        (lambda: hs.RelativeBias(torch.full((1, 3), NAN)), "holds 3 NaN"),
    ],
)
def test_settings_that_give_no_map_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(hs.InvalidInput, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
