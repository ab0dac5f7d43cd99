"""Real models scanned on real text: against an independent computation, and how the roughness grows with n."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor, nn
from transformers import PreTrainedModel

from evidence.tables import table
from howsmooth.models import OpenModel, alice, open_model
from howsmooth.reports.growth import growth
from howsmooth.scans import Scan, scan

TITLE = "Real models on real text"
LAYERS = {"minilm": None, "smollm2": (0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29)}
"""The layers of each model; None for all."""
LENGTHS = (8, 16, 32, 64, 128, 256)
WINDOWS = 5
WHAT = ("attention", "layer")
SAMPLED = 20
"""Cells of each model that are computed a second time."""
MODEL_ROUNDING = 1e-6  # the norms and rotary angles of transformers are float32, whatever the dtype of the model


@dataclass(frozen=True)
class Checked:
    """A cell of a scan beside the independent value of the same σ."""

    row: dict[str, Any]
    sigma: float

    @property
    def error(self) -> float:
        """How far the scan is from it, relatively."""
        return abs(self.row["value"] / self.sigma - 1)

    @property
    def inside(self) -> bool:
        """Whether it lies between the ends of the cell, up to the accuracy of the model itself."""
        return self.row["lower"] * (1 - MODEL_ROUNDING) <= self.sigma <= self.row["upper"] * (1 + MODEL_ROUNDING)


def measured(
    model: OpenModel, lengths: Sequence[int], windows: int, layers: Sequence[int] | None = None, **options: Any
) -> Scan:
    """Blocks and whole layers of a model on Alice in Wonderland."""
    some = None if layers is None else list(layers)
    return scan(
        model,
        lengths=list(lengths),
        windows=windows,
        layers=some,
        what=list(WHAT),
        explain=False,
        bounds="none",
        **options,
    )


def check(model: OpenModel, found: Scan, count: int, seed: int = 0) -> list[Checked]:
    """Some cells, drawn at random, computed anew from the model's own modules with torch.func and ARPACK in float64."""
    drawn = random.Random(seed).sample(found.rows, count)
    return [Checked(row, sigma(model, row, found.settings["windows"])) for row in drawn]


def sigma(model: OpenModel, row: dict[str, Any], count: int) -> float:
    """The largest singular value of one cell, without any code of this project but the cut of the text."""
    windows = model.windows(alice(), row["length"], count, row["seed"])
    layer = list_of_layers(model.model)[row["layer"]]
    module = attention_of(layer) if row["what"] == "attention" else layer
    args, named = heard(model.model, module, model.inputs(windows[row["window"]]))
    x, f = args[0][0].double(), called(copy.deepcopy(layer).double(), row["what"], args, named)
    _, pull = torch.func.vjp(f, x)

    def forward(v: np.ndarray) -> np.ndarray:
        return torch.func.jvp(f, (x,), (torch.from_numpy(v).reshape(x.shape),))[1].detach().flatten().numpy()

    def backward(u: np.ndarray) -> np.ndarray:
        return pull(torch.from_numpy(u).reshape(x.shape))[0].detach().flatten().numpy()

    operator = LinearOperator((x.numel(), x.numel()), matvec=forward, rmatvec=backward, dtype=np.float64)
    start = np.random.default_rng(row["layer"]).standard_normal(x.numel())
    return float(svds(operator, k=1, tol=1e-8, v0=start, return_singular_vectors=False)[0])


def list_of_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of BERT's or Llama's architecture."""
    return model.encoder.layer if hasattr(model, "encoder") else model.layers


def attention_of(layer: nn.Module) -> nn.Module:
    """The module that is called with the tokens of the attention."""
    return layer.attention.self if hasattr(layer, "attention") else layer.self_attn  # type: ignore[union-attr, return-value]


def heard(model: PreTrainedModel, module: nn.Module, inputs: dict[str, Tensor]) -> tuple[tuple[Any, ...], dict]:
    """What a module is called with while the model reads the inputs."""
    calls: list[tuple[tuple[Any, ...], dict]] = []

    def listen(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        rest = dict(named)
        first = args or (rest.pop("hidden_states"),)
        calls.append((first, rest))

    hook = module.register_forward_pre_hook(listen, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**inputs, use_cache=False)
    finally:
        hook.remove()
    return calls[0]


def called(layer: nn.Module, what: str, args: tuple[Any, ...], named: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The block or layer as a function of its tokens, everything else as the model gave it."""
    rest, given = [_double(value) for value in args[1:]], {name: _double(value) for name, value in named.items()}

    def of_tokens(x: Tensor) -> Tensor:
        module = attention_of(layer) if what == "attention" else layer
        out = module(x[None], *rest, **given)
        out = out[0] if isinstance(out, tuple) else out
        if what == "attention" and hasattr(layer, "attention"):  # BERT keeps its output projection elsewhere
            out = layer.attention.output.dense(out)  # type: ignore[union-attr, operator]
        return out[0]

    return of_tokens


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return tuple(map(_double, value)) if isinstance(value, tuple) else value


def exponents(found: Scan) -> list[list[str]]:
    """For every block and layer: the geometric mean at the ends of the lengths, the exponent and the likeliest law."""
    frame, lines = found.to_pandas(), []
    for (layer, what), cells in frame.groupby(["layer", "what"]):
        fit = growth(cells.value, cells.length)
        assert fit.interval is not None
        means = np.exp(np.log(cells.value.astype(float)).groupby(cells.length).mean())
        low, high = fit.interval
        law = fit.verdict or "cannot tell"
        ends = [f"{means.iloc[0]:.4g}", f"{means.iloc[-1]:.4g}"]
        lines.append([str(layer), what, *ends, f"{fit.exponent:.2f}", f"{low:.2f} … {high:.2f}", law])
    return lines


def parts(progress: Callable[[str], None] = lambda text: None) -> list[str]:
    """The page."""
    page = [
        f"Attention blocks (heads and output projection, without residual and normalisation) and whole layers, "
        f"n = {LENGTHS[0]} … {LENGTHS[-1]}, {WINDOWS} windows of Alice in Wonderland for each length, seed 0. The "
        f"second computation of a cell calls the model's own modules in float64, takes their products with a vector "
        f"from `torch.func`, and the largest singular value from ARPACK."
    ]
    for name, layers in LAYERS.items():
        model = open_model(name)
        found = measured(
            model,
            LENGTHS,
            WINDOWS,
            layers,
            progress=lambda now, name=name: progress(f"{name} {now.cells}/{now.total}, {now.label}"),
        )
        progress(f"{name}: {SAMPLED} cells a second time")
        checked = check(model, found, SAMPLED)
        worst, inside = max(one.error for one in checked), sum(one.inside for one in checked)
        page += [
            f"## {name} [{model.precision}]",
            f"{SAMPLED} of {len(found)} cells, drawn at random, computed a second time: largest relative difference "
            f"{worst:.1e}; {inside} of {SAMPLED} between the ends of their cell (the upper end holds with 99 % each).",
            "The exponent α of σ ≈ c·n^α by least squares through all windows, its 95 % interval by bootstrap over "
            "windows, and the law that the data single out among a constant, log n, n^1/4, n^1/2, a free power and a "
            "plateau, if there is one:",
            table(
                ["layer", "what", f"σ, n = {LENGTHS[0]}", f"σ, n = {LENGTHS[-1]}", "α", "95 % interval", "law"],
                exponents(found),
            ),
        ]
    return page
