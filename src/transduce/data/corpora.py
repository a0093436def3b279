"""Reading pairs of lines from files. Only a line feed ends a line, so that line numbers of both sides agree."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from transduce.errors import ConfigError, DataError

__all__ = ["Corpus", "named_corpus"]

RawPair = tuple[bytes, bytes]
"""Source and target as bytes from the files. `cleaning` checks that they are valid text."""

REGISTRY = Path(__file__).parent / "bundled" / "corpora.json"
BUNDLED = Path(__file__).parent / "bundled" / "tatoeba-40k.tsv.xz"
BUNDLED_NAME = "tatoeba-40k"
COMPRESSED_SUFFIXES = (".xz", ".gz")
TWO_SIDED = ("tsv", "jsonl")
"""Types of files that hold both source and target."""
DATA_ROOT = "TRANSDUCE_DATA"
NESTED = "translation"
"""The field of Hugging Face's JSONL files whose value is an object with a text for each language."""
LANGUAGE = r"[A-Za-z]{2,8}(?:[-_][A-Za-z0-9]+)*"


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Corpus:
    """The files of a parallel corpus and how to read them.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from transduce.data.corpora import Corpus
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "train.de").write_text("Guten Tag!\\nDanke.\\n")
    >>> _ = (folder / "train.en").write_text("Hello!\\nThanks.\\n")
    >>> corpus = Corpus("greetings", (folder / "train.de", folder / "train.en"), ("de", "en"))
    >>> list(corpus.read([]))
    [(b'Guten Tag!', b'Hello!'), (b'Danke.', b'Thanks.')]
    """

    name: str
    files: tuple[Path, ...]
    """Source and target, or one file with both."""
    languages: tuple[str, str]
    columns: tuple[int, int] = (1, 2)
    """Columns of a TSV file."""
    fields: tuple[str, str] | None = None
    """Fields of a JSONL file."""
    both_ways: bool = False
    train_only: bool = False
    """No pair of it is held out for validation: it is mixed into the text that the model is trained for."""
    sha256: tuple[str, ...] | None = None
    """Expected checksums of the files, if known."""
    available_from: str = ""

    def read(self, digests: list[Digest]) -> Iterator[RawPair]:
        """Yield the pairs and append a digest for each file to `digests`. A wrong checksum is refused at the end."""
        digests += [hashlib.sha256() for _ in self.files]
        if len(self.files) == 2:
            yield from read_pairs(*self.files, digests=(digests[0], digests[1]))
        elif file_type(self.files[0]).lower() == "tsv":
            yield from read_tsv(self.files[0], self.columns, digests[0])
        else:
            yield from read_jsonl(self.files[0], self.fields or self.languages, digests[0])
        for path, digest, expected in zip(self.files, digests, self.sha256 or (), strict=False):
            if digest.hexdigest() != expected:
                raise DataError(
                    f"{path} is not the file that {self.name} names (its SHA-256 is {digest.hexdigest()[:12]}..., "
                    f"not {expected[:12]}...): get it from {self.available_from}, or give the files by their paths"
                )

    @property
    def sides(self) -> tuple[Path, Path]:
        """The file of each side."""
        return self.files[0], self.files[-1]


def file_type(path: Path) -> str:
    """The suffix before that of the compression: de for train.de.gz."""
    return Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix.removeprefix(".")


def languages_of(files: Sequence[Path]) -> tuple[str, str]:
    """The languages that the suffixes name: de and en for train.de.xz and train.en.xz."""
    source, target = (file_type(path) for path in (files[0], files[-1]))
    for language in (source, target):
        if not re.fullmatch(r"[a-z]{2,3}([-_][A-Za-z0-9]+)*", language) or language == "txt" or source == target:
            names = " and ".join(path.name for path in files)
            raise DataError(
                f"the languages are unclear from the names {names}: add --languages, for example --languages de-en"
            )
    return source, target


def parse_languages(text: str) -> tuple[str, str]:
    """Parse "de-en" or "pt-BR-en". A region must be in capitals."""
    code = r"[A-Za-z]{2,8}(?:[-_](?:[A-Z]{2}|[A-Z][a-z]{3}|[0-9]{3}))?"
    match = re.fullmatch(f"({code})-({code})", text)
    if match is None or match[1] == match[2]:
        raise ConfigError(
            f"languages are {text!r}, must be two codes with a dash between: for example de-en or pt-BR-en"
        )
    return match[1], match[2]


