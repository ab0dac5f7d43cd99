"""A vision transformer of one layer, read at its class token.

Embedded patches follow a class token; positions are added; one pre-norm layer of attention and a ReLU MLP; a last norm
and a linear map read the class token. Norms subtract the mean of a token and do not divide by its deviation, as in the
network of DeepT (Bonaert et al., PLDI 2021). The query of the class token does not depend on the image, so that
everything up to the softmax is affine in the pixels; `PatchTransformer.folded` multiplies it out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_positive, validated
from howsmooth.certificates.classifier.cls_token import PooledAttention
from howsmooth.certificates.classifier.robust_radius import Classifier
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.weight_files import read_tensors

_ATTENTION, _MLP = "transformer.layers.0.0.fn.", "transformer.layers.0.1.fn."
MAPS = {
    "patch": "to_patch_embedding.1",
    "first_norm": f"{_ATTENTION}norm",
    "query": f"{_ATTENTION}fn.to_q",
    "key": f"{_ATTENTION}fn.to_k",
    "value": f"{_ATTENTION}fn.to_v",
    "output": f"{_ATTENTION}fn.to_out.0",
    "second_norm": f"{_MLP}norm",
    "up": f"{_MLP}fn.net.0",
    "down": f"{_MLP}fn.net.3",
    "last_norm": "mlp_head.0",
    "classes": "mlp_head.1",
}
"""The affine maps of the network → their names in the `vit_pytorch` layout."""
_UNBIASED = ("query", "key", "value")


class AffineLayer(nn.Module):
    """x ↦ Wx + b, with W a matrix or, for a norm, the gain after the mean is taken off: (I − 11ᵀ/d) then diag."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        out = weight.shape[0]
        self.register_buffer("bias", weight.new_zeros(out) if bias is None else bias)

    def matrix(self) -> Tensor:
        """W in float64."""
        weight = self.weight.double()
        if weight.dim() == 2:
            return weight
        d = len(weight)
        return weight[:, None] * (torch.eye(d, dtype=weight.dtype) - 1 / d)

    def forward(self, x: Tensor) -> Tensor:
        """Wx + b of the last axis."""
        if self.weight.dim() == 2:
            return x @ self.weight.mT + self.bias
        return (x - x.mean(-1, keepdim=True)) * self.weight + self.bias


