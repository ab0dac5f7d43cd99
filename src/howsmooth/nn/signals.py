r"""Signals of a head besides σ: logits, entropy, sink, ‖P‖; and alarms when one of them grows fast.

With logits S, weights P and f_h the map of a head with its slice of the output projection, at n tokens X:

- ``largest_logit``: max |S| over all visible pairs;
- ``entropy``: the mean over rows of −Σ_j P_ij ln P_ij, in nats; a learned sink counts as one more key;
- ``sink_share`` and ``sink_token``: max_j Σ_i P_ij / n, the largest share of attention on one token, and that token;
- ``weights_norm``: ‖P‖₂, from below, by a few steps of the power method;
- ``condition``: σ‖X‖/‖f(X)‖, the amplification of relative changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from howsmooth.attention import AttentionMap, ComposedAttention

SIGNALS = ("sigma_lower", "largest_logit", "entropy", "sink_share", "weights_norm", "condition")
"""The signals that raise alarms; entropy falls, the others grow."""
_FALLING = ("entropy",)
_WORDS = {
    "sigma_lower": "σ",
    "largest_logit": "largest logit",
    "entropy": "entropy",
    "sink_share": "sink share",
    "weights_norm": "‖P‖",
    "condition": "relative condition",
}
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
    plain: AttentionMap
    if isinstance(attention, ComposedAttention):
        plain, mixed = attention.attention, attention.mixed(tokens)[0]
    else:
        plain, mixed = attention, (attention._weights(query, key) @ value)[0]
    logits, weights = plain._logits(query, key)[0], attention._weights(query, key)[0]
    rest = (1 - weights.sum(-1, keepdim=True)).clamp_min(0.0) if isinstance(attention, ComposedAttention) else None
    entropy = torch.special.entr(weights).sum(-1)
    entropy = entropy if rest is None else entropy + torch.special.entr(rest).squeeze(-1)
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
        ratio = self.now / self.before if self.before else float("inf")
        if self.signal in _FALLING:
            ratio = self.before / self.now if self.now else float("inf")
            change = "halved" if round(ratio, 1) == 2 else f"fell to 1/{ratio:.3g}"
        else:
            change = "doubled" if round(ratio, 1) == 2 else f"grew {ratio:.3g}-fold"
        return f"{place}: {_WORDS[self.signal]} {change} in {self.since} steps ({self.before:.3g} → {self.now:.3g})"


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
            falling = signal in _FALLING
            if past:
                since, before = min(reversed(past), key=lambda pair: -pair[1] if falling else pair[1])
                grown = value * self.factor <= before if falling else value >= self.factor * before
                if grown and before > 0 and value >= _MINIMUM.get(signal, 0.0):
                    past.clear()
                    yield Alarm(step, layer, head, signal, before, value, step - since)
            past.append((step, value))
