"""The operations that a function performs on its input, recorded by running it once.

A `TracedTensor` stands in for the input. Every operation of torch that receives one runs on the values and is
recorded; operations on weights and other constants run as usual and are not seen. So a recording holds just the
operations between input and output, whatever source they come from: a module, a model of transformers, an exported
program, an ONNX file. What depends on values in another way than through recorded operations is refused: branches on
data, shapes that depend on data, writes into tensors that are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from howsmooth.errors import UnsupportedModel

MOST_OPERATIONS = 50_000
"""More operations than any transformer has; a longer recording is refused."""
_READS_VALUES = ("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose")
_SHAPED_BY_VALUES = ("nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive")
_DRAWS = ("bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like", "multinomial", "normal_", "uniform_")
_KNOWN_LIBRARIES = ("aten", "prim", "prims")


class ChangedInPlace(UnsupportedModel):
    """Tensors of a recording were written into in a way that a recording does not show."""


@dataclass(frozen=True)
class Tensorial:
    """A tensor of a recording, by its number; shape and dtype are those it has where it is used."""

    number: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Operation:
    """One recorded operation.

    Attributes:
        function: the operation of torch. args, kwargs: its arguments; recorded tensors as `Tensorial`.
        results: its outputs as `Tensorial`, None for outputs that are no tensors.
        place: the dotted path of the module in which it ran, "" outside submodules.
        stale: why an argument is not what the recording says, None usually.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensorial | None, ...]
    place: str
    stale: str | None = None

    @property
    def name(self) -> str:
        """The name of the operation without its overload, such as ``addmm``."""
        return self.function.overloadpacket.__name__

    def __str__(self) -> str:
        return f"{self.name} in {self.place}" if self.place else self.name


@dataclass
class Recording:
    """The operations of one run, in order.

    Attributes:
        operations: all of them. narrowest: the coarsest floating dtype of a result.
        written: storage of numbers → the operation that last wrote to it.
        offered: number of a tensor → (module, number of its input, place): outputs of modules that know their own map.
    """

    operations: list[Operation] = field(default_factory=list)
    narrowest: torch.dtype | None = None
    offered: dict[int, tuple[nn.Module, int, str]] = field(default_factory=dict)
    places: list[str] = field(default_factory=lambda: [""])
    written: dict[int, int] = field(default_factory=dict)
    count: int = 0

    def note_dtypes(self, dtypes: Iterable[torch.dtype]) -> None:
        """Keep the coarsest floating dtype."""
        for dtype in dtypes:
            before = self.narrowest or dtype
            if dtype.is_floating_point and dtype.itemsize <= before.itemsize:
                self.narrowest = dtype

    def number(self) -> int:
        """A new number for a tensor."""
        self.count += 1
        return self.count


