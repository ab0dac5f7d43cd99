"""Attention weights and tokens from files, read without ever running code from them.

A file holds the matrices of an attention block under the names of its framework, which
`howsmooth.models.module_names` lists. It holds no mask, no positions and no logit scale: the caller gives them.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections import UserDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from howsmooth._util.common import first_line, printable
from howsmooth.attention import LogitBias, SelfAttention
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.module_names import FILE_CONVENTIONS, Convention, find_blocks

SUFFIXES = (".safetensors", ".pt", ".pth", ".npy")
_MAX_DEPTH = 32


# Tensors beside the projections without effect on the map: GPT-2's stored causal mask, the norm after BERT's block.
_HARMLESS = ("bias", "masked_bias", "output.LayerNorm.weight", "output.LayerNorm.bias")


def load_attention(
    path: str | Path,
    prefix: str | None = None,
    heads: int | None = None,
    mask: LogitBias | Tensor | str | None = None,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> SelfAttention:
    """One attention block from a weights file.

    Args:
        path: a ``.safetensors`` file, or a ``.pt``/``.pth`` file that holds nothing but tensors.
        prefix: the common prefix of the block's tensors, for example ``"h.0.attn."``; not needed for a file with a
            single block.
        heads, kv_heads: numbers of heads, unless stored in the metadata of the file; kv_heads follows from the shapes.
        mask, options: as in `SelfAttention` (rotary, softcap, scale, …); a file does not hold them.
        dtype: convert the weights to it.

    >>> import tempfile, torch
    >>> mha = torch.nn.MultiheadAttention(8, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save(mha.state_dict(), f"{folder}/mha.pt")
    ...     load_attention(f"{folder}/mha.pt", heads=2, mask="causal").heads
    2
    """
    weights = read_attention_weights(path, prefix, heads, kv_heads=kv_heads, dtype=dtype, rotary="rotary" in options)
    return SelfAttention(**weights, mask=mask, **options)


def read_attention_weights(
    path: str | Path,
    prefix: str | None = None,
    heads: int | None = None,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype | None = None,
    rotary: bool = False,
) -> dict[str, Any]:
    """Weights and numbers of heads of one attention block, as arguments of `SelfAttention`.

    They are for callers that need the head width before they can choose positions.

    A file with tensors beside the projections that would change the map (normalised queries, extra keys, an adapter) is
    refused; stored rotary frequencies are accepted with ``rotary``, when the caller supplies them.
    """
    path = Path(path)
    tensors, metadata = read_tensors(path)
    blocks = find_blocks(tensors)
    prefix = _choose(prefix, blocks, path)
    convention = blocks[prefix]
    names = [name for name in (*convention.required, *convention.optional) if prefix + name in tensors]
    stored = {name: _real(tensors[prefix + name], prefix + name, path, dtype) for name in names}
    _refuse_unknown([n.removeprefix(prefix) for n in tensors if n.startswith(prefix)], convention, prefix, rotary, path)
    heads = _count("heads", heads, metadata)
    if heads is None:
        raise InvalidInput(f"{path.name} does not say how many heads it has: give heads (--heads on the command line).")
    query, key, value = _split(tuple(stored[name] for name in convention.required), convention, prefix)
    *biases, output, output_bias = (stored.get(name) for name in convention.optional)
    if len(biases) == 1:
        biases = [None] * 3 if biases[0] is None else list(biases[0].chunk(3))
    if output is not None and convention.transposed:
        output = output.T
    kv_heads = _count("kv_heads", kv_heads, metadata)
    if kv_heads is None:  # shared keys show in the shapes: as many key features per head as query features
        kv_heads = max(1, heads * key.shape[0] // query.shape[0])
    arguments = {"query": query, "key": key, "value": value, "output": output, "output_bias": output_bias}
    arguments |= zip(("query_bias", "key_bias", "value_bias"), biases, strict=True)
    return arguments | {"heads": heads, "kv_heads": kv_heads}


def load_tokens(path: str | Path, name: str | None = None) -> Tensor:
    """The tokens x, (n, d) or (batch, n, d), stored in a ``.safetensors``, ``.pt``, ``.pth`` or ``.npy`` file.

    Args:
        name: the tensor, when the file holds several.
    """
    path = Path(path)
    tensors, _ = read_tensors(path)
    if name is None:
        if len(tensors) != 1:
            raise InvalidInput(f"{path.name} holds {_listed(tensors)}: choose one by name (--input-name).")
        name = next(iter(tensors))
    if name not in tensors:
        raise InvalidInput(f"{path.name} holds no tensor {name!r}, but {_listed(tensors)}.")
    return tensors[name]


def read_tensors(path: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """All tensors of a file by name, read on request where the format allows it, and its metadata.

    Nested dictionaries are joined by dots; a file that holds one bare tensor gives it the name "tensor".
    """
    if path.suffix not in SUFFIXES:
        raise InvalidInput(f"{path.name} is not a kind of file that can be read safely: use {', '.join(SUFFIXES)}.")
    if not os.path.isfile(path):
        raise InvalidInput(f"there is no file {printable(str(path))[:200]}: check the path.")
    try:
        if path.suffix == ".safetensors":
            file = safe_open(path, framework="pt")
            return _Lazy(file), dict(file.metadata() or {})
        if path.suffix == ".npy":
            # Mapped first: a header may promise more than any memory holds.
            return {"tensor": torch.as_tensor(np.array(np.load(path, mmap_mode="r", allow_pickle=False)))}, {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the pickle protocol of files that it then refuses
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InvalidInput(
            f"{path.name} is refused: it holds pickled Python objects, which can run code when loaded: store nothing "
            "but tensors (a state_dict), best as .safetensors."
        ) from error
    except Exception as error:  # any error that a damaged file causes in its reader
        raise InvalidInput(
            f"{path.name} cannot be read as {path.suffix}: it is damaged, or of another format ({_reason(error)})."
        ) from error
    tensors = {name: _plain(tensor, name, path) for name, tensor in _flat(stored, path)}
    return tensors, stored if isinstance(stored, dict) else {}


class _Lazy(UserDict[str, Tensor]):
    """A safetensors file as a mapping that reads a tensor when it is requested."""

    def __init__(self, file: Any):
        super().__init__()
        self.file, self.data = file, dict.fromkeys(file.keys(), torch.empty(0))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.data:
            raise KeyError(name)
        try:
            return self.file.get_tensor(name)
        except Exception as error:  # a dtype that torch lacks, a file cut short since it was opened
            raise InvalidInput(f"{printable(name)[:100]!r} cannot be read ({_reason(error)}).") from error


def _flat(stored: object, path: Path) -> list[tuple[str, Tensor]]:
    """The tensors in nested dictionaries with their joined names; cyclic dictionaries are refused."""
    tensors: list[tuple[str, Tensor]] = []
    waiting: list[tuple[str, object, int]] = [("", stored, 0)]
    while waiting:
        name, entry, depth = waiting.pop()
        if isinstance(entry, Tensor):
            tensors.append((name or "tensor", entry.detach()))
        elif isinstance(entry, Mapping):
            if depth == _MAX_DEPTH:
                raise InvalidInput(
                    f"{path.name} nests dictionaries more than {_MAX_DEPTH} deep, or one holds itself: store a flat "
                    "state_dict."
                )
            inner = [(f"{name}.{key}" if name else str(key), value, depth + 1) for key, value in entry.items()]
            waiting += reversed(inner)
    return tensors


def _plain(tensor: Tensor, name: str, path: Path) -> Tensor:
    """The tensor; refused unless it is dense and stores all of its numbers."""
    kinds = {"sparse": tensor.layout is not torch.strided, "nested": tensor.is_nested, "without data": tensor.is_meta}
    odd = [kind for kind, holds in kinds.items() if holds]
    if not odd and tensor.numel() * tensor.element_size() > max(tensor.untyped_storage().nbytes(), 1):
        odd = ["stretched over more numbers than are stored"]
    if odd:
        raise InvalidInput(f"{printable(name)[:100]!r} in {path.name} is {odd[0]}: store plain dense tensors.")
    return tensor


def _choose(prefix: str | None, blocks: Mapping[str, Convention], path: Path) -> str:
    if not blocks:
        known = "; ".join(", ".join((*c.required, c.output + ".weight")) for c in FILE_CONVENTIONS)
        raise UnsupportedModel(f"{path.name} holds no attention block with names known here ({known}).")
    if prefix is None and len(blocks) == 1:
        return next(iter(blocks))
    for candidate in (prefix, f"{prefix}."):
        if prefix is not None and candidate in blocks:
            return str(candidate)
    problem = "several attention blocks" if prefix is None else f"no attention block with the prefix {prefix!r}"
    raise InvalidInput(f"{path.name} holds {problem}: choose a prefix (--prefix) from {_few(blocks, 24)}.")


def _refuse_unknown(names: list[str], convention: Convention, prefix: str, rotary: bool, path: Path) -> None:
    known = {*convention.required, *convention.optional, *_HARMLESS, *["rotary_emb.inv_freq"] * rotary}
    for name in sorted(set(names) - known):
        if name == "rotary_emb.inv_freq":
            raise UnsupportedModel(
                f"{path.name} stores rotary frequencies under {prefix!r}: say so with rotary (--rope)."
            )
        raise UnsupportedModel(
            f"{path.name} holds {prefix + name!r} beside the projections, so this is more than plain attention: read "
            "it through its model, hs.SelfAttention.from_transformers."
        )


def _split(weights: tuple[Tensor, ...], convention: Convention, prefix: str) -> tuple[Tensor, ...]:
    for name, weight in zip(convention.required, weights, strict=True):
        if weight.dim() != 2:
            raise InvalidInput(f"{prefix + name} has shape {tuple(weight.shape)}, but a projection is a matrix.")
    if convention.transposed:
        weights = tuple(weight.T for weight in weights)
    if len(weights) == 3:
        return weights
    if weights[0].shape[0] % 3:
        raise InvalidInput(
            f"{prefix + convention.required[0]} has {weights[0].shape[0]} output features, which do not split into "
            "queries, keys and values of one size."
        )
    return weights[0].chunk(3)


def _real(tensor: Tensor, name: str, path: Path, dtype: torch.dtype | None) -> Tensor:
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise UnsupportedModel(
            f"{name} in {path.name} is stored as {str(tensor.dtype).removeprefix('torch.')}: quantised weights must be "
            "written out as float16, bfloat16, float32 or float64 first."
        )
    return tensor if dtype is None else tensor.to(dtype)


def _count(name: str, given: int | None, metadata: Mapping[str, Any]) -> int | None:
    stored = metadata.get(name)
    if isinstance(stored, str):
        stored = int(stored) if stored.isdecimal() and len(stored) <= 9 else None
    count = given if given is not None else stored if isinstance(stored, int) else None
    if count is not None and count < 1:
        raise InvalidInput(f"{name} must be at least 1, got {count}.")
    return count


def _listed(tensors: Mapping[str, Any]) -> str:
    return f"the tensors {_few(tensors, 8)}" if tensors else "no tensors"


def _few(names: Iterable[str], count: int) -> str:
    """The first names, safe to show, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - count} more" * (len(ordered) > count)
    return ", ".join(repr(printable(name)[:100]) for name in ordered[:count]) + more


def _reason(error: BaseException) -> str:
    reason = first_line(error, kind=True)
    return reason.split("weights_only")[0].rstrip(" `(,.:") if "weights_only" in reason else reason
