"""ONNX files for tests: one operation, a module of torch exported, a damaged or hostile file; and onnxruntime."""

from __future__ import annotations

import copy
import gzip
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """One operation on small tensors.

    Attributes:
        inputs: floating arrays that the network takes, and others, or those in `fixed`, that are initialisers; None for
            an input left out. opsets: in which it is tried. outputs: how many. note: tells cases of one name apart.
    """

    operation: str
    inputs: tuple[Array | None, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    opsets: tuple[int, ...] = (9, 13, 17, 22)
    outputs: int = 1
    fixed: tuple[int, ...] = ()
    note: str = ""

    def taken(self) -> list[int]:
        """The inputs that the network takes; the others are stored in the file."""
        return [
            i
            for i, array in enumerate(self.inputs)
            if array is not None and i not in self.fixed and np.issubdtype(array.dtype, np.floating)
        ]

    def model(self, opset: int) -> onnx.ModelProto:
        """A file with this operation alone."""
        names = ["" if array is None else f"x{i}" for i, array in enumerate(self.inputs)]
        taken = self.taken()
        inputs = [
            helper.make_tensor_value_info(
                names[i], helper.np_dtype_to_tensor_dtype(array.dtype), [f"size{i}{j}" for j in range(array.ndim)]
            )
            for i, array in enumerate(self.inputs)
            if array is not None and i in taken
        ]
        stored = [
            numpy_helper.from_array(array, names[i])
            for i, array in enumerate(self.inputs)
            if array is not None and i not in taken
        ]
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.operation, names, outputs, name="the_node", **self.attributes)
        return graph_model([node], inputs, [onnx.ValueInfoProto(name=name) for name in outputs], stored, opset)


def graph_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    stored: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
) -> onnx.ModelProto:
    """A model of a graph."""
    graph = helper.make_graph(nodes, "a_graph", inputs, outputs, stored)
    version = helper.make_opsetid("", opset)
    return helper.make_model(graph, opset_imports=[version], ir_version=helper.find_min_ir_version_for([version]))


def chain(*nodes: onnx.NodeProto, sizes: Sequence[int | str] = (2, 3), opset: int = 17, **stored: Array) -> Any:
    """A model of nodes that take ``x`` and give ``y``, with initialisers."""
    return graph_model(
        nodes,
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, sizes)],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
        opset,
    )


def written(model: onnx.ModelProto | bytes, folder: Path, name: str = "network.onnx") -> Path:
    """The path of a file with this model."""
    path = folder / name
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def unpacked(packed: Path, folder: Path) -> Path:
    """The path of a file that was packed by gzip."""
    return written(gzip.decompress(packed.read_bytes()), folder, packed.name.removesuffix(".gz"))


def by_onnxruntime(path: Path, inputs: Sequence[Array]) -> list[Array]:
    """What onnxruntime computes, on one thread and without its own simplifications."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    named = {wanted.name: array for wanted, array in zip(session.get_inputs(), inputs, strict=True)}
    found: list[Array] = session.run(None, named)
    return found


def exported(module: nn.Module, inputs: tuple[Tensor, ...], path: Path, opset: int, dynamo: bool) -> Path:
    """The path of a file that torch.onnx.export writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False}
        torch.onnx.export(copy.deepcopy(module).eval(), inputs, str(path), opset_version=opset, **options)
    return path


def _draw(*sizes: int, least: float | None = None, kind: str = "f4", seed: int = 0) -> Array:
    """Numbers around zero, or from a least one on."""
    numbers = np.random.default_rng([seed, *sizes]).normal(size=sizes)
    return (numbers if least is None else least + np.abs(numbers)).astype(kind)


def _i(*numbers: int) -> Array:
    return np.array(numbers, dtype=np.int64)


def _scalar(number: float, kind: str = "i8") -> Array:
    return np.array(number, dtype=kind)


def _tensor(array: Array) -> onnx.TensorProto:
    return numpy_helper.from_array(array)


def cases() -> list[Case]:
    """Every operation, with the forms that its opsets have."""
    return [*_entry_by_entry(), *_along_axes(), *_of_shapes(), *_by_index(), *_of_matrices(), *_of_images()]


