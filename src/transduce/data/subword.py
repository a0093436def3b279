"""Text to ids and back: SentencePiece's BPE behind a small interface. Every text comes back exactly as it went in.

Nothing is normalised, white space is kept, and what the vocabulary lacks is spelt in bytes: no text is unknown.
"""

from __future__ import annotations

import io
import random
import re
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

MOST_LINES = 2_000_000
"""More lines are sampled down to so many, since training holds them all in memory."""
LONGEST_LINE = 10_000
"""Longer lines, in characters, take no part in training: they are no sentences, and a word of 65,536 would end the
process. They are encoded like any other."""
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

    @classmethod
    def train(cls, lines: Iterable[str], vocab_size: int, languages: Sequence[str] = ()) -> Subwords:
        """Learns `vocab_size` entries, the special ones and a tag for each language among them."""
        smallest = N_SPECIAL + len(set(languages)) + 1
        if vocab_size < smallest:
            raise ConfigError(f"vocabulary size is {vocab_size}, this text needs at least {smallest}: raise it")
        ids = ModelConfig()
        model = io.BytesIO()
        sample = _sample(map(_escape, lines))
        if not sample:
            raise DataError("there is no text to learn subwords from: give a file that is not empty")
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(sample),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                # A control symbol has an id but no spelling: text that reads "<2de>" does not become the tag.
                control_symbols=[_tag(language) for language in dict.fromkeys(languages)],
                pad_id=ids.pad_id,
                bos_id=ids.bos_id,
                eos_id=ids.eos_id,
                unk_id=3,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                max_sentence_length=4 * LONGEST_LINE,  # in bytes
                num_threads=2,  # part of the model's bytes, so the same on every machine
                minloglevel=2,
            )
        except RuntimeError as error:
            raise _explain(str(error), vocab_size) from None
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Subwords:
        try:
            return cls(Path(path).read_bytes())
        except OSError as error:
            raise ModelFolderError(f"{path} cannot be read ({error.strerror}): the folder is not whole") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.model)

    def __len__(self) -> int:
        """The number of entries."""
        return int(self._processor.get_piece_size())

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Without start and end marks, which belong to the batch."""
        rows: list[list[int]] = self._processor.encode([_escape(line) for line in lines])
        return rows

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Special ids and tags have no text and leave none."""
        unknown = self._processor.unk_id()  # SentencePiece would write it as a question mark
        known = [[i for i in row if i != unknown] for row in rows]
        return [_unescape(text) for text in self._processor.decode(known)]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """How each id is written, for people to look at."""
        pieces: list[str] = self._processor.id_to_piece(list(ids))
        return pieces

    def tag(self, language: str) -> int:
        """The id that asks for a translation into `language`."""
        tag = self._processor.piece_to_id(_tag(language))
        if tag == self._processor.unk_id():
            known = [piece[2:-1] for piece in self.pieces(range(len(self))) if re.fullmatch(r"<2[^>]+>", piece)]
            remedy = f"choose from {', '.join(known)}" if known else "this model has one direction and takes no tag"
            raise DataError(f"there is no tag for language {language!r}: {remedy}")
        return int(tag)


def _tag(language: str) -> str:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", language):
        raise ConfigError(
            f"language is {language!r}, must be letters, digits, - and _: give a code such as de or pt-BR"
        )
    return f"<2{language}>"


def _sample(lines: Iterable[str]) -> list[str]:
    """All lines, or a sample in which each has the same chance; the same lines give the same sample."""
    rng, sample, n_seen = random.Random(1), list[str](), 0
    for line in lines:
        if not line or len(line) > LONGEST_LINE:
            continue
        n_seen += 1
        if len(sample) < MOST_LINES:
            sample.append(line)
        elif (place := rng.randrange(n_seen)) < MOST_LINES:
            sample[place] = line
    return sample


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


def _explain(message: str, vocab_size: int) -> Exception:
    """SentencePiece's two refusals, in our words; any other is a fault of ours."""
    if match := re.search(r"value <= (\d+)", message):
        return ConfigError(f"vocabulary size is {vocab_size}, this text allows at most {match[1]}: lower it")
    if match := re.search(r"required_chars. \d+ vs (\d+)", message):
        return ConfigError(f"vocabulary size is {vocab_size}, this text needs at least {match[1]}: raise it")
    return AssertionError(message)
