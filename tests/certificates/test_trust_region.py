"""Lower bounds of quadratics on balls against points of the ball."""

from __future__ import annotations

import pytest
import torch

from howsmooth.certificates.classifier.trust_region import ball_minimum, form_minimum


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("radius", [0.01, 0.7, 5.0])
def test_form_minimum_is_attained_and_never_above(seed: int, radius: float) -> None:
    g = torch.Generator().manual_seed(seed)
    form = torch.randn(5, 5, generator=g, dtype=torch.float64)
    form, slope = form + form.mT, torch.randn(5, generator=g, dtype=torch.float64)
    bound, move, swing = form_minimum(slope, form, -0.3, radius)
    move = move + swing  # on the sphere
    move = move * min(1.0, radius / float(move.norm()))
    whole = form - 0.3 * torch.eye(5, dtype=torch.float64)
    value = float(slope @ move + 0.5 * move @ whole @ move)
    assert bound <= value
    assert bound == pytest.approx(value, rel=2e-3)


@pytest.mark.parametrize("radius", [0.05, 0.5, 3.0])
def test_ball_minimum_with_one_product_is_below_the_exact_one_and_near_it(radius: float) -> None:
    g = torch.Generator().manual_seed(0)
    forms = torch.randn(20, 6, 6, generator=g, dtype=torch.float64)
    forms, slopes = forms + forms.mT, 5 * torch.randn(20, 6, generator=g, dtype=torch.float64)
    units = slopes / slopes.norm(dim=-1, keepdim=True)
    floors = torch.linalg.eigvalsh(forms)[:, 0].clamp_max(0.0)
    bounds = ball_minimum(slopes, (forms @ units[..., None])[..., 0], floors, radius)
    for slope, form, bound in zip(slopes, forms, bounds, strict=True):
        exact, *_ = form_minimum(slope, form, 0.0, radius)
        plain = -radius * float(slope.norm()) + 0.5 * radius**2 * float(torch.linalg.eigvalsh(form)[0].clamp_max(0.0))
        assert plain - 1e-9 <= bound <= exact + 1e-9


def test_a_flat_gradient_leaves_the_curvature() -> None:
    form = torch.diag(torch.tensor([-2.0, 1.0], dtype=torch.float64))
    bound, _, swing = form_minimum(torch.zeros(2, dtype=torch.float64), form, 0.0, 3.0)
    assert bound == pytest.approx(-9.0)
    assert swing.abs().tolist() == pytest.approx([3.0, 0.0])
    zero = torch.zeros(1, 2, dtype=torch.float64)
    assert float(ball_minimum(zero, zero, torch.tensor([-2.0], dtype=torch.float64), 3.0)) == pytest.approx(-9.0)
