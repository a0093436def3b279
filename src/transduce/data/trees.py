"""Constituency trees as sequences: section 6.3 of the paper, which follows "Grammar as a Foreign Language".

The source is the sentence. The target is the tree without the words: each bracket has its label, and XX stands for each
word:

    (S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .))
    (S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S

`repair` turns any target sequence into a tree over exactly the words of the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transduce.data.corpora import find_packed, read_lines, registry
from transduce.errors import DataError

__all__ = ["Tree", "linearise", "parse", "repair", "strip"]

ROOT = "TOP"
"""Label of the outermost bracket. Treebanks use different labels or none, so the sequences omit this bracket."""
WORD = "XX"
MAX_DEPTH = 150
"""Much deeper than trees in treebanks. The limit prevents a stack overflow from a model's output."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A constituent, or a word with its part of speech as the label.

    >>> from transduce.data.trees import Tree
    >>> tree = Tree("NP", (Tree("DT", word="the"), Tree("NN", word="cat")))
    >>> print(tree)
    (NP (DT the) (NN cat))
    >>> tree.words()
    ['the', 'cat']
    """

    label: str
    children: tuple[Tree, ...] = ()
    word: str | None = None

    def leaves(self) -> Iterator[Tree]:
        """The words with their parts of speech, from left to right."""
        if self.word is not None:
            yield self
        for child in self.children:
            yield from child.leaves()

    def words(self) -> list[str]:
        """The words from left to right."""
        return [leaf.word for leaf in self.leaves() if leaf.word is not None]

    def __str__(self) -> str:
        """The tree in brackets, on one line. Brackets within words are written as -LRB- and -RRB-, as in treebanks."""
        if self.word is not None:
            return f"({self.label} {self.word.replace('(', '-LRB-').replace(')', '-RRB-')})"
        return f"({' '.join([self.label, *map(str, self.children)])})"


def parse(text: str) -> Tree:
    """Parse one bracketed tree. A few words in treebanks contain a space or a no-break space; they stay one word.

    >>> from transduce.data.trees import parse
    >>> tree = parse("(S (NP (NNP John)) (VP (VBZ sleeps)))")
    >>> tree.label, tree.words()
    ('S', ['John', 'sleeps'])
    """
    stack: list[tuple[str, list[Tree], list[str]]] = [("", [], [])]
    for match in re.finditer(r"\([ \t\r\n]*([^ \t\r\n()]*)|\)|([^ \t\r\n()]+)", text):
        opened, word = match[1], match[2]
        position = f"at character {match.start() + 1}"
        label, children, words = stack[-1]
        if word is not None:
            if not label or children:
                raise DataError(f"word {word!r} {position} has no bracket around it: write (TAG {word})")
            words.append(word)
        elif opened is not None:
            if words:
                raise DataError(f"a bracket opens {position} after the word {words[-1]!r}: write (TAG {words[-1]})")
            if len(stack) > MAX_DEPTH:
                raise DataError(f"a tree is more than {MAX_DEPTH} brackets deep {position}: leave it out")
            stack.append((opened, [], []))
        else:
            if len(stack) == 1:
                raise DataError(f"a bracket closes {position} that was never opened: remove it")
            stack.pop()
            stack[-1][1].append(Tree(label, tuple(children), " ".join(words) or None))
    if len(stack) > 1:
        raise DataError(f"{len(stack) - 1} brackets are never closed: close them")
    if len(stack[0][1]) != 1:
        raise DataError(f"there are {len(stack[0][1])} trees where one was expected: write one tree a line")
    return stack[0][1][0]


def strip(tree: Tree) -> Tree:
    """Remove traces, functional tags, indices and the root's label, as is usual for training and scoring parsers.

    >>> from transduce.data.trees import parse, strip
    >>> print(strip(parse("(ROOT (S (NP-SBJ-1 (NNP John)) (VP (VBZ sleeps) (NP (-NONE- *)))))")))
    (TOP (S (NP (NNP John)) (VP (VBZ sleeps))))
    """
    children = tree.children if tree.label in ("", "ROOT", ROOT) and tree.word is None else (tree,)
    kept = (_strip(child) for child in children)
    return Tree(ROOT, tuple(child for child in kept if child is not None))


def _strip(tree: Tree) -> Tree | None:
    if tree.label == "-NONE-":
        return None
    # "NP-SBJ-1" and "NP=2" become NP; the label "-LRB-" starts with a hyphen and stays.
    label = re.split(r"(?<=.)[-=|]", tree.label, maxsplit=1)[0] if not tree.label.startswith("-") else tree.label
    if tree.word is not None:
        return Tree(label, word=tree.word)
    children = tuple(child for child in map(_strip, tree.children) if child is not None)
    return Tree(label, children) if children else None


def linearise(tree: Tree) -> list[str]:
    """The target sequence of a stripped tree.

    >>> from transduce.data.trees import linearise, parse, strip
    >>> print(*linearise(strip(parse("(S (NP (NNP John)) (VP (VBZ sleeps)))"))))
    (S (NP XX )NP (VP XX )VP )S
    """
    assert tree.label == ROOT, "strip first"
    return [token for child in tree.children for token in _linearise(child)]


def _linearise(tree: Tree) -> Iterator[str]:
    if tree.word is not None:
        yield WORD
        return
    yield f"({tree.label}"
    for child in tree.children:
        yield from _linearise(child)
    yield f"){tree.label}"


def repair(tokens: Sequence[str], words: Sequence[str], tags: Sequence[str] | None = None) -> Tree:
    """Build a tree over exactly `words` from any `tokens`. A correct sequence gives the tree that it describes.

    A closing bracket closes the nearest open bracket of its label and all brackets inside it; without such an open
    bracket it is ignored. Words without an XX are added at the end, below the root. Surplus XX and empty brackets are
    dropped.

    >>> from transduce.data.trees import repair
    >>> print(repair("(S (NP XX )NP (VP XX XX XX".split(), ["John", "sleeps"], tags=["NNP", "VBZ"]))
    (TOP (S (NP (NNP John)) (VP (VBZ sleeps))))
    """
    tags = [WORD] * len(words) if tags is None else tags
    leaves = iter([Tree(tag, word=word) for tag, word in zip(tags, words, strict=True)])
    stack: list[tuple[str, list[Tree]]] = [(ROOT, [])]

    def close() -> None:
        label, children = stack.pop()
        if children:
            stack[-1][1].append(Tree(label, tuple(children)))

    for token in tokens:
        label = token[1:]
        if token == WORD:
            if (leaf := next(leaves, None)) is not None:
                stack[-1][1].append(leaf)
        elif token.startswith("(") and label and len(stack) < MAX_DEPTH:
            stack.append((label, []))
        elif token.startswith(")") and any(label == open_label for open_label, _ in stack[1:]):
            while stack[-1][0] != label:
                close()
            close()
    while len(stack) > 1:
        close()
    return Tree(ROOT, (*stack[0][1], *leaves))


def read_trees(path: str | Path) -> Iterator[Tree]:
    """Yield the trees of a file, one per line, unchanged; .gz and .xz are decompressed."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield parse(line.decode())
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: is not valid UTF-8: correct the line") from None
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None


def read_treebank(name: str, data_root: Path) -> Iterator[tuple[str, Tree]]:
    """Yield each tree of a registered treebank with its document. Splits must be made by document, not by line."""
    treebanks = {known: facts for known, facts in registry().items() if "trees" in facts["lines"]}
    if name not in treebanks:
        raise DataError(f"{name!r} is not a named treebank: choose from {', '.join(treebanks)}")
    facts = treebanks[name]
    trees, documents = (find_packed(data_root / facts["files"].format(kind=k), facts["from"]) for k in ("mrg", "doc"))
    try:
        for document, tree in zip(read_lines(documents), read_trees(trees), strict=True):
            yield document.decode(), tree
    except ValueError:
        raise DataError(f"{documents} and {trees} differ in their number of lines: copy them again") from None
