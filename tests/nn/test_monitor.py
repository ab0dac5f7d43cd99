"""The monitor's values are true lower bounds at real inputs, and watching changes nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import howsmooth as hs
from howsmooth import nn as layers
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.nn.hosting.replacement import replace_attention
from howsmooth.nn.monitor import Alarm, SmoothnessMonitor, as_log
from howsmooth.testing import dense_jacobian
from tests.models.tiny import TINY

D, HEADS, N = 16, 2, 6


def dense_norm(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The oracle: all of the Jacobian by autograd in float64, and its largest singular value."""
    x = x.detach().double()
    matrix = dense_jacobian(f, x)
    return float(torch.linalg.matrix_norm(matrix, 2))


def encoder(dropout: float = 0.0) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(D, HEADS, 32, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False)


def run(model: nn.Module, x: Tensor, **options: Any) -> None:
    model(x, **options).square().mean().backward()


def close(found: float, exact: float, rtol: float = 1e-4) -> None:
    """A lower bound that is tight."""
    assert exact * (1 - rtol) <= found <= exact


def test_value_is_the_norm_of_the_layer_at_the_tokens_it_saw() -> None:
    model, x = encoder(), torch.randn(3, N, D)
    monitor = SmoothnessMonitor(model, steps=40)
    run(model, x)
    found = monitor.step()
    assert list(found) == ["sigma_lower/layers.0.self_attn", "sigma_lower/layers.1.self_attn"]
    exact = encoder().double()
    first, second = (block.self_attn for block in exact.layers)
    between = exact.layers[0](x.double())[0]
    for name, attention, tokens in (("0", first, x[0]), ("1", second, between)):
        wanted = dense_norm(lambda y, a=attention: a(y, y, y, need_weights=False)[0], tokens)
        close(found[f"sigma_lower/layers.{name}.self_attn"], wanted)


@pytest.mark.parametrize("kind", ["l2", "contractive-l2", "sigmoid", "cosine", "lipschitz-norm", "gradient-step"])
def test_masks_and_padding_of_the_call_are_those_of_the_measurement(kind: str) -> None:
    """The first text has four real tokens; what is measured is the layer on those four."""
    model = replace_attention(encoder(), kind).double().eval()
    x = torch.randn(2, N, D, dtype=torch.float64)
    padding = torch.arange(N).expand(2, N) >= torch.tensor([[4], [N]])
    options = {"src_key_padding_mask": padding}
    if kind != "lipschitz-norm":
        options["mask"] = torch.ones(N, N, dtype=torch.bool).triu(1)
    monitor = SmoothnessMonitor(model, layers=["layers.0.self_attn"], steps=40)
    run(model, x, **options)
    layer = model.layers[0].self_attn
    causal = kind != "lipschitz-norm"
    exact = dense_norm(lambda y: layer(y, is_causal=causal)[0], x[0, :4])
    close(monitor.step()["sigma_lower/layers.0.self_attn"], exact)


