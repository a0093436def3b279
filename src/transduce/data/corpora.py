"""Files to pairs of lines. A line ends at a line feed and nowhere else, so that line i stays line i on both sides."""

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

RawPair = tuple[bytes, bytes]
"""Source and target as they stand in the files: whether they are text is for `cleaning` to find out."""

REGISTRY = Path(__file__).parent / "bundled" / "corpora.json"
BUNDLED = Path(__file__).parent / "bundled" / "tatoeba-40k.tsv.xz"
BUNDLED_NAME = "tatoeba-40k"
PACKED = ("", ".xz", ".gz")
BOTH_SIDES = ("tsv", "jsonl")
"""Suffixes of files that hold source and target."""
DATA_ROOT = "TRANSDUCE_DATA"


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Corpus:
    """Files that belong together, and how to read them."""

    name: str
    files: tuple[Path, ...]
    """Source and target, or one file with both."""
    languages: tuple[str, str]
    columns: tuple[int, int] = (1, 2)
    """Of a TSV file."""
    fields: tuple[str, str] | None = None
    """Of a JSONL file."""
    both_ways: bool = False
    sha256: tuple[str, ...] | None = None
    """What the files must be, where that is known."""
    wanted_from: str = ""

    def read(self, digests: list[Digest]) -> Iterator[RawPair]:
        """`digests` gets one for each file. A file that is not what it should be is refused at its end."""
        digests += [hashlib.sha256() for _ in self.files]
        if len(self.files) == 2:
            yield from read_pairs(*self.files, digests=(digests[0], digests[1]))
        elif kind(self.files[0]).lower() == "tsv":
            yield from read_tsv(self.files[0], self.columns, digests[0])
        else:
            yield from read_jsonl(self.files[0], self.fields or self.languages, digests[0])
        for path, digest, expected in zip(self.files, digests, self.sha256 or (), strict=False):
            if digest.hexdigest() != expected:
                raise DataError(
                    f"{path} is not the file that {self.name} names (its SHA-256 is {digest.hexdigest()[:12]}..., "
                    f"not {expected[:12]}...): get it from {self.wanted_from}, or give the files by their paths"
                )

    @property
    def sides(self) -> tuple[Path, Path]:
        """The file of each side."""
        return self.files[0], self.files[-1]


def kind(path: Path) -> str:
    """The suffix without packing: de for train.de.gz."""
    return Path(path.name.removesuffix(".gz").removesuffix(".xz")).suffix.removeprefix(".")


def languages_of(files: Sequence[Path]) -> tuple[str, str]:
    """From the suffixes: de and en for train.de.xz and train.en.xz."""
    source, target = (kind(path) for path in (files[0], files[-1]))
    for language in (source, target):
        if not re.fullmatch(r"[a-z]{2,3}([-_][A-Za-z0-9]+)*", language) or language == "txt" or source == target:
            names = " and ".join(path.name for path in files)
            raise DataError(f"the languages cannot be told from {names}: add --languages de-en, or what they are")
    return source, target


def parse_languages(text: str) -> tuple[str, str]:
    """de-en; pt-BR-en, where a region is in capitals."""
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
) -> tuple[list[Corpus], list[Corpus]]:
    """The corpora to train on and those to validate on, from what was written on a command line."""
    how: dict[str, Any] = {"columns": parse_columns(columns), "both_ways": both_ways}
    how["fields"] = None if fields is None else parse_fields(fields)
    codes = None if languages is None else parse_languages(languages)
    root = None if data_root is None else Path(data_root)
    train, validation = list[Corpus](), list[Corpus]()
    if len(files) == 1 and files[0] in names_of_corpora():
        train += _only(named_corpus(files[0], "train", codes, root, both_ways=both_ways))
        if valid is None and not valid_pairs:
            validation += _only(named_corpus(files[0], "valid", codes, root, both_ways=both_ways))
    elif files:
        train.append(find_corpus(files, codes, **how))
    for direction, *two in pairs:
        train.append(find_corpus(two, parse_languages(direction), **how))
    if valid is not None:
        validation.append(find_corpus(valid, codes, **how))
    for direction, *two in valid_pairs:
        validation.append(find_corpus(two, parse_languages(direction), **how))
    every = [*train, *validation]
    if columns != "1,2" and not any(kind(path).lower() == "tsv" for corpus in every for path in corpus.files):
        raise ConfigError("--columns is for a .tsv file, and there is none: leave it out")
    if fields is not None and not any(kind(path).lower() == "jsonl" for corpus in every for path in corpus.files):
        raise ConfigError("--fields is for a .jsonl file, and there is none: leave it out")
    if languages is not None and not files:
        raise ConfigError("--languages is for files without --pair, and there are none: leave it out")
    return fold(train), fold(validation)


