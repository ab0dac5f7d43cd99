"""Networks in ONNX files compute what onnxruntime computes, and a file that asks for more is refused in a sentence."""

from __future__ import annotations

import copy
import os
import pickle
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from howsmooth.errors import HowsmoothError, InvalidInput, MissingPackage, UnsupportedModel
from howsmooth.network import onnx_operations
from howsmooth.network.onnx_module import OnnxInput, OnnxModule, read_onnx
from tests.network import onnx_makers as makers
from tests.network.onnx_makers import chain, written

CASES = [(case, opset) for case in makers.cases() for opset in case.opsets]
NAMES = [f"{case.operation}-{opset}-{case.note or i}" for i, (case, opset) in enumerate(CASES)]
every_case = pytest.mark.parametrize(("case", "opset"), CASES, ids=NAMES)
VITS = ("ibp_3_3_8", "pgd_2_3_16")
node = helper.make_node


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_near(found: Any, wanted: list[makers.Array], tolerance: float = 1e-5) -> None:
    """Floating numbers differ by at most a fraction of the largest, others not at all."""
    for one, other in zip(_tuple(found), wanted, strict=True):
        assert tuple(one.shape) == other.shape
        if one.is_floating_point():
            scale = np.abs(other).max(initial=0.0, where=np.isfinite(other))
            np.testing.assert_allclose(one.detach().numpy(), other, rtol=0, atol=tolerance * scale)
        else:
            assert np.array_equal(one.numpy(), other)