def parse_columns(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*([1-9]\d{0,5})\s*,\s*([1-9]\d{0,5})\s*", text)
    if match is None:
        raise ConfigError(f"columns are {text!r}, must be two numbers counted from 1: for example 1,2")
    return int(match[1]), int(match[2])


def parse_fields(text: str) -> tuple[str, str]:
    source, comma, target = (part.strip() for part in text.partition(","))
    if not (comma and source and target):
        raise ConfigError(f"fields are {text!r}, must be two names with a comma between: for example de,en")
    return source, target


def choose(
    files: Sequence[str],
    pairs: Sequence[tuple[str, str, str]],
    valid: tuple[str, str] | None,
    valid_pairs: Sequence[tuple[str, str, str]],
    *,
    languages: str | None,
    columns: str,
    fields: str | None,
    both_ways: bool,
    data_root: str | None,
    mix: Sequence[str] = (),
) -> tuple[list[Corpus], list[Corpus]]:
    """Build the training and the validation corpora from command-line arguments. `mix`: one corpus or two files of
    training text of which nothing is held out."""
    settings: dict[str, Any] = {"columns": parse_columns(columns), "both_ways": both_ways}
    settings["fields"] = None if fields is None else parse_fields(fields)
    codes = None if languages is None else parse_languages(languages)
    root = None if data_root is None else Path(data_root)
    train, validation = list[Corpus](), list[Corpus]()
    if len(files) == 1 and files[0] in corpus_names():
        train += _as_list(named_corpus(files[0], "train", codes, root, both_ways=both_ways))
        if valid is None and not valid_pairs:
            validation += _as_list(named_corpus(files[0], "valid", codes, root, both_ways=both_ways))
    elif files:
        train.append(find_corpus(files, codes, **settings))
    for direction, *two in pairs:
        train.append(find_corpus(two, parse_languages(direction), **settings))
    if len(mix) == 1 and mix[0] in corpus_names():
        mixed = _as_list(named_corpus(mix[0], "train", codes, root, both_ways=both_ways))
    else:
        mixed = [find_corpus(mix, codes, **settings)] if mix else []
    train += [replace(corpus, train_only=True) for corpus in mixed]
    if valid is not None:
        validation.append(find_corpus(valid, codes, **settings))
    for direction, *two in valid_pairs:
        validation.append(find_corpus(two, parse_languages(direction), **settings))
    types = {file_type(path).lower() for corpus in (*train, *validation) for path in corpus.files}
    if columns != "1,2" and "tsv" not in types:
        raise ConfigError("--columns is for a .tsv file, and there is none: leave it out")
    if fields is not None and "jsonl" not in types:
        raise ConfigError("--fields is for a .jsonl file, and there is none: leave it out")
    if languages is not None and not files:
        raise ConfigError("--languages is for files without --pair, and there are none: leave it out")
    return merge_directions(train), merge_directions(validation)


def _as_list(corpus: Corpus | None) -> list[Corpus]:
    return [] if corpus is None else [corpus]


def find_corpus(files: Sequence[str], languages: tuple[str, str] | None, **settings: Any) -> Corpus:
    """A corpus of two files of lines, or of one TSV or JSONL file."""
    paths = tuple(Path(file) for file in files)
    if len(paths) == 2 and paths[0] == paths[1] and file_type(paths[0]).lower() in TWO_SIDED:
        paths = paths[:1]
    if len(paths) > 2:
        raise DataError(f"{len(paths)} files are given, must be source and target: use --pair for more pairs of files")
    for path in paths:
        if not path.is_file():
            if len(paths) == 1 and (facts := registry().get(str(path))) is not None:
                kinds = " and ".join(facts["lines"])
                raise DataError(
                    f"{path} has no text to train on, only {kinds}: choose from {', '.join(corpus_names())}"
                )
            names = f", or a name from {', '.join(corpus_names())}" if len(paths) == 1 else ""
            raise DataError(f"{path} is not a file: give a file of text{names}")
    for path in paths[: 2 * (len(paths) == 2)]:
        if file_type(path).lower() in TWO_SIDED:
            raise DataError(f"{path} holds source and target: give it alone, or as both files of a pair to --pair")
        if path.suffix in (".bz2", ".zst", ".zip"):
            raise DataError(f"{path} is in an unsupported compression format: decompress it, or use .xz or .gz")
    if len(paths) == 1 and file_type(paths[0]).lower() not in TWO_SIDED:
        raise DataError(
            f"{paths[0]} is only one side: give a second file with its translations, or a .tsv or .jsonl file"
        )
    if len(paths) == 1 and file_type(paths[0]).lower() == "jsonl":
        languages, settings["fields"] = _jsonl_settings(paths[0], languages, settings.get("fields"))
    if languages is None:
        if len(paths) == 1:
            raise DataError(
                f"the languages of {paths[0]} are not known: add --languages, for example --languages de-en"
            )
        languages = languages_of(paths)
    return Corpus(" + ".join(path.name for path in paths), paths, languages, **settings)


def _jsonl_settings(
    path: Path, languages: tuple[str, str] | None, fields: tuple[str, str] | None
) -> tuple[tuple[str, str] | None, tuple[str, str] | None]:
    """The languages and fields of a JSONL file. What is not given is taken from its first object, if that has Hugging
    Face's form: `{"translation": {"cs": "...", "en": "..."}}`."""
    first = _first_object(path)
    texts = first.get(NESTED)
    if not isinstance(texts, dict) or not all(re.fullmatch(LANGUAGE, language) for language in texts):
        return languages, fields
    language_of = {f"{NESTED}.{language}": language for language in texts}
    if languages is None:
        named = [language_of[field] for field in fields or language_of if field in language_of]
        if len(named) > 2:
            example = f"--languages {named[0]}-{named[1]}"
            raise DataError(f"{path} has texts in {', '.join(named)}: add --languages, for example {example}")
        languages = (named[0], named[1]) if len(set(named)) == 2 else None
    if fields is None and languages is not None and not set(languages) <= first.keys():
        nested = f"{NESTED}.{languages[0]}", f"{NESTED}.{languages[1]}"
        fields = nested if set(nested) <= language_of.keys() else None
    return languages, fields


def _first_object(path: Path) -> dict[str, Any]:
    """Empty if the first line is not an object: then `read_jsonl` refuses it."""
    line = next((line for line in read_lines(path) if line.strip()), b"")
    try:
        return dict(json.loads(line.decode("utf-8", "surrogateescape")))
    except (ValueError, TypeError, RecursionError):
        return {}


def merge_directions(corpora: Iterable[Corpus]) -> list[Corpus]:
    """Merge a corpus with the same two files in reverse order: the result is used in both directions."""
    merged: list[Corpus] = []
    for corpus in corpora:
        reverse = corpus.files[::-1], corpus.languages[::-1]
        matches = [i for i, other in enumerate(merged) if (other.files, other.languages) == reverse]
        if len(corpus.files) == 2 and matches:
            merged[matches[0]] = replace(merged[matches[0]], both_ways=True)
        else:
            merged.append(corpus)
    return merged


def registry() -> dict[str, dict[str, Any]]:
    """Facts about named corpora, by name. experiments/name_corpora.py writes the file."""
    corpora: dict[str, dict[str, Any]] = json.loads(REGISTRY.read_text(encoding="utf-8"))
    return corpora


def corpus_names() -> list[str]:
    """Names of the registered corpora that have training text."""
    return [name for name, facts in registry().items() if "train" in facts["lines"]]


def named_corpus(
    name: str, split: str, languages: tuple[str, str] | None, data_root: Path | None, **settings: Any
) -> Corpus | None:
    """Return a registered corpus, or None if it lacks this split.

    The files of "tatoeba-40k" are in the package. Those of other corpora must be under `data_root`. `settings` are
    fields of `Corpus`.

    >>> from transduce.data.corpora import named_corpus
    >>> corpus = named_corpus("tatoeba-40k", "train", None, None)
    >>> corpus.languages
    ('de', 'en')
    >>> next(corpus.read([]))
    (b'Hilfe!', b'Help!')
    """
    if name == BUNDLED_NAME:
        if languages not in (None, ("de", "en"), ("en", "de")):
            raise DataError(f"{name} has de-en, not {'-'.join(languages or ())}: choose de-en or en-de")
        languages = languages or ("de", "en")
        columns = (1, 2) if languages == ("de", "en") else (2, 1)
        return Corpus(name, (BUNDLED,), languages, columns=columns, **settings) if split == "train" else None
    facts = registry().get(name)
    if facts is None or "languages" not in facts:
        raise DataError(f"{name!r} is not a named corpus: choose from {', '.join(corpus_names())}")
    languages = languages or tuple(facts["languages"][:2])
    if not set(languages) <= set(facts["languages"]):
        raise DataError(f"{name} has {', '.join(facts['languages'])}, not {'-'.join(languages)}: choose two of them")
    if split not in facts["splits"]:
        return None
    if data_root is None:
        remedy = f"get it from {facts['from']}, and give its folder with --data-root or {DATA_ROOT}"
        raise DataError(f"{name} is not in the package: {remedy}")
    paths = [facts["files"].format(split=facts["splits"][split], language=language) for language in languages]
    files = tuple(find_packed(data_root / path, facts["from"]) for path in paths)
    sha256 = tuple(facts["sha256"][path] for path in paths)
    return Corpus(name, files, languages, sha256=sha256, available_from=facts["from"], **settings)


def find_packed(path: Path, available_from: str) -> Path:
    """The file, either as it is or compressed."""
    for suffix in ("", *COMPRESSED_SUFFIXES):
        if (file := path.with_name(path.name + suffix)).is_file():
            return file
    suffixes = " or ".join(COMPRESSED_SUFFIXES)
    raise DataError(f"{path} is missing (also as {suffixes}): get it from {available_from}")


def read_lines(path: str | Path | int, digest: Digest | None = None) -> Iterator[bytes]:
    """Yield lines without line ends (LF or CR LF) and without a byte order mark; .gz and .xz are decompressed.

    `digest` is updated with the decompressed bytes, so that compression does not change a file's checksum. An integer
    `path` is the descriptor of a file that is already open, such as standard input, and is not closed.
    """
    file, path = path, Path("standard input" if isinstance(path, int) else path)
    try:
        with open(file, "rb", closefd=False) if isinstance(file, int) else _open(path) as lines:
            for number, line in enumerate(lines):
                if digest is not None:
                    digest.update(line)
                if number == 0:
                    _refuse_utf_16(path, line)
                    line = line.removeprefix(b"\xef\xbb\xbf")
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        if error.errno is None:  # gzip raises OSError without a number for a damaged file
            raise DataError(f"{path} is damaged ({error}): copy it again") from None
        raise DataError(f"{path} cannot be read ({error.strerror}): give a file of text") from None
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}): copy it again") from None


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


