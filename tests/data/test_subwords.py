"""Decoding the ids of any string restores it exactly."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce import ConfigError, DataError, ModelFolderError
from transduce.data import subword
from transduce.data.subword import ESCAPE, SPACE_MARK, Subwords

LINES = [f"{a} {b}{c}." for a in ("the", "a", "every") for b in ("house", "garden", "dog") for c in ("", "s", "keeper")]


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    return Subwords.train(LINES, vocab_size=310, languages=["de", "pt-BR"])


TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(f" \t\n\0\r\u2028{SPACE_MARK}{ESCAPE}\ue001the")
)


@given(st.lists(TEXT, max_size=5))
def test_every_string_round_trips(subwords: Subwords, lines: list[str]) -> None:
    rows = subwords.encode(lines)
    assert subwords.decode(rows) == lines
    assert not any(i < 4 for row in rows for i in row), "text gives neither special ids nor the unknown id"


@settings(max_examples=500)
@given(st.lists(TEXT | st.text(" thegardns."), max_size=5))
def test_encoding_word_by_word_equals_encoding_lines(subwords: Subwords, lines: list[str]) -> None:
    assert subwords._is_by_words
    assert subwords.encode(lines) == subwords.encode_slowly(lines)


def test_the_word_cache_is_bounded(subwords: Subwords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subword, "MAX_CACHED_WORDS", 5)
    lines = [f"word{i} word{i % 3} {'x' * subword.MAX_CACHED_WORD}x" for i in range(40)]
    assert subwords.encode(lines) == subwords.encode_slowly(lines)
    assert 0 < len(subwords._words) <= 5
    assert all(len(word) <= subword.MAX_CACHED_WORD for word in subwords._words)


def test_a_vocabulary_with_spaces_inside_pieces_is_encoded_line_by_line() -> None:
    """Imported vocabularies may have such pieces; those learnt here never do."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["in the house"] * 9),
        model_writer=model,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        split_by_whitespace=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    subwords = Subwords(model.getvalue())
    assert not subwords._is_by_words
    assert subwords.encode(["in the house"]) == subwords.encode_slowly(["in the house"])
    assert len(subwords.encode(["in the house"])[0]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  a  b ",
        "\n",
        "a\0b",
        SPACE_MARK,
        f"{ESCAPE}\ue001",
        "<s>",
        "</s>",
        "<pad>",
        "<2de>",
        "<0x41>",
        "\ufeff",
    ],
)
def test_difficult_strings_round_trip(subwords: Subwords, text: str) -> None:
    (row,) = subwords.encode([text])
    assert subwords.decode([row]) == [text]
    assert subwords.tag("de") not in row


def test_a_megabyte_line_round_trips(subwords: Subwords) -> None:
    text = "every housekeeper \u00e9" * 50_000
    assert subwords.decode(subwords.encode([text])) == [text]


def test_words_of_the_training_text_become_few_pieces(subwords: Subwords) -> None:
    (row,) = subwords.encode(["the house"])
    assert "".join(subwords.pieces(row)) == f"{SPACE_MARK}the{SPACE_MARK}house"
    assert len(row) < len("the house")


def test_special_ids_and_tags_decode_to_no_text(subwords: Subwords) -> None:
    (row,) = subwords.encode(["the dog"])
    assert subwords.decode([[1, subwords.tag("de"), *row, 3, 2, 0, 0]]) == ["the dog"]
    assert len({0, 1, 2, 3, subwords.tag("de"), subwords.tag("pt-BR")}) == 6
    assert len(subwords) == 310


def test_an_unknown_language_is_refused(subwords: Subwords) -> None:
    with pytest.raises(DataError, match="no tag for language 'fr': choose from de, pt-BR"):
        subwords.tag("fr")
    with pytest.raises(DataError, match="this model has one direction and no tags"):
        Subwords.train(LINES, 300).tag("fr")
    with pytest.raises(ConfigError, match="language is 'd>e', must be letters"):
        subwords.tag("d>e")


