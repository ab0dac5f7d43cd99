"""Load a model from a folder, a GGUF file or a hub id without running code that comes with the weights.

A folder may also hold a PEFT adapter: a few matrices, and the name of their base model.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file

from howsmooth._util.common import file_digest, first_line, out_of_memory, printable
from howsmooth._util.optional_deps import need
from howsmooth._util.process_lock import alone
from howsmooth._util.validation import shown
from howsmooth.errors import HowsmoothError, InvalidInput, UnsupportedModel
from howsmooth.models.checkpoint_files import (
    INDEX,
    WEIGHTS,
    StoredTensors,
    WeightMatch,
    check_config,
    check_counts,
    check_free_memory,
    check_size,
    read_checkpoint,
    shard_names,
    verified_content,
    weight_files,
)
from howsmooth.models.model_inputs import without_panic
from howsmooth.models.named_models import NAMED, Built, built

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Name of a model's main input → its processor in transformers.
_PROCESSORS = {
    "input_ids": "AutoTokenizer",
    "pixel_values": "AutoImageProcessor",
    "input_values": "AutoFeatureExtractor",
    "input_features": "AutoFeatureExtractor",
}
_LISTED = {"ignore_mismatched_sizes": True, "output_loading_info": True}
"""Weights of another size are listed by transformers and refused by `WeightMatch`."""
_LOADING: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager", **_LISTED}
_NOT_FROM_A_FILE = ("fusion_config", "transformers_weights", "auto_map")
"""Settings of config.json by which transformers would patch itself, read other files or run other code."""
_LONGEST = 300
"""Maximum number of letters of a foreign name in an error."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class Loaded(NamedTuple):
    """A model, its processor or None, the dtypes of its stored weights, and notes."""

    model: PreTrainedModel
    processor: Any
    stored: str
    notes: tuple[str, ...] = ()


@alone
def load_pretrained(
    source: str, head: bool = False, pins: Mapping[str, str] | None = None, device_map: Any = None
) -> Loaded:
    """The model at a folder, hub id or GGUF file, in float32 with eager attention, and its processor or None.

    Args:
        source: the folder, hub id or file.
        head: with the task head that the weights were stored with, instead of without.
        pins: file → sha256 of all files that may be read; of a GGUF file, of the unpacked files.
        device_map: as in ``from_pretrained`` of transformers; None for the CPU.
    """
    path = Path(source)
    # Other languages do not take a name that is not UTF-8.
    if os.path.exists(path) and source.encode(errors="ignore").decode() != source:
        raise InvalidInput(f"the name {printable(source)} is not UTF-8, so weights in it cannot be opened: rename it.")
    with quiet(), tempfile.TemporaryDirectory(prefix="howsmooth-") as private:
        try:
            if path.suffix == ".gguf":
                unpacked = unpacked_gguf(path, pins)
                return _load(str(unpacked.folder), head, unpacked.sums, Path(private), device_map)
            return _load(source, head, pins, Path(private), device_map)
        except HowsmoothError:
            raise
        except Exception as error:
            raise _refusal(source, error) from error


def unpacked_gguf(path: Path, pins: Mapping[str, str] | None = None) -> Built:
    """A folder in the cache with the weights of a GGUF file in float32: a second to read, not half a minute.

    transformers reads more files beside a GGUF file, code included, so it gets a folder with nothing but a copy of the
    file.
    """
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}: check the path.")
    import transformers

    digest = file_digest(path)

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as lonely, quiet():
            (Path(lonely) / path.name).write_bytes(verified_content(path, {path.name: digest}))
            try:
                model, tokenizer = _from_gguf(Path(lonely) / path.name)
            except HowsmoothError:
                raise
            except ImportError as error:
                raise InvalidInput(
                    f"{path.name} needs two more packages: run `pip install gguf accelerate`."
                ) from error
            except Exception as error:  # a damaged file causes errors of any kind in the reader
                reason = first_line(error, hidden=f"{lonely}{os.sep}")
                raise InvalidInput(f"{path.name} cannot be read as a GGUF model: {reason}.") from error
            # The written weights are no longer quantised; save_pretrained reads these attributes.
            model.hf_quantizer, model.is_quantized = None, False
            del model.config.quantization_config
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    return built(f"{path.stem}-{digest[:16]}-transformers-{transformers.__version__}", build, pins)


