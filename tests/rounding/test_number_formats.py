"""Formats against references written another way: exact fractions, enumerated codes, bit patterns."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.rounding.number_formats import NUMBER_FORMATS, parse_format, parse_formats


def cache(heads: int = 2, n: int = 9, width: int = 32, seed: int = 0) -> Tensor:
    """Keys with outlying channels and one large token, as trained models have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, n, width, generator=generator)
    x[..., 3] *= 20
    x[:, 0] *= 7
    return x


def nearest_even(x: Fraction) -> int:
    """The nearest integer, ties to even, without floating point."""
    return round(x)


def reference_integers(run: list[float], bits: int, symmetric: bool) -> list[float]:
    """One scope of integers: scales in float16 from float32 quotients, codes in exact arithmetic."""
    numbers = [Fraction(float(v)) for v in run]
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale = Fraction(float(np.float16(np.float32(max(abs(v) for v in run)) / np.float32(most))))
        codes = [max(-most, min(most, nearest_even(_float32(v, scale)))) for v in numbers]
        return [float(np.float32(code) * np.float32(float(scale))) for code in codes]
    most = 2**bits - 1
    low, high = np.float32(min(run)), np.float32(max(run))
    scale = Fraction(float(np.float16((high - low) / np.float32(most))))
    offset = np.float32(np.float16(low))
    if scale == 0:  # one number, or equal ones
        return [float(offset)] * len(run)
    codes = [
        max(0, min(most, nearest_even(_float32(Fraction(float(np.float32(float(v)) - offset)), scale))))
        for v in numbers
    ]
    return [float(np.float32(code) * np.float32(float(scale)) + offset) for code in codes]


def _float32(v: Fraction, scale: Fraction) -> Fraction:
    """v/scale as a float32 division gives it."""
    return Fraction(float(np.float32(float(v)) / np.float32(float(scale))))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [8, 6, 4, 3, 2])
def test_integers_equal_exact_arithmetic_in_every_granularity(bits: int, symmetric: bool) -> None:
    x = cache()
    sign = "symmetric" if symmetric else "asymmetric"
    for options, scopes in (
        ("per=token", lambda t: [t[h, i] for h in range(2) for i in range(9)]),
        ("group=8", lambda t: [t[h, i, c : c + 8] for h in range(2) for i in range(9) for c in range(0, 32, 8)]),
        ("per=channel", lambda t: [t[h, :, c] for h in range(2) for c in range(32)]),
        ("per=channel,group=4", lambda t: [t[h, i : i + 4, c] for h in range(2) for c in range(32) for i in (0, 4, 8)]),
        ("per=tensor", lambda t: [t.flatten()]),
    ):
        found = parse_format(f"int{bits}[{sign},{options}]").rounded(x)
        for run, rounded in zip(scopes(x), scopes(found), strict=True):
            assert rounded.tolist() == reference_integers(run.tolist(), bits, symmetric)


def float_codes(exponent_bits: int, mantissa_bits: int, bias: int, nan_codes: set[int]) -> list[float]:
    """All values that are not negative, by code, from the definition of a small float."""
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        if code in nan_codes:
            continue
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = Fraction(mantissa, 2**mantissa_bits)
        value = (1 + fraction) * Fraction(2) ** (exponent - bias) if exponent else fraction * Fraction(2) ** (1 - bias)
        values.append(float(value))
    return values


def nearest_code(x: float, values: list[float]) -> float:
    """The nearest value, the even code at a tie, the last one beyond the end."""
    size = Fraction(abs(x))
    best = min(range(len(values)), key=lambda code: (abs(Fraction(values[code]) - size), code % 2))
    return float(np.copysign(values[best], x))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fp8_e4m3", float_codes(4, 3, 7, {127})),
        ("fp8_e5m2", float_codes(5, 2, 15, set(range(124, 128)))),
    ],
)
def test_eight_bit_floats_equal_the_nearest_of_all_codes(name: str, values: list[float]) -> None:
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    x = torch.tensor([*values, *middles, *torch.randn(200).mul(30).tolist(), 1e9, -1e9, -0.3])[None]
    assert NUMBER_FORMATS[name].rounded(x)[0].tolist() == [nearest_code(v, values) for v in x[0].tolist()]


def test_scaled_eight_bit_floats_use_their_whole_range() -> None:
    x = cache() * 1e4
    found = parse_format("fp8_e4m3[per=token]").rounded(x)
    largest = x.abs().amax(-1)
    assert torch.allclose(found.abs().amax(-1), largest, rtol=1e-6)
    assert bool((NUMBER_FORMATS["fp8_e4m3"].rounded(x).abs().amax(-1) == 448).all())


