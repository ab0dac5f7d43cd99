"""A proof on a ball evaluates the attention weights of every head once, and proves every head at the input once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.attention import AttentionMap
from howsmooth.attention.masks import Maps
from howsmooth.bounds import three_paths
from howsmooth.bounds.three_paths import PathsAt
from howsmooth.certificates.ball import on_ball
from howsmooth.certificates.point import enclosure
from howsmooth.certificates.point.head_gram import HeadsAt

OPTIONS: dict[str, dict[str, object]] = {
    "one head": {"heads": 1},
    "heads": {"heads": 3},
    "rotary": {"heads": 2, "rotary": hs.Rotary.standard(6)},
    "soft-cap": {"heads": 2, "softcap": 3.0},
    "normalised queries": {"heads": 2, "qk_norm": "rms"},
}


def drawn(options: dict[str, object]) -> AttentionMap:
    return hs.SelfAttention.random(12, **options).in_dtype(torch.float64)  # type: ignore[arg-type]


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the weights of every head were evaluated, by head."""
    found: Counter[int] = Counter()
    evaluate = three_paths._weights

    def counted(attention: AttentionMap, query: Tensor, key: Tensor, maps: Maps) -> tuple[Tensor, ...]:
        found.update(maps.heads.tolist())
        return evaluate(attention, query, key, maps)

    monkeypatch.setattr(three_paths, "_weights", counted)
    return found


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_weights_are_evaluated_once_on_a_ball(kind: str, per_head: bool, evaluations: Counter[int]) -> None:
    attention, x = drawn(OPTIONS[kind]), torch.randn(5, 12, dtype=torch.float64)
    hs.certify(attention, hs.sets.Around(x, 0.01), per_head=per_head)
    assert evaluations == dict.fromkeys(range(attention.heads), 1)


def test_paths_without_a_store_are_counted_more_than_once(
    evaluations: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, x = drawn(OPTIONS["heads"]), torch.randn(5, 12, dtype=torch.float64)
    stored = hs.certify(attention, hs.sets.Around(x, 0.01))
    evaluations.clear()
    monkeypatch.setattr(PathsAt, "weights", PathsAt._evaluate)
    again = hs.certify(attention, hs.sets.Around(x, 0.01))
    assert min(evaluations[head] for head in range(3)) > 1
    assert (again.lower, again.upper) == (stored.lower, stored.upper)


def test_heads_beyond_a_stacked_block_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = drawn(OPTIONS["heads"]), torch.randn(5, 12, dtype=torch.float64)
    proofs, prove = [], enclosure.enclose_heads

    def counted(at: HeadsAt) -> list[enclosure.Enclosure]:
        proofs.append(prove(at))
        return proofs[-1]

    for module in (enclosure, on_ball):
        monkeypatch.setattr(module, "enclose_heads", counted)
    monkeypatch.setattr(enclosure, "BLOCK", 4)
    monkeypatch.setattr(enclosure, "STACKED", 4)
    hs.certify(attention, hs.sets.Around(x, 0.01))
    assert len(proofs) == 1
    on_ball.enclose_block(HeadsAt(attention, x))
    assert len(proofs) == 2
