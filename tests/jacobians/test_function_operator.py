"""Products of `function_jacobian` against dense float64 Jacobians by torch's own reverse mode, one input at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2Config, LlamaConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from howsmooth.errors import NotDifferentiable
from howsmooth.jacobians import function_operator
from howsmooth.jacobians.function_operator import DerivativeWarning, FunctionJacobian, function_jacobian

N, D = 5, 4
LINEARIZE, JVP, DOUBLE_BACKWARD, DENSE_ROWS = "torch.func linearize", "torch.func jvp", "double backward", "dense rows"
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")


random = partial(torch.randn, dtype=torch.float64)


def oracle(f: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The Jacobian of f at one input of shape (n, d), dense, by reverse mode."""
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = torch.autograd.functional.jacobian(lambda z: f(z.clone()), x)
    return jacobian.reshape(-1, x.numel())


def item_oracle(f: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """The same for each item of a batch (batch, n, d), each passed to f as a batch of one."""
    return torch.stack([oracle(lambda z: f(z[None])[0], item) for item in x])


def assert_products_equal(operator: FunctionJacobian, dense: Tensor, tolerance: float = 1e-12) -> None:
    """matvec, rmatvec, columns, rows and dense against the matrices ``dense``, relative to their largest entry."""
    v = torch.randn(operator.batch_shape + operator.in_shape, dtype=operator.dtype)
    u = torch.randn(operator.batch_shape + operator.out_shape, dtype=operator.dtype)
    batch, (m, n) = operator.batch_shape, dense.shape[-2:]
    columns = operator.columns(torch.arange(n)).reshape(n, *batch, m).movedim(0, -1)
    rows = operator.rows(torch.arange(m)).reshape(m, *batch, n).movedim(0, -2)
    pairs = [
        (operator.matvec(v).reshape(*batch, m), (dense @ v.double().reshape(*batch, n, 1)).squeeze(-1)),
        (operator.rmatvec(u).reshape(*batch, n), (dense.mT @ u.double().reshape(*batch, m, 1)).squeeze(-1)),
        (columns, dense),
        (rows, dense),
        (operator.dense(), dense),
    ]
    scale = float(dense.abs().max())
    for got, expected in pairs:
        assert got.dtype == operator.dtype
        assert not got.requires_grad
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * scale * n**0.5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def in_place(x: Tensor) -> Tensor:
    out = torch.zeros(N + 1, D, dtype=x.dtype)
    out[1:] += x * x
    out[0] += x.sum(0)
    return out * out


MAPS = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "layer norm": lambda x: F.layer_norm(x, (D,)),
    "softmax attention": lambda x: (x @ x.T).softmax(-1) @ x,
    "fewer outputs": lambda x: x[1:3].prod(-1),
    "more outputs": lambda x: torch.einsum("id,je->ijde", x, x),
    "one number": lambda x: x.square().sum(),
    "gather": lambda x: x[torch.tensor([0, 0, 3])].sin(),
    "boolean index": lambda x: x[x > 0] ** 2,
    "sort": lambda x: x.sort(0).values ** 3,
    "identity": lambda x: x,
}


@pytest.mark.parametrize("name", MAPS)
def test_plain_functions_equal_reverse_mode(name: str) -> None:
    x = random(N, D)
    operator = function_jacobian(MAPS[name], x)
    assert (operator.method, operator.notes, operator.batch_shape) == (LINEARIZE, (), ())
    assert operator.in_shape == x.shape
    assert operator.out_shape == MAPS[name](x).shape
    assert_products_equal(operator, oracle(MAPS[name], x))


@pytest.mark.parametrize("shape", [(), (6,)])
def test_one_map_may_have_fewer_axes_than_tokens(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    assert_products_equal(function_jacobian(torch.sin, x), oracle(torch.sin, x))


def test_a_batch_holds_the_jacobian_of_each_item() -> None:
    def f(x: Tensor) -> Tensor:
        return ((x @ x.mT).softmax(-1) @ x)[..., :3]

    x = random(3, N, D)
    operator = function_jacobian(f, x)
    assert (operator.batch_shape, operator.in_shape, operator.out_shape) == ((3,), (N, D), (N, 3))
    assert_products_equal(operator, item_oracle(f, x))


def test_items_may_have_their_own_constants() -> None:
    bias, x = random(2, 3, N, D)
    expected = torch.stack([oracle(lambda z, b=b: (z + b).tanh(), item) for item, b in zip(x, bias, strict=True)])
    assert_products_equal(function_jacobian(lambda x: (x + bias).tanh(), x), expected)


def test_float32_agrees_with_float64_to_single_precision() -> None:
    x = random(N, D)
    operator = function_jacobian(MAPS["softmax attention"], x.float())
    assert operator.dtype == torch.float32
    assert_products_equal(operator, oracle(MAPS["softmax attention"], x.float().double()), tolerance=2e-6)


def test_chunks_of_columns_and_rows_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_operator, "_NUMBERS_PER_CHUNK", 3 * N * D)
    x = random(N, D)
    assert_products_equal(function_jacobian(torch.sin, x), oracle(torch.sin, x))


