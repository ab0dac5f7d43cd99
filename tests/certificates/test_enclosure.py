"""Proved ends at an input against dense Jacobians, by every proof."""

from __future__ import annotations

import pytest
import torch

import howsmooth as hs
from evidence import attention_cases
from evidence.certificates import dense_norm, enclosures
from howsmooth.certificates.point import enclosure, head_gram
from howsmooth.certificates.point.enclosure import norm_of_head_sum
from howsmooth.certificates.point.head_gram import HeadsAt, StackedHeads
from howsmooth.certificates.point.proved_eigenvalue import cholesky_bound, top_eigenvalue
from howsmooth.errors import InvalidInput, UnsupportedModel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        *(("dot_product", mask) for mask in attention_cases.MASKS[::2]),
        *((kind, "blind rows") for kind in attention_cases.KINDS[1:]),
    ],
)
def test_dense_jacobian_lies_between_the_ends_within_a_per_mille(kind: str, mask: str) -> None:
    found, widest = enclosures(kind, mask, every=60)
    assert found.tried > 0
    assert found.passed == 0
    assert widest < 1.001


@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"kv_heads": 1}, {"qk_norm": "rms"}, {"softcap": 2.0}])
def test_gram_matrix_equals_the_product_of_the_blocks(options: dict[str, object]) -> None:
    attention = hs.SelfAttention.random(10, 2, rotary=hs.Rotary.standard(4), **options)  # type: ignore[arg-type]
    x = torch.randn(5, 10, dtype=torch.float64)
    for head in HeadsAt(attention, x).blocks():
        n, k, d = head.shape
        dense = torch.stack([head.rows(i) for i in range(n)]).transpose(1, 2).reshape(n * k, n * d)
        torch.testing.assert_close(head.gram(), dense @ dense.mT, rtol=1e-12, atol=1e-12)


def test_every_proof_encloses_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = hs.SelfAttention.random(12, 2, mask="causal").in_dtype(torch.float64)
    x = torch.randn(9, 12, dtype=torch.float64)
    true = hs.measure_heads(attention, x, rtol=1e-10, dense_limit=500).value
    ratios = {}
    for name, limits in {"cholesky": (6144, 16384), "deflation": (4, 16384), "three paths": (4, 4)}.items():
        monkeypatch.setattr(enclosure, "CHOLESKY", limits[0])
        monkeypatch.setattr(enclosure, "DEFLATION", limits[1])
        monkeypatch.setattr(enclosure, "DEFLATED", 12)
        proof = hs.certify(attention, x, per_head=True)
        assert proof.methods == (name, name)
        assert bool((proof.lower <= true * (1 + 1e-12)).all() and (true <= proof.upper * (1 + 1e-12)).all())
        ratios[name] = float(proof.ratio.max())
    assert ratios["cholesky"] < 1.001
    assert ratios["deflation"] < 1.05
    assert ratios["three paths"] < 4


def test_a_block_too_large_to_be_taken_whole_is_at_most_the_sum_of_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = hs.SelfAttention.random(8, 2, rotary=hs.Rotary.standard(4)).in_dtype(torch.float64)
    x = torch.randn(4, 8, dtype=torch.float64)
    whole = hs.certify(attention, x)
    monkeypatch.setattr(enclosure, "BLOCK", 4)
    monkeypatch.setattr(enclosure, "STACKED", 4)
    apart = hs.certify(attention, x)
    assert apart.methods == ("sum of heads: cholesky",)
    assert whole.upper <= apart.upper
    assert apart.lower <= dense_norm(attention, x) <= apart.upper


