"""Layers equal their maps, take the arguments of nn.MultiheadAttention, and refuse what would break their bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from evidence.ascent import ROUNDING
from howsmooth import nn as layers
from howsmooth.attention import LogitBias
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn.layers.attention_layer import AttentionLayer

LAYER_KINDS: dict[str, Callable[..., AttentionLayer]] = {
    "l2": layers.L2Attention,
    "contractive-2": layers.ContractiveL2Attention,
    "contractive-inf": lambda *a, **k: layers.ContractiveL2Attention(*a, norm="inf", **k),
    "contractive-kim": lambda *a, **k: layers.ContractiveL2Attention(*a, norm="inf", bound="kim2021", **k),
    "dot-product": layers.DotProductAttention,
    "sigmoid": layers.SigmoidAttention,
    "cosine": layers.CosineAttention,
    "norm-controlled": layers.NormControlledAttention,
    "lipschitz-norm": layers.LipschitzNormAttention,
    "gradient-step": lambda *a, **k: layers.GradientStepAttention(*a, context_size=5, **k),
}
MASKED = [kind for kind in LAYER_KINDS if kind not in ("lipschitz-norm", "gradient-step")]
L2 = [kind for kind in LAYER_KINDS if kind == "l2" or kind.startswith("contractive")]
GLOBAL = [*L2, "cosine", "lipschitz-norm", "gradient-step"]
every = pytest.mark.parametrize("kind", LAYER_KINDS)
N, D, H = 7, 8, 2


def make(kind: str, bias: bool = True, **options: object) -> AttentionLayer:
    """A layer in float64 with random biases, in evaluation."""
    layer = LAYER_KINDS[kind](D, H, bias=bias, **options).double().eval()
    for name, weight in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight)
    return layer


def tokens(*shape: int) -> Tensor:
    return 3.0 + 2.0 * torch.randn(*shape, D, dtype=torch.float64)


def seen() -> Tensor:
    return (torch.randn(N, N) > 0) | torch.eye(N, dtype=torch.bool)


def dense_norm(layer: AttentionLayer, x: Tensor, order: float = 2) -> float:
    """The norm of the dense autograd Jacobian of the layer itself."""
    jacobian = torch.func.jacrev(lambda x: layer(x)[0])(x).detach()
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), order))


@every
def test_layer_equals_its_map(kind: str) -> None:
    layer, x = make(kind), tokens(3, N)
    bias = 0.0
    if kind == "lipschitz-norm":
        bias = layer.out_proj.bias.detach()
    elif kind == "gradient-step":
        bias = layer.bias.detach()
    torch.testing.assert_close(layer(x)[0], layer.map(n=N)(x) + bias, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("mask", ["causal", "window", "array", "array per head"])
@pytest.mark.parametrize("kind", MASKED)
def test_masked_layer_equals_its_masked_map(kind: str, mask: str) -> None:
    layer, x, window = make(kind), tokens(N), hs.SlidingWindow(3)
    look = seen() if mask == "array" else torch.stack([seen(), seen()])
    call, of_map = {
        "causal": ({"is_causal": True}, "causal"),
        "window": ({"attn_mask": window}, window),
        "array": ({"attn_mask": ~look}, look),
        "array per head": ({"attn_mask": ~look}, look),
    }[mask]
    torch.testing.assert_close(layer(x, **call)[0], layer.map(of_map, N)(x), rtol=1e-11, atol=1e-11)


def test_dot_product_layer_equals_torch_with_all_its_masks() -> None:
    theirs = nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64).eval()
    ours, x = make("dot-product"), tokens(3, N)
    with torch.no_grad():
        ours.in_proj.weight.copy_(theirs.in_proj_weight)
        ours.in_proj.bias.copy_(theirs.in_proj_bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    padded = torch.arange(N)[None] >= torch.tensor([N, 5, 3])[:, None]
    additive = torch.randn(3 * H, N, N, dtype=torch.float64)
    causal = torch.ones(N, N).triu(1).bool()
    for call in (
        {},
        {"attn_mask": ~seen()},
        {"attn_mask": additive},
        {"attn_mask": causal, "is_causal": True},
        {"key_padding_mask": padded},
        {"attn_mask": causal, "key_padding_mask": padded},
        {"need_weights": True},
        {"need_weights": True, "average_attn_weights": False},
    ):
        out, weights = ours(x, x, x, **call)
        expected, their_weights = theirs(x, x, x, **{"need_weights": False, **call})
        real = ~call.get("key_padding_mask", torch.zeros(3, N, dtype=torch.bool))
        torch.testing.assert_close(out[real], expected[real], rtol=1e-11, atol=1e-11)
        assert (weights is None) == (their_weights is None)
        if weights is not None:
            torch.testing.assert_close(weights, their_weights, rtol=1e-11, atol=1e-11)


def test_batch_second_transposes() -> None:
    first, second, x = make("l2"), make("l2", batch_first=False), tokens(3, N)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(second(x.transpose(0, 1))[0].transpose(0, 1), first(x)[0])


@every
def test_padding_changes_nothing_for_real_tokens_and_silences_the_others(kind: str) -> None:
    layer, x = make(kind, bias=False), tokens(3, N)
    x[0, 5:], x[2] = math.nan, math.inf  # nobody may look at them
    padded = torch.zeros(3, N, dtype=torch.bool)
    padded[0, 5:], padded[2] = True, True
    x.requires_grad_()
    out, _ = layer(x, key_padding_mask=padded)
    torch.testing.assert_close(out[0, :5], layer(x[0, :5])[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out[1], layer(x[1])[0], rtol=1e-11, atol=1e-11)
    assert not out[padded].any()
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert gradient.isfinite().all()
    assert not gradient[padded].any()


@pytest.mark.parametrize("kind", MASKED)
def test_causal_layer_does_not_look_ahead(kind: str) -> None:
    layer, x = make(kind), tokens(1, N).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x, is_causal=True)[0][0, 3].sum(), x)
    assert gradient[0, 3].any()
    assert not gradient[0, 4:].any()


@every
def test_one_token_alone_is_fine(kind: str) -> None:
    layer = make(kind)
    assert layer(tokens(1))[0].isfinite().all()
    assert layer.lipschitz_bound(1, radius=1.0) > 0


@every
def test_gradients_reach_all_weights_and_pass_gradcheck(kind: str) -> None:
    layer, x = make(kind), tokens(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: layer(t)[0], x)
    out = layer.train()(x)[0]
    out.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in layer.parameters())


@pytest.mark.parametrize("kind", MASKED)
def test_layer_in_blocks_equals_layer_at_once_in_both_directions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from howsmooth.nn.layers import attention_layer

    layer, x = make(kind), tokens(2, N).requires_grad_()
    for call in ({"is_causal": True}, {"attn_mask": ~seen()}, {"attn_mask": hs.SlidingWindow(2)}):
        found = []
        for block, kept in ((2**20, 2**26), (2 * H * N * 2, 2**26), (2 * H * N * 2, 0)):
            monkeypatch.setattr(attention_layer, "BLOCK_WEIGHTS", block)
            monkeypatch.setattr(attention_layer, "STORED_WEIGHTS", kept)
            out = layer(x, **call)[0]
            found.append((out, *torch.autograd.grad(out.square().sum(), (x, *layer.parameters()))))
        for blocks in found[1:]:
            for part, whole in zip(blocks, found[0], strict=True):
                torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", GLOBAL)
def test_bound_holds_on_random_inputs_of_every_size(kind: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        layer = make(kind)
        bound = float(layer.lipschitz_bound(N))
        for size in (0.1, 1.0, 10.0, 1000.0):
            found = dense_norm(layer, size * torch.randn(N, D, dtype=torch.float64))
            assert found <= bound * (1 + ROUNDING)  # gradient steps reach their bound of one


@pytest.mark.parametrize("kind", [kind for kind in LAYER_KINDS if not kind.startswith("contractive")])
def test_bound_grows_with_n_so_that_padding_cannot_break_it(kind: str) -> None:
    layer = make(kind)
    bounds = [float(layer.lipschitz_bound(n, radius=1.5)) for n in (1, 2, 3, 5, 8, 13, 100, 1000)]
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("kind", ["dot-product", "sigmoid", "norm-controlled"])
def test_attention_that_is_not_lipschitz_needs_a_radius(kind: str) -> None:
    with pytest.raises(DoesNotApply, match=r"not Lipschitz on all of space: give the radius"):
        make(kind).lipschitz_bound(N)
    assert make(kind).lipschitz_bound(N, radius=1.0).isfinite()


@pytest.mark.parametrize("kind", [kind for kind in LAYER_KINDS if kind not in L2])
def test_infinity_norm_without_a_theorem_is_refused(kind: str) -> None:
    with pytest.raises(DoesNotApply, match="norm=2"):
        make(kind).lipschitz_bound(N, radius=1.0, norm="inf")


@pytest.mark.parametrize("kind", L2)
def test_l2_refuses_masks_that_hide_a_token_from_itself(kind: str) -> None:
    layer, x = make(kind), tokens(N)
    hidden = torch.eye(N, dtype=torch.bool)
    additive = torch.zeros(N, N, dtype=torch.float64).masked_fill(hidden, -math.inf)
    for mask in (hidden, additive, hidden.expand(H, N, N)):
        with pytest.raises(InvalidInput, match="hides a token from itself"):
            layer(x, attn_mask=mask)
    with pytest.raises(InvalidInput, match="adds other numbers"):
        layer(x, attn_mask=torch.randn(N, N, dtype=torch.float64))
    with pytest.raises(DoesNotApply, match="every token sees itself"):
        layer.lipschitz_bound(N, mask=~hidden)


def test_l2_refuses_biases_of_position() -> None:
    """A logit bias of any other kind breaks the theorem as well."""
    bias: LogitBias = hs.ALiBi(torch.ones(H, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="no Lipschitz bound holds"):
        make("l2")(tokens(N), attn_mask=bias)


def test_padding_given_as_a_mask_is_sent_to_its_own_argument() -> None:
    with pytest.raises(InvalidInput, match="pass key_padding_mask"):
        make("dot-product")(tokens(N), attn_mask=hs.Padding(torch.ones(N, dtype=torch.bool)))


def test_lipschitz_norm_refuses_masks() -> None:
    with pytest.raises(InvalidInput, match="depends on all tokens"):
        make("lipschitz-norm")(tokens(N), is_causal=True)
    with pytest.raises(InvalidInput, match="depends on all tokens"):
        make("lipschitz-norm").lipschitz_bound(N, mask="causal")


@every
def test_bad_input_is_refused_in_one_sentence(kind: str) -> None:
    layer = make(kind)
    for x, match in (
        (torch.zeros(D), "shape"),
        (torch.zeros(3, D + 1), "shape"),
        (torch.zeros(3, D, dtype=torch.long), "floating"),
        (torch.zeros(0, D, dtype=torch.float64), "at least one token"),
        (torch.zeros(2, 0, D, dtype=torch.float64), "at least one token"),
    ):
        with pytest.raises(InvalidInput, match=match):
            layer(x)
    x = tokens(2, N)
    with pytest.raises(InvalidInput, match="self-attention"):
        layer(x, x.clone(), x)
    with pytest.raises(InvalidInput, match="padding mask"):
        layer(x, key_padding_mask=torch.zeros(2, N + 1, dtype=torch.bool))
    with pytest.raises(InvalidInput, match="padding mask"):
        layer(x, key_padding_mask=torch.ones(2, N))
    for n in (0, -1, 2.5):
        with pytest.raises(InvalidInput, match=r"n must be .*at least 1"):
            layer.lipschitz_bound(n, radius=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="norm 2 or 'inf'"):
        layer.lipschitz_bound(N, norm=1)
    for heads in (0, 3):
        with pytest.raises(InvalidInput, match=r"split|must be"):
            LAYER_KINDS[kind](D, heads)
    with pytest.raises(InvalidInput, match="dropout"):
        LAYER_KINDS[kind](D, H, dropout=1.0)


@pytest.mark.parametrize("kind", MASKED)
def test_masks_of_wrong_shape_are_refused(kind: str) -> None:
    for shape in ((N + 1, N + 1), (5, N, N), (2, 3, N, N)):
        with pytest.raises(InvalidInput, match="mask"):
            make(kind)(tokens(2, N), attn_mask=torch.zeros(shape, dtype=torch.bool))


def test_token_that_sees_nothing_gets_zero_from_dot_product_attention() -> None:
    layer, x = make("dot-product", bias=False), tokens(N).requires_grad_()
    mask = torch.zeros(N, N, dtype=torch.bool)
    mask[2] = True
    out = layer(x, attn_mask=mask)[0]
    assert not out[2].any()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


@every
def test_huge_tokens_give_finite_outputs(kind: str) -> None:
    layer = make(kind)
    assert layer(1e30 * torch.randn(N, D, dtype=torch.float64))[0].isfinite().all()


@pytest.mark.parametrize("kind", L2)
def test_far_away_tokens_keep_their_distances(kind: str) -> None:
    """Weights depend on differences only: float32 tokens moved by 1000 times their spread lose three digits."""
    layer = make(kind, bias=False).float()
    x = torch.randn(N, D)
    near = layer(x, need_weights=True)[1]
    far = layer(x + 1000.0, need_weights=True)[1]
    torch.testing.assert_close(far, near, rtol=0, atol=2e-3)


def test_map_shares_weights_and_wants_no_gradients() -> None:
    layer = make("dot-product")
    attention = layer.map()
    assert attention.query_weight.data_ptr() == layer.in_proj.weight.data_ptr()
    assert not any(buffer.requires_grad for buffer in attention.buffers())
    assert float(hs.measure(make("l2").map("causal"), tokens(N).float())) > 0  # changes dtype, so copies


def test_caps_bring_norms_down_and_leave_small_weights_alone() -> None:
    layer = make("norm-controlled", bias=False, cap=0.5)
    parts = (*layer.in_proj.weight.detach().chunk(3), layer.out_proj.weight.detach())
    parts[0].mul_(0.1)
    parts[3].mul_(5000)
    small = parts[0].clone()
    left, _, right = torch.linalg.svd(parts[3])
    layer.cap_()
    assert torch.equal(parts[0], small)
    for part in parts:
        assert float(torch.linalg.matrix_norm(part, 2)) <= 0.5 * (1 + 1e-12)
    torch.testing.assert_close(left.T @ parts[3] @ right.T, 0.5 * torch.eye(D, dtype=torch.float64))


def test_layers_stand_in_for_torch_in_a_transformer_encoder() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, H, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    for block in encoder.layers:
        block.self_attn = layers.L2Attention(D, H)
    causal = nn.Transformer.generate_square_subsequent_mask(N)
    for mode in (True, False):
        encoder.train(mode)
        x = torch.randn(2, N, D).requires_grad_()
        out = encoder(x, mask=causal, is_causal=True)
        (gradient,) = torch.autograd.grad(out[:, 2, 0].sum(), x)
        assert gradient[:, 2].any()
        assert not gradient[:, 3:].any()


def test_dropout_is_at_work_in_training_only() -> None:
    layer, x = make("l2", dropout=0.5), tokens(N)
    assert torch.equal(layer(x)[0], layer(x)[0])
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("kind", ["l2", "dot-product"])
def test_long_sequences_keep_no_square_of_n_for_the_way_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from howsmooth.nn.layers import attention_layer

    n, layer = 300, make(kind)
    x = tokens(n).requires_grad_()
    saved = []
    for kept in (2**26, 0):
        monkeypatch.setattr(attention_layer, "BLOCK_WEIGHTS", H * n * 20)
        monkeypatch.setattr(attention_layer, "STORED_WEIGHTS", kept)
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        saved.append(sum(sizes.values()))
    square = H * n * n * 8
    assert saved[0] > square
    assert saved[1] < square / 5