def _entry_by_entry() -> list[Case]:
    x, y, row, positive = _draw(2, 3, 4), _draw(2, 3, 4, seed=1), _draw(4), _draw(2, 3, least=0.2)
    whole, other = np.array([[7, -7, 2], [5, 0, -9]]), np.array([[2, 2, -1], [3, 1, 4]])
    truth, falsehood = np.array([[True, False], [True, True]]), np.array([[False, False], [True, False]])
    holed = np.where(np.arange(24).reshape(2, 3, 4) % 5 == 0, np.float32(np.nan), x)
    plain = "Abs Ceil Cos Erf Exp Floor Neg Relu Sigmoid Sign Sin Tanh Identity Softplus Softsign Elu LeakyRelu Selu"
    return [
        *(Case(name, (3 * x,)) for name in plain.split()),
        *(Case(name, (positive,)) for name in ("Log", "Sqrt", "Reciprocal")),
        Case("Round", (4 * x,), opsets=(11, 22)),
        Case("Round", (np.array([0.5, 1.5, 2.5, -0.5], "f4"),), opsets=(11,), note="halves"),
        Case("Softplus", (60 * x,), note="large"),
        Case("IsNaN", (holed,)),
        Case("Elu", (x,), {"alpha": 0.3}),
        Case("LeakyRelu", (x,), {"alpha": 0.3}),
        Case("Selu", (x,), {"alpha": 1.2, "gamma": 0.7}),
        Case("Celu", (x,), {"alpha": 0.7}, (12, 17)),
        Case("HardSigmoid", (5 * x,), {"alpha": 0.3, "beta": 0.4}),
        Case("HardSwish", (5 * x,), opsets=(14, 21)),
        Case("PRelu", (x, row), fixed=(1,)),
        Case("Gelu", (2 * x,), opsets=(20, 22)),
        Case("Gelu", (2 * x,), {"approximate": "tanh"}, (20, 22)),
        *(Case(name, (x, y)) for name in ("Add", "Sub", "Mul", "Div", "Less", "Greater")),
        *(Case(name, (x, row), fixed=(1,), note="row") for name in ("Add", "Sub", "Mul", "Div")),
        *(Case(name, (whole, other), note="whole") for name in ("Add", "Sub", "Mul", "Div", "Equal", "Less")),
        Case("Equal", (x, x), opsets=(11, 17)),
        *(Case(name, (x, y), opsets=(12, 17)) for name in ("LessOrEqual", "GreaterOrEqual")),
        *(Case(name, (truth, falsehood)) for name in ("And", "Or", "Xor")),
        Case("Not", (truth,)),
        *(Case(name, (x, y, row)) for name in ("Min", "Max", "Sum")),
        *(Case(name, (whole, other), opsets=(12, 17), note="whole") for name in ("Min", "Max")),
        Case("Mod", (whole, other), opsets=(10, 17)),
        Case("Mod", (x, y), {"fmod": 1}, (10, 17)),
        Case("Pow", (x, _scalar(2.0, "f4")), fixed=(1,)),
        Case("Pow", (x, _scalar(3)), opsets=(12, 17), fixed=(1,), note="whole exponent"),
        Case("Pow", (positive, _draw(3, seed=2)), note="row of exponents"),
        Case("Pow", (positive, np.full((1, 1, 1), 0.5, "f4")), fixed=(1,), note="more axes"),
        Case("Clip", (x,), {"min": -0.3, "max": 0.4}, (9,)),
        Case("Clip", (x,), {"min": -0.3}, (9,)),
        Case("Clip", (x,), {}, (9, 11, 22), note="free"),
        Case("Clip", (x, _scalar(-0.3, "f4"), _scalar(0.4, "f4")), {}, (11, 13, 22), fixed=(1, 2)),
        Case("Clip", (x, None, _scalar(0.4, "f4")), {}, (11, 22), fixed=(2,), note="above"),
        Case("Where", (truth, _draw(2, 2), _draw(2)), opsets=(9, 17)),
        Case("Dropout", (x,), {"ratio": 0.9}, (9,)),
        Case("Dropout", (x,), {}, (12, 22)),
        Case("Dropout", (x, _scalar(0.9, "f4"), np.array(False)), {}, (13, 22), 2, (1,), note="mask"),
        *(Case("Cast", (9 * x,), {"to": to}) for to in map(onnx.TensorProto.DataType.Value, _KINDS)),
        Case("Cast", (whole,), {"to": onnx.TensorProto.FLOAT}, note="whole"),
        Case("CastLike", (9 * x, _i(3)), opsets=(15, 22)),
        Case("CastLike", (9 * x, _draw(1, kind="f8")), opsets=(15, 22), fixed=(1,), note="double"),
    ]


_KINDS = ("FLOAT", "DOUBLE", "FLOAT16", "INT64", "INT32", "BOOL")