class PatchTransformer(nn.Module):
    """The network of this module; `forward` takes images ``(…, side, side)`` of pixels between 0 and 1.

    Args:
        tensors: weights by the names of the `vit_pytorch` layout. heads: of the attention.
        mean, deviation: by which pixels are normalised.
    """

    cls_token: Tensor
    positions: Tensor

    @validated
    def __init__(self, tensors: Mapping[str, Tensor], heads: int, mean: float = 0.0, deviation: float = 1.0):
        super().__init__()
        self.heads, self.mean = check_count(heads, "heads"), mean
        self.deviation = check_positive(deviation, "deviation")
        names = {name: (f"{prefix}.weight", f"{prefix}.bias") for name, prefix in MAPS.items()}
        known = {"cls_token", "pos_embedding", *chain(*names.values())}
        missing = known - {names[name][1] for name in _UNBIASED} - set(tensors)
        wrong = [f"{key} is missing" for key in missing] or [
            f"{key} has no certificate" for key in set(tensors) - known
        ]
        if wrong:
            raise UnsupportedModel(f"{min(wrong)}: certify reads vision transformers of one layer.")
        for name, (weight, bias) in names.items():
            self.add_module(name, AffineLayer(tensors[weight], tensors.get(bias)))
        self.register_buffer("cls_token", tensors["cls_token"].reshape(-1))
        self.register_buffer("positions", tensors["pos_embedding"].reshape(-1, len(self.cls_token)))
        self.grid, self.patch_side = self._sides()

    def _sides(self) -> tuple[int, int]:
        count, area = len(self.positions) - 1, self._map("patch").weight.shape[1]
        grid, side = round(count**0.5), round(area**0.5)
        if grid**2 != count or side**2 != area:
            raise UnsupportedModel(f"{count} patches of {area} pixels are no square image of one channel.")
        if self._map("query").weight.shape[0] % self.heads:
            raise InvalidInput(
                f"{self._map('query').weight.shape[0]} query features do not split into {self.heads} heads."
            )
        return grid, side

    @classmethod
    @validated
    def open(
        cls, path: str | Path, heads: int | None = None, mean: float | None = None, deviation: float | None = None
    ) -> PatchTransformer:
        """The network in a safetensors file; missing arguments are read from its metadata."""
        lazy, metadata = read_tensors(Path(path))
        tensors, words = {name: lazy[name] for name in lazy}, " ".join(map(str, metadata.values()))
        known_heads = re.search(r"(\d+) heads", words)
        known_norm = re.search(r"mean (\d*\.?\d+) and std (\d*\.?\d+)", words)
        if heads is None:
            if known_heads is None:
                raise InvalidInput(f"{path} does not say how many heads it has: pass heads.")
            heads = int(known_heads[1])
        if mean is None or deviation is None:
            if known_norm is None:
                raise InvalidInput(f"{path} does not say how pixels are normalised: pass mean and deviation.")
            mean = float(known_norm[1]) if mean is None else mean
            deviation = float(known_norm[2]) if deviation is None else deviation
        return cls(tensors, heads, mean, deviation)

    def _map(self, name: str) -> AffineLayer:
        affine = getattr(self, name)
        assert isinstance(affine, AffineLayer)
        return affine

    @property
    def side(self) -> int:
        """Pixels along one side of an image."""
        return self.grid * self.patch_side

    def patches(self, images: Tensor) -> Tensor:
        """The pixels of each patch, ``(…, patches, pixels)``."""
        if images.dim() < 2 or images.shape[-2:] != (self.side, self.side):
            raise InvalidInput(f"images of {self.side} × {self.side} pixels are needed, got {tuple(images.shape)}.")
        cut = images.unflatten(-1, (self.grid, self.patch_side)).unflatten(-3, (self.grid, self.patch_side))
        return cut.transpose(-3, -2).flatten(-2).flatten(-3, -2)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, ``(…, classes)``."""
        pixels = (self.patches(images) - self.mean) / self.deviation
        embedded = self._map("patch")(pixels)
        first = self.cls_token.expand(*embedded.shape[:-2], 1, -1)
        x = torch.cat([first, embedded], -2) + self.positions
        normed = self._map("first_norm")(x)
        query, key, value = (
            self._map(name)(normed).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for name in _UNBIASED
        )
        weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, dim=-1)
        x = x + self._map("output")((weights @ value).transpose(-3, -2).flatten(-2))
        x = x + self._map("down")(torch.relu(self._map("up")(self._map("second_norm")(x))))
        return self._map("classes")(self._map("last_norm")(x[..., 0, :]))

    def folded(self) -> Classifier:
        """The same network with everything affine multiplied out, in float64."""
        exact, sizes = _folded(self, Tensor.double), _folded(self, lambda tensor: tensor.double().abs())
        return replace(exact, sizes=sizes.pool)


def _folded(net: PatchTransformer, read: Callable[[Tensor], Tensor]) -> Classifier:
    """The products of `PatchTransformer.folded`, of factors as ``read`` gives them."""
    maps = {name: (read(net._map(name).matrix()), read(net._map(name).bias)) for name in MAPS}
    (patch, patch_offset), (norm, norm_offset) = maps["patch"], maps["first_norm"]
    centre = read(torch.full((patch.shape[1],), -net.mean / net.deviation, dtype=torch.float64))
    inner = patch @ centre + patch_offset
    tokens = torch.cat([read(net.cls_token)[None], inner.expand(net.grid**2, -1)]) + read(net.positions)
    normed = tokens @ norm.mT + norm_offset  # of an image of zeros, as the layer sees it
    token_map = norm @ patch / net.deviation
    heads = (net.heads, -1)
    (wq, bq), (wk, bk), (wv, bv) = (maps[name] for name in _UNBIASED)
    query = (normed[0] @ wq.mT + bq).unflatten(0, heads)
    query = query * query.shape[-1] ** -0.5
    at_query = torch.einsum("hk,hkd->hd", query, wk.unflatten(0, heads))
    key_offsets = at_query @ normed.mT + (query * bk.unflatten(0, heads)).sum(-1, keepdim=True)
    wo, bo = maps["output"]
    mixed = torch.einsum("ohv,hvd->hod", wo.unflatten(1, heads), wv.unflatten(0, heads))
    shift = torch.einsum("ohv,hv->ho", wo.unflatten(1, heads), bv.unflatten(0, heads))
    value_offsets = normed @ mixed.mT + shift[:, None]
    pool = PooledAttention(at_query @ token_map, key_offsets, mixed @ token_map, value_offsets, bo + tokens[0], fixed=1)
    (g2, s2), (up, up_offset), (down, down_offset) = maps["second_norm"], maps["up"], maps["down"]
    (g3, s3), (classes, class_offset) = maps["last_norm"], maps["classes"]
    direct = classes @ g3
    direct_offset = direct @ down_offset + classes @ s3 + class_offset
    return Classifier(pool, direct, direct_offset, up @ g2, up @ s2 + up_offset, direct @ down, sizes=pool)
