"""The weights of a model folder: their files, names and dtypes, and whether each has its place in the model.

Nothing is ever unpickled. transformers fills missing weights with random numbers. Here a weight that takes part in a
measurement must come from the file; a missing weight that takes no part (a pooler behind the last hidden state, the
decoder when only the encoder is used) is set to zero, so that a model is the same each time it is opened. Sizes in a
configuration must agree with its weights and fit into free memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor, nn

from howsmooth._util.common import first_line, printable
from howsmooth.errors import InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, DataParallel, FSDP and activation checkpointing insert."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 3
_LAYERS = re.compile(r"(^|_)(n_?layers?|num_\w*layers|\w+_layers|depths?|num_\w*blocks|num_labels)$")
_ORDINARY = 1000
"""Larger counts are compared with the number of tensors."""
_LONGEST = 2**20
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class StoredTensors:
    """Tensors by name, with notes on changes of their names."""

    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def precision(self) -> str:
        """The dtypes of the stored weights, the commonest first.

        >>> StoredTensors({"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(1).half()}).precision
        'float32 and float16'
        """
        counts = Counter[str]()
        for tensor in self.tensors.values():
            if tensor.is_floating_point():
                counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        return " and ".join(name for name, _ in counts.most_common()) or "float32"

    def unwrapped(self) -> StoredTensors:
        """The same tensors without the names of wrappers, anywhere in a name, with a note about it.

        >>> StoredTensors({"module.h.0._orig_mod.weight": torch.zeros(1)}).unwrapped().tensors.keys()
        dict_keys(['h.0.weight'])
        """
        removed = {word for name in self.tensors for word in name.split(".") if word in _WRAPPERS}
        if not removed:
            return self
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            plain = ".".join(word for word in name.split(".") if word not in _WRAPPERS)
            if plain in tensors:
                raise InvalidInput(
                    f"the weights hold {printable(plain)!r} twice, with and without the name of a wrapper: save the "
                    "model itself, not what torch.compile or DataParallel made of it."
                )
            tensors[plain] = tensor
        words = " and ".join(f"{word!r}" for word in sorted(removed))
        return StoredTensors(tensors, (*self.notes, f"{words} was taken out of the names of {len(tensors)} weights"))


def read_checkpoint(files: list[Path], sums: Mapping[str, str] | None = None) -> StoredTensors:
    """The tensors of all files; with ``sums``, only content with the given sha256 is used."""
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            if sums is None:
                # Copies: a file that is changed or cut short later must not change the model.
                stored = {name: tensor.clone() for name, tensor in load_file(path).items()}
            else:
                stored = load(verified_content(path, sums))
        except (SafetensorError, ValueError, RuntimeError, OverflowError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(
                f"cannot load the model {str(path.parent)!r}: {path.name} is not whole safetensors "
                f"({first_line(error)}): get the file again."
            ) from error
        tensors |= stored
    _refuse_integers(tensors)
    return StoredTensors(tensors)


def verified_content(path: Path, sums: Mapping[str, str]) -> bytes:
    """The bytes of a file with the expected sha256; read once, so that they cannot change in between."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != sums.get(path.name):
        raise InvalidInput(f"{path.name} is not the expected file (sha256 {digest[:12]}…): install or build it anew.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one file, or the files in its index, which lie beside it."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        files = [folder / name for name in shard_names(folder / INDEX)]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise InvalidInput(
                f"cannot load the model {str(folder)!r}: {len(missing)} of the {len(files)} files that its index names "
                f"are missing, first {printable(missing[0])!r}."
            )
        return files
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise InvalidInput(
            f"cannot load the model {str(folder)!r}: its weights are there only as a pickle ({printable(pickles[0])}), "
            "which can run code when loaded and is never read here: convert it to safetensors (model.save_pretrained "
            "does)."
        )
    raise InvalidInput(f"cannot load the model {str(folder)!r}: it holds no weights, put {WEIGHTS} beside config.json.")


def shard_names(index: Path) -> list[str]:
    """The files in an index: bare names of safetensors, so that it cannot lead to a pickle or out of its folder."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        shards = sorted(set(names))
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidInput(f"{index} is damaged: it is not JSON with a weight_map of file names.") from error
    for name in shards:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise InvalidInput(
                f"the index {index.name} names the file {printable(str(name))[:100]!r}, but weights are read only from "
                "safetensors files beside it."
            )
    if not shards:
        raise InvalidInput(f"{index} is damaged: it names no files.")
    return shards


def _refuse_integers(tensors: Mapping[str, Tensor]) -> None:
    """Refuse integers in place of weights: they are quantised, and their scales are unknown here."""
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        weight = last == "weight" or (last == "bias" and f"{module}.weight" in tensors)
        if weight and not tensor.is_floating_point():
            raise UnsupportedModel(
                f"{printable(name)} is stored as {str(tensor.dtype).removeprefix('torch.')}: quantised weights must be "
                "written out in floating point first."
            )
    if tensors and all(t.dtype not in _FLOATS for t in tensors.values()):
        raise UnsupportedModel("the weights hold no floating-point numbers: write them out in floating point first.")


@dataclass(frozen=True)
class WeightMatch:
    """The fit of a file to a model: names without a tensor, tensors without a place, tensors of another shape."""

    missing: Set[str]
    unexpected: Set[str]
    mismatched: Set[str]

    def check(self, whole: nn.Module, measured: PreTrainedModel) -> tuple[str, ...]:
        """Refuse weights of another model, set missing unused weights to zero, and return notes for the reader.

        Args:
            whole: the loaded model.
            measured: the part of it that is measured.
        """
        used = _used(whole, measured)
        lacking = sorted((self.missing | self.mismatched) & used)
        if lacking:
            absent, other = self.missing & used, self.mismatched & used
            causes = [f"{len(absent)} are missing"] * bool(absent) + [f"{len(other)} have another shape"] * bool(other)
            extra = sorted(self.unexpected)
            beside = f", while {len(extra)} of the file fit nowhere, first {_listed(extra)}" if extra else ""
            raise InvalidInput(
                f"the weights do not fit the model: of {len(used)} tensors {' and '.join(causes)}, first "
                f"{_listed(lacking)}{beside}: give the weights that belong to config.json."
            )
        denied = sorted(name for name in self.unexpected if _inside_a_layer(name, whole))
        if denied:
            raise InvalidInput(
                f"the weights do not fit the model: the file holds {len(denied)} tensors of layers that have no place "
                f"for them, first {_listed(denied)}: give the config.json that belongs to the weights."
            )
        tensors = dict(_tensors(whole))
        for name, tensor in tensors.items():
            if name in used and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise InvalidInput(f"the weight {printable(name)} holds NaN or infinity: give weights that are finite.")
        zeroed = sorted((self.missing | self.mismatched) - used)
        with torch.no_grad():
            for name in zeroed:
                tensors[name].zero_()
        notes = []
        if zeroed:
            notes.append(f"{len(zeroed)} weights that nothing measured uses are not in the file ({_listed(zeroed)})")
        if self.unexpected:
            names = sorted(self.unexpected)
            notes.append(f"{len(names)} tensors of the file are not used by this model ({_listed(names)})")
        return tuple(notes)


def _used(whole: nn.Module, measured: PreTrainedModel) -> set[str]:
    """The names of the tensors in the measured part, without its pooler, which comes after it."""
    poolers = [module for path, module in measured.named_modules() if "pooler" in path.split(".")[-1]]
    after = {id(tensor) for pooler in poolers for _, tensor in _tensors(pooler)}
    used = {id(tensor) for _, tensor in _tensors(measured)} - after
    return {name for name, tensor in _tensors(whole) if id(tensor) in used}


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and stored buffers under all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    saved = module.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in module.named_buffers(remove_duplicate=False) if name in saved)


def _inside_a_layer(name: str, whole: nn.Module) -> bool:
    """Whether a tensor belongs to a module of the model that has weights of its own, such as a linear one.

    The file then describes another model: biases where config.json has none, an adapter, scales of quantised weights.
    """
    parts = name.split(".")
    prefix = getattr(whole, "base_model_prefix", "")
    for path in (parts, parts[1:] if parts[0] == prefix else [], [prefix, *parts]):
        module: nn.Module | None = whole
        for step in path[:-1]:
            module = getattr(module, step, None)
            if not isinstance(module, nn.Module):
                break
            if module._parameters and not module._modules:
                return True
    return False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name)[:100] for name in names[:_SHOWN]) + more


def check_config(path: Path, tensors: int) -> None:
    """Refuse a config.json whose counts of layers and labels do not agree with the number of tensors in the file.

    Layers are Python objects and labels entries of a table: a thousand million of them would fill the memory before any
    weight is read.
    """
    try:
        if path.stat().st_size > 64 * _LONGEST:
            raise ValueError("larger than 64 MB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is not a configuration in JSON ({printable(str(error))[:100]}): get the file again."
        ) from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} is not a configuration: it must hold one JSON object.")
    check_counts(content, tensors, path.name)


def check_counts(content: dict[str, Any], tensors: int, name: str) -> None:
    """Refuse counts of layers and labels above the number of tensors; every layer has at least one."""
    for key, value in _numbers(content):
        if _LAYERS.search(key) and value > max(_ORDINARY, tensors):
            raise InvalidInput(
                f"{name} sets {printable(key)} to {value:g}, but the weights are {tensors} tensors: give the "
                "configuration that belongs to them."
            )


def _numbers(content: Any) -> Iterator[tuple[str, float]]:
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(key, inner) for inner in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, float(min(value, 1e300))


def check_size(skeleton: nn.Module, stored: int) -> None:
    """Refuse a model with far more parameters than the file; ``skeleton`` is the model on the meta device."""
    described = sum(t.numel() for t in {id(t): t for t in (*skeleton.parameters(), *skeleton.buffers())}.values())
    # A file may lack poolers, an unused decoder and computed tables of positions.
    if described > 4 * stored + 2**24:
        raise InvalidInput(
            f"config.json describes a model of {described:.3g} numbers, but the weights hold {stored:.3g}: give the "
            "config.json that belongs to them."
        )


def check_free_memory(numbers: int, what: str) -> None:
    """Refuse a number of float32 values that does not fit into free memory."""
    free = free_bytes()
    if 4 * numbers > free:
        raise InvalidInput(
            f"{what} has about {numbers:.2g} parameters, {4 * numbers / 2**30:.3g} GiB, but {free / 2**30:.3g} GiB of "
            "memory are free: ask for fewer layers or a smaller width, or free some memory."
        )


def free_bytes() -> int:
    """Free memory: the minimum over the machine, the control group and the limit of this process."""
    free = []
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):
            free.append(int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")))
    with suppress(ImportError, OSError, ValueError):
        import resource

        maximum = resource.getrlimit(resource.RLIMIT_AS)[0]
        if maximum != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            free.append(maximum - pages * resource.getpagesize())
    return max(0, min(free, default=2**33))
