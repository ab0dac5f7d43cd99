"""What a scan is asked for in a few characters."""

from __future__ import annotations

import time

import pytest

from howsmooth.errors import InvalidInput
from howsmooth.scans.plan import Selection, parse_lengths, parse_numbers, parse_what


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", (3,)), ("0,2-4", (0, 2, 3, 4)), ("4-4, 1", (1, 4)), (7, (7,)), ([5, 0], (0, 5)), ("2,1-3", (1, 2, 3))],
)
def test_numbers_and_ranges_are_read_in_rising_order(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "4-2", "1,,2", "-1", "1-", "0..5"])
def test_other_numbers_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidInput, match="such as 0,2-4"):
        parse_numbers(text)


@pytest.mark.parametrize("dots", ["…", "..."])
def test_dots_continue_the_doubling_up_to_the_end(dots: str) -> None:
    assert parse_lengths(f"8,16,{dots},512") == (8, 16, 32, 64, 128, 256, 512)
    assert parse_lengths(f"3,{dots},12,100") == (3, 6, 12, 100)
    assert parse_lengths(f"8,{dots},16") == (8, 16)


def test_dots_go_on_in_equal_steps_where_doubling_does_not_arrive() -> None:
    assert parse_lengths("2,4,…,100") == tuple(range(2, 101, 2))
    assert parse_lengths("10,30,...,70") == (10, 30, 50, 70)
    assert parse_lengths("2,4,…,64") == (2, 4, 8, 16, 32, 64)
    with pytest.raises(InvalidInput, match="more lengths than anything has"):
        parse_lengths("1,2,…,999999999999")


@pytest.mark.parametrize("text", ["8,…,500", "8,…,4", "8,…,8"])
def test_dots_that_do_not_arrive_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="doubling does not lead to"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["", "0", "…,8", "8,…", "8;16", "-3", [0], [8, -1]])
def test_lengths_that_are_no_numbers_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="lengths are numbers of tokens"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["0-40000000", "5,0-99999999999", "200000"])
def test_a_range_beyond_any_model_is_refused_at_once(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(InvalidInput, match="no model has layers up to"):
        parse_numbers(text)
    assert time.process_time() - begun < 1


@pytest.mark.parametrize("given", [[], ["a"], [1.5], [True], None, 2.5, "9" * 5000, [10**5000], {"a": 1}])
def test_layers_and_lengths_of_wrong_types_are_one_short_sentence(given: object) -> None:
    for parse, said in ((parse_numbers, "such as 0,2-4"), (parse_lengths, "lengths are numbers of tokens")):
        with pytest.raises(InvalidInput, match=said) as refused:
            parse(given)  # type: ignore[operator]
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize("given", [[1], None, 3, [["head"]], {"a": 1}])
def test_what_of_a_wrong_type_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match="what to measure is a text such as head,layer"):
        parse_what(given)  # type: ignore[arg-type]


def test_what_takes_names_plurals_and_choices_in_brackets() -> None:
    assert parse_what("heads,attention") == (Selection("head"), Selection("attention"))
    (found,) = parse_what("head[layers=0-2,5,heads=3,lengths=8,…,32]")
    assert found == Selection("head", (0, 1, 2, 5), (3,), (8, 16, 32))
    assert parse_what(["head[layers=0,1]", "mlp"]) == (Selection("head", (0, 1)), Selection("mlp"))


@pytest.mark.parametrize("text", ["", "tail", "head,", "head[", "head]", "head[layers=0"])
def test_what_cannot_be_measured_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(InvalidInput, match="choose from head, attention, residual"):
        parse_what(text)


@pytest.mark.parametrize("text", ["head[3]", "head[size=3]", "head[layer=0]"])
def test_a_choice_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="brackets choose layers, heads, lengths"):
        parse_what(text)
