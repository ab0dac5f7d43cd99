"""The pictures commands write: which panels, at which cost."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from howsmooth.cli.source_options import Site
from howsmooth.errors import InvalidInput
from howsmooth.norms import Measurement
from howsmooth.norms.explanation import token_influence

MOST_TOKENS_FOR_MAP = 256


def _energies(m: Measurement, maps: int, which: int) -> tuple[Tensor, Tensor]:
    """Energy per token, ``(n,)``, of one map's leading right and left singular vector; with -k they come first."""
    assert m.right is not None
    assert m.left is not None
    right, left = (v.reshape(maps, -1, *v.shape[-2:])[which, 0].square().sum(-1) for v in (m.right, m.left))
    return right, left


def check_drawable(site: Site, maps: list[str], norm: str) -> None:
    """Refuse a picture that cannot be drawn, before anything is measured."""
    if site.x.dim() == 3 and len(site.x) > 1:
        raise InvalidInput(f"--figure draws one input, but --input holds {len(site.x)}: store one of them by itself.")
    if norm != "2" and (maps == ["block"] or site.x.shape[-2] > MOST_TOKENS_FOR_MAP):
        raise InvalidInput(
            f"--figure shows singular vectors for a block alone, or for more than {MOST_TOKENS_FOR_MAP} tokens: use "
            "--norm 2."
        )


def draw_measurement(site: Site, measured: dict[str, Measurement], path: Path, symbol: str) -> None:
    """The picture of `howsmooth measure`: all heads, and the roughest one in detail; or the block's token energies."""
    from howsmooth.reports.figures import head_bars, influence_map, new_figure, save_figure, token_energies

    if "heads" not in measured:
        came, went = _energies(measured["block"], 1, 0)
        save_figure(token_energies(came, went, title="Block: where the worst perturbation sits and shows"), path)
        return
    m = measured["heads"]
    figure, (left, right) = new_figure(2, 6.8, 5.6)
    head_bars(m.value.reshape(-1), m.lower.reshape(-1), m.upper.reshape(-1), quantity=symbol, ax=left)
    head = int(m.value.reshape(-1).argmax())
    if site.x.shape[-2] <= MOST_TOKENS_FOR_MAP:
        influence = token_influence(site.attention, site.x.reshape(site.x.shape[-2:]), head=head)
        influence_map(influence, title=f"Head {head}: which token moves which", ax=right)
    else:  # n × n blocks would take long
        came, went = _energies(m, site.attention.heads, head)
        token_energies(came, went, title=f"Head {head}: where the worst perturbation sits and shows", ax=right)
    save_figure(figure, path)
