"""Subwords: text to ids and back, with SentencePiece's BPE. Decoding restores every text exactly.

Text is not normalised, white space is kept, and characters that the vocabulary lacks are spelt in bytes, so no text
becomes unknown.
"""

from __future__ import annotations

import hashlib
import io
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import sentencepiece

from transduce.config import ModelConfig
from transduce.errors import ConfigError, DataError, ModelFolderError

# SentencePiece writes a space as U+2581, so it would decode a real U+2581 as a space. Two private-use characters
# replace it. The first of them is doubled where a text contains it, so that such texts are restored, too.
ESCAPE, SPACE_MARK = "\ue000", "\u2581"
ESCAPES = {ESCAPE: ESCAPE * 2, SPACE_MARK: ESCAPE + "\ue001"}
UNESCAPES = {escaped: plain for plain, escaped in ESCAPES.items()}

SUBWORDS = "subwords.model"
"""File name of the subword model, in a model folder and in a folder of prepared data."""
MAX_COUNTED_WORDS = 2_000_000
"""While words are counted for learning, the rarest are dropped if there are more distinct words. This limits memory."""
MAX_LEARNT_WORD = 10_000
"""Longer words, in characters, are ignored in learning: they are not real words, and SentencePiece ends the process at
65,536 characters. They are encoded like any other word."""
MAX_CACHED_WORD, MAX_CACHED_WORDS = 30, 200_000
"""Length and number of the words whose ids are cached, which takes about 40 MB."""
N_SPECIAL = 4 + 256
"""Padding, start, end, unknown, and 256 bytes."""