def _along_axes() -> list[Case]:
    x, whole = _draw(2, 3, 4), np.array([[7, -7, 2], [5, 0, -9]])
    reductions = "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceSumSquare ReduceProd ReduceLogSumExp"
    early = {"ReduceSum": (9, 11)}
    return [
        *(
            Case(name, (x,), {} if axis is None else {"axis": axis}, opsets)
            for name in ("Softmax", "LogSoftmax")
            for axis, opsets in ((None, (9, 12, 13, 22)), (0, (11, 13)), (1, (11, 13)), (2, (9, 17)), (-1, (12, 18)))
        ),
        Case("Softmax", (_draw(2, 3, 1, 1),), {"axis": 1}, (11, 13), note="ones behind"),
        *(
            Case(name, (x,), {"axes": axes, "keepdims": keep}, early.get(name, (9, 13, 17)))
            for name in reductions.split()
            for axes, keep in (([1], 1), ([-1, 0], 0))
        ),
        *(Case(name, (x,), {}, (9, 13, 17)) for name in reductions.split()),
        *(Case(name, (x, _i(0, -1)), {"keepdims": 0}, (18, 20, 22)) for name in reductions.split()),
        *(Case(name, (x,), {"noop_with_empty_axes": 1}, (18,)) for name in ("ReduceSum", "ReduceMean", "ReduceMax")),
        *(Case(name, (whole, _i(1)), {}, (18,), note="whole") for name in ("ReduceSum", "ReduceMax", "ReduceProd")),
        *(Case(name, (whole.astype("i4"),), {}, (13, 18), note="short") for name in ("ReduceSum", "ReduceProd")),
        *(Case("ArgMax", (x,), attributes, (9, 13)) for attributes in ({}, {"axis": -1, "keepdims": 0})),
        *(
            Case("CumSum", (x, _scalar(axis)), {"exclusive": exclusive, "reverse": back}, (11, 17))
            for axis, exclusive, back in ((1, 0, 0), (-1, 1, 0), (0, 0, 1), (2, 1, 1))
        ),
        Case("CumSum", (whole.astype("i4"), _scalar(1)), {}, (17,), note="whole"),
    ]


def _of_shapes() -> list[Case]:
    x, long = _draw(2, 3, 4), _draw(7, 3)
    far = 2**63 - 1
    slices: list[tuple[list[int], list[int], list[int], list[int], str]] = [
        ([1], [3], [1], [1], "middle"),
        ([0, -3], [far, -1], [0, 2], [1, 1], "negative"),
        ([-1], [-far], [2], [-1], "backwards"),
        ([-9], [-far], [1], [-1], "from before the axis"),
        ([3, 2], [0, -9], [2, 1], [-2, -1], "strides back"),
        ([5], [9], [1], [1], "empty"),
        ([0], [4], [2], [3], "stride"),
    ]
    return [
        Case("Shape", (x,)),
        *(Case("Shape", (x,), ends, (15, 22)) for ends in ({"start": 1}, {"start": -2, "end": -1}, {"end": 9})),
        Case("Size", (x,)),
        *(Case("Reshape", (x, _i(*sizes))) for sizes in ((6, 4), (0, -1), (2, -1, 2), (-1,), (0, 0, 2, 2))),
        Case("Reshape", (np.zeros((0, 3), "f4"), _i(3, 0)), {"allowzero": 1}, (14, 22)),
        *(Case("Flatten", (x,), {"axis": axis}, (11, 17)) for axis in (0, 1, 2, 3, -1)),
        Case("Transpose", (x,)),
        Case("Transpose", (x,), {"perm": [1, 2, 0]}),
        Case("Squeeze", (_draw(1, 3, 1),), {"axes": [0, -1]}, (11,)),
        Case("Squeeze", (_draw(1, 3, 1), _i(2)), {}, (13, 21)),
        Case("Squeeze", (_draw(1, 3, 1),)),
        Case("Unsqueeze", (x,), {"axes": [0, 3]}, (9, 11)),
        Case("Unsqueeze", (x,), {"axes": [-1]}, (11,)),
        Case("Unsqueeze", (x, _i(4, 0)), {}, (13, 21)),
        *(Case("Expand", (_draw(3, 1), _i(*sizes))) for sizes in ((2, 3, 4), (1, 4), (3, 1), (1,))),
        Case("Tile", (x, _i(2, 1, 3))),
        Case("ConstantOfShape", (_i(2, 3),)),
        Case("ConstantOfShape", (_i(2, 3),), {"value": _tensor(np.array([7], "i8"))}, (9, 22)),
        Case("ConstantOfShape", (np.zeros(0, "i8"),), {"value": _tensor(np.array([0.5], "f4"))}, (9, 20)),
        *(Case("Range", (_scalar(a), _scalar(b), _scalar(c)), {}, (11, 17)) for a, b, c in ((2, 9, 3), (5, 0, -2))),
        Case("Range", (_scalar(4), _scalar(1), _scalar(2)), {}, (11,), note="empty"),
        Case("Range", (_scalar(0.5, "f4"), _scalar(3, "f4"), _scalar(0.4, "f4")), {}, (11,), 1, (0, 1, 2), "broken"),
        *(Case("Concat", (x, _draw(2, 3, 4, seed=3), x), {"axis": axis}, (11, 17)) for axis in (0, -1)),
        Case("Split", (_draw(6, 2),), {"axis": 0}, (9, 13), 3),
        Case("Split", (x,), {"axis": 2, "split": [1, 3]}, (9, 11), 2),
        Case("Split", (x, _i(3, 1)), {"axis": -1}, (13, 18), 2),
        Case("Split", (long,), {"num_outputs": 3}, (18, 22), 3),
        *(
            Case("Slice", (x,), {"starts": starts, "ends": ends, "axes": axes}, (9,), note=note)
            for starts, ends, axes, steps, note in slices
            if steps[0] == 1
        ),
        *(
            Case("Slice", (x, _i(*starts), _i(*ends), _i(*axes), _i(*steps)), {}, (10, 13, 22), note=note)
            for starts, ends, axes, steps, note in slices
        ),
        Case("Slice", (x, _i(1, 0), _i(2, 2)), {}, (11,), note="first axes"),
        Case("Pad", (x,), {"pads": [0, 1, 0, 2, 0, 0], "value": 0.5}, (9,)),
        Case("Pad", (x, _i(0, 1, 0, 2, 0, 3)), {}, (11, 18, 22)),
        Case("Pad", (x, _i(0, -1, 1, 0, 0, -2), _scalar(0.5, "f4")), {}, (11, 18), fixed=(2,), note="cut"),
        Case("Pad", (x, _i(2, 1), None, _i(-1)), {}, (18, 22), note="axis"),
        *(Case("Constant", (), {"value": _tensor(array)}, (9, 22)) for array in (x, _i(1, 2), np.array([True]))),
        *(
            Case("Constant", (), {kind: value}, (12, 22))
            for kind, value in (
                ("value_float", 0.5),
                ("value_floats", [0.5, 1.0]),
                ("value_int", 3),
                ("value_ints", [3]),
            )
        ),
        *(Case("Trilu", (x,), {"upper": upper}, (14,)) for upper in (0, 1)),
        Case("Trilu", (x, _scalar(-1)), {}, (14, 22)),
    ]


