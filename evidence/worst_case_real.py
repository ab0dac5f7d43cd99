"""The worst case near a real text, and among sequences of real tokens, in trained models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

from evidence.tables import table
from howsmooth.models import OpenModel, Targets, Window, alice, open_model
from howsmooth.search import Witness, sandwich, worst_case
from howsmooth.search.ascent import norm_at
from howsmooth.search.sandwich_search import SandwichCell
from howsmooth.sets import Around, Tokens

TITLE = "The worst case near real text"
LAYERS: dict[str, Sequence[int]] = {"minilm": range(6), "smollm2": (0, 3, 9, 17, 23, 28)}
LENGTH = 32
SHARES = (0.01, 0.05)
"""How far each token may move, as shares of the mean token norm."""
STARTS, STEPS = 2, 80
DRAWN = 5
SEQUENCE_STARTS, SEQUENCE_STEPS = 4, 40


@dataclass(frozen=True)
class Near:
    """The attention block of one layer near the text: a cell for each share, and the largest σ of random neighbours."""

    layer: int
    size: float
    cells: tuple[SandwichCell, ...]
    random: tuple[float, ...]


@dataclass(frozen=True)
class Sequences:
    """The roughest sequence of tokens that was found for layer 0, beside the text."""

    text: float
    witness: Witness
    tokens: list[str]


def window(model: OpenModel) -> Window:
    """The first words of the story."""
    text = alice()
    return model.windows(text[text.index("Alice was beginning") :], LENGTH, 1, None)[0]


def near_text(model: OpenModel, layers: Sequence[int], steps: int = STEPS) -> Iterator[Near]:
    """Both ends in the neighbourhoods of what each layer's attention sees of the text."""
    sites = Targets(model, window(model)).sites
    for layer in layers:
        f, x = sites[layer].attention, sites[layer].x.double()
        size = float(x.norm(dim=-1).mean())
        eps = [share * size for share in SHARES]
        found = sandwich(f, [len(x)], over=[Around(x, e) for e in eps], starts=STARTS, steps=steps)
        generator = torch.Generator().manual_seed(layer)
        drawn = [[Around(x, e).random(generator, *x.shape) for _ in range(DRAWN)] for e in eps]
        random = tuple(max(float(norm_at(f, y, 2)) for y in inputs) for inputs in drawn)
        yield Near(layer, size, found.cells, random)


def embeddings(model: PreTrainedModel) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The table of token embeddings, and what happens between them and the attention of layer 0, in float64."""
    if hasattr(model, "embeddings"):  # BERT adds positions and normalises
        bert = copy.deepcopy(model.embeddings).double().eval()
        return bert.word_embeddings.weight, lambda e: bert(inputs_embeds=e.reshape(-1, *e.shape[-2:])).reshape(e.shape)
    norm = copy.deepcopy(model.layers[0].input_layernorm).double()

    def normalised(e: Tensor) -> Tensor:  # what Llama's RMSNorm does, which goes through float32 by itself
        return norm.weight * e / (e.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()

    return model.embed_tokens.weight, normalised


def worst_sequence(model: OpenModel, starts: int = SEQUENCE_STARTS, steps: int = SEQUENCE_STEPS) -> Sequences:
    """The search over all sequences of the vocabulary for the block of layer 0, with the text among its starts."""
    text = window(model)
    ids, site = text.ids[0], Targets(model, text).sites[0]
    over = Tokens(*embeddings(model.model))
    if not torch.allclose(over.sequence(ids), site.x.double(), rtol=1e-4, atol=1e-4):
        raise AssertionError(f"the embedded text is not what layer 0 of {model.name} sees")
    witness = worst_case(site.attention, LENGTH, over=over, start=ids, starts=starts, steps=steps)
    assert witness.ids is not None
    words = [model.processor.decode([i]) for i in witness.ids.tolist()]
    return Sequences(float(norm_at(site.attention, over.sequence(ids), 2)), witness, words)


def near_table(found: Sequence[Near]) -> str:
    rows = []
    for near in found:
        assert near.cells[0].centre is not None
        cells: list[str] = []
        for cell, random in zip(near.cells, near.random, strict=True):
            assert cell.upper is not None
            cells += [f"{random:.4g}", f"{cell.lower:.4g} ({cell.lower / near.cells[0].centre:.2f}×)"]
            cells += [f"{cell.upper.value:.4g}", f"{cell.upper.value / cell.lower:.3g}"]
        rows.append([near.layer, f"{near.size:.3g}", f"{near.cells[0].centre:.4g}", *cells])
    head = ["layer", "token norm", "σ at the text"]
    for share in SHARES:
        near_by = f"{100 * share:g} %"
        head += [f"{near_by}: random", f"{near_by}: worst", f"{near_by}: bound", "bound ÷ worst"]
    return table(head, rows)


def sequence_text(found: Sequences) -> str:
    """The sequence in words; repr, so that any token can be shown."""
    start = "the text" if found.witness.start == "given" else found.witness.start
    return (
        f"Layer 0, sequences of {LENGTH} tokens of the vocabulary: σ is {found.text:.4g} at the text and "
        f"{found.witness.value:.4g} at the roughest sequence found, {found.witness.value / found.text:.2f} times as "
        f"much (from {start}, {found.witness.steps} steps):\n\n```text\n{wrapped(found.tokens)}\n```"
    )


def wrapped(tokens: Sequence[str]) -> str:
    """
    >>> print(wrapped(["a", "a", "|"]))
    'a' ×2  '|'
    """
    runs = [(token, len(list(run))) for token, run in groupby(tokens)]
    words = [repr(token) + (f" ×{count}" if count > 1 else "") for token, count in runs]
    return "\n".join("  ".join(words[i : i + 12]) for i in range(0, len(words), 12))


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    page = [
        f"Whole attention blocks (all heads with the output projection) at {LENGTH} tokens from the beginning of the "
        f"story of Alice in Wonderland. In the neighbourhood every token moves by at most ε = "
        f"{' and '.join(f'{100 * share:g} %' for share in SHARES)} of the mean norm of the tokens that the attention "
        f"sees. *Random*: the largest σ of {DRAWN} inputs with every token moved by ε in a random direction. *Worst*: "
        f"what the search reaches, and how many times the value at the text. *Bound*: the smallest upper bound "
        f"on the whole neighbourhood, here always `howsmooth.three_path_ball`."
    ]
    for name, layers in LAYERS.items():
        model = open_model(name)
        near = []
        for one in near_text(model, layers):
            progress(f"{name}, layer {one.layer}")
            near.append(one)
        bounds = {cell.upper.name for one in near for cell in one.cells if cell.upper is not None}
        if bounds != {"howsmooth.three_path_ball"}:
            raise AssertionError(f"the page names another bound than {bounds}")
        progress(f"{name}, sequences of tokens")
        page += [f"## {name} [{model.precision}]", near_table(near), sequence_text(worst_sequence(model))]
    return page
