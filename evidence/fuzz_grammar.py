"""The words of random command lines: for every option mostly values that make sense, and some that do not."""

from __future__ import annotations

import random
from collections.abc import Sequence

from evidence.fuzz_inputs import CONFIGURATIONS, HOSTILE

ODD = (
    *("", " ", "\n", "0", "-1", "nan", "inf", "-inf", "1e999", "99999999999999999999", "9" * 5000, "a" * 300, "x"),
    *(
        "1,2",
        "[",
        "]",
        "[[",
        "$x",
        "None",
        "true",
        "½",
        "１２",
        "1_000",
        " 5 ",
        "0x10",
        "1e3",
        "\udcff",
        "=1",
        "-",
        "--",
    ),
    *("-", "--", ".", "..", "/", "/dev/null", "~", "../x", "inputs", "inputs/empty", "inputs/words.txt", "inputs/none"),
    HOSTILE,
)
"""Odd for every option."""
SOURCES = (
    *("random", "random", "random"),
    *("inputs/weights.safetensors", "inputs/weights.pt", "inputs/model", "inputs/model", "inputs/tokens.npy"),
)
ODD_SOURCES = (
    *("random[width=8]", "random[", "random:none"),
    *("inputs/nan.safetensors", "inputs/shapes.safetensors", "inputs/cut.safetensors", "inputs/garbage.safetensors"),
    *("inputs/garbage.gguf", "inputs/empty", "inputs", "org/name", "none/such.safetensors", "inputs/config.json"),
    f"inputs/{HOSTILE}",
)
MODELS = (
    *("inputs/model", "inputs/model", "random:gpt2[layers=1,width=16,heads=2]", "random:bert[layers=1,width=16]"),
    *("random:llama[layers=2,width=16,heads=2]", "random:vit[layers=1,width=16]", "random:wav2vec2[layers=1,width=16]"),
)
ODD_MODELS = (
    *ODD_SOURCES,
    "random:bert[layers=0]",
    "random:bert[width=1]",
    "random:",
    "random:bert[seed=x]",
    "nomodel",
)
TEXTS = ("inputs/words.txt", "inputs/words.txt", "inputs/play.txt", "inputs/link.txt")
ODD_TEXTS = (
    *("inputs/empty.txt", "inputs/short.txt", "inputs/latin.txt", "inputs/nul.txt", "inputs/hostile.txt"),
    *("inputs/=cmd().txt", f"inputs/{HOSTILE}.txt", "inputs/dangling.txt", "inputs/damaged.wav", "inputs/damaged.png"),
    *("inputs/store.sqlite", "inputs/empty"),
)
STORES = ("inputs/store.sqlite", "inputs/store.sqlite", "inputs/hostile.sqlite")
ODD_STORES = (
    *("inputs/cut.sqlite", "inputs/text.sqlite", "inputs/empty.sqlite", "inputs/damaged.sqlite", "inputs/page.html"),
    *("inputs/other.sqlite", "inputs/none.sqlite", "inputs/words.txt"),
)
TOKENS = ("inputs/tokens.npy", "inputs/tokens.safetensors", "inputs/batch.npy")
ODD_TOKENS = ("inputs/wide.npy", "inputs/words.npy", "inputs/flat.npy", "inputs/garbage.safetensors")
PICTURES = ("out/p.png", "out/p.svg", "out/p.pdf")

Values = tuple[Sequence[str], Sequence[str]]
"""Values that make sense, and odd ones beside those that are odd for every option."""
FLAG: Values = ((), ())


def _some(*values: object) -> Values:
    return [str(value) for value in values], ()


