"""The positional arguments of a command: a model, then files or sentences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transduce.errors import ConfigError, DataError, ModelFolderError
from transduce.model_folder.format import BUNDLED_MODEL
from transduce.translation.records import STDIN, Form, Record
from transduce.translation.segments import BOUNDARIES


def split_model(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separates the model from the other arguments. None: the first argument does not name one."""
    if arguments and (arguments[0] == BUNDLED_MODEL or os.path.isdir(arguments[0])):
        return Path(arguments[0]), list(arguments[1:])
    return None, list(arguments)


def is_sentence(argument: str) -> bool:
    """Whether an argument that does not exist as a file is text, and not a path with a typing error.

    It is text if it has white space or ends like a sentence: with both if it has the separator of paths.
    """
    ends = [match.end() for match in BOUNDARIES[0].finditer(f"{argument} ")]
    ends_like_sentence = bool(ends) and ends[-1] >= len(argument) and any(map(str.isalpha, argument))
    has_space = any(map(str.isspace, argument))
    return (has_space and ends_like_sentence) if os.sep in argument else (has_space or ends_like_sentence)


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str], list[str]]:
    """The model (None: none is named), the files, and the sentences. There are no files or no sentences."""
    model, words = split_model(arguments)
    files, sentences = list[str](), list[str]()
    for number, word in enumerate(words, 1 + len(arguments) - len(words)):
        if not word.strip():
            raise DataError(f"argument {number} is empty: remove it, or write a sentence")
        if word == STDIN or os.path.exists(word):
            files.append(word)
        elif is_sentence(word):
            sentences.append(" ".join(word.splitlines()))
        else:
            remedy = "correct its name, or end it with a full stop to translate it"
            if number == 1:
                raise ModelFolderError(f"{word} is neither a model folder nor a file: {remedy}")
            raise DataError(f"{word} is not a file: {remedy}")
    if files and sentences:
        raise ConfigError(f"{files[0]} is a file, {sentences[0]!r} is not: give only files or only sentences")
    return model, files, sentences


@dataclass(frozen=True)
class SentenceForm(Form):
    """The form of lines that are given as arguments, and not in files."""

    sentences: tuple[str, ...] = ()

    def read(self, files: Sequence[str], on_damaged: Callable[[str], None] = lambda where: None) -> Iterator[Record]:
        """The sentences as lines. `files` is ignored."""
        for number, sentence in enumerate(self.sentences, 1):
            yield Record(self._text(sentence, f"sentence {number}"), sentence)