# Modules


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_module_equals_reverse_mode_and_keeps_its_parameters_without_gradient(frozen: bool) -> None:
    module = mlp().requires_grad_(not frozen)
    x = random(N, D)
    for f in (module, lambda z: module(z)):
        assert_products_equal(function_jacobian(f, x), oracle(module, x))
    assert all(p.grad is None and p.requires_grad is not frozen for p in module.parameters())


@pytest.mark.slow
def test_multihead_attention_in_a_lambda_equals_reverse_mode() -> None:
    attention = nn.MultiheadAttention(D, 2, batch_first=True).double().eval()

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return attention(x, x, x)

    x = random(2, N, D)
    assert_products_equal(function_jacobian(f, x), item_oracle(lambda z: f(z)[0], x))
    assert_products_equal(function_jacobian(f, x[0]), oracle(lambda z: f(z)[0], x[0]))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.slow
def test_encoder_layer_reads_tokens_along_the_right_axis(
    norm_first: bool, batch_first: bool, batch: int | None
) -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 8, norm_first=norm_first, batch_first=batch_first).double().eval()
    x = random(N, D) if batch is None else random(batch, N, D)
    # The unbatched call of the layer is the oracle: it knows no batch axis to confuse.
    expected = oracle(layer, x) if batch is None else torch.stack([oracle(layer, item) for item in x])
    assert_products_equal(function_jacobian(layer, x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoder", "lstm"])
def test_sequence_first_modules_are_transposed_around(kind: str) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 8), 2)
    module = (encoder if kind == "encoder" else nn.LSTM(D, 6)).double().eval()

    def one(z: Tensor) -> Tensor:
        out = module(z)
        return out if isinstance(out, Tensor) else out[0]

    x = random(2, N, D)
    assert_products_equal(function_jacobian(module, x), torch.stack([oracle(one, item) for item in x]))


@pytest.mark.slow
def test_a_module_that_transposes_itself_is_left_alone() -> None:
    class BatchFirstOutside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(D, 2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    module = BatchFirstOutside().double().eval()
    x = random(2, N, D)
    assert_products_equal(function_jacobian(module, x), torch.stack([oracle(module.layer, item) for item in x]))


def causal_mask(n: int) -> Tensor:
    return torch.full((n, n), -1e9, dtype=torch.float64).triu(1)[None, None]


def gpt2_block(implementation: str) -> Callable[[Tensor], Any]:
    config = GPT2Config(n_embd=8, n_head=2, n_layer=1, attn_implementation=implementation)
    block = GPT2Block(config, layer_idx=0).double().eval()
    return lambda x: block(x, attention_mask=causal_mask(x.shape[1]))


def llama_block(implementation: str, norm: Callable[[int], nn.Module] = LlamaRMSNorm) -> Callable[[Tensor], Any]:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, attn_implementation=implementation)
    block, rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
    block.input_layernorm, block.post_attention_layernorm = norm(8), norm(8)
    block.double().eval()

    def f(x: Tensor) -> Any:
        positions = rotary(x, torch.arange(x.shape[1])[None])
        return block(x, attention_mask=causal_mask(x.shape[1]), position_embeddings=positions)

    return f


