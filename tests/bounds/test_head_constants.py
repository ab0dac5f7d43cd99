"""The numbers of a head dominate what its logits and values really do on the set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.bounds.question_setting import head_numbers, value_matrices
from howsmooth.sets.ellipsoid import Ellipsoid

N, WIDTH, HEADS = 7, 8, 2


def _attention(case: str) -> hs.SelfAttention:
    generator = torch.Generator().manual_seed(3)
    biases = {
        f"{name}_bias": torch.randn(8 if name == "query" else 4, generator=generator, dtype=torch.float64)
        for name in ("query", "key")
    }
    options: dict = {"kv_heads": 1, "dtype": torch.float64, "seed": 5}
    if case != "plain":
        options |= biases
    if case == "rotary":
        options["rotary"] = hs.Rotary.standard(4, base=20.0)
    if case == "partial rotary with amplitude":
        options["rotary"] = hs.Rotary(torch.tensor([0.7], dtype=torch.float64), True, amplitude=1.3)
    if case == "softcap":
        options["softcap"] = 0.8
    return hs.SelfAttention.random(WIDTH, HEADS, **options)


def _set(name: str) -> Ellipsoid:
    generator = torch.Generator().manual_seed(4)
    gain, shift = torch.rand(WIDTH, generator=generator) + 0.2, torch.randn(WIDTH, generator=generator) * 0.3
    return {
        "ball": Ellipsoid.ball(1.7, WIDTH),
        "layer norm": Ellipsoid.layer_norm(gain, shift),
        "rms norm": Ellipsoid.rms_norm(gain),
    }[name]


def _sampled(attention: hs.SelfAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes of every logit with respect to its query token and key token, by autograd, and the logits."""

    def logits(query_tokens: Tensor, key_tokens: Tensor) -> Tensor:
        query = attention.staged(query_tokens[None])[0]
        key = attention.staged(key_tokens[None])[1]
        return (query @ key.mT)[0]  # before the cap, (heads, n, n)

    by_query, by_key = torch.func.jacrev(logits, argnums=(0, 1))(x, x)
    index = torch.arange(N)
    pulls = by_query[:, index, :, index]  # (n, heads, n, d): logit (i, j) with respect to x_i
    pushes = by_key[:, :, index, index]  # logit (i, j) with respect to x_j
    return pulls.transpose(0, 1), pushes, logits(x, x)


@pytest.mark.parametrize("case", ["plain", "biases", "rotary", "partial rotary with amplitude", "softcap"])
@pytest.mark.parametrize("region", ["ball", "layer norm", "rms norm"])
def test_the_numbers_dominate_random_tokens_of_the_set(case: str, region: str) -> None:
    attention, tokens = _attention(case), _set(region)
    numbers = head_numbers(attention, tokens, N)
    generator = torch.Generator().manual_seed(0)
    value = value_matrices(attention)
    closest = torch.zeros(HEADS, dtype=torch.float64)
    for _ in range(20):
        z = torch.randn(N, tokens.axes.shape[1], dtype=torch.float64, generator=generator)
        x = tokens.at(z / z.norm(dim=-1, keepdim=True))
        pulls, pushes, logits = _sampled(attention, x)
        if case in ("plain", "biases"):
            pulls = pulls - pulls.mean(2, keepdim=True)  # the spread over keys; a common part drops out
            swing = (logits.amax(-1) - logits.amin(-1)).amax(-1) / 2
            assert bool((swing <= numbers.swing).all())
        spread = (value[:, None] @ (x - x.mean(0))[None, :, :, None])[..., 0].square().sum(-1).mean(-1).sqrt()
        assert bool((spread <= numbers.spread).all())
        assert bool((pulls.square().sum(-1).mean(-1).sqrt() <= numbers.pull[:, None]).all())
        largest = pushes.norm(dim=-1).amax((1, 2))
        assert bool((largest <= numbers.push).all())
        closest = torch.maximum(closest, largest / numbers.push)
    assert bool((closest > 0.3).all()), "the numbers should not be loose by more than the sampling explains"


def test_grouped_heads_have_the_numbers_of_repeated_heads() -> None:
    shared = _attention("biases")
    key = shared.key_weight.repeat(2, 1, 1).flatten(0, 1)
    value = shared.value_weight.repeat(2, 1, 1).flatten(0, 1)
    repeated = hs.SelfAttention(
        shared.query_weight.flatten(0, 1),
        key,
        value,
        shared.output_weight.flatten(0, 1).T,
        heads=2,
        query_bias=shared.query_bias.flatten(),
        key_bias=shared.key_bias.repeat(2, 1).flatten(),
    )
    tokens = _set("layer norm")
    ours, theirs = head_numbers(shared, tokens, N), head_numbers(repeated, tokens, N)
    for name, number in vars(ours).items():
        assert torch.allclose(number, getattr(theirs, name), rtol=1e-12)


def test_rotary_positions_take_the_worst_offset() -> None:
    attention, tokens = _attention("rotary"), _set("ball")
    rotary = attention.query_stages[0]
    query = attention.query_weight * attention.scale
    norms = []
    for offset in range(-N + 1, N):
        turn = hs.Rotary(rotary.frequencies, positions=torch.tensor([float(offset)]))
        turned = turn(query.mT[:, :, None])[:, :, 0].mT
        norms.append(torch.linalg.matrix_norm(attention.key_weight.mT @ turned, 2))
    assert torch.allclose(head_numbers(attention, tokens, N).score, torch.stack(norms).amax(0), rtol=1e-12)
    assert torch.stack(norms).std(0).min() > 1e-3  # offsets do differ


def test_too_many_offsets_are_covered_by_the_product_of_norms() -> None:
    attention, tokens = _attention("rotary"), _set("ball")
    few, many = head_numbers(attention, tokens, 2000), head_numbers(attention, tokens, 10**6)
    assert bool((many.score >= few.score).all())
    assert bool((many.push >= few.push).all())


def test_folding_the_output_matrix_keeps_the_norms() -> None:
    attention = _attention("plain")
    full = attention.output_weight.mT @ attention.value_weight.repeat_interleave(2, 0)
    assert torch.allclose(
        torch.linalg.svdvals(full)[:, :4], torch.linalg.svdvals(value_matrices(attention)), rtol=1e-12, atol=1e-13
    )


def test_an_amplitude_below_one_shrinks_nothing_beside_the_turned_pairs() -> None:
    """Partial rotary: the third coordinate does not turn and keeps its length."""
    weight = torch.diag(torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    head = hs.SelfAttention(weight, weight, weight, rotary=hs.Rotary(torch.ones(1), amplitude=0.5), scale=1.0)
    for n in (10, 10**5):
        assert float(head_numbers(head, Ellipsoid.ball(1.0, 3), n).score) == pytest.approx(1.0)
