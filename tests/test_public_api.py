"""A number or one clear error, everywhere: what the public interface promises about every call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import howsmooth as hs
from evidence import fuzz_api, fuzz_arguments
from howsmooth._util.validation import WrongCall
from howsmooth.nn.invertible.transformer import ActNorm
from howsmooth.sets import Ball

ATTENTION = hs.SelfAttention.random(6, 2)
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda: hs.measure(ATTENTION, X, rtoll=1e-3),
        lambda: hs.measure_heads(ATTENTION, X, rtoll=1e-3),
        lambda: hs.explain(ATTENTION, X, rtoll=1e-3),  # type: ignore[call-arg]
        lambda: hs.token_influence(ATTENTION, X, rtoll=1e-3),  # type: ignore[call-arg]
        lambda: hs.bounds.table(ATTENTION, over=X, rtoll=1e-3),  # type: ignore[call-arg]
        lambda: hs.jacobian(ATTENTION, X, memmory=3),  # type: ignore[call-arg]
        lambda: hs.worst_case(ATTENTION, 4, overr=Ball(1.0)),  # type: ignore[call-arg]
        lambda: hs.growth([1.0, 2.0], [8, 16], pairedd=True),  # type: ignore[call-arg]
        lambda: hs.scan("minilm", rtoll=1e-3),
        lambda: hs.scan("minilm", lenghts=8),
        lambda: hs.measure(ATTENTION, X, nrom=1),
        lambda: hs.measure_heads(ATTENTION, X, nrom=1),
    ],
)
def test_a_misspelt_argument_is_answered_by_the_right_one(call: Callable[[], object]) -> None:
    with pytest.raises(WrongCall, match=r"takes no argument '(\w+)(\w)': did you mean '\w+'\?"):
        call()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: torch.zeros(4, 6).to(torch.float8_e4m3fn),
        lambda: torch.zeros(4, 6, device="meta"),
        lambda: torch.zeros(4, 6).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(1, 6)], layout=torch.jagged),
        lambda: torch.zeros(4, 6, dtype=torch.complex64),
        lambda: torch.zeros(0, 6),
        lambda: [[1.0]],
        lambda: None,
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: hs.measure(ATTENTION, x),
        lambda x: hs.measure(torch.sin, x),
        lambda x: hs.measure_heads(ATTENTION, x),
        lambda x: hs.explain(ATTENTION, x),
        lambda x: hs.token_influence(ATTENTION, x),
        lambda x: hs.jacobian(ATTENTION, x),
        lambda x: hs.worst_case(ATTENTION, over=hs.sets.Ball(1.0), start=x, starts=0, constructions=False, steps=1),
        lambda x: hs.sets.Around(x, 0.1),
    ],
)
def test_tokens_that_are_none_are_one_sentence(call: Callable[[object], object], wrong: Callable[[], object]) -> None:
    with pytest.raises(hs.HowsmoothError) as found:
        call(wrong())
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("wrong", [None, 5, [], torch.ones(2)])
def test_a_model_that_is_none_is_one_sentence(wrong: object) -> None:
    with pytest.raises(hs.InvalidInput, match="model must be a text or a"):
        hs.scan(wrong)  # type: ignore[arg-type]


def test_the_worst_case_of_a_sum_is_known() -> None:
    """σ of x ↦ Σ x is the norm of n·d ones; a function of one number is a map like any other."""
    found = hs.worst_case(lambda x: x.sum(), 3, over=Ball(1.0, width=2), starts=1, steps=2)
    assert found.value == pytest.approx(math.sqrt(6), rel=1e-12)
    assert float(hs.measure(lambda x: x.sum(), torch.ones(3, 2))) == pytest.approx(math.sqrt(6), rel=1e-6)


SQUARE, NAN = torch.eye(6), torch.full((6, 6), math.nan)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hs.sets.Normalised.rms_norm(torch.tensor(1.0)), "gain and shift must be vectors"),
        (lambda: hs.sets.Normalised.layer_norm(torch.ones(6, dtype=torch.complex64)), "gain must be .* real"),
        (lambda: ActNorm(2**64), "ActNorm needs about"),
        (lambda: hs.nn.ContractiveMLP(6, 6, out_width=2**64), "the network needs about"),
        (lambda: hs.nn.L2Attention(2**64, 1), "the layer needs about"),
        (lambda: hs.models.target(lambda: 0, "layer", 0), "open_model must be a OpenModel"),  # type: ignore[arg-type]
        (lambda: hs.ALiBi.standard(10**24), "ALiBi needs about"),
        (lambda: hs.Padding(torch.full((2, 3), math.nan)), "keep holds 6 NaN"),
        (lambda: hs.jacobians.function_jacobian(torch.nn.MultiheadAttention(6, 2), X), "f must take one tensor"),
        (lambda: hs.jacobians.function_jacobian(torch.nn.LazyLinear(3), X), "not initialised"),
        (lambda: hs.jacobians.function_jacobian(ATTENTION, torch.ones(4, 7)), "tokens of width 6"),
        (lambda: hs.SelfAttention(NAN, SQUARE, SQUARE), "query holds 36 NaN"),
        (lambda: hs.SelfAttention(SQUARE, SQUARE, SQUARE, mask=NAN), "mask holds 36 NaN"),
        (
            lambda: hs.L2SelfAttention(torch.full((6, 6), math.inf), SQUARE - 1),
            "value and query weights holds",
        ),
        (lambda: hs.jacobians.MatrixOperator(NAN), "matrix holds 36 NaN"),
        (lambda: hs.meanfield.measure_attention.LogMass(torch.tensor([math.nan, 1.0])), "weights holds 1 NaN"),
        (lambda: hs.meanfield.measure_attention.Past(torch.tensor([math.nan, 1.0])), "positions holds 1 NaN"),
    ],
)
def test_what_cannot_be_computed_with_is_refused_at_the_door(call: Callable[[], object], said: str) -> None:
    with pytest.raises(hs.InvalidInput, match=said):
        call()


@pytest.mark.parametrize("save", [False, True])
def test_a_search_without_a_number_is_an_error(save: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("w") / "w.safetensors" if save else None
    with pytest.raises(hs.NotDifferentiable, match="NaN or infinite"):
        hs.worst_case(lambda x: (x * 0).sqrt(), 3, over=Ball(1.0, width=2), starts=1, steps=2, save=path)


def test_every_public_name_is_called_by_the_fuzzer() -> None:
    """What is not called is a result, an abstract class, an error, or no function at all."""
    called = {name.split(".")[1] for name in fuzz_api.targets()}
    for name in hs.__all__:
        thing = getattr(hs, name)
        if callable(thing) and not (inspect.isclass(thing) and issubclass(thing, BaseException)):
            assert name in called | fuzz_api.RESULTS | fuzz_api.ABSTRACT, name


def test_a_huge_whole_number_is_a_tolerance_like_any_other() -> None:
    assert float(hs.measure(ATTENTION, X, rtol=2**64 - 1)) > 0


def test_a_call_is_drawn_the_same_way_again() -> None:
    assert [str(fuzz_api.draw(i)) for i in range(20)] == [str(fuzz_api.draw(i)) for i in range(20)]
    assert len({str(fuzz_api.draw(i)) for i in range(20)}) > 15


def test_the_fuzzer_finds_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: one function for each promise that it breaks."""

    def bare(x: object) -> None:
        raise AttributeError("inside")

    def noisy(x: object) -> int:
        __import__("warnings").warn("look here", stacklevel=1)
        return 1

    def careless(x: object) -> int:
        torch.set_default_dtype(torch.float64)
        return 1

    def greedy(x: object) -> int:
        torch.rand(1)
        return 1

    def crash(x: object) -> None:
        __import__("os")._exit(7)

    broken: dict[str, Callable[[object], object]] = {
        "bare error": bare,
        "nan": lambda x: [{"a": math.nan}],
        "warning": noisy,
        "state changed": careless,
        "state changed: random": greedy,
        "crash": crash,
    }
    monkeypatch.setattr(fuzz_api.pool, "prepare", lambda: None)
    monkeypatch.setattr(fuzz_api.pool, "ODD", {"None": lambda: None})
    monkeypatch.setattr(fuzz_api.pool, "RIGHT", {"nothing": lambda: None})
    monkeypatch.setattr(fuzz_api.pool, "BY_NAME", {})
    for kind, function in broken.items():
        monkeypatch.setattr(fuzz_api, "targets", lambda function=function: {"a.broken": function})
        found = [one.kind for one in fuzz_api.run(range(3), processes=1) if "(x=" in one.call]
        assert found
        assert all(one.startswith(kind.partition(":")[0]) for one in found), (kind, found)