@pytest.mark.parametrize(
    ("build", "tolerance"),
    [
        (lambda: gpt2_block("sdpa"), 1e-12),
        (lambda: gpt2_block("eager"), 1e-12),
        (lambda: llama_block("sdpa", nn.RMSNorm), 1e-12),
        # As it comes, Llama's RMSNorm and eager softmax round to float32 whatever the dtype of x.
        (lambda: llama_block("sdpa"), 1e-7),
        (lambda: llama_block("eager"), 1e-7),
    ],
)
@pytest.mark.slow
def test_transformers_blocks_equal_reverse_mode(build: Callable[[], Callable[[Tensor], Any]], tolerance: float) -> None:
    f = build()
    x = random(2, N, 8)
    operator = function_jacobian(f, x)
    assert operator.method == LINEARIZE

    def tensor(z: Tensor) -> Tensor:
        out = f(z)
        return out if isinstance(out, Tensor) else out[0]

    dense = item_oracle(tensor, x)
    blocks = dense.reshape(2, N, 8, N, 8)
    assert blocks[:, 0, :, 1:].abs().max() == 0, "the mask reached the attention"
    assert blocks[:, 1, :, 0].abs().max() > 0, "attention mixes tokens"
    assert_products_equal(operator, dense, tolerance)


def test_model_outputs_give_their_last_hidden_state() -> None:
    x = random(N, D)
    operator = function_jacobian(lambda z: BaseModelOutput(last_hidden_state=z.sin(), hidden_states=(z,)), x)
    assert_products_equal(operator, oracle(torch.sin, x))


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_keeps_its_statistics_and_mode(training: bool) -> None:
    module = nn.Sequential(nn.BatchNorm1d(D), nn.Tanh()).double().train(training)
    before = {name: b.clone() for name, b in module.named_buffers()}
    x = random(N, D) + 1
    operator = function_jacobian(module, x)
    assert module.training is training
    assert all(torch.equal(b, before[name]) for name, b in module.named_buffers())
    assert_products_equal(operator, oracle(module, x))
    if training:
        assert not torch.equal(module[0].running_mean, before["0.running_mean"]), "the oracle itself does change them"


# Precision and the caller's modes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    module = mlp().to(dtype)
    x = random(N, D).to(dtype)
    exact = mlp()
    exact.load_state_dict({name: p.double() for name, p in module.state_dict().items()})
    operator = function_jacobian(module, x)
    assert operator.dtype == torch.float32
    assert_products_equal(operator, oracle(exact, x.double()), tolerance=2e-6)
    assert all(p.dtype == dtype for p in module.parameters())
    assert_products_equal(function_jacobian(torch.tanh, x), oracle(torch.tanh, x.double()), tolerance=2e-6)


