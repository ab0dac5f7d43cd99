"""Texts are split and read as they are; every plan shows each character once per pass, never across documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from howsmooth.errors import InvalidInput
from howsmooth.papers.training.text_batches import (
    START,
    Chunks,
    Corpus,
    Curriculum,
    Fixed,
    TextBatch,
    documents,
    plan,
    powers,
    validation,
)


@given(st.text(st.sampled_from("ab \n\r\t\x0b\x0c\u2028é"), min_size=1, max_size=60))
def test_documents_together_are_the_text(text: str) -> None:
    found = documents(text)
    assert "".join(found) == text
    assert all(found)


def test_a_blank_line_ends_a_document_and_belongs_to_it() -> None:
    assert documents("a\n \n\nb\nc\n\nd") == ["a\n \n\n", "b\nc\n\n", "d"]


@pytest.mark.slow
@given(st.text(min_size=20, max_size=200).filter(lambda text: "\ud800" not in text))
def test_encoding_is_undone_by_decoding(text: str) -> None:
    corpus = Corpus.split(text)
    symbols = corpus.encode(text)
    assert int(symbols.min()) > START
    assert int(symbols.max()) < corpus.symbols
    assert "".join(corpus.alphabet[symbol - 1] for symbol in symbols.tolist()) == text


def test_a_file_is_split_nine_to_one(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"0123456789" * 20)
    corpus = Corpus.read(path)
    assert (len(corpus.train), len(corpus.valid)) == (180, 20)
    assert corpus.train + corpus.valid == "0123456789" * 20
    assert "90%" in corpus.how


@pytest.mark.parametrize("given_path", ["", "ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"])
def test_penn_treebank_keeps_its_own_split_and_its_test_part_is_not_read(tmp_path: Path, given_path: str) -> None:
    for part, text in (("train", "aaa aa\n"), ("valid", "abab\n"), ("test", "zzz\n")):
        (tmp_path / f"ptb.{part}.txt").write_text(text, encoding="utf-8")
    corpus = Corpus.read(tmp_path / given_path)
    assert (corpus.train, corpus.valid, corpus.alphabet) == ("aaa aa\n", "abab\n", "\n ab")
    assert corpus.how == "ptb.train.txt to train, ptb.valid.txt to validate"


def test_line_ends_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\r\ntwo\r" * 5)
    corpus = Corpus.read(path)
    assert corpus.train + corpus.valid == "one\r\ntwo\r" * 5


def test_the_digest_knows_text_and_split() -> None:
    one, two = Corpus("abc", "de", ""), Corpus("ab", "cde", "")
    assert one.sha256 != two.sha256
    assert one.sha256 == Corpus("abc", "de", "another way").sha256


def test_what_cannot_be_trained_on_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no file or folder"):
        Corpus.read(tmp_path / "missing.txt")
    with pytest.raises(InvalidInput, match="0 files named"):
        Corpus.read(tmp_path)
    short = tmp_path / "short.txt"
    for content, message in (("", "is empty"), ("a", "too little text")):
        short.write_text(content)
        with pytest.raises(InvalidInput, match=message):
            Corpus.read(short)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00text" * 10)
    with pytest.raises(InvalidInput, match="UTF-8"):
        Corpus.read(binary)
    alone = tmp_path / "ptb.train.txt"
    alone.write_text("some text", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"ptb\.valid\.txt is missing"):
        Corpus.read(alone)
    with pytest.raises(InvalidInput, match="'z' is not in the alphabet"):
        Corpus("abc", "ab", "").encode("az")


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def numbered(sizes: list[int]) -> list[Tensor]:
    """Documents whose characters are all different: 1, 2, 3, …"""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [torch.arange(end - size + 1, end + 1) for size, end in zip(sizes, ends, strict=True)]


def owners(sizes: list[int]) -> dict[int, int]:
    """Document of each character; the start symbol has none."""
    return {int(c): number for number, part in enumerate(numbered(sizes)) for c in part}


@given(st.integers(1, 3000), st.integers(0, 10))
def test_the_cut_loses_and_doubles_nothing(length: int, longest: int) -> None:
    cuts = powers(length, 2**longest)
    places = [place for at, size in cuts for place in range(at, at + size)]
    assert places == list(range(length))
    assert all(size & (size - 1) == 0 and size <= 2**longest for _, size in cuts)


@given(st.integers(1, 3000))
def test_the_cut_is_the_length_in_binary(length: int) -> None:
    assert sum(size for _, size in powers(length, 4096)) == length
    assert len(powers(length, 4096)) == length.bit_count()


@pytest.mark.slow
@given(SIZES, st.integers(0, 5))
def test_a_pass_of_chunks_shows_every_character_once(sizes: list[int], seed: int) -> None:
    total = sum(sizes)
    chunks = Chunks(numbered(sizes), 1, 1, seed)
    for epoch in range(2):
        seen = torch.cat([chunks.batch(epoch * total + step).targets.flatten() for step in range(total)])
        assert sorted(seen.tolist()) == list(range(1, total + 1))


@given(SIZES, st.integers(0, 5))
def test_chunks_hold_whole_documents_in_a_row_and_inputs_stay_inside_them(sizes: list[int], seed: int) -> None:
    length = min(4, sum(sizes))
    chunks, owner = Chunks(numbered(sizes), length, 2 * length, seed), owners(sizes)
    for step in range(4):
        batch = chunks.batch(step)
        assert batch.document is not None
        for before, now, document in zip(
            batch.inputs.flatten().tolist(),
            batch.targets.flatten().tolist(),
            batch.document.flatten().tolist(),
            strict=True,
        ):
            assert document % len(sizes) == owner[now]
            if before == START:
                assert now == 1 or owner[now - 1] != owner[now]
            else:
                assert before == now - 1
                assert owner[before] == owner[now]


@given(SIZES, st.integers(0, 5))
def test_attention_never_crosses_documents_nor_looks_ahead(sizes: list[int], seed: int) -> None:
    length = min(8, sum(sizes))
    chunks, owner = Chunks(numbered(sizes), length, 2 * length, seed), owners(sizes)
    for step in range(3):
        batch = chunks.batch(step)
        seen = batch.seen()
        assert seen is not None
        for piece, sees in zip(batch.targets.tolist(), seen.tolist(), strict=True):
            for i in range(length):
                assert sees[i][i]
                for j in range(length):
                    same = owner[piece[i]] == owner[piece[j]]
                    assert not sees[i][j] or (j <= i and same)
                    if j <= i and same and piece[i] - piece[j] == i - j:
                        assert sees[i][j]


def test_a_document_that_follows_itself_in_the_next_pass_is_another_one() -> None:
    batch = Chunks(numbered([3]), 2, 4, 0).batch(0)  # characters 1 2 3 1 in chunks of two
    assert batch.document is not None
    assert batch.document.tolist() == [[0, 0], [0, 1]]
    assert batch.positions().tolist() == [[0, 1], [0, 0]]


@given(SIZES, st.sampled_from([1, 2, 8]), st.integers(0, 5))
def test_a_pass_of_the_curriculum_shows_every_character_once(sizes: list[int], longest: int, seed: int) -> None:
    curriculum = Curriculum(numbered(sizes), longest, longest, seed, steps=50)
    shown = Counter[int]()
    for size, starts in curriculum.buckets.items():
        places = curriculum._pieces(size, 0, len(starts))[:, None] + torch.arange(size)
        shown.update(curriculum.targets[places].flatten().tolist())
    assert shown == Counter(range(1, sum(sizes) + 1))


def test_the_curriculum_goes_from_short_to_long_with_as_many_tokens_in_every_batch() -> None:
    sizes, owner = [33, 16, 21, 7, 40, 12], owners([33, 16, 21, 7, 40, 12])
    curriculum = Curriculum(numbered(sizes), 16, 32, 0, steps=60, cycles=2)
    lengths = [curriculum.length(step) for step in range(60)]
    assert lengths[:30] == sorted(lengths[:30])
    assert lengths[:30] == lengths[30:]
    assert set(lengths) == {1, 2, 4, 8, 16}
    for step in range(60):
        batch = curriculum.batch(step)
        assert batch.tokens == 32
        assert batch.inputs.shape[1] == lengths[step]
        for before, now in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert len({owner[c] for c in now}) == 1
            assert before[1:] == now[:-1]
            assert before[0] == now[0] - 1 if before[0] != START else now[0] == 1 or owner[now[0] - 1] != owner[now[0]]


def test_lengths_share_the_steps_in_proportion_to_their_characters() -> None:
    curriculum = Curriculum(numbered([8] * 30 + [2] * 40), 8, 8, 0, steps=400)
    found = Counter(curriculum.length(step) for step in range(400))
    assert found == {8: 300, 2: 100}


def test_every_pass_of_a_bucket_has_an_order_of_its_own_and_no_piece_waits() -> None:
    curriculum = Curriculum(numbered([4] * 5), 4, 8, 0, steps=10)  # two of five pieces at a time
    starts = [int(row[0]) for step in range(10) for row in curriculum.batch(step).targets]
    orders = [tuple(starts[i : i + 5]) for i in range(0, 20, 5)]
    assert all(sorted(order) == [1, 5, 9, 13, 17] for order in orders)
    assert len(set(orders)) > 1


def test_fixed_windows_are_pieces_of_the_text() -> None:
    fixed = Fixed(torch.arange(1, 51), 8, 32, seed=3)
    batch = fixed.batch(0)
    assert batch.inputs.shape == (4, 8)
    assert batch.seen() is None
    assert torch.equal(batch.targets[:, 1:] - batch.targets[:, :-1], torch.ones(4, 7, dtype=torch.int64))
    assert torch.equal(batch.inputs, batch.targets - 1)  # the start symbol is 0
    everything = torch.cat([fixed.batch(step).targets.flatten() for step in range(200)])
    assert set(everything.tolist()) == set(range(1, 51))


@pytest.mark.parametrize("lengths", ["fixed", "chunks", "curriculum"])
def test_a_batch_depends_on_seed_and_step_alone(lengths: str) -> None:
    corpus = Corpus.split("to be or not to be\n\nthat is the question\n\n" * 20)

    def made(seed: int) -> TextBatch:
        return plan(corpus, lengths, 8, 32, seed, steps=50).batch(17)  # type: ignore[arg-type]

    torch.manual_seed(1)
    first = made(0)
    torch.manual_seed(2)
    assert torch.equal(first.targets, made(0).targets)
    assert not torch.equal(first.targets, made(1).targets)


@pytest.mark.parametrize("lengths", ["fixed", "chunks", "curriculum"])
def test_validation_predicts_every_character_of_its_part_once(lengths: str) -> None:
    corpus = Corpus.split("to be or not to be\n\nthat is the question\n\n" * 20)
    batch = validation(corpus, lengths, 8)  # type: ignore[arg-type]
    kept = len(corpus.valid) // 8 * 8
    assert torch.equal(batch.targets.flatten(), corpus.encode(corpus.valid)[:kept])
    assert (batch.document is None) == (lengths == "fixed")
    starts = int((batch.inputs == START).sum())
    assert starts == (1 if lengths == "fixed" else len(documents(corpus.valid[:kept])))


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(InvalidInput, match="fewer than a length of 8"):
        Fixed(torch.arange(5), 8, 8, 0)
    with pytest.raises(InvalidInput, match="fewer than a length of 8"):
        Chunks([torch.arange(5)], 8, 8, 0)
    with pytest.raises(InvalidInput, match="power of two"):
        Curriculum([torch.arange(5)], 6, 12, 0, 10)
    with pytest.raises(InvalidInput, match="cycles"):
        Curriculum([torch.arange(5)], 4, 4, 0, 10, cycles=11)
    with pytest.raises(InvalidInput, match="no step 10"):
        Curriculum([torch.arange(5)], 4, 4, 0, 10).batch(10)
