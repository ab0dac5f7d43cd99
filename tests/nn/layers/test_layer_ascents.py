"""A sample of the joint ascents: bounds hold, and the attentions known to be wrong are caught by the same attack."""

from __future__ import annotations

import pytest
import torch

from evidence.layer_ascents import KINDS, WRONG, Kind, attack, draw_case, rows
from howsmooth import nn as layers
from howsmooth.bounds import l2_bounds

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "mask"),
    [(kind, kind.masks[number % len(kind.masks)]) for number, kind in enumerate(KINDS)],
    ids=lambda part: part.words + f" {part.norm}" if isinstance(part, Kind) else part,
)
def test_no_ascent_passes_the_bound(kind: Kind, mask: str) -> None:
    record = attack(kind, mask, least=16, starts=8, steps=12)
    assert record.maximisations == 16
    assert record.violations == 0, f"passed {record.largest} times: {record.where}"
    assert record.largest > 0.1  # the attack has climbed


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.words)
def test_attention_known_to_be_wrong_passes_its_claim(kind: Kind) -> None:
    assert attack(kind, "none", least=16, starts=8, steps=12).violations > 0


def test_bound_that_is_too_small_is_passed() -> None:
    class Boastful(layers.GradientStepAttention):
        def lipschitz_bound(self, *where: object, **more: object) -> torch.Tensor:
            return torch.tensor(0.95, dtype=torch.float64)

    kind = Kind("too small", lambda d, heads: Boastful(d, heads, context_size=3), None, masks=("none",))
    assert attack(kind, "none", least=8, starts=8, steps=12).violations > 0


def test_every_exported_layer_is_attacked_with_every_mask_it_takes() -> None:
    exported = {name for name in layers.__all__ if name.endswith("Attention")}
    attacked = {kind.words.split(",")[0] for kind in KINDS}
    assert {name for name in exported if issubclass(getattr(layers, name), layers.AttentionLayer)} <= attacked
    for kind in KINDS:
        if len(kind.masks) < 5 and "GradientStep" not in kind.words:
            assert set(kind.masks) == {"none", "padding"}
            assert "LipschitzNorm" in kind.words


def test_case_climbs_the_layer_over_its_bound() -> None:
    case, layer, look = draw_case(KINDS[0], "causal", 3, starts=2)
    free = {name: value[0] for name, value in case.start.items()}
    layer.load_state_dict({name: value for name, value in free.items() if name != "z"})
    bound = layer.lipschitz_bound(6, mask=look.mask) / l2_bounds.average_lip_2(6, "ordered")
    torch.testing.assert_close(case.attention(free)(free["z"]) * bound, layer(free["z"], **look.call)[0])


def test_rows_name_layer_mask_and_norm() -> None:
    quick = [kind for kind in KINDS if kind.words == "GradientStepAttention"]
    ((words, mask, norm, ascents, violations, *_),) = rows(quick, 8, lambda text: None)
    assert (words, mask, norm, violations) == ("GradientStepAttention", "none", "2", 0)
    assert ascents == 25
