"""What watching smoothness costs a training run, and how near its values are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Section, Table, Target
from benchmarks.timing import best_seconds
from howsmooth.models import alice, open_model
from howsmooth.models.random_models import random_model
from howsmooth.nn.hosting.replacement import replace_attention
from howsmooth.nn.monitor import SmoothnessMonitor

TEXT = """Milliseconds of one step of training (forward, backward, AdamW; batches of 8 texts) without a monitor, and of
what a `SmoothnessMonitor` adds: to a step in which it only waits (its hooks and its count), and to one in which it
measures every attention layer at the first text of the batch, by 4 steps of Golub–Kahan–Lanczos from the vectors of
last time. The additions are timed by themselves, because between two steps the machine changes by more than they are.
The cost is that of a monitor with `every=100`: 99 times the first addition and once the second, over 100 plain steps.
Values are lower bounds; the last columns have them over the upper end of σ at the same batch, the least and
the median over layers and batches, every batch another."""
MOST, EVERY, BATCH = 0.05, 100, 8


def cases(quick: bool) -> dict[str, Callable[[], tuple[Any, list[Tensor]]]]:
    """Models with batches to train on: a real encoder on text, causal models with random weights."""
    n = 32 if quick else 128

    def encoder(kind: str | None) -> tuple[Any, list[Tensor]]:
        opened = open_model("minilm")
        model, tokenizer = opened.model, opened.processor
        ids = torch.tensor(tokenizer(alice(), add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
        rows = ids[: len(ids) // n * n].reshape(-1, n)
        return _with(model, kind), [rows[start : start + BATCH] for start in range(0, 10 * BATCH, BATCH)]

    def causal(kind: str | None) -> tuple[Any, list[Tensor]]:
        model = random_model("random:gpt2[layers=6,width=256,heads=8]")
        draw = torch.Generator().manual_seed(0)
        return _with(model, kind), [torch.randint(3, 259, (BATCH, n), generator=draw) for _ in range(10)]

    return {
        f"MiniLM, Alice, n = {n}": lambda: encoder(None),
        f"MiniLM with L2 attention, Alice, n = {n}": lambda: encoder("l2"),
        f"GPT-2, 6 × 256, random, n = {n}": lambda: causal(None),
        f"GPT-2 with L2 attention, n = {n}": lambda: causal("l2"),
    }


def _with(model: Any, kind: str | None) -> Any:
    return (model if kind is None else replace_attention(model, kind)).requires_grad_(True).train()


def trainer(model: Any, batches: list[Tensor]) -> Callable[[], None]:
    """One step of training on the next batch."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    count = 0

    def step() -> None:
        nonlocal count
        optimiser.zero_grad(set_to_none=True)
        model(input_ids=batches[count % len(batches)]).last_hidden_state.square().mean().backward()
        optimiser.step()
        count += 1

    return step


def cost(model: Any, batches: list[Tensor], rounds: int) -> dict[str, float]:
    """Seconds of a plain step, and of what a monitor adds while it waits and when it measures."""
    step = trainer(model, batches)
    plain = best_seconds({"plain": step}, rounds=rounds, budget=20)
    with SmoothnessMonitor(model, every=1) as monitor:
        step()
        monitor.step()
        step()
        heard = dict(monitor._listener.calls)

        def measure() -> None:
            monitor._listener.calls = dict(heard)
            monitor.step()

        measuring = best_seconds({"measuring": measure}, rounds=rounds, budget=20)
    with SmoothnessMonitor(model, every=EVERY) as monitor:
        monitor.step(0)

        def wait() -> None:
            for call in heard.values():
                for hook in call.module._forward_pre_hooks.values():
                    hook(call.module, call.args, call.kwargs)
            monitor.step(1)

        waiting = best_seconds({"waiting": wait}, rounds=10 * rounds)
    return plain | measuring | waiting


def nearness(model: Any, batches: list[Tensor]) -> Tensor:
    """Values over the upper end of σ, batch by batch, without those of the first, which has no vectors yet."""
    step, found = trainer(model, batches), []
    with SmoothnessMonitor(model, every=1) as cheap, SmoothnessMonitor(model, every=1, upper_bound=True) as exact:
        for _ in batches[:5]:
            step()
            value = cheap.step()
            sure = exact.step()
            found.append([value[name] / sure[name.replace("lower", "upper")] for name in value])
    return torch.tensor(found[1:])


def run(quick: bool, report: Callable[[str], None]) -> Section:
    """Time the three kinds of steps in turns, then compare values with upper ends."""
    rows, worst = [], 0.0
    for name, make in cases(quick).items():
        report(name)
        model, batches = make()
        best = cost(model, batches, rounds=2 if quick else 10)
        share = ((EVERY - 1) * best["waiting"] + best["measuring"]) / (EVERY * best["plain"])
        near = nearness(model, batches)
        worst = max(worst, share)
        times = [
            f"{1e3 * best[kind]:{form}}" for kind, form in (("plain", ".0f"), ("waiting", ".4f"), ("measuring", ".0f"))
        ]
        rows.append([name, *times, f"{100 * share:.2f} %", f"{float(near.min()):.3f}", f"{float(near.median()):.3f}"])
    columns = [
        "case",
        "step, ms",
        "+ waiting, ms",
        "+ measuring, ms",
        f"cost, every {EVERY}",
        "value ÷ σ, least",
        "median",
    ]
    section = Section("monitor", "The smoothness monitor", TEXT, [Table(columns, rows)])
    claim = f"SmoothnessMonitor, every {EVERY} steps, all attention layers"
    section.targets = [Target(claim, f"≤ {100 * MOST:.0f} % of training time", f"{100 * worst:.2f} %", worst <= MOST)]
    return section
