"""Normalizing flows made of invertible blocks, for the `normflows` library (Stimper et al. 2023).

A flow takes latent z to data x. Its densities need the way back, x ↦ z, and that is where the cheap direction of a
residual block belongs: ``inverse`` here is y = x + f(x), one evaluation, and ``forward``, for samples, the fixed point.
Turn a flow round with ``normflows.flows.Reverse``.
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
        module: what takes data to latent variables: ``forward``, ``inverse`` and ``log_det``.
        options: of its ``log_det``: method, samples, tolerance, generator.

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
        """From data to latent variables, and the log-determinant of that."""
        if isinstance(self.module, InvertibleTransformer):
            z, log_det = self.module.forward_and_log_det(x, **self.options)
            return z, log_det.value
        return self.module(x), self.module.log_det(x, **self.options).value  # type: ignore[operator]

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """From latent variables to data, and the log-determinant of that."""
        x = self.module.inverse(z).x  # type: ignore[operator]
        return x, -self.module.log_det(x, **self.options).value  # type: ignore[operator]


def sequence_flow(transformer: InvertibleTransformer, n: int, width: int, **options: Any) -> normflows.NormalizingFlow:
    """A density on sequences of n tokens: a Gaussian with trainable mean and scale behind an invertible transformer.

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