def test_half_formats_equal_bit_patterns() -> None:
    x = torch.cat([torch.randn(500) * 10.0 ** torch.randint(-6, 5, (500,)), torch.tensor([7e4, -1e6])])[None]
    bits = x.numpy().view(np.uint32).astype(np.uint64)
    kept = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    assert np.array_equal(NUMBER_FORMATS["bf16"].rounded(x).numpy(), kept)
    expected = np.clip(x.numpy(), -65504, 65504).astype(np.float16).astype(np.float32)
    assert np.array_equal(NUMBER_FORMATS["fp16"].rounded(x).numpy(), expected)


FP4 = float_codes(2, 1, 1, set())


def test_mxfp4_equals_the_definition() -> None:
    x = torch.cat([cache(), torch.zeros(2, 1, 32), cache(seed=1) * 1e-3], dim=-2)
    found = NUMBER_FORMATS["mxfp4"].rounded(x)
    for block, rounded in zip(x.reshape(-1, 32).tolist(), found.reshape(-1, 32).tolist(), strict=True):
        largest = max(abs(v) for v in block)
        scale = 2.0 ** (int(np.floor(np.log2(largest))) - 2) if largest else 0.0
        assert rounded == [nearest_code(v / scale, FP4) * scale if scale else 0.0 for v in block]


def test_nvfp4_equals_the_definition() -> None:
    x = cache()
    found, codes = NUMBER_FORMATS["nvfp4"].rounded(x), float_codes(4, 3, 7, {127})
    outer = np.float32(x.abs().max().item()) / np.float32(448 * 6)
    for block, rounded in zip(x.reshape(-1, 16).tolist(), found.reshape(-1, 16).tolist(), strict=True):
        largest = np.float32(max(abs(v) for v in block))
        scale = np.float32(nearest_code(float(largest / np.float32(6) / outer), codes)) * outer
        expected = [np.float32(nearest_code(float(np.float32(v) / scale), FP4)) * scale for v in block]
        assert rounded == [float(v) for v in expected]


def test_ties_of_fp4_go_to_even_codes() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 24)[None]
    assert NUMBER_FORMATS["mxfp4"].rounded(ties)[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


@pytest.mark.parametrize("name", ["int4[first=2]", "int3[asymmetric,per=channel,first=3]", "nvfp4[first=1]"])
def test_first_tokens_are_kept_exactly_and_the_rest_is_rounded_by_itself(name: str) -> None:
    x, form = cache(), parse_format(name)
    found = form.rounded(x)
    assert torch.equal(found[:, : form.first], x[:, : form.first])
    assert torch.equal(found[:, form.first :], replace(form, first=0).rounded(x[:, form.first :]))
    assert not torch.equal(found[:, form.first :], x[:, form.first :])


def test_bits_count_scales_offsets_and_exact_tokens() -> None:
    sizes = {
        "int8": 8 + 16 / 64,
        "int4[asymmetric]": 4 + 32 / 64,
        "int4[group=32]": 4 + 16 / 32,
        "int4[per=channel]": 4 + 16 / 128,
        "int4[per=channel,group=32]": 4 + 16 / 32,
        "fp8_e4m3": 8,
        "fp8_e4m3[per=tensor]": 8 + 32 / (3 * 64 * 128),
        "mxfp4": 4 + 8 / 32,
        "nvfp4": 4 + 8 / 16 + 32 / (3 * 64 * 128),
        "bf16": 16,
        "int4[first=32]": 0.25 * 16 + 0.75 * 4.25,
    }
    for name, expected in sizes.items():
        assert parse_format(name).bits_per_number(width=64, tokens=128, heads=3) == pytest.approx(expected)


def test_names_read_back_as_the_same_format() -> None:
    names = "int8,int4[asymmetric,per=channel,group=32],fp8_e5m2[per=tensor],int3[first=4,rotary=before],nvfp4"
    for form in parse_formats(names):
        assert parse_format(form.name) == form
    assert ",".join(form.name for form in parse_formats(names)) == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int5", "there is no format 'int5': choose from int8, int6"),
        ("int4[width=3]", "brackets take"),
        ("int4[group=0]", "brackets take"),
        ("int4[per=none]", "integers need a scale"),
        ("bf16[per=token]", "has no scale"),
        ("nvfp4[group=8]", "come in other groups"),
        ("mxfp4[per=channel]", "by definition"),
        ("fp8_e4m3[asymmetric]", "only integers"),
    ],
)
def test_wrong_formats_are_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said.replace("[", r"\[")) as error:
        parse_format(text)
    assert "\n" not in str(error.value)


def test_groups_that_do_not_divide_a_head_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"groups of 24 numbers .* do not divide the 32 of a head"):
        parse_format("int4[group=24]").rounded(cache())


def test_nan_in_a_cache_is_refused() -> None:
    x = cache()
    x[1, 2, 3] = float("nan")
    with pytest.raises(InvalidInput, match="keys of layer 2 hold NaN or infinity"):
        NUMBER_FORMATS["int8"].rounded(x, "keys of layer 2")


def test_all_zeros_stay_zeros() -> None:
    for form in NUMBER_FORMATS.values():
        assert not form.rounded(torch.zeros(1, 4, 32)).any()