class TracedTensor(Tensor):
    """A tensor whose operations are recorded.

    Attributes:
        value: the numbers. recording: where operations are noted. number: of this tensor there.
        since: the number of operations when its numbers were made, to notice writes through another view of them.
    """

    value: Tensor
    recording: Recording
    number: int
    since: int

    @staticmethod
    def __new__(cls, value: Tensor, recording: Recording, number: int | None = None) -> TracedTensor:
        traced = Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=value.device,
        )
        number = recording.number() if number is None else number
        vars(traced).update(value=value, recording=recording, since=len(recording.operations), number=number)
        return traced

    def __init__(self, value: Tensor, recording: Recording, number: int | None = None):
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TracedTensor({self.number}, {tuple(self.shape)})"

    # Without it torch takes the fused kernels of whole encoder layers, which show no operations.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def stale(self) -> bool:
        """Whether the numbers were written to since, through another view."""
        return self.recording.written.get(_storage(self.value), -1) >= self.since

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = next(_traced_in((args, kwargs)))
        return _record(first.recording, func, args, kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _traced_in(arguments: Any) -> Iterator[TracedTensor]:
    match arguments:
        case TracedTensor():
            yield arguments
        case list() | tuple():
            for one in arguments:
                yield from _traced_in(one)
        case dict():
            for one in arguments.values():
                yield from _traced_in(one)


def _record(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    name, library = func.overloadpacket.__name__, func.namespace
    place = recording.places[-1]
    where = f" in {place}" if place else ""
    if library not in _KNOWN_LIBRARIES:
        raise UnsupportedModel(
            f"{library}.{name}{where} is an operation from outside torch, whose derivative nobody states."
        )
    if name in _READS_VALUES:
        raise UnsupportedModel(
            f"this network looks at the values of its input{where} and may branch on them, so that one run does not "
            "show what it computes elsewhere."
        )
    if name in _SHAPED_BY_VALUES or (name == "index" and _chooses_by_values(args[1])):
        raise UnsupportedModel(f"the shape of the result of {name}{where} depends on the values of the input.")
    if name in _DRAWS or (name == "native_dropout" and args[2]):
        raise UnsupportedModel(f"{name}{where} draws random numbers: call .eval() first.")
    if len(recording.operations) >= MOST_OPERATIONS:
        raise UnsupportedModel(f"this network performs more than {MOST_OPERATIONS} operations on its input.")
    traced = list(_traced_in((args, kwargs)))
    stale = any(one.stale for one in traced)
    noted_args, noted_kwargs = tree_map_only(Tensor, _kept, (tuple(args), dict(kwargs)))
    plain_args, plain_kwargs = tree_map_only(TracedTensor, lambda one: one.value, (tuple(args), dict(kwargs)))
    outputs = func(*plain_args, **plain_kwargs)
    changed = _changed_argument(func, args)
    if changed is not None:
        if not isinstance(changed, TracedTensor):
            raise ChangedInPlace(
                f"{name}{where} writes into a tensor that was made empty or as a constant: build it by torch.cat or "
                "torch.stack instead."
            )
        recording.written[_storage(changed.value)] = len(recording.operations)
        changed.number, changed.since = recording.number(), len(recording.operations) + 1
        wrapped: Any = changed
    else:
        wrapped = tree_map_only(Tensor, lambda value: TracedTensor(value, recording), outputs)
    every = wrapped if isinstance(wrapped, tuple | list) else (wrapped,)
    results = tuple(_note(one) if isinstance(one, TracedTensor) else None for one in every)
    recording.note_dtypes(one.dtype for one in results if one is not None)
    why = "a tensor was changed in place through another view of it" if stale else None
    recording.operations.append(Operation(func, noted_args, noted_kwargs, results, place, why))
    return wrapped


def _chooses_by_values(indices: Any) -> bool:
    """Whether a mask that depends on the input chooses among numbers, as in ``x[x > 0]``."""
    return any(isinstance(one, TracedTensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _kept(tensor: Tensor) -> Tensorial | Tensor:
    """An argument as it is noted: weights as they are where autograd is on, which cannot follow them in here."""
    if isinstance(tensor, TracedTensor):
        return _note(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return tensor
    plain = not isinstance(tensor, nn.Parameter) and not tensor.requires_grad  # a transposed weight keeps its flag here
    return tensor if plain else tensor.detach()


def _note(tensor: TracedTensor) -> Tensorial:
    return Tensorial(tensor.number, tensor.shape, tensor.dtype)


def _changed_argument(func: Any, args: Any) -> Any:
    """The argument that an operation writes into, None for one that makes a new tensor."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return value
    return None


@dataclass(frozen=True)
class TracedRun:
    """A recorded run: its input and output, and the operations between them."""

    recording: Recording
    input: Tensorial
    output: Tensorial


def trace(
    function: Callable[[Tensor], Any],
    x: Tensor,
    root: nn.Module | None = None,
    offers: Callable[[nn.Module], bool] = lambda module: False,
) -> TracedRun:
    """Run a function once at x and record what it does.

    Args:
        function: takes x and returns a tensor, or a tuple, dict or output of transformers whose first tensor counts.
        root: the module whose submodules give operations their places.
        offers: whether a submodule knows its own map; then its output is noted.

    >>> traced = trace(nn.Linear(2, 3), torch.zeros(1, 2))
    >>> [operation.name for operation in traced.recording.operations]
    ['addmm']
    """
    recording = Recording()
    start = TracedTensor(x.detach().clone(), recording)
    noted = _note(start)
    with _unchanged(root), _places(root, recording, offers):
        output = first_traced(function(start))
    if not isinstance(output, TracedTensor):
        raise UnsupportedModel("the output of this network does not depend on its input through operations of torch.")
    if output.stale:
        raise ChangedInPlace("the output of this network was changed in place through another view of it.")
    return TracedRun(recording, noted, _note(output))


def first_traced(output: Any) -> Any:
    """The first tensor of an output: of a tuple, a list, a dictionary or a dataclass."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        output = tuple(output.values())
    elif hasattr(output, "__dataclass_fields__"):
        output = tuple(getattr(output, name) for name in output.__dataclass_fields__)
    if isinstance(output, tuple | list):
        found = (first_traced(one) for one in output)
        return next((one for one in found if isinstance(one, Tensor)), None)
    return None


@contextmanager
def _unchanged(root: nn.Module | None) -> Iterator[None]:
    """Takes back what modules keep of the recorded run, such as a mask for later calls."""
    modules = [] if root is None else list(root.modules())
    before = [(kept, dict(kept)) for module in modules for kept in (vars(module), module._buffers)]
    try:
        yield
    finally:
        for kept, earlier in before:
            for name in [name for name, value in kept.items() if value is not earlier.get(name)]:
                if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(kept[name])):
                    continue
                if name in earlier:
                    kept[name] = earlier[name]
                else:
                    del kept[name]


@contextmanager
def _places(root: nn.Module | None, recording: Recording, offers: Callable[[nn.Module], bool]) -> Iterator[None]:
    """While the block runs, the recording knows which submodule is running."""
    handles = []

    def watch(module: nn.Module, name: str) -> None:
        known = offers(module)
        entered: list[Any] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            recording.places.append(name)
            if known:
                entered.append(next(_traced_in((args, kwargs)), None))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            recording.places.pop()
            if known:
                x, y = entered.pop(), first_traced(output)
                if isinstance(x, TracedTensor) and isinstance(y, TracedTensor):
                    recording.offered[y.number] = (module, x.number, name)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))

    try:
        for name, module in () if root is None else root.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                watch(module, name)
        yield
    finally:
        for handle in handles:
            handle.remove()