def _only(corpus: Corpus | None) -> list[Corpus]:
    return [] if corpus is None else [corpus]


def find_corpus(files: Sequence[str], languages: tuple[str, str] | None, **how: Any) -> Corpus:
    """Two files of lines, or one of TSV or JSONL."""
    paths = tuple(Path(file) for file in files)
    if len(paths) == 2 and paths[0] == paths[1] and kind(paths[0]).lower() in BOTH_SIDES:
        paths = paths[:1]
    if len(paths) > 2:
        raise DataError(f"{len(paths)} files are given, must be source and target: use --pair for more pairs of files")
    for path in paths:
        if not path.is_file():
            names = f", or a name from {', '.join(names_of_corpora())}" if len(paths) == 1 else ""
            raise DataError(f"{path} is not a file: give a file of text{names}")
    for path in paths[: 2 * (len(paths) == 2)]:
        if kind(path).lower() in BOTH_SIDES:
            raise DataError(f"{path} holds source and target: give it alone, or as both files of a pair to --pair")
        if path.suffix in (".bz2", ".zst", ".zip"):
            raise DataError(f"{path} is packed in a way that is not read here: unpack it, or pack it as .xz or .gz")
    if len(paths) == 1 and kind(paths[0]).lower() not in BOTH_SIDES:
        raise DataError(f"{paths[0]} stands alone: give a second file with its translations, or a .tsv or .jsonl file")
    if languages is None:
        if len(paths) == 1:
            raise DataError(f"the languages of {paths[0]} are not known: add --languages de-en, or what they are")
        languages = languages_of(paths)
    return Corpus(" + ".join(path.name for path in paths), paths, languages, **how)


def fold(corpora: Iterable[Corpus]) -> list[Corpus]:
    """The same two files given once more the other way round are one corpus that is used both ways."""
    folded: list[Corpus] = []
    for corpus in corpora:
        turned = corpus.files[::-1], corpus.languages[::-1]
        same = [i for i, other in enumerate(folded) if (other.files, other.languages) == turned]
        if len(corpus.files) == 2 and same:
            folded[same[0]] = replace(folded[same[0]], both_ways=True)
        else:
            folded.append(corpus)
    return folded


def registry() -> dict[str, dict[str, Any]]:
    """What is known of corpora by name; written by experiments/name_corpora.py."""
    facts: dict[str, dict[str, Any]] = json.loads(REGISTRY.read_text(encoding="utf-8"))
    return facts


def names_of_corpora() -> list[str]:
    """Those with text to train on."""
    return [name for name, facts in registry().items() if "train" in facts["lines"]]


def named_corpus(
    name: str, split: str, languages: tuple[str, str] | None, data_root: Path | None, **how: Any
) -> Corpus | None:
    """A corpus that we know. None when it has no such split; refused when its files are not under `data_root`."""
    if name == BUNDLED_NAME:
        if languages not in (None, ("de", "en"), ("en", "de")):
            raise DataError(f"{name} has de-en, not {'-'.join(languages or ())}: choose de-en or en-de")
        languages = languages or ("de", "en")
        columns = (1, 2) if languages == ("de", "en") else (2, 1)
        return Corpus(name, (BUNDLED,), languages, columns=columns, **how) if split == "train" else None
    facts = registry().get(name)
    if facts is None or "languages" not in facts:
        raise DataError(f"{name!r} is no corpus that has a name: choose from {', '.join(names_of_corpora())}")
    languages = languages or tuple(facts["languages"][:2])
    if not set(languages) <= set(facts["languages"]):
        raise DataError(f"{name} has {', '.join(facts['languages'])}, not {'-'.join(languages)}: choose two of them")
    if split not in facts["splits"]:
        return None
    if data_root is None:
        where = f"get it from {facts['from']}, and say where it is by --data-root or {DATA_ROOT}"
        raise DataError(f"{name} is not in the package: {where}")
    wanted = [facts["files"].format(split=facts["splits"][split], language=language) for language in languages]
    files = tuple(find_packed(data_root / path, facts["from"]) for path in wanted)
    sha256 = tuple(facts["sha256"][path] for path in wanted)
    return Corpus(name, files, languages, sha256=sha256, wanted_from=facts["from"], **how)


