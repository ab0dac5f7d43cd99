"""Models with random weights: small ones of known architectures, ``random:NAME`` or ``random:NAME[layers=…,width=…]``,
and the twin of any model, ``NAME@random``."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from howsmooth._util.common import first_line
from howsmooth._util.process_lock import alone
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.checkpoint_files import check_free_memory
from howsmooth.models.model_inputs import SPECIAL
from howsmooth.models.module_names import RANDOM_NAMES
from howsmooth.models.pretrained_files import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GRAMMAR = re.compile(r"random:(?P<name>[\w-]+)(?:\[(?P<pairs>[^\]]*)\])?")
_DIGITS = 20
_DEFAULTS = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 0, "window": 8, "length": 512, "seed": 0}
_GROUPED = ("gemma", "gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3")
_SLIDING = ("gemma2", "gemma3", "mistral", "qwen2", "qwen3")
_IMAGE = ("deit", "dinov2", "vit")
_AUDIO = ("wav2vec2", "whisper")
_TYPES = {"gemma3": "gemma3_text", "gpt-neox": "gpt_neox"}
_OBJECTS = 2**15
"""Memory of a layer's modules beside their weights, in numbers of four bytes."""
LARGEST_SEED = 2**63 - 1
_TEXT = {"vocab_size": 256 + SPECIAL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def is_random(spec: str) -> bool:
    """Whether a model is requested by ``random:``."""
    return spec.startswith("random:")


def random_name(spec: str) -> str | None:
    """The architecture in ``random:NAME[…]``, or None.

    >>> random_name("random:gpt2[layers=1]"), random_name("random:nothing"), random_name("random[width=8]")
    ('gpt2', None, None)
    """
    parsed = _GRAMMAR.fullmatch(spec)
    return parsed["name"] if parsed is not None and parsed["name"] in RANDOM_NAMES else None


@alone
def random_model(spec: str, head: bool = False) -> PreTrainedModel:
    """The model of a configuration, drawn as its architecture draws weights before training.

    Options in brackets: layers (2), width (64), heads (4), kv_heads (where an architecture shares them: 2), window of
    sliding attention (8), length of the longest input (512), seed (0).

    >>> random_model("random:llama[layers=3,width=32]").config.num_hidden_layers
    3
    """
    import transformers

    name, options = parse_random(spec)
    kind = _TYPES.get(name, name)
    width = options["width"]
    layers, tables = options["layers"] * (12 * width**2 + _OBJECTS), (options["length"] + 512) * width
    check_free_memory(layers + tables, "this random model")
    with _drawing(options["seed"]):
        config = transformers.AutoConfig.for_model(kind, **_configuration(name, options), dtype=torch.float32)
        model = _class(name, head)(config)
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    return model.float().eval()


def parse_random(spec: str) -> tuple[str, dict[str, int]]:
    """The architecture and its numbers.

    >>> parse_random("random:bert[layers=1]")[1]["layers"]
    1
    """
    parsed = _GRAMMAR.fullmatch(spec)
    if parsed is None or random_name(spec) is None:
        raise InvalidInput(
            f"{spec!r} is not a random model: write random:NAME or random:NAME[layers=2,width=64,…] with NAME one of "
            f"{', '.join(RANDOM_NAMES)}."
        )
    options = dict(_DEFAULTS)
    for pair in filter(None, (parsed["pairs"] or "").split(",")):
        key, _, value = (word.strip() for word in pair.partition("="))
        if key not in _DEFAULTS or not value.isdecimal():
            raise InvalidInput(
                f"{pair!r} is not an option of a random model: write name=number with a name of {', '.join(_DEFAULTS)}."
            )
        options[key] = int(value) if len(value) <= _DIGITS else 10**_DIGITS
    for key in ("layers", "width", "heads", "window", "length"):
        if options[key] < 1:
            raise InvalidInput(f"{key} of a random model must be at least 1, got {options[key]}.")
    if options["seed"] > LARGEST_SEED:
        raise InvalidInput(f"the seed of a random model is at most {LARGEST_SEED}: choose a smaller one.")
    if options["heads"] % (options["kv_heads"] or 1):
        raise InvalidInput(f"{options['heads']} heads do not share {options['kv_heads']} key-value heads: change one.")
    if options["width"] % (2 * options["heads"]):
        raise InvalidInput(
            f"a width of {options['width']} does not split into {options['heads']} heads of even width: change one."
        )
    return parsed["name"], options


def _configuration(name: str, options: dict[str, int]) -> dict[str, Any]:
    width, heads, layers, length = (options[key] for key in ("width", "heads", "layers", "length"))
    config: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    if name in _IMAGE:
        return config | {"image_size": 32, "patch_size": 8}
    if name == "wav2vec2":
        # The convolutions of wav2vec 2.0 with fewer channels: 320 samples per frame.
        return config | {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    if name == "whisper":
        encoder = {"d_model": width, "encoder_layers": layers, "encoder_attention_heads": heads}
        rest = {"decoder_layers": 1, "decoder_attention_heads": heads, "max_source_positions": 50}
        widths = {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
        return encoder | rest | widths | _TEXT | {"decoder_start_token_id": 1, "begin_suppress_tokens": None}
    config |= _TEXT
    if name == "t5":
        return config | {"d_kv": width // heads, "d_ff": 4 * width, "num_layers": layers, "decoder_start_token_id": 0}
    if name == "opt":
        config |= {"word_embed_proj_dim": width, "ffn_dim": 4 * width}
    if name == "distilbert":
        config |= {"hidden_dim": 4 * width}
    if name in _GROUPED:
        config |= {"num_key_value_heads": options["kv_heads"] or max(1, heads // 2), "head_dim": width // heads}
    if name in _SLIDING:
        config |= {"sliding_window": options["window"]}
    if name in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": True, "max_window_layers": layers // 2}
    # RoBERTa and MPNet count positions from after their padding.
    return config | {"max_position_embeddings": length + {"roberta": 1, "mpnet": 2}.get(name, 0)}


def _class(name: str, head: bool) -> Any:
    import transformers

    if not head:
        return transformers.AutoModel.from_config
    if name in _AUDIO:
        return transformers.AutoModelForCTC.from_config
    if name in _IMAGE:
        return transformers.AutoModelForImageClassification.from_config
    encoder = name in ("bert", "distilbert", "electra", "mpnet", "roberta")
    return (transformers.AutoModelForMaskedLM if encoder else transformers.AutoModelForCausalLM).from_config


RANDOM_TWIN = "@random"
"""The suffix of a model's name for its architecture with random weights: ``minilm@random``."""


@alone
def random_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same configuration, drawn as its architecture draws weights before training.

    The difference between the two is the effect of training.

    >>> model = random_model("random:gpt2[layers=1,width=16,seed=1]")
    >>> twin = random_twin(model)
    >>> twin.config.n_layer, bool((twin.wte.weight == model.wte.weight).all())
    (1, False)
    """
    weight = next(model.parameters())
    with _drawing(_DEFAULTS["seed"]):
        try:
            twin: Any = type(model)(copy.deepcopy(model.config))
        except (TypeError, ValueError, AttributeError) as error:
            raise UnsupportedModel(
                f"a {type(model).__name__} cannot be drawn at random from its configuration ({first_line(error)}): "
                "leave the reference out."
            ) from error
    drawn: PreTrainedModel = twin.to(weight.device, weight.dtype).eval()
    return drawn


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Draw weights in float32 on the CPU from this seed; generator and default dtype of torch are restored."""
    default = torch.get_default_dtype()
    with quiet(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
