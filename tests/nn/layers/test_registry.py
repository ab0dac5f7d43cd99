"""One name for every kind of attention, wherever it is asked for."""

from __future__ import annotations

import re
from typing import get_type_hints

import pytest
import torch
from torch import nn

import howsmooth as hs
from howsmooth.cli.train import ModelOptions
from howsmooth.errors import DoesNotApply, InvalidInput
from howsmooth.nn import ContractiveL2Attention, L2Attention, replace_attention
from howsmooth.nn.layers.l2_layers import UntiedL2Attention
from howsmooth.nn.layers.registry import LAYER_KINDS
from howsmooth.papers.training import CharacterModel, TrainingSettings
from howsmooth.papers.training.training_settings import ATTENTIONS


def encoder() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def trained(name: str) -> nn.Module:
    model = CharacterModel(
        TrainingSettings(attention=name, depth=1, width=8, heads=2, length=4, batch_tokens=8), symbols=3
    )  # type: ignore[arg-type]
    return model.blocks[0].attention  # type: ignore[return-value]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_replacing_and_training_mean_the_same_layer_by_a_name(name: str) -> None:
    replaced = replace_attention(encoder(), name).self_attn
    assert type(replaced) is type(trained(name)) is LAYER_KINDS[name].layer
    for option, value in LAYER_KINDS[name].options.items():
        assert str(getattr(replaced, option)).removesuffix(".0") == value


def test_training_knows_every_kind_that_it_can_use() -> None:
    assert {name for name in LAYER_KINDS if name not in ATTENTIONS} == {
        "contractive-l2",  # its norm is not said, and runs are called by their names
        "lipschitz-norm",  # sees the future
    }
    assert not LAYER_KINDS["lipschitz-norm"].causal
    (option,) = get_type_hints(ModelOptions, include_extras=True)["attention"].__metadata__
    assert set(re.findall(r"[a-z0-9-]+", option.help.partition(";")[0])) - {"not", "ipschitz"} == set(ATTENTIONS)


@pytest.mark.parametrize("name", LAYER_KINDS)
def test_the_table_says_which_kinds_are_lipschitz_on_all_inputs(name: str) -> None:
    layer = LAYER_KINDS[name].layer(8, 2, **LAYER_KINDS[name].options).eval()
    if LAYER_KINDS[name].lipschitz:
        assert bool(layer.lipschitz_bound(n=6).isfinite())
    else:
        with pytest.raises(DoesNotApply):
            layer.lipschitz_bound(n=6)


@pytest.mark.parametrize("name", LAYER_KINDS)
def test_the_table_says_which_kinds_take_dropout(name: str) -> None:
    make, options = LAYER_KINDS[name].layer, LAYER_KINDS[name].options
    if LAYER_KINDS[name].dropout:
        assert make(8, 2, dropout=0.1, **options).dropout == 0.1
    else:
        with pytest.raises(InvalidInput, match="dropout"):
            make(8, 2, dropout=0.1, **options)


def test_l2_is_tied_and_lipschitz_everywhere() -> None:
    assert type(trained("l2")) is L2Attention
    assert type(trained("l2-untied")) is UntiedL2Attention
    assert not issubclass(L2Attention, UntiedL2Attention)


def test_what_a_name_says_is_no_option() -> None:
    with pytest.raises(InvalidInput, match="contractive-inf attention says its norm by its name"):
        replace_attention(encoder(), "contractive-inf", norm="2")
    layer = replace_attention(encoder(), "contractive-inf", coefficient=0.5).self_attn
    assert isinstance(layer, ContractiveL2Attention)
    assert (layer.coefficient, layer.bound) == (0.5, "kim2021")


def test_untied_attention_starts_from_the_queries_and_the_keys_of_the_old_one() -> None:
    block = encoder()
    query, key, value = block.self_attn.in_proj_weight.detach().clone().chunk(3)
    layer = replace_attention(block, "l2-untied").self_attn
    assert isinstance(layer, UntiedL2Attention)
    torch.testing.assert_close(layer.qk_proj.weight.detach(), query / 2**0.5)
    torch.testing.assert_close(layer.k_proj.weight.detach(), key / 2**0.5)
    torch.testing.assert_close(layer.v_proj.weight.detach(), value)
    x = torch.randn(5, 8)
    assert float(hs.measure(layer.eval(), x)) > 0