def _from_gguf(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file in a folder of its own; all weights must be in the file."""
    import transformers

    reader = need("gguf", "a .gguf file").GGUFReader
    need("accelerate", "a .gguf file")
    where: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(path.parent, **where)
    tensors = reader(path).tensors
    check_counts(config.to_dict(), len(tensors), path.name)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    check_size(skeleton, sum(int(tensor.n_elements) for tensor in tensors))
    with torch.random.fork_rng(devices=[]):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **where, **_LOADING)
    model, report = loaded
    _match(report).check(model, model)
    return model, without_panic(lambda: transformers.AutoTokenizer.from_pretrained(path.parent, **where))


def _match(report: Mapping[str, Any]) -> WeightMatch:
    """The report of transformers on the weights it has loaded."""
    mismatched = {each[0] for each in report["mismatched_keys"]}
    return WeightMatch(set(report["missing_keys"]), set(report["unexpected_keys"]), mismatched)


def gguf_precision(path: Path) -> str:
    """The precision of a GGUF file in words, by the commonest format of its weights."""
    gguf = need("gguf", "a .gguf file")
    kind = int(gguf.GGUFReader(path).fields["general.file_type"].contents())
    name = gguf.LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    bits = next((letter for letter in name if letter.isdigit()), "")
    return f"{bits}-bit ({name}), dequantised" if "Q" in name else f"{name} (GGUF), computed in float32"


def _load(source: str, head: bool, sums: Mapping[str, str] | None, private: Path, device_map: Any) -> Loaded:
    """Read the files, build the model and put every weight in its place.

    Args:
        sums: file → sha256 of all files that may be read, which are then copied to ``private``, an empty folder, first.
    """
    import transformers

    config_file, weights, revision = _files(source)
    check_free_memory(sum(path.stat().st_size for path in weights) // 4, "the model")
    checkpoint = read_checkpoint(weights, sums)
    if sums is not None:
        for name in sums:
            if not name.endswith(".safetensors"):
                (private / name).write_bytes(verified_content(config_file.parent / name, sums))
        source, config_file = str(private), private / "config.json"
    check_config(config_file, len(checkpoint.tensors))
    config = transformers.AutoConfig.from_pretrained(config_file.parent, trust_remote_code=False)
    method = getattr(config, "quantization_config", None)
    if method is not None:
        kind = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", "unknown")
        raise UnsupportedModel(
            f"the weights of {source!r} are quantised ({kind}), which cannot be read as plain matrices: open the "
            "original in full precision, or a GGUF file of it."
        )
    for name in _NOT_FROM_A_FILE:
        if hasattr(config, name):
            delattr(config, name)
    # A config.json may name other kernels and dtypes, also in sub-configurations: these settings override it.
    config._attn_implementation, config._experts_implementation, config.dtype = "eager", None, torch.float32
    model, notes = _with_weights(config, head, checkpoint, device_map)
    processor = processor_of(source, model.main_input_name, revision)
    return Loaded(model, processor, checkpoint.precision, notes)


def _files(source: str) -> tuple[Path, list[Path], dict[str, str]]:
    """config.json and the weights of a folder or hub id, and their revision on the hub."""
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InvalidInput(f"cannot load the model {source!r}: the folder holds no config.json.")
        return folder / "config.json", weight_files(folder), {}
    from transformers.utils.hub import cached_file

    config = Path(str(cached_file(source, "config.json")))
    revision = {"revision": config.parent.name} if config.parent.parent.name == "snapshots" else {}

    def get(name: str, needed: bool = True) -> Path | None:
        file = cached_file(source, name, _raise_exceptions_for_missing_entries=needed, **revision)
        return None if file is None else Path(file)

    whole = get(WEIGHTS, needed=False)
    if whole is not None:
        return config, [whole], revision
    index = get(INDEX, needed=False)
    if index is None:
        raise InvalidInput(
            f"the model {source!r} has no safetensors weights on the hub, and pickles are never read: convert it."
        )
    return config, [file for name in shard_names(index) if (file := get(name)) is not None], revision


def _with_weights(
    config: Any, head: bool, checkpoint: StoredTensors, device_map: Any
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model of a configuration with the weights of a file, and notes on them."""
    replacement = _replacement(config)
    with torch.device("meta"):
        skeleton = _build(config, head or replacement is not None)
    check_size(skeleton, checkpoint.size)
    if not StoredTensors(skeleton.state_dict()).unwrapped().notes:  # no module of the model has the name of a wrapper
        checkpoint = checkpoint.unwrapped()
    with torch.random.fork_rng(devices=[]):
        if replacement is None:
            whole, report = _spread(skeleton, checkpoint, device_map)
            match = _match(report)
        else:
            whole = _build(config, True).float()
            replacement.apply(whole)
            match = _put_in(whole, checkpoint)
    model = whole if head or replacement is None else whole.base_model
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    return model.eval(), (*checkpoint.notes, *match.check(whole, model))


def _spread(skeleton: Any, checkpoint: StoredTensors, device_map: Any) -> Any:
    """The model with its weights on the devices of the map, and the report of transformers on them."""
    given = {"config": skeleton.config, "state_dict": dict(checkpoint.tensors), "device_map": device_map}
    try:
        return type(skeleton).from_pretrained(None, **given, **_LOADING)
    except Exception as error:
        if device_map is None or out_of_memory(error):
            raise
        reason = first_line(error).rstrip(".")
        raise InvalidInput(
            f"the model cannot be spread by device_map {shown(device_map)} ({reason}): name devices that are here, or "
            'take "auto".'
        ) from error


def _build(config: Any, head: bool) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or []
    named = getattr(transformers, str(names[0]), None) if head and names else None
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named(config)
    kind: Any = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    return kind.from_config(config, trust_remote_code=False)


def _replacement(config: Any) -> Any:
    """The replacement of the model's attention by howsmooth, where config.json names one."""
    if not any(name.startswith("howsmooth") for name in vars(config)):
        return None
    from howsmooth.nn.hosting.replacement import replacement_of  # a long import that is seldom needed

    return replacement_of(config)


def _put_in(model: Any, checkpoint: StoredTensors) -> WeightMatch:
    """Load weights by the names of ``save_pretrained``, and report on their fit."""
    slots = model.state_dict()
    fits = {name: t for name, t in checkpoint.tensors.items() if name in slots and slots[name].shape == t.shape}
    model.load_state_dict(fits, strict=False)
    # Tied weights are stored once: a tensor that shares memory with a stored weight is present.
    there = {slots[name].data_ptr() for name in fits}
    absent = {name for name, tensor in slots.items() if tensor.numel() and tensor.data_ptr() not in there}
    mismatched = (checkpoint.tensors.keys() & slots.keys()) - fits.keys()
    return WeightMatch(absent - mismatched, checkpoint.tensors.keys() - slots.keys(), mismatched)


def processor_of(source: str, reads: str, revision: Mapping[str, str] | None = None) -> Any:
    """The tokenizer, image processor or feature extractor beside the weights, or None."""
    import transformers

    if reads not in _PROCESSORS:
        return None
    try:
        kind: Any = getattr(transformers, _PROCESSORS[reads])
        processor = without_panic(lambda: kind.from_pretrained(source, trust_remote_code=False, **(revision or {})))
    except HowsmoothError:
        raise
    except (OSError, ValueError, ImportError):
        return None
    # Without files transformers makes up a tokenizer that knows special tokens only.
    empty = reads == "input_ids" and len(processor.get_vocab()) <= len(processor.all_special_tokens)
    return None if empty else processor


def _refusal(source: str, error: Exception) -> InvalidInput:
    """The error for a model that cannot be loaded, with the reason and advice."""
    name = repr(source if len(source) <= _LONGEST else f"{source[:_LONGEST]}…")
    from huggingface_hub import errors as hub

    offline = f"or choose one that needs no network: {', '.join(NAMED)}, random:bert, …"
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, hub.GatedRepoError) for cause in causes):
        return InvalidInput(f"the model {name} asks for a licence to be accepted: do so on its page and log in.")
    if any(isinstance(cause, hub.RepositoryNotFoundError | hub.HFValidationError) for cause in causes):
        return InvalidInput(
            f"there is no model {name}, neither as a folder nor on the Hugging Face hub: check the name, {offline}."
        )
    if any(isinstance(cause, ConnectionError | TimeoutError | hub.LocalEntryNotFoundError) for cause in causes):
        return InvalidInput(
            f"cannot load the model {name}: it is no folder here, and the Hugging Face hub cannot be reached; "
            f"connect to the network, {offline}."
        )
    return InvalidInput(
        f"cannot load the model {name} ({first_line(error)[:_LONGEST]}): give a folder with config.json and "
        f"safetensors weights, a hub id, {offline}."
    )