def find_packed(path: Path, wanted_from: str) -> Path:
    for suffix in PACKED:
        if (found := path.with_name(path.name + suffix)).is_file():
            return found
    raise DataError(f"{path} is missing, packed or not: get it from {wanted_from}")


def read_lines(path: str | Path | int, digest: Digest | None = None) -> Iterator[bytes]:
    """Without line ends (LF or CR LF) and without a byte order mark; .gz and .xz are unpacked.

    `digest` is fed the unpacked bytes, so that packing does not change a file's checksum. A number is that of a file
    which is open already, such as standard input, and stays so.
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
        if error.errno is None:  # gzip says so of its own files
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
    """Each of its lines would be dropped as no UTF-8, and the reader left to wonder."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}, line 1: the file is UTF-16, must be UTF-8: iconv -f UTF-16 -t UTF-8 {path}")


def read_pairs(
    source: str | Path, target: str | Path, digests: tuple[Digest | None, Digest | None] = (None, None)
) -> Iterator[RawPair]:
    """Two files, line i of one for line i of the other."""
    both = itertools.zip_longest(read_lines(source, digests[0]), read_lines(target, digests[1]))
    for n, (source_line, target_line) in enumerate(both):
        if source_line is None or target_line is None:
            short, long = (source, target) if source_line is None else (target, source)
            raise DataError(
                f"{short} ends after line {n}, but {long} goes on: give files in which each line has its partner"
            )
        yield source_line, target_line


def read_tsv(path: str | Path, columns: tuple[int, int] = (1, 2), digest: Digest | None = None) -> Iterator[RawPair]:
    """Columns, counted from 1, between tabs."""
    for number, line in enumerate(read_lines(path, digest), 1):
        cells = line.split(b"\t") if line.strip() else [b""] * max(columns)  # a blank line is a pair of blanks
        if len(cells) < max(columns):
            raise DataError(f"{path}, line {number}: has {len(cells)} columns, must have {max(columns)}: mend the line")
        yield cells[columns[0] - 1], cells[columns[1] - 1]


def read_jsonl(path: str | Path, fields: tuple[str, str], digest: Digest | None = None) -> Iterator[RawPair]:
    """Fields of one JSON object a line."""
    for number, line in enumerate(read_lines(path, digest), 1):
        if not line.strip():
            yield b"", b""
            continue
        try:
            # Bytes that are no UTF-8 are for cleaning to find, like those of any other file.
            found = json.loads(line.decode("utf-8", "surrogateescape"))
            pair = tuple(look_up(found, field) for field in fields)
        except (ValueError, TypeError, RecursionError):
            raise DataError(f"{path}, line {number}: is no JSON object: mend the line") from None
        except KeyError as error:
            raise DataError(
                f"{path}, line {number}: has no field {error}: mend the line, or name other fields"
            ) from None
        for field, text in zip(fields, pair, strict=True):
            if not isinstance(text, str):
                raise DataError(f"{path}, line {number}: field {field!r} is {text!r}, must be text: mend the line")
        # JSON can spell half a surrogate pair, which no UTF-8 can: cleaning will find it.
        yield _to_bytes(pair[0]), _to_bytes(pair[1])


def look_up(record: Any, field: str) -> Any:
    """A field, or one inside another, as translation.de."""
    if field not in record and "." in field:
        outer, _, inner = field.partition(".")
        return look_up(record[outer], inner)
    return record[field]


def _to_bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