_DEVICE: Values = (["cpu"], ["cuda", "cuda:7", "meta", "nowhere", "cpu:99", "mps"])
_WEIGHTS: dict[str, Values] = {
    "--device": _DEVICE,
    "--dtype": (["auto", "float32", "float64", "bfloat16", "float16"], ["float8", "int8"]),
}
_ATTENTION: dict[str, Values] = {
    "--device": _DEVICE,
    "--attention": _some("dot", "l2", "cosine", "sigmoid"),
    "--width": _some(8, 16),
    "--heads": _some(1, 2, 4),
    "--kv-heads": _some(1, 2),
    "--like": _some("gpt5"),
    "--length": (["1", "3", "8", "16"], ["99999999999999", "4,8"]),
    "--causal": FLAG,
    "--window": _some(1, 3),
    "--rope": FLAG,
    "--rope-base": (["100", "10000.0"], ["-1"]),
    "--alibi": FLAG,
    "--softcap": (["5", "30"], ["nan"]),
    "--qk-norm": _some("rms", "l2"),
    "--scale": _some(0.1, 1),
    "--dtype": _some("float32", "float64", "bfloat16"),
    "--prefix": _some("attn.", "attn"),
    "--layer": _some(0, 1, 2),
    "--text": (TEXTS, ODD_TEXTS),
    "--input": (TOKENS, ODD_TOKENS),
    "--input-name": _some("x"),
    "--seed": _some(0, 1, 12345),
    "--threads": _some(1, 2),
    "--json": FLAG,
    "--debug": FLAG,
}
_SETS = ["ball:1", "ball:2.5", "sphere:1", "norm", "norm:ln_1", "rms:ln_1.", "around:0.01", "around:1%", "together:0.5"]
_ROUNDING: dict[str, Values] = _WEIGHTS | {
    "--text": (TEXTS, ODD_TEXTS),
    "--formats": _some("int8", "int8,int4", "int4[per=channel]", "fp8_e4m3,bf16", "nvfp4,int2[group=4]"),
    "--budget": _some(4.5, 6),
    "--per": _some("model", "layer", "part", "head"),
    "--seed": _some(0, 1),
    "--out": (["out/q.json"], ["inputs/words.txt", "inputs/store.sqlite", "inputs/empty", "out"]),
    "--no-resume": FLAG,
    "--for": _some("vllm", "modelopt", "llama.cpp", "json"),
    "--export": (["out/e.json"], ["inputs/words.txt", "none/e.json"]),
    "--figure": (PICTURES, ["out/p.bmp", "none/p.png"]),
    "--json": FLAG,
    "--threads": _some(1),
    "--debug": FLAG,
}
OPTIONS: dict[str, dict[str, Values]] = {
    "measure": _ATTENTION
    | {
        "--witness": (["inputs/witness.safetensors"], ["inputs/witness-cut.safetensors", "inputs/weights.safetensors"]),
        "--what": _some("attention", "heads", "attention,head"),
        "--norm": _some("2", "inf", "1", "fro", "token"),
        "-k": _some(1, 3),
        "--rtol": _some(1e-2, 1e-4),
        "--confidence": _some(0.9, 0.999),
        "--memory": _some("1MB", "2GiB"),
        "--explain": FLAG,
        "--figure": (PICTURES, ["out/p.bmp", "none/p.png", "out"]),
    },
    "bounds": _ATTENTION
    | {
        "--length": _some("4", "4,8", "inf"),
        "--over": _some("point", *_SETS),
        "--per-head": FLAG,
        "--refused": FLAG,
        "--figure": (PICTURES, ["out/p.bmp", "none/p.png"]),
        "--latex": FLAG,
    },
    "worst-case": _ATTENTION
    | {
        "--head": _some(0, 1),
        "--length": _some("2", "2,4"),
        "--over": _some("ball:1,2", "around:1%,5%", *_SETS),
        "--around": (TEXTS, ODD_TEXTS),
        "--norm": _some("2", "inf"),
        "--seconds": _some(0.5, 1),
        "--jobs": (["1"], ["0", "1.5"]),
        "--out": (["out/w"], ["inputs/words.txt"]),
    },
    "scan": _WEIGHTS
    | {
        "--text": (TEXTS, ODD_TEXTS),
        "--length": _some("8", "8,12", "4,8,…,16"),
        "--windows": _some(1, 2),
        "--layers": _some("0", "0-1"),
        "--what": _some("head", "attention", "head[heads=0]", "layer", "mlp", "model"),
        "--out": (["out/s.sqlite", "inputs/store.sqlite"], [*ODD_STORES, ":memory:", "file:x?mode=memory", "out"]),
        "--rtol": _some(1e-2, 1e-3),
        "--confidence": _some(0.9, 0.99),
        "--seed": _some(0, 3),
        "--bounds": _some("none", "proved", "cheap"),
        "--no-explain": FLAG,
        "--reference": _some("random"),
        "--config": (
            ["inputs/right.toml", *(f"inputs/wrong{number}.toml" for number in range(CONFIGURATIONS))],
            ["inputs/nested.toml", "inputs/broken.toml", "inputs/latin.txt"],
        ),
        "--no-resume": FLAG,
        "--jobs": (["1"], ["0", "1.5"]),
        "--shard": _some("1/2", "2/2", "slurm"),
        "--plan": FLAG,
        "--timeout": _some(5),
        "--export": (["out/e.csv", "out/e.json", "out/e.parquet"], ["inputs/words.txt", "out/e.xls", "out/s.sqlite"]),
        "--json": FLAG,
        "--threads": _some(1, 2),
        "--debug": FLAG,
    },
    "report": {
        "--out": (["out/r.html"], ["out/r.pdf", "none/r.html", "inputs/page.html"]),
        "--figures": (["out/f"], ["inputs/words.txt"]),
        "--format": _some("png", "svg,pdf"),
        "--summary": FLAG,
        "--docs": _some("https://example.org", "javascript:alert(1)"),
        "--json": FLAG,
        "--debug": FLAG,
    },
    "train": {
        "--device": _DEVICE,
        "--attention": _some("dot-product", "l2", "contractive-2", "sigmoid", "cosine"),
        "--depth": _some(1, 2),
        "--seed": _some(0, 1),
        "--heads": _some(1, 2),
        "--blocks": _some("pre-norm", "post-norm", "contractive"),
        "--coefficient": _some(0.5, 0.9),
        "--window": _some(2, 4),
        "--pieces": _some("fixed", "chunks", "curriculum"),
        "--cycles": _some(1, 2),
        "--rate": _some(1e-3, 1e30),
        "--schedule": _some("cosine", "fixed"),
        "--warmup": _some(0, 1),
        "--weight-decay": _some(0, 0.1),
        "--clip": _some(0, 1),
        "--dropout": _some(0, 0.1),
        "--out": (["out/t", "inputs/run"], ["inputs/words.txt", "inputs/empty"]),
        "--resume": FLAG,
        "--save-every": _some(1, 5),
        "--report-every": _some(1, 2),
        "--jobs": (["1"], ["0", "1.5"]),
        "--json": FLAG,
        "--threads": _some(1),
        "--debug": FLAG,
    },
    "models": {"--json": FLAG},
    "merge": {
        "--out": (["out/m.sqlite"], ["inputs/store.sqlite", "none/m.sqlite"]),
        "--partial": FLAG,
        "--json": FLAG,
        "--debug": FLAG,
    },
    "certify": _ATTENTION
    | {
        "--what": _some("attention", "heads", "attention,head"),
        "--over": _some("point", "around:0.01", "around:1%", "together:1"),
        "--images": (["inputs/images.safetensors"], ["inputs/weights.safetensors", "inputs/tokens.npy"]),
        "--count": _some(1, 2),
        "--distance": _some("2", "1", "inf"),
        "--no-attack": FLAG,
        "--out": (["out/radii.sqlite"], ["inputs/store.sqlite", "inputs/words.txt"]),
        "--no-resume": FLAG,
        "--report": (["out/proved.html"], ["inputs/tokens.npy", "none/proved.html"]),
    },
    "compare": _WEIGHTS
    | {
        "--text": (TEXTS, ODD_TEXTS),
        "--length": _some("8", "8,12"),
        "--windows": _some(1, 2),
        "--what": _some("head", "attention", "layer"),
        "--seed": _some(0, 1),
        "--limit": _some(1, 2),
        "--report": (["out/c.html"], ["out/c.pdf", "inputs/page.html", "none/c.html"]),
        "--figure": (PICTURES, ["out/p.bmp", "none/p.png"]),
        "--json": FLAG,
        "--threads": _some(1),
        "--debug": FLAG,
    },
    "quantise": _ROUNDING,
    "quantize": _ROUNDING,
    "noise": {
        "--device": _DEVICE,
        "--precision": _some("bf16", "fp16"),
        "--text": (TEXTS, ODD_TEXTS),
        "--seed": _some(0, 1),
        "--json": FLAG,
        "--threads": _some(1),
        "--debug": FLAG,
    },
    "reproduce": {
        "--model": _some("inputs/model"),
        "--text": (TEXTS, ODD_TEXTS),
        "--no-resume": FLAG,
        "--full": FLAG,
        "--yes": FLAG,
        "--jobs": (["1"], ["0", "1.5"]),
        "--json": FLAG,
        "--threads": _some(1),
        "--debug": FLAG,
    },
    "demo": {
        "--device": _DEVICE,
        "--out": (["out/d"], ["inputs/words.txt"]),
        "--no-resume": FLAG,
        "--json": FLAG,
        "--threads": _some(1),
    },
}
_POSITIONALS: dict[str, Values] = {
    "measure": (SOURCES, ODD_SOURCES),
    "bounds": (SOURCES, ODD_SOURCES),
    "worst-case": (SOURCES, ODD_SOURCES),
    "scan": (MODELS, ODD_MODELS),
    "report": (STORES, ODD_STORES),
    "merge": (STORES, ODD_STORES),
    "train": (TEXTS, ODD_TEXTS),
    "compare": ((*STORES, "inputs/model"), (*ODD_STORES, *ODD_MODELS)),
    "certify": (("inputs/network.safetensors", *SOURCES), ODD_SOURCES),
    "quantise": (MODELS, ODD_MODELS),
    "quantize": (MODELS, ODD_MODELS),
    "noise": (MODELS, ODD_MODELS),
    "reproduce": (("not-lipschitz",), ("lip-infinty", "inputs/model")),
}
_ALWAYS = {  # so that no command takes long
    "worst-case": ("--starts", "2", "--steps", "3", "--length", "3"),
    "train": ("--width", "8", "--length", "8", "--batch-tokens", "32", "--steps", "4"),
    "demo": ("--models", "minilm", "--length", "8"),
    "quantise": ("--length", "8", "--windows", "1", "--samples", "2"),
    "quantize": ("--length", "8", "--windows", "1", "--samples", "2"),
    "noise": ("--length", "8"),
    "reproduce": ("--quick",),
}
_SHARES = {
    "measure": 24,
    "bounds": 14,
    "worst-case": 12,
    "scan": 22,
    "report": 13,
    "train": 11,
    "models": 1,
    "merge": 3,
    "demo": 1,
    "certify": 14,
    "compare": 6,
    "quantise": 9,
    "quantize": 2,
    "noise": 4,
    "reproduce": 3,
}
"""How often each command is drawn."""
_TO_WRITE = ("--out", "--report", "--figure", "--figures", "--export")
_OF_THE_MACHINE = ("/", "..")
"""Folders that a command told to write there, by who may, does write to."""
_READ = ("--text", "--around", "--input", "--config", "--witness", "--images")