def assert_sentence(error: BaseException, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 700
    assert all(word in text for word in words), text


def refused(
    model: onnx.ModelProto | bytes, folder: Path, *words: str, kind: type[HowsmoothError] = UnsupportedModel
) -> None:
    """The file is refused by an error of this kind, with these words."""
    with pytest.raises(kind) as caught:
        read_onnx(written(model, folder))
    assert_sentence(caught.value, *words)


def stopped(model: onnx.ModelProto, folder: Path, *words: str, x: Tensor | None = None) -> None:
    """The file is read, and its network stops with a sentence that has these words."""
    network = read_onnx(written(model, folder))
    with pytest.raises(InvalidInput) as caught:
        network(torch.ones(2, 3) if x is None else x)
    assert_sentence(caught.value, *words)


class Followed(Tensor):
    """A tensor whose numbers may not be looked at, and whose results are of its kind."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> Followed:
        made = Tensor._make_wrapper_subclass(cls, value.size(), strides=value.stride(), dtype=value.dtype)
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func)
        plain = tree_map_only(Followed, lambda one: one.value, (args, kwargs or {}))
        return tree_map_only(Tensor, Followed, func(*plain[0], **plain[1]))


# What is computed


@every_case
def test_an_operation_is_what_onnxruntime_computes(case: makers.Case, opset: int, tmp_path: Path) -> None:
    path = written(case.model(opset), tmp_path)
    given = [case.inputs[i] for i in case.taken()]
    found, wanted = read_onnx(path)(*map(torch.tensor, given)), makers.by_onnxruntime(path, given)
    assert [str(one.dtype).removeprefix("torch.") for one in _tuple(found)] == [str(one.dtype) for one in wanted]
    assert_near(found, wanted)


@every_case
def test_after_double_every_floating_output_is_of_float64(case: makers.Case, opset: int, tmp_path: Path) -> None:
    path = written(case.model(opset), tmp_path)
    given = [case.inputs[i] for i in case.taken()]
    found = read_onnx(path).double()(*(torch.tensor(array).double() for array in given))
    assert all(one.dtype == torch.float64 for one in _tuple(found) if one.is_floating_point())
    rounded = case.attributes.get("to") == TensorProto.FLOAT16
    assert_near(found, makers.by_onnxruntime(path, given), 1e-3 if rounded else 1e-5)


@pytest.mark.parametrize(("case", "opset"), [(case, opset) for case, opset in CASES if case.taken()])
def test_an_input_can_be_followed(case: makers.Case, opset: int, tmp_path: Path) -> None:
    first, *others = (torch.tensor(case.inputs[i]) for i in case.taken())
    network = read_onnx(written(case.model(opset), tmp_path))
    followed, plain = _tuple(network(Followed(first), *others)), _tuple(network(first, *others))
    for one, other in zip(followed, plain, strict=True):
        value = one.value if isinstance(one, Followed) else one
        assert torch.equal(value.nan_to_num(), other.nan_to_num())
        assert isinstance(one, Followed) or case.operation in ("Shape", "Size", "Dropout")


def test_every_operation_has_a_case() -> None:
    assert {case.operation for case, _ in CASES} == {*onnx_operations.OPERATIONS, "Constant"}


def test_a_wrong_operation_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: softmax as from opset 13 on, in a file of opset 11."""
    case = makers.Case("Softmax", (np.ones((2, 3, 4), "f4"),), {"axis": 1})
    path = written(case.model(11), tmp_path)
    monkeypatch.setitem(onnx_operations.OPERATIONS, "Softmax", lambda node, x: x.softmax(node["axis"]))
    with pytest.raises(AssertionError):
        assert_near(read_onnx(path)(torch.ones(2, 3, 4)), makers.by_onnxruntime(path, [case.inputs[0]]))


class SmallViT(nn.Module):
    """Patches, a class token, positions, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.positions
        return self.head(self.layers(tokens)[:, 0])


def layer() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(2, 5, 16)


def vit() -> tuple[nn.Module, Tensor]:
    return SmallViT(), torch.randn(1, 3, 16, 16)


def mlp() -> tuple[nn.Module, Tensor]:
    parts = (nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Softmax(-1))
    return nn.Sequential(*parts), torch.randn(4, 5)


def cnn() -> tuple[nn.Module, Tensor]:
    start = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    end = (nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(*start, *end), torch.randn(2, 3, 16, 16)


def bert() -> tuple[nn.Module, Tensor]:
    from transformers import BertConfig, BertModel

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
            self.model = BertModel(BertConfig(vocab_size=50, max_position_embeddings=32, **sizes))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens)[0]

    return First(), torch.tensor([[1, 5, 7, 2, 9]])


@pytest.mark.parametrize(
    ("make", "opset", "dynamo"),
    [
        # The older exporter cannot trace an encoder layer on its own.
        *((layer, opset, True) for opset in (17, 20)),
        *((make, opset, dynamo) for make in (vit, mlp, cnn, bert) for opset in (17, 20) for dynamo in (False, True)),
    ],
)
@pytest.mark.slow
def test_an_exported_module_is_the_module(
    make: Callable[[], tuple[nn.Module, Tensor]], opset: int, dynamo: bool, tmp_path: Path
) -> None:
    module, x = make()
    path = makers.exported(module.eval(), (x,), tmp_path / "network.onnx", opset, dynamo)
    network = read_onnx(path)
    found = network(x).detach()
    assert_near(found, [module(x).detach().numpy()])
    assert_near(found, makers.by_onnxruntime(path, [x.numpy()]))
    precise = module.double()(x.double() if x.is_floating_point() else x)
    exact = network.double()(x.double() if x.is_floating_point() else x)
    assert exact.dtype == torch.float64
    assert_near(exact, [precise.detach().numpy()], 1e-6)  # numbers such as 1/√8 stand in the file in float32


@pytest.mark.slow
@pytest.mark.parametrize("name", VITS)
def test_a_transformer_of_vnncomp_is_what_onnxruntime_computes(name: str, shared_dir: Path, tmp_path: Path) -> None:
    packed = shared_dir / "data" / "vnncomp-vit" / "onnx" / f"{name}.onnx.gz"
    if not packed.is_file():
        pytest.skip(f"needs {packed}, which is missing")
    path = makers.unpacked(packed, tmp_path)
    network, x = read_onnx(path), torch.rand(4, 3, 32, 32)
    assert network.inputs == (OnnxInput("input", (None, 3, 32, 32), torch.float32),)
    found = network(x)
    assert_near(found, makers.by_onnxruntime(path, [x.numpy()]))
    exact = network.double()(x.double())
    assert exact.dtype == torch.float64
    assert_near(found, [exact.numpy()])


# Precision


def half_model() -> onnx.ModelProto:
    """x in float16, multiplied in float32, and back."""
    nodes = (
        node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        node("MatMul", ["wide", "w"], ["product"]),
        node("Cast", ["product"], ["narrow"], to=TensorProto.FLOAT16),
        node("Add", ["narrow", "b"], ["y"]),
    )
    rng = np.random.default_rng(0)
    model: onnx.ModelProto = chain(*nodes, w=rng.normal(size=(3, 3)).astype("f4"), b=rng.normal(size=3).astype("f2"))
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    return model


def test_conversions_in_the_file_round_until_the_module_is_converted(tmp_path: Path) -> None:
    path, x = written(half_model(), tmp_path), torch.randn(2, 3).half()
    network = read_onnx(path)
    assert {buffer.dtype for buffer in network.buffers()} == {torch.float16, torch.float32}
    found = network(x)
    assert found.dtype == torch.float16
    assert_near(found, makers.by_onnxruntime(path, [x.numpy()]), 1e-3)
    w, b = (torch.tensor(numpy_helper.to_array(proto)).double() for proto in half_model().graph.initializer)
    torch.testing.assert_close(network.double()(x.double()), x.double() @ w + b)


def test_an_input_in_another_dtype_is_refused(tmp_path: Path) -> None:
    network = read_onnx(written(chain(node("Relu", ["x"], ["y"])), tmp_path))
    assert network(torch.ones(2, 3)).dtype == torch.float32
    for converted, dtype in ((network, torch.float64), (copy.deepcopy(network).double(), torch.float32)):
        with pytest.raises(InvalidInput) as caught:
            converted(torch.ones(2, 3, dtype=dtype))
        assert_sentence(caught.value, "float32", "float64")


@pytest.mark.parametrize(
    ("stored", "raw"),
    [(kind, raw) for kind in ("f4", "f8", "f2", "i8", "i4", "i2", "i1", "u1", "?") for raw in (True, False)],
)
def test_numbers_are_read_however_they_are_stored(stored: str, raw: bool, tmp_path: Path) -> None:
    array = np.array([[1, 0, 3], [5, 1, 2]]).astype(stored)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    data = array.tobytes() if raw else array.ravel().tolist()
    model = chain(node("Identity", ["w"], ["y"]))
    model.graph.initializer.append(helper.make_tensor("w", kind, array.shape, data, raw=raw))
    found = read_onnx(written(model, tmp_path))(torch.ones(2, 3))
    assert found.numpy().dtype == array.dtype
    assert np.array_equal(found.numpy(), array)


@pytest.mark.parametrize("raw", [True, False])
def test_numbers_of_bfloat16_are_read(raw: bool, tmp_path: Path) -> None:
    numbers = torch.tensor([1.5, -2.0, 3e38]).bfloat16()
    bits = numbers.view(torch.int16).numpy().view("u2")
    model = chain(node("Identity", ["w"], ["y"]))
    stored = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[3])
    if raw:
        stored.raw_data = bits.tobytes()
    else:
        stored.int32_data.extend(bits.tolist())
    model.graph.initializer.append(stored)
    assert torch.equal(read_onnx(written(model, tmp_path))(torch.ones(2, 3)), numbers)


def test_every_byte_but_zero_is_true(tmp_path: Path) -> None:
    model = chain(node("Cast", ["w"], ["y"], to=TensorProto.INT64))
    stored = TensorProto(name="w", data_type=TensorProto.BOOL, dims=[4], raw_data=bytes([0, 1, 2, 255]))
    model.graph.initializer.append(stored)
    assert read_onnx(written(model, tmp_path))(torch.ones(2, 3)).tolist() == [0, 1, 1, 1]


# The module


def test_values_of_the_file_that_are_listed_as_inputs_are_none(tmp_path: Path) -> None:
    model = chain(node("Add", ["x", "w"], ["y"]), sizes=("batch", 3), w=np.ones(3, "f4"))
    model.graph.input.insert(0, helper.make_tensor_value_info("w", TensorProto.FLOAT, [3]))
    network = read_onnx(written(model, tmp_path))
    assert network.inputs == (OnnxInput("x", (None, 3), torch.float32),)
    assert network.outputs == ("y",)
    assert torch.equal(network(torch.ones(4, 3)), torch.full((4, 3), 2.0))


def test_several_inputs_and_outputs_keep_their_order(tmp_path: Path) -> None:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a", "b")]
    nodes = [node("Sub", ["a", "b"], ["difference"]), node("Shape", ["a"], ["sizes"])]
    outputs = [onnx.ValueInfoProto(name=name) for name in ("sizes", "difference", "a")]
    network = read_onnx(written(makers.graph_model(nodes, info, outputs), tmp_path))
    assert [wanted.shape for wanted in network.inputs] == [None, None]
    sizes, difference, a = network(torch.ones(2), torch.full((2,), 3.0))
    assert sizes.tolist() == [2]
    assert difference.tolist() == [-2, -2]
    assert a.tolist() == [1, 1]


def test_a_module_can_be_copied_and_stored(tmp_path: Path) -> None:
    network = read_onnx(written(chain(node("Mul", ["x", "w"], ["y"]), w=np.full(3, 2.0, "f4")), tmp_path))
    for again in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert isinstance(again, OnnxModule)
        assert torch.equal(again(torch.ones(2, 3)), network(torch.ones(2, 3)))
    assert repr(network) == "OnnxModule(x → y, 1 operations)"


def test_derivatives_pass_through_and_through_vmap(tmp_path: Path) -> None:
    nodes = (node("MatMul", ["x", "w"], ["h"]), node("Softmax", ["h"], ["y"]))
    w = np.random.default_rng(0).normal(size=(3, 4)).astype("f4")
    network = read_onnx(written(chain(*nodes, sizes=("n", 3), w=w), tmp_path)).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    wanted = torch.func.jacrev(lambda x: (x @ torch.tensor(w).double()).softmax(-1))(x)
    torch.testing.assert_close(torch.func.jacrev(network)(x), wanted)
    torch.testing.assert_close(torch.func.jacfwd(network)(x), wanted)
    torch.testing.assert_close(torch.func.vmap(network)(torch.stack([x, 2 * x]))[1], network(2 * x))


def test_memory_of_what_is_read_no_more_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def negative(node: onnx_operations.Node, x: Tensor) -> Tensor:
        alive.append(sum(one() is not None for one in made))
        result = -x
        made.append(weakref.ref(result))
        return result

    monkeypatch.setitem(onnx_operations.OPERATIONS, "Neg", negative)
    nodes = [node("Neg", [f"v{i}" if i else "x"], [f"v{i + 1}"]) for i in range(5)]
    read_onnx(written(chain(*nodes, node("Add", ["v1", "v5"], ["y"])), tmp_path))(torch.ones(2, 3))
    assert alive == [0, 1, 2, 2, 2]  # the first one, which the end reads, and the one before


@pytest.mark.parametrize("given", [(), (torch.ones(2, 3),) * 2, (torch.ones(3, 3),), (torch.ones(3),), ("x",)])
def test_other_inputs_are_refused(given: tuple[Any, ...], tmp_path: Path) -> None:
    network = read_onnx(written(chain(node("Relu", ["x"], ["y"])), tmp_path))
    with pytest.raises(InvalidInput) as caught:
        network(*given)
    assert_sentence(caught.value, "'x'")


def test_a_lacking_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingPackage, match=r"pip install 'howsmooth\[onnx\]'"):
        read_onnx(tmp_path / "network.onnx")


# What is refused by name


def foreign() -> onnx.ModelProto:
    return chain(node("FusedMatMul", ["x"], ["y"], domain="com.microsoft", name="fused"))


def unknown() -> onnx.ModelProto:
    return chain(node("NonMaxSuppression", ["x", "x"], ["y"], name="/det/NMS"))


def branching() -> onnx.ModelProto:
    return chain(node("If", ["x"], ["y"], name="choice"))


def looping() -> onnx.ModelProto:
    return chain(node("Loop", ["x"], ["y"]))


def scanning() -> onnx.ModelProto:
    return chain(node("Scan", ["x"], ["y"]))


def functions() -> onnx.ModelProto:
    model = chain(node("Relu", ["x"], ["y"]))
    model.functions.add(name="own", domain="mine")
    return model


def training() -> onnx.ModelProto:
    model = chain(node("Relu", ["x"], ["y"]))
    model.training_info.add()
    return model


def sparse() -> onnx.ModelProto:
    model = chain(node("Relu", ["x"], ["y"]))
    model.graph.sparse_initializer.add()
    return model


def texts() -> onnx.ModelProto:
    return chain(node("Constant", [], ["y"], value_string="text", name="word"))


def text_tensor() -> onnx.ModelProto:
    return chain(node("Constant", [], ["y"], value=helper.make_tensor("t", TensorProto.STRING, [1], ["a"])))


def complex_tensor() -> onnx.ModelProto:
    return chain(node("Identity", ["w"], ["y"]), w=np.ones(2, "c8"))


def sequence() -> onnx.ModelProto:
    model = chain(node("Relu", ["x"], ["y"]))
    model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None))
    return model


def reflecting() -> onnx.ModelProto:
    return chain(node("Pad", ["x", "w"], ["y"], mode="reflect", name="mirror"), w=np.array([0, 1, 0, 1]))


def normalising_in_training() -> onnx.ModelProto:
    numbers = {name: np.ones(3, "f4") for name in "abcd"}
    return chain(node("BatchNormalization", ["x", *"abcd"], ["y"], training_mode=1), **numbers)


def several_outputs() -> onnx.ModelProto:
    return chain(node("LayerNormalization", ["x", "w"], ["y", "mean"], name="norm"), w=np.ones(3, "f4"))


def old() -> onnx.ModelProto:
    return chain(node("Relu", ["x"], ["y"]), opset=8)


def new() -> onnx.ModelProto:
    return chain(node("Relu", ["x"], ["y"]), opset=23)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (foreign, ["'FusedMatMul'", "'fused'", "com.microsoft"]),
        (unknown, ["'NonMaxSuppression'", "'/det/NMS'", "not among those that can be read"]),
        (branching, ["'If'", "'choice'", "branches"]),
        (looping, ["'Loop'", "number 0"]),
        (scanning, ["'Scan'"]),
        (functions, ["'own'"]),
        (training, ["training"]),
        (sparse, ["sparse"]),
        (texts, ["'word'", "texts"]),
        (text_tensor, ["STRING"]),
        (complex_tensor, ["'w'", "COMPLEX64"]),
        (sequence, ["'x'", "no tensor"]),
        (reflecting, ["'mirror'", "reflect"]),
        (normalising_in_training, ["BatchNormalization", "training_mode"]),
        (several_outputs, ["'norm'", "2 outputs"]),
        (old, ["opset 8", "9 to 22"]),
        (new, ["opset 23"]),
    ],
)
def test_a_file_that_asks_for_more_is_refused_by_name(
    make: Callable[[], onnx.ModelProto], words: list[str], tmp_path: Path
) -> None:
    refused(make(), tmp_path, *words)


# Files that contradict themselves


def renamed(**changes: Any) -> onnx.ModelProto:
    """A valid file with one operation, whose node is changed."""
    model = chain(node("LeakyRelu", ["x"], ["y"], name="the_node", alpha=0.5), w=np.ones(3, "f4"))
    for name, value in changes.items():
        field = getattr(model.graph.node[0], name)
        if isinstance(value, str):
            setattr(model.graph.node[0], name, value)
        else:
            del field[:]
            field.extend(value)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (renamed(input=["z"]), ["'z'", "nothing gives"]),
        (renamed(input=["y"]), ["'y'", "cycle"]),
        (renamed(input=[]), ["0 inputs where 1"]),
        (renamed(input=[""]), ["0 inputs"]),
        (renamed(input=["x", "w"]), ["2 inputs where 1"]),
        (renamed(output=[]), ["0 outputs"]),
        (renamed(output=["x"]), ["'x'", "two things"]),
        (renamed(output=["w"]), ["'w'", "two things"]),
        (renamed(output=["q"]), ["output 'y'"]),
        (renamed(attribute=[helper.make_attribute("beta", 1.0)]), ["'beta'"]),
        (renamed(attribute=[helper.make_attribute("alpha", 1)]), ["'alpha'", "INT"]),
        (renamed(attribute=[helper.make_attribute("alpha", 1.0)] * 2), ["'alpha'"]),
        (renamed(op_type="Concat", attribute=[]), ["lacks the attribute axis"]),
        (renamed(op_type="Gelu", attribute=[]), ["'Gelu'", "does not exist in opset 17"]),
        (renamed(op_type="Where", attribute=[], input=["x", "", "x"]), ["input number 2"]),
        (renamed(op_type="Sum", attribute=[], input=["x", "", "x"]), ["input number 2"]),
    ],
)
def test_a_graph_that_contradicts_itself_is_refused(model: onnx.ModelProto, words: list[str], tmp_path: Path) -> None:
    refused(model, tmp_path, *words, kind=InvalidInput)


def test_an_order_that_cannot_run_is_refused(tmp_path: Path) -> None:
    nodes = [node("Neg", ["b"], ["y"], name="early"), node("Abs", ["x"], ["b"])]
    refused(chain(*nodes), tmp_path, "'early'", "'b'", "the order is wrong", kind=InvalidInput)
    refused(chain(*nodes[::-1], node("Abs", ["x"], ["b"])), tmp_path, "two things", "'b'", kind=InvalidInput)


def test_files_that_are_no_networks_are_refused(tmp_path: Path) -> None:
    good = chain(node("MatMul", ["x", "w"], ["y"]), w=np.ones((3, 400), "f4")).SerializeToString()
    for content in (b"", b"hello, world", b"\xff" * 50, b"\x08\x01", good[:-300]):
        refused(content, tmp_path, "network.onnx", kind=InvalidInput)
    for missing in (tmp_path / "missing.onnx", tmp_path):
        with pytest.raises(InvalidInput) as caught:
            read_onnx(missing)
        assert_sentence(caught.value, "there is no file")
    with (tmp_path / "large.onnx").open("wb") as file:
        file.truncate(2**31)  # a hole: it takes no room
    with pytest.raises(InvalidInput, match="2 GB"):
        read_onnx(tmp_path / "large.onnx")


def test_a_file_without_one_version_is_refused(tmp_path: Path) -> None:
    model = chain(node("Relu", ["x"], ["y"]))
    model.opset_import.add(domain="ai.onnx", version=11)
    refused(model, tmp_path, "opset", kind=InvalidInput)
    del model.opset_import[:]
    refused(model, tmp_path, "opset", kind=InvalidInput)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    content = chain(node("Relu", ["x"], ["y"], name="abcdef")).SerializeToString()
    refused(content.replace(b"abcdef", b"\xff\xfe\xff\xfe\xff\xfe"), tmp_path, "no text", kind=InvalidInput)
    content = chain(node("Pad", ["x", "w"], ["y"], mode="constant"), w=np.zeros(4, "i8")).SerializeToString()
    refused(content.replace(b"constant", b"\xff" * 8), tmp_path, "no text", kind=InvalidInput)


def test_names_are_shown_safely(tmp_path: Path) -> None:
    refused(chain(node("Evil\x1b[2J\u202e" + "x" * 999, ["x"], ["y"], name="\n\x07")), tmp_path, "\\x1b", "\\u202e")


def test_too_many_operations_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("howsmooth.network.onnx_module.MOST_NODES", 2)
    refused(chain(*[node("Neg", ["x"], [f"v{i}"]) for i in range(3)]), tmp_path, "3 operations")


@pytest.mark.parametrize(
    "dims", [[2, -3], [-1], [2, 4], [1], [], [2**32, 2**32], [2**62, 4], [2**63 - 1], [0, 2**62], [1] * 65]
)
@pytest.mark.parametrize("raw", [True, False])
def test_a_shape_that_its_numbers_do_not_fill_is_refused(dims: list[int], raw: bool, tmp_path: Path) -> None:
    model = chain(node("Identity", ["w"], ["y"]))
    data = np.ones(6, "f4")
    stored = helper.make_tensor("w", TensorProto.FLOAT, [6], data.tobytes() if raw else data, raw=raw)
    del stored.dims[:]
    stored.dims.extend(dims)
    model.graph.initializer.append(stored)
    refused(model, tmp_path, "'w'", kind=InvalidInput)


def test_a_shape_without_numbers_and_without_measure_is_refused(tmp_path: Path) -> None:
    model = chain(node("Identity", ["w"], ["y"]))
    model.graph.initializer.append(TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[0, 2**62], raw_data=b""))
    refused(model, tmp_path, "'w'", "which no tensor has", kind=InvalidInput)


def test_a_part_of_a_tensor_is_refused(tmp_path: Path) -> None:
    model = chain(node("Identity", ["w"], ["y"]), w=np.ones(2, "f4"))
    model.graph.initializer[0].segment.end = 2
    refused(model, tmp_path, "'w'", "part")


# Numbers in other files


def outside(*places: dict[str, Any], dims: tuple[int, ...] = (2, 3)) -> onnx.ModelProto:
    """A network whose weights lie in other files: it gives their sum."""
    names = [f"w{i}" for i in range(len(places))]
    model: onnx.ModelProto = chain(node("Sum", names, ["y"]))
    for name, place in zip(names, places, strict=True):
        entries = [onnx.StringStringEntryProto(key=key, value=str(value)) for key, value in place.items()]
        model.graph.initializer.append(
            TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
        )
        model.graph.initializer[-1].external_data.extend(entries)
    return model


def test_numbers_in_the_same_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    numbers = np.arange(12, dtype="f4")
    for name in ("network.data", "inner/other.data"):
        (tmp_path / name).write_bytes(numbers.tobytes())
    place = {"location": "inner/other.data", "offset": 24, "length": 24}
    model = outside({"location": "network.data", "length": 24}, place, {"location": "network.data", "offset": 24})
    network = read_onnx(written(model, tmp_path))
    wanted = numbers[:6] + 2 * numbers[6:]
    assert np.array_equal(network(torch.ones(2, 3)).ravel().numpy(), wanted)


def test_numbers_that_are_used_twice_are_kept_once(tmp_path: Path) -> None:
    (tmp_path / "network.data").write_bytes(np.arange(6, dtype="f4").tobytes())
    network = read_onnx(written(outside(*[{"location": "network.data"}] * 3), tmp_path))
    assert len([buffer for buffer in network.double().buffers() if buffer.numel()]) == 1
    assert network(torch.ones(2, 3).double()).sum() == 45


def test_a_folder_of_links_is_read(tmp_path: Path) -> None:
    """As the cache of the Hugging Face hub is laid out: links to files that lie in one other folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    written(outside({"location": "network.data"}), blobs, "a")
    (blobs / "b").write_bytes(np.arange(6, dtype="f4").tobytes())
    (snapshot / "network.onnx").symlink_to("../blobs/a")
    (snapshot / "network.data").symlink_to("../blobs/b")
    assert read_onnx(snapshot / "network.onnx")(torch.ones(2, 3)).sum() == 15


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"location": ""},
        {"location": "."},
        {"location": "missing.data"},
        {"location": "/etc/passwd"},
        {"location": "../secret.data"},
        {"location": "inner/../../secret.data"},
        {"location": "..\\secret.data"},
        {"location": "C:\\secret.data"},
        {"location": "C:secret.data"},
        {"location": "link.data"},
        {"location": "linked/secret.data"},
        {"location": "a\0b"},
        {"location": "network.data", "offset": 1},
        {"location": "network.data", "offset": -1},
        {"location": "network.data", "offset": "1e3"},
        {"location": "network.data", "offset": "9" * 30},
        {"location": "network.data", "offset": 25},
        {"location": "inner/../network.data"},
        {"location": "network.data", "offset": 8, "length": 24},
        {"location": "network.data", "length": 20},
        {"location": "network.data", "length": 2**40},
    ],
)
def test_numbers_elsewhere_are_not_read(place: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for name in ("secret.data", "folder/network.data"):
        (tmp_path / name).write_bytes(bytes(24))
    (folder / "link.data").symlink_to(tmp_path / "secret.data")
    (folder / "linked").symlink_to(tmp_path)
    refused(outside(place), folder, "'w0'", kind=InvalidInput)


def test_a_small_file_does_not_become_many_numbers(tmp_path: Path) -> None:
    (tmp_path / "network.data").write_bytes(bytes(32))
    places = [{"location": "network.data", "offset": 4 * i, "length": 24} for i in range(3)]
    refused(outside(*places), tmp_path, "share", kind=InvalidInput)
    refused(outside(places[0], dims=(2**31, 2**31)), tmp_path, "'w0'", kind=InvalidInput)


# Sizes that values ask for


@pytest.mark.parametrize(
    ("made", "stored"),
    [
        (node("ConstantOfShape", ["w"], ["y"]), {"w": np.array([2**20, 2**20])}),
        (node("ConstantOfShape", ["w"], ["y"]), {"w": np.array([2**62, 2**62])}),
        (node("Expand", ["x", "w"], ["y"]), {"w": np.array([2**40, 2, 3])}),
        (node("Tile", ["x", "w"], ["y"]), {"w": np.array([2**20, 2**20])}),
        (node("Range", ["a", "b", "c"], ["y"]), {"a": np.array(0), "b": np.array(2**60), "c": np.array(1)}),
        (node("Pad", ["x", "w"], ["y"]), {"w": np.array([2**40, 0, 0, 0])}),
        (node("Add", ["a", "b"], ["y"]), {"a": np.ones((2**16, 1), "f4"), "b": np.ones(2**16, "f4")}),
        (node("Where", ["c", "a", "b"], ["y"]), {"a": np.ones((2**16, 1)), "b": np.ones(2**16), "c": np.array(True)}),
        (node("MatMul", ["a", "b"], ["y"]), {"a": np.ones((2**16, 1), "f4"), "b": np.ones((1, 2**16), "f4")}),
        (node("Gemm", ["a", "b"], ["y"]), {"a": np.ones((2**16, 1), "f4"), "b": np.ones((1, 2**16), "f4")}),
        (node("Einsum", ["a", "a"], ["y"], equation="i,j->ij"), {"a": np.ones(2**16, "f4")}),
        (node("Gather", ["a", "b"], ["y"]), {"a": np.ones((1, 2**16), "f4"), "b": np.zeros(2**16, "i8")}),
        (node("GatherND", ["a", "b"], ["y"]), {"a": np.ones((1, 2**16), "f4"), "b": np.zeros((2**16, 1), "i8")}),
    ],
)
def test_a_result_without_measure_is_refused(made: Any, stored: dict[str, Any], tmp_path: Path) -> None:
    stopped(chain(made, **stored), tmp_path, made.op_type, "more than", "allowed")


def test_doubling_again_and_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_operations, "LARGEST_RESULT", 2**10)
    nodes = [node("Concat", [f"v{i}" if i else "x"] * 2, [f"v{i + 1}"], axis=0) for i in range(60)]
    model = chain(*nodes, node("Neg", ["v60"], ["y"]))
    with pytest.raises(InvalidInput, match=r"Concat.*allowed"):
        read_onnx(written(model, tmp_path))(torch.ones(2, 3))