def test_masks_of_any_shape_are_followed() -> None:
    layer = layers.L2Attention(D, HEADS).double()
    x = torch.randn(2, N, D, dtype=torch.float64)
    hidden = torch.rand(2, 1, N, N) < 0.4
    hidden.diagonal(dim1=-2, dim2=-1).fill_(False)
    monitor = SmoothnessMonitor(layer, steps=40)
    layer(x, attn_mask=hidden, is_causal=True)[0].sum().backward()
    exact = dense_norm(lambda y: layer(y, attn_mask=hidden[0, 0], is_causal=True)[0], x[0])
    close(monitor.step()["sigma_lower/"], exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral"])
def test_blocks_of_transformers_are_measured_without_what_stands_around(name: str) -> None:
    tiny = TINY[name]
    model, ids = tiny.build(), torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    monitor = SmoothnessMonitor(model, steps=60)
    model(input_ids=ids, attention_mask=mask)[0].sum().backward()
    found = monitor.step()
    assert [key.removeprefix("sigma_lower/") for key in found] == [tiny.block.format(i) for i in range(2)]
    text = {"input_ids": ids[:1, :7]}
    for layer in range(2):
        x, *_ = tiny.listen(model, layer, text)
        exact = dense_norm(tiny.function(model, layer, text), x[0])
        close(found[f"sigma_lower/{tiny.block.format(layer)}"], exact, rtol=1e-3)


@pytest.mark.slow
def test_any_module_can_be_watched_as_a_function_of_the_batch() -> None:
    model, x = encoder(), torch.randn(3, N, D)
    monitor = SmoothnessMonitor(model, layers=["layers.1.linear1", "layers.0"], steps=60)
    run(model, x)
    found = monitor.step()
    exact = float(torch.linalg.matrix_norm(model.layers[1].linear1.weight.detach().double(), 2))
    close(found["sigma_lower/layers.1.linear1"], exact, 1e-2)
    block = encoder().double().layers[0]
    close(found["sigma_lower/layers.0"], max(dense_norm(lambda y: block(y[None])[0], each) for each in x), 1e-3)


def test_few_steps_give_a_lower_bound_that_improves_with_warm_vectors() -> None:
    model, x = encoder(), torch.randn(1, 24, D)
    exact = dense_norm(lambda y: encoder().double().layers[0].self_attn(y, y, y, need_weights=False)[0], x[0])
    monitor = SmoothnessMonitor(model, every=1, layers=["layers.0.self_attn"], steps=2)
    values = []
    for _ in range(8):
        run(model, x)
        values.append(monitor.step()["sigma_lower/layers.0.self_attn"])
    assert all(value <= exact for value in values)
    assert values[0] < values[-1]
    assert values[-1] > 0.97 * exact


def test_upper_and_lower_values_hold_from_both_sides() -> None:
    model, x = encoder(), torch.randn(1, 24, D)
    monitor = SmoothnessMonitor(model, layers=["layers.0.self_attn"], upper_bound=True)
    run(model, x)
    found = monitor.step()
    exact = dense_norm(lambda y: encoder().double().layers[0].self_attn(y, y, y, need_weights=False)[0], x[0])
    lower, upper = found["sigma_lower/layers.0.self_attn"], found["sigma_upper/layers.0.self_attn"]
    assert lower <= exact <= upper <= 1.02 * lower


def trajectory(watch: Callable[[nn.Module], SmoothnessMonitor] | None) -> tuple[nn.Module, list[float]]:
    model = encoder(dropout=0.2)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = None if watch is None else watch(model)
    losses = []
    for step in range(4):
        x = torch.randn(2, N - step % 2, D)
        optimiser.zero_grad()
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        if monitor is not None:
            monitor.step()
        optimiser.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("upper_bound", [False, True])
@pytest.mark.parametrize("names", [None, ["layers.0"]])
@pytest.mark.slow
def test_watching_does_not_change_training(names: list[str] | None, upper_bound: bool) -> None:
    """Bit by bit: weights, losses, modes, and with dropout the random numbers too."""
    model, losses = trajectory(None)
    other, watched = trajectory(lambda m: SmoothnessMonitor(m, every=2, layers=names, upper_bound=upper_bound))
    assert losses == watched
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(module.training for module in other.modules())


@pytest.mark.slow
def test_dropout_is_off_while_measuring() -> None:
    model, x = encoder(dropout=0.5), torch.randn(1, N, D)
    monitor = SmoothnessMonitor(model, layers=["layers.0"], steps=60)
    run(model, x)
    block = encoder().double().layers[0]
    close(monitor.step()["sigma_lower/layers.0"], dense_norm(lambda y: block(y[None])[0], x[0]), 1e-3)
    assert model.layers[0].dropout.training


def test_values_come_every_so_many_steps_and_not_from_evaluation() -> None:
    model, heard = encoder(), list[tuple[int, dict[str, float]]]()
    monitor = SmoothnessMonitor(model, every=3, log=lambda values, step: heard.append((step, values)))
    for _ in range(7):
        with torch.no_grad():
            model.eval()(1e6 * torch.randn(1, N, D))
        run(model.train(), torch.randn(1, N, D))
        monitor.step()
    assert [step for step, _ in heard] == [0, 3, 6]
    assert all(0 < value < 100 for _, values in heard for value in values.values())
    monitor.close()
    run(model, torch.randn(1, N, D))
    assert monitor.step(9) == {}


def test_a_resumed_run_keeps_its_own_count() -> None:
    model, monitored = encoder(), []
    monitor = SmoothnessMonitor(model, every=10)
    for step in range(15, 32):
        run(model, torch.randn(1, N, D))
        if monitor.step(step):
            monitored.append(step)
    assert monitored == [20, 30]


def test_what_cannot_be_measured_is_said_once_and_ends_nothing() -> None:
    model = encoder()
    monitor = SmoothnessMonitor(model, every=1, heads=True)
    for said in (2, 0):  # once for each of two layers
        run(model, torch.full((1, N, D), math.nan))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert monitor.step() == {}
        assert ["cannot be measured" in str(one.message) for one in caught] == [True] * said
        assert "NaN" in monitor.problems["layers.0.self_attn"]
    model = encoder()
    monitor = SmoothnessMonitor(model, every=1, layers=["layers.0.self_attn"])
    run(model, torch.randn(1, N, D), src_key_padding_mask=torch.ones(1, N, dtype=torch.bool))
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn cannot be measured: .* padding"):
        assert "sigma_lower/layers.0.self_attn" not in monitor.step()
    assert "padding" in monitor.problems["layers.0.self_attn"]
    other = encoder()
    monitor = SmoothnessMonitor(other, every=1)
    run(other, torch.randn(1, N, D))
    assert all(math.isfinite(value) for value in monitor.step().values())
    assert monitor.problems == {}


def test_cross_attention_is_no_self_attention() -> None:
    attention = nn.MultiheadAttention(D, HEADS, batch_first=True)
    monitor = SmoothnessMonitor(attention)
    attention(torch.randn(1, 3, D), torch.randn(1, 4, D), torch.randn(1, 4, D))[0].sum().backward()
    with pytest.warns(UserWarning, match="only self-attention"):
        assert monitor.step() == {}
    assert "only self-attention" in monitor.problems[""]


def signals_by_hand(attention: Any, x: Tensor, head: int) -> dict[str, float]:
    """The oracle: weights of one head from its logits in float64, and norms by singular values."""
    query, key, value = (t[0, head].double() for t in attention.project(x[None].double()))
    causal = any(isinstance(term, hs.Causal) for term in attention.terms)
    logits = query @ key.T * attention.scale
    logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -math.inf) if causal else logits
    weights = torch.softmax(logits, -1)
    output = weights @ value @ attention.output_weight[head].double()
    alone = attention.in_dtype(torch.float64).head(head)
    sigma = dense_norm(alone, x)
    return {
        "sigma_lower": sigma,
        "largest_logit": float(logits[logits.isfinite()].abs().max()),
        "entropy": float(torch.special.entr(weights).sum(-1).mean()),
        "sink_share": float(weights.sum(0).max()) / len(x),
        "sink_token": float(weights.sum(0).argmax()),
        "weights_norm": float(torch.linalg.matrix_norm(weights, 2)),
        "condition": sigma * float(x.double().norm() / output.norm()),
    }


