"""Hidden states seen by attention, against hooks of the test's own and against the layers' definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from howsmooth.errors import InvalidInput, UnsupportedModel
from howsmooth.models import attention_inputs
from tests.models.tiny import TINY, D


class Letters:
    """A tokenizer in miniature: one token per letter between a first and a last one."""

    model_max_length = 40

    def __call__(self, text: str, verbose: bool, truncation: bool = False, max_length: int = 0) -> dict[str, Any]:
        letters = [ord(letter) - 90 for letter in text]
        return {"input_ids": [1, *(letters[: max_length - 2] if truncation else letters), 2]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [{1: "<", 2: ">"}.get(i, chr(i + 90)) for i in ids]


def run(model: Any, *args: Any, **options: Any) -> Any:
    return attention_inputs(model, Letters(), *args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gemma2", "gpt2", "gpt_neox", "mpnet", "qwen3"])
def test_inputs_equal_what_the_models_own_blocks_receive(kind: str) -> None:
    tiny = TINY[kind]
    model, ids = tiny.build(), tiny.inputs(9)["input_ids"]
    seen = attention_inputs(model, None, ids)
    assert sorted(seen.hidden) == [0, 1]
    for layer in (0, 1):
        x, _, _, _ = tiny.listen(model, layer, {"input_ids": ids})
        assert seen[layer].shape == (1, 9, D)
        torch.testing.assert_close(seen[layer], x, rtol=0, atol=1e-6)  # sdpa here, eager (softmax in float32) there


def test_first_input_of_a_pre_norm_model_is_its_normalised_embedding() -> None:
    model = TINY["gpt2"].build()
    ids = torch.tensor([[5, 6, 7]])
    expected: Tensor = model.h[0].ln_1(model.wte(ids) + model.wpe(torch.arange(3)))
    assert torch.equal(attention_inputs(model, None, [5, 6, 7])[0], expected.detach())


def test_tokens_are_the_window_with_its_special_tokens() -> None:
    seen = run(TINY["bert"].build(), "abcdefgh", 6, layers=[1])
    assert seen.tokens == ["<", "a", "b", "c", "d", ">"]
    assert seen.ids.tolist() == [[1, 7, 8, 9, 10, 2]]
    assert list(seen.hidden) == [1]
    assert run(TINY["bert"].build(), "abc").tokens == ["<", "a", "b", "c", ">"]


def test_dropout_is_off_and_the_model_stays_in_training() -> None:
    model = TINY["bert"].build(hidden_dropout_prob=0.5).train()
    first, second = (attention_inputs(model, None, [5, 6, 7])[1] for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("text", "length", "layers", "message"),
    [
        ("abc", 9, None, "the text has 5 tokens, but length=9 was requested"),
        ("abc", 0, None, "at least one token, got length=0"),
        ("a" * 60, None, None, "62 tokens were requested, but this BertModel takes at most 40"),
        ("abc", 3, [2], "layer 2 does not exist"),
        ([], None, None, "no tokens to run the model on"),
        (torch.ones(2, 3, dtype=torch.long), None, None, "pass one text at a time"),
    ],
)
def test_impossible_windows_are_refused(text: Any, length: int | None, layers: list[int] | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run(TINY["bert"].build(), text, length, layers=layers)


def test_text_without_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a text needs a tokenizer"):
        attention_inputs(TINY["bert"].build(), None, "abc", 3)


def test_models_of_images_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="ViTModel does not read text but 'pixel_values'"):
        attention_inputs(TINY["vit"].build(), None, [1, 2])