def test_float64_input_makes_a_float32_module_exact() -> None:
    module = mlp().float()
    x = random(N, D)
    operator = function_jacobian(module, x)
    assert operator.dtype == torch.float64
    assert_products_equal(operator, oracle(module.double(), x))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_work_whatever_the_grad_mode_of_the_caller(mode: Callable[[], Any]) -> None:
    with mode():
        layer = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True).double().eval()
        x = random(2, N, D)
        operator = function_jacobian(layer, x)
        dense = operator.dense()
        v, u = random(2, N, D), random(2, N, D)
        jv, jtu = operator.matvec(v), operator.rmatvec(u)
    fresh = nn.TransformerEncoderLayer(D, 2, 8, batch_first=True).double().eval()
    fresh.load_state_dict(layer.state_dict())
    expected = torch.stack([oracle(fresh, item.clone()) for item in x])
    torch.testing.assert_close(dense, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(jv.flatten(1), (expected @ v.reshape(2, -1, 1)).squeeze(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(jtu.flatten(1), (expected.mT @ u.reshape(2, -1, 1)).squeeze(-1), rtol=0, atol=1e-12)


def test_x_may_change_after_the_operator_is_built() -> None:
    x = random(N, D)
    expected = oracle(torch.tanh, x)
    operator = function_jacobian(torch.tanh, x)
    x.zero_()
    assert_products_equal(operator, expected)


# The four ways to Jv


def counted(f: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], list[int]]:
    calls = [0]

    def call(x: Tensor) -> Tensor:
        calls[0] += 1
        return f(x)

    return call, calls


def test_no_product_runs_f_again_once_linearized() -> None:
    f, calls = counted(MAPS["softmax attention"])
    operator = function_jacobian(f, random(N, D))
    built = calls[0]
    assert_products_equal(operator, operator.dense())
    assert operator.method == LINEARIZE
    assert calls[0] == built > 0


def test_every_forward_product_runs_f_when_values_decide_its_course() -> None:
    f, calls = counted(lambda x: x**2 if x.sum() > 0 else x**3)
    x = random(N, D)
    operator = function_jacobian(f, x)
    built = calls[0]
    operator.matvec(random(N, D))
    operator.rmatvec(random(N, D))
    assert calls[0] == built + 1, "one for Jv, none for Jᵀu"
    assert operator.method == JVP
    assert "data-dependent" in operator.notes[0]
    assert_products_equal(operator, oracle(f, x))


def test_in_place_writes_are_traced_in_the_order_of_f() -> None:
    x = random(N, D)
    operator = function_jacobian(in_place, x)
    assert (operator.method, operator.notes) == (LINEARIZE, ())
    assert_products_equal(operator, oracle(in_place, x))


def test_a_trace_that_does_not_reproduce_the_derivative_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_operator, "linearized", lambda f, x: lambda v: 1.001 * x.cos() * v)
    x = random(N, D)
    operator = function_jacobian(torch.sin, x)
    assert operator.method == JVP
    assert "does not reproduce" in operator.notes[0]
    assert_products_equal(operator, oracle(torch.sin, x))


def test_in_place_writes_to_x_do_not_reach_the_caller() -> None:
    x = random(N, D)
    kept = x.clone()
    operator = function_jacobian(lambda z: z.mul_(3).tanh(), x)
    assert torch.equal(x, kept)
    assert_products_equal(operator, oracle(lambda z: (3 * z).tanh(), x))


class Square(torch.autograd.Function):
    """x² without forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


class SquareOnce(Square):
    """x² whose backward leaves torch, so that it cannot be differentiated again."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(2 * g.detach().numpy() * ctx.saved_tensors[0].detach().numpy())


def distances(x: Tensor) -> Tensor:
    return (x.unsqueeze(-2) - x.unsqueeze(-3) - 1).norm(dim=-1)


@pytest.mark.parametrize("shape", [(N, D), (2, N, D)])
@pytest.mark.parametrize(
    ("f", "exact", "method", "culprit"),
    [
        (Square.apply, torch.square, DOUBLE_BACKWARD, "autograd.Function"),
        (SquareOnce.apply, torch.square, DENSE_ROWS, "autograd.Function"),
        (lambda x: torch.cdist(x, x + 1), distances, DENSE_ROWS, "_cdist_forward"),
    ],
)
def test_functions_without_forward_mode_take_another_way(
    f: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], method: str, culprit: str, shape: tuple[int, ...]
) -> None:
    x = random(*shape)
    operator = function_jacobian(f, x)
    assert operator.method == method
    assert "forward mode is not possible" in operator.notes[0]
    assert culprit in operator.notes[0]
    assert_products_equal(operator, oracle(exact, x) if x.dim() == 2 else item_oracle(exact, x))


def test_too_many_dense_rows_are_refused() -> None:
    with pytest.raises(NotDifferentiable, match="its 4160 outputs are too many to take J row by row"):
        function_jacobian(SquareOnce.apply, random(65, 64))


class WrongForward(Square):
    """x² whose forward mode claims 3x instead of 2x."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 3 * tangent * ctx.saved_tensors[0]


def test_forward_and_reverse_mode_that_disagree_are_reported() -> None:
    x = random(N, D)
    with pytest.warns(DerivativeWarning, match="forward mode and reverse mode disagree"):
        operator = function_jacobian(WrongForward.apply, x)
    assert operator.method == DOUBLE_BACKWARD
    assert_products_equal(operator, oracle(torch.square, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.softmax(-1).sum(-1),
        lambda x: 1e3 * x.softmax(-1).sum(-1),
        lambda x: nn.functional.layer_norm(x, x.shape[-1:]).sum(-1),
        lambda x: nn.functional.normalize(x).square().sum(-1),
    ],
)
def test_a_derivative_that_vanishes_is_not_called_wrong(f: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Forward and reverse mode round zero differently; that is no sign of a custom derivative that is wrong."""
    operator = function_jacobian(f, random(N, D).to(dtype))
    assert float(torch.linalg.matrix_norm(operator.dense(), ord=2)) <= operator.accuracy.product
    assert operator.notes == ("the Jacobian of f vanishes at x to the accuracy of its rounding: its norm may be zero.",)


@pytest.mark.parametrize("f", [lambda x: 0 * x, torch.round, torch.sign, lambda x: x.clamp(50, 60)])
def test_a_derivative_of_zero_gives_zero(f: Callable[[Tensor], Tensor]) -> None:
    with pytest.warns(DerivativeWarning, match="exactly zero at x: f is constant or piecewise constant"):
        operator = function_jacobian(f, random(N, D))
    assert operator.dense().abs().max() == 0