def _refuse_utf_16(path: Path, line: bytes) -> None:
    """Refuse UTF-16 clearly. Otherwise cleaning would drop all lines as invalid UTF-8, which is hard to understand."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}, line 1: the file is UTF-16, must be UTF-8: iconv -f UTF-16 -t UTF-8 {path}")


def read_pairs(
    source: str | Path, target: str | Path, digests: tuple[Digest | None, Digest | None] = (None, None)
) -> Iterator[RawPair]:
    """Yield line i of both files as a pair."""
    lines = itertools.zip_longest(read_lines(source, digests[0]), read_lines(target, digests[1]))
    for n, (source_line, target_line) in enumerate(lines):
        if source_line is None or target_line is None:
            short, long = (source, target) if source_line is None else (target, source)
            raise DataError(f"{short} ends after line {n}, but {long} is longer: each line needs its translation")
        yield source_line, target_line


def read_tsv(path: str | Path, columns: tuple[int, int] = (1, 2), digest: Digest | None = None) -> Iterator[RawPair]:
    """Yield two columns, counted from 1, of a tab-separated file."""
    for number, line in enumerate(read_lines(path, digest), 1):
        cells = line.split(b"\t") if line.strip() else [b""] * max(columns)  # an empty line is a pair of empty texts
        if len(cells) < max(columns):
            raise DataError(
                f"{path}, line {number}: has {len(cells)} columns, must have {max(columns)}: correct the line"
            )
        yield cells[columns[0] - 1], cells[columns[1] - 1]


def read_jsonl(path: str | Path, fields: tuple[str, str], digest: Digest | None = None) -> Iterator[RawPair]:
    """Yield two fields of each line, which is a JSON object."""
    for number, line in enumerate(read_lines(path, digest), 1):
        if not line.strip():
            yield b"", b""
            continue
        try:
            # Keep invalid UTF-8, as for other files: cleaning drops it.
            record = json.loads(line.decode("utf-8", "surrogateescape"))
            pair = tuple(look_up(record, field) for field in fields)
        except (ValueError, TypeError, RecursionError):
            raise DataError(f"{path}, line {number}: is not a JSON object: correct the line") from None
        except KeyError as error:
            raise DataError(
                f"{path}, line {number}: has no field {error}: correct the line, or name other fields"
            ) from None
        for field, text in zip(fields, pair, strict=True):
            if not isinstance(text, str):
                raise DataError(f"{path}, line {number}: field {field!r} is {text!r}, must be text: correct the line")
        # JSON can contain half a surrogate pair, which is invalid in UTF-8: cleaning drops it.
        yield _to_bytes(pair[0]), _to_bytes(pair[1])


def look_up(record: Any, field: str) -> Any:
    """The value of a field, or of a nested field such as "translation.de"."""
    if field not in record and "." in field:
        outer, _, inner = field.partition(".")
        return look_up(record[outer], inner)
    return record[field]


def _to_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
