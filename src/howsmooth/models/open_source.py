"""Open a model for measurements: by name, at random, from a folder or from the hub."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import digest, first_line, out_of_memory, printable
from howsmooth._util.optional_deps import need
from howsmooth._util.validation import Device, check_device, check_one_of, validated
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.forward_pass import use_eager_attention
from howsmooth.models.media import RATE, audio_features, image_pixels, read_wav
from howsmooth.models.model_inputs import TokenisedText, Window, samples_of_frames, spread_starts
from howsmooth.models.named_models import FULL_PRECISION, NAMED, precision_in_words
from howsmooth.models.pretrained_files import (
    gguf_precision,
    is_adapter,
    licence_in,
    load_adapted,
    load_pretrained,
)
from howsmooth.models.random_models import RANDOM_TWIN, is_random, random_model, random_name, random_twin
from howsmooth.models.weight_files import SUFFIXES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


UNLIMITED = 2**31
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
Dtype = str | torch.dtype
DeviceMap = str | Mapping[str, int | str]
"""Devices of the parts of a model, as in transformers: "auto", or module → device."""
_USUAL = 128
_HUB_ID = re.compile(r"[\w-]+/[\w.-]+")
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
_MODALITIES = {"input_ids": "text", "pixel_values": "image", "input_values": "audio", "input_features": "audio"}
NO_TOKENIZER = "the model came without a tokenizer, so it has read the bytes of the text as token ids"


@dataclass(frozen=True)
class OpenModel:
    """A model in float32 and evaluation mode with eager attention, and facts about it.

    Attributes:
        name: as requested.
        model: without task head, unless opened with ``head=True``; of an encoder-decoder, the encoder.
        processor: its tokenizer, image processor or feature extractor; None when it has none.
        modality: "text", "image" or "audio".
        sha256: of the content: of the weights file of a named model, otherwise of configuration and weights in memory.
        precision: of the weights; it is shown wherever a number of this model is shown.
        limit: the longest input, in tokens.
        licence: of the weights.
        notes: remarks for the reader, such as repaired names of weights.
        reads_bytes: whether the bytes of a text are its token ids where there is no tokenizer.
        dtype: the requested dtype of its weights, one of `DTYPES`.
    """

    name: str
    model: PreTrainedModel
    processor: Any
    modality: str
    sha256: str
    precision: str
    limit: int
    licence: str
    notes: tuple[str, ...] = ()
    reads_bytes: bool = False
    dtype: str = "auto"

    def on(self, device: Device | None) -> OpenModel:
        """The same model on a device: itself, or a copy there."""
        if device is None or self.model.device == check_device(device):
            return self
        return replace(self, model=moved(copy.deepcopy(self.model), device))

    def in_dtype(self, dtype: Dtype | None) -> OpenModel:
        """The model as "auto" (stored weights, computed in float32), with rounded weights, or in float64.

        >>> open_model("random:gpt2[layers=1,width=16]").in_dtype("bfloat16").precision
        'bfloat16 weights, computed in float32'
        """
        name = "auto" if dtype is None else _dtype_name(dtype)
        if name in ("auto", "float32"):
            return self
        if self.modality != "text" and name == "float64":
            raise InvalidInput("float64 is for models of text: leave dtype out.")
        twin, precision = copy.deepcopy(self.model), self.precision
        if name == "float64":
            nn.Module.double(twin)
        else:
            precision = precision_in_words(name)
            with torch.no_grad():
                for weight in twin.parameters():
                    weight.copy_(weight.to(getattr(torch, name)).to(weight.dtype))
        return replace(self, model=twin, sha256=content_sha256(twin), precision=precision, dtype=name)

    def windows(
        self, source: str | Path, length: int | None = None, count: int = 1, seed: int | None = 0
    ) -> list[Window]:
        """Pieces of an input: of a text, of a .wav file, or one whole image.

        Args:
            source: the text itself, or the path of a .wav or image file.
            length: tokens of each piece, special ones included; None for the model's fixed number (images, Whisper).
            count: number of different pieces.
            seed: draws the starts of all pieces but the first, one in each of ``count`` equal parts of the text; None
                spreads them evenly. The first piece begins at the start of the text.
        """
        if length is not None and length > self.limit:
            raise InvalidInput(
                f"windows of {length} tokens were requested, but {self.name} takes at most {self.limit}: ask for less."
            )
        if self.modality == "image":
            return [self._image(source, length, count)]
        if self.modality == "audio":
            return self._sounds(source, length, count, seed)
        if length is None:
            raise InvalidInput("a window of text needs a length: say how many tokens.")
        return self._text(source).windows(length, count, seed)

    def usual_length(self, source: str | Path) -> int:
        """The default length of a window: 128 tokens, or a shorter text, or an image or sound of fixed size."""
        if self.modality == "text":
            return min(_USUAL, self.limit, len(self._text(source)))
        return self.limit if self.limit < UNLIMITED else _USUAL

    def _text(self, source: str | Path) -> TokenisedText:
        if self.processor is None and not (self.reads_bytes or is_random(self.name)):
            raise InvalidInput(f"{self.name} has no tokenizer beside its weights: add one, or capture token ids.")
        return TokenisedText(str(source), self.processor)

    def inputs(self, window: Window) -> dict[str, Tensor]:
        """The keyword arguments of the model for a window."""
        return {self.model.main_input_name: window.ids}

    def _image(self, source: str | Path, length: int | None, count: int) -> Window:
        pixels, side = image_pixels(source, self.model.config, self.processor), self.model.config.patch_size
        patches = (pixels.shape[-1] // side) * (pixels.shape[-2] // side)
        special = self.limit - patches
        tokens = [f"[special {i}]" if special > 1 else "[CLS]" for i in range(special)]
        tokens += [f"patch {i}" for i in range(min(patches, self.limit))]
        if length not in (None, self.limit) or count != 1:
            raise InvalidInput(f"an image is one window of {self.limit} tokens: leave length and count out.")
        return Window(pixels, tokens, 0)

    def _sounds(self, source: str | Path, length: int | None, count: int, seed: int | None) -> list[Window]:
        config: Any = self.model.config
        samples = read_wav(source)
        if self.model.main_input_name == "input_features":
            if length not in (None, self.limit):
                raise InvalidInput(f"{self.name} always reads {self.limit} tokens of sound: leave the length out.")
            frames, wanted = self.limit, min(len(samples), self.limit * 2 * RATE // 100)
        else:
            if length is None:
                raise InvalidInput("a window of sound needs a length: say how many tokens (20 ms each).")
            frames, wanted = length, samples_of_frames(length, config.conv_kernel, config.conv_stride)
        if not wanted or len(samples) < wanted or len(samples) - wanted + 1 < count:
            raise InvalidInput(
                f"the sound has {len(samples)} samples, too few for {count} different window(s) of {frames} tokens "
                f"({wanted} samples each): give a longer one or ask for less."
            )
        tokens = [f"{i * 20} ms" for i in range(frames)]
        windows = []
        for start in spread_starts(len(samples), wanted, count, seed):
            features = audio_features(samples[start : start + wanted], config, self.processor)
            windows.append(Window(features[self.model.main_input_name], tokens, start))
        return windows


def names_model(source: str) -> bool:
    """Whether SOURCE names a model rather than the weights of one attention block.

    A model is a name in `NAMED`, ``random:NAME[…]``, a folder with config.json, a .gguf file, or an id on the hub
    (``org/name``). A block is ``random`` or a file of weights.

    >>> [names_model(source) for source in ("minilm", "random:bert[layers=2]", "org/name", "random[width=8]", "w.pt")]
    [True, True, True, False, False]
    """
    source = source.removesuffix(RANDOM_TWIN)
    path = Path(source)
    if source in NAMED or random_name(source) is not None or path.suffix == ".gguf":
        return True
    on_hub = _HUB_ID.fullmatch(source) and path.suffix not in SUFFIXES and not os.path.exists(path)
    return os.path.isfile(path / "config.json") or is_adapter(source) or bool(on_hub)


@validated
def open_model(
    spec: str,
    *,
    head: bool = False,
    device: Device | None = None,
    dtype: Dtype | None = None,
    device_map: DeviceMap | None = None,
) -> OpenModel:
    """Open a model for measurements.

    Only safetensors and GGUF weights are read, and no code from the hub is run.

    Args:
        spec: a name in `NAMED` (``minilm``, ``smollm2``, ``mpnet``), ``random:bert[layers=2,width=64]`` and the like, a
            folder (of a model or of a PEFT adapter), a .gguf file, or an id on the Hugging Face hub; with ``@random``
            behind it, the same architecture with random weights.
        head: with its task head (language model, CTC, …), for `target(…, "logits")`.
        device: its device, for example "cuda"; None for the CPU.
        dtype: "auto" (stored weights, computed in float32), "float64" for the arithmetic, or "bfloat16" or "float16" to
            round the weights first.
        device_map: for ``from_pretrained`` of transformers, which spreads loaded weights over devices with accelerate.
            Measured parts must not be offloaded.

    >>> opened = open_model("random:gpt2[layers=1,width=32]")
    >>> opened.modality, opened.precision, opened.limit
    ('text', 'float32', 512)
    """
    _check_place(spec, device, dtype, device_map)
    if spec.endswith(RANDOM_TWIN) and not os.path.exists(spec):
        ready = twin_of(_open(spec.removesuffix(RANDOM_TWIN), head, device_map))
    else:
        ready = _open(spec, head, device_map)
    if device is not None:
        moved(ready.model, device)
    return ready.in_dtype(dtype)


def _check_place(spec: str, device: Device | None, dtype: Dtype | None, device_map: DeviceMap | None) -> None:
    """Refuse impossible devices and dtypes before anything is loaded."""
    if dtype is not None:
        _dtype_name(dtype)
    if device is not None:
        check_device(device)
    if device_map is None:
        return
    if device is not None:
        raise InvalidInput("device puts the model in one place and device_map into several: give one of them.")
    if is_random(spec) or is_adapter(spec):
        raise InvalidInput(f"device_map is for weights that are loaded as they are, not for {printable(spec)}.")
    need("accelerate", "a device_map")


def _open(spec: str, head: bool, device_map: DeviceMap | None) -> OpenModel:
    model: PreTrainedModel
    notes: tuple[str, ...] = ()
    if is_random(spec):
        model, processor, sha256 = random_model(spec, head), None, None
        precision, licence = FULL_PRECISION, "none (random weights)"
    elif spec in NAMED:
        named = NAMED[spec]
        folder = named.locate()
        gguf = named.weights.endswith(".gguf")
        source, pins = (folder / named.weights, named.unpacked) if gguf else (folder, named.pins)
        model, processor, _, notes = load_pretrained(str(source), head, pins, device_map)
        precision, licence, sha256 = named.precision, named.licence, named.sha256
    else:
        loaded = load_adapted(spec, head) if is_adapter(spec) else load_pretrained(spec, head, None, device_map)
        model, processor, stored, notes = loaded
        sha256, licence = None, licence_in(Path(spec)) if Path(spec).is_dir() else "not stated"
        precision = gguf_precision(Path(spec)) if spec.endswith(".gguf") else precision_in_words(stored)
    return describe_model(spec, model, processor, precision, licence, sha256, notes)


def describe_model(
    name: str,
    model: PreTrainedModel,
    processor: Any,
    precision: str,
    licence: str,
    sha256: str | None = None,
    notes: tuple[str, ...] = (),
    reads_bytes: bool = False,
) -> OpenModel:
    """A loaded model with the facts that follow from it; its weights need no gradients from now on."""
    model.requires_grad_(False)
    use_eager_attention(model)
    modality = _MODALITIES.get(model.main_input_name)
    if modality is None:
        raise UnsupportedModel(
            f"{name!r} reads {model.main_input_name!r}, but models of text, images and sound can be opened."
        )
    limit = longest(model, processor)
    sha256 = sha256 or content_sha256(model)
    return OpenModel(name, model, processor, modality, sha256, precision, limit, licence, notes, reads_bytes)


def moved(model: PreTrainedModel, device: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model itself, moved to a device; `InvalidInput` with the reason where that fails."""
    try:
        nn.Module.to(model, device, dtype)
    except (MemoryError, RuntimeError, AssertionError) as error:
        if out_of_memory(error):
            raise InvalidInput(
                f"the model does not fit in the memory of the device {device}: choose another, or a smaller model."
            ) from error
        raise InvalidInput(f"the model cannot be brought to the device {device}: {first_line(error)}.") from error
    return model


