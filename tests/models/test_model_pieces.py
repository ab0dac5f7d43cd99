"""Models as pieces: together they compute what the model computes, and what cannot be read is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from howsmooth.errors import UnsupportedModel
from howsmooth.models.model_pieces import AttentionPiece, read_pieces


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_pieces_of_an_encoder_compute_its_output(norm_first: bool, causal: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, activation="gelu", dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8, dtype=torch.float64), enable_nested_tensor=False)
    reading = read_pieces(encoder, causal=causal)
    x = torch.randn(5, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if causal else None
    found = x
    for piece in reading.pieces:
        found = piece(found)
    torch.testing.assert_close(found, encoder.eval()(x, mask), rtol=1e-10, atol=1e-10)
    assert [norm.name for norm in reading.norms][-1] == "end: norm"


def test_an_attention_knows_the_normalisation_that_feeds_it() -> None:
    first = read_pieces(nn.TransformerEncoderLayer(8, 2, 16, norm_first=False)).pieces[0]
    (attention,) = first.branch  # type: ignore[union-attr]
    assert isinstance(attention, AttentionPiece)
    assert attention.norm is None
    norm, attention = read_pieces(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True)).pieces[0].branch  # type: ignore[union-attr]
    assert attention.norm is norm.module


def test_layers_that_compute_something_else_are_refused() -> None:
    class Doubled(nn.TransformerEncoderLayer):
        def forward(self, *args: torch.Tensor, **options: object) -> torch.Tensor:
            return 2 * super().forward(*args, **options)  # type: ignore[arg-type]

    with pytest.raises(UnsupportedModel, match="something in it is not modelled"):
        read_pieces(Doubled(8, 2, 16))