def test_heads_show_what_their_weights_show() -> None:
    model, x = encoder(), torch.randn(3, N, D)
    monitor = SmoothnessMonitor(model, steps=40, heads=True, layers=["layers.0.self_attn"])
    run(model, x)
    found = monitor.step()
    attention = hs.SelfAttention.from_torch(encoder().layers[0].self_attn)
    for head in range(HEADS):
        for signal, expected in signals_by_hand(attention, x[0], head).items():
            value = found[f"{signal}/layers.0.self_attn/head.{head}"]
            assert value == pytest.approx(expected, rel=2e-3, abs=1e-5), signal
    exact = dense_norm(attention.in_dtype(torch.float64), x[0]) * float(x[0].norm() / attention(x[0]).norm())
    assert found["condition/layers.0.self_attn"] == pytest.approx(exact, rel=1e-3)
    assert len(found) == 2 + 7 * HEADS


def test_alarms_are_words_and_are_told_once() -> None:
    model, x, told = TINY["gpt2"].build(), torch.randint(3, 97, (1, 9)), list[Alarm]()
    model.eval()
    monitor = SmoothnessMonitor(model, every=1, heads=True, alarm=told.append)
    for step in (0, 100, 200, 300):
        if step == 200:  # the queries of one head of layer 1 grow
            with torch.no_grad():
                model.h[1].attn.c_attn.weight[:, 8:16] *= 40
                model.h[1].attn.c_attn.bias[8:16] *= 40
        model(input_ids=x)[0].sum().backward()
        monitor.step(step)
        assert monitor.alarms == [alarm for alarm in told if alarm.step == step]
    logits = [alarm for alarm in told if alarm.signal == "largest_logit"]
    assert {(alarm.step, alarm.layer, alarm.head) for alarm in told} <= {(200, 1, 1), (200, 1, None)}
    assert [str(alarm).split(" (")[0] for alarm in logits] == [
        "layer 1, head 1: largest logit grew 40-fold in 100 steps"
    ]
    with pytest.raises(InvalidInput, match="factor"):
        SmoothnessMonitor(model, factor=1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # looked at by dynamo
@pytest.mark.parametrize("how", ["sdpa", "eager", "aot_eager"])
def test_kernels_and_compilers_change_no_value(how: str) -> None:
    tiny = TINY["llama"]
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    values = []
    for different in (False, True):
        model = tiny.build().float()
        model.set_attn_implementation("sdpa" if different and how == "sdpa" else "eager")
        watched = torch.compile(model, backend=how) if different and how != "sdpa" else model
        with SmoothnessMonitor(watched, steps=40, heads=True) as monitor:
            watched(input_ids=ids)[0].sum().backward()
            values.append(monitor.step())
    assert len(values[0]) == 2 * (2 + 7 * 4)
    assert values[1] == pytest.approx(values[0], rel=1e-4)


@pytest.mark.slow
def test_adapters_of_peft_are_part_of_what_is_measured() -> None:
    peft = pytest.importorskip("peft")
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=8)
    model = peft.get_peft_model(TINY["llama"].build(), wanted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    monitor = SmoothnessMonitor(model, steps=60)
    model(input_ids=ids)[0].sum().backward()
    found = monitor.step()
    assert len(found) == 2
    merged = model.merge_and_unload()
    tiny, inputs = TINY["llama"], {"input_ids": ids}
    for layer, value in enumerate(found.values()):
        x, *_ = tiny.listen(merged, layer, inputs)
        close(value, dense_norm(tiny.function(merged, layer, inputs), x[0]), rtol=1e-3)
    plain = TINY["llama"].build()
    x, *_ = tiny.listen(plain, 0, inputs)
    assert abs(dense_norm(tiny.function(plain, 0, inputs), x[0]) / next(iter(found.values())) - 1) > 0.01  # it matters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next", "deepseek_v3"])
def test_new_kinds_of_attention_are_watched(name: str) -> None:
    tiny = TINY[name]
    model, ids = tiny.build(), torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(1))
    monitor = SmoothnessMonitor(model, steps=60, heads=True)
    model(input_ids=ids)[0].sum().backward()
    found = monitor.step()
    layer = tiny.layers[-1]
    x, *_ = tiny.listen(model, layer, {"input_ids": ids})
    exact = dense_norm(tiny.function(model, layer, {"input_ids": ids}), x[0])
    close(found[f"sigma_lower/{tiny.block.format(layer)}"], exact, rtol=1e-3)
    assert all(math.isfinite(value) for value in found.values())


