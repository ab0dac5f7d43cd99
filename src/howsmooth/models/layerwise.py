"""A model larger than memory: one layer at a time is read from its files, and hidden states are stored on disk.

The model is built without weights. The weights of a layer are read from memory-mapped safetensors when they are needed
and freed afterwards; embedding tables stay in their files, of which only the rows of the text's tokens are read. Memory
holds one layer in float32, and the tokens of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from howsmooth._util.common import first_tensor
from howsmooth._util.process_lock import alone
from howsmooth._util.validation import check_count, validated
from howsmooth.attention import ComposedAttention, SelfAttention
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.attention_reader import read_attention
from howsmooth.models.captured_sites import CapturedSite, capture
from howsmooth.models.checkpoint_files import weight_files
from howsmooth.models.forward_pass import Inputs, changed, reference_mode, run_model, temporary_hooks
from howsmooth.models.module_names import attention_sites, no_such_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayeredModel:
    """A model folder with one layer at a time in memory.

    Args:
        folder: with config.json and safetensors files, one or several with an index.
        scratch: an existing folder for hidden states: n·d numbers for every layer.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     LlamaModel(config).save_pretrained(folder)
    ...     layers = LayeredModel(folder, scratch=folder)
    ...     layers.read({"input_ids": torch.tensor([[5, 7, 11]])})
    ...     site = layers.site(1)
    >>> site.name, tuple(site.x.shape), site.error < 1e-5
    ('layers.1.self_attn', (3, 16), True)
    """

    @validated
    @alone
    def __init__(self, folder: Path | str, scratch: Path | str):
        from transformers import AutoConfig, AutoModel

        self.folder, self.scratch = Path(folder), Path(scratch)
        if not (self.folder / "config.json").is_file():
            raise InvalidInput(f"{self.folder} holds no config.json: name the folder of a model.")
        config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            self.model: PreTrainedModel = AutoModel.from_config(
                config, trust_remote_code=False, attn_implementation="eager", dtype=torch.float32
            )
        self.model.requires_grad_(False).eval()
        self._sites = attention_sites(self.model)
        paths = [site.path.split(f".{site.layer}.")[0] + f".{site.layer}" for site in self._sites]
        self._layers = dict(zip(paths, map(self.model.get_submodule, paths), strict=True))
        self._files = self._where()
        self._fill_rest()
        self._inputs: Inputs | None = None

    def __len__(self) -> int:
        return len(self._layers)

    @alone
    def attention(self, layer: int) -> SelfAttention | ComposedAttention:
        """The attention of a layer by its weights, for bounds."""
        path = self._path(layer)
        with self._loaded(path):
            return read_attention(self.model, self._sites[layer])

    @alone
    def read(self, inputs: Inputs) -> None:
        """Run the model on one text, layer by layer, and store the input of each layer on disk."""
        with self._streaming(), reference_mode(self.model):
            run_model(self.model, inputs)
        self._inputs = inputs

    @alone
    def site(self, layer: int) -> CapturedSite:
        """The attention of a layer with the tokens it received when the model read; compared with the model's own."""
        path = self._path(layer)
        if self._inputs is None:
            raise InvalidInput("the model has read nothing yet: call read(inputs) first.")
        tokens = load_file(self._file(layer))["tokens"]
        with self._only(path, tokens):
            (site,) = capture(self.model, self._inputs, layers=[layer])
        return site

    def _path(self, layer: int) -> str:
        if not 0 <= check_count(layer, "layer", least=0) < len(self):
            raise no_such_layer(self.model, layer, len(self))
        return list(self._layers)[layer]

    def _file(self, layer: int) -> Path:
        return self.scratch / f"tokens-{layer}.safetensors"

    def _where(self) -> dict[str, tuple[Path, str]]:
        """Weight of the model → the file that holds it, and its name there."""
        there: dict[str, Path] = {}
        for path in weight_files(self.folder):
            with safe_open(path, framework="pt") as file:
                there |= dict.fromkeys(file.keys(), path)
        prefix = self.model.base_model_prefix
        files = {}
        for name in self.model.state_dict():
            stored = next((one for one in (name, f"{prefix}.{name}") if one in there), None)
            if stored is None:
                raise UnsupportedModel(
                    f"{self.folder} has no weight {name}: its files must name weights as {type(self.model).__name__} "
                    "does, or be small enough to be opened whole."
                )
            files[name] = (there[stored], stored)
        return files

    def _tensor(self, name: str, dtype: torch.dtype | None = torch.float32) -> Tensor:
        path, stored = self._files[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored)
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"{name} is stored as {tensor.dtype}: write it out in floating point first.")
        return tensor if dtype is None else _apart(tensor.shape, dtype).copy_(tensor)

    def _fill_rest(self) -> None:
        """Fill the modules outside the layers: weights in memory, tables in their files, computed buffers."""
        inside = {module for layer in self._layers.values() for module in layer.modules()}
        for path, module in list(self.model.named_modules()):
            if module in inside:
                continue
            for name, _ in list(module.named_parameters(recurse=False)):
                full = f"{path}.{name}".lstrip(".")
                if isinstance(module, nn.Embedding):
                    parent, _, attribute = path.rpartition(".")
                    setattr(self.model.get_submodule(parent), attribute, _Table(self._tensor(full, None)))
                else:
                    module._parameters[name] = nn.Parameter(self._tensor(full), requires_grad=False)
            self._fill_buffers(path, module)
        for path, layer in self._layers.items():
            if any(buffer.is_meta for buffer in layer.buffers()):
                raise UnsupportedModel(f"{path} holds numbers that are in no file: open this model whole.")

    def _fill_buffers(self, path: str, module: nn.Module) -> None:
        missing = {name: buffer.shape for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if missing and hasattr(module, "inv_freq"):  # rotary positions, computed from the configuration
            fresh: Any = type(module)(self.model.config)
            module._buffers.update(fresh._buffers)
            return
        for name, shape in missing.items():
            if f"{path}.{name}" in self._files:
                module._buffers[name] = self._tensor(f"{path}.{name}")
            elif name == "position_ids":
                module._buffers[name] = torch.arange(shape[-1]).expand(shape)
            elif name == "token_type_ids":
                module._buffers[name] = torch.zeros(shape, dtype=torch.long)
            else:
                raise UnsupportedModel(f"{path}.{name} is in no file: open this model whole.")

    def _load(self, path: str) -> None:
        layer = self._layers[path]
        layer.load_state_dict({name: self._tensor(f"{path}.{name}") for name in layer.state_dict()}, assign=True)
        layer.requires_grad_(False)

    @contextmanager
    def _loaded(self, path: str) -> Iterator[None]:
        """A layer has its weights, which are freed when the block ends."""
        self._load(path)
        try:
            yield
        finally:
            self._layers[path].to("meta")

    @contextmanager
    def _streaming(self) -> Iterator[None]:
        """Every layer has its weights while it runs, and its input is stored."""
        places = {layer: (number, path) for number, (path, layer) in enumerate(self._layers.items())}

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            number, path = places[module]
            tokens = first_tensor((*args, *kwargs.values()))
            save_file({"tokens": tokens.contiguous()}, self._file(number))
            self._load(path)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            module.to("meta")

        hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in places]
        with temporary_hooks([*hooks, *(layer.register_forward_hook(leave) for layer in places)]):
            yield

    @contextmanager
    def _only(self, chosen: str, tokens: Tensor) -> Iterator[None]:
        """One layer runs, on the given tokens; the others return their input."""

        def give(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return (tokens, *args[1:]), kwargs

        with ExitStack() as stack:
            for path, layer in self._layers.items():
                if path != chosen:
                    stack.enter_context(changed(layer, forward=lambda hidden, *args, **kwargs: hidden))
            hook = self._layers[chosen].register_forward_pre_hook(give, with_kwargs=True)
            with temporary_hooks([hook]), self._loaded(chosen):
                yield


class _Table(nn.Module):
    """An embedding that stays in its file, in its precision there; only requested rows are read."""

    def __init__(self, rows: Tensor):
        super().__init__()
        self.rows = rows
        # transformers takes device and dtype of a model from its first weight; the layers are on the meta device.
        self.place = nn.Parameter(torch.empty(0, dtype=torch.float32), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows[ids].float()


def _apart(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory that returns to the system with its tensor; malloc would be fragmented by layer after layer."""
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap(-1, size, access=ACCESS_COPY), dtype=dtype).reshape(shape)
