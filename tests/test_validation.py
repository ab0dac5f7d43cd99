"""What an argument must be: right values pass as they are, everything else is one sentence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth._util import validation
from howsmooth._util.validation import Count, Positive, Probability, Seed, WrongCall, fits, in_words, validated
from howsmooth.errors import HowsmoothError, InvalidInput

NONSENSE: list[object] = [None, "x", b"x", [], {}, object(), 1 + 2j, torch.ones(2), torch.ones((), device="meta"), int]


@pytest.mark.parametrize("value", [1, 7, np.int64(3), torch.tensor(3)])
def test_counts_come_back_as_whole_numbers(value: object) -> None:
    assert validation.check_count(value, "k") == int(value)  # type: ignore[call-overload]


@pytest.mark.parametrize("value", [*NONSENSE, 0, -1, 1.0, math.nan, True, np.float64(2)], ids=lambda v: repr(v)[:8])
def test_what_is_no_count_is_one_sentence(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^k must be .*at least 1, got .*\.$") as found:
        validation.check_count(value, "k")
    assert "\n" not in str(found.value)


def test_seeds_are_those_that_generators_take() -> None:
    for seed in (0, 2**63 - 1):
        torch.Generator().manual_seed(validation.check_seed(seed) + 2)
    for wrong in (*NONSENSE, -1, 2**63, 10**400, 1.0, True):
        with pytest.raises(InvalidInput, match="below 2⁶³"):
            validation.check_seed(wrong)


@pytest.mark.parametrize("value", [*NONSENSE, 0, 1, math.nan, math.inf, -0.5, 10**400], ids=lambda v: repr(v)[:8])
def test_probabilities_lie_between_zero_and_one(value: object) -> None:
    assert validation.check_fraction(0.99, "confidence") == 0.99
    with pytest.raises(InvalidInput, match="confidence must lie between 0 and 1"):
        validation.check_fraction(value, "confidence")


@pytest.mark.parametrize("value", [*NONSENSE, 0, math.nan, math.inf, -1, 10**400], ids=lambda v: repr(v)[:8])
def test_positive_numbers_are_positive_and_finite(value: object) -> None:
    assert validation.check_positive(np.float32(0.5), "rtol") == 0.5
    with pytest.raises(InvalidInput, match="rtol must be positive and finite"):
        validation.check_positive(value, "rtol")


def test_a_choice_is_one_of_a_few_with_a_hint() -> None:
    assert validation.check_one_of(math.inf, [2, math.inf], "norm") == math.inf
    with pytest.raises(InvalidInput, match="did you mean 'causal'"):
        validation.check_one_of("casual", ["causal", "window"], "mask")
    for wrong in (torch.ones(3), np.ones(3), object(), []):
        with pytest.raises(InvalidInput, match="mask is causal"):
            validation.check_one_of(wrong, ["causal"], "mask")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: [1.0], "not list"),
        (lambda: torch.zeros(0, 2), "holds no numbers"),
        (lambda: torch.zeros(2, 2, dtype=torch.int64), "dtype int64"),
        (lambda: torch.zeros(2, 2, dtype=torch.complex64), "dtype complex64"),
        (lambda: torch.zeros(2, 2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda: torch.zeros(2, 2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "is a sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(1, 2)], layout=torch.jagged), "is a nested"),
        (lambda: torch.zeros(2, 2, 2), "must have 2 dimensions"),
    ],
)
def test_tensors_whose_numbers_cannot_be_read_are_refused(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        validation.check_tensor(wrong(), "x", dims=(2,))


def test_paths_are_texts_or_paths() -> None:
    assert validation.check_path("a", "out") == Path("a")
    for wrong in (None, 5, "", "a\0b", b"x"):
        with pytest.raises(InvalidInput, match="out must be a path"):
            validation.check_path(wrong, "out")


def test_what_cannot_fit_is_refused_with_an_estimate() -> None:
    validation.check_memory(1, "nothing", "nothing")
    with pytest.raises(InvalidInput, match=r"the run needs about 1e\+06 GiB, .*: take less\."):
        validation.check_memory(10**6 * 2**30, "the run", "take less")
    with pytest.raises(InvalidInput, match="GiB"):
        validation.check_memory(10**4000, "the run", "take less")


def test_what_was_given_is_shown_in_a_few_words() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    for value in (10**5000, "x" * 10**6, torch.ones(100, 100), Rude(), nn.Linear(2, 2), lambda: 0, list(range(10**4))):
        assert len(validation.shown(value)) < 80
        assert "\n" not in validation.shown(value)


@validated
def example(
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    k: Count = 1,
    seed: Seed = 0,
    rtol: Positive = 1e-3,
    confidence: Probability = 0.99,
    names: Sequence[str] = (),
    mask: Literal["causal", "none"] | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> str:
    """A function with checked arguments.

    >>> example(torch.sin, torch.ones(2))
    'in'
    """
    return "in"


def test_a_door_lets_in_what_fits() -> None:
    assert example(torch.sin, torch.ones(2)) == "in"
    assert example(nn.Linear(2, 2), x=torch.ones(2), k=np.int64(2), names=["a"], mask="causal", out=Path("a")) == "in"
    assert example.__name__ == "example"
    assert example.__module__ == __name__
    assert "f: " in str(__import__("inspect").signature(example))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"f": 5}, "f must be a function or a module, got 5"),
        ({"x": [1.0]}, "x must be a torch.Tensor, not list"),
        ({"x": torch.ones(2, device="meta")}, "meta device"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"k": "2"}, "k must be a whole number, at least 1, got '2'"),
        ({"seed": 2**64}, "seed must be"),
        ({"rtol": math.nan}, "rtol must be positive"),
        ({"rtol": None}, "rtol must be positive and finite, got None"),
        ({"confidence": 1.5}, "confidence must lie between 0 and 1"),
        ({"names": "abc"}, "names must be a sequence of which each is a text"),
        ({"names": ["a", 5]}, "names must be a sequence"),
        ({"mask": "casual"}, "mask must be 'causal' or 'none' or None"),
        ({"out": Path("a\0b")}, "out must be a path or None"),
    ],
)
def test_a_door_says_what_it_takes(wrong: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"f": torch.sin, "x": torch.ones(2)}
    with pytest.raises(InvalidInput, match=said):
        example(**(given | wrong))


def test_a_wrong_call_is_both_an_error_of_this_package_and_a_type_error() -> None:
    @validated
    def two(first: int, second: int = 0) -> int:
        return first + second

    for kind in (HowsmoothError, ValueError, TypeError, WrongCall):
        with pytest.raises(kind, match="did you mean 'second'"):
            two(1, secnd=2)  # type: ignore[call-arg]
    with pytest.raises(WrongCall, match="missing a required argument: 'first'"):
        two()  # type: ignore[call-arg]
    with pytest.raises(WrongCall, match="too many positional"):
        two(1, 2, 3)  # type: ignore[call-arg]


def test_errors_from_inside_pass_through_a_door() -> None:
    @validated
    def raises(first: int) -> int:
        raise KeyError(first)

    with pytest.raises(KeyError):
        raises(1)


def test_fields_of_records_are_checked() -> None:
    @dataclass(frozen=True)
    class Record:
        count: int
        word: str = "x"

    validation.check_fields(Record(1))
    with pytest.raises(InvalidInput, match="word must be a text, got 5"):
        validation.check_fields(Record(1, 5))  # type: ignore[arg-type]


def test_kinds_are_told_from_annotations() -> None:
    assert fits({"a": 1}, Mapping[str, int])
    assert not fits([1], Mapping[str, int])
    assert fits(torch.ones(2), Iterable[float])
    assert not fits(torch.ones(2), Iterable[int])
    assert not fits(torch.ones(2), Iterable[str])
    assert not fits(torch.ones(()), Iterable[int])
    assert fits((1, "a"), tuple[int, str])
    assert not fits((1,), tuple[int, str])
    assert fits(object(), Any)
    assert not fits(True, int)
    assert not fits(1, bool)
    assert in_words(Mapping[str, int] | None) == "a dictionary or None"
    assert in_words(nn.Module) == "a module of torch"


with warnings.catch_warnings():  # torch says that they are young
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])


@pytest.mark.parametrize(
    "call",
    [
        lambda: hs.certify(NESTED, torch.ones(3, 4)),
        lambda: hs.measure(NESTED, torch.ones(3, 4)),
        lambda: hs.SlidingWindow(NESTED),
        lambda: hs.DenseBias(NESTED),
        lambda: hs.Scan.open(NESTED),
        lambda: hs.SelfAttention.random(4, seed=NESTED),
        lambda: hs.scan("random:gpt2", "words", lengths=NESTED),
        lambda: hs.bounds.table(hs.SelfAttention.random(4), over=hs.sets.Ball(NESTED)),
    ],
)
def test_a_nested_tensor_is_named_wherever_it_is_given(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput, match="nested tensor"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: hs.Scan.open("\ud800"),
        lambda: hs.scan("random:gpt2[layers=1,width=8,heads=2]", "some words", lengths=4, out="\ud800"),
        lambda: hs.scans.merge(["\ud800"], "all.sqlite"),
        lambda: hs.scans.merge(["one.sqlite"], "\ud800"),
    ],
)
def test_half_a_letter_is_in_no_name_of_a_file(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput, match=r"must be .*path.*, got .*ud800"):
        call()


AROUND, BALL = hs.sets.Around(torch.eye(6, 8).double(), 0.01), hs.sets.Ball(1.0)
CALLS: dict[str, Callable[[hs.SelfAttention, torch.Tensor], object]] = {
    "measure": lambda a, x: hs.measure(a, x),
    "measure_heads": lambda a, x: hs.measure_heads(a, x),
    "explain": lambda a, x: hs.explain(a, x),
    "certify": lambda a, x: hs.certify(a, AROUND),
    "worst_case": lambda a, x: hs.worst_case(a, 4, over=BALL, starts=1, steps=2),
    "table": lambda a, x: hs.bounds.table(a, over=x),
    "scan": lambda a, x: hs.scan("random:gpt2[layers=1,width=8,heads=2]", "some words to read", lengths=4, windows=1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_validated_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    validations: list[str] = []

    def outside(frame: FrameType) -> bool:
        inside = is_inside(frame)
        if not inside:
            validations.append(name)
        return inside

    is_inside = validation.is_inside
    a, x = hs.SelfAttention.random(8, 2).double(), torch.randn(6, 8, dtype=torch.float64)
    monkeypatch.setattr(validation, "is_inside", outside)
    CALLS[name](a, x)
    assert validations == [name]
    CALLS[name](a, x)
    assert validations == [name, name]  # a negative control: the counter counts every call


@pytest.mark.parametrize(("package", "checked"), [("cli", True), ("papers", True), ("norms", False), ("scans", False)])
def test_the_command_line_and_the_experiments_are_validated_like_everybody_else(package: str, checked: bool) -> None:
    """A call is judged by the file that it stands in."""

    @validated
    def doubled(number: float) -> float:
        return 2 * number

    code = compile("doubled('x')", str(Path(hs.__path__[0], package, "some_module.py")), "exec")
    with pytest.raises(InvalidInput, match="number must be a number") if checked else nullcontext():
        exec(code, {"doubled": doubled})
