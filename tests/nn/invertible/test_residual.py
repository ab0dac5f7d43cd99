"""Inverses of x + f(x) against x itself, dense solves and finite differences; what cannot be inverted is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence import inversion
from howsmooth.nn import ContractiveL2Attention, DotProductAttention, InvertibleResidual, L2Attention
from howsmooth.nn.invertible.branches import (
    NONEXPANSIVE_ACTIVATIONS,
    AttentionBranch,
    ComposedBranch,
    ContractiveMLP,
    ScaledBranch,
)
from howsmooth.nn.invertible.fixed_point import Contraction, DidNotConverge, solve_fixed_point
from howsmooth.testing import dense_jacobian


class Linear(nn.Module):
    """x ↦ x M on every token, with its exact Lipschitz constant."""

    reach = "token"

    def __init__(self, matrix: Tensor):
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix

    def lipschitz_bound(self, n: int) -> Tensor:
        return torch.linalg.matrix_norm(self.matrix.detach(), 2)


class Kinked(nn.Module):
    """A contraction with kinks everywhere, on which acceleration is easily misled."""

    def __init__(self, c: float):
        super().__init__()
        self.c = c

    def forward(self, x: Tensor) -> Tensor:
        return self.c * (x - 2 * (x / 2).round()).abs()

    def lipschitz_bound(self, n: int) -> float:
        return self.c


def blocks_by_theorem() -> dict[str, InvertibleResidual]:
    torch.manual_seed(0)
    past = torch.ones(7, 7, dtype=torch.bool).tril()
    return {
        "attention": InvertibleResidual(ContractiveL2Attention(6, 2, 0.9)),
        "causal attention": InvertibleResidual(ContractiveL2Attention(6, 2, 0.9), mask="causal"),
        "attention under a mask of booleans": InvertibleResidual(ContractiveL2Attention(6, 2, 0.9), mask=past),
        "attention in the inf norm": InvertibleResidual(ContractiveL2Attention(6, 2, 0.9, "inf"), norm=math.inf),
        "network": InvertibleResidual(ContractiveMLP(6, 32, 0.97)),
        "network in the inf norm": InvertibleResidual(ContractiveMLP(6, 32, 0.9, norm=math.inf), norm=math.inf),
        "composition": InvertibleResidual(
            ComposedBranch(
                ContractiveMLP(6, 16, 1.0),
                AttentionBranch(ContractiveL2Attention(6, 2, 0.9)),
                ContractiveMLP(6, 16, 1.0),
            )
        ),
        "scaled map": InvertibleResidual(ScaledBranch(hs.L2SelfAttention(*torch.randn(3, 6, 6) / 3, heads=2), 0.02)),
        "linear": InvertibleResidual(Linear(-0.9 * torch.eye(6))),
    }


BLOCKS = list(blocks_by_theorem())


def steep(block: InvertibleResidual) -> InvertibleResidual:
    """Weights of every size, so that branches come near their bound."""
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith("weight"):
                parameter.mul_(1 + 3 * torch.rand(()))
    return block.eval()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("accelerate", [True, False])
def test_inverse_is_found_and_its_error_is_below_the_bound(name: str, accelerate: bool) -> None:
    block = steep(blocks_by_theorem()[name].double())
    x = torch.randn(5, 7, 6, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0, 10.0, 100.0])[:, None, None]
    with torch.no_grad():
        found = block.inverse(block(x), accelerate=accelerate)
    errors = found.contraction.size(found.x - x)
    assert found.by_theorem
    assert bool(found.converged.all())
    assert bool((errors <= found.error_bound).all())
    assert bool((found.error_bound <= 1e-11 * found.contraction.size(x) + 1e-11).all())


@pytest.mark.parametrize("name", BLOCKS)
def test_float32_error_bound_covers_rounding(name: str) -> None:
    """Truth: the inverse of the same y under the same weights in float64."""
    block = steep(blocks_by_theorem()[name])
    y = 10 * torch.randn(8, 7, 6)
    with torch.no_grad():
        rough = block.inverse(y)
        exact = block.double().inverse(y.double())
    errors = exact.contraction.size(rough.x - exact.x)
    assert rough.x.dtype == torch.float32
    assert bool((errors <= rough.error_bound + exact.error_bound).all())


@pytest.mark.parametrize("evaluations", [1, 2, 5, 20])
def test_error_bound_holds_on_the_way_and_is_attained_by_a_linear_map(evaluations: int) -> None:
    """f(x) = −c·x is the worst case of Banach's estimate: there the bound is the error, to rounding."""
    block = InvertibleResidual(Linear(-0.9 * torch.eye(3, dtype=torch.float64)))
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    with pytest.raises(DidNotConverge, match="largest residual") as stopped, torch.no_grad():
        block.inverse(block(x), max_iterations=evaluations, accelerate=False)
    result = stopped.value.result
    errors = (result.x - x).flatten(1).norm(dim=1)
    assert not bool(result.converged.any())
    assert bool((errors <= result.error_bound).all())
    torch.testing.assert_close(errors, result.error_bound, rtol=1e-9, atol=0)


