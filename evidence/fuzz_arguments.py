"""Arguments for random calls: right ones by the name of the parameter, odd and wrong ones for all.

Every value is made anew for every call, by its name, so that a call can be written down and made again.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth import bounds, meanfield, models, rounding
from howsmooth import nn as layers
from howsmooth.jacobians import MatrixOperator
from howsmooth.papers import training
from howsmooth.papers.training.run_files import TrainingResult
from howsmooth.papers.training.text_batches import TextBatch

D, N = 6, 4
NAN_IN = "nan in "


def _x(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _seeded(make: Callable[[], Any]) -> Any:
    """Modules draw their weights from the global random numbers: put them back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


@cache
def _model() -> models.OpenModel:
    return models.open_model("random:bert[layers=1,width=16,heads=2]")


@cache
def _scanned() -> hs.Scan:
    return hs.scan(_model(), lengths=8)


def prepare() -> None:
    """Make what is shared by all calls, once, before the processes part."""
    _scanned()
    hs.measure(make("l2 layer"), _x(N, D))  # what torch loads for derivatives takes seconds, once
    text = "to be or not to be, that is the question\n\n" * 10
    Path("text.txt").write_text(text, encoding="utf-8")
    Path("empty.txt").write_text("", encoding="utf-8")
    Path("folder").mkdir(exist_ok=True)


def _corpus() -> training.Corpus:
    return training.Corpus.split("to be or not to be, that is the question\n\n" * 10)


def _settings() -> training.TrainingSettings:
    return training.TrainingSettings(depth=1, width=4, heads=1, length=4, steps=2, batch_tokens=8)


def _two_measures(shift: float = 0.0) -> meanfield.Measure:
    return meanfield.Measure(_x(3, D, dtype=torch.float64) + shift, [0.2, 0.3, 0.5])


def _result() -> TrainingResult:
    return TrainingResult(_settings(), 2.0, 2.0, 1.0, None, 16, 1.0, 10, "split", "0" * 64)


