"""Checks of arguments: a value that does not fit is refused in one sentence.

Every check returns the value it was given, in the type the code behind it works with, or raises `InvalidInput` with the
name of the argument, the values it takes and the one it got. `validated` does the same for a call, by its annotations:
numbers, paths and arrays are judged here, because a number of numpy is one and a tensor is a sequence of numbers;
`beartype` judges everything else.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, update_wrapper
from pathlib import Path
from types import FrameType, FunctionType
from typing import Annotated, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from howsmooth._util.annotations import alternatives, field_hints, fits, hints, in_words, plain_number, whole_number
from howsmooth._util.common import first_line
from howsmooth.errors import InvalidInput

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SEEDS = 2**63
"""Generators of torch take seeds below 2⁶⁴; half of them leaves room for those that are derived from one by adding."""
_SHOWN = 60
_INSIDE = str(Path(__file__).parents[1]) + os.sep
_ENTRANCES = tuple(_INSIDE + name + os.sep for name in ("cli", "papers"))


class WrongCall(InvalidInput, TypeError):
    """A call with an argument too many, too few or unknown; Python's own error for it is a TypeError."""


def check_count(value: object, name: str, least: int = 1, most: int | None = None) -> int:
    """A whole number within a range.

    >>> check_count(2.5, "k")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: k must be a whole number, at least 1, got 2.5.
    """
    number = whole_number(value)
    if number is None or number < least or (most is not None and number > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        kind = "a whole number, " if number is None else ""
        raise InvalidInput(f"{name} must be {kind}{limit}, got {shown(value)}.")
    return number


def check_seed(value: object, name: str = "seed") -> int:
    """A seed of random numbers."""
    number = whole_number(value)
    if number is None or not 0 <= number < _SEEDS:
        raise InvalidInput(f"{name} must be a whole number, at least 0 and below 2⁶³, got {shown(value)}.")
    return number


def check_number(value: object, name: str, least: float = -math.inf, below: float = math.inf) -> float:
    """A finite number, at least ``least`` and below ``below``."""
    number = plain_number(value)
    if number is None or not math.isfinite(number) or not least <= number < below:
        limits = [f"at least {least:g}"] * (least > -math.inf) + [f"below {below:g}"] * (below < math.inf)
        limit = f", {' and '.join(limits)}" if limits else ""
        raise InvalidInput(f"{name} must be a finite number{limit}, got {shown(value)}.")
    return number


def check_positive(value: object, name: str, hint: str = "") -> float:
    """A finite number above zero."""
    number = plain_number(value)
    if number is None or not 0 < number < math.inf:
        raise InvalidInput(f"{name} must be positive and finite, got {shown(value)}{hint}.")
    return number


def check_fraction(value: object, name: str) -> float:
    """A number strictly between 0 and 1."""
    number = plain_number(value)
    if number is None or not 0 < number < 1:
        raise InvalidInput(f"{name} must lie between 0 and 1, both excluded, got {shown(value)}.")
    return number


def check_one_of(value: _T, choices: Iterable[object], name: str) -> _T:
    """One of a few.

    >>> check_one_of("casual", ["causal", "none"], "mask")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: mask is causal, none, got 'casual': did you mean 'causal'?
    """
    known = list(choices)
    try:
        if any(type(value) is type(choice) and value == choice for choice in known) or value in known:
            return value
    except Exception:  # a value that cannot be compared is none of them
        pass
    hint = did_you_mean(value, [choice for choice in known if isinstance(choice, str)])
    raise InvalidInput(f"{name} is {', '.join(map(str, known))}, got {shown(value)}{hint or '.'}")


def check_path(value: object, name: str) -> Path:
    """The path of a file."""
    check_kind(value, Path, name)
    return Path(value)  # type: ignore[arg-type]


def check_tensor(value: object, name: str, dims: Collection[int] | None = None, floating: bool = True) -> Tensor:
    """A tensor of numbers that can be read: dense, not empty, not on the meta device.

    Args:
        dims: how many dimensions it may have. floating: whether it must hold float16, bfloat16, float32 or float64.

    >>> check_tensor([1.0], "x")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: x must be a torch.Tensor, not list: convert it with torch.as_tensor.
    """
    if not isinstance(value, Tensor):
        raise InvalidInput(
            f"{name} must be a torch.Tensor, not {type(value).__name__}: convert it with torch.as_tensor."
        )
    check_readable(value, name)
    kind = str(value.dtype).removeprefix("torch.")
    if floating and value.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InvalidInput(
            f"{name} has dtype {kind}, but real floating-point numbers of 16 bits or more are needed: convert it with "
            ".float()."
        )
    if dims is not None and value.dim() not in dims:
        wanted = " or ".join(str(count) for count in dims)
        raise InvalidInput(f"{name} has shape {tuple(value.shape)}, but must have {wanted} dimensions.")
    if value.numel() == 0:
        raise InvalidInput(
            f"{name} has shape {tuple(value.shape)}, which holds no numbers: every size must be at least 1."
        )
    return value


def check_kind(value: object, kind: Any, name: str) -> None:
    """Refuse a value that is not of the kind of an annotation, or outside the range that an `Annotated` one has."""
    members = alternatives(kind)
    fitting = [one for one in members if fits(value, one)][:1]
    if fitting and isinstance(value, Tensor):
        check_readable(value, name)
        check_no_nan(value, name)
    elif kind is Tensor:
        check_tensor(value, name)
    for one in fitting or members:
        for check in getattr(one, "__metadata__", ()):
            check(value, name)
    if not fitting:
        raise InvalidInput(f"{name} must be {in_words(kind)}, got {shown(value)}.")


def check_readable(value: Tensor, name: str) -> None:
    """Refuse tensors whose numbers cannot be computed with: nested, sparse, quantised, without data, eight bits wide.

    >>> check_readable(torch.zeros(2, 2, device="meta"), "x")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: x is on the meta device and holds no numbers: load or make it on a real device.
    """
    if value.is_nested:
        raise InvalidInput(f"{name} is a nested tensor: pass its items one by one, or padded with a mask.")
    if value.layout is not torch.strided:
        raise InvalidInput(f"{name} is a sparse tensor: convert it with .to_dense().")
    if value.is_quantized:
        raise InvalidInput(f"{name} is a quantised tensor: convert it with .dequantize().")
    if value.is_meta:
        raise InvalidInput(f"{name} is on the meta device and holds no numbers: load or make it on a real device.")
    if value.is_floating_point() and value.dtype.itemsize < 2:
        kind = str(value.dtype).removeprefix("torch.")
        raise InvalidInput(f"{name} has dtype {kind}, in which torch cannot compute: convert it with .float().")


def check_finite(tensor: Tensor, name: str) -> None:
    """Refuse NaN and infinity, saying how many there are and where the first one is.

    >>> check_finite(torch.tensor([[0.0, float("nan")]]), "x")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: x holds 1 NaN or infinite value, at index (0, 1): replace or drop it.
    """
    if torch.isfinite(tensor.sum()):  # then all are, and no array of their size was needed
        return
    bad = (~torch.isfinite(tensor)).nonzero()
    if len(bad):
        first = tuple(bad[0].tolist())
        count = "1 NaN or infinite value, at" if len(bad) == 1 else f"{len(bad)} NaN or infinite values, the first at"
        raise InvalidInput(f"{name} holds {count} index {first}: replace or drop {'it' if len(bad) == 1 else 'them'}.")


def check_no_nan(value: Tensor, name: str) -> None:
    """Refuse NaN; infinity may be meant, as in masks. Numbers that torch follows without knowing them pass.

    >>> check_no_nan(torch.tensor([float("-inf"), float("nan")]), "bias")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: bias holds 1 NaN or infinite value, at index (1,): replace or drop it.
    """
    if not value.is_floating_point() or torch.compiler.is_compiling():
        return
    try:
        there = not torch.isfinite(value.sum()) and bool(value.isnan().any())
    except RuntimeError:  # inside torch.func
        return
    if there:
        check_finite(value.masked_fill(value.isinf(), 0.0), name)


def check_numbers(value: object, name: str) -> Tensor:
    """Finite real numbers in float64, of a tensor or of anything that torch can make one of.

    >>> check_numbers([0.5, "x"], "weights")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: weights must be an array of real numbers, got [0.5, 'x'].
    """
    try:
        numbers = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InvalidInput(f"{name} must be an array of real numbers, got {shown(value)}.") from None
    check_readable(numbers, name)
    if numbers.is_complex():
        raise InvalidInput(f"{name} must be an array of real numbers, got complex ones.")
    check_finite(numbers, name)
    return numbers.double()


def check_fields(record: Any) -> None:
    """Refuse a dataclass with a value that is not of the kind of its field."""
    for name, kind in field_hints(type(record)).items():
        check_kind(getattr(record, name), kind, name)


def check_options(given: Mapping[str, object], known: Iterable[str], name: str) -> None:
    """Refuse unknown options.

    >>> check_options({"rtoll": 1}, ["rtol", "seed"], "measure")
    Traceback (most recent call last):
    howsmooth._util.validation.WrongCall: measure takes no argument 'rtoll': did you mean 'rtol'?
    """
    names = [name for name in known if name != "self"]
    for option in given:
        if option not in names:
            hint = did_you_mean(option, names) or f"; it takes {', '.join(names)}."
            raise WrongCall(f"{name} takes no argument {option!r}{hint}")


def keywords(function: Callable[..., object]) -> list[str]:
    """The names under which a function takes arguments, those that it passes on apart.

    >>> keywords(check_options)
    ['given', 'known', 'name']
    """
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def check_memory(needed: int, what: str, advice: str) -> None:
    """Refuse what cannot fit into this machine."""
    there = memory()
    if needed > there:
        size = f"{needed / 2**30:.3g}" if needed < 2**1000 else "endlessly many"
        raise InvalidInput(f"{what} needs about {size} GiB, and this machine has {there / 2**30:.3g} GiB: {advice}.")


def check_weights(count: int, what: str) -> None:
    """Refuse a layer of more numbers than fit into this machine in float32.

    >>> check_weights(2**64, "the layer")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: the layer needs about 6.87e+10 GiB, and this machine has ... GiB: take smaller sizes.
    """
    check_memory(4 * count, what, "take smaller sizes")


Device = str | torch.device
"""Where to compute: "cuda:1", or what torch has for it."""


def check_device(name: Device) -> torch.device:
    """A device on which this machine can compute, or one line that says why it cannot.

    >>> check_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).add(1)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        why = first_line(error)
        raise InvalidInput(
            f"the device {shown(name)} cannot be used ({why}): choose another, for example cpu."
        ) from None
    if device.type == "meta":
        raise InvalidInput("nothing can be computed on the meta device: choose another, for example cpu.")
    return device


def memory() -> int:
    """Bytes of memory of this machine; 8 GiB where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2**33


def validated(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, with its arguments checked once, where a call enters the package.

    A call from outside, or from the command line, is compared with the signature and its annotations: numbers, words,
    flags, readable tensors without NaN, functions, paths, classes, sequences of such, and the ranges of annotations
    like `Count`. Calls from inside the package pass unchecked. Shapes are checked by the function itself.

    >>> @validated
    ... def add(first: int, second: int = 0) -> int:
    ...     return first + second
    >>> add(1, secnd=2)
    Traceback (most recent call last):
    howsmooth._util.validation.WrongCall: add takes no argument 'secnd': did you mean 'second'?
    >>> add()
    Traceback (most recent call last):
    howsmooth._util.validation.WrongCall: add: missing a required argument: 'first'.
    >>> add(1, second="2")
    Traceback (most recent call last):
    howsmooth.errors.InvalidInput: second must be a whole number, got '2'.
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
    wanted = cache(lambda: hints(function))

    def check(args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if is_inside(sys._getframe(2)):
            return
        if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            check_options(given, keywords(function), name)
        try:
            bound = signature.bind(*args, **given).arguments
        except TypeError as error:
            raise WrongCall(f"{name}: {error}.") from None
        for argument, kind in wanted().items():
            if argument in bound and bound[argument] is not signature.parameters[argument].default:
                check_kind(bound[argument], kind, argument)

    def call(*args: _P.args, **given: _P.kwargs) -> _T:
        check(args, given)
        return function(*args, **given)

    # With the globals of the function itself: doctest looks for examples in functions of the module it reads only.
    return update_wrapper(FunctionType(call.__code__, function.__globals__, name, None, call.__closure__), function)


def is_inside(frame: FrameType) -> bool:
    """Whether a frame runs code of this package; the command line and the experiments call it like everybody else."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back  # a decorator of torch, or a module that is called
    path = frame.f_code.co_filename
    return path.startswith(_INSIDE) and not path.startswith(_ENTRANCES)


Count = Annotated[int, check_count]
"""A whole number, at least 1; like the others here an annotation that `validated` checks."""
Size = Annotated[int, lambda value, name: check_count(value, name, least=0)]
Seed = Annotated[int, check_seed]
Probability = Annotated[float, check_fraction]
Positive = Annotated[float, check_positive]
NotNegative = Annotated[float, lambda value, name: check_number(value, name, least=0)]


def did_you_mean(value: object, known: Collection[str]) -> str:
    """``: did you mean 'rtol'?``, or nothing when nothing is near."""
    near = get_close_matches(value, list(known), n=1) if isinstance(value, str) else []
    return f": did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """A short text for any value: texts from elsewhere may be long, and tensors have many lines."""
    if isinstance(value, Tensor):
        if value.is_nested:  # of some there is no shape to ask for
            return "a nested tensor"
        return f"a tensor of shape {tuple(value.shape)}"
    if not isinstance(value, str | int | float | complex | bytes | None):
        return f"a {type(value).__name__}" if callable(value) or len(_text(value)) > _SHOWN else _text(value)
    text = _text(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _text(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # a number of too many digits, or a class of its own
        return f"a {type(value).__name__}"
