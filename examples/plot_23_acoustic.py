"""
An acoustic model with CTC
==========================

Self-attention also reads sound. A scan takes a .wav file in the place of a text: here a Wav2Vec2 encoder with a CTC
head and random weights listens to five seconds of made-up vowels, one token per 20 ms.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from scipy.io import wavfile

import howsmooth as hs
from howsmooth.reports.figures import new_figure

rate = 16_000
time = np.arange(5 * rate) / rate
pitch = 2 * np.pi * np.cumsum(120 + 20 * np.sin(2 * np.pi * 0.7 * time)) / rate
formants = np.stack([700 + 300 * np.sin(2 * np.pi * 1.3 * time), 1300 + 600 * np.cos(2 * np.pi * 0.9 * time)])
harmonics = np.arange(1, 30)[:, None]
loudness = np.exp(-(((harmonics * 120 - formants[:, None]) / 200) ** 2)).sum(0)
voice = (loudness * np.sin(harmonics * pitch)).sum(0)

with TemporaryDirectory() as folder:
    sound = Path(folder) / "vowels.wav"
    wavfile.write(sound, rate, (0.2 * 2**15 * voice / np.abs(voice).max()).astype(np.int16))
    scan = hs.scan(
        "random:wav2vec2[layers=3,width=64,heads=4]", sound, lengths="16,32,64", what="head,attention,logits"
    )

rows = scan.to_pandas()
figure, (ax,) = new_figure()
for layer, mark in zip(range(3), "os^", strict=True):
    block = rows.query("what == 'attention' and layer == @layer")
    ax.loglog(block["length"], block["value"], f"{mark}-", label=f"attention of layer {layer}")
whole = rows.query("what == 'logits'")
ax.loglog(whole["length"], whole["value"], "X--", color="black", label="whole encoder to the CTC logits")
ax.set(xlabel="number of tokens n (20 ms each)", ylabel="σ_max(J)", title="Random Wav2Vec2 with CTC")
ax.set_xticks([16, 32, 64], ["16", "32", "64"])
ax.set_yticks([0.05, 0.1, 0.2, 0.3], ["0.05", "0.1", "0.2", "0.3"])
ax.minorticks_off()
_ = ax.legend(frameon=False, fontsize=8)
print(rows.query("what != 'head'")[["what", "layer", "length", "value", "lower", "upper"]].to_string(index=False))
