"""The product bound of whole models, next to what is measured: how many digits are lost, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import howsmooth as hs
from evidence.tables import table
from howsmooth.bounds.composition import Stack
from howsmooth.bounds.model_stack import measured_variances, stack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TITLE = "How large is the product bound of a whole model?"
LENGTH = 32


@dataclass(frozen=True)
class Comparison:
    """One model on one input.

    Attributes:
        everywhere: the product bound on all inputs.
        floored: the product bound where every normalisation sees at least the variances it sees on this input.
        measured: σ_max of the whole model at this input.
    """

    everywhere: Stack
    floored: Stack
    measured: hs.Measurement

    def rows(self) -> list[list[str]]:
        """log10 of each layer's factor, and of the whole."""
        pairs = zip(self.everywhere.layers.items(), self.floored.layers.values(), strict=True)
        lines = [[name, f"{everywhere:.2f}", f"{floored:.2f}", ""] for (name, everywhere), floored in pairs]
        whole = float(self.measured.value.log10())
        return [*lines, ["all", f"{self.everywhere.log10:.2f}", f"{self.floored.log10:.2f}", f"{whole:.2f}"]]

    def sentence(self) -> str:
        """What makes each bound so large."""
        return (
            f"Everywhere: {self.everywhere.vacuous}. On inputs with at least these variances: {self.floored.vacuous}. "
            f"Measured at the input: σ = {float(self.measured):.4g}."
        )


def compare(model: PreTrainedModel, ids: Tensor, progress: Callable[[str], None] = lambda text: None) -> Comparison:
    """Both bounds and the measured norm of embeddings → last hidden states on the token ids, ``(n,)``."""
    progress("bounds")
    everywhere = stack(model, len(ids))
    floored = stack(model, len(ids), variance=measured_variances(model, ids))
    progress("measuring")
    embeddings = model.get_input_embeddings()(ids).detach()
    measured = hs.measure(lambda x: model(inputs_embeds=x[None]).last_hidden_state[0], embeddings)
    return Comparison(everywhere, floored, measured)


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and tables of the documentation page."""
    from transformers import GPT2Config, GPT2Model

    from howsmooth import models

    opened = models.open_model("minilm")
    minilm, tokenizer = opened.model, opened.processor
    text = models.attention_inputs(minilm, tokenizer, models.alice(), length=LENGTH, layers=[0])
    torch.manual_seed(0)
    gpt2 = GPT2Model(GPT2Config(attn_implementation="eager")).eval()
    random_ids = torch.randint(gpt2.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0))
    cases = {
        "MiniLM on the opening of Alice in Wonderland (6 layers, normalised last, ε = 1e-12)": (minilm, text.ids[0]),
        "GPT-2 with random weights on random tokens (12 layers, normalised first, ε = 1e-5)": (gpt2, random_ids),
    }
    found = [
        f"log10 of the bound on every layer and on the whole model, from word embeddings to last hidden states, "
        f"{LENGTH} tokens: on all inputs, and on inputs for which every normalisation sees at least the token variance "
        "it sees on this one. Last column: log10 of σ_max of the whole model, measured at the input."
    ]
    for name, (model, ids) in cases.items():
        result = compare(model, ids, lambda text, name=name: progress(f"{name.split()[0]}, {text}"))  # type: ignore[misc]
        rows = table(["layer", "everywhere", "variance floors", "measured"], result.rows())
        found += [f"## {name}", rows, result.sentence()]
    return found