@pytest.mark.slow
def test_random_calls_give_a_number_or_one_clear_error() -> None:
    """A sample of `evidence/fuzz_api.py`; `make verify` makes thousands."""
    found = fuzz_api.run(range(0, 4000, 50), processes=1)
    assert len(found) == 80
    faults = [f"{one.number}: {one.kind}: {one.call}: {one.said}" for one in found if one.is_fault]
    assert not faults, "\n".join(faults)


NUMBERS = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([0, -1, 10**30, math.nan, math.inf, None, "x", True, 2**64, 1e-320, 1e308]),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(k=NUMBERS, rtol=NUMBERS, seed=NUMBERS, confidence=NUMBERS, memory=NUMBERS, norm=NUMBERS, scale=NUMBERS)
def test_measure_gives_a_number_or_one_clear_error(
    k: object, rtol: object, seed: object, confidence: object, memory: object, norm: object, scale: object
) -> None:
    right = {"k": 1, "rtol": 1e-3, "seed": 0, "confidence": 0.99, "memory": 2**20, "norm": 2}
    wrong = {"k": k, "rtol": rtol, "seed": seed, "confidence": confidence, "memory": memory, "norm": norm}
    x = X * scale if isinstance(scale, float) else X
    for name in right:
        try:
            found = hs.measure(ATTENTION, x, **(right | {name: wrong[name]}))  # type: ignore[arg-type]
        except hs.HowsmoothError:
            continue
        assert float(found.lower) <= float(found.value) <= float(found.upper)


def test_right_arguments_are_right() -> None:
    """Every value of the pool can be made, and right ones are named for the parameters that need one."""
    with pytest.MonkeyPatch.context() as patch, __import__("tempfile").TemporaryDirectory() as folder:
        patch.chdir(folder)
        fuzz_arguments.prepare()
        for name in (*fuzz_arguments.RIGHT, *fuzz_arguments.ODD):
            fuzz_arguments.make(name)
    for names in (*fuzz_arguments.BY_NAME.values(), *fuzz_arguments.SPECIAL.values()):
        assert set(names) <= fuzz_arguments.RIGHT.keys()
    assert set(fuzz_arguments.SPECIAL) <= {
        f"{target}.{name}" for target, f in fuzz_api.targets().items() for name in inspect.signature(f).parameters
    }
