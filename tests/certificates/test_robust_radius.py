"""Proved radii of classifiers: no attack gets inside, planted counter-examples are met, broken proofs are caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import howsmooth as hs
from evidence.certificates import network
from howsmooth.certificates.classifier.cls_token import Functionals
from howsmooth.certificates.classifier.relu_relaxation import HiddenBounds
from howsmooth.certificates.classifier.robust_radius import BallMargins, ball_minimum, form_minimum
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.search.attacks import margins, minimal_norm_attack, projected_attack

WIDTH, SIDE, HIDDEN, CLASSES, HEADS = 8, 2, 12, 3, 2


def tensors(seed: int, steep: float = 1.0) -> dict[str, Tensor]:
    """A random network on images of 4 × 4 pixels; ``steep`` multiplies the queries."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64) / shape[-1] ** 0.5

    layer = "transformer.layers.0."
    names = {
        "cls_token": draw(1, 1, WIDTH),
        "pos_embedding": draw(1, 5, WIDTH),
        "to_patch_embedding.1.weight": 3 * draw(WIDTH, SIDE**2),
        "to_patch_embedding.1.bias": draw(WIDTH),
        f"{layer}0.fn.fn.to_q.weight": steep * draw(2 * WIDTH, WIDTH),
        f"{layer}0.fn.fn.to_k.weight": draw(2 * WIDTH, WIDTH),
        f"{layer}0.fn.fn.to_v.weight": draw(2 * WIDTH, WIDTH),
        f"{layer}0.fn.fn.to_out.0.weight": draw(WIDTH, 2 * WIDTH),
        f"{layer}0.fn.fn.to_out.0.bias": draw(WIDTH),
        f"{layer}1.fn.fn.net.0.weight": 2 * draw(HIDDEN, WIDTH),
        f"{layer}1.fn.fn.net.0.bias": draw(HIDDEN),
        f"{layer}1.fn.fn.net.3.weight": 2 * draw(WIDTH, HIDDEN),
        f"{layer}1.fn.fn.net.3.bias": draw(WIDTH),
        "mlp_head.1.weight": draw(CLASSES, WIDTH),
        "mlp_head.1.bias": draw(CLASSES),
    }
    for norm in (f"{layer}0.fn.norm", f"{layer}1.fn.norm", "mlp_head.0"):
        names |= {f"{norm}.weight": 1 + 0.2 * draw(WIDTH), f"{norm}.bias": draw(WIDTH)}
    return names


def networks(count: int, steep: float = 1.0) -> list[tuple[hs.PatchTransformer, Tensor, int]]:
    """Random networks, an image for each, and its class."""
    found = []
    for seed in range(count):
        net = hs.PatchTransformer(tensors(seed, steep), HEADS, mean=0.1, deviation=0.5)
        image = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found.append((net, image, int(net(image).argmax())))
    return found


def attacked(net: hs.PatchTransformer, image: Tensor, label: int) -> float:
    return float(minimal_norm_attack(net, image[None], torch.tensor([label]), steps=80).distance)


def shares(steep: float, count: int = 5) -> list[float]:
    """Proved radius over the radius of the attack."""
    return [hs.certify(net, x, label).radius / attacked(net, x, label) for net, x, label in networks(count, steep)]


def test_folded_network_equals_the_network() -> None:
    for net, image, _ in networks(3):
        folded = net.folded()
        torch.testing.assert_close(folded(net.patches(image)), net(image), rtol=1e-12, atol=1e-12)
        assert folded.noise(net.patches(image), 0.1) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("steep", [0.1, 1.0, 4.0])
def test_no_attack_gets_inside_a_proved_radius(steep: float) -> None:
    found = shares(steep)
    assert max(found) <= 1
    assert min(found) > 0.05


@pytest.mark.slow
def test_projected_gradient_inside_the_radius_keeps_the_class() -> None:
    for net, image, label in networks(4, steep=2.0):
        radius = hs.certify(net, image, label).radius
        inside = projected_attack(net, image[None], torch.tensor([label]), radius)
        assert float(inside.margin) > 0
        assert float((inside.point - image).norm()) <= radius * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [1, torch.inf])
