"""A network in an ONNX file as a module of torch that computes the same function.

Nothing in a file is executed. It holds a list of operations and the numbers that they use; the operations are looked up
in a table of functions (`howsmooth.network.onnx_operations`), and a file that asks for others is refused. Numbers
outside the file are read only from its own folder, and no memory is taken for numbers that are not there.

Precision. Floating numbers of the file are buffers in the dtype they are stored in, so that ``.double()`` gives the
network in float64, with the same weights. A file may also convert between floating types (`Cast`). Rounding to float32
inside a network of float64 would make it neither, so a conversion to a floating type becomes one to the type that
buffers of this type have now: after ``.double()`` every one is to float64, before it all are what the file says.
Conversions to whole numbers and truth values stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from howsmooth._util.common import first_line, out_of_memory, printable
from howsmooth._util.optional_deps import need
from howsmooth._util.validation import shown, validated
from howsmooth.errors import HowsmoothError, InvalidInput, UnsupportedModel
from howsmooth.network.onnx_operations import ONLY, OPERATIONS, SEVERAL, OnnxNode

if TYPE_CHECKING:
    import onnx

OPSETS = range(9, 23)
"""Versions of the operations that are read: from those of VNN-COMP's transformers to those of today's exporters."""
MOST_NODES = 100_000
MOST_BYTES = 2**31
"""Largest size of a file: that of the format."""
_MOST_DIMS, _MOST_NUMBERS = 64, 2**40
_DOMAINS = ("", "ai.onnx")
_SUBGRAPHS = ("If", "Loop", "Scan")
_STORED: dict[str, tuple[torch.dtype, str, str]] = {
    "FLOAT": (torch.float32, "<f4", "float_data"),
    "DOUBLE": (torch.float64, "<f8", "double_data"),
    "FLOAT16": (torch.float16, "<i2", "int32_data"),
    "BFLOAT16": (torch.bfloat16, "<i2", "int32_data"),
    "INT64": (torch.int64, "<i8", "int64_data"),
    "INT32": (torch.int32, "<i4", "int32_data"),
    "INT16": (torch.int16, "<i2", "int32_data"),
    "INT8": (torch.int8, "<i1", "int32_data"),
    "UINT8": (torch.uint8, "<u1", "int32_data"),
    "BOOL": (torch.bool, "<u1", "int32_data"),
}
"""Type of numbers in ONNX → dtype in torch, the bytes of one, the list that holds them when they are not bytes."""


@dataclass(frozen=True)
class OnnxInput:
    """An input of a network.

    Attributes:
        name: in the file. shape: sizes, None for one that the file leaves open; None where not even their number is
            known. dtype: of the file; a module that was converted takes floating inputs in its new dtype.
    """

    name: str
    shape: tuple[int | None, ...] | None
    dtype: torch.dtype

    def check(self, given: object, dtype: torch.dtype) -> None:
        """Refuse a tensor that is no such input."""
        if not isinstance(given, Tensor):
            raise InvalidInput(f"the input {shown(self.name)} must be a torch.Tensor, not {type(given).__name__}.")
        sizes = self.shape
        if sizes is not None and (
            given.dim() != len(sizes)
            or any(size not in (None, real) for size, real in zip(sizes, given.shape, strict=True))
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in sizes)
            raise InvalidInput(
                f"the input {shown(self.name)} has shape {tuple(given.shape)}, but the file says ({wanted})."
            )
        if given.dtype != dtype:
            raise InvalidInput(
                f"the input {shown(self.name)} has dtype {_kind(given.dtype)}, but the network takes {_kind(dtype)}: "
                f"convert one of them with .to(torch.{_kind(dtype)}) or .double()."
            )


class OnnxModule(nn.Module):
    """The network of an ONNX file; `read_onnx` makes it.

    Attributes:
        inputs: what `forward` takes, in this order; values of the file that are also listed as inputs are none.
        outputs: names of what it returns.
        nodes: the operations, in the order in which they run.
    """

    inputs: tuple[OnnxInput, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]

    def __init__(
        self,
        inputs: Iterable[OnnxInput],
        outputs: Iterable[str],
        nodes: Iterable[OnnxNode],
        constants: Mapping[str, Tensor],
    ):
        super().__init__()
        self.inputs, self.outputs, self.nodes = tuple(inputs), tuple(outputs), tuple(nodes)
        self._whole = {name: tensor for name, tensor in constants.items() if not tensor.is_floating_point()}
        buffers: dict[int, str] = {}  # a tensor that has two names is one buffer
        self._places: dict[str, str] = {}
        for name, tensor in constants.items():
            if tensor.is_floating_point():
                self._places[name] = buffers.setdefault(id(tensor), f"constant_{len(buffers)}")
                self.register_buffer(self._places[name], tensor)
        for dtype in dict.fromkeys(wanted.dtype for wanted in self.inputs if wanted.dtype.is_floating_point):
            # Without numbers: it shows what this type was converted to.
            self.register_buffer(f"now_{_kind(dtype)}", torch.empty(0, dtype=dtype), persistent=False)
        self._spent = _last_uses(self.nodes, self.outputs)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The outputs: one tensor, or a tuple of several."""
        if len(inputs) != len(self.inputs):
            names = ", ".join(shown(wanted.name) for wanted in self.inputs[:9])
            raise InvalidInput(f"this network takes {len(self.inputs)} inputs ({names}), not {len(inputs)}.")
        values: dict[str, Any] = dict(self._whole)
        values |= {name: self._buffers[place] for name, place in self._places.items()}
        for wanted, given in zip(self.inputs, inputs, strict=True):
            marker = self._buffers.get(f"now_{_kind(wanted.dtype)}")
            wanted.check(given, wanted.dtype if marker is None else marker.dtype)
            values[wanted.name] = given
        for node, spent in zip(self.nodes, self._spent, strict=True):
            results = _run(node, [values[name] if name else None for name in node.inputs])
            values.update(zip(node.outputs, results, strict=False))
            for name in spent:
                del values[name]
        results = tuple(values[name] for name in self.outputs)
        return results[0] if len(results) == 1 else results

    def extra_repr(self) -> str:
        """Inputs, outputs and the number of operations."""
        names = ", ".join(wanted.name for wanted in self.inputs)
        return printable(f"{names} → {', '.join(self.outputs)}, {len(self.nodes)} operations")