def test_a_bound_without_the_factor_1_over_1_minus_c_would_be_passed() -> None:
    block = InvertibleResidual(Linear(-0.9 * torch.eye(3, dtype=torch.float64)))
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    with pytest.raises(DidNotConverge) as stopped, torch.no_grad():
        block.inverse(block(x), max_iterations=5, accelerate=False)
    result = stopped.value.result
    assert bool(((result.x - x).flatten(1).norm(dim=1) > 5 * result.residual).all())


@pytest.mark.slow
def test_acceleration_needs_a_fraction_of_the_evaluations_on_a_slow_map() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64)).Q
    matrix = basis @ torch.diag(torch.linspace(-0.97, 0.97, 12, dtype=torch.float64)) @ basis.T
    block = InvertibleResidual(Linear(matrix))
    y = torch.randn(3, 4, 12, dtype=torch.float64)
    with torch.no_grad():
        plain, fast = block.inverse(y, accelerate=False, max_iterations=2000), block.inverse(y)
    wanted = torch.linalg.solve(torch.eye(12, dtype=torch.float64) + matrix.T, y.mT).mT
    torch.testing.assert_close(fast.x, wanted, rtol=0, atol=1e-10)
    assert int(fast.iterations.max()) * 5 < int(plain.iterations.min())


@pytest.mark.parametrize("c", [0.5, 0.9])
def test_acceleration_costs_at_most_twice_the_evaluations_where_it_is_misled(c: float) -> None:
    block = InvertibleResidual(Kinked(c))
    y = 5 * torch.randn(64, 3, 4, dtype=torch.float64)
    fast = block.inverse(y)
    assert bool(fast.converged.all())
    limit = 2 * math.ceil(math.log(1e-15) / math.log(c)) + 2  # every second evaluation shrinks the residual by c
    assert int(fast.iterations.max()) <= limit
    assert float((block(fast.x) - y).abs().max()) < 1e-11