def _by_index() -> list[Case]:
    x, index = _draw(4, 3), np.array([[0, -1], [2, 1]])
    return [
        Case("Gather", (x, _scalar(2))),
        Case("Gather", (x, _scalar(-1)), {"axis": 1}, (11, 17), note="scalar"),
        Case("Gather", (x, _i(0, 2, 2)), {"axis": 1}),
        Case("Gather", (x, index), {"axis": -1}, (11, 17)),
        Case("Gather", (x, index.astype("i4")), {}, (11, 17), note="short"),
        Case("GatherElements", (x, index), {"axis": 0}, (11, 17)),
        Case("GatherElements", (x, index), {"axis": -1}, (11, 17)),
        Case("GatherND", (x, np.array([[0, 1], [3, -1]])), {}, (11, 17)),
        Case("GatherND", (x, np.array([[[0], [3]]])), {}, (12, 17), note="rows"),
        Case("ScatterElements", (x, index, _draw(2, 2)), {"axis": 0}, (11, 17)),
        Case("ScatterElements", (x, np.array([[0, 1]]), _draw(1, 2)), {"axis": 1, "reduction": "add"}, (16, 18)),
        Case("ScatterND", (x, np.array([[0], [2]]), _draw(2, 3)), {}, (11, 17)),
        Case("ScatterND", (x, np.array([[0], [0]]), _draw(2, 3)), {"reduction": "add"}, (16, 18)),
    ]


