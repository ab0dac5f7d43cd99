"""`hs.read_network`: any module, any model of transformers, any ONNX file or exported program as a network of nodes.

What moves is the input of the network: vectors of tokens, pixels, or, where the network reads numbers of tokens, the
vectors that its embedding makes of them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import evaluating, first_line
from howsmooth._util.validation import check_count, check_finite, shown, validated
from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models.forward_pass import reference_mode, temporary_hooks
from howsmooth.models.model_inputs import random_inputs
from howsmooth.network.reader import Network, read_function, run_network

_USUAL = 8
"""Tokens of the input at which a network is read when none is given."""


@validated
def read_network(model: Any, x: Tensor | None = None, *, n: int | None = None, check: bool = True) -> Network:
    """A network as nodes, read from one run of it and compared with it.

    Operations that are not known are left to automatic differentiation and named. Nothing is read in silence: outputs,
    and derivatives in a random direction, must be the network's own.

    Args:
        model: a module of torch, a model of transformers, an `OnnxModule`, or a text: the path of an ``.onnx`` or
            ``.pt2`` file, a folder or name of a model of transformers, or ``module:attribute`` of Python. A function of
            one tensor is read as well.
        x: its input: token vectors ``(n, d)`` or ``(1, n, d)``, pixels ``(1, channels, height, width)``, or numbers of
            tokens ``(n,)``, whose vectors then move. Models of transformers and torch's encoders are read at random
            input without it.
        n: the number of tokens of a random input.
        check: whether what was read is compared with the network.

    >>> print(read_network(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True).eval(), n=4))
    TransformerEncoderLayer: 4 × 8 → 4 × 8, 600 parameters
      x +...
        LayerNorm of 8...
        attention 8 → 8, 2 heads...
      x +...
        LayerNorm of 8, linear 8 → 16, relu, linear 16 → 8...
    agrees with its own output and derivative to ...
    """
    if isinstance(model, Network):
        return model
    if n is not None:
        n = check_count(n, "n", most=2**20)
    if x is not None:
        check_one(x)
    opened = open_network(model) if isinstance(model, str | Path) else getattr(model, "_orig_mod", model)
    function, start, root = as_function(opened, x, n)
    name = type(opened).__name__ if isinstance(opened, nn.Module) else getattr(opened, "__name__", "function")
    with evaluating(root) if root is not None and is_of_transformers(root) else torch.no_grad():
        return read_function(function, start, root=root, name=name, check=check)


def check_one(x: Tensor) -> None:
    """Refuse all but one finite input: tokens, a batch of one, or an image."""
    if not x.numel():
        raise InvalidInput(f"a network is read at an input, got shape {tuple(x.shape)}, which holds nothing.")
    if x.is_floating_point():
        check_finite(x, "x")
    if (x.dim() > 2 and len(x) > 1) or (x.dim() == 2 and not x.is_floating_point() and len(x) > 1):
        raise InvalidInput(
            f"a network is read at one input, got {len(x)} of shape {tuple(x.shape[1:])}: give one of them, tokens "
            "(n, d) or (1, n, d), an image (1, channels, height, width)."
        )


def names_network(source: str) -> bool:
    """Whether a text names a network of one's own: an ONNX file, an exported program, ``module:attribute``.

    >>> [names_network(source) for source in ("net.onnx", "net.pt2", "my.models:Net", "minilm", "random:bert")]
    [True, True, True, False, False]
    """
    module, colon, attribute = source.partition(":")
    own = colon and module.replace(".", "").isidentifier() and attribute.isidentifier()
    return source.endswith((".onnx", ".pt2")) or bool(own and module != "random")


def open_network(source: str | Path) -> Any:
    """The network that a text names."""
    text = str(source)
    if text.endswith(".onnx"):
        from howsmooth.network.onnx_module import read_onnx

        return read_onnx(text)
    if text.endswith(".pt2"):
        return _exported(text)
    if names_network(text):
        return attribute_of(*text.split(":"))
    from howsmooth.models.open_source import open_model

    return open_model(text, head=True).model


def attribute_of(module: str, attribute: str) -> Any:
    """A network of a module of Python by its name there, or made by a function of that name without arguments.

    The module is imported, which runs it; the folder in which the command was given counts.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{module} cannot be imported from here: {first_line(error)}.") from error
    except AttributeError as error:
        raise InvalidInput(f"{module} has no {attribute}: name a network, or a function that makes one.") from error
    except Exception as error:
        raise InvalidInput(f"{module} cannot be imported: {first_line(error)}.") from error
    if isinstance(found, type) or (callable(found) and not isinstance(found, nn.Module)):
        try:
            found = found()
        except Exception as error:
            raise InvalidInput(
                f"{module}:{attribute} cannot be called without arguments: {first_line(error)}."
            ) from error
    return found


