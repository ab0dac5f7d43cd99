"""Jacobians in queries, keys and values against autograd through the readable forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from evidence import attention_cases as cases
from evidence.jacobian_grid import by_columns, by_rows, relative_error
from howsmooth.attention import AttentionMap, Rotary, UnitNorm
from howsmooth.errors import InvalidInput
from howsmooth.jacobians import cached_jacobian
from howsmooth.norms import operator_norm

PARTS = ("queries", "keys", "values")
TOLERANCE = 1e-11


def cached_map(attention: AttentionMap, x: Tensor, part: str):  # type: ignore[no-untyped-def]
    """The function from one part, as a cache holds it, to the outputs of the heads before they are summed."""
    place = PARTS.index(part)
    tokens = list(attention.project(x[None]))
    split = []
    for number, stages in enumerate(attention.stages(tokens[0], tokens[1])):
        placed = [i for i, stage in enumerate(stages) if isinstance(stage, Rotary | UnitNorm)]
        cut = placed[-1] + 1 if placed else 0
        for stage in stages[:cut]:
            tokens[number] = stage(tokens[number])
        split.append(stages[cut:])
    group = 1 if part == "queries" else attention.heads // attention.kv_heads
    held = tokens[place][0, ::group]

    def outputs(moved: Tensor) -> Tensor:
        used = list(tokens)
        used[place] = moved.repeat_interleave(group, dim=0)[None]
        for number in range(3):
            for stage in split[number]:
                used[number] = stage(used[number])
        return (attention._weights(used[0], used[1]) @ used[2] @ attention.output_weight)[0]

    return outputs, held


def autograd(attention: AttentionMap, x: Tensor, part: str) -> Tensor:
    outputs, held = cached_map(attention, x, part)
    return torch.func.jacrev(lambda moved: outputs(moved).sum(0))(held).reshape(-1, held.numel())


SETTINGS = [
    (4, 2, "rotary", True, "rms qk-norm and softcap"),
    (1, 1, "alibi", False, "softcap"),
    (4, 4, "relative", True, "l2 qk-norm with gain"),
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_products_equal_autograd_for_every_kind_and_mask(kind: str, mask: str, part: str) -> None:
    for setting in SETTINGS:
        attention, x = cases.build(kind, mask, *setting), cases.tokens()
        expected = autograd(attention, x, part)
        operator = hs.jacobian(attention, x, wrt=part)
        assert relative_error(by_columns(operator), expected) < TOLERANCE
        assert relative_error(by_rows(operator), expected) < TOLERANCE


@pytest.mark.parametrize("part", PARTS)
def test_products_of_a_batch_are_those_of_its_items(part: str) -> None:
    attention = cases.build("dot_product", "causal", 4, 2, "rotary", True, "plain")
    x = cases.tokens(3)
    batch = cached_jacobian(attention, x, part)
    v = torch.randn(3, *batch.in_shape, dtype=torch.float64)
    for item in range(3):
        one = cached_jacobian(attention, x[item], part)
        assert torch.allclose(batch.matvec(v)[item], one.matvec(v[item]), rtol=1e-12)


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_influence_of_a_token_is_the_norm_of_its_columns(kind: str, part: str) -> None:
    for mask, setting in zip(("none", "causal", "blind rows"), SETTINGS, strict=True):
        attention, x = cases.build(kind, mask, *setting), cases.tokens()
        operator = cached_jacobian(attention, x, part, per_head=True)
        dense = operator.dense().unflatten(-1, tuple(operator.in_shape))  # (heads, out, n, width)
        columns = dense.transpose(-3, -2)
        for norm in ("fro", 2):
            expected = torch.linalg.matrix_norm(columns, ord=norm)
            # Keys of L2 attention have features that cancel in the sum of squares, which leaves the root of the eps.
            least = 1e-7 * float(expected.max()) if kind == "l2" else 1e-11
            assert torch.allclose(operator.influence(norm), expected, rtol=1e-9, atol=least)


@pytest.mark.parametrize("part", PARTS)
def test_heads_by_themselves_equal_autograd_and_norms_find_the_largest_singular_value(part: str) -> None:
    attention, x = cases.build("dot_product", "causal", 4, 2, "rotary", True, "plain"), cases.tokens()
    operator = cached_jacobian(attention, x, part, per_head=True)
    outputs, held = cached_map(attention, x, part)
    dense = torch.func.jacrev(outputs)(held).flatten(1, 2).flatten(2)  # (heads, out, parts · n · width)
    measured = operator_norm(operator, rtol=1e-6)
    for head in range(attention.heads):
        own = head if part == "queries" else head // 2
        size = held[0].numel()
        expected = dense[head][:, own * size : (own + 1) * size]
        assert relative_error(operator.dense()[head], expected) < TOLERANCE
        top = float(torch.linalg.matrix_norm(expected, ord=2))
        assert float(measured.lower[head]) <= top * (1 + 1e-12)
        assert top <= float(measured.upper[head])


def test_single_precision_errors_stay_within_the_stated_noise() -> None:
    attention, x = cases.build("dot_product", "causal", 4, 2, "rotary", True, "plain"), cases.tokens()
    for part in PARTS:
        exact = cached_jacobian(attention, x, part).dense()
        rough = cached_jacobian(attention.in_dtype(torch.float32), x.float(), part)
        error = torch.linalg.matrix_norm(rough.dense().double() - exact, ord=2)
        allowed = float(rough.accuracy.product) + 8 * torch.finfo(rough.dtype).eps * float(
            torch.linalg.matrix_norm(exact, ord=2)
        )
        assert 0 < float(error) <= allowed


def test_functions_and_unknown_parts_are_refused_in_one_sentence() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(InvalidInput, match="only an attention map has keys"):
        hs.jacobian(torch.sin, x, wrt="keys")
    with pytest.raises(InvalidInput, match="key"):
        hs.jacobian(hs.SelfAttention.random(8), x, wrt="key")
    with pytest.raises(InvalidInput, match="per_head=True"):
        cached_jacobian(hs.SelfAttention.random(8), x, "keys").influence()