def _dtype_name(dtype: Dtype) -> str:
    """One of `DTYPES`.

    >>> _dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return check_one_of(str(dtype).removeprefix("torch."), DTYPES, "dtype")


def twin_of(model: OpenModel) -> OpenModel:
    """The same architecture with random weights, which reads the same windows, to show the effect of training.

    >>> twin_of(open_model("random:gpt2[layers=1,width=32,seed=3]")).name
    'random:gpt2[layers=1,width=32,seed=3]@random'
    """
    twin = random_twin(model.model)
    licence = "none (random weights)"
    return replace(
        describe_model(f"{model.name}{RANDOM_TWIN}", twin, model.processor, FULL_PRECISION, licence),
        limit=model.limit,
        reads_bytes=model.reads_bytes,
    )


def content_sha256(model: PreTrainedModel) -> str:
    """A hash of the configuration (the same weights can form other models) and of all weights, names and shapes."""
    settings = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_THE_MODEL}
    return digest(model.state_dict(), json.dumps(settings, sort_keys=True, default=str).encode())


def longest(model: PreTrainedModel, processor: Any = None) -> int:
    """The longest input in tokens that position embeddings and tokenizer allow."""
    config: Any = model.config
    if model.main_input_name == "pixel_values":
        table = next(p for name, p in model.named_parameters() if name.endswith("position_embeddings"))
        return int(table.shape[1])  # patches and special ones
    if model.main_input_name == "input_features":
        return int(config.max_source_positions)
    limits = [_tokenizer_limit(processor)]
    if model.main_input_name == "input_ids":
        limits.append(getattr(config, "max_position_embeddings", None))
    for path, table in model.named_modules():
        # RoBERTa and MPNet count positions from after their padding, and have that many fewer.
        if path.endswith("position_embeddings") and isinstance(table, nn.Embedding) and table.padding_idx is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    return min([UNLIMITED, *(int(limit) for limit in limits if limit is not None)])


def _tokenizer_limit(processor: Any) -> int | None:
    """The longest text by the tokenizer; a huge number in its file means that it is unknown."""
    limit = getattr(processor, "model_max_length", None)
    if limit is None:
        return None
    if not isinstance(limit, int | float) or not limit >= 1:
        raise InvalidInput(
            f"the longest text of its tokenizer (model_max_length) is {printable(repr(limit))[:40]}: write a number "
            "into tokenizer_config.json."
        )
    return int(min(limit, UNLIMITED))
