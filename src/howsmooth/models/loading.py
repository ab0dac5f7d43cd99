"""From a folder, a GGUF file or a hub id to a model in memory, without running code that comes with the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from howsmooth.errors import HowsmoothError, InvalidInput, UnsupportedModel
from howsmooth.models.cache import built_once, sha256
from howsmooth.models.named import NAMED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# What belongs to each kind of model input, as transformers calls it.
_PROCESSORS = {
    "input_ids": "AutoTokenizer",
    "pixel_values": "AutoImageProcessor",
    "input_values": "AutoFeatureExtractor",
    "input_features": "AutoFeatureExtractor",
}


class Loaded(NamedTuple):
    """A model, its processor or None, and the dtype its weights were stored in."""

    model: PreTrainedModel
    processor: Any
    stored: str


def load_pretrained(source: str, head: bool = False) -> Loaded:
    """The model at a folder, hub id or GGUF file, in float32 with eager attention, and its processor or None.

    Args:
        source: where it is.
        head: with the task head that the weights were stored with, instead of without.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        source = str(unpacked_gguf(path))
    elif path.is_dir():
        _check_folder(path)
    with quiet():
        try:
            return _from_pretrained(source, head)
        except HowsmoothError:
            raise
        except Exception as error:
            raise _refusal(source, error) from error


def unpacked_gguf(path: Path) -> Path:
    """A folder in the cache with the weights of a GGUF file in float32: a second to read, not half a minute."""
    if not path.is_file():
        raise InvalidInput(f"there is no file {path}: check the path.")
    import transformers

    def build(folder: Path) -> None:
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        with quiet():
            try:
                model: Any = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
                tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
            except ImportError as error:
                raise InvalidInput(
                    f"{path.name} needs two more packages: run `pip install gguf accelerate`."
                ) from error
            except Exception as error:  # the reader raises whatever a damaged file makes it stumble over
                raise InvalidInput(f"{path.name} cannot be read as a GGUF model: {_first_line(error)}.") from error
            # What is written is no longer quantised, and says so.
            model.hf_quantizer, model.is_quantized = None, False
            del model.config.quantization_config
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    return built_once(f"{path.stem}-{sha256(path)[:16]}-transformers-{transformers.__version__}", build)


def gguf_precision(path: Path) -> str:
    """The precision of a GGUF file in words, by the kind of rounding that most of its weights have."""
    from gguf import GGUFReader, LlamaFileType

    kind = int(GGUFReader(path).fields["general.file_type"].contents())
    name = LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    bits = next((letter for letter in name if letter.isdigit()), "")
    return f"{bits}-bit ({name}), dequantised" if "Q" in name else f"{name} (GGUF), computed in float32"


def _check_folder(folder: Path) -> None:
    """Refuse a folder without a model, and say what is missing."""
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"cannot load the model {str(folder)!r}: the folder holds no config.json.")
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise InvalidInput(
            f"cannot load the model {str(folder)!r}: its weights are there only as a pickle ({pickles[0]}), which can "
            "run code when loaded and is never read here: convert it to safetensors (model.save_pretrained does)."
        )
    raise InvalidInput(
        f"cannot load the model {str(folder)!r}: it holds no weights, put model.safetensors beside config.json."
    )


def _from_pretrained(source: str, head: bool) -> Loaded:
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    method = getattr(config, "quantization_config", None)
    if method is not None:
        kind = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", "unknown")
        raise UnsupportedModel(
            f"the weights of {source!r} are quantised ({kind}), which cannot be read as plain matrices: open the "
            "original in full precision, or a GGUF file of it."
        )
    kind = _model_class(config, head)
    model = kind.from_pretrained(
        source, use_safetensors=True, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
    )
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    processor = _processor(source, model.main_input_name)
    return Loaded(model.eval(), processor, str(getattr(config, "dtype", None) or "float32").removeprefix("torch."))


def _processor(source: str, reads: str) -> Any:
    """The tokenizer, image processor or feature extractor beside the weights, or None."""
    import transformers

    if reads not in _PROCESSORS:
        return None
    try:
        found = getattr(transformers, _PROCESSORS[reads]).from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError):
        return None
    # Without files transformers makes up a tokenizer that knows special tokens only.
    empty = reads == "input_ids" and len(found.get_vocab()) <= len(found.all_special_tokens)
    return None if empty else found


def _model_class(config: Any, head: bool) -> Any:
    import transformers

    names = getattr(config, "architectures", None) or []
    if head and names and hasattr(transformers, names[0]):
        return getattr(transformers, names[0])
    return transformers.AutoModelForCausalLM if head else transformers.AutoModel


def _refusal(source: str, error: Exception) -> InvalidInput:
    """Why nothing was loaded, in one line with what to do."""
    from huggingface_hub import errors as hub

    offline = f"or choose one that needs no network: {', '.join(NAMED)}, random:bert, …"
    causes = list(_causes(error))
    if any(isinstance(cause, hub.GatedRepoError) for cause in causes):
        return InvalidInput(f"the model {source!r} asks for a licence to be accepted: do so on its page and log in.")
    if any(isinstance(cause, hub.RepositoryNotFoundError | hub.HFValidationError) for cause in causes):
        return InvalidInput(
            f"there is no model {source!r}, neither as a folder nor on the Hugging Face hub: check the name, {offline}."
        )
    if any(isinstance(cause, ConnectionError | TimeoutError | hub.LocalEntryNotFoundError) for cause in causes):
        return InvalidInput(
            f"cannot load the model {source!r}: it is no folder here, and the Hugging Face hub cannot be reached; "
            f"connect to the network, {offline}."
        )
    return InvalidInput(
        f"cannot load the model {source!r} ({_first_line(error)}): give a folder with config.json and safetensors "
        f"weights, a hub id, {offline}."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")


def licence_in(folder: Path) -> str:
    """The licence that a model card states in its header, or "not stated"."""
    card = folder / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.is_file() else []
    for line in lines[1:] if lines[:1] == ["---"] else []:
        if line == "---":
            break
        if line.startswith("license:"):
            return line.removeprefix("license:").strip().strip("\"'")
    return "not stated"


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no remarks from transformers and the hub's client while loading."""
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