def _of_matrices() -> list[Case]:
    a, b, c = _draw(3, 4), _draw(4, 5, seed=1), _draw(5, seed=2)
    tokens = _draw(2, 3, 4)
    return [
        *(Case("MatMul", pair, fixed=(1,)) for pair in ((a, b), (tokens, b), (_draw(4), b), (a, _draw(4)))),
        Case("MatMul", (tokens, _draw(2, 4, 3)), note="batch"),
        Case("MatMul", (_draw(2, 1, 3, 4), _draw(5, 4, 2)), note="batches"),
        Case("Gemm", (a, b, c), fixed=(1, 2)),
        Case("Gemm", (a, _draw(5, 4), c), {"transB": 1}, fixed=(1, 2), note="as torch writes it"),
        Case("Gemm", (_draw(4, 3), b, c), {"transA": 1, "alpha": 0.5, "beta": 2.0}),
        Case("Gemm", (a, b), {}, (11, 22), note="alone"),
        Case("Gemm", (a, b, _draw(3, 1)), note="column"),
        Case("Gemm", (a, b, c), {"beta": 0.0}),
        Case("Einsum", (_draw(2, 3, 4), _draw(2, 5, 4)), {"equation": "bid, bjd -> bij"}, (12, 17)),
        Case("Einsum", (a,), {"equation": "ij->j"}, (12,)),
        Case("Einsum", (a, b), {"equation": "ij,jk"}, (12,)),
        Case("Einsum", (_draw(2), _draw(3), _draw(2, 3)), {"equation": "a,b,ab->ba"}, (12,)),
        Case("LayerNormalization", (tokens, _draw(4), _draw(4, seed=1)), {"epsilon": 1e-3}, (17, 22), fixed=(1, 2)),
        Case("LayerNormalization", (tokens, _draw(3, 4)), {"axis": 1}, (17,), fixed=(1,), note="without bias"),
        Case("LayerNormalization", (tokens, _draw(4), _draw(1)), {"axis": 1}, (17,), fixed=(1, 2), note="broadcast"),
    ]


def _of_images() -> list[Case]:
    line, image, volume = _draw(2, 4, 9), _draw(2, 4, 7, 8), _draw(1, 2, 5, 6, 4)
    kernel, bias = _draw(6, 4, 3, 3), _draw(6)
    grouped = _draw(4, 2, 3, 3)
    norms = (_draw(4), _draw(4, seed=1), _draw(4, seed=2), _draw(4, least=0.3))
    sames: list[dict[str, Any]] = [{"auto_pad": name, "strides": [2, 3]} for name in ("SAME_UPPER", "SAME_LOWER")]
    window: dict[str, Any] = {"kernel_shape": [3, 2]}
    pools = [
        {},
        {"strides": [2, 2]},
        {"strides": [2, 1], "pads": [1, 1, 1, 1]},
        {"pads": [0, 1, 2, 0]},
        {"pads": [2, 1, 2, 1]},
        *({**same, "kernel_shape": [3, 4]} for same in sames),
        {"auto_pad": "VALID"},
        {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 0, 1, 0], "ceil_mode": 1},
    ]
    return [
        Case("Conv", (line, _draw(6, 4, 3), bias), {}, fixed=(1, 2)),
        Case("Conv", (line, _draw(6, 4, 4)), {"pads": [0, 3], "dilations": [2]}, fixed=(1,)),
        Case("Conv", (image, kernel, bias), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, fixed=(1, 2)),
        Case("Conv", (image, kernel), {"strides": [2, 1], "pads": [1, 2, 0, 0], "dilations": [1, 2]}, fixed=(1,)),
        Case("Conv", (image, grouped), {"group": 2}, fixed=(1,)),
        *(Case("Conv", (image, kernel), same, (11, 22), fixed=(1,)) for same in sames),
        Case("Conv", (image, kernel), {"auto_pad": "VALID"}, fixed=(1,)),
        Case("Conv", (volume, _draw(3, 2, 2, 3, 1)), {}, fixed=(1,)),
        *(Case("MaxPool", (image,), {**window, **options}, (11, 12, 22)) for options in pools),
        Case("MaxPool", (line,), {"kernel_shape": [3], "dilations": [2]}, (11, 22)),
        Case("MaxPool", (volume,), {"kernel_shape": [2, 2, 2]}),
        *(
            Case("AveragePool", (image,), {**window, **options, "count_include_pad": counted}, (11, 19, 22))
            for options in pools
            for counted in (0, 1)
        ),
        Case("AveragePool", (line,), {"kernel_shape": [3]}),
        *(Case(name, (image,)) for name in ("GlobalAveragePool", "GlobalMaxPool")),
        *(Case("BatchNormalization", (x, *norms), {"epsilon": 1e-3}, fixed=(1, 2, 3, 4)) for x in (line, image)),
        Case("InstanceNormalization", (image, *norms[:2]), {"epsilon": 1e-3}, fixed=(1, 2)),
        Case("GroupNormalization", (image, _draw(2), _draw(2, seed=1)), {"num_groups": 2}, (18,), fixed=(1, 2)),
        Case("GroupNormalization", (image, *norms[:2]), {"num_groups": 2}, (21, 22), fixed=(1, 2)),
    ]