def test_windows_without_measure_are_refused(tmp_path: Path) -> None:
    x = torch.ones(1, 1, 4)
    for attributes in ({"kernel_shape": [2**40]}, {"kernel_shape": [3], "dilations": [2**62]}):
        model = chain(node("MaxPool", ["x"], ["y"], **attributes), sizes=(1, 1, 4))
        stopped(model, tmp_path, "MaxPool", "larger than the padded input", x=x)
    model = chain(node("Conv", ["x", "w"], ["y"], pads=[2**40, 2**40]), sizes=(1, 1, 4), w=np.ones((1, 1, 2), "f4"))
    stopped(model, tmp_path, "Conv", "allowed", x=x)


def test_dividing_the_smallest_whole_number_does_not_end_the_process(tmp_path: Path) -> None:
    for kind in ("i8", "i4"):
        least = np.array([np.iinfo(kind).min, 7, 6]).astype(kind)
        model = chain(node("Div", ["a", "b"], ["y"]), a=least, b=np.array([-1, -2, -1]).astype(kind))
        found = read_onnx(written(model, tmp_path))(torch.ones(2, 3))
        assert found.tolist() == [np.iinfo(kind).min, -3, -6]
    stopped(chain(node("Div", ["a", "b"], ["y"]), a=np.array([1]), b=np.array([0])), tmp_path, "ZeroDivisionError")


