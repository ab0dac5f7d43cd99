r"""Low precision of activations: how rounding noise grows through the layers of a model.

Let h_l be what enters layer l in float32 and h̃_l the same when the whole model computes in bfloat16 or float16. Each
layer adds an error of its own,

    ε_l = (layer l in low precision at ρ(h_l)) − (layer l in float32 at ρ(h_l)),     ρ: rounded to the low precision,

and carries on the error it receives by its Jacobian J_l at h_l. So the prediction needs one run in low precision in
which every layer is given the exact input, and products with the Jacobians of the layers:

    e_{l+1} = J_l e_l + ε_l,      and of source s alone      e^s_{l+1} = J_l e^s_l, e^s_{s+1} = ε_s.

It is compared with what really happens, h̃_l − h_l. The shares |e^s|² say which source dominates at each layer.
On a CPU torch runs bfloat16 and float16 matrix products by its own kernels, which may add up in float32 inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.annotations import PlainText
from howsmooth._util.common import first_tensor
from howsmooth._util.process_lock import alone
from howsmooth._util.torch_globals import exact_autograd
from howsmooth._util.validation import Count, Device, Seed, check_one_of, validated
from howsmooth.errors import InvalidInput
from howsmooth.models import OpenModel, Targets, Window, alice, open_model
from howsmooth.models.forward_pass import Call, reference_mode, run_model, temporary_hooks
from howsmooth.rounding.rounded_model import check_finite_weights, check_text_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[str], None]


@dataclass(frozen=True)
class ActivationNoise:
    """The noise behind every layer, all norms over the whole window, ``(layers,)``.

    Attributes:
        size: ‖h‖ of the exact stream behind the layer.
        actual: ‖h̃ − h‖ there. predicted: ‖e‖. local: ‖ε‖, what the layer adds by itself.
        actual_token, predicted_token: the same of the median token: a few tokens with huge activations carry the norms.
        cosine: between e and h̃ − h. Behind the first layer the two runs round different numbers, so that only noise
            that is carried on agrees in direction; the sizes are what is predicted.
        share: of Σ_s |e^s|², the largest of one source behind the layer.
        source: that source: −1 the embedding, else a layer.
    """

    size: Tensor
    actual: Tensor
    predicted: Tensor
    local: Tensor
    actual_token: Tensor
    predicted_token: Tensor
    cosine: Tensor
    share: Tensor
    source: Tensor

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer."""
        columns = {name: column.tolist() for name, column in vars(self).items()}
        rows = zip(*columns.values(), strict=True)
        return [{"layer": layer, **dict(zip(columns, row, strict=True))} for layer, row in enumerate(rows)]


@validated
def noise(
    model: str | OpenModel,
    text: PlainText | None = None,
    *,
    precision: str = "bf16",
    length: Count = 64,
    seed: Seed = 0,
    device: Device | None = None,
    progress: Step | None = None,
) -> ActivationNoise:
    """The growth of rounding noise through the layers of a model in one window of a text.

    Args:
        model: as `howsmooth.models.open_model` takes it.
        text: None for Alice in Wonderland.
        precision: bf16 or fp16.
        length, seed: of the window.
        progress: called with a label when a step begins.

    >>> len(noise("random:llama[layers=2,width=32]", length=12).rows())
    2
    """
    check_one_of(precision, DTYPES, "the precision")
    opened = open_model(model, device=device) if isinstance(model, str) else model.on(device)
    check_text_model(opened.model)
    [window] = opened.windows(alice() if text is None else text, length, 1, seed)
    return rounding_noise(opened, window, precision, progress)