def _last_uses(nodes: Sequence[OnnxNode], outputs: Sequence[str]) -> list[list[str]]:
    """For every node the values that nothing after it reads, so that their memory can be given back."""
    seen = {"", *outputs}
    spent: list[list[str]] = []
    for node in reversed(nodes):
        last = [name for name in dict.fromkeys((*node.inputs, *node.outputs)) if name not in seen]
        seen.update(last)
        spent.append(last)
    return spent[::-1]


def _run(node: OnnxNode, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
    try:
        results = OPERATIONS[node.operation](node, *tensors)
    except HowsmoothError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        shapes = ", ".join("none" if tensor is None else str(tuple(tensor.shape)) for tensor in tensors[:9])
        why = first_line(error, kind=not isinstance(error, ValueError | RuntimeError))
        raise InvalidInput(
            f"{node} cannot be computed on tensors of shapes {shapes} ({why}): give other inputs, or export it again."
        ) from error
    every = results if isinstance(results, tuple) else (results,)
    if len(every) < len(node.outputs):
        raise InvalidInput(f"{node} gives {len(every)} values, not {len(node.outputs)}: export it again.")
    return every


@validated
def read_onnx(path: str | Path) -> OnnxModule:
    """The network in an ONNX file as a module that computes the same function with operations of torch.

    Nothing in the file is executed. Numbers that it keeps in other files are read when these lie in its own folder.

    Args:
        path: a file in ONNX's binary format, with operations of version (opset) 9 to 22.

    Raises:
        InvalidInput: there is no such file, it is damaged, or it contradicts itself.
        UnsupportedModel: the file asks for something that is not read; the message names it and its place.
        MissingPackage: the package onnx is not installed.

    >>> import onnx, tempfile
    >>> graph = onnx.parser.parse_graph("small (float[N, 2] x) => (float[N, 2] y) {y = Relu(x)}")
    >>> model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     onnx.save(model, f"{folder}/small.onnx")
    ...     network = read_onnx(f"{folder}/small.onnx")
    >>> network.inputs
    (OnnxInput(name='x', shape=(None, 2), dtype=torch.float32),)
    >>> network(torch.tensor([[-1.0, 2.0]]))
    tensor([[0., 2.]])
    """
    need("onnx", "reading an ONNX file")
    return _Reader(Path(path)).module()


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Reader:
    """One file on its way to a module: values are known once something in the file gives them."""

    def __init__(self, path: Path):
        self._title = printable(str(path))[:200]
        self._path = path
        self._graph, self._opset = self._opened()
        self._known: set[str] = set()
        self._constants: dict[str, Tensor] = {}
        self._outside: dict[tuple[object, ...], Tensor] = {}  # so that what is used twice is read, and kept, once
        self._schemas: dict[str, Any] = {}
        self._later = {name for node in self._graph.node for name in node.output}

    def _refuse(self, text: str) -> NoReturn:
        """The file is well-formed and asks for what this package does not do."""
        raise UnsupportedModel(f"{self._title}: {text}.")

    def _wrong(self, text: str) -> NoReturn:
        """The file contradicts itself."""
        raise InvalidInput(f"{self._title}: {text}.")

    # The file

    def _opened(self) -> tuple[onnx.GraphProto, int]:
        model = self._parsed()
        graph = model.graph
        if not graph.node and not graph.output:
            self._wrong("it holds no network: give a file that an export to ONNX wrote")
        if model.functions:
            names = ", ".join(shown(function.name) for function in model.functions[:3])
            self._refuse(f"it defines operations of its own ({names}): inline them, as with onnx.inliner")
        if model.training_info:
            self._refuse("it holds a procedure of training: export the network for inference")
        if graph.sparse_initializer:
            self._refuse("it holds sparse initialisers: store them dense")
        if len(graph.node) > MOST_NODES:
            self._refuse(f"it has {len(graph.node)} operations, more than {MOST_NODES}: export a part of it")
        versions = [opset.version for opset in model.opset_import if opset.domain in _DOMAINS]
        if len(versions) != 1:
            self._wrong("it does not say which version of the operations (opset) it uses: export it again")
        if versions[0] not in OPSETS:
            self._refuse(
                f"its operations are of opset {versions[0]}, and those from {OPSETS[0]} to {OPSETS[-1]} are read: "
                "export it again with opset_version=17, or convert it by onnx.version_converter"
            )
        return graph, versions[0]

    def _parsed(self) -> onnx.ModelProto:
        import onnx

        undecodable = need("google.protobuf.message", "reading an ONNX file").DecodeError
        try:
            if not self._path.is_file():
                raise InvalidInput(f"there is no file {self._title}: check the path.")
            if self._path.stat().st_size >= MOST_BYTES:
                self._wrong("it is larger than 2 GB, which no ONNX file is: check the path")
            return onnx.load(self._path, format="protobuf", load_external_data=False)
        except OSError as error:
            self._wrong(f"it cannot be read ({error.strerror or first_line(error)}): check the path")
        except undecodable:
            self._wrong("it is no ONNX file, or damaged: export it again")

    def _text(self, text: str | bytes) -> str:
        if isinstance(text, bytes):  # as protobuf gives names that are not in UTF-8
            self._wrong("a name in it is no text: the file is damaged, so export it again")
        return text

    # The graph

    def module(self) -> OnnxModule:
        graph = self._graph
        for proto in graph.initializer:
            name = self._new(proto.name, "an initialiser")
            self._constants[name] = self._tensor(proto, f"the initialiser {shown(name)}")
        inputs = [self._input(value) for value in graph.input if value.name not in self._constants]
        nodes = [node for number, proto in enumerate(graph.node) if (node := self._node(proto, number)) is not None]
        outputs = [self._text(value.name) for value in graph.output]
        unknown = [name for name in outputs if name not in self._known]
        if unknown or not outputs:
            self._wrong(f"nothing gives its output {shown(unknown[0]) if unknown else ''}: export it again")
        return OnnxModule(inputs, outputs, nodes, self._constants)

    def _new(self, name: str | bytes, by: str) -> str:
        text = self._text(name)
        if text in self._known or not text:
            what = f"two things give the value {shown(text)}" if text else "a value has no name"
            self._wrong(f"{what}, {by} among them: export it again")
        self._known.add(text)
        return text

    def _hidden(self, tensor: Tensor) -> str:
        """The name of a constant that the file writes as an attribute; no value in the file has it."""
        name = f"constant {len(self._constants)}"
        while name in self._known or name in self._later:
            name += " of an attribute"
        self._constants[name] = tensor
        self._known.add(name)
        return name

    def _input(self, value: onnx.ValueInfoProto) -> OnnxInput:
        name = self._new(value.name, "an input")
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            self._refuse(f"its input {shown(name)} is no tensor ({kind}): export a network of tensors")
        tensor = value.type.tensor_type
        dtype = self._stored(tensor.elem_type, f"its input {shown(name)}")[0]
        if not tensor.HasField("shape"):
            return OnnxInput(name, None, dtype)
        sizes = [dim.dim_value if dim.WhichOneof("value") == "dim_value" else -1 for dim in tensor.shape.dim]
        return OnnxInput(name, tuple(size if size >= 0 else None for size in sizes), dtype)

    def _node(self, proto: onnx.NodeProto, number: int) -> OnnxNode | None:
        """One operation; None for a constant, which is computed now."""
        operation, domain, name = map(self._text, (proto.op_type, proto.domain, proto.name))
        inputs, outputs = (_without_empty_end(map(self._text, names)) for names in (proto.input, proto.output))
        node = OnnxNode(operation, number, name, inputs, outputs, {}, self._opset)
        if domain not in _DOMAINS:
            self._refuse(f"{node} is of the domain {shown(domain)}: export the network with ONNX's own operations")
        if operation in _SUBGRAPHS:
            self._refuse(f"{node} decides which part of the network runs, or how often: export one without branches")
        if operation not in OPERATIONS and operation != "Constant":
            self._refuse(f"{node} is not among those that can be read: export the network without it, or up to it")
        schema = self._schema(node)
        self._check_arity(node, schema)
        for value in inputs:
            if value and value not in self._known:
                why = "an operation after it gives: the order is wrong, or there is a cycle"
                why = why if value in self._later else "nothing gives"
                self._wrong(f"{node} reads the value {shown(value)}, which {why}: export it again")
        attributes = self._attributes(proto, schema, node)
        for attribute, value in attributes.items():
            if value not in ONLY.get((operation, attribute), (value,)):
                self._refuse(f"{node} has {attribute} = {shown(value)}, with which it is not read: export it without")
        if operation == "Constant":
            self._constants[outputs[0]] = self._constant(attributes, node)
        for value in outputs:
            if value:
                self._new(value, str(node))
        if operation == "Constant":
            return None
        if operation == "Cast":
            dtype = self._stored(attributes.pop("to"), str(node))[0]
            inputs = (*inputs, self._hidden(torch.empty(0, dtype=dtype)))
        if operation == "ConstantOfShape":
            value = attributes.pop("value", None)
            inputs = (*inputs, self._hidden(torch.zeros(1) if value is None else self._tensor(value, str(node))))
        return replace(node, inputs=inputs, attributes=attributes)

    def _schema(self, node: OnnxNode) -> Any:
        """The inputs, outputs and attributes that an operation has in the opset of the file."""
        import onnx

        if node.operation not in self._schemas:
            try:
                self._schemas[node.operation] = onnx.defs.get_schema(node.operation, self._opset, "")
            except onnx.defs.SchemaError:
                self._wrong(f"{node} does not exist in opset {self._opset}, which the file uses: export it again")
        return self._schemas[node.operation]

    def _check_arity(self, node: OnnxNode, schema: Any) -> None:
        for names, what, least, most in (
            (node.inputs, "inputs", schema.min_input, schema.max_input),
            (node.outputs, "outputs", schema.min_output, schema.max_output),
        ):
            if not least <= len(names) <= most:
                allowed = str(least) if least == most else f"{least} to {most}" if most < 99 else f"{least} or more"
                self._wrong(f"{node} has {len(names)} {what} where {allowed} belong: export it again")
        for i, value in enumerate(node.inputs):
            if not value and schema.inputs[min(i, len(schema.inputs) - 1)].option.name != "Optional":
                self._wrong(f"{node} lacks its input number {i + 1}: export it again")
        if len(node.outputs) > SEVERAL.get(node.operation, 1):
            self._refuse(
                f"{node} is asked for {len(node.outputs)} outputs, and only the first is computed: drop others"
            )

    # Numbers

    def _attributes(self, proto: onnx.NodeProto, schema: Any, node: OnnxNode) -> dict[str, Any]:
        """The attributes of the node, and the defaults of its opset for others."""
        import onnx

        found: dict[str, Any] = {}
        for attribute in proto.attribute:
            name = self._text(attribute.name)
            kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
            known = schema.attributes.get(name)
            if known is None or known.type.name != kind or name in found or attribute.ref_attr_name:
                self._wrong(f"{node} cannot have the attribute {shown(name)} ({kind}): export it again")
            found[name] = self._value(attribute, node)
        for name, known in schema.attributes.items():
            if name not in found and known.required:
                self._wrong(f"{node} lacks the attribute {name}: export it again")
            if name not in found and known.default_value.name:
                found[name] = self._value(known.default_value, node)
        return found

    def _value(self, attribute: onnx.AttributeProto, node: OnnxNode) -> Any:
        import onnx

        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                self._wrong(f"{node} has an attribute that is no text: the file is damaged, so export it again")
        return value

    def _constant(self, attributes: Mapping[str, Any], node: OnnxNode) -> Tensor:
        if len(attributes) != 1:
            self._wrong(f"{node} has {len(attributes)} values where one belongs: export it again")
        ((kind, value),) = attributes.items()
        if kind == "value":
            return self._tensor(value, str(node))
        if kind.startswith(("value_float", "value_int")):
            return torch.tensor(value, dtype=torch.float32 if kind.startswith("value_float") else torch.int64)
        self._refuse(f"{node} holds texts or a sparse tensor ({kind}), which are not read: export it without")

    def _stored(self, number: int, what: str) -> tuple[torch.dtype, str, str]:
        import onnx

        kind = onnx.TensorProto.DataType.Name(number) if number in onnx.TensorProto.DataType.values() else str(number)
        if kind not in _STORED:
            self._refuse(f"{what} has numbers of type {kind}, and those that are read are {', '.join(_STORED)}")
        return _STORED[kind]

    def _tensor(self, proto: onnx.TensorProto, what: str) -> Tensor:
        """A tensor of the file; its shape is compared with the numbers that are there before it is made."""
        dtype, code, listed = self._stored(proto.data_type, what)
        sizes, one = tuple(proto.dims), np.dtype(code)
        if (
            len(sizes) > _MOST_DIMS
            or min(sizes, default=0) < 0
            or math.prod(max(size, 1) for size in sizes) >= _MOST_NUMBERS
        ):
            self._wrong(f"{what} has the shape {shown(list(sizes))}, which no tensor has: the file is damaged")
        if proto.HasField("segment"):
            self._refuse(f"{what} is a part of a tensor: store it in one piece")
        count = math.prod(sizes)
        if proto.data_location == proto.EXTERNAL:
            return self._from_outside(proto, what, dtype, sizes, one)
        raw = proto.HasField("raw_data")
        there, unit = (len(proto.raw_data), "bytes") if raw else (len(getattr(proto, listed)), "numbers")
        needed = count * one.itemsize if raw else count
        if there != needed:
            self._wrong(f"{what} has the shape {list(sizes)} of {needed} {unit}, but {there} are there: it is damaged")
        numbers = np.frombuffer(proto.raw_data, one) if raw else np.array(getattr(proto, listed)).astype(one)
        return _as_tensor(numbers, dtype, sizes)

    def _from_outside(
        self, proto: onnx.TensorProto, what: str, dtype: torch.dtype, sizes: tuple[int, ...], one: np.dtype[Any]
    ) -> Tensor:
        entries = {self._text(entry.key): self._text(entry.value) for entry in proto.external_data}
        needed = math.prod(sizes) * one.itemsize
        file, whole = self._neighbour(entries.get("location", ""), what)
        start = self._count(entries.get("offset", "0"), what)
        length = self._count(entries.get("length", str(max(whole - start, 0))), what)
        if start + length > whole or length != needed:
            self._wrong(
                f"{what} has the shape {list(sizes)} of {needed} bytes, but {length} from place {start} of the {whole} "
                f"in {shown(file.name)} are named: it is damaged"
            )
        key = (file, start, dtype, sizes)
        if key not in self._outside:
            taken = sum(tensor.nbytes for (other, *_), tensor in self._outside.items() if other == file)
            if taken + needed > whole:
                self._wrong(f"{what} and others share bytes of {shown(file.name)} with other shapes: it is damaged")
            try:
                numbers = np.fromfile(file, one, count=math.prod(sizes), offset=start)
            except OSError as error:
                self._wrong(f"{shown(file.name)} cannot be read ({error.strerror or first_line(error)})")
            self._outside[key] = _as_tensor(numbers, dtype, sizes)
        return self._outside[key]

    def _neighbour(self, location: str, what: str) -> tuple[Path, int]:
        """A file in the folder of this one, and its size; links that lead out of it count as outside."""
        on_windows = PureWindowsPath(location)
        folder, own = self._path.parent.resolve(), self._path.resolve().parent
        plain = location.isprintable() and not (on_windows.drive or on_windows.root or ".." in on_windows.parts)
        file = (folder / location).resolve() if plain else Path("/")
        if not location or not (file.is_relative_to(folder) or file.is_relative_to(own)):
            self._wrong(f"{what} lies in {shown(location)}, outside the folder of the file: put both into one folder")
        if not file.is_file():
            self._wrong(f"{what} lies in {shown(location)}, which is no file beside this one: put it there")
        return file, file.stat().st_size

    def _count(self, text: str, what: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            self._wrong(f"{what} has a place {shown(text)} in another file, which is no number: it is damaged")
        return int(text)


def _without_empty_end(names: Iterable[str]) -> tuple[str, ...]:
    kept = list(names)
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def _as_tensor(numbers: np.ndarray[Any, Any], dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    own = torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="))).reshape(sizes)
    return own.ne(0) if dtype == torch.bool else own.view(dtype)