@pytest.mark.parametrize(
    ("made", "stored"),
    [
        (node("MatMul", ["x", "w"], ["y"], name="the_node"), {"w": np.ones((2, 2), "f4")}),
        (node("Reshape", ["x", "w"], ["y"], name="the_node"), {"w": np.array([5, -1])}),
        (node("Reshape", ["x", "w"], ["y"], name="the_node"), {"w": np.array([2**63 - 1])}),
        (node("Gather", ["x", "w"], ["y"], name="the_node"), {"w": np.array([9])}),
        (node("GatherND", ["x", "w"], ["y"], name="the_node"), {"w": np.zeros((0, 2**30), "i8")}),
        (node("Squeeze", ["x", "w"], ["y"], name="the_node"), {"w": np.array([0])}),
        (node("Slice", ["x", "w", "w", "w", "w"], ["y"], name="the_node"), {"w": np.array([0])}),
        (node("Slice", ["x", "w", "w"], ["y"], name="the_node"), {"w": np.array([0, 1, 2])}),
        (
            node("Slice", ["x", "a", "b", "a", "c"], ["y"], name="the_node"),
            {"a": np.array([1]), "b": np.array([2**63 - 1]), "c": np.array([-1])},
        ),
        (node("Softmax", ["x"], ["y"], axis=2, name="the_node"), {}),
        (node("Concat", ["x", "w"], ["y"], axis=0, name="the_node"), {"w": np.ones((2, 2), "f4")}),
        (node("Unsqueeze", ["x", "w"], ["y"], name="the_node"), {"w": np.array([0, 0])}),
        (node("Einsum", ["x"], ["y"], equation="...->...", name="the_node"), {}),
        (node("Dropout", ["x", "r", "w"], ["y"], name="the_node"), {"r": np.array(0.5, "f4"), "w": np.array(True)}),
    ],
)
def test_what_cannot_be_computed_names_the_node(made: Any, stored: dict[str, Any], tmp_path: Path) -> None:
    stopped(chain(made, **stored), tmp_path, f"'{made.op_type}'", "'the_node'", "(2, 3)")