def test_half_precision_is_measured_in_single() -> None:
    layer, x = layers.L2Attention(D, HEADS), torch.randn(1, N, D)
    exact = dense_norm(lambda y: layers_in_double(layer.half().float())(y)[0], x[0].half())
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        layer.half()
        monitor = SmoothnessMonitor(layer, steps=40)
        layer(x.half())[0].sum().backward()
        close(monitor.step()["sigma_lower/"], exact, 1e-3)
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def layers_in_double(layer: layers.L2Attention) -> layers.L2Attention:
    import copy

    return copy.deepcopy(layer).double()


def test_bad_requests_are_refused() -> None:
    for every in (0, -1, 0.5):
        with pytest.raises(InvalidInput, match="every"):
            SmoothnessMonitor(encoder(), every=every)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="steps"):
        SmoothnessMonitor(encoder(), steps=1)
    with pytest.raises(InvalidInput, match="rtol"):
        SmoothnessMonitor(encoder(), rtol=1.0)
    with pytest.raises(UnsupportedModel, match="no attention"):
        SmoothnessMonitor(nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="no module"):
        SmoothnessMonitor(encoder(), layers=["layers.7"])
    with pytest.raises(InvalidInput, match="SummaryWriter"):
        SmoothnessMonitor(encoder(), log=3)


def test_values_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    log = as_log(writer)
    assert log is not None
    for step in (0, 100):
        log({"sigma_lower/attn": 1.5 + step}, step=step)
    writer.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("sigma_lower/attn")] == [(0, 1.5), (100, 101.5)]


@pytest.mark.slow
def test_the_trainer_of_transformers_calls_it(tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY["gpt2"].options))
    replace_attention(model, "l2", layers=[1])
    ids = torch.randint(3, 97, (8, 7))
    data = [{"input_ids": row, "labels": row} for row in ids]
    monitor = SmoothnessMonitor(model, every=2)
    assert sorted(monitor.layers) == ["transformer.h.0.attn", "transformer.h.1.attn.layer"]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[monitor.callback()])
    trainer.train()
    rows = [row for row in trainer.state.log_history if any(key.startswith("sigma_lower") for key in row)]
    assert [row["step"] for row in rows] == [1, 3, 5]
    assert all(0 < row["sigma_lower/transformer.h.0.attn"] < 100 for row in rows)
