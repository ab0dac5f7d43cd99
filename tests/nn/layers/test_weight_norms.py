"""Spectral norms of slowly changing matrices."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.nn import ContractiveL2Attention, ContractiveMLP
from howsmooth.nn.layers import weight_norms
from howsmooth.nn.layers.weight_norms import CachedSingularVectors, SpectralNorm, top_singular_vectors


def matrix(*sizes: float, rows: int = 7, columns: int = 5) -> Tensor:
    """A matrix with prescribed singular values."""
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (rows, columns))
    return left[:, : len(sizes)] * torch.tensor(sizes, dtype=torch.float64) @ right[: len(sizes)]


def test_exact_norm_equals_the_prescribed_singular_value() -> None:
    for sizes in ((3.0, 1.0), (2.0, 2.0, 2.0), (1e-200, 1e-201), (1e150,), (0.0,)):
        found = SpectralNorm(7, 5).eval()(matrix(*sizes))
        torch.testing.assert_close(found, torch.tensor(sizes[0], dtype=torch.float64), rtol=1e-12, atol=0)


def test_estimate_is_a_lower_bound_that_converges() -> None:
    norm, m = SpectralNorm(7, 5, width=1, steps=1).double().train(), matrix(3.0, 2.5, 1.0)
    found = [float(norm(m)) for _ in range(80)]
    assert found[0] < 2.99
    assert max(found) <= 3.0 * (1 + 1e-14)
    assert all(a <= b * (1 + 1e-14) for a, b in pairwise(found))
    assert found[-1] == pytest.approx(3.0, rel=1e-9)


def test_estimate_stays_where_it_is_when_told_so() -> None:
    norm, m = SpectralNorm(7, 5).double().train(), matrix(3.0, 2.5)
    before = norm.space.clone()
    norm(m, follow=False)
    assert torch.equal(norm.space, before)


def test_subspace_as_wide_as_the_matrix_is_exact_at_once() -> None:
    norm = SpectralNorm(7, 5).double().train()
    for _ in range(5):
        m = torch.randn(7, 5, dtype=torch.float64)
        torch.testing.assert_close(norm(m), torch.linalg.matrix_norm(m, 2), rtol=1e-12, atol=0)


def test_subspace_keeps_up_where_one_vector_falls_behind() -> None:
    """Training pushes singular values together; here the largest ten are equal and turn a little in every step."""
    wide, single = (SpectralNorm(60, 60, width=width, steps=1).double().train() for width in (32, 1))
    left, right = (torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q for _ in range(2))
    sizes = torch.ones(60, dtype=torch.float64)
    sizes[10:] = 0.5
    turn = torch.linalg.matrix_exp(0.05 * (left - left.T))
    errors: dict[int, float] = {32: 0.0, 1: 0.0}
    for step in range(60):
        sizes[0], sizes[step % 10] = 1.0, 1.3
        left = turn @ left
        m = left * sizes @ right
        sizes[step % 10] = 1.0
        found = {32: float(wide(m)), 1: float(single(m))}
        if step >= 10:  # both have had time to arrive
            errors = {width: max(errors[width], 1 - found[width] / 1.3) for width in found}
    assert errors[32] < 0.01 < 0.1 < errors[1]


def test_a_matrix_set_from_outside_is_caught_up_with_in_one_call() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        norm = SpectralNorm(64, 64).train()
        for m in (torch.randn(64, 64), 5 * torch.randn(64, 64), torch.randn(64, 64).softmax(1)):
            found, truth = float(norm(m)), exact(m)
            assert truth * (1 - 2e-3) <= found <= truth * (1 + 1e-5)


def test_one_step_is_taken_where_the_matrix_hardly_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, m = SpectralNorm(64, 64).train(), torch.randn(64, 64)
    norm.follow(m)
    calls: list[int] = []
    qr = torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda *a, **k: calls.append(1) or qr(*a, **k))
    norm(m + 1e-3 * torch.randn(64, 64))
    assert len(calls) == 1


def test_nan_in_training_passes_through() -> None:
    assert SpectralNorm(2, 2).train()(torch.full((2, 2), math.nan)).isnan()


@pytest.mark.parametrize("training", [True, False])
def test_gradient_equals_that_of_the_matrix_norm(training: bool) -> None:
    norm, m = SpectralNorm(7, 5).double(), matrix(3.0, 1.0).requires_grad_()
    norm.follow(m, 200)
    (found,) = torch.autograd.grad(norm.train(training)(m), m)
    (expected,) = torch.autograd.grad(torch.linalg.matrix_norm(m, 2), m)
    torch.testing.assert_close(found, expected)


def test_two_forward_passes_before_one_backward_pass_are_fine() -> None:
    norm, m = SpectralNorm(7, 5).double().train(), matrix(3.0, 1.0).requires_grad_()
    (norm(m) + norm(2 * m)).backward()
    assert m.grad is not None
    assert m.grad.isfinite().all()


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every singular value decomposition."""
    calls: list[int] = []
    svd = torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: calls.append(1) or svd(*a, **k))
    return calls