@validated
def rounding_noise(
    opened: OpenModel, window: Window, dtype: str = "bf16", progress: Step | None = None
) -> ActivationNoise:
    """The growth of rounding noise in one window, predicted and actual.

    >>> from howsmooth.models import open_model
    >>> opened = open_model("random:llama[layers=2,width=32]")
    >>> [window] = opened.windows("Down the rabbit hole", length=12)
    >>> noise = rounding_noise(opened, window)
    >>> bool((noise.predicted / noise.actual - 1).abs().max() < 0.1)
    True
    """
    check_one_of(dtype, DTYPES, "dtype")
    check_finite_weights(opened.model)
    tell = progress or (lambda label: None)
    targets = Targets(opened, window)
    functions = [targets.get("layer", layer) for layer in range(targets.layers)]
    exact = [x for _, x in functions]
    with torch.no_grad():
        exact.append(functions[-1][0](exact[-1]))
    tell("in low precision")
    low: Any = copy.deepcopy(opened.model)
    low.to(DTYPES[dtype])
    names = {module: name for name, module in opened.model.named_modules()}
    paths = [names[module] for module in targets.modules]
    free = _stream(low, paths, opened.inputs(window), None)
    forced = _stream(low, paths, opened.inputs(window), exact)
    _check_finite(opened.name, dtype, free, forced)
    errors = (free[0].double() - exact[0].double())[None]  # of each source, at the layer that is reached
    rows = []
    for layer, (function, x) in enumerate(functions):
        tell(f"layer {layer + 1} of {len(functions)}")
        with torch.no_grad():
            rounded = x.to(DTYPES[dtype]).to(x.dtype)
            local = forced[layer + 1].double() - function(rounded).double()
        errors = torch.cat([_carried(function, x, errors.to(x.dtype)).double(), local[None]])
        rows.append(_row(exact[layer + 1].double(), free[layer + 1].double(), errors))
    return ActivationNoise(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _check_finite(name: str, dtype: str, free: list[Tensor], forced: list[Tensor]) -> None:
    """Refuse a model that leaves the range of the dtype, naming where: there is no noise to speak of."""
    for depth, states in enumerate(zip(free, forced, strict=True)):
        if not all(bool(state.isfinite().all()) for state in states):
            where = "the embedding" if depth == 0 else f"layer {depth - 1}"
            other = "" if dtype == "bf16" else "; bf16 has the range of float32"
            raise InvalidInput(f"{where} of {name} leaves the range of {dtype} and gives NaN or infinity{other}.")


def _carried(function: Any, x: Tensor, errors: Tensor) -> Tensor:
    """J e for every error, in one pass of forward mode."""
    with exact_autograd(x.device):
        return torch.func.vmap(lambda error: torch.func.jvp(function, (x,), (error,))[1])(errors).detach()


def _row(exact: Tensor, free: Tensor, errors: Tensor) -> tuple[Tensor, ...]:
    """The numbers behind one layer, from the exact stream, the one in low precision and the errors of all sources."""
    predicted, actual = errors.sum(0), free - exact
    energies = errors.square().sum((1, 2))
    return (
        *(stream.norm() for stream in (exact, actual, predicted, errors[-1])),
        *(stream.norm(dim=-1).median() for stream in (actual, predicted)),
        nn.functional.cosine_similarity(actual.flatten(), predicted.flatten(), dim=0),
        energies.max() / energies.sum(),
        energies.argmax() - 1,
    )


@alone
def _stream(model: Any, paths: list[str], inputs: dict[str, Tensor], given: list[Tensor] | None) -> list[Tensor]:
    """The input of the first layer and the output of each layer, ``(n, d)``, with given inputs of layers if any."""
    inputs_of, outputs_of = dict[int, Tensor](), dict[int, Tensor]()

    def on_entry(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = Call.of(args, kwargs).hidden
        inputs_of[layer] = hidden[0]
        if given is None:
            return None
        exact = given[layer][None].to(hidden.dtype)
        return ((exact, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": exact})

    def on_exit(layer: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs_of[layer] = first_tensor(output)[0]

    layers, hooks = [model.get_submodule(path) for path in paths], list[Any]()
    for layer, module in enumerate(layers):
        hooks.append(module.register_forward_pre_hook(partial(on_entry, layer), with_kwargs=True))
        hooks.append(module.register_forward_hook(partial(on_exit, layer)))
    with temporary_hooks(hooks), reference_mode(model):
        run_model(model, inputs)
    return [inputs_of[0], *(outputs_of[layer] for layer in range(len(layers)))]