def draw_command(draw: random.Random) -> tuple[tuple[str, ...], frozenset[str]]:
    """A command line, and the paths it says may be written."""
    if draw.random() < 0.02:
        words = [*ODD, "--help", "--version", "masure"]
        return tuple(draw.choice(words) for _ in range(draw.randint(0, 3))), frozenset()
    (command,) = draw.choices(list(_SHARES), list(_SHARES.values()))
    odd = draw.random() < 0.5  # half of all command lines make sense in every word
    args, written, read = [command], set[str](), set[str]()
    if command in _POSITIONALS and draw.random() < 0.97:
        value = _value(draw, _POSITIONALS[command], odd)
        args.append(value)
        read.add(value)
    if command == "compare":
        args.append(_value(draw, _POSITIONALS[command], odd))
        read.add(args[-1])
    args += _ALWAYS.get(command, ())
    known = OPTIONS[command]
    if not odd and command in ("measure", "bounds", "worst-case", "certify") and len(args) > 1:
        known = {name: values for name, values in known.items() if name not in _foreign(args[1])}
    if args[1:2] == ["inputs/network.safetensors"]:
        args += ["--images", "inputs/images.safetensors"]
        known = {name: values for name, values in known.items() if name != "--images"}
    for name in draw.sample(list(known), min(len(known), draw.choice([0, 1, 1, 2, 2, 3, 4, 6]))):
        args.append(name)
        if known[name] != FLAG:
            value = _value(draw, known[name], odd)
            args.append("out" if name in _TO_WRITE and value in _OF_THE_MACHINE else value)
            (written if name in _TO_WRITE else read if name in _READ else set()).add(args[-1])
    if command == "scan" and "--config" not in args and draw.random() < 0.3:
        args += ["--config", _value(draw, known["--config"], odd)]
    if odd and draw.random() < 0.05:
        args.append(draw.choice(["--help", "--none", "extra", "-x", *ODD]))
    if odd and draw.random() < 0.05:
        draw.shuffle(args)
    return tuple(args), frozenset(path for path in written - read if path)


def _foreign(source: str) -> set[str]:
    """Options that do not go with a source."""
    of_random = {
        "--width",
        "--like",
        "--window",
        "--causal",
        "--rope",
        "--rope-base",
        "--alibi",
        "--qk-norm",
        "--kv-heads",
    }
    of_models, of_files = {"--layer", "--text", "--around"}, {"--prefix", "--input", "--input-name"}
    of_images = {"--images", "--count"}
    if source == "inputs/network.safetensors":
        return (
            of_random
            | of_files
            | of_models
            | {"--length", "--scale", "--softcap", "--dtype", "--what", "--over", "--attention"}
        )
    if source.startswith("random"):
        return of_models | of_files | of_images | {"--witness"}
    if source == "inputs/model":
        return of_random | of_files | of_images | {"--heads", "--scale", "--softcap", "--witness", "--attention"}
    return of_models | of_images | {"--width", "--like", "--witness", "--kv-heads", "--dtype"}


def _value(draw: random.Random, values: Values, odd: bool) -> str:
    usual, strange = values
    if odd and draw.random() < 0.4:
        return draw.choice([*strange, *strange, *ODD] if draw.random() < 0.6 or not strange else strange)
    return draw.choice(usual)
