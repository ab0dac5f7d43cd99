"""Damaged and hostile images and sounds: one clear line each."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import wavfile

from howsmooth.errors import HowsmoothError, InvalidInput
from howsmooth.models import open_model
from howsmooth.models.media import RATES, image_pixels, read_wav


def sound(path: Path, rate: int = 8_000) -> bytes:
    wavfile.write(path, rate, np.arange(400, dtype=np.int16))
    return path.read_bytes()


@pytest.mark.parametrize("rate", [1, RATES[0] - 1, RATES[1] + 1])
def test_sounds_of_absurd_rates_are_refused_before_they_are_stretched(rate: int, tmp_path: Path) -> None:
    sound(tmp_path / "a.wav", rate)
    with pytest.raises(InvalidInput, match=f"has {rate} samples per second, but sounds of 1000 to 768000 are read"):
        read_wav(tmp_path / "a.wav")


def test_samples_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    wavfile.write(tmp_path / "a.wav", 8_000, np.array([0.0, np.nan], dtype=np.float32))
    with pytest.raises(InvalidInput, match="holds samples that are no numbers"):
        read_wav(tmp_path / "a.wav")


def damaged(content: bytes, seed: int) -> bytes:
    """A few bytes of the beginning changed, or the end cut off."""
    draw = np.random.default_rng(seed)
    changed = bytearray(content)
    for place in draw.integers(0, min(64, len(content)), 3):
        changed[place] = int(draw.choice([0, 1, 127, 128, 255]))
    return bytes(changed[: draw.integers(10, len(changed))] if seed % 4 == 0 else changed)


def test_damaged_sounds_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    content, said = sound(tmp_path / "a.wav"), list[str]()
    for seed in range(200):
        (tmp_path / "b.wav").write_bytes(damaged(content, seed))
        try:
            assert np.isfinite(read_wav(tmp_path / "b.wav")).all()
        except HowsmoothError as error:
            said.append(str(error))
    assert len(said) > 100
    assert all(line.isprintable() for line in said)


@pytest.mark.slow
def test_damaged_images_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    config, said = open_model("random:vit[width=32]").model.config, list[str]()
    for seed in range(100):
        (tmp_path / "b.png").write_bytes(damaged((tmp_path / "a.png").read_bytes(), seed))
        try:
            image_pixels(tmp_path / "b.png", config, None)
        except HowsmoothError as error:
            said.append(str(error))
    assert len(said) > 50
    assert all(line.isprintable() for line in said)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_small_file_of_many_pixels_is_refused(side: int, tmp_path: Path) -> None:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    rows = zlib.compress(bytes(1000))
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    with pytest.raises(InvalidInput, match=r"bomb\.png cannot be read as an image"):
        image_pixels(tmp_path / "bomb.png", open_model("random:vit[width=32]").model.config, None)
