"""Texts are read as they are, split as stated, and cut into documents without losing a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howsmooth.errors import InvalidInput
from howsmooth.papers.training.corpus import START, Corpus, decode, documents


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
    assert decode(symbols.tolist(), corpus.alphabet) == text


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
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(InvalidInput, match="too little text"):
        Corpus.read(empty)
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
