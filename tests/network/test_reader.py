"""Modules as people write them: read rightly, or an operation is named, or refused; never read wrongly in silence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from howsmooth.errors import HowsmoothError, UnsupportedModel
from howsmooth.jacobians.tokenwise import Norm
from howsmooth.network import attention_maps, rules
from howsmooth.network.attention_forms import HeadLogits
from howsmooth.network.reader import Network, read_function
from howsmooth.network.reading import RULES
from howsmooth.network.values import Entries
from howsmooth.testing import dense_jacobian
from tests.network.handwritten import CASES, Case
from tests.network.handwritten.cases import Expect

BY_NAME = {case.name: case for case in CASES}
READ = frozenset(
    {
        *("nanogpt_kernel", "nanogpt_triangle", "list_of_heads", "folded_heads", "vit_class_token", "vit_mean"),
        *("vit_unfold_batchnorm", "vit_reshape_loops", "timm_qk_norm", "timm_kernel", "contrastive_vit"),
        *("shifted_windows", "torch_encoder_pre_gelu", "torch_encoder_post_relu"),
        *("torch_encoder_pre_relu_sequence_first", "torch_encoder_post_gelu_causal", "torch_decoder"),
        *("multihead_weights_bool_mask", "multihead_sequence_first_float_mask", "multihead_without_batch"),
        *("multihead_extra_keys", "albert_shared", "latent_queries", "learned_memory", "cross_decoder"),
        *("set_transformer", "prefix_keys", "sentence_embedder", "llama_rotary", "llama_complex", "llama_casts"),
        *("parallel_one_norm", "parallel_two_norms", "speedrun", "low_rank_keys", "einsum_heads", "shared_head_maps"),
        *("annotated", "alibi", "relative_buckets", "soft_capped", "sliding_window", "multi_query", "gated_attention"),
        *("sink", "cosine", "mixed_up_heads", "mixer", "spatial_gate", "convolutional_positions", "adapted_weights"),
        *("unused_modules", "in_place", "returns_tuple", "returns_dict", "returns_object", "without_batch"),
        *("batch_of_one", "head_loop", "empty_buffer", "hooks_that_change", "hooks_that_record", "checkpointed"),
        *("scripted", "custom_function", "counting"),
    }
)
"""The cases of which every operation is known; one that leaves the list is a loss, one that joins it a gain to note."""
UNREAD = {
    **dict.fromkeys(
        ["shaw_positions", "talking_heads", "written_softmax", "softmax_plus_one", "differential", "top_three"], "bmm"
    ),
    **dict.fromkeys(
        ["first_gpt2", "l2", "l2_tied", "sigmoid", "linear", "softmax_over_queries", "slots", "sigmoid"], "bmm"
    ),
    "wrong_axis": "_scaled_dot_product_flash_attention_for_cpu",
    "max_pooling": "amax",
}
"""The cases with operations that are left to automatic differentiation, by name."""
REFUSED = {
    "experts": "the shape of the result of nonzero in 1 depends on the values of the input",
    "control_flow": "looks at the values of its input",
    "number_from_data": "looks at the values of its input",
    "detached_norm": "detach",
    "data_residual": "detach",
    "always_dropout": "draws random numbers",
    "noise": "randn_like draws random numbers",
    "custom_rounding": "has a derivative of its own",
    "detached_rounding": "detach",
}
"""The cases that are refused, and words of the reason."""
QUICK = {"multihead_without_batch", "returns_tuple", "without_batch"}
SINGLE = {"llama_casts"}
"""The cases that round to float32 whatever their input."""


def function_of(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Callable[[Tensor], Any], Tensor]:
    """The module of a case, as a function of its input alone, and an input."""
    module, others = case.make(), [other.to(dtype) for other in case.others]
    module = module.double() if dtype == torch.float64 else module  # .to(dtype) would make complex buffers real
    return module, lambda x: module(x, *others), case.x().to(dtype)


def read(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Network, Callable[[Tensor], Tensor]]:
    """The network of a case, and its own definition on tokens ``(n, d)``."""
    module, function, x = function_of(case, dtype)
    with torch.no_grad():
        network = read_function(function, x, root=module, name=case.name)
    return network, lambda tokens: first(function(tokens.reshape(x.shape)))


def first(output: Any) -> Tensor:
    """The first tensor of an output."""
    if isinstance(output, dict):
        output = next(iter(output.values()))
    output = getattr(output, "last_hidden_state", output)
    return output[0] if isinstance(output, tuple) else output


def _quick_or_slow(name: str) -> Any:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


def test_every_case_is_in_one_of_the_lists() -> None:
    assert sorted([*READ, *UNREAD, *REFUSED]) == sorted(BY_NAME)
    assert len(READ) == 66


@pytest.mark.parametrize("name", [_quick_or_slow(case.name) for case in CASES if case.name not in REFUSED])
def test_what_is_read_is_the_module(name: str) -> None:
    """Values at five inputs, two of them far away; the Jacobian and its transpose at two."""
    network, own = read(BY_NAME[name])
    assert {node.operation for node in network.unread} == ({UNREAD[name]} if name in UNREAD else set())
    assert all(node.place in str(node) for node in network.unread)
    tolerance = 1e-5 if name in SINGLE else 1e-9
    generator = torch.Generator().manual_seed(11)
    others = [torch.randn(network.x.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        for x in (network.x, *others, 30 * others[0], 1e-3 * others[1]):
            expected = own(x)
            value = network(x)
            assert value.shape == (expected.numel() // max(expected.shape[-1], 1), expected.shape[-1])
            assert float((value - expected.reshape(value.shape)).norm()) <= tolerance * float(expected.norm())
    for x in (network.x, others[0]):
        exact = dense_jacobian(own, x)
        size = float(torch.linalg.matrix_norm(exact, 2))
        J = network.jacobian_at(x, 2**26)
        assert float(torch.linalg.matrix_norm(J.dense() - exact, 2)) <= tolerance * size
        assert float(torch.linalg.matrix_norm(J.adjoint.dense() - exact.mT, 2)) <= tolerance * size
        assert bool(torch.as_tensor(J.size() >= size * (1 - 1e-9)).all())


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES if case.name not in REFUSED])
def test_the_streamed_jacobian_of_a_batch_is_that_of_every_item(name: str) -> None:
    network, _ = read(BY_NAME[name])
    x = torch.stack([network.x, 0.5 * network.x + 0.1])
    value, J = network.root.linearize(x, 0, bounded=False)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for item, one, pushed, tangent in zip(x, value, J.matvec(v), v, strict=True):
        single, alone = network.root.linearize(item, 2**26)
        torch.testing.assert_close(one, single, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(pushed, alone.matvec(tangent), rtol=1e-7, atol=1e-9 * float(pushed.norm()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [case.name for case in CASES if case.name not in REFUSED])
def test_what_is_read_in_single_precision_is_the_module(name: str) -> None:
    network, own = read(BY_NAME[name], torch.float32)
    assert bool(network.unread) == (name in UNREAD)
    with torch.no_grad():
        for x in (network.x, 3 * network.x + 0.1):
            expected, value = own(x), network(x)
            assert value.dtype == torch.float32
            assert float((value - expected.reshape(value.shape)).norm()) <= 2e-5 * float(expected.norm())
    exact, J = dense_jacobian(own, network.x), network.jacobian_at(network.x, 2**26)
    error = torch.linalg.matrix_norm(J.dense() - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    assert float(error) <= 1e-4


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_fixed_differentiable_function_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(HowsmoothError, match=REFUSED[name]) as caught:
        read(BY_NAME[name])
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize("expect", ["read", "partly", "refused", "either"])
def test_no_case_is_read_more_wrongly_than_expected(expect: Expect) -> None:
    """Nothing that should be refused is read; what an ideal reader reads is read, but for one."""
    names = {case.name for case in CASES if case.expect == expect}
    match expect:
        case "refused":
            assert names <= set(REFUSED)
        case "read":
            assert names - READ == {"first_gpt2"}  # hidden logits become −10⁴: not hidden far away
        case "partly":
            assert not names & set(REFUSED)
        case "either":
            assert names & set(REFUSED) == {"detached_norm", "data_residual"}


# Negative controls: a reading that makes a mistake is refused, whatever the mistake.


class Small(nn.Module):
    """A pre-norm block that uses one of everything, and hands out a token in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.ends = nn.RMSNorm(8, eps=1e-3)
        angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.3])
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def turned(self, x: Tensor) -> Tensor:
        halves = torch.cat((-x[..., 2:], x[..., :2]), -1)
        return x * self.cos + halves * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.ends(x)[:, 2]


