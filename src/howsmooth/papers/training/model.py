"""The character language model: residual blocks with any attention, embeddings and a head.

There are three kinds of blocks, with different guarantees:

* **pre-norm**: x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)), the usual transformer. After its LayerNorm a
  token has at most the norm √d·max|γ| + |β|, on which attention that is not Lipschitz has a bound too.
* **post-norm**: LayerNorm(x + attention(x)), then LayerNorm(x + MLP(x)), the transformer of 2017, which is harder to
  train when it is deep.
* **contractive**: x + f(x) with Lip(f) ≤ c < 1 for both the attention and the MLP, so that every block can be inverted.
  Such a branch cannot contain LayerNorm, whose constant is max|γ|/√ε (316 for γ = 1, ε = 1e-5). ActNorm, an invertible
  affine map of every feature, precedes each branch. Each branch contracts in its own norm, which is enough: x + f(x) is
  a homeomorphism when f contracts in *some* norm.

Embeddings, the last LayerNorm and the head are the same for all. Positions are learned, initialised by sinusoids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth._util.common import evaluating
from howsmooth._util.validation import check_count, validated
from howsmooth.attention.masks import Causal, LogitBias, Maps, Sight, SlidingWindow
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn import AttentionLayer, ContractiveL2Attention, ContractiveMLP, L2Attention
from howsmooth.nn.invertible.transformer import ActNorm
from howsmooth.nn.layers.l2_layers import UntiedL2Attention
from howsmooth.nn.layers.registry import LAYER_KINDS
from howsmooth.papers.training.training_settings import TrainingSettings
from howsmooth.sets import Normalised

_MLP_FACTOR = 4
_EMBEDDING_STD = 0.1


class WithinDocuments(LogitBias):
    """Token i sees the tokens j ≤ i of its own document, or the last ``window`` of them.

    Of two tokens that see the same one, the later sees the earlier, as under a causal window.

    Args:
        seen: ``(batch, n, n)`` booleans, see `text_batches.TextBatch.seen`. window: None for all n.
    """

    sight: Sight = "ordered"
    hides_only = keeps_self = True

    def __init__(self, seen: Tensor, window: int | None = None):
        super().__init__()
        self.past = SlidingWindow(window or seen.shape[-1])
        self.items = len(seen)
        self.seen: Tensor
        self.register_buffer("seen", seen.triu(1 - self.past.window), persistent=False)

    def key_range(self, start: int, stop: int, n: int) -> tuple[int, int]:
        return self.past.key_range(start, stop, n)

    def most_seen(self, n: float) -> float:
        return self.past.most_seen(n)

    def block(self, rows: slice, cols: slice, maps: Maps) -> Tensor | None:
        return maps.hide(self.seen[maps.batch, rows, cols])


class LayerNormBlock(nn.Module):
    """Attention and MLP with LayerNorm, before each branch or after the sum, without a Lipschitz guarantee."""

    def __init__(self, settings: TrainingSettings):
        super().__init__()
        width = settings.width
        self.attention = make_attention(settings)
        self.mlp = nn.Sequential(
            nn.Linear(width, _MLP_FACTOR * width), nn.GELU(), nn.Linear(_MLP_FACTOR * width, width)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.dropout = nn.Dropout(settings.dropout)
        self.norm_first = settings.block_kind == "pre-norm"

    def forward(self, x: Tensor, mask: LogitBias) -> Tensor:
        branches: list[Callable[[Tensor], Tensor]] = [lambda y: self.attention(y, attn_mask=mask)[0], self.mlp]
        for branch, norm in zip(branches, self.norms, strict=True):
            x = x + self.dropout(branch(norm(x))) if self.norm_first else norm(x + self.dropout(branch(x)))
        return x

    def attention_bound(self, n: int, mask: LogitBias) -> float:
        """Bound the Lipschitz constant of the attention on n tokens: on all inputs, or on the image of LayerNorm."""
        norm = self.norms[0]
        assert isinstance(norm, nn.LayerNorm)
        try:
            return float(self.attention.lipschitz_bound(n, mask=mask).detach())
        except DoesNotApply:
            if not self.norm_first:
                raise
            radius = Normalised.layer_norm(norm.weight.detach(), norm.bias.detach()).radius
            return float(self.attention.lipschitz_bound(n, radius=radius, mask=mask).detach())


class ContractiveBlock(nn.Module):
    """ActNorm, x + attention(x), ActNorm, x + MLP(x); both branches have a Lipschitz constant of at most c < 1."""

    def __init__(self, settings: TrainingSettings):
        super().__init__()
        if settings.dropout:
            raise InvalidInput("dropout breaks the Lipschitz bound of contractive blocks: leave it out.")
        width = settings.width
        self.attention = make_attention(settings)
        self.mlp = ContractiveMLP(width, _MLP_FACTOR * width, coefficient=settings.coefficient)
        self.actnorms = nn.ModuleList([ActNorm(width), ActNorm(width)])
        self.norm = LAYER_KINDS[settings.attention].options["norm"]

    def forward(self, x: Tensor, mask: LogitBias) -> Tensor:
        x = self.actnorms[0](x)
        x = x + self.attention(x, attn_mask=mask)[0]
        x = self.actnorms[1](x)
        return x + self.mlp(x)

    def attention_bound(self, n: int, mask: LogitBias) -> float:
        """Bound the Lipschitz constant of the attention branch on n tokens, in the norm of its contraction."""
        return float(self.attention.lipschitz_bound(n, norm=self.norm, mask=mask).detach())


class CharacterModel(nn.Module):
    """Logits of the next character for every token.

    >>> model = CharacterModel(TrainingSettings(attention="l2", width=16, heads=2, length=8), symbols=5)
    >>> model(torch.zeros(3, 8, dtype=torch.int64)).shape
    torch.Size([3, 8, 5])
    """

    @validated
    def __init__(self, settings: TrainingSettings, symbols: int):
        super().__init__()
        settings.check_memory(check_count(symbols, "symbols"))
        self.settings = settings
        self.tokens = nn.Embedding(symbols, settings.width)
        self.places = nn.Embedding(settings.length, settings.width)
        nn.init.normal_(self.tokens.weight, std=_EMBEDDING_STD)
        with torch.no_grad():
            self.places.weight.copy_(_EMBEDDING_STD * 2**0.5 * sinusoids(settings.length, settings.width))
        block = ContractiveBlock if settings.block_kind == "contractive" else LayerNormBlock
        self.blocks = nn.ModuleList(block(settings) for _ in range(settings.depth))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, symbols)

    def forward(self, symbols: Tensor, places: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """Logits ``(batch, n, symbols)``.

        Args:
            symbols: ``(batch, n)`` integers. places: position of each in its document; 0, 1, … when None.
            seen: ``(batch, n, n)`` booleans, the visible tokens of each; the past when None. A window narrows it.
        """
        return self.head(self.norm(self.stream(symbols, places, seen)[-1]))

    def stream(self, symbols: Tensor, places: Tensor | None = None, seen: Tensor | None = None) -> list[Tensor]:
        """Return the input of each block, and the output of the last."""
        n = symbols.shape[1]
        if n > self.settings.length:
            raise InvalidInput(f"this model was made for {self.settings.length} tokens, got {n}.")
        places = torch.arange(n, device=symbols.device) if places is None else places
        mask = self.mask() if seen is None else WithinDocuments(seen, self.settings.window)
        x = [self.tokens(symbols) + self.places(places)]
        for block in self.blocks:
            x.append(block(x[-1], mask))
        return x

    def mask(self) -> LogitBias:
        """Return the mask of one document: causal, or a sliding window."""
        return Causal() if self.settings.window is None else SlidingWindow(self.settings.window)

    def attention_bound(self, n: int) -> float | None:
        """Return the largest Lipschitz bound of the attention blocks for n tokens, None where there is none.

        It holds for the model at evaluation: contractive layers only estimate the norms of their weights in training.
        """
        try:
            with evaluating(self):
                bound = max(block.attention_bound(n, self.mask()) for block in self.blocks)  # type: ignore[operator]
        except DoesNotApply:
            return None
        return bound if math.isfinite(bound) else None

    def groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Group the parameters for the optimiser: only matrices decay."""
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.parameters() if parameter.dim() <= 1]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of the position, wavelengths from 2π to 10⁴·2π (Vaswani et al. 2017): ``(length, width)``.

    Near positions have near embeddings, so that attention by distance is local from the start.

    >>> sinusoids(2, 4)
    tensor([[0.0000, 0.0000, 1.0000, 1.0000],
            [0.8415, 0.0100, 0.5403, 0.9999]])
    """
    half = (width + 1) // 2
    angle = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(half) / half)
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :width]


def make_attention(settings: TrainingSettings) -> AttentionLayer:
    """Make an attention layer of the kind in the settings, with initial weights."""
    kind = LAYER_KINDS[settings.attention]
    options: dict[str, Any] = {"dropout": settings.dropout}
    if settings.is_contractive:
        # The function must not depend on the length of a piece, so the divisor is the bound for the longest.
        options = {"coefficient": settings.coefficient, "max_tokens": settings.length}
    layer = kind.layer(settings.width, settings.heads, **kind.options, **options)
    if isinstance(layer, L2Attention):
        _initialise_l2(layer)
    return layer


@torch.no_grad()
def _initialise_l2(layer: L2Attention) -> None:
    """Set initial weights of L2 attention with broad weights P and a tight contraction.

    Glorot's weights put |W_hᵀ(x_i − x_j)|²/s near 2√k on tokens of unit variance: a token then attends to itself alone,
    and attention learns nothing for a long time. Orthogonal W^Q, scaled by g = (4k)^{−1/4}, puts it near 1. With
    W^V ∝ W^Q and W^O orthogonal, the matrices W_hᵀW^V_hW^O_h on top of each other are a multiple of an orthogonal one:
    no direction is damped more than the bound requires.
    """
    g = (4 * layer.head_dim) ** -0.25
    nn.init.orthogonal_(layer.qk_proj.weight, gain=g)
    nn.init.orthogonal_(layer.out_proj.weight)
    layer.v_proj.weight.copy_(layer.qk_proj.weight / g)
    if isinstance(layer, UntiedL2Attention):
        nn.init.orthogonal_(layer.k_proj.weight, gain=g)
    if isinstance(layer, ContractiveL2Attention):
        layer.follow_weights()