def test_items_stop_on_their_own_and_do_not_disturb_each_other() -> None:
    block = InvertibleResidual(ContractiveL2Attention(4, 2, 0.95)).double().eval()
    y = torch.randn(3, 5, 4, dtype=torch.float64)
    y[0] = 1.0  # equal tokens
    with torch.no_grad():
        together = block.inverse(y)
        alone = [block.inverse(item) for item in y]
    assert together.iterations.tolist() == [int(one.iterations) for one in alone]
    assert len(set(together.iterations.tolist())) > 1
    for item, one in zip(together.x, alone, strict=True):
        torch.testing.assert_close(item, one.x, rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branch", "options"),
    [
        (lambda: ContractiveL2Attention(2, 1, 0.8), {}),
        (lambda: ContractiveL2Attention(2, 2, 0.8), {"mask": "causal"}),
        (lambda: ContractiveL2Attention(2, 1, 0.8, "inf"), {"norm": math.inf}),
        (lambda: ContractiveMLP(2, 3, 0.8), {}),
    ],
)
def test_gradients_of_the_inverse_pass_gradcheck(branch: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block = steep(InvertibleResidual(branch(), **options).double())
    y = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    parameters = list(block.parameters())

    def inverse(y: Tensor, *_: Tensor) -> Tensor:
        return block.inverse(y).x

    assert torch.autograd.gradcheck(inverse, (y, *parameters), atol=1e-6, rtol=1e-5)


def test_gradient_of_the_inverse_is_the_dense_inverse_jacobian() -> None:
    block = steep(blocks_by_theorem()["attention"].double())
    x = torch.randn(5, 6, dtype=torch.float64)
    y = block(x).detach().requires_grad_()
    u = torch.randn(5, 6, dtype=torch.float64)
    (found,) = torch.autograd.grad(block.inverse(y).x, y, u)
    jacobian = dense_jacobian(lambda x: block.branch(x[None])[0], x).detach()
    wanted = torch.linalg.solve((torch.eye(30, dtype=torch.float64) + jacobian).T, u.flatten()).view(5, 6)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_gradients_in_the_inf_norm_are_solved_for_in_the_dual_norm() -> None:
    """f contracts the ∞-norm by 0.8, but its transpose stretches it by 4: only the 1-norm bounds the gradient."""
    matrix = torch.zeros(6, 6, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 0.8, 0.8 / 5

    class Spread(Linear):
        def lipschitz_bound(self, n: int, norm: float = 2) -> Tensor:
            return torch.linalg.matrix_norm(self.matrix.detach().T, norm)

    block = InvertibleResidual(Spread(matrix))
    assert block.contraction(1) == Contraction(pytest.approx(0.8), math.inf, True)  # type: ignore[arg-type]
    y, u = torch.randn(2, 3, 6, dtype=torch.float64).requires_grad_(), torch.randn(2, 3, 6, dtype=torch.float64)
    (found,) = torch.autograd.grad(block.inverse(y).x, y, u)
    wanted = torch.linalg.solve(torch.eye(6, dtype=torch.float64) + matrix, u.mT).mT
    error, size = ((found - wanted).flatten(1).norm(1, dim=1), (found.abs() + u.abs()).flatten(1).sum(1))
    assert bool((error <= 1e-12 * size).all())


def test_second_derivatives_are_refused() -> None:
    block = InvertibleResidual(Linear(0.5 * torch.eye(2)))
    y = torch.randn(1, 3, 2, requires_grad=True)
    with pytest.raises(hs.NotDifferentiable, match="first derivatives only"):
        torch.autograd.grad(block.inverse(y).x.sum(), y, create_graph=True)


@pytest.mark.parametrize("case", ["hs.SelfAttention", "nn.MultiheadAttention", "DotProductAttention", "on trust"])
def test_dot_product_attention_is_refused_with_the_reason(case: str) -> None:
    attention = {
        "nn.MultiheadAttention": nn.MultiheadAttention(8, 2),
        "DotProductAttention": DotProductAttention(8, 2),
    }.get(case, hs.SelfAttention.random(8))
    options = {"coefficient": 0.5, "trust": True} if case == "on trust" else {}
    with pytest.raises(hs.DoesNotApply, match="no Lipschitz constant"):
        InvertibleResidual(attention, **options)  # type: ignore[arg-type]


def test_what_has_no_known_constant_is_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="no known constant"):
        InvertibleResidual(nn.Linear(3, 3))
    with pytest.raises(hs.InvalidInput, match="at least 0 and below 1"):
        InvertibleResidual(Linear(torch.eye(2) / 2), coefficient=1.0)
    with pytest.raises(hs.DoesNotApply, match=r"constant below 1 .*is 1;"):
        InvertibleResidual(Linear(torch.eye(2)))
    with pytest.raises(hs.DoesNotApply, match=r"constant at most 0\.3 .*is 0\.5;"):
        InvertibleResidual(Linear(torch.eye(2) / 2), coefficient=0.3)
    with pytest.raises(hs.InvalidInput, match="needs the coefficient"):
        InvertibleResidual(Linear(torch.eye(2)), trust=True)
    with pytest.raises(hs.DoesNotApply, match="no theorem"):
        InvertibleResidual(L2Attention(8, 2)).inverse(torch.randn(500, 8))
    with pytest.raises(hs.InvalidInput, match="mask is for attention"):
        InvertibleResidual(ContractiveMLP(3, 4), mask="causal")


def test_certificate_follows_the_number_of_tokens() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    block = InvertibleResidual(ScaledBranch(hs.L2SelfAttention(one, one, one), 0.15))
    assert block.contraction(3).coefficient < 1
    with pytest.raises(hs.DoesNotApply, match="for 1000 token"):
        block.contraction(1000)


def test_masks_that_hide_a_token_from_itself_are_refused() -> None:
    mask = ~torch.eye(3, dtype=torch.bool)
    with pytest.raises(hs.DoesNotApply, match="sees itself"):
        InvertibleResidual(ContractiveL2Attention(4, 2), mask=mask)
    one = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(hs.DoesNotApply, match="sees itself"):
        InvertibleResidual(ScaledBranch(hs.L2SelfAttention(one, one, one, mask=mask), 0.1)).inverse(
            torch.zeros(3, 1).double()
        )


def test_masks_of_single_items_are_refused() -> None:
    masks = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    for mask in (hs.DenseBias(masks), hs.Padding(torch.ones(2, 3, dtype=torch.bool))):
        with pytest.raises(hs.InvalidInput, match="one mask for all items"):
            InvertibleResidual(ContractiveL2Attention(4, 2), mask=mask)


def test_trusted_coefficients_make_conditional_bounds() -> None:
    layer = L2Attention(8, 2).double().eval()
    block = InvertibleResidual(ScaledBranch(layer, 0.5), coefficient=0.5, trust=True)
    x = torch.randn(2, 20, 8, dtype=torch.float64)
    with torch.no_grad():
        found = block.inverse(block(x))
    assert not found.by_theorem
    torch.testing.assert_close(found.x, x, rtol=0, atol=1e-10)


def test_a_trusted_coefficient_that_is_wrong_is_found_out() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    block = InvertibleResidual(Doubling(), coefficient=0.5, trust=True)
    with pytest.raises(hs.DoesNotApply, match="2 times their distance"):
        block.inverse(torch.ones(1, 2, 2))


def test_half_precision_is_computed_in_float32_or_refused() -> None:
    block = InvertibleResidual(ContractiveL2Attention(4, 2, 0.5)).eval()
    y = torch.randn(2, 5, 4).half()
    with torch.no_grad():
        found = block.inverse(y)
        wanted = block.inverse(y.float())
    assert found.x.dtype == torch.float32
    assert torch.equal(found.x, wanted.x)
    with pytest.raises(hs.InvalidInput, match="half precision"):
        block.half().inverse(y)
    with pytest.raises(hs.InvalidInput, match="convert one"):
        block.float().inverse(y.double())


def test_autocast_does_not_touch_the_inverse() -> None:
    block = InvertibleResidual(ContractiveMLP(4, 8, 0.8)).eval()
    y = torch.randn(2, 5, 4)
    with torch.no_grad():
        wanted = block.inverse(y).x
        with torch.autocast("cpu", dtype=torch.float16):
            assert torch.equal(block.inverse(y).x, wanted)


@pytest.mark.parametrize(
    ("y", "reason"),
    [
        (torch.full((3, 2), math.nan), "NaN"),
        (torch.tensor([[1.0, math.inf]]), "inf"),
        (torch.zeros(0, 2), "n, d ≥ 1"),
        (torch.zeros(2), "shape"),
        (torch.zeros(3, 2, dtype=torch.long), "floating"),
    ],
)
def test_bad_tokens_are_refused(y: Tensor, reason: str) -> None:
    with pytest.raises(hs.InvalidInput, match=reason):
        InvertibleResidual(Linear(torch.eye(2) / 2)).inverse(y)


def test_shapes_one_token_no_batch_and_no_items() -> None:
    block = InvertibleResidual(ContractiveL2Attention(4, 2, 0.5)).eval()
    with torch.no_grad():
        assert block.inverse(torch.randn(1, 4)).x.shape == (1, 4)
        assert block.inverse(torch.randn(1, 4)).error_bound.shape == ()
        assert block.inverse(torch.randn(0, 3, 4)).x.shape == (0, 3, 4)


def test_inverse_in_training_is_that_of_evaluation_and_changes_nothing() -> None:
    block = InvertibleResidual(ContractiveL2Attention(4, 2, 0.9)).double().train()
    state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    y = torch.randn(2, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        found = block.inverse(y)
    assert all(module.training for module in block.modules())
    assert all(torch.equal(state[name], tensor) for name, tensor in block.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(block.eval()(found.x), y, rtol=0, atol=1e-11)


def test_solver_reports_divergence_without_nan() -> None:
    grow = solve_fixed_point(
        lambda x, index: 1e200 * x * x + 1,
        torch.full((1, 1), 10.0, dtype=torch.float64),
        contraction=Contraction(1 - 1e-9, by_theorem=False),
        scale=torch.ones(1),
        max_iterations=5,
    )
    assert not bool(grow.converged)
    assert bool(torch.isfinite(grow.x).all())


@pytest.mark.parametrize("activation", list(NONEXPANSIVE_ACTIVATIONS))
def test_activations_are_1_lipschitz(activation: str) -> None:
    x = torch.linspace(-30, 30, 200_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(NONEXPANSIVE_ACTIVATIONS[activation](x).sum(), x)
    assert float(slope.abs().max()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("norm", [2, math.inf])
@pytest.mark.parametrize("training", [True, False])
def test_network_stays_below_its_bound_under_ascent(norm: float, training: bool) -> None:
    """Joint ascent on ‖J‖ over inputs and weights; the bound is asked for after every step."""
    mlp = ContractiveMLP(3, 8, 0.9, norm=norm).double().train(training)
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([x, *mlp.parameters()], 0.05)
    worst = 0.0
    for _ in range(60):
        measured = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(mlp, x, create_graph=True), norm)
        assert float(measured.detach()) <= float(mlp.lipschitz_bound(1, norm)) * (1 + 1e-12)
        worst = max(worst, float(measured.detach()) / float(mlp.lipschitz_bound(1, norm)))
        optimiser.zero_grad()
        (-measured).backward()
        optimiser.step()
    assert worst > 0.8
    assert float(mlp.eval().lipschitz_bound(1, norm)) <= 0.9 * (1 + 1e-12)


@pytest.mark.slow
def test_evidence_of_inversion_holds_on_a_smaller_sample() -> None:
    for case in inversion.cases(batch=2, n=24, width=16, heads=4, steps=20):
        plain, fast = case.found(False), case.found(True)
        assert case.within(plain)
        assert case.within(fast)
        errors = case.errors(True)
        assert errors[24] <= inversion.TARGET
        assert min(fast.iterations) <= max(plain.iterations)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float64, 8.0), (torch.float32, 4.5)])
def test_bounds_hold_where_large_weights_round_the_logits(dtype: torch.dtype, largest: float) -> None:
    """Inverses of the same tokens in two orders, and the inverse in 60 digits; and none is refused."""
    for seed in (*range(8), 55, 81, 89):
        apart, off, _ = inversion.Steep.drawn(seed, largest, dtype).ratios()
        assert apart <= 1
        assert off <= 1


def test_the_true_constant_is_not_called_wrong_where_rounding_moves_the_map() -> None:
    """w = 1e7: evaluations of the branch at points 1e-9 apart differ by more than their distance, by rounding alone."""
    for seed in range(10):
        case = inversion.Steep.drawn(seed, 0.0)
        steep = inversion.Steep(1.02e7, 0.5, (case.x - case.x.sign()) * 1e-7 + case.x.sign())
        block = steep.block()
        with torch.no_grad():
            found = block.inverse(block(steep.x))
        assert found.by_theorem
        assert float((found.x - steep.x).norm()) <= float(found.error_bound) + 1e-6


def test_gradients_through_large_weights_are_not_refused() -> None:
    block = inversion.Steep.drawn(4).block()
    y = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(block.inverse(y).x.sum(), y)
    assert bool(gradient.isfinite().all())


def test_dot_product_iteration_does_not_find_the_input() -> None:
    assert inversion.dot_product_error(0.5, batch=2, n=16, width=16, heads=2) > 1


def test_evidence_shows_no_accepted_refusal() -> None:
    assert all("accepted" not in reason for _, reason in inversion.refusals())