def changed_rule(name: str, change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A rule behind a change of its arguments: ``change(rule, reading, *arguments)``."""
    own = RULES[name]
    return lambda patch: patch.setitem(RULES, name, lambda *args, **kwargs: change(own, *args, **kwargs))


def changed_attribute(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A function of a module of the reader behind a change of its arguments."""
    own = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: change(own, *args, **kwargs))


def other_heads(own: Callable[..., Any], reading: Any, x: Any) -> Any:
    """Queries, keys and values as if the columns of a head were not neighbours."""
    found = own(reading, x)
    heads = len(found.weight)
    weight = found.weight.flatten(0, 1).unflatten(0, (-1, heads)).transpose(0, 1)
    return replace(found, weight=weight)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the scale is forgotten": changed_attribute(HeadLogits, "scaled", lambda own, logits, factor: logits),
    "the causal mask is forgotten": changed_attribute(HeadLogits, "kept", lambda own, logits, *mask: logits),
    "the mask hides from the other side": changed_attribute(
        HeadLogits, "kept", lambda own, logits, keep, fill: own(logits, keep.mT, fill)
    ),
    "ε is wrong by a hundredth": changed_rule(
        "native_layer_norm",
        lambda own, reading, x, shape, weight, bias, eps: own(reading, x, shape, weight, bias, 1.01 * eps),
    ),
    "a gain is forgotten": changed_rule(
        "native_layer_norm",
        lambda own, reading, x, shape, weight, bias, eps: own(reading, x, shape, None, bias, eps),
    ),
    "the gain behind a written norm is forgotten": changed_attribute(
        Norm, "followed_by", lambda own, norm, factor, shift: norm
    ),
    "a shift is forgotten": changed_rule(
        "native_layer_norm",
        lambda own, reading, x, shape, weight, bias, eps: own(reading, x, shape, weight, None, eps),
    ),
    "the mean is not taken off": changed_attribute(
        rules, "Norm", lambda own, *args, **kwargs: own(*args, **{**kwargs, "centred": False})
    ),
    "a bias is dropped": changed_rule(
        "addmm", lambda own, reading, bias, x, y: own(reading, torch.zeros_like(bias), x, y)
    ),
    "a weight is transposed": changed_rule(
        "addmm", lambda own, reading, bias, x, y: own(reading, bias, x, y.mT if y.shape == y.mT.shape else y)
    ),
    "heads are other columns": changed_attribute(attention_maps, "followed_back", other_heads),
    "rotary positions turn the other way": changed_attribute(
        attention_maps, "rotary_of_table", lambda own, cos, sin, interleaved: own(cos, -sin, interleaved)
    ),
    "rotary positions pair neighbours": changed_attribute(
        attention_maps, "rotary_of_table", lambda own, cos, sin, interleaved: own(cos, sin, not interleaved)
    ),
    "a residual is forgotten": changed_rule(
        "add",
        lambda own, reading, x, y: y if isinstance(x, Entries) and isinstance(y, Entries) else own(reading, x, y),
    ),
    "another token is handed out": changed_rule(
        "select", lambda own, reading, x, dim, index: own(reading, x, dim, index - (dim == 1 and x.shape[1:] == (5, 8)))
    ),
}