def _exported(path: str) -> nn.Module:
    """The module of an exported program; files of torch.export hold tensors and a graph, and run no code."""
    try:
        return torch.export.load(path).module()
    except Exception as error:
        raise InvalidInput(f"{path} is no exported program that torch can load: {first_line(error)}.") from error


def is_of_transformers(model: Any) -> bool:
    """Whether this is a model of transformers, which need not be loaded to know."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(model, loaded.PreTrainedModel)


def as_function(
    model: Any, x: Tensor | None, n: int | None = None
) -> tuple[Callable[[Tensor], Any], Tensor, nn.Module | None]:
    """The network as a function of floating-point numbers, the input at which it is read, and its module."""
    if not callable(model):
        raise InvalidInput(f"a network is a module, a model of transformers, a file or a function, got {shown(model)}.")
    if is_of_transformers(model):
        return _transformers_function(model, x, n)
    root = model if isinstance(model, nn.Module) else None
    if x is None:
        x = stated_input(model, n or _USUAL)
    if x.is_floating_point():
        like = next((p for p in model.parameters() if p.is_floating_point()), None) if root is not None else None
        return _batched(model, x), x if like is None or like.dtype.itemsize < 4 else x.to(like.dtype), root
    if root is None:
        raise InvalidInput("a function is read at floating-point numbers: give vectors of tokens.")
    return _of_embedding(root, x)


def _batched(model: Any, x: Tensor) -> Callable[[Tensor], Any]:
    """A module as a function of x; torch's own layers that take the batch second see one item."""
    return lambda y: model(y)


def stated_input(model: Any, n: int) -> Tensor:
    """Random numbers of the shape that a network states: of torch's encoders n tokens, of an ONNX file its input."""
    layer = model.layers[0] if isinstance(model, nn.TransformerEncoder) else model
    dtype = (
        next((p.dtype for p in model.parameters()), torch.float32) if isinstance(model, nn.Module) else torch.float32
    )
    shape: tuple[int, ...]
    if isinstance(layer, nn.TransformerEncoderLayer):
        shape = (n, layer.self_attn.embed_dim)
    elif hasattr(model, "inputs") and len(model.inputs) == 1:  # an ONNX file states its input
        shape = tuple(1 if size is None else size for size in model.inputs[0].shape)
    else:
        raise InvalidInput(f"the input of this {type(model).__name__} is not known: give one (x), for its shape.")
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def _of_embedding(root: nn.Module, ids: Tensor) -> tuple[Callable[[Tensor], Any], Tensor, nn.Module]:
    """A module of token numbers as a function of the vectors that its embedding makes of them."""
    tables = [module for module in root.modules() if isinstance(module, nn.Embedding)]
    seen: list[nn.Embedding] = []

    def notice(module: Any, args: Any, output: Tensor) -> None:
        if args and isinstance(args[0], Tensor) and args[0].shape == ids.shape and torch.equal(args[0], ids):
            seen.append(module)

    with temporary_hooks(table.register_forward_hook(notice) for table in tables), torch.no_grad():
        run_network(root, ids)
    if not seen:
        raise UnsupportedModel(
            f"no torch.nn.Embedding of this {type(root).__name__} receives the numbers of the tokens: read it at "
            "vectors."
        )
    table = seen[0]

    def function(moved: Tensor) -> Any:
        def replaced(module: Any, args: Any, output: Tensor) -> Tensor | None:
            ours = args and isinstance(args[0], Tensor) and args[0].shape == ids.shape and torch.equal(args[0], ids)
            return moved if ours else None

        with temporary_hooks([table.register_forward_hook(replaced)]):
            return root(ids)

    return function, table(ids), root  # as autograd knows them, while it is on


def _transformers_function(
    model: Any, x: Tensor | None, n: int | None
) -> tuple[Callable[[Tensor], Any], Tensor, nn.Module]:
    """A model of transformers as a function of its word embeddings, its pixels or its sound."""
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    name = model.main_input_name
    if x is None:
        x = random_inputs(model, n or _USUAL)[name]
    if name == "input_ids":
        if not x.is_floating_point():
            ids = x if x.dim() == 2 else x[None]
            x = model.get_input_embeddings()(ids)
        name = "inputs_embeds"
    x = x[None] if x.dim() == 2 and name == "inputs_embeds" else x
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if dtype.itemsize < 4:
        raise UnsupportedModel(
            f"the model computes in {str(dtype).removeprefix('torch.')}, too coarsely to compare with: convert it with "
            "model.float()."
        )

    def function(moved: Tensor) -> Any:
        graded = torch.is_grad_enabled()
        with reference_mode(model), torch.set_grad_enabled(graded):
            return model(**{name: moved})

    return function, x.to(dtype), model