def test_vertices_of_other_balls_keep_the_class(norm: float) -> None:
    """Margins are nearly linear, so the worst is near a vertex: the steepest ones and random ones are tried."""
    closest = torch.inf
    for net, image, label in networks(4, steep=2.0):
        radius = hs.certify(net, image, label, norm=norm).radius
        assert radius > 0
        here = image.clone().requires_grad_()
        (slope,) = torch.autograd.grad(margins(net(here[None]), torch.tensor([label]))[0], here)
        if norm == 1:
            moves = torch.cat([torch.eye(16), -torch.eye(16)]).double().reshape(-1, 4, 4)
        else:
            moves = torch.cat([-slope.sign()[None], torch.randint(0, 2, (200, 4, 4)).double() * 2 - 1])
        labels = torch.full((len(moves),), label)
        assert float(margins(net(image + radius * moves), labels).min()) > 0
        for scale in (2, 4, 8, 16, 32, 64):  # the same moves do change it further out
            if float(margins(net(image + scale * radius * moves), labels).min()) <= 0:
                closest = min(closest, scale)
                break
    assert closest <= 8


def test_an_unknown_norm_is_refused() -> None:
    ((net, image, label),) = networks(1)
    with pytest.raises(InvalidInput, match="norm is 2, 1, inf"):
        hs.certify(net, image, label, norm=3)


def linear(kink: bool) -> hs.PatchTransformer:
    """Margin 1 − z, or 1 − 10·relu(z − ½), with z the first pixel of a patch whose weight is one half: known radii."""
    weights = {name: torch.zeros_like(t) for name, t in tensors(0).items()}
    layer = "transformer.layers.0."
    for norm in (f"{layer}0.fn.norm", f"{layer}1.fn.norm", "mlp_head.0"):
        weights[f"{norm}.weight"] += 1
    plus = torch.zeros(WIDTH, dtype=torch.float64)
    plus[0], plus[1] = 1.0, -1.0  # of mean zero: the norms leave it
    weights["pos_embedding"][0, 1] = 20 * torch.tensor([0, 0, 1.0, -1, 0, 0, 0, 0])
    weights["cls_token"][0, 0] = torch.tensor([0, 0, 1.0, -1, 0, 0, 0, 0])
    weights["to_patch_embedding.1.weight"][:, 0] = plus
    weights[f"{layer}0.fn.fn.to_q.weight"][:2, 2:4] = torch.eye(2, dtype=torch.float64)
    weights[f"{layer}0.fn.fn.to_k.weight"][:2, 2:4] = 50 * torch.eye(2, dtype=torch.float64)
    weights[f"{layer}0.fn.fn.to_v.weight"][:2, :2] = torch.eye(2, dtype=torch.float64)
    weights[f"{layer}0.fn.fn.to_out.0.weight"][:2, :2] = torch.eye(2, dtype=torch.float64)
    half = plus / 2
    if kink:
        weights[f"{layer}1.fn.fn.net.0.weight"][0] = half
        weights[f"{layer}1.fn.fn.net.0.bias"][0] = -0.5
        weights[f"{layer}1.fn.fn.net.3.weight"][:, 0] = 10 * torch.tensor([0, 0, 0, 0, 0, 0, 1.0, -1])
        half = torch.tensor([0, 0, 0, 0, 0, 0, 0.5, -0.5])
    weights["mlp_head.1.weight"][1] = half
    weights["mlp_head.1.bias"][0], weights["mlp_head.1.bias"][2] = 1.0, -9.0
    return hs.PatchTransformer(weights, HEADS)


