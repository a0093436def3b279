"""Text to ids and back: SentencePiece's BPE behind a small interface. Every text comes back exactly as it went in.

Nothing is normalised, white space is kept, and what the vocabulary lacks is spelt in bytes: no text is unknown.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from transduce.config import ModelConfig
from transduce.errors import ConfigError, DataError, ModelFolderError

# SentencePiece writes a space as U+2581, so that a real U+2581 would come back as a space. Two characters of private
# use stand for it; the first of them also stands before itself, so that texts which hold them come back too.
ESCAPE, SPACE_MARK = "\ue000", "\u2581"
ESCAPES = {ESCAPE: ESCAPE * 2, SPACE_MARK: ESCAPE + "\ue001"}
UNESCAPES = {escaped: plain for plain, escaped in ESCAPES.items()}

SUBWORDS = "subwords.model"
"""The name of its file, in a model folder and among prepared data."""
MOST_KINDS = 2_000_000
"""When more words are known than this, in learning, the rarest are forgotten: memory is bounded."""
LONGEST_TO_LEARN = 10_000
"""Longer words, in characters, take no part in learning: they are no words, and one of 65,536 would end the process.
They are encoded like any other."""
LONGEST_WORD, MOST_WORDS = 30, 200_000
"""Of the words whose ids are remembered, some 40 MB."""
N_SPECIAL = 4 + 256
"""Padding, start, end, unknown, and the bytes."""


class Subwords:
    """A trained vocabulary. `model`, its bytes, is all there is to it: save those, compare those."""

    def __init__(self, model: bytes) -> None:
        self.model = model
        try:
            if not model:  # of no bytes SentencePiece makes a processor too, which then knows nothing
                raise RuntimeError
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise ModelFolderError("the subword model cannot be read: copy the folder again") from None
        # Merges cannot reach over a space when no piece does. Then words can be encoded one by one, and those of a text
        # are mostly ones that it had before.
        self._is_by_words = not any(SPACE_MARK in piece[1:] for piece in self.pieces(range(len(self))))
        self._words: dict[str, list[int]] = {}

    @classmethod
    def train(
        cls, lines: Iterable[str], vocab_size: int, languages: Sequence[str] = (), *, is_exact: bool = True
    ) -> Subwords:
        """Learns `vocab_size` entries, the special ones and a tag for each language among them.

        Where the size is not exact, a text with less to learn gives fewer and one of more characters gives more.
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
            most, least = _bounds(str(error))
            if most is None and least is None:
                raise DataError("subwords cannot be learnt from this text: give text with letters in it") from None
            if not is_exact and least is not None:  # a script of thousands of characters
                return cls(_train(counts, least + vocab_size, tags, is_exact))
            bound = f"allows at most {most}: lower it" if least is None else f"needs at least {least}: raise it"
            raise ConfigError(f"vocabulary size is {vocab_size}, this text {bound}") from None

    @classmethod
    def load(cls, path: str | Path) -> Subwords:
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read ({error.strerror}): the folder is not whole") from None

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
        """Without start and end marks, which belong to the batch."""
        if not self._is_by_words:
            return self.encode_slowly(lines)
        rows: list[list[int]] = []
        for line in lines:
            row: list[int] = []
            if line:  # no text is no words, and not one that is empty
                for word in _escape(line).split(" "):
                    row += self._words.get(word) or self._encode_word(word)
            rows.append(row)
        return rows

    def _encode_word(self, word: str) -> list[int]:
        # An empty word stands between two spaces. Of one space SentencePiece makes two marks, and it is one of them.
        ids: list[int] = self._processor.encode(word) if word else self._processor.encode(" ")[::2]
        if len(word) <= LONGEST_WORD:
            if len(self._words) >= MOST_WORDS:
                self._words.clear()
            self._words[word] = ids
        return ids

    def encode_slowly(self, lines: Sequence[str]) -> list[list[int]]:
        """Line by line, as SentencePiece does it."""
        rows: list[list[int]] = self._processor.encode([_escape(line) for line in lines], num_threads=1)
        return rows

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Special ids and tags have no text and leave none."""
        unknown = self._processor.unk_id()  # SentencePiece would write it as a question mark
        # Row by row: for several at once SentencePiece starts a thread, which takes thirty times as long as one row.
        return [_unescape(self._processor.decode([i for i in row if i != unknown])) for row in rows]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """How each id is written, for people to look at."""
        pieces: list[str] = self._processor.id_to_piece(list(ids))
        return pieces

    def id_of(self, piece: str) -> int | None:
        """None where there is no such piece."""
        i = int(self._processor.piece_to_id(piece))
        return None if i == self._processor.unk_id() else i

    def is_special(self, i: int) -> bool:
        """Whether an id stands for no text: a mark, a tag, the unknown."""
        return bool(self._processor.is_control(i) or self._processor.is_unknown(i))

    def languages(self) -> list[str]:
        """Those that have a tag."""
        ids = [i for i in range(len(self)) if self._processor.is_control(i)]
        return [piece[2:-1] for piece in self.pieces(ids) if piece.startswith("<2")]

    def tag(self, language: str) -> int:
        """The id that asks for a translation into `language`."""
        tag = self._processor.piece_to_id(_tag(language))
        if tag == self._processor.unk_id():
            known = self.languages()
            remedy = f"choose from {', '.join(known)}" if known else "this model has one direction and takes no tag"
            raise DataError(f"there is no tag for language {language!r}: {remedy}")
        return int(tag)


def _tag(language: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", language):
        raise ConfigError(
            f"language is {language!r}, must be letters, digits, - and _: give a code such as de or pt-BR"
        )
    return f"<2{language}>"


def count_words(lines: Iterable[str]) -> Counter[str]:
    """All that BPE learns from: it looks at each word once and minds how often it came."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split(" "))
        if len(counts) > MOST_KINDS:
            counts = Counter(dict(counts.most_common(MOST_KINDS // 2)))
    # SentencePiece would read a tab, in the form below, as the end of the word. Tabs are spelt in bytes instead.
    return Counter({w: n for w, n in counts.items() if w and "\t" not in w and len(w) <= LONGEST_TO_LEARN})


def _escape(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"a text holds half a surrogate pair at character {error.start + 1}: mend it") from None
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
        control_symbols=tags,  # which have an id but no spelling: text that reads "<2de>" does not become the tag
        pad_id=ids.pad_id,
        bos_id=ids.bos_id,
        eos_id=ids.eos_id,
        unk_id=3,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=8 * LONGEST_TO_LEARN,  # in bytes
        num_threads=2,  # part of the model's bytes, so the same on every machine
        minloglevel=2,
    )
    return model.getvalue()


def _bounds(message: str) -> tuple[int | None, int | None]:
    """The most and the least entries that SentencePiece asks for when it refuses a size."""
    most, least = re.search(r"value <= (\d+)", message), re.search(r"required_chars. \d+ vs (\d+)", message)
    return (int(most[1]) if most else None), (int(least[1]) if least else None)


def vocab_size_for(n_pairs: int) -> int:
    """How many entries so many pairs can teach. From a million and a half on it is the paper's number."""
    table = [(10_000, 4000), (100_000, 8000), (500_000, 16_000), (1_500_000, 32_000)]
    return next((size for bound, size in table if n_pairs < bound), ModelConfig().source_vocab_size)
