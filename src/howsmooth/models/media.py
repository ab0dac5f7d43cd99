"""Images and sounds as inputs of models: an image file, or a .wav file cut into windows."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from howsmooth._util.common import first_line, printable
from howsmooth._util.optional_deps import need
from howsmooth.errors import InvalidInput
from howsmooth.models.model_inputs import read_content

if TYPE_CHECKING:
    pass

RATE = 16_000
"""Samples per second that speech models are trained on."""
RATES = (1_000, 768_000)
"""Samples per second that a sound may have: fewer would be stretched to thousands of times their number."""
PIXELS = 2**26
"""Pixels of the largest image; a small file can unpack to any number."""
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Image formats that are read; pillow has many more, some of them poorly maintained."""


def read_wav(path: str | Path) -> np.ndarray:
    """The sound in a .wav file as one channel in [−1, 1], resampled to `RATE`.

    >>> import tempfile
    >>> from scipy.io import wavfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     wavfile.write(f"{folder}/a.wav", 8000, np.zeros((800, 2), dtype=np.int16))
    ...     read_wav(f"{folder}/a.wav").shape
    (1600,)
    """
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    content = read_content(Path(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # chunks beside the sound, such as its title; ends that come too early
            own_rate, samples = wavfile.read(io.BytesIO(content))
    except Exception as error:  # any error that a damaged header causes in the reader
        raise _unreadable(path, ".wav", error, "convert the sound to uncompressed .wav") from error
    if not RATES[0] <= own_rate <= RATES[1] or samples.ndim not in (1, 2) or 0 in samples.shape[1:]:
        raise InvalidInput(
            f"{printable(str(path))} has {own_rate} samples per second, but sounds of {RATES[0]} to {RATES[1]} are "
            "read: convert it."
        )
    if samples.dtype.kind not in "iuf" or not np.isfinite(samples).all():
        raise InvalidInput(f"{printable(str(path))} holds samples that are no numbers: convert it anew.")
    wave = samples.astype(np.float64)
    if samples.dtype.kind in "iu":  # zero is the middle of the range: 128 of bytes, 0 of wider integers
        ends = np.iinfo(samples.dtype)
        middle = (ends.max + 1 + ends.min) // 2
        wave = (wave - middle) / (ends.max + 1 - middle)
    mono = wave.mean(axis=1) if wave.ndim == 2 else wave
    divisor = np.gcd(own_rate, RATE)
    return mono if own_rate == RATE or not len(mono) else resample_poly(mono, RATE // divisor, own_rate // divisor)


def _unreadable(path: str | Path, kind: str, error: Exception, advice: str) -> InvalidInput:
    return InvalidInput(f"{printable(str(path))} cannot be read as {kind} ({first_line(error)}): {advice}.")


def audio_features(samples: np.ndarray, config: Any, processor: Any) -> dict[str, Tensor]:
    """The input of a speech model: a normalised wave (Wav2Vec2) or a log-mel spectrogram of fixed length (Whisper)."""
    import transformers

    size = {}
    if processor is None and config.model_type == "whisper":
        processor = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins)
        # Two frames of 10 ms become one token.
        size = {"max_length": config.max_source_positions * 2 * processor.hop_length}
    elif processor is None:
        processor = transformers.Wav2Vec2FeatureExtractor()
    made = processor(samples, sampling_rate=RATE, return_tensors="pt", **size)
    name = "input_features" if "input_features" in made else "input_values"
    return {name: made[name].float()}


def image_pixels(path: str | Path, config: Any, processor: Any) -> Tensor:
    """The pixels of an image file as input of the model, ``(1, channels, height, width)``."""
    reader = need("PIL.Image", "an image")
    content = read_content(Path(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images are refused below
            with reader.open(io.BytesIO(content), formats=IMAGE_FORMATS) as opened:
                if opened.width * opened.height > PIXELS:
                    raise ValueError(f"{opened.width} × {opened.height} pixels are too many")
                image = opened.convert("RGB")
    except Exception as error:  # any error that a damaged file causes in the reader, a decompression bomb included
        raise _unreadable(path, "an image", error, "give a PNG or JPEG file") from error
    if processor is not None:
        return processor(image, return_tensors="pt")["pixel_values"].float()
    size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    pixels = np.asarray(image.resize((size, size), reader.Resampling.BILINEAR), dtype=np.float32)
    return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1)[None]