def test_an_error_of_the_follower_is_passed_on(tmp_path: Path) -> None:
    class Stopping(Followed):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise UnsupportedModel("this is read no further: stop here.")

    network = read_onnx(written(chain(node("Relu", ["x"], ["y"])), tmp_path))
    with pytest.raises(UnsupportedModel, match="read no further"):
        network(Stopping(torch.ones(2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_file_gives_a_network_or_a_sentence(seed: int, tmp_path: Path) -> None:
    draw, outcomes = random.Random(seed), set()
    for _ in range(700):
        case, opset = draw.choice(CASES)
        content = bytearray(case.model(opset).SerializeToString())
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        if draw.random() < 0.1:
            del content[draw.randrange(1, len(content)) :]
        try:
            read_onnx(written(bytes(content), tmp_path))(*(torch.tensor(case.inputs[i]) for i in case.taken()))
            outcomes.add("network")
        except HowsmoothError as error:
            assert_sentence(error)
            outcomes.add(type(error).__name__)
    assert outcomes == {"network", "InvalidInput", "UnsupportedModel"}


def test_a_path_is_shown_safely(tmp_path: Path) -> None:
    """A terminal would obey its controls."""
    with pytest.raises(InvalidInput) as caught:
        read_onnx(os.fspath(tmp_path / "a\x1b[2J.onnx"))
    assert "\x1b" not in str(caught.value)
