r"""A monitor of smoothness in training: σ of every attention layer, and of its heads, at the latest batch.

Signals of a head besides σ, and alarms when one of them grows fast. With logits S, weights P and f_h the map of a head
with its slice of the output projection, at n tokens X:

- ``largest_logit``: max |S| over all visible pairs;
- ``entropy``: the mean over rows of −Σ_j P_ij ln P_ij, in nats; a learned sink counts as one more key;
- ``sink_share`` and ``sink_token``: max_j Σ_i P_ij / n, the largest share of attention on one token, and that token;
- ``weights_norm``: ‖P‖₂, from below, by a few steps of the power method;
- ``condition``: σ‖X‖/‖f(X)‖, the amplification of relative changes.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import evaluating, random_stream
from howsmooth._util.validation import check_count, check_fraction, shown, validated
from howsmooth.attention import AttentionMap, ComposedAttention
from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.nn.hosting.call_recorder import CallRecorder, RecordedCall, RecordedMap, attention_of
from howsmooth.nn.layers.attention_layer import precise
from howsmooth.norms import Measurement
from howsmooth.norms.local_constant import measure_heads, measure_map

if TYPE_CHECKING:
    from transformers import TrainerCallback

SIGNALS = {
    "sigma_lower": "σ",
    "largest_logit": "largest logit",
    "entropy": "entropy",
    "sink_share": "sink share",
    "weights_norm": "‖P‖",
    "condition": "relative condition",
}
"""The signals that raise alarms, with their names in messages; entropy falls, the others grow."""
_MINIMUM = {"largest_logit": 4.0, "sink_share": 0.25, "weights_norm": 1.5}
"""Smaller values raise no alarm."""
_POWER_STEPS = 8


@torch.no_grad()
def head_signals(attention: AttentionMap | ComposedAttention, x: Tensor) -> dict[str, Tensor]:
    """Compute the signals of every head at tokens ``(n, d)``, ``(heads,)`` each, and ``output``: ‖f_h(X)‖.

    >>> import howsmooth as hs
    >>> signals = head_signals(hs.SelfAttention.random(8, heads=2, mask="causal"), torch.zeros(4, 8))
    >>> signals["sink_token"].tolist(), round(float(signals["sink_share"][0]), 3)  # (1 + 1/2 + 1/3 + 1/4)/4
    ([0, 0], 0.521)
    """
    tokens = x[None]
    query, key, value = attention.staged(tokens)
    weights = attention._weights(query, key)[0]
    entropy = torch.special.entr(weights).sum(-1)
    plain: AttentionMap
    if isinstance(attention, ComposedAttention):
        plain, mixed = attention.attention, attention.mixed(tokens)[0]
        entropy = entropy + torch.special.entr((1 - weights.sum(-1)).clamp_min(0.0))
    else:
        plain, mixed = attention, weights @ value[0]
    logits = plain._logits(query, key)[0]
    columns = weights.sum(-2).max(-1)
    vector = torch.ones_like(weights[..., :1])
    for _ in range(_POWER_STEPS):
        vector = weights.mT @ (weights @ vector)
        vector = vector / vector.norm(dim=-2, keepdim=True).clamp_min(torch.finfo(vector.dtype).tiny)
    return {
        "largest_logit": logits.masked_fill(logits.isinf(), 0.0).abs().amax((-2, -1)),
        "entropy": entropy.mean(-1),
        "sink_share": columns.values / len(x),
        "sink_token": columns.indices,
        "weights_norm": (weights @ vector).norm(dim=-2).squeeze(-1),
        "output": torch.linalg.matrix_norm(mixed @ plain.output_weight.to(mixed)),
    }


@dataclass(frozen=True)
class Alarm:
    """A signal that has grown (entropy: fallen) fast.

    Attributes:
        step: step of the alarm. layer: number of the layer, or path of its module. head: None for the whole layer.
        signal: one of `SIGNALS`. before, now: its values, ``since`` steps apart.

    >>> print(Alarm(400, 7, 3, "largest_logit", 4.1, 8.3, 200))
    layer 7, head 3: largest logit doubled in 200 steps (4.1 → 8.3)
    """

    step: int
    layer: int | str
    head: int | None
    signal: str
    before: float
    now: float
    since: int

    def __str__(self) -> str:
        place = f"layer {self.layer}" if isinstance(self.layer, int) else self.layer or "the layer"
        place += "" if self.head is None else f", head {self.head}"
        falling = self.signal == "entropy"
        small, large = (self.now, self.before) if falling else (self.before, self.now)
        ratio = large / small if small else math.inf
        if round(ratio, 1) == 2:
            change = "halved" if falling else "doubled"
        else:
            change = f"fell to 1/{ratio:.3g}" if falling else f"grew {ratio:.3g}-fold"
        return f"{place}: {SIGNALS[self.signal]} {change} in {self.since} steps ({self.before:.3g} → {self.now:.3g})"


class AlarmHistory:
    """The recent values of every signal, and alarms when one grows (entropy: falls) by a factor within some steps.

    After an alarm the history of that signal starts anew, so that the next alarm needs further growth.

    >>> watch = AlarmHistory(factor=2.0, within=100)
    >>> seen = {0: 1.0, 50: 1.5, 90: 2.1}
    >>> [len(list(watch.alarms(step, 0, None, {"sigma_lower": value}))) for step, value in seen.items()]
    [0, 0, 1]
    """

    def __init__(self, factor: float, within: int):
        self.factor, self.within = factor, within
        self._past: dict[tuple[int | str, int | None, str], deque[tuple[int, float]]] = {}

    def alarms(self, step: int, layer: int | str, head: int | None, values: dict[str, float]) -> Iterator[Alarm]:
        """Yield the alarms of one layer or head at a step."""
        for signal, value in values.items():
            if signal not in SIGNALS:
                continue
            past = self._past.setdefault((layer, head, signal), deque())
            while past and step - past[0][0] > self.within:
                past.popleft()
            falling = signal == "entropy"
            if past:
                since, before = min(reversed(past), key=lambda pair: -pair[1] if falling else pair[1])
                grown = value * self.factor <= before if falling else value >= self.factor * before
                if grown and before > 0 and value >= _MINIMUM.get(signal, 0.0):
                    past.clear()
                    yield Alarm(step, layer, head, signal, before, value, step - since)
            past.append((step, value))


Log = Callable[..., object]
_FIRST_FACTOR = 3
_RANDOM_PART = 0.1


class SmoothnessMonitor:
    r"""σ_max of the Jacobian of attention layers at real inputs while a model trains.

    Every ``every`` steps each layer is measured at the first text of its latest batch, without padding, dropout or the
    residual and normalisation around it. ``steps`` steps of Golub–Kahan–Lanczos from the previous singular vector (two
    products of the Jacobian each, and one more) give a value that **never exceeds** σ and is seldom far below it,
    logged as ``sigma_lower/<path>``. With ``upper_bound`` an upper bound is computed too, at a higher cost:
    ``sigma_upper/<path>`` holds with a probability of 99 %.

    All values are recomputed from the input tokens of a layer, independently of the model's own kernels: SDPA, flash
    attention, ``torch.compile`` (each measured layer then breaks the graph) and the LoRA adapters of PEFT all work.
    Measurements change no weight, gradient, random number or mode. A layer that cannot be measured (NaN in its tokens
    or weights, only padding) has no value; ``problems`` gives the reason, and one warning is issued.

    Args:
        model: the model in training.
        every: steps from one measurement to the next; the first step is measured.
        layers: dotted paths of modules; by default every attention layer (see `hosting.call_recorder.CallRecorder`).
            Other modules are measured as functions of the whole batch; their value is the maximum over texts.
        log: called as ``log(values, step=step)`` (``wandb.log`` is such a function), or a ``SummaryWriter`` of
            TensorBoard, or a folder for one; None stores values in ``latest`` only.
        steps: steps of the iteration; three times as many without a previous vector.
        upper_bound: whether to compute both ends to a relative accuracy of ``rtol``.
        heads: whether to measure every head too: a lower bound of its σ and the signals of `howsmooth.nn.monitor`
            (largest logit, entropy, sink share and token, ‖P‖, relative condition), as
            ``<signal>/<path>/head.<number>``.
        alarm: called with an `Alarm` when a signal has grown (entropy: fallen) by ``factor`` within ``within`` steps;
            ``print`` is such a function. All alarms of the latest measurement are in ``alarms``.
        factor, within: thresholds of the alarms.

    >>> model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> monitor = SmoothnessMonitor(model, every=10)
    >>> for step in range(11):
    ...     model(torch.randn(2, 5, 16)).square().mean().backward()
    ...     values = monitor.step()
    ...     if values:
    ...         print(step, list(values))
    0 ['sigma_lower/self_attn']
    10 ['sigma_lower/self_attn']
    """

    @validated
    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        layers: Iterable[str] | None = None,
        log: Log | str | Path | Any | None = None,
        *,
        steps: int = 4,
        upper_bound: bool = False,
        rtol: float = 1e-2,
        heads: bool = False,
        alarm: Callable[[Alarm], object] | None = None,
        factor: float = 2.0,
        within: int = 200,
    ):
        self.every = check_count(every, "every")
        self.steps = check_count(steps, "steps", least=2)  # one step would stay at its start
        self.upper_bound, self.rtol = upper_bound, check_fraction(rtol, "rtol")
        self.heads = heads
        if not 1 < factor < math.inf:
            raise InvalidInput(f"factor is the growth of a signal that raises an alarm, above 1, got {factor}.")
        self._watch, self._alarm = AlarmHistory(factor, check_count(within, "within")), alarm
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        self._model, self._log = model, as_log(log)
        self._recorder = CallRecorder(model, layers)
        self._vectors: dict[str, Tensor] = {}
        self._next = 0
        self.latest: dict[str, float] = {}
        self.problems: dict[str, str] = {}
        self.alarms: list[Alarm] = []
        self._warned: set[str] = set()

    @property
    def layers(self) -> list[str]:
        """Return the paths of the measured modules."""
        return list(self._recorder.modules)

    def step(self, step: int | None = None) -> dict[str, float]:
        """Measure if it is due; call it once per training step, after the forward pass.

        Args:
            step: number of the step, when the count does not start at 0.
        """
        now = self._next if step is None else step
        self._next = now + 1
        calls = self._recorder.take(record_next=self._next % self.every == 0)
        if now % self.every or not calls:
            return {}
        self.problems, self.latest, self.alarms = {}, {}, []
        for name, call in calls.items():
            self.latest |= self._values(name, call, now)
        if self._alarm is not None:
            for alarm in self.alarms:
                self._alarm(alarm)
        if self._log is not None:
            self._log(dict(self.latest), step=now)
        return self.latest

    def _values(self, name: str, call: RecordedCall, now: int) -> dict[str, float]:
        try:
            attention = self._attention(call)
            measured = self._measured(name, call, attention)
            if bool(torch.isnan(measured.lower).any() | torch.isnan(measured.upper).any()):
                raise InvalidInput("the Jacobian holds NaN.")
            of_heads = self._of_heads(attention) if self.heads and attention is not None else {}
        except HowsmoothError as error:  # a layer that cannot be measured must not end a training run
            self._report(name, str(error))
            return {}
        place: int | str = name if call.site is None else call.site.layer
        values = {"sigma_lower": float(measured.lower.max())}
        if self.upper_bound:
            values["sigma_upper"] = float(measured.upper.max())
        if self.heads and attention is not None:
            values |= self._condition(*attention, values["sigma_lower"])
        self.alarms += self._watch.alarms(now, place, None, values)
        named = {f"{signal}/{name}": value for signal, value in values.items()}
        for head, of_head in enumerate(zip(*of_heads.values(), strict=True)):
            numbers = dict(zip(of_heads, of_head, strict=True))
            self.alarms += self._watch.alarms(now, place, head, numbers)
            named |= {f"{signal}/{name}/head.{head}": value for signal, value in numbers.items()}
        return named

    def _attention(self, call: RecordedCall) -> RecordedMap | None:
        """Return the attention of a call and its tokens, both in at least float32; None for other modules."""
        found = attention_of(self._model, call)
        if found is None:
            return None
        f, x = found[0], precise(found[1])
        return f.in_dtype(x.dtype) if isinstance(f, AttentionMap | ComposedAttention) else f, x

    def _report(self, name: str, problem: str) -> None:
        """Record why a layer has no value, and warn once."""
        self.problems[name] = problem
        self._vectors.pop(name, None)
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"the smoothness of {name or 'the layer'} cannot be measured: {problem}", stacklevel=4)

    def _condition(self, f: Callable[[Tensor], Tensor], x: Tensor, sigma: float) -> dict[str, float]:
        """Compute σ‖X‖/‖f(X)‖ of the whole layer; nothing where its output vanishes."""
        with torch.no_grad():
            size = float(f(x).norm())
        return {"condition": sigma * float(x.norm()) / size} if size > 0 else {}

    def _of_heads(self, attention: RecordedMap) -> dict[str, list[float]]:
        """Compute each signal of every head; none for maps without heads."""
        f, x = attention
        if not isinstance(f, AttentionMap | ComposedAttention):
            return {}
        sigma = measure_heads(f, x, rtol=1e-3, max_steps=_FIRST_FACTOR * self.steps).lower
        signals = head_signals(f, x)
        size = signals.pop("output").double().clamp_min(torch.finfo(torch.float32).tiny)
        signals = {"sigma_lower": sigma, **signals, "condition": sigma.double() * float(x.norm()) / size}
        if any(bool(values.isnan().any()) for values in signals.values()):
            raise InvalidInput("a signal of a head is NaN.")
        return {signal: values.tolist() for signal, values in signals.items()}

    def _measured(self, name: str, call: RecordedCall, attention: RecordedMap | None) -> Measurement:
        if attention is not None:
            return self._solve(name, *attention)
        with evaluating(call.module):
            return self._solve(name, call.output, precise(call.tokens.detach()))

    def _solve(self, name: str, f: Callable[[Tensor], Tensor], x: Tensor) -> Measurement:
        if self.upper_bound:
            return measure_map(f, x, rtol=self.rtol)
        known = self._vectors.get(name)
        start = torch.randn(x.shape, generator=random_stream(self._next, name)).to(x)
        steps = _FIRST_FACTOR * self.steps
        if known is not None and known.shape == x.shape:
            steps = self.steps
            # A random part, should the old vector be orthogonal to the new largest direction.
            start = known.to(x) / known.norm() + _RANDOM_PART * start / start.norm()
        measured = measure_map(f, x, rtol=1e-6, start=start, max_steps=steps)
        assert measured.right is not None
        self._vectors[name] = measured.right
        return measured

    def callback(self) -> TrainerCallback:
        """Make a callback of the transformers Trainer: ``Trainer(..., callbacks=[monitor.callback()])``.

        It measures when an optimiser step ends, and adds values to the trainer's log history.
        """
        from transformers import TrainerCallback

        monitor = self

        class Monitoring(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                # The trainer has already counted this step.
                values = monitor.step(state.global_step - 1)
                if values:
                    state.log_history.append({**values, "step": state.global_step})

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                monitor.close()

        return Monitoring()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._recorder.close()

    def __enter__(self) -> SmoothnessMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def as_log(log: Any) -> Log | None:
    """Return a function of values and step, from a function, a TensorBoard writer, or a folder for one.

    >>> as_log(lambda values, step: print(step, values))({"sigma_lower/attn": 1.5}, step=3)
    3 {'sigma_lower/attn': 1.5}
    """
    if isinstance(log, str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InvalidInput("TensorBoard is not installed: run `pip install tensorboard`.") from None
        if Path(log).exists() and not Path(log).is_dir():
            raise InvalidInput(f"{shown(str(log))} is no folder: TensorBoard writes its files into a folder.")
        log = SummaryWriter(str(log))
    if hasattr(log, "add_scalar"):
        writer = log

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return write
    if log is None or callable(log):
        return log
    raise InvalidInput(f"log must be a function, a SummaryWriter or a folder, got {type(log).__name__}.")