def licence_in(folder: Path) -> str:
    """The licence in the header of a model card, or "not stated"."""
    from huggingface_hub import metadata_load

    with suppress(Exception):  # no card, or one with a damaged header
        return printable(str((metadata_load(folder / "README.md") or {})["license"]))
    return "not stated"


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and messages from transformers and the hub's client while the block runs."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    levels, bars = (logging.get_verbosity(), hub.get_verbosity()), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(levels[0])
        hub.set_verbosity(levels[1])
        if bars:
            logging.enable_progress_bar()


def is_adapter(spec: str) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return os.path.isfile(Path(spec) / ADAPTER_CONFIG) and not os.path.isfile(Path(spec) / "config.json")


def load_adapted(folder: str, head: bool = False) -> Loaded:
    """The base model of an adapter, with the adapter merged into its weights.

    The base model is searched under the name in the adapter, first as a path of its own and then beside the adapter;
    the weights of both are read from safetensors only.
    """
    path = Path(folder)
    base = base_of(path)
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise InvalidInput(
            f"the adapter {printable(folder)} has no {ADAPTER_WEIGHTS}: save it with safe_serialization=True."
        )
    peft: Any = need("peft", "an adapter")
    refused: Exception | None = None
    for with_head in (True, False):  # adapters name the modules of the model they were made for, with its head or not
        try:
            loaded = load_pretrained(base, head=with_head)
            adapted = _merged(peft, loaded.model, path)
        except HowsmoothError as error:
            refused = refused or error
            continue
        whole = adapted if head or not with_head else adapted.base_model
        note = f"the adapter {printable(folder)} is merged into the weights of {printable(base)}"
        return Loaded(whole.eval(), loaded.processor, loaded.stored, (*loaded.notes, note))
    raise InvalidInput(
        f"the adapter {printable(folder)} is for the model {printable(base)}, which cannot be opened with it "
        f"({str(refused).rstrip('.')}): put it there, or correct base_model_name_or_path in {ADAPTER_CONFIG}."
    ) from refused


def _merged(peft: Any, model: Any, path: Path) -> Any:
    """The model with the adapter in its weights, once every matrix of the adapter has found its place."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = peft.PeftModel.from_pretrained(model, str(path), torch_device="cpu")
            placed = peft.get_peft_model_state_dict(adapted)
        except Exception as error:  # any error that adapter and model cause in PEFT
            raise InvalidInput(f"the adapter does not fit: {first_line(error)}") from error
    stored = load_file(path / ADAPTER_WEIGHTS)
    alike = {name: torch.equal(stored[name].float(), placed[name].float()) for name in stored if name in placed}
    misplaced = [name for name in stored if not alike.get(name)]
    if misplaced or not stored:
        first = printable(misplaced[0]) if misplaced else "an adapter without matrices"
        raise InvalidInput(f"the model has no place for {first}")
    return adapted.merge_and_unload()


def base_of(folder: Path) -> str:
    """The base model of an adapter."""
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base.strip():
        raise InvalidInput(
            f"the adapter {printable(str(folder))} does not say which model it is for: write "
            f"base_model_name_or_path into its {ADAPTER_CONFIG}."
        )
    beside = folder / base
    return str(beside) if not os.path.exists(base) and beside.is_dir() else base
