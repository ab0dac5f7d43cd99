"""The search: what it reaches, that its witnesses are true and lie in the set, and how it ends.

The starts of a search on an executor: the same witness for any number of workers, and nothing lost.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.bounds import get
from howsmooth.engines import EngineError
from howsmooth.errors import InvalidInput, NotDifferentiable
from howsmooth.search import Witness, sandwich, worst_case, worst_case_search
from howsmooth.search.search_question import constructions
from howsmooth.sets import Around, Ball, InputSet, Normalised, Sphere
from howsmooth.sets.ellipsoid import Ellipsoid
from howsmooth.testing import dense_jacobian

F64 = torch.float64
EYE = torch.eye(2, dtype=F64)
ONE = torch.ones(1, 1, dtype=F64)
R = 8**0.5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def dense_norm(f: object, x: Tensor, norm: float = 2) -> float:
    dense = dense_jacobian(f, x)  # type: ignore[arg-type]
    return float(torch.linalg.matrix_norm(dense, norm))


def minus_identity(mask: str | None = None) -> hs.SelfAttention:
    return hs.SelfAttention.from_bilinear(-EYE, EYE, mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "n", "least"), [(None, 8, 16.1), (None, 32, 31.9), ("causal", 8, 15.1), ("causal", 32, 27.1)]
)
def test_the_reference_values_for_minus_the_identity_are_reached(mask: str | None, n: int, least: float) -> None:
    witness = worst_case(minus_identity(mask), n, over=hs.sets.Ball(R))
    assert witness.value >= least
    assert witness.value == pytest.approx(dense_norm(minus_identity(mask), witness.x), rel=1e-12)
    assert Ball(R).excess(witness.x) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "n", "least"), [(None, 8, 16.08), (None, 32, 31.9), ("causal", 8, 15.1), ("causal", 32, 27.1)]
)
def test_they_are_reached_by_search_alone(mask: str | None, n: int, least: float) -> None:
    """Without the constructions: the two poles are what the climb itself comes to."""
    witness = worst_case(minus_identity(mask), n, over=hs.sets.Ball(R), constructions=False, starts=32)
    assert witness.value >= least
    assert witness.start.startswith("random")


L2_REFERENCES = {100: 10.095, 200: 12.093, 500: 14.875, 1000: 17.0655}


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(
    "n", [100, pytest.param(200, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.slow)]
)
def test_l2_attention_reaches_its_reference_in_the_infinity_norm(n: int, mask: str | None) -> None:
    f = hs.L2SelfAttention(ONE, ONE, mask=mask)
    witness = worst_case(f, n, norm=math.inf, starts=2 if n == 100 else 0, steps=60)
    assert witness.value >= 0.995 * L2_REFERENCES[n]
    assert witness.value <= float(get("kim2021.lip_inf")(f, n=n))
    if n == 100:
        assert witness.value == pytest.approx(dense_norm(f, witness.x, math.inf), rel=1e-9)


@pytest.mark.slow
def test_l2_attention_reaches_its_reference_at_a_thousand_tokens() -> None:
    f = hs.L2SelfAttention(ONE, ONE)
    witness = worst_case(f, 1000, norm=math.inf, starts=0, steps=30)
    assert witness.value >= 0.995 * L2_REFERENCES[1000]
    assert witness.value <= float(get("kim2021.lip_inf")(f, n=1000))


def sets() -> dict[str, InputSet]:
    layer = Ellipsoid.layer_norm(torch.tensor([0.5, 1.0, 2.0, 1.0]), torch.tensor([0.1, 0.0, 0.2, 0.0]))
    return {
        "ball": Ball(2.0),
        "sphere": Sphere(2.0),
        "ellipsoid": Normalised(layer),
        "surface": Normalised(layer, surface=True),
        "per token": Around(draw(6, 4, seed=1), 0.3),
        "all tokens": Around(draw(6, 4, seed=1), 0.3, per_token=False),
    }


@pytest.mark.parametrize("norm", [2, math.inf])
@pytest.mark.parametrize("name", sets())
def test_witnesses_are_true_lie_in_the_set_and_beat_its_constructions(name: str, norm: float) -> None:
    over = sets()[name]
    f = hs.SelfAttention.random(4, 2, dtype=F64, mask="causal")
    witness = worst_case(f, 6, over=over, norm=norm, starts=4, steps=40)
    assert over.excess(witness.x) < 1e-12
    assert witness.value == pytest.approx(dense_norm(f, witness.x, norm), rel=1e-9)
    for start in constructions(f, over, 6, 4):
        assert witness.value >= dense_norm(f, start.x, norm) * (1 - 1e-9), start.name
    assert witness.history == sorted(witness.history)
    assert witness.history[-1] <= witness.value * (1 + 1e-9)
    assert witness.over == over.describe()
    tokens = over.ellipsoid(4)
    assert tokens is not None
    if norm == 2:
        assert witness.value <= float(get("howsmooth.sqrt_n")(f, n=6, over=tokens))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_search_gains_on_its_constructions(seed: int) -> None:
    """A search that never moved would pass the test before this one."""
    f = hs.SelfAttention.random(8, seed=seed, dtype=F64)
    over = Ball(8**0.5)
    still, climbed = (worst_case(f, 16, over=over, starts=2, steps=steps) for steps in (0, 60))
    assert climbed.value > 1.002 * still.value
    near = Around(draw(16, 8, seed=seed), 0.3)
    centre, climbed = (worst_case(f, over=near, starts=2, steps=steps) for steps in (0, 60))
    assert climbed.value > 1.2 * centre.value


def test_maps_without_curvature_are_equally_rough_everywhere() -> None:
    """A = 0 makes attention linear, and one token has no one else to look at: the norm is known."""
    v = draw(3, 3)
    for f, n in ((hs.SelfAttention.from_bilinear(torch.zeros(3, 3, dtype=F64), v), 5), (hs.SelfAttention.random(3), 1)):
        witness = worst_case(f, n, over=hs.sets.Ball(2.0), starts=2, steps=5)
        assert witness.value == pytest.approx(dense_norm(f.to(F64), torch.zeros(n, 3, dtype=F64)), rel=1e-9)


@pytest.mark.parametrize("head", [0, 1, 2])
def test_one_head_is_searched_as_measure_heads_measures_it(head: int) -> None:
    f = hs.SelfAttention.random(6, 3, dtype=F64, mask="causal")
    witness = worst_case(f, 6, over=hs.sets.Ball(2.0), head=head, starts=2, steps=10)
    assert witness.head == head
    assert witness.value == pytest.approx(float(hs.measure_heads(f, witness.x).value[head]), rel=1e-9)
    best = float(get("howsmooth.two_cluster")(f, n=6, over=hs.sets.Ball(2.0), per_head=True)[head])
    assert witness.value >= best


def test_modules_and_functions_are_searched() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True)
    over = Sphere(2.0, width=4)
    witness = worst_case(layer, 3, over=over, starts=3, steps=20)
    dense = dense_jacobian(layer.double(), witness.x)
    assert witness.value == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-9)
    assert over.excess(witness.x) < 1e-12
    assert all(not p.requires_grad or p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("norm", [2, math.inf])
def test_a_function_with_a_known_worst_point_is_solved(norm: float) -> None:
    """x ↦ x² has the Jacobian 2 diag(x): on the ball 2R, wherever one coordinate has it all."""
    witness = worst_case(torch.square, 3, over=Ball(1.5, width=2), norm=norm, starts=4, steps=60)
    assert witness.value == pytest.approx(3.0, rel=1e-6)


def test_modules_of_the_package_and_of_torch_are_taken() -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    witness = worst_case(module, 5, over=hs.sets.Ball(1.0), starts=1, steps=3)
    assert witness.value == pytest.approx(float(hs.measure(hs.SelfAttention.from_torch(module), witness.x)), rel=1e-9)
    step = hs.GradientStepAttention(EYE, draw(3, 2), step=0.5)
    assert worst_case(step, 2, over=hs.sets.Ball(1.0), starts=1, steps=3).x.shape == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_of_lower_precision_are_searched_in_float64(dtype: torch.dtype) -> None:
    f = hs.SelfAttention.random(4, 2, dtype=dtype)
    witness = worst_case(f, 5, over=hs.sets.Ball(2.0), starts=1, steps=5)
    assert witness.x.dtype == torch.float64
    assert witness.value == pytest.approx(dense_norm(f.in_dtype(F64), witness.x), rel=1e-9)


def test_tokens_that_see_nothing_are_no_trouble() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    f = hs.SelfAttention.random(4, dtype=F64, mask=mask)
    witness = worst_case(f, 4, over=hs.sets.Ball(2.0), starts=2, steps=10)
    assert witness.value == pytest.approx(dense_norm(f, witness.x), rel=1e-9)


def test_the_same_seed_gives_the_same_witness_with_and_without_company(tmp_path: Path) -> None:
    f = hs.SelfAttention.random(6, 2, dtype=F64)
    plain = worst_case(f, 8, over=hs.sets.Ball(2.0), starts=3, steps=15, seed=4)
    seen: list[tuple[int, int, float]] = []
    watched = worst_case(
        f,
        8,
        over=hs.sets.Ball(2.0),
        starts=3,
        steps=15,
        seed=4,
        save=tmp_path / "w",
        progress=lambda *step: seen.append(step),
    )
    assert torch.equal(plain.x, watched.x)
    assert plain.history == watched.history
    assert [(step, of) for step, of, _ in seen] == [(i + 1, 15) for i in range(15)]
    assert [best for *_, best in seen] == watched.history
    assert torch.equal(Witness.load(tmp_path / "w").x, plain.x)
    other = worst_case(f, 8, over=hs.sets.Ball(2.0), starts=3, steps=15, seed=5, constructions=False)
    assert not torch.equal(plain.x, other.x)


def test_a_start_of_ones_own_is_never_lost() -> None:
    f = hs.SelfAttention.random(4, 2, dtype=F64)
    good = worst_case(f, 6, over=hs.sets.Ball(2.0), starts=4, steps=40)
    again = worst_case(f, over=hs.sets.Ball(2.0), start=good.x, starts=0, steps=3, constructions=False)
    assert again.value >= good.value * (1 - 1e-12)
    assert again.start == "given"
    assert not again.measurement.notes
    two = worst_case(f, over=hs.sets.Ball(2.0), start=[0 * good.x, good.x], starts=0, steps=0, constructions=False)
    assert two.start == "given 1"


def test_a_start_outside_the_set_is_brought_in_and_that_is_said() -> None:
    f = hs.SelfAttention.random(4, 2, dtype=F64)
    witness = worst_case(f, over=hs.sets.Ball(1.0), start=5 * torch.ones(3, 4), starts=0, steps=0, constructions=False)
    assert witness.start == "given, brought into the set"
    assert "9 outside the set" in witness.measurement.notes[0]
    assert Ball(1.0).excess(witness.x) < 1e-12


def test_ctrl_c_returns_the_best_so_far(tmp_path: Path) -> None:
    def interrupt(step: int, steps: int, best: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    f = hs.SelfAttention.random(4, 2, dtype=F64)
    witness = worst_case(f, 6, over=hs.sets.Ball(2.0), steps=100, progress=interrupt, save=tmp_path / "w")
    assert witness.stopped == "interrupted"
    assert witness.steps == 5
    assert witness.value == pytest.approx(dense_norm(f, witness.x), rel=1e-9)
    assert Witness.load(tmp_path / "w").value == witness.value


def test_a_budget_of_time_is_kept() -> None:
    f = hs.SelfAttention.random(16, dtype=F64)
    began = time.perf_counter()
    witness = worst_case(f, 32, over=hs.sets.Ball(4.0), steps=10**6, seconds=0.3)
    assert witness.stopped == "seconds"
    assert 0 < witness.steps < 10**6
    assert time.perf_counter() - began < 10


def test_a_search_that_brings_no_more_stops() -> None:
    witness = worst_case(lambda x: 3 * x, 2, over=Ball(1.0, width=2), starts=1, steps=200)
    assert witness.stopped == "settled"
    assert witness.steps < 200
    assert witness.value == pytest.approx(3.0)


@pytest.mark.slow
def test_a_killed_search_has_left_its_best_witness(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    code = f"""
import torch, howsmooth as hs
attention = hs.SelfAttention.random(16, dtype=torch.float64)
hs.worst_case(attention, 32, over=hs.sets.Ball(4.0), steps=10**6, save={str(path)!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        first = _wait_for_another(path, None)
        _wait_for_another(path, first)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = Witness.load(path)
    assert left.stopped == "running"
    assert left.steps > 0
    f = hs.SelfAttention.random(16, dtype=F64)
    assert left.value <= dense_norm(f, left.x) * (1 + 1e-9)
    assert left.value >= 0.9 * dense_norm(f, left.x)
    assert Ball(4.0).excess(left.x) < 1e-12


def _wait_for_another(path: Path, known: float | None) -> float:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if path.exists() and path.stat().st_mtime_ns != known:
            return path.stat().st_mtime_ns
        time.sleep(0.05)
    raise AssertionError("the search has not written its file")


def test_a_disk_that_is_lost_during_the_search_costs_the_file_and_not_the_result(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()

    def lose(step: int, steps: int, best: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    f = hs.SelfAttention.random(4, dtype=F64)
    with pytest.warns(UserWarning, match="not saved, only returned"):
        witness = worst_case(f, 4, over=hs.sets.Ball(1.0), starts=1, steps=3, save=folder / "w", progress=lose)
    assert witness.value == pytest.approx(dense_norm(f, witness.x), rel=1e-9)


def test_a_file_that_cannot_be_written_is_an_error_before_the_search(tmp_path: Path) -> None:
    def never(step: int, steps: int, best: float) -> None:
        raise AssertionError("the search has begun")

    with pytest.raises(InvalidInput, match="cannot write"):
        worst_case(
            minus_identity(), 4, over=hs.sets.Ball(1.0), starts=1, save=tmp_path / "missing" / "w", progress=never
        )


def test_logits_that_are_large_give_right_answers_and_hopeless_ones_an_error() -> None:
    f = minus_identity()
    witness = worst_case(f, 6, over=hs.sets.Ball(1e3), starts=2, steps=20)
    assert witness.value == pytest.approx(dense_norm(f, witness.x), rel=1e-6)
    assert witness.value >= (4 / 2) ** 0.5 * 1e6  # the two poles: √((n−2)/2)·a
    for radius in (1e8, 1e160):
        with pytest.raises(InvalidInput, match="choose a smaller radius"):
            worst_case(f, 6, over=hs.sets.Ball(radius))


def test_far_tokens_of_l2_attention_do_not_climb_rounding_errors() -> None:
    """Tokens whose gradients underflow must stay where they are: their squares have no root to divide by."""
    f = hs.L2SelfAttention(ONE, ONE, mask="causal")
    witness = worst_case(f, 100, starts=3, steps=40)
    assert float(witness.x.abs().max()) < 1e4
    assert witness.value <= float(get("howsmooth.l2_lip_2")(f, n=100))


def test_more_tokens_than_memory_are_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match="GiB of this machine"):
        worst_case(hs.SelfAttention.random(8), 10**10, over=hs.sets.Ball(1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no Lipschitz constant"),
        ({"radius": 1.0}, "takes no argument 'radius'"),
        ({"over": 1.0}, "over"),
        ({"over": Ball(1.0), "norm": 1}, "choose 2 or inf"),
        ({"over": Ball(1.0), "starts": -1}, "starts must be"),
        ({"over": Ball(1.0), "steps": 1.5}, "steps must be"),
        ({"over": Ball(1.0), "seconds": 0}, "seconds must be positive"),
        ({"over": Ball(1.0), "head": 2}, "no head 2"),
        ({"over": Ball(1.0), "start": torch.zeros(3, 5)}, "shape"),
        ({"over": Ball(1.0), "start": torch.full((4, 4), math.nan)}, "NaN"),
        ({"over": Ball(1.0), "starts": 0, "constructions": False}, "nothing to set out from"),
        ({"over": Around(torch.zeros(3, 4), 0.1)}, "3 tokens"),
        ({"over": nn.LayerNorm(5)}, "width 5"),
    ],
)
def test_bad_questions_are_refused_in_one_sentence(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        worst_case(hs.SelfAttention.random(4, 2), 4, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_other_bad_questions_are_refused() -> None:
    f = hs.SelfAttention.random(4, 2)
    for n in (0, -1, 2.0, True):
        with pytest.raises(InvalidInput, match="at least 1"):
            worst_case(f, n, over=hs.sets.Ball(1.0))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="how many tokens"):
        worst_case(f, over=hs.sets.Ball(1.0))
    with pytest.raises(InvalidInput, match="how wide"):
        worst_case(torch.tanh, 3, over=hs.sets.Ball(1.0))
    with pytest.raises(InvalidInput, match="attention map with heads"):
        worst_case(torch.tanh, 3, over=Ball(1.0, width=2), head=0)
    with pytest.raises(NotDifferentiable):
        worst_case(torch.round, 3, over=Ball(1.0, width=2), starts=1, steps=1)
    with pytest.raises(InvalidInput, match="random"):
        worst_case(nn.Dropout(0.5), 30, over=Ball(1.0, width=2), starts=1, steps=1)
    broken = hs.SelfAttention.random(4)
    broken.query_weight[0, 0, 0] = math.nan
    with pytest.raises(InvalidInput, match="query_weight"):
        worst_case(broken, 3, over=hs.sets.Ball(1.0))
    with pytest.raises(InvalidInput, match="3 tokens"):
        worst_case(hs.SelfAttention.random(4, mask=torch.ones(5, 5, dtype=torch.bool)), 3, over=hs.sets.Ball(1.0))


N, STARTS = 5, 3
ASKED: dict[str, Any] = {"over": Ball(1.5), "starts": STARTS, "steps": 12, "constructions": False}


@pytest.fixture
def attention() -> hs.SelfAttention:
    return hs.SelfAttention.random(6, heads=2, seed=3).to(torch.float64)


def searched(attention: hs.SelfAttention, workers: int, **more: Any) -> Witness:
    with ThreadPoolExecutor(workers) as threads:
        return hs.worst_case(attention, N, executor=threads, **ASKED | more)


def test_any_number_of_workers_finds_the_same(attention: hs.SelfAttention) -> None:
    one, three = searched(attention, 1), searched(attention, 3)
    assert torch.equal(one.x, three.x)
    assert (one.value, one.start, one.history) == (three.value, three.start, three.history)


def test_the_witness_is_the_best_of_the_starts_and_lies_in_the_set(attention: hs.SelfAttention) -> None:
    found = searched(attention, 2)
    starts = [hs.worst_case(attention, N, **ASKED | {"starts": 1, "seed": seed}) for seed in range(1)]
    dense = torch.autograd.functional.jacobian(attention, found.x).reshape(found.x.numel(), -1)
    assert found.value == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=2e-3)
    assert float(found.x.norm(dim=-1).max()) <= 1.5 * (1 + 1e-12)
    assert found.value >= (1 - 1e-9) * starts[0].value  # its first start is among these


def test_the_best_is_kept_in_a_file_and_every_start_is_told(attention: hs.SelfAttention, tmp_path: Path) -> None:
    told: list[tuple[int, int, float]] = []
    file = tmp_path / "w.safetensors"
    found = searched(attention, 2, save=file, progress=lambda *now: told.append(now), source={"made": "here"})
    assert [now[:2] for now in told] == [(done, STARTS) for done in range(1, STARTS + 1)]
    assert told[-1][2] == found.value
    kept = Witness.load(file)
    assert (kept.value, kept.stopped, kept.source) == (found.value, found.stopped, {"made": "here"})


def test_a_start_that_fails_is_noted_and_the_others_count(
    attention: hs.SelfAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = worst_case_search.climb

    def climb(item: Any) -> Witness:
        if item[1].name.startswith("random 1"):
            raise ArithmeticError("no way up")
        return usual(item)

    monkeypatch.setattr(worst_case_search, "climb", climb)
    found = searched(attention, 2)
    assert any("random 1" in note and "no way up" in note for note in found.measurement.notes)
    monkeypatch.setattr(worst_case_search, "climb", _nowhere)
    with pytest.raises(EngineError, match="no start could be climbed"):
        searched(attention, 2)


def _nowhere(item: Any) -> Witness:
    raise ArithmeticError("no way up")


def test_ctrl_c_gives_the_best_so_far(attention: hs.SelfAttention) -> None:
    def stop(*now: Any) -> None:
        raise KeyboardInterrupt

    assert searched(attention, 1, progress=stop).stopped == "interrupted"


def test_both_ends_take_an_executor_too(attention: hs.SelfAttention) -> None:
    with ThreadPoolExecutor(2) as threads:
        (cell,) = sandwich(attention, [3], over=[hs.sets.Ball(1.0)], starts=1, steps=4, executor=threads)
    assert cell.upper is not None
    assert 0 < cell.lower <= cell.upper.value
