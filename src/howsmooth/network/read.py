"""From recorded operations to values: every operation by its rule, or left as what it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from howsmooth.errors import UnsupportedModel
from howsmooth.network import attention_forms, elementwise, moves, rules  # noqa: F401  (each enters its rules)
from howsmooth.network.reading import RULES, Form, Reading, Rule
from howsmooth.network.trace import ChangedInPlace, Operation, Tensorial, TracedRun
from howsmooth.network.values import Entries, Given, Unknown, Value, Values


def read_operations(traced: TracedRun, rows: int, width: int) -> tuple[Values, Value, Value]:
    """All values, the input ``(rows, width)`` and the output of a recording."""
    values = Values()
    given = values.make(rows, width, Given(), (), "")
    reading = Reading(values)
    forms: dict[int, Form] = {traced.input.number: Entries.of(given, traced.input.shape)}
    needed = _needed(traced)
    last = _last_uses(traced)
    for place, operation in enumerate(traced.recording.operations):
        numbers = [result.number for result in operation.results if result is not None]
        if needed.isdisjoint(numbers):
            continue
        if operation.stale is not None:
            raise ChangedInPlace(f"{operation} reads a tensor that was changed in place through another view of it.")
        with reading.at(operation.place):
            results = _results(reading, operation, forms)
        forms.update(
            (result.number, form)
            for result, form in zip(operation.results, results, strict=False)
            if result is not None and form is not None
        )
        _offered(reading, traced, operation, forms)
        for number in last.get(place, ()):
            forms.pop(number, None)
    output = _as_entries(forms[traced.output.number])
    if not output.terms:
        raise UnsupportedModel("the output of this network does not depend on its input.")
    return values, given, values.tokens(output, "")


def _needed(traced: TracedRun) -> set[int]:
    """The numbers of all tensors on which the output depends."""
    needed = {traced.output.number}
    for operation in reversed(traced.recording.operations):
        if not needed.isdisjoint(result.number for result in operation.results if result is not None):
            needed.update(one.number for one in _inputs(operation))
    return needed


def _last_uses(traced: TracedRun) -> dict[int, list[int]]:
    """The tensors that no operation after this one takes, by the position of the operation."""
    uses = {one.number: place for place, op in enumerate(traced.recording.operations) for one in _inputs(op)}
    uses |= {
        number: max(place, uses.get(number, place))
        for place, op in enumerate(traced.recording.operations)
        for r in op.results
        if r is not None and r.number in traced.recording.offered
        for number in [traced.recording.offered[r.number][1]]
    }
    uses.pop(traced.output.number, None)
    last: dict[int, list[int]] = {}
    for number, place in uses.items():
        last.setdefault(place, []).append(number)
    return last


def _inputs(operation: Operation) -> list[Tensorial]:
    found: list[Tensorial] = []
    tree_map_only(Tensorial, found.append, (operation.args, operation.kwargs))
    return found


def _results(reading: Reading, operation: Operation, forms: dict[int, Form]) -> Sequence[Form]:
    name = operation.name
    known = RULES.get(name) or RULES.get(name.removesuffix("_"))
    plain = tree_map_only(nn.Parameter, lambda one: one.view_as(one), (operation.args, operation.kwargs))
    args, kwargs = tree_map_only(Tensorial, lambda one: forms[one.number], plain)
    moving: list[Any] = []
    tree_map_only((Entries, *attention_forms.FORMS), moving.append, (args, kwargs))
    if not moving:  # what it takes has turned out to be constant
        outcome = operation.function(*args, **kwargs)
        return outcome if isinstance(outcome, tuple | list) else [outcome]
    found = _by_rule(known, reading, args, kwargs)
    shapes = [None if result is None else result.shape for result in operation.results]

    def spelled() -> list[Entries | None]:
        """The operation on the entries of its arguments, whatever forms these have."""
        plain_args, plain_kwargs = tree_map_only(attention_forms.FORMS, _as_entries, (args, kwargs))
        with reading.at(operation.place, plainly=True):
            again = _by_rule(known, reading, plain_args, plain_kwargs)
        several = again if isinstance(again, list) else [again]
        if all(isinstance(one, Entries) for one, shape in zip(several, shapes, strict=False) if shape is not None):
            return several
        return spell(reading, operation.function, plain_args, plain_kwargs, shapes, name, operation.place)

    if found is None:
        return spelled()
    several = found if isinstance(found, list) else [found]
    made = zip(several, operation.results, strict=False)
    return [
        None if result is None else _kept(one, result.dtype, lambda i=i: spelled()[i])  # type: ignore[misc]
        for i, (one, result) in enumerate(made)
    ]


def _by_rule(known: Rule | None, reading: Reading, args: Any, kwargs: Any) -> Form:
    """The form that a rule gives; None without a rule, or where arguments are of a kind that it does not know.

    Whatever is read is compared with the network, so that an operation that a rule stumbles over is left as it is.
    """
    try:
        return None if known is None else known(reading, *args, **kwargs)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _kept(form: Form, dtype: torch.dtype, spelled: Callable[[], Any]) -> Form:
    """A form with the way to its entries; entries that do not depend on the input as the constant that they are."""
    if isinstance(form, attention_forms.FORMS):
        return replace(form, spelled=spelled)
    if isinstance(form, Entries) and not form.terms:
        return (torch.zeros(form.shape) if form.constant is None else form.constant).to(dtype)
    return form


def _as_entries(form: Form) -> Entries:
    if isinstance(form, Entries):
        return form
    if isinstance(form, Tensor):
        return Entries(form.shape, (), form)
    return form.spelled()


def spell(
    reading: Reading,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Sequence[torch.Size | None],
    name: str,
    place: str,
) -> list[Entries | None]:
    """An operation without a rule, on the tensors that it takes, as values of their own."""
    taken: list[tuple[Value, torch.Size]] = []

    def take(form: Any) -> Any:
        entries = _as_entries(form)
        taken.append((reading.values.tokens(entries, place), entries.shape))
        return _Slot(len(taken) - 1)

    slotted = tree_map_only((Entries, *attention_forms.FORMS), take, (args, kwargs))
    kinds = [shape for _, shape in taken]

    def call(*tensors: Tensor) -> Any:
        real = [tensor.reshape(shape).contiguous() for tensor, shape in zip(tensors, kinds, strict=True)]
        like = real[0]

        def fill(one: Any) -> Any:
            return real[one.number]

        own_args, own_kwargs = tree_map_only(_Slot, fill, slotted)
        own_args, own_kwargs = tree_map_only(
            Tensor, lambda t: t.to(like.dtype) if t.is_floating_point() else t, (own_args, own_kwargs)
        )
        return function(*own_args, **own_kwargs)

    results: list[Entries | None] = []
    for index, shape in enumerate(shapes):
        if shape is None:
            results.append(None)
            continue
        width = shape[-1] if shape else 1
        rows = shape.numel() // max(width, 1)

        def part(*tensors: Tensor, index: int = index, rows: int = rows, width: int = width) -> Tensor:
            outcome = call(*tensors)
            chosen = outcome[index] if isinstance(outcome, tuple | list) else outcome
            return chosen.reshape(rows, width)

        parents = [value for value, _ in taken]
        value = reading.values.make(rows, width, Unknown(name, part), parents, place)
        results.append(Entries.of(value, shape))
    return results


class _Slot:
    """The place of a tensor among the arguments of an operation."""

    def __init__(self, number: int):
        self.number = number


def _offered(reading: Reading, traced: TracedRun, operation: Operation, forms: dict[int, Form]) -> None:
    """The output of a module that knows its own map, as this map on its input."""
    from howsmooth.network.attention_forms import offered_form

    for result in operation.results:
        if result is None or result.number not in traced.recording.offered:
            continue
        module, number, place = traced.recording.offered[result.number]
        x = forms.get(number)
        found = None if not isinstance(x, Entries) else offered_form(reading, module, x, place, result.shape)
        if found is not None:
            forms[result.number] = found