def test_the_same_text_gives_the_same_bytes() -> None:
    assert Subwords.train(LINES, 300).model == Subwords.train(iter(LINES), 300).model


def test_learning_from_word_counts_equals_learning_from_lines() -> None:
    """SentencePiece's learning from lines, which holds all lines in memory, is the slow version."""
    lines = [*LINES, "  spaces  between ", "tab\tin it", "a \u2581 mark"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.replace("tab\tin", "") for line in map(subword._escape, lines)]),
        model_writer=model,
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    from_lines, from_words = Subwords(model.getvalue()), Subwords.train(lines, 310)
    assert from_words.pieces(range(310)) == from_lines.pieces(range(310))


def test_rare_words_are_dropped_to_limit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subword, "MAX_COUNTED_WORDS", 100)
    lines = [f"always often{i % 10} rare{i}" for i in range(1000)]
    counts = subword.count_words(lines)
    assert len(counts) <= 100
    assert counts["always"] == 1000
    assert all(counts[f"often{i}"] > 50 for i in range(10))


def test_loaded_subwords_equal_the_saved_ones(subwords: Subwords, tmp_path: Path) -> None:
    subwords.save(tmp_path / "subwords.model")
    assert Subwords.load(tmp_path / "subwords.model").model == subwords.model


def test_a_very_long_word_does_not_end_the_process() -> None:
    assert len(Subwords.train([*LINES, "x" * 70_000], 300)) == 300
    with pytest.raises(DataError, match="no text to learn subwords from"):
        Subwords.train(["x" * 70_000], 300)


def test_invalid_input_is_refused(tmp_path: Path, subwords: Subwords) -> None:
    with pytest.raises(DataError, match="half a surrogate pair at character 3: correct it"):
        subwords.encode(["ok", "ab\ud800"])
    with pytest.raises(ConfigError, match="vocabulary size is -5, this text needs at least 261: raise it"):
        Subwords.train(LINES, -5)
    assert Subwords.train(LINES, 300, ["de", "de"]).tag("de") > 3
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ModelFolderError, match="cannot be read: copy the folder again"):
        Subwords.load(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"vocabulary size is 9000, this text allows at most \d+: lower it"):
        Subwords.train(LINES, 9000)
    with pytest.raises(ConfigError, match=r"vocabulary size is 265, this text needs at least \d+: raise it"):
        Subwords.train(LINES, 265)
    with pytest.raises(DataError, match="no text to learn subwords from"):
        Subwords.train([], 300)
    (tmp_path / "broken").write_bytes(b"not a model")
    with pytest.raises(ModelFolderError, match="cannot be read: copy the folder again"):
        Subwords.load(tmp_path / "broken")
    with pytest.raises(ModelFolderError, match=r"nowhere cannot be read \(No such file"):
        Subwords.load(tmp_path / "nowhere")


def test_subwords_can_be_pickled(subwords: Subwords) -> None:
    again = pickle.loads(pickle.dumps(subwords))
    assert again.model == subwords.model
    assert again.sha256 == subwords.sha256 != Subwords.train(LINES, vocab_size=300).sha256


@pytest.mark.parametrize("method", ["encode", "encode_slowly"])
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("the house", r"^lines is one string, must be a list of strings: write encode(_slowly)?\(\[text\]\)$"),
        (b"the house", r"^lines is b'the house', must be a list of strings$"),
        (None, r"^lines is None, must be a list of strings$"),
        (["the", None], r"^item 2 of lines is None, must be a string: the first item is item 1$"),
        (["the", b"house"], r"^item 2 of lines is b'house', must be a string"),
        ([7], r"^item 1 of lines is 7, must be a string"),
    ],
    ids=str,
)
def test_what_is_not_a_list_of_strings_is_a_type_error(
    subwords: Subwords, method: str, lines: object, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        getattr(subwords, method)(lines)
