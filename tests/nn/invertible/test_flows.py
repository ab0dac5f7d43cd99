"""ActNorm, invertible transformers and their flows: inverses, determinants, densities that integrate to one."""

from __future__ import annotations

import math

import normflows
import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence import sequence_flows
from howsmooth.nn import ContractiveL2Attention, InvertibleResidual
from howsmooth.nn.invertible.flows import InvertibleFlow, sequence_flow
from howsmooth.nn.invertible.transformer import ActNorm, InvertibleTransformer
from howsmooth.testing import dense_jacobian


def spread(model: nn.Module) -> nn.Module:
    """Every parameter moved off its start, so that no part is the identity."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def models() -> dict[str, InvertibleTransformer]:
    torch.manual_seed(0)
    return {
        "causal": InvertibleTransformer(4, heads=2, depth=2, mask="causal"),
        "no mask": InvertibleTransformer(4, heads=2, depth=1),
        "window": InvertibleTransformer(4, heads=1, depth=1, mask=hs.SlidingWindow(2)),
        "inf norm": InvertibleTransformer(4, heads=1, depth=1, mask="causal", norm=math.inf),
        "wide attention": InvertibleTransformer(4, heads=2, depth=1, mask="causal", attention_width=6),
        "positions": InvertibleTransformer(4, depth=1, mask="causal", tokens=5),
    }


def dense_log_det(model: nn.Module, x: Tensor) -> Tensor:
    def one(item: Tensor) -> Tensor:
        jacobian = dense_jacobian(lambda t: model(t[None])[0], item)
        return torch.linalg.slogdet(jacobian).logabsdet

    return torch.stack([one(item) for item in x])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(models()))
def test_transformer_inverse_is_within_its_bound(name: str) -> None:
    model = spread(models()[name])
    x = 2 * torch.randn(3, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        found = model.inverse(model(x))
    assert found.by_theorem
    assert bool((found.contraction.size(found.x - x) <= found.error_bound).all())
    assert float(found.error_bound.max()) < 1e-7
    assert float((found.x - x).abs().max()) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", list(models()))
def test_transformer_log_determinant_is_the_dense_one(name: str) -> None:
    model = spread(models()[name])
    x = 2 * torch.randn(3, 5, 4, dtype=torch.float64)
    y, found = model.forward_and_log_det(x)
    assert found.exact
    assert ("dense" in found.method) == (name == "no mask")
    torch.testing.assert_close(y, model(x))
    torch.testing.assert_close(found.value.detach(), dense_log_det(model, x), rtol=0, atol=1e-9)


class Shrink(nn.Module):
    """f(x) = −0.9·x: inverses of x + f(x) amplify errors by the full 1/(1−c)."""

    def forward(self, x: Tensor) -> Tensor:
        return -0.9 * x

    def lipschitz_bound(self, n: int) -> float:
        return 0.9


def test_transformer_error_bound_composes_over_the_layers() -> None:
    """With a rough tolerance the error is real, and the bound of the last layer alone is passed."""
    model = models()["causal"].double().eval()
    norm = ActNorm(4)
    with torch.no_grad():
        norm.log_scale.fill_(-1.0)
    model.layers = nn.ModuleList([InvertibleResidual(Shrink()), norm, InvertibleResidual(Shrink())]).double().eval()
    x = torch.randn(20, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        found = model.inverse(model(x), tolerance=1e-3, accelerate=False)
        last = model.layers[0].inverse(model.layers[0](x), tolerance=1e-3, accelerate=False)  # type: ignore[operator]
    errors = found.contraction.size(found.x - x)
    assert bool((errors <= found.error_bound).all())
    assert bool((errors > 1.5 * last.error_bound).all())
    assert float((errors / found.error_bound).min()) > 0.9


@pytest.mark.slow
def test_transformer_takes_one_sequence_and_any_length() -> None:
    model = spread(models()["causal"])
    for n in (1, 2, 9):
        x = torch.randn(n, 4, dtype=torch.float64)
        with torch.no_grad():
            found = model.inverse(model(x))
            assert found.x.shape == x.shape
            assert found.error_bound.shape == model.log_det(x).value.shape == ()
        torch.testing.assert_close(found.x, x, rtol=0, atol=1e-9)


def test_transformer_without_mask_estimates_long_sequences_with_an_error_bar() -> None:
    model = spread(models()["no mask"])
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    with torch.no_grad():
        found = model.log_det(x, method="series", samples=200, generator=torch.Generator().manual_seed(0))
    assert not found.exact
    assert float((found.value - dense_log_det(model, x)).abs()) <= float(found.error_bar(0.9999))


def test_transformers_refuse_what_cannot_contract() -> None:
    for c in (0.0, 1.0, math.nan):
        with pytest.raises(hs.InvalidInput, match="between 0 and 1"):
            InvertibleTransformer(4, coefficient=c)
    with pytest.raises(hs.InvalidInput, match="depth"):
        InvertibleTransformer(4, depth=0)
    hidden = InvertibleTransformer(4, depth=1, mask=~torch.eye(3, dtype=torch.bool)).eval()
    with pytest.raises(hs.HowsmoothError, match="itself"):
        hidden(torch.randn(3, 4))


@pytest.mark.parametrize("positions", [None, 5])
def test_actnorm_starts_from_the_first_batch_and_inverts(positions: int | None) -> None:
    norm = ActNorm(3, positions).double().train()
    x = 5 + torch.tensor([1.0, 10.0, 0.1]) * torch.randn(200, 5, 3, dtype=torch.float64)
    y = norm(x).detach()
    axes = (0, 1) if positions is None else 0
    torch.testing.assert_close(y.mean(axes), torch.zeros_like(y.mean(axes)), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.std(axes, correction=0), torch.ones_like(y.mean(axes)), rtol=1e-12, atol=0)
    again = norm(2 * x).detach()
    assert float((again - y).abs().max()) > 1  # only the first batch counts
    torch.testing.assert_close(norm.inverse(y).detach(), x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.log_det(x).value[:2].detach(), dense_log_det(norm, x[:2]), rtol=1e-12, atol=0)


def test_actnorm_survives_constant_features_and_refuses_bad_batches() -> None:
    norm = ActNorm(2)
    y = norm(torch.full((4, 3, 2), 7.0))
    assert torch.equal(y, torch.zeros_like(y))
    assert float(norm.log_det(y).value.detach().abs().max()) == 0
    fresh = ActNorm(2)
    with pytest.raises(hs.InvalidInput, match="NaN"):
        fresh(torch.full((1, 2, 2), math.nan))
    assert not bool(fresh.initialised)
    with pytest.raises(hs.InvalidInput, match="shape"):
        ActNorm(2, 3)(torch.zeros(1, 4, 2))
    evaluated = ActNorm(2).eval()
    x = torch.randn(1, 2, 2)
    assert torch.equal(evaluated(x), x)


def test_actnorm_start_is_kept_in_a_state_dict() -> None:
    norm = ActNorm(2)
    norm(torch.randn(10, 3, 2))
    loaded = ActNorm(2)
    loaded.load_state_dict(norm.state_dict())
    x = 3 * torch.randn(10, 3, 2)
    assert torch.equal(loaded(x), norm(x))


@pytest.mark.parametrize(("n", "width", "mask"), [(2, 1, "causal"), (2, 1, None), (1, 2, "causal")])
@pytest.mark.slow
def test_density_in_the_plane_integrates_to_one(n: int, width: int, mask: str | None) -> None:
    torch.manual_seed(0)
    flow = sequence_flow(InvertibleTransformer(width, depth=2, mask=mask, tokens=n), n, width)
    flow = spread(flow)
    assert abs(sequence_flows.integral(flow, n, width, reach=16, points=400) - 1) < 1e-3


def test_density_without_the_determinant_does_not_integrate_to_one() -> None:
    torch.manual_seed(0)
    flow = spread(sequence_flow(InvertibleTransformer(1, depth=2, mask="causal", tokens=2), 2, 1))

    class Forgetful(nn.Module):
        def log_prob(self, x: Tensor) -> Tensor:
            return flow.q0.log_prob(flow.inverse(x))

    mass = sequence_flows.integral(Forgetful(), 2, 1, reach=16, points=200)  # type: ignore[arg-type]
    assert abs(mass - 1) > 0.1


@pytest.mark.slow
def test_density_of_sequences_integrates_to_one() -> None:
    torch.manual_seed(0)
    flow = spread(sequence_flow(InvertibleTransformer(1, depth=1, mask="causal", tokens=3), 3, 1))
    assert abs(sequence_flows.integral(flow, 3, 1, reach=17, points=90) - 1) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("data", [sequence_flows.DATA[0], sequence_flows.DATA[2]], ids=lambda data: data.name)
def test_trained_flow_beats_a_gaussian_on_held_out_data(data: sequence_flows.Data) -> None:
    flow, train, test = sequence_flows.trained(data, steps=40, depth=2)
    n, width = train.shape[1:]
    with torch.no_grad():
        found = float(flow.log_prob(test).mean())
        assert float((flow.forward(flow.inverse(test[:50])) - test[:50]).abs().max()) < 1e-9
    assert found > sequence_flows.gaussian_log_likelihood(train, test)
    assert abs(sequence_flows.integral(flow, n, width, data.reach, 300) - 1) < 1e-3


def test_samples_have_the_density_they_are_said_to_have() -> None:
    """log q of a sample from `sample` is `log_prob` there: forward and inverse determinants agree."""
    torch.manual_seed(0)
    flow = spread(sequence_flow(InvertibleTransformer(2, depth=1, mask="causal"), 3, 2))
    with torch.no_grad():
        x, log_q = flow.sample(20)
        torch.testing.assert_close(flow.log_prob(x), log_q, rtol=0, atol=1e-9)


def test_flow_turns_round_with_normflows_reverse() -> None:
    flow = InvertibleFlow(spread(InvertibleTransformer(2, depth=1, mask="causal")))
    z = torch.randn(4, 3, 2, dtype=torch.float64)
    with torch.no_grad():
        x, log_det = normflows.flows.Reverse(flow).forward(z)
        back, other = normflows.flows.Reverse(flow).inverse(x)
    torch.testing.assert_close(back, z, rtol=0, atol=1e-9)
    torch.testing.assert_close(log_det, -other, rtol=0, atol=1e-9)


def test_single_residual_block_is_a_flow_too() -> None:
    flow = InvertibleFlow(InvertibleResidual(ContractiveL2Attention(2, 1, 0.9), mask="causal").double().eval())
    x = torch.randn(4, 3, 2, dtype=torch.float64)
    with torch.no_grad():
        z, log_det = flow.inverse(x)
        torch.testing.assert_close(flow.forward(z)[0], x, rtol=0, atol=1e-9)
    torch.testing.assert_close(log_det, dense_log_det(flow.module, x), rtol=0, atol=1e-9)


def test_gradients_reach_every_parameter_through_the_likelihood_and_through_samples() -> None:
    torch.manual_seed(0)
    flow = sequence_flow(InvertibleTransformer(2, depth=1, mask="causal"), 3, 2).double().train()
    (-flow.log_prob(torch.randn(5, 3, 2, dtype=torch.float64)).mean()).backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in flow.parameters())
    flow.zero_grad()
    flow.eval()(torch.randn(5, 3, 2, dtype=torch.float64)).square().sum().backward()
    assert all(p.grad is not None for p in flow.flows.parameters())


def test_what_is_no_flow_is_refused() -> None:
    with pytest.raises(hs.InvalidInput, match="inverse"):
        InvertibleFlow(nn.Linear(2, 2))
    with pytest.raises(hs.InvalidInput, match="n must be at least 1"):
        sequence_flow(InvertibleTransformer(2), 0, 2)