@pytest.mark.parametrize(("kink", "true"), [(False, 1.0), (True, 0.6)])
def test_a_planted_counter_example_is_met_and_not_passed(kink: bool, true: float) -> None:
    net, image = linear(kink), torch.zeros(4, 4, dtype=torch.float64)
    radius = hs.certify(net, image, 0).radius
    assert true * 0.99 <= radius <= true
    outside = image.clone()
    outside[0, 0] = true * 1.001
    assert int(net(outside).argmax()) == 1


@pytest.mark.slow
def test_a_dropped_remainder_and_curvature_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    none = torch.zeros(1, dtype=torch.float64)
    monkeypatch.setattr(Functionals, "remainder", lambda self, radius: none.expand(len(self.directions)))
    monkeypatch.setattr(Functionals, "curvature", property(lambda self: (none.expand(len(self.directions)),) * 2))
    assert max(shares(4.0, 12)) > 1


def test_unstable_neurons_taken_as_stable_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BallMargins._hidden

    def stable(self: BallMargins, radius: float) -> HiddenBounds:
        box = real(self, radius)
        on = box.start > 0
        return HiddenBounds(
            box.start,
            box.slope,
            torch.where(on, box.lower.clamp_min(0.0), box.lower),
            torch.where(on, box.upper, box.upper.clamp_max(0.0)),
            box.rest,
            box.reach,
        )

    monkeypatch.setattr(BallMargins, "_hidden", stable)
    net, image = linear(kink=True), torch.zeros(4, 4, dtype=torch.float64)
    assert hs.certify(net, image, 0).radius > 0.61


def test_a_label_that_is_not_the_class_has_radius_zero_and_says_so() -> None:
    ((net, image, label),) = networks(1)
    proof = hs.certify(net, image, (label + 1) % CLASSES)
    assert (proof.radius, proof.predicted) == (0.0, label)
    assert f"is {label}" in proof.notes[0]


def test_what_has_no_certificate_is_named() -> None:
    ((net, image, _),) = networks(1)
    with pytest.raises(UnsupportedModel, match=r"transformer\.layers\.1\.x has no certificate"):
        hs.PatchTransformer(tensors(0) | {"transformer.layers.1.x": torch.ones(1)}, HEADS)
    with pytest.raises(UnsupportedModel, match=r"mlp_head\.1\.bias is missing"):
        hs.PatchTransformer({k: v for k, v in tensors(0).items() if k != "mlp_head.1.bias"}, HEADS)
    with pytest.raises(InvalidInput, match="one of 3 classes"):
        hs.certify(net, image, 7)
    with pytest.raises(InvalidInput, match="4 × 4"):
        hs.certify(net, image[:3], 0)
    with pytest.raises(InvalidInput, match="label"):
        hs.certify(net, image)
    with pytest.raises(UnsupportedModel, match="gives 4 tokens of 2 numbers: put a classifier behind it"):
        hs.certify(torch.nn.Linear(4, 2), image, 0)
    with pytest.raises(InvalidInput, match="takes no argument"):
        hs.certify(net, image, 0, radius=0.1)  # type: ignore[call-overload]


def test_a_file_that_does_not_say_its_heads_needs_them(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file(tensors(0), path)
    with pytest.raises(InvalidInput, match="how many heads"):
        hs.PatchTransformer.open(path)
    with pytest.raises(InvalidInput, match="normalised"):
        hs.PatchTransformer.open(path, heads=2)
    net = hs.PatchTransformer.open(path, heads=2, mean=0.1, deviation=0.5)
    image = torch.rand(4, 4, dtype=torch.float64)
    torch.testing.assert_close(net(image), hs.PatchTransformer(tensors(0), 2, 0.1, 0.5)(image))


@pytest.mark.slow
def test_deept_network_is_certified_beyond_its_published_radii(shared_dir: Path) -> None:
    images = network(shared_dir, count=12, steps=10)
    assert all(image.margin > 0 and image.radius < image.attacked for image in images)
    assert sum(image.radius for image in images) / len(images) > 0.4


def test_margins_are_to_the_nearest_other_class() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 9.0]])
    assert margins(logits, torch.tensor([0, 1])).tolist() == [1.0, -4.0]


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
