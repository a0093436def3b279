"""Trees round-trip through sequences, and any sequence is repaired to a tree over exactly the expected words."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce import DataError
from transduce.data.trees import MAX_DEPTH, ROOT, WORD, Tree, linearise, parse, read_treebank, read_trees, repair, strip

JOHN = "(S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .))"


def test_a_tree_is_linearised_as_in_the_paper() -> None:
    tree = strip(parse(JOHN))
    assert " ".join(linearise(tree)) == "(S (NP XX )NP (VP XX (NP XX XX )NP )VP XX )S"
    assert tree.words() == ["John", "has", "a", "dog", "."]
    assert str(tree) == f"({ROOT} {JOHN})"


@pytest.mark.parametrize("root", ["", "ROOT", "TOP"])
def test_all_root_labels_are_equivalent(root: str) -> None:
    assert strip(parse(f"({root} {JOHN})")) == strip(parse(JOHN))


def test_traces_functional_tags_and_indices_are_stripped() -> None:
    text = (
        "((S (NP-SBJ-1 (PRP It)) (VP (VBD was=2) (S (NP (-NONE- *-1)) (NP=3 (-LRB- -LRB-) (NN|JJ x)))) (X (-NONE- 0))))"
    )
    assert str(strip(parse(text))) == "(TOP (S (NP (PRP It)) (VP (VBD was=2) (S (NP (-LRB- -LRB-) (NN x))))))"


def test_a_tree_of_only_traces_becomes_an_empty_root() -> None:
    assert strip(parse("((S))")) == Tree(ROOT)
    assert strip(parse("(S (NP (-NONE- *)))")) == Tree(ROOT)
    assert linearise(Tree(ROOT)) == []


labels = st.sampled_from(["S", "NP", "VP", "PRN"])
leaves = st.builds(
    lambda tag, word: Tree(tag, word=word), st.sampled_from(["NN", "-LRB-", "."]), st.sampled_from("abc")
)
constituents = st.recursive(
    leaves,
    lambda inner: st.builds(
        lambda label, inside: Tree(label, tuple(inside)), labels, st.lists(inner, min_size=1, max_size=4)
    ),
)
trees = st.builds(lambda inside: Tree(ROOT, tuple(inside)), st.lists(constituents, max_size=3))


@given(trees)
def test_trees_round_trip_through_sequences_and_through_text(tree: Tree) -> None:
    assert repair(linearise(tree), tree.words(), [leaf.label for leaf in tree.leaves()]) == tree
    assert strip(parse(str(tree))) == tree


tokens = st.lists(
    st.sampled_from(["(S", "(NP", ")S", ")NP", ")VP", WORD, WORD, "(", ")", "", "junk", "</s>"]), max_size=40
)


@given(tokens, st.lists(st.text(max_size=3), max_size=12))
def test_any_sequence_is_repaired_to_a_tree_over_exactly_the_words(sequence: list[str], words: list[str]) -> None:
    tree = repair(sequence, words)
    assert tree.words() == words
    assert tree.label == ROOT
    assert repair(linearise(tree), words) == tree, "a repaired tree needs no repair"

    def has_words(node: Tree) -> bool:
        return node.word is not None or (bool(node.children) and all(map(has_words, node.children)))

    assert all(map(has_words, tree.children)), "no constituent is empty"


@pytest.mark.parametrize(
    ("sequence", "repaired"),
    [
        ("(S (NP XX (VP XX )S", "(TOP (S (NP (XX a) (VP (XX b)))) (XX c))"),  # closes the open bracket inside
        ("XX )NP (S XX XX XX XX )S", "(TOP (XX a) (S (XX b) (XX c)))"),  # closes nothing; one XX too many
        ("(S (NP )NP XX XX XX", "(TOP (S (XX a) (XX b) (XX c)))"),  # one empty bracket; one is never closed
        ("", "(TOP (XX a) (XX b) (XX c))"),
    ],
)
def test_repairs_worked_out_by_hand(sequence: str, repaired: str) -> None:
    assert str(repair(sequence.split(), ["a", "b", "c"])) == repaired


def test_very_many_brackets_do_not_overflow_the_stack() -> None:
    tree = repair(["(S"] * 100_000 + [WORD], ["a"])
    assert tree.words() == ["a"]
    assert str(tree).count("(S") == MAX_DEPTH - 1
    with pytest.raises(DataError, match=f"more than {MAX_DEPTH} brackets deep at character"):
        parse("(S " * 100_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(S (NN a)", "1 brackets are never closed"),
        ("(S (NN a)))", "closes at character 11 that was never opened"),
        ("(S (NN b) c)", "word 'c' at character 11 has no bracket around it"),
        ("(S a (NN b))", "a bracket opens at character 6 after the word 'a'"),
        ("a", "word 'a' at character 1 has no bracket around it"),
        ("(S (NN a)) (S (NN b))", "there are 2 trees where one was expected"),
        ("", "there are 0 trees"),
    ],
)
def test_invalid_trees_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse(text)


def test_a_file_has_one_tree_per_line(tmp_path: Path) -> None:
    file = tmp_path / "bank.mrg.xz"
    with lzma.open(file, "wt", encoding="utf-8", newline="\n") as lines:
        lines.write(f"{JOHN}\n(S (NN x\u2028y\u00a0z w))\n(S\n")  # Unicode's line end and space, but not ours
    trees = read_trees(file)
    assert next(trees).words() == ["John", "has", "a", "dog", "."]
    assert next(trees).words() == ["x\u2028y\u00a0z w"]
    with pytest.raises(DataError, match=r"bank.mrg.xz, line 3: 1 brackets are never closed"):
        next(trees)


def test_named_treebanks_give_the_document_of_each_tree(tmp_path: Path) -> None:
    (tmp_path / "trees").mkdir()
    (tmp_path / "trees" / "gum.mrg.xz").write_bytes(lzma.compress(f"{JOHN}\n{JOHN}\n".encode()))
    (tmp_path / "trees" / "gum.doc").write_text("a\nb\n")
    assert list(read_treebank("gum", tmp_path)) == [("a", parse(JOHN)), ("b", parse(JOHN))]
    (tmp_path / "trees" / "gum.doc").write_text("a\n")
    with pytest.raises(DataError, match="differ in their number of lines"):
        list(read_treebank("gum", tmp_path))
    with pytest.raises(DataError, match="'gam' is not a named treebank: choose from wsj-sample, craft, gum"):
        list(read_treebank("gam", tmp_path))
    with pytest.raises(DataError, match=r"craft\.mrg is missing \(also as \.xz or \.gz\): get it from https"):
        list(read_treebank("craft", tmp_path))