ROTARY = hs.Rotary.standard(4)
OPTIONS: list[dict[str, object]] = [
    {},
    {"mask": "causal"},
    {"kv_heads": 1},
    {"softcap": 2.0},
    {"rotary": ROTARY, "mask": "causal"},
    {"rotary": ROTARY, "kv_heads": 1},
    {"qk_norm": "rms"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_of_stacked_heads_are_those_of_the_dense_gram_matrix(options: dict[str, object]) -> None:
    attention = hs.SelfAttention.random(12, 3, **options).in_dtype(torch.float64)
    x, basis = torch.randn(5, 12).double(), torch.linalg.qr(torch.randn(60, 7).double()).Q
    heads = StackedHeads.of(HeadsAt(attention, x))
    assert heads is not None
    dense = torch.autograd.functional.jacobian(attention, x).reshape(60, 60)
    squares, products = heads.sums(basis)
    torch.testing.assert_close(products, dense @ (dense.mT @ basis), rtol=1e-12, atol=1e-13)
    assert squares == pytest.approx(float((dense @ dense.mT).square().sum()), rel=1e-12)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_deflated_block_is_enclosed_and_a_dropped_covariance_is_caught(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = hs.SelfAttention.random(12, 3, **options).in_dtype(torch.float64)
    x, built = 3 * torch.randn(6, 12).double(), head_gram._blocks
    monkeypatch.setattr(enclosure, "BLOCK", 4)
    monkeypatch.setattr(enclosure, "BLOCK_DEFLATED", 8)
    true, proof = dense_norm(attention, x), enclosure.enclose_block(HeadsAt(attention, x))
    assert proof.method == "deflation"
    assert proof.lower <= true <= proof.upper <= 1.2 * true

    def without_queries(*args: object) -> head_gram.HeadBlocks:
        head = built(*args)  # type: ignore[arg-type]
        head.own.zero_()
        return head

    monkeypatch.setattr(head_gram, "_blocks", without_queries)
    assert not enclosure.enclose_block(HeadsAt(attention, x)).upper >= true * (1 + 1e-6)


@pytest.mark.slow
def test_a_dropped_covariance_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    built = head_gram._blocks

    def without_queries(*args: object) -> head_gram.HeadBlocks:
        head = built(*args)  # type: ignore[arg-type]
        head.own.zero_()
        return head

    monkeypatch.setattr(head_gram, "_blocks", without_queries)
    found, _ = enclosures("dot_product", "none", every=30)
    assert found.passed > found.tried / 2


def test_no_bound_below_the_norm_is_proved() -> None:
    g = torch.Generator().manual_seed(0)
    half = torch.randn(40, 60, generator=g, dtype=torch.float64)
    matrix = half @ half.mT
    true = float(torch.linalg.eigvalsh(matrix)[-1])
    assert top_eigenvalue(matrix)[0] == pytest.approx(true, rel=1e-3)
    for guess in (0.3 * true, 0.9 * true, 0.999 * true, true):
        bound = cholesky_bound(matrix, guess)
        assert bound is None or bound >= true
    assert cholesky_bound(matrix, 0.3 * true) is None


def test_a_token_alone_and_zero_weights_are_enclosed() -> None:
    head = hs.SelfAttention.from_bilinear(torch.zeros(2, 2), torch.zeros(2, 2))
    proof = hs.certify(head, torch.ones(1, 2))
    assert float(proof.lower) == 0 <= float(proof.upper) < 1e-9


def test_what_cannot_be_certified_is_said_in_a_sentence() -> None:
    attention, x = hs.SelfAttention.random(4), torch.ones(3, 4)
    with pytest.raises(UnsupportedModel, match="attention map"):
        hs.certify(torch.sin, x)
    with pytest.raises(InvalidInput, match="one input"):
        hs.certify(attention, x[None])
    for radius in (-1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidInput, match="eps must be finite"):
            hs.certify(attention, hs.sets.Around(x, radius))
    with pytest.raises(InvalidInput, match="moving"):
        hs.certify(attention, hs.sets.Around(x, 0.1, moving=[3]))
    with pytest.raises(InvalidInput, match="ball"):
        hs.certify(attention, x, ball="tokn")  # type: ignore[call-overload]
    assert hs.certify(attention.half(), x.half()).notes == ("computed in float64",)


@pytest.mark.parametrize("power", [-400, -200, 200, 400])
@pytest.mark.parametrize("factored", [True, False])
def test_ends_follow_the_size_of_the_values_where_squares_leave_float64(
    power: int, factored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not factored:
        monkeypatch.setattr(enclosure, "CHOLESKY", 0)
        monkeypatch.setattr(enclosure, "DEFLATED", 12)
    plain = hs.SelfAttention.random(8, heads=2, mask="causal").in_dtype(torch.float64)
    options = {"heads": 2, "mask": "causal"}
    weights = (plain.query_weight.flatten(0, 1), plain.key_weight.flatten(0, 1), plain.value_weight.flatten(0, 1))
    query, key, value = weights
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    per_head, block = {"per_head": True}, {}
    for kind in (per_head, block):
        here = hs.certify(hs.SelfAttention(query, key, value, **options), x, **kind)
        there = hs.certify(hs.SelfAttention(query, key, value * 2.0**power, **options), x, **kind)
        assert (here.lower > 0).all()
        torch.testing.assert_close(there.lower / 2.0**power, here.lower, rtol=1e-6, atol=0)
        torch.testing.assert_close(there.upper / 2.0**power, here.upper, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e-300, 1e-150])
def test_a_jacobian_whose_squares_are_no_numbers_is_refused(size: float) -> None:
    weight, x = torch.eye(4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    for per_head in (True, False):
        with pytest.raises(InvalidInput, match="scale the values up"):
            hs.certify(hs.SelfAttention(weight, weight, size * weight, heads=2), x, per_head=per_head)


@pytest.mark.parametrize("kind", ["dot_product", "l2", "sigmoid", "cosine"])
def test_inputs_of_any_size_have_ends_or_are_refused(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(2 if kind == "l2" else 3)]
    make = {
        "dot_product": hs.SelfAttention,
        "l2": hs.L2SelfAttention,
        "sigmoid": hs.SigmoidAttention,
        "cosine": hs.CosineAttention,
    }[kind]
    attention, x = make(*weights, heads=2), torch.randn(5, 8, dtype=torch.float64, generator=generator)
    said = 0
    for scale in (1e-300, 1e-160, 1e-80, 1.0, 1e4, 1e8, 1e12, 1e40, 1e120, 1e160, 1e300):
        for radius in (None, 0.01 * scale, 1e3 * scale):
            try:
                proof = hs.certify(attention, hs.sets.Around(scale * x, radius), per_head=radius is None)
            except InvalidInput:
                continue
            said += 1
            assert (proof.lower <= proof.upper).all(), (scale, radius)  # which NaN is not
    assert said >= 10


def drawn(seed: int, heads: int = 3, width: int = 2, out: int = 8) -> hs.SelfAttention:
    torch.manual_seed(seed)
    weights = [torch.randn(heads * width, 5, dtype=torch.float64) for _ in range(3)]
    return hs.SelfAttention(*weights, torch.randn(out, heads * width, dtype=torch.float64), heads=heads)


@pytest.mark.parametrize("seed", range(20))
def test_the_norm_of_a_sum_of_maps_that_write_where_heads_write_is_bounded(seed: int) -> None:
    attention = drawn(seed)
    sizes = (10 ** torch.randn(3, dtype=torch.float64)).tolist()
    bound = norm_of_head_sum(attention, sizes)
    assert max(sizes) <= bound * (1 + 1e-12)
    assert bound <= sum(sizes) * (1 + 1e-9)
    worst = 0.0
    for _ in range(200):
        maps = [output.mT.double() @ torch.randn(2, 3, dtype=torch.float64) for output in attention.output_weight]
        unit = [size * m / torch.linalg.matrix_norm(m, 2) for size, m in zip(sizes, maps, strict=True)]
        worst = max(worst, float(torch.linalg.matrix_norm(torch.stack(unit).sum(0), 2)))
    assert worst <= bound


def attained(attention: hs.SelfAttention, sizes: list[float]) -> float:
    """The largest |Σ_h s_hw_h| that an alternating search meets over unit vectors w_h that the heads can write."""
    bases, worst = torch.linalg.qr(attention.output_weight.double().mT).Q, 0.0
    for _ in range(8):
        total = torch.randn(bases.shape[1], dtype=torch.float64)
        for _ in range(30):
            written = (bases @ (bases.mT @ total)[..., None])[..., 0]
            written = written / written.norm(dim=-1, keepdim=True)
            total = (torch.tensor(sizes, dtype=torch.float64)[:, None] * written).sum(0)
            worst = max(worst, float(total.norm()))
    return worst


def test_sums_of_what_heads_can_write_stay_below_the_bound_and_the_closest_is_near_it() -> None:
    shares = []
    for seed in range(12):
        attention = drawn(seed, heads=2 + seed % 2, width=1 + seed % 3, out=4)
        sizes = (10 ** (0.3 * torch.randn(attention.heads, dtype=torch.float64))).tolist()
        shares.append(attained(attention, sizes) / norm_of_head_sum(attention, sizes))
    assert 0.98 < max(shares) <= 1
    assert min(shares) > 0.8


def test_heads_that_write_into_the_same_directions_add_up_and_others_do_not() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    weights = [torch.randn(4, 2, dtype=torch.float64) for _ in range(3)]
    same = hs.SelfAttention(*weights, torch.cat([eye, 2 * eye], 1), heads=2)
    assert norm_of_head_sum(same, [1.0, 3.0]) == pytest.approx(4.0, rel=1e-9)
    apart = hs.SelfAttention(*weights, torch.block_diag(eye, 2 * eye), heads=2)
    assert norm_of_head_sum(apart, [1.0, 3.0]) == pytest.approx(10**0.5, rel=1e-9)


def test_an_output_matrix_without_full_rank_gains_nothing() -> None:
    weights = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]
    attention = hs.SelfAttention(*weights, torch.ones(6, 4, dtype=torch.float64), heads=2)
    assert norm_of_head_sum(attention, [1.0, 3.0]) == pytest.approx(4.0, rel=1e-9)


def test_nothing_and_infinity_pass_through() -> None:
    assert norm_of_head_sum(drawn(0), [0.0, 0.0, 0.0]) == 0.0
    assert norm_of_head_sum(drawn(0), [1.0, float("inf"), 0.0]) == float("inf")