class Subwords:
    """A trained vocabulary. `model` holds its bytes, which are all that is saved and compared."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        try:
            if not model:  # SentencePiece accepts zero bytes and makes an empty processor
                raise RuntimeError
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ModelFolderError("the subword model cannot be read: copy the folder again") from None
        # If no piece contains a space after its first character, merges stay within words. Then words can be encoded
        # one by one, and the ids of repeated words come from the cache.
        self._is_by_words = not any(SPACE_MARK in piece[1:] for piece in self.pieces(range(len(self))))
        self._words: dict[str, list[int]] = {}

    @classmethod
    def train(
        cls, lines: Iterable[str], vocab_size: int, languages: Sequence[str] = (), *, is_exact: bool = True
    ) -> Subwords:
        """Learn `vocab_size` entries, which include the special ones and a tag for each language.

        If the size need not be exact, a text with too few distinct words gives fewer entries, and one with too many
        distinct characters gives more.
        """
        smallest = N_SPECIAL + len(set(languages)) + 1
        if vocab_size < smallest:
            raise ConfigError(f"vocabulary size is {vocab_size}, this text needs at least {smallest}: raise it")
        counts = count_words(lines)
        if not counts:
            raise DataError("there is no text to learn subwords from: give a file that is not empty")
        tags = [_tag(language) for language in dict.fromkeys(languages)]
        try:
            return cls(_train(counts, vocab_size, tags, is_exact))
        except RuntimeError as error:
            maximum, minimum = _bounds(str(error))
            if maximum is None and minimum is None:
                raise DataError("subwords cannot be learnt from this text: give text with letters in it") from None
            if not is_exact and minimum is not None:  # a script of thousands of characters
                return cls(_train(counts, minimum + vocab_size, tags, is_exact))
            bound = f"allows at most {maximum}: lower it" if minimum is None else f"needs at least {minimum}: raise it"
            raise ConfigError(f"vocabulary size is {vocab_size}, this text {bound}") from None

    @classmethod
    def load(cls, path: str | Path) -> Subwords:
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read ({error.strerror}): the folder is incomplete") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.model)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.model).hexdigest()

    def __len__(self) -> int:
        """The number of entries."""
        return int(self._processor.get_piece_size())

    def __reduce__(self) -> tuple[type[Subwords], tuple[bytes]]:
        return Subwords, (self.model,)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode texts without start and end marks, which `make_batch` adds.

        One text goes in a list too: `encode(["Das ist gut."])`.
        """
        check_several(lines, "lines", "encode([text])")
        if not self._is_by_words:
            return self.encode_slowly(lines)
        rows: list[list[int]] = []
        for line in each_text(lines, "lines"):
            row: list[int] = []
            if line:  # an empty text has no words, but split would give one
                for word in _escape(line).split(" "):
                    row += self._words.get(word) or self._encode_word(word)
            rows.append(row)
        return rows

    def _encode_word(self, word: str) -> list[int]:
        # Between two spaces there is an empty word, which is one mark; SentencePiece encodes one space as two marks.
        ids: list[int] = self._processor.encode(word) if word else self._processor.encode(" ")[::2]
        if len(word) <= MAX_CACHED_WORD:
            if len(self._words) >= MAX_CACHED_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids

    def encode_slowly(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode whole lines with SentencePiece, without the cache."""
        check_several(lines, "lines", "encode_slowly([text])")
        texts = [_escape(line) for line in each_text(lines, "lines")]
        rows: list[list[int]] = self._processor.encode(texts, num_threads=1)
        return rows

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode ids to texts. Special ids and tags have no text."""
        unknown = self._processor.unk_id()  # SentencePiece would write it as a question mark
        # Row by row: for several rows SentencePiece starts threads, which takes thirty times as long as one row.
        return [_unescape(self._processor.decode([i for i in row if i != unknown])) for row in rows]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The spelling of each id, for display."""
        pieces: list[str] = self._processor.id_to_piece(list(ids))
        return pieces

    def id_of(self, piece: str) -> int | None:
        """The id of a piece, or None if there is no such piece."""
        i = int(self._processor.piece_to_id(piece))
        return None if i == self._processor.unk_id() else i

    def is_special(self, i: int) -> bool:
        """Whether an id has no text: a mark, a tag, or the unknown id."""
        return bool(self._processor.is_control(i) or self._processor.is_unknown(i))

    def languages(self) -> list[str]:
        """The languages that have a tag."""
        ids = [i for i in range(len(self)) if self._processor.is_control(i)]
        return [piece[2:-1] for piece in self.pieces(ids) if piece.startswith("<2")]

    def tag(self, language: str) -> int:
        """The id of the tag that selects `language` as the target language."""
        tag = self._processor.piece_to_id(_tag(language))
        if tag == self._processor.unk_id():
            known = self.languages()
            remedy = f"choose from {', '.join(known)}" if known else "this model has one direction and no tags"
            raise DataError(f"there is no tag for language {language!r}: {remedy}")
        return int(tag)


# Arguments that are several texts. Python takes a string for a list of its letters, so these checks are needed.


def check_several(texts: object, name: str, remedy: str) -> None:
    """Raise a TypeError if an argument cannot be several texts. `remedy`: what to write for one text."""
    if isinstance(texts, str):
        raise TypeError(f"{name} is one string, must be a list of strings: write {remedy}")
    check_iterable(texts, name, "a list of strings")


def check_iterable(texts: object, name: str, bound: str) -> None:
    # Iterating over bytes gives numbers, over a dictionary its keys, over a set texts in an unknown order.
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | bytearray | Mapping | set | frozenset):
        raise TypeError(f"{name} is {reprlib.repr(texts)}, must be {bound}")


def each_text(texts: Iterable[str], name: str) -> Iterator[str]:
    """The texts. An item that is not a string is a TypeError, raised when its turn comes."""
    for n, text in enumerate(texts, 1):
        if not isinstance(text, str):
            shown = reprlib.repr(text)
            raise TypeError(f"item {n} of {name} is {shown}, must be a string: the first item is item 1")
        yield text


def _tag(language: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", language):
        raise ConfigError(
            f"language is {language!r}, must be letters, digits, - and _: give a code such as de or pt-BR"
        )
    return f"<2{language}>"


def count_words(lines: Iterable[str]) -> Counter[str]:
    """Count words, the only input that learning needs: BPE processes each distinct word once, with its frequency."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split(" "))
        if len(counts) > MAX_COUNTED_WORDS:
            counts = Counter(dict(counts.most_common(MAX_COUNTED_WORDS // 2)))
    # In the TSV input of `_train` a tab would end the word, so words with tabs are not learnt.
    return Counter({w: n for w, n in counts.items() if w and "\t" not in w and len(w) <= MAX_LEARNT_WORD})


def _escape(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"a text contains half a surrogate pair at character {error.start + 1}: correct it"
            ) from None
    if ESCAPE not in text and SPACE_MARK not in text:
        return text
    return re.sub(f"[{ESCAPE}{SPACE_MARK}]", lambda match: ESCAPES[match[0]], text)


def _unescape(text: str) -> str:
    if ESCAPE not in text:
        return text
    return re.sub("|".join(UNESCAPES), lambda match: UNESCAPES[match[0]], text)


def _train(counts: Counter[str], vocab_size: int, tags: list[str], is_exact: bool) -> bytes:
    ids, model = ModelConfig(), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{_escape(word)}\t{n}" for word, n in counts.items()),
        input_format="tsv",
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=is_exact,
        control_symbols=tags,  # have an id but no spelling: the text "<2de>" does not become the tag
        pad_id=ids.pad_id,
        bos_id=ids.bos_id,
        eos_id=ids.eos_id,
        unk_id=3,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=8 * MAX_LEARNT_WORD,  # in bytes
        num_threads=2,  # stored in the model's bytes, so it must be the same on every machine
        minloglevel=2,
    )
    return model.getvalue()


def _bounds(message: str) -> tuple[int | None, int | None]:
    """The largest and the smallest vocabulary size that an error message of SentencePiece names."""
    maximum, minimum = re.search(r"value <= (\d+)", message), re.search(r"required_chars. \d+ vs (\d+)", message)
    return (int(maximum[1]) if maximum else None), (int(minimum[1]) if minimum else None)


def vocab_size_for(n_pairs: int) -> int:
    """The vocabulary size for a corpus of this many pairs: the paper's from 1.5 million pairs on, smaller below."""
    table = [(10_000, 4000), (100_000, 8000), (500_000, 16_000), (1_500_000, 32_000)]
    return next((size for bound, size in table if n_pairs < bound), ModelConfig().source_vocab_size)
