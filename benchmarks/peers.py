"""Other ways to the same number, each as good as we could write it.

`FuncProducts` gives J v and Jᵀ u of any function through torch.func; power iteration, scipy's ARPACK and the dense
Jacobian build on it.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor
from torch.func import jacrev, jvp, linearize, vjp

Map = Callable[..., Tensor]


@dataclass
class FuncProducts:
    """J v and Jᵀ u of ``f`` at ``primals`` by torch.func, with their number counted.

    `FuncProducts.fresh` calls `torch.func.jvp` and `torch.func.vjp` for every product, as power iteration is usually
    written; f runs again each time. `FuncProducts.traced` is the strongest form: f is traced once by
    `torch.func.linearize`, and one `torch.func.vjp` closure is used again and again.

    >>> J = FuncProducts.traced(torch.sin, torch.zeros(3))
    >>> J.gram(torch.ones(3))
    (tensor([1., 1., 1.]),)
    """

    push: Callable[..., Tensor]
    pull: Callable[[Tensor], tuple[Tensor, ...]]
    count: int = 0

    @classmethod
    def fresh(cls, f: Map, *primals: Tensor) -> FuncProducts:
        return cls(lambda *tangents: jvp(f, primals, tangents)[1], lambda u: vjp(f, *primals)[1](u))

    @classmethod
    def traced(cls, f: Map, *primals: Tensor) -> FuncProducts:
        with warnings.catch_warnings():  # constant folding inside linearize warns about its own graph
            warnings.simplefilter("ignore")
            push = linearize(f, *primals)[1]
        pull = vjp(f, *primals)[1]
        return cls(push, pull)

    def matvec(self, *v: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():  # otherwise torch.func records a second graph for every product
            return self.push(*v)

    def rmatvec(self, u: Tensor) -> tuple[Tensor, ...]:
        self.count += 1
        with torch.no_grad():
            return self.pull(u)

    def gram(self, *v: Tensor) -> tuple[Tensor, ...]:
        """JᵀJ v."""
        return self.rmatvec(self.matvec(*v))


@dataclass(frozen=True)
class Run:
    """What a peer found: the value, the products it took, the seconds, and whether it got there."""

    value: float
    products: int
    seconds: float
    reached: bool = True


def power_iteration(
    products: FuncProducts,
    like: Tensor,
    target: float | None = None,
    rtol: float = 1e-3,
    seed: int = 0,
    most_iterations: int = 300,
    most_seconds: float = math.inf,
) -> Run:
    """‖J‖ by v ← JᵀJ v.

    With a ``target`` an oracle stops it as soon as it is within ``rtol`` of the truth; nobody has that in practice.
    Without, it stops on the residual ‖Jᵀu − σv‖ ≤ rtol·σ, u = J v/σ: the rule of `howsmooth.norms.lanczos` for
    its vectors.

    The estimate is ‖Jᵀu‖: of all that one iteration offers the closest to σ_max, which it never passes, as
    ‖J v‖ ≤ ‖JᵀJ v‖^{1/2} ≤ ‖Jᵀu‖ ≤ σ_max.
    """
    started = time.perf_counter()
    v = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)
    v = v / torch.linalg.vector_norm(v)
    estimate, reached = 0.0, False
    while not reached and products.count < 2 * most_iterations and time.perf_counter() - started < most_seconds:
        u = products.matvec(v)
        length = torch.linalg.vector_norm(u)
        (w,) = products.rmatvec(u / length)
        norm = torch.linalg.vector_norm(w)
        estimate = float(norm)
        if target is None:
            reached = bool(torch.linalg.vector_norm(w - length * v) <= rtol * length)
        else:
            reached = abs(estimate - target) <= rtol * target
        v = w / norm
    return Run(estimate, products.count, time.perf_counter() - started, reached)


def arpack(products: FuncProducts, like: Tensor, out_size: int, rtol: float = 1e-3, seed: int = 0) -> Run:
    """‖J‖ by `scipy.sparse.linalg.svds` with k = 1 (implicitly restarted Lanczos on JᵀJ or JJᵀ).

    svds squares its tolerance before it goes to ARPACK, so ``rtol`` for the eigenvalue σ² is tol = √rtol.
    """
    started = time.perf_counter()

    def forward(v: np.ndarray) -> np.ndarray:
        return products.matvec(torch.from_numpy(v.reshape(like.shape))).reshape(-1).numpy()

    def backward(u: np.ndarray) -> np.ndarray:
        return products.rmatvec(torch.from_numpy(u.reshape(*like.shape[:-1], -1)))[0].reshape(-1).numpy()

    operator = LinearOperator(
        (out_size, like.numel()), forward, backward, dtype=np.dtype(str(like.dtype).removeprefix("torch."))
    )
    rng = np.random.default_rng(seed)
    start = rng.standard_normal(min(operator.shape)).astype(operator.dtype)
    value = svds(operator, k=1, tol=math.sqrt(rtol), v0=start, return_singular_vectors=False)[0]
    return Run(float(value), products.count, time.perf_counter() - started)


def dense(f: Map, x: Tensor) -> Run:
    """‖J‖ from the whole Jacobian by `torch.func.jacrev` and all its singular values."""
    started = time.perf_counter()
    with torch.no_grad():
        jacobian = jacrev(f)(x).reshape(-1, x.numel())
        value = float(torch.linalg.matrix_norm(jacobian, 2))
    return Run(value, len(jacobian), time.perf_counter() - started)