def exact(m: Tensor) -> float:
    return float(torch.linalg.matrix_norm(m.detach().double(), 2))


def test_same_matrix_is_decomposed_once(decomposed: list[int]) -> None:
    norm, m = SpectralNorm(7, 5).eval(), matrix(3.0, 1.0)
    for _ in range(3):
        norm(m.clone())
    assert len(decomposed) == 1
    m.data[0, 0] += 1e-9
    norm(m)
    assert len(decomposed) == 2


def test_matrix_is_not_taken_for_its_transpose() -> None:
    norm = SpectralNorm(2, 2).eval()
    up = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert [float(norm(m)) for m in (up, up.T, up)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("width", [2, 4, 8, 32])
@pytest.mark.parametrize("change", ["transposed", "negative", "rows flipped", "columns flipped", "both flipped"])
def test_norm_is_that_of_the_matrix_of_now_whatever_it_was_before(width: int, change: str) -> None:
    norm = SpectralNorm(width, width).eval()
    for _ in range(30):
        m = torch.randn(width, width)
        m[0] *= 3  # left and right vectors differ
        other = {
            "transposed": m.T,
            "negative": -m,
            "rows flipped": m.flip(0),
            "columns flipped": m.flip(1),
            "both flipped": m.flip(0, 1),
        }[change]
        norm(m)
        assert float(norm(other)) == pytest.approx(exact(m), rel=1e-5)


def test_contractive_layer_keeps_its_constant_when_weights_become_their_transposes() -> None:
    layer = ContractiveL2Attention(2, 1, coefficient=0.9).eval()
    x = torch.randn(4, 2)
    first, second = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    for tied, value in ((first, first.flip(0)), (second, second.flip(0))):
        with torch.no_grad():
            layer.qk_proj.weight.copy_(tied)
            layer.v_proj.weight.copy_(value)
            layer.out_proj.weight.copy_(torch.eye(2))
            out = layer(x)[0]
        assert float(layer.lipschitz_bound(4)) <= 0.9 * (1 + 1e-6)
        assert float(out.abs().max()) < 10


def test_weights_may_change_in_every_way() -> None:
    """Through .data, by an optimiser, by load_state_dict and in a deep copy, each seen by the norm at once."""
    layer = ContractiveMLP(4, 8, 0.9).eval()

    def check(mlp: ContractiveMLP) -> None:
        for norm, linear in zip(mlp.norms, mlp.linears, strict=True):
            assert float(norm(linear.weight).detach()) == pytest.approx(exact(linear.weight), rel=1e-5)  # type: ignore[operator]
        assert float(mlp.lipschitz_bound(1)) <= 0.9 * (1 + 1e-6)

    check(layer)
    layer.linears[0].weight.data[1, 2] = 50.0  # type: ignore[union-attr, index, operator]
    check(layer)
    state = {name: 3 * value if name.endswith("weight") else value for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    check(layer)
    optimiser = torch.optim.SGD(layer.parameters(), 0.5)
    for _ in range(3):
        optimiser.zero_grad()
        layer(torch.randn(2, 3, 4)).square().sum().backward()
        optimiser.step()
        check(layer)
    twin = copy.deepcopy(layer)
    twin.linears[0].weight.data.mul_(7)  # type: ignore[union-attr, operator]
    check(twin)
    check(layer)


def test_modules_and_their_copies_keep_apart(decomposed: list[int]) -> None:
    one, m, other = SpectralNorm(3, 3).eval(), torch.randn(3, 3), torch.randn(3, 3)
    one(m)
    copies = [copy.deepcopy(one), pickle.loads(pickle.dumps(one)), SpectralNorm(3, 3).eval()]
    for norm in copies:
        assert float(norm(other)) == pytest.approx(exact(other), rel=1e-6)
    before = len(decomposed)
    assert float(one(m)) == pytest.approx(exact(m), rel=1e-6)
    assert len(decomposed) == before


@pytest.mark.slow
def test_nothing_is_kept_of_modules_that_are_gone() -> None:
    before = len(weight_norms._ALIVE)
    for _ in range(5):
        SpectralNorm(3, 3).eval()(torch.randn(3, 3))
    gc.collect()
    assert len(weight_norms._ALIVE) <= before


def test_precision_and_shape_are_part_of_what_is_compared() -> None:
    norm, m = SpectralNorm(2, 2).eval(), torch.tensor([[1.0, 0.5], [0.25, 2.0]])
    assert norm(m).dtype == torch.float32
    assert norm(m.double()).dtype == torch.float64
    assert float(norm(m.double())) == pytest.approx(exact(m), rel=1e-14)


def test_vectors_handed_out_can_be_changed_without_harm() -> None:
    kept, m = CachedSingularVectors(), matrix(3.0, 1.0)
    top_singular_vectors(m, kept.number)[0].zero_()
    assert float(top_singular_vectors(m, kept.number)[0].norm()) == pytest.approx(1.0)


def test_matrix_that_is_not_finite_is_refused() -> None:
    norm = SpectralNorm(2, 2).eval()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="NaN or infinite"):
            norm(torch.full((2, 2), math.nan))
