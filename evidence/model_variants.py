"""Models as they are met outside: padded, in half precision, with adapters, compiled, with an encoder and a decoder.

Each is a small random model of transformers. What the package measures at a part of it is held against a float64
singular value decomposition of autograd through the very same module, called as the model calls it.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import howsmooth as hs
from evidence.tables import table
from howsmooth.errors import HowsmoothError
from howsmooth.models import Targets, Window, capture, capture_cross
from howsmooth.models.in_memory import model_in_memory

TITLE = "Are padded, rounded, adapted and compiled models measured right?"
WORDS, LENGTH = 97, 6
ROUNDING = 1e-5
"""By which the models themselves, which take softmax in float32 also in double precision, may miss."""
_TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_TEXT |= {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
_BOTH = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16}
_BOTH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": WORDS, "pad_token_id": 0}
_T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
SELF: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("output.dense", _TEXT),
    "Llama": ("o_proj", {**_TEXT, "num_key_value_heads": 2}),
    "Mistral": ("o_proj", {**_TEXT, "num_key_value_heads": 2, "sliding_window": 3}),
    "GPT2": (
        "c_proj",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "T5": ("o", _T5),
}
"""Class → where the attention block has its output projection, and the configuration."""
CROSS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bart": ("out_proj", {**_BOTH, "max_position_embeddings": 64}),
    "Marian": ("out_proj", {**_BOTH, "max_position_embeddings": 64, "decoder_start_token_id": 0}),
    "MT5": ("o", {**_T5, "decoder_start_token_id": 0}),
    "T5": ("o", {**_T5, "decoder_start_token_id": 0}),
    "Whisper": ("out_proj", {**_BOTH, "max_source_positions": LENGTH, "decoder_start_token_id": 1}),
}
MASKS = {
    "right": [1, 1, 1, 1, 0, 0],
    "left": [0, 0, 1, 1, 1, 1],
    "with a hole": [1, 1, 0, 1, 1, 1],
    "all but one": [0, 0, 0, 0, 0, 1],
    "everything": [0, 0, 0, 0, 0, 0],
}


@dataclass(frozen=True)
class Case:
    """One measurement and its oracle: the ends that were found, and the exact norm."""

    name: str
    lower: float
    upper: float
    exact: float

    @property
    def right(self) -> bool:
        """Whether the norm lies between the ends."""
        return self.lower * (1 - ROUNDING) <= self.exact <= self.upper * (1 + ROUNDING)


def build(kind: str, config: dict[str, Any], suffix: str = "Model", seed: int = 1) -> Any:
    """A model whose parameters are all drawn, norms and biases too."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}{suffix}")(getattr(transformers, f"{kind}Config")(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    return model


def own_norm(
    model: Any, path: str, output: str, inputs: dict[str, Tensor], keep: Tensor | None = None, moved: str = "queries"
) -> float:
    """‖J‖ of a block of the model, by autograd in float64: its real tokens vary, and all else is as in the run.

    Args:
        output: how the name of the projection ends whose answer counts; empty for the module's own.
        keep: which tokens are real; None for all.
        moved: "queries", the block's own tokens, or "keys", those of the encoder that cross-attention reads.
    """
    heard: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    block = model.get_submodule(path)
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: heard.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    exact = copy.deepcopy(block).double()
    projections = [module for name, module in exact.named_modules() if output and name.endswith(output)]
    names = [name for name in heard[0][1] if not name.startswith(("past", "layer_past"))]
    arguments = [_double(value) for value in (*heard[0][0], *(heard[0][1][name] for name in names))]
    labels = [*range(len(heard[0][0])), *names]
    tensors = [place for place, value in enumerate(arguments) if isinstance(value, Tensor) and value.dim() == 3]
    place = tensors[moved == "keys"]
    x = arguments[place][0]
    real = torch.ones(len(x), dtype=torch.bool) if keep is None else keep

    def function(tokens: Tensor) -> Tensor:
        given = list(arguments)
        given[place] = x.index_put((real.nonzero().flatten(),), tokens)[None]
        answers: list[Tensor] = []
        hooks = [p.register_forward_hook(lambda _, args, out: answers.append(out)) for p in projections[-1:]]
        pairs = list(zip(labels, given, strict=True))
        result = exact(*(v for k, v in pairs if isinstance(k, int)), **{k: v for k, v in pairs if isinstance(k, str)})
        for each in hooks:
            each.remove()
        answer = answers[0] if projections else result if isinstance(result, Tensor) else result[0]
        return answer[0][real] if moved == "queries" else answer[0]

    matrix = torch.autograd.functional.jacobian(function, x[real])
    return float(torch.linalg.svdvals(matrix.reshape(-1, int(real.sum()) * x.shape[-1]))[0])


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return tuple(map(_double, value)) if isinstance(value, tuple) else value


def ids(seed: int = 3) -> Tensor:
    """Token ids, none of them padding."""
    return torch.randint(3, WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(seed))


def padded(kind: str, mask: str) -> Iterator[Case]:
    """Every attention block of a model of text that reads padding too."""
    output, config = SELF[kind]
    model = build(kind, config, "EncoderModel" if kind == "T5" else "Model")
    inputs = {"input_ids": ids(), "attention_mask": torch.tensor([MASKS[mask]])}
    keep = inputs["attention_mask"][0].bool()
    for site in capture(model, inputs):
        found = hs.measure(site.attention, site.x)
        yield _case(f"{kind} {site.name}", found, own_norm(model, site.name, output, inputs, keep))


def two_texts(kind: str, which: str = "", mask: str = "right") -> Iterator[Case]:
    """Every attention block of an encoder and a decoder, and each side of those between them; ``which`` is padded."""
    output, config = CROSS[kind]
    model = build(kind, config)
    inputs: dict[str, Tensor] = {"input_ids": ids(), "decoder_input_ids": ids(4)}
    if kind == "Whisper":
        inputs["input_features"] = torch.randn(1, 80, 2 * LENGTH, generator=torch.Generator().manual_seed(0))
        del inputs["input_ids"]
    inputs |= {which: torch.tensor([MASKS[mask]])} if which else {}
    if kind in ("Bart", "Marian", "MT5"):
        for site in capture(model, inputs):
            of_this = which == ("decoder_attention_mask" if site.name.startswith("decoder") else "attention_mask")
            keep = torch.tensor(MASKS[mask]).bool() if of_this else None
            found = hs.measure(site.attention, site.x)
            yield _case(f"{kind} {site.name}", found, own_norm(model, site.name, output, inputs, keep))
    for cross in capture_cross(model, inputs):
        decoder = hs.measure(cross.attention.in_decoder(cross.encoder), cross.decoder)
        yield _case(f"{kind} {cross.name}, decoder", decoder, own_norm(model, cross.name, output, inputs))
        encoder = hs.measure(cross.attention.in_encoder(cross.decoder), cross.encoder)
        exact = own_norm(model, cross.name, output, inputs, moved="keys")
        yield _case(f"{kind} {cross.name}, encoder", encoder, exact)


def media(kind: str) -> Iterator[Case]:
    """Every attention block of a model that reads images or sounds."""
    generator = torch.Generator().manual_seed(0)
    if kind == "ViT":
        sizes = {key: _TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        model = build(kind, {**sizes, "intermediate_size": 24, "image_size": 8, "patch_size": 4})
        inputs, output = {"pixel_values": torch.randn(1, 3, 8, 8, generator=generator)}, "o_proj"
    else:
        model = build(kind, CROSS[kind][1]).get_encoder()
        inputs, output = {"input_features": torch.randn(1, 80, 2 * LENGTH, generator=generator)}, CROSS[kind][0]
    for site in capture(model, inputs):
        found = hs.measure(site.attention, site.x)
        yield _case(f"{kind} {site.name}", found, own_norm(model, site.name, output, inputs))


def changed(kind: str, change: Callable[[Any], Any]) -> Iterator[Case]:
    """Attention and a layer of a model that somebody has changed, as a scan has them; the oracle runs that model."""
    config = {**SELF[kind][1], "vocab_size": 300}
    model = change(build(kind, config, "LMHeadModel" if kind == "GPT2" else "ForCausalLM"))
    opened = model_in_memory(model)
    window = Window(ids(), [], 0)
    targets = Targets(opened, window, mlps=False)
    running = copy.deepcopy(model) if hasattr(model, "merge_adapter") else model
    running = getattr(running, "_orig_mod", running).double()
    layers = "h" if kind == "GPT2" else "layers"
    path = next(name for name, part in running.named_modules() if name.endswith(f".{layers}") and len(list(part)) == 2)
    for what, inner, output in (
        ("attention", "attn" if kind == "GPT2" else "self_attn", SELF[kind][0]),
        ("layer", "", ""),
    ):
        f, x = targets.get(what, 1)
        module = f"{path}.1.{inner}".rstrip(".")
        exact = own_norm(running, module, output, {"input_ids": ids()})
        yield _case(f"{kind} {what}", hs.measure(f, x), exact)


def _case(name: str, found: hs.Measurement, exact: float) -> Case:
    return Case(name, float(found.lower), float(found.upper), exact)


def adapted(**options: Any) -> Callable[[Any], Any]:
    """The model with LoRA adapters of PEFT on its attention, none of them zero."""

    def change(model: Any) -> Any:
        import peft

        small = model.config.model_type == "gpt2"
        targets = ["c_attn"] if small else ["q_proj", "v_proj", "down_proj"]
        torch.manual_seed(5)
        wanted = peft.LoraConfig(target_modules=targets, fan_in_fan_out=small, init_lora_weights=False, **options)
        return peft.get_peft_model(model, wanted).eval()

    return change


def _switched_off(model: Any) -> Any:
    model = adapted()(model)
    model.base_model.disable_adapter_layers()
    return model


def _merged(model: Any) -> Any:
    model = adapted()(model)
    model.merge_adapter()
    return model


def _part_compiled(model: Any) -> Any:
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    layers[1].compile(backend="eager")
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float16": lambda model: model.to(torch.float16),
    "LoRA": adapted(),
    "LoRA, merged": _merged,
    "LoRA, switched off": _switched_off,
    "LoRA on bfloat16": lambda model: adapted()(model.to(torch.bfloat16)),
    "DoRA": adapted(use_dora=True),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "one layer compiled": _part_compiled,
}


def outcomes(cases: Callable[[], Iterator[Case]]) -> Counter[str]:
    """How many measurements were right and wrong; one that is refused ends the series."""
    counts: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for case in cases():
                counts["right" if case.right else "wrong"] += 1
        except HowsmoothError:
            counts["refused"] += 1
    return counts


def attacks() -> Iterator[tuple[str, list[Callable[[], Iterator[Case]]]]]:
    """Name → the series that belong to it."""
    for mask in MASKS:
        yield f"padding, {mask}", [lambda kind=kind, mask=mask: padded(kind, mask) for kind in SELF]  # type: ignore[misc]
    for which in ("", "attention_mask", "decoder_attention_mask"):
        named = f"encoder and decoder, {which or 'no mask'}"
        yield named, [lambda kind=kind, which=which: two_texts(kind, which) for kind in CROSS]  # type: ignore[misc]
    yield "images and sounds", [lambda kind=kind: media(kind) for kind in ("ViT", "Whisper")]  # type: ignore[misc]
    for name in CHANGES:
        yield name, [lambda kind=kind, name=name: changed(kind, CHANGES[name]) for kind in ("Llama", "GPT2")]  # type: ignore[misc]


def parts(progress: Callable[[str], None]) -> list[str]:
    """The text and table of the documentation page."""
    rows = []
    for name, series in attacks():
        progress(name)
        counts = sum((outcomes(one) for one in series), Counter())
        rows.append([name, *(counts[outcome] for outcome in ("right", "refused", "wrong"))])
    return [
        "Small random models are measured as they are met: with padding on either side, in half precision, with "
        "adapters of PEFT merged, switched off or neither, compiled whole or in part, with an encoder beside a "
        "decoder, of images and sounds. "
        f"*Right* is a pair of ends that has the norm of a float64 autograd Jacobian of the model's own module between "
        f"them (up to {ROUNDING:g} for models that take softmax in float32 whatever they are in); *refused* is one "
        "sentence, which ends that model's series; *wrong* is anything else.",
        table(["model", "right", "refused", "wrong"], rows),
    ]