RIGHT: dict[str, Callable[[], Any]] = {
    "attention": lambda: hs.SelfAttention.random(D, 2),
    "causal attention": lambda: hs.SelfAttention.random(D, 2, mask="causal", dtype=torch.float64),
    "one head": lambda: hs.SelfAttention.from_bilinear(-torch.eye(D), torch.eye(D)),
    "l2 map": lambda: hs.L2SelfAttention(_x(D, D), _x(D, D, seed=1), heads=2),
    "multihead": lambda: _seeded(lambda: nn.MultiheadAttention(D, 2, batch_first=True).eval()),
    "sin": lambda: torch.sin,
    "l2 layer": lambda: _seeded(lambda: layers.L2Attention(D, 2).eval()),
    "contractive": lambda: _seeded(lambda: layers.ContractiveL2Attention(D, 2).eval()),
    "contractive mlp": lambda: _seeded(lambda: layers.ContractiveMLP(D, 8).eval()),
    "linear": lambda: _seeded(lambda: nn.Linear(D, D)),
    "layer norm": lambda: nn.LayerNorm(D),
    "relu": lambda: nn.ReLU(),
    "encoder": lambda: _seeded(lambda: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True).eval()),
    "x": lambda: _x(N, D),
    "x64": lambda: _x(N, D, dtype=torch.float64),
    "batch of x": lambda: _x(2, N, D),
    "square": lambda: _x(D, D),
    "vector": lambda: _x(D),
    "slopes": lambda: torch.tensor([0.5, 0.25]),
    "mask": lambda: torch.ones(N, N, dtype=torch.bool).tril(),
    "ids": lambda: torch.tensor([1, 5, 2]),
    "open model": _model,
    "transformer": lambda: _model().model,
    "window": lambda: _model().windows("to be or not to be", 8, 1, 0)[0],
    "inputs": lambda: {"input_ids": torch.tensor([[4, 5, 6]])},
    "scan": _scanned,
    "group": lambda: __import__("howsmooth.reports", fromlist=["groups"]).groups(_scanned())[0],
    "operator": lambda: MatrixOperator(_x(5, 3)),
    "damage": lambda: torch.rand(3, 2, 2, 2, generator=torch.Generator().manual_seed(0)),
    "formats": lambda: rounding.parse_formats("int8,int4"),
    "bits": lambda: [8.25, 4.25],
    "operators": lambda: [MatrixOperator(_x(5, 3)), MatrixOperator(_x(3, 5))],
    "equal operators": lambda: [MatrixOperator(_x(5, 3)), MatrixOperator(_x(5, 3))],
    "measure": _two_measures,
    "other measure": lambda: _two_measures(0.5),
    "pairs": lambda: [(_two_measures(), _two_measures(0.5))],
    "token set": lambda: hs.sets.Normalised(torch.nn.LayerNorm(D)),
    "setting": lambda: bounds.setting(hs.SelfAttention.random(D, 2), n=N, over=hs.sets.Ball(1.0)),
    "ball": lambda: hs.sets.Ball(1.0, D),
    "corpus": _corpus,
    "settings": _settings,
    "grid": lambda: training.Grid(_settings(), ("l2",), (1,), (0,)),
    "intervals": lambda: training.Intervals(),
    "characters": lambda: _seeded(lambda: training.CharacterModel(_settings(), 5)),
    "batch": lambda: TextBatch(torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)),
    "parts": lambda: [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3])],
    "symbols": lambda: torch.tensor([1, 2, 3, 1, 2, 3, 1, 2]),
    "results": lambda: [_result()],
    "plain settings": lambda: _settings().to_dict(),
    "lengths": lambda: [8, 16, 32, 64],
    "values": lambda: [1.0, 1.4, 2.0, 2.9],
    "numbers": lambda: [4, 6],
    "radii": lambda: [1.0, 2.0],
    "nothing": lambda: None,
    "three": lambda: 3,
    "six": lambda: D,
    "two": lambda: 2,
    "one": lambda: 1,
    "half": lambda: 0.5,
    "0.9": lambda: 0.9,
    "one and a half": lambda: 1.5,
    "0.01": lambda: 0.01,
    "yes": lambda: True,
    "no": lambda: False,
    "bytes": lambda: 2**20,
    "text": lambda: "to be or not to be",
    "alphabet": lambda: " benort",
    "causal": lambda: "causal",
    "fixed": lambda: "fixed",
    "l2": lambda: "l2",
    "head": lambda: "head",
    "bound": lambda: "howsmooth.sqrt_n",
    "spec": lambda: "random:bert[layers=1,width=16,heads=2]",
    "file": lambda: Path("text.txt"),
    "folder": lambda: Path("folder"),
    "new file": lambda: Path("new.out"),
    "count calls": lambda: lambda *seen: None,
}

ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "empty text": lambda: "",
    "'x'": lambda: "x",
    "'2'": lambda: "2",
    "long text": lambda: "x" * 300,
    "bytes b'x'": lambda: b"x",
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1": lambda: 1,
    "7": lambda: 7,
    "0.5": lambda: 0.5,
    "-0.5": lambda: -0.5,
    "1e-300": lambda: 1e-300,
    "1e308": lambda: 1e308,
    "10**24": lambda: 10**24,
    "-10**24": lambda: -(10**24),
    "10**400": lambda: 10**400,
    "2**64": lambda: 2**64,
    "1+2j": lambda: 1 + 2j,
    "[]": list,
    "()": lambda: (),
    "{}": dict,
    "[1, 2]": lambda: [1, 2],
    "[nan]": lambda: [math.nan],
    "['x', None]": lambda: ["x", None],
    "{'a': 1}": lambda: {"a": 1},
    "object": lambda: object(),
    "a class": lambda: int,
    "identity": lambda: lambda x: x,
    "sum": lambda: lambda x: x.sum(),
    "sqrt of 0·x": lambda: lambda x: (x * 0).sqrt(),
    "nan function": lambda: lambda x: x * math.nan,
    "raises": lambda: _raises,
    "no arguments": lambda: lambda: 0,
    "returns text": lambda: lambda x: "x",
    "numpy": lambda: np.ones((N, D)),
    "numpy number": lambda: np.float32(2.0),
    "no dimensions": lambda: torch.tensor(1.0),
    "empty tensor": lambda: torch.zeros(0, D),
    "one token": lambda: _x(1, D),
    "flat tensor": lambda: _x(N * D),
    "wrong width": lambda: _x(N, D + 1),
    "four dimensions": lambda: _x(1, 2, N, D),
    "five dimensions": lambda: _x(1, 1, 2, N, D),
    "integers": lambda: torch.ones(N, D, dtype=torch.int64),
    "booleans": lambda: torch.ones(N, D, dtype=torch.bool),
    "float16": lambda: _x(N, D, dtype=torch.float16),
    "bfloat16": lambda: _x(N, D, dtype=torch.bfloat16),
    "float8": lambda: _x(N, D).to(torch.float8_e4m3fn),
    "complex": lambda: torch.ones(N, D, dtype=torch.complex64),
    "sparse": lambda: torch.eye(N, D).to_sparse(),
    "meta": lambda: torch.ones(N, D, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([_x(2, D), _x(3, D)], layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(_x(N, D), 0.1, 0, torch.qint8),
    "needs gradient": lambda: _x(N, D).requires_grad_(),
    "nan tensor": lambda: _x(N, D).index_fill(0, torch.tensor([1]), math.nan),
    "infinite tensor": lambda: _x(N, D) * math.inf,
    "huge tensor": lambda: _x(N, D) * 1e30,
    "tiny tensor": lambda: _x(N, D, dtype=torch.float64) * 1e-200,
    "zeros": lambda: torch.zeros(N, D),
    "transposed": lambda: _x(D, N).T,
    "list of tensors": lambda: [_x(N, D), "x"],
    "empty model": lambda: nn.Sequential(),
    "lazy": lambda: nn.LazyLinear(3),
    "dropout": lambda: nn.Dropout(0.5),
    "batch norm": lambda: nn.BatchNorm1d(N),
    "missing file": lambda: Path("missing.file"),
    "this folder": lambda: Path("."),
    "empty file": lambda: Path("empty.txt"),
    "nul in a path": lambda: "a\0b",
    "no such folder": lambda: "no/such/folder/file",
    "dtype": lambda: torch.float32,
}
HUGE = {"10**24", "10**400", "2**64", "1e308", "inf"}

_MAPS = ["attention", "causal attention", "one head", "l2 map", "multihead"]
_SIZES = ["three", "two", "one"]
BY_NAME: dict[str, list[str]] = {
    "damage": ["damage"],
    "formats": ["formats"],
    "bits": ["bits"],
    "budget": ["six"],
    "f": [*_MAPS, "sin", "encoder", "l2 layer"],
    "attention": _MAPS,
    "x": ["x", "x64", "batch of x"],
    "around": ["x64"],
    "start": ["x64"],
    "norm": ["two"],
    "k": ["one", "two"],
    "seed": _SIZES,
    "memory": ["bytes"],
    "head": ["one"],
    "n": ["three"],
    "radius": ["one and a half", "one"],
    "eps": ["0.01"],
    "over": ["ball", "token set", "layer norm"],
    "where": ["setting"],
    "name": ["bound"],
    "op": ["operator"],
    "matrix": ["square"],
    "query": ["square"],
    "key": ["square"],
    "value": ["square"],
    "output": ["square"],
    "a": ["square"],
    "v": ["square"],
    "bias": ["mask"],
    "keep": ["mask"],
    "mask": ["causal", "mask"],
    "slopes": ["slopes"],
    "table": ["square"],
    "frequencies": ["slopes"],
    "gain": ["vector"],
    "shift": ["vector"],
    "direction": ["vector"],
    "context": ["square"],
    "weights": ["square"],
    "atoms": ["x64"],
    "points": ["x64"],
    "measure": ["measure"],
    "mu": ["measure"],
    "nu": ["other measure"],
    "pairs": ["pairs"],
    "p": ["two", "one"],
    "gamma": ["one"],
    "heavy": ["half"],
    "confidence": ["0.9"],
    "rtol": ["0.01"],
    "coefficient": ["0.9"],
    "heads": ["two"],
    "num_heads": ["two"],
    "embed_dim": ["six"],
    "width": ["six"],
    "hidden": ["six"],
    "dim": ["six"],
    "window": _SIZES,
    "norm_": ["layer norm"],
    "module": ["multihead"],
    "model": ["encoder"],
    "parts": ["parts"],
    "spec": ["spec"],
    "open_model": ["open model"],
    "path": ["new file"],
    "folder": ["folder"],
    "text": ["text"],
    "alphabet": ["alphabet"],
    "inputs": ["inputs"],
    "what": ["head"],
    "layer": ["nothing"],
    "source": ["scan"],
    "group": ["group"],
    "store": ["nothing"],
    "values": ["values"],
    "lengths": ["lengths"],
    "radii": ["radii"],
    "corpus": ["corpus"],
    "settings": ["settings"],
    "base": ["settings"],
    "grid": ["grid"],
    "intervals": ["intervals"],
    "batch": ["batch"],
    "results": ["results"],
    "kind": ["l2"],
    "content": ["plain settings"],
    "progress": ["count calls"],
    "train": ["text"],
    "valid": ["text"],
    "how": ["text"],
    "length": ["two"],
    "batch_tokens": ["two"],
    "steps": ["two"],
    "starts": ["one"],
    "resamples": ["three"],
    "symbols": ["symbols"],
    "step": ["half"],
    "cap": ["one"],
    "temperature": ["one"],
    "factor": ["half"],
    "depth": ["one"],
    "influence": ["no"],
    "windows": ["one"],
    "jobs": ["one"],
    "timeout": ["two"],
}
"""Names of right values for a parameter of that name."""
SPECIAL: dict[str, list[str]] = {
    "attention.ALiBi.standard.heads": ["two"],
    "attention.GradientStepAttention.step": ["half"],
    "bounds.measured_variances.model": ["encoder"],
    "bounds.stack.model": ["encoder"],
    "meanfield.Measure.weights": ["nothing"],
    "models.capture.model": ["transformer"],
    "models.attention_inputs.model": ["transformer"],
    "models.attention_inputs.text": ["ids"],
    "models.site.module": ["encoder"],
    "models.target.window": ["window"],
    "attention.SelfAttention.from_transformers.model": ["transformer"],
    "attention.SelfAttention.from_transformers.layer": ["one"],
    "attention.SelfAttention.from_torch.module": ["multihead"],
    "nn.InvertibleResidual.f": ["contractive", "contractive mlp"],
    "nn.ScaledBranch.f": ["linear", "l2 layer"],
    "nn.ContractiveL2Attention.norm": ["nothing"],
    "nn.replace_attention.kind": ["l2"],
    "nn.softmax_jacobian_penalty.weights": ["square"],
    "nn.SpectralCaps.module": ["l2 layer"],
    "scans.scan.model": ["open model"],
    "scans.scan.lengths": ["numbers"],
    "papers.TrainingSettings.lengths": ["fixed"],
    "papers.TrainingSettings.attention": ["l2"],
    "papers.CharacterModel.symbols": ["three"],
    "papers.Corpus.read.path": ["file"],
    "search.sandwich.lengths": ["numbers"],
    "search.worst_measure.atoms": ["two"],
    "sets.Normalised.norm": ["layer norm"],
    "sets.Tokens.matrix": ["square"],
}
"""The same for one parameter of one function."""
ALWAYS = {"steps", "starts", "resamples", "lengths", "windows", "what"}
"""Given in every call that takes them: their defaults are for work, not for a thousand calls."""
LASTING = {"steps", "max_steps", "resamples", "starts", "depth", "seconds", "every", "windows", "probes", "jobs"}
"""How long to work: a huge value is a wish, not a mistake."""


def make(name: str) -> Any:
    """The value of that name; ``nan in`` a right one is the same with one number replaced."""
    if name.startswith(NAN_IN):
        return _with_nan(make(name.removeprefix(NAN_IN)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it will give up, such as quantised tensors
        return (RIGHT.get(name) or ODD[name])()


def _with_nan(value: Any) -> Any:
    """The value with NaN for its first number, or for the first weight of a module, or NaN where there is none."""
    if isinstance(value, nn.Module):
        value = copy.deepcopy(value)
        for tensor in (*value.parameters(), *value.buffers()):
            if tensor.is_floating_point():
                tensor.data.view(-1)[:1] = math.nan
                return value
    if isinstance(value, Tensor) and value.is_floating_point():
        value.view(-1)[0] = math.nan
        return value
    return [math.nan, *value[1:]] if isinstance(value, list) else math.nan


def _raises(x: Tensor) -> Tensor:
    raise KeyError("inside")