def small() -> tuple[nn.Module, Tensor]:
    return Small().double().eval(), torch.randn(1, 5, 8, dtype=torch.float64)


@torch.no_grad()
def test_the_module_of_the_negative_controls_is_read() -> None:
    module, x = small()
    network = read_function(module, x, root=module)
    assert not network.unread
    assert network.difference <= 1e-12


@pytest.mark.parametrize("mistake", MISTAKES)
@torch.no_grad()
def test_a_mistake_of_the_reading_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = small()
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(UnsupportedModel, match="what was read of this network differs from its own output"):
        read_function(module, x, root=module)
    assert not read_function(module, x, root=module, check=False).unread  # it is the comparison that notices


@pytest.mark.parametrize("mistake", ["ε is wrong by a hundredth", "the scale is forgotten", "a bias is dropped"])
@torch.no_grad()
def test_a_mistake_is_noticed_in_single_precision(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Small().eval(), torch.randn(1, 5, 8)
    assert not read_function(module, x, root=module).unread
    if mistake.startswith("ε"):
        module.norm.eps = 0.1
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(UnsupportedModel, match="differs from its own output"):
        read_function(module, x, root=module)


@torch.no_grad()
def test_another_derivative_is_noticed_where_the_values_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that does not see what is cut from the graph."""
    module, x = small()
    monkeypatch.setitem(RULES, "detach", lambda reading, y: y)
    with pytest.raises(UnsupportedModel, match="the derivative of what was read of this network differs from autograd"):
        read_function(lambda y: module(y) + module(y).detach(), x, root=module)


@pytest.mark.slow
def test_every_rule_is_there_when_nothing_else_was_imported() -> None:
    """The rules enter a registry when their modules are imported, which reading alone must bring about."""
    code = (
        "import torch, howsmooth as hs\n"
        "net = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()\n"
        "print(hs.read_network(net, torch.randn(1, 4, 8)).unread)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "()"
