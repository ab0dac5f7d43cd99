"""Normalizing flows made of invertible blocks, for the `normflows` library (Stimper et al. 2023).

A flow maps latent z to data x. Its densities need the direction x ↦ z, for which the cheap direction of a residual
block is used: ``inverse`` here is y = x + f(x), one evaluation, and ``forward``, for samples, the fixed point.
``normflows.flows.Reverse`` exchanges the two.
"""

from __future__ import annotations

from typing import Any

import normflows
from torch import Tensor, nn

from howsmooth._util.validation import check_count, check_weights
from howsmooth.errors import InvalidInput
from howsmooth.nn.invertible.transformer import InvertibleTransformer


class InvertibleFlow(normflows.flows.Flow):
    """An `InvertibleTransformer` or `InvertibleResidual` as a flow of `normflows`.

    Args:
        module: map from data to latent variables with ``forward``, ``inverse`` and ``log_det``.
        options: options of its ``log_det``: method, samples, tolerance, generator.

    >>> import torch
    >>> flow = InvertibleFlow(InvertibleTransformer(2, mask="causal").double().eval())
    >>> z, log_det = flow.inverse(torch.zeros(5, 3, 2, dtype=torch.float64))
    >>> x, back = flow.forward(z.detach())
    >>> bool(x.abs().max() < 1e-9), bool((log_det + back).abs().max() < 1e-9)
    (True, True)
    """

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__()
        for name in ("inverse", "log_det"):
            if not callable(getattr(module, name, None)):
                raise InvalidInput(f"a flow needs a module with {name}, and {type(module).__name__} has none.")
        self.module, self.options = module, options

    def inverse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map data to latent variables, and return the log-determinant too."""
        if isinstance(self.module, InvertibleTransformer):
            z, log_det = self.module.forward_and_log_det(x, **self.options)
            return z, log_det.value
        return self.module(x), self.module.log_det(x, **self.options).value  # type: ignore[operator]

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Map latent variables to data, and return the log-determinant too."""
        x = self.module.inverse(z).x  # type: ignore[operator]
        return x, -self.module.log_det(x, **self.options).value  # type: ignore[operator]


def sequence_flow(transformer: InvertibleTransformer, n: int, width: int, **options: Any) -> normflows.NormalizingFlow:
    """Make a density on sequences of n tokens: a trainable diagonal Gaussian behind an invertible transformer.

    Its ``log_prob(x)`` is exact when the transformer is causal. Train on ``-flow.log_prob(x).mean()``; normflows' own
    ``forward_kld`` is the same number added up in float32.

    >>> import torch
    >>> flow = sequence_flow(InvertibleTransformer(1, mask="causal", tokens=3), n=3, width=1).eval()
    >>> flow.log_prob(torch.zeros(2, 3, 1)).shape
    torch.Size([2])
    """
    check_weights(check_count(n, "n") * check_count(width, "width"), "the distribution of a sequence")
    parameter = next(transformer.parameters())
    base = normflows.distributions.DiagGaussian((n, width)).to(parameter)
    return normflows.NormalizingFlow(base, [InvertibleFlow(transformer, **options)])
