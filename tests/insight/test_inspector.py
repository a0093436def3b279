"""The inspector: attention equals that of the reference, records survive JSON, and pages run only their own script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
import webbrowser
from dataclasses import replace
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.support.inspector import HOSTILE, LONG, SENTENCE, record_of
from transduce import ConfigError, DataError, ModelFolderError, Transformer, Translator, reference, with_model
from transduce.insight import page
from transduce.insight.attention import AttentionRecord, from_document, inspect, to_document
from transduce.insight.heads import (
    KINDS,
    MEANINGS,
    PLACES,
    Head,
    describe,
    is_punctuation,
    memory_places,
    self_places,
    tendencies,
    units,
    visibility,
)
from transduce.insight.output import OutputOptions, sentences_of, split_arguments, write
from transduce.insight.page import WEB, to_page
from transduce.insight.picture import choose_heads, draw
from transduce.model_folder.format import BUNDLED, WEIGHTS


@pytest.fixture(scope="session")
def translator() -> Translator:
    return Translator.load(device="cpu")


def with_changes(translator: Translator, decode: dict[str, Any], model: dict[str, Any]) -> Translator:
    config = with_model(translator.config, **model)
    model_copy = Transformer(config.model).eval()
    model_copy.load_weights(translator.model.weights())
    settings = replace(translator.settings, **decode)
    return Translator(model_copy, config, translator.subwords, translator.origin, translator.heads, settings=settings)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "beam": (SENTENCE, {}, {}),
    "sampled": (SENTENCE, {"method": "sample", "seed": 3}, {}),
    "window": (SENTENCE, {}, {"attention_window": 6}),
    "padded": (LONG, {}, {}),
    "padded, window": (LONG, {"beam_size": 1}, {"attention_window": 6}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_probabilities_equal_those_of_the_reference(translator: Translator, case: str) -> None:
    text, decode, model = CASES[case]
    translator = with_changes(translator, decode, model)
    weights = {name: W.astype(np.float64) for name, W in reference.load_weights(BUNDLED / WEIGHTS).items()}
    records = list(inspect(translator, [text]))
    assert (len({len(record.source) for record in records}) > 1) == case.startswith("padded")
    for record in records:
        source_BS, target_in_BT = (
            np.array([[translator.subwords._processor.piece_to_id(piece) for piece in side]])
            for side in (record.source, record.target)
        )
        exact = reference.transformer(weights, translator.config.model, source_BS, target_in_BT)
        kinds = (exact.encoder_LBHSS, exact.decoder_LBHTT, exact.memory_LBHTS)
        for kind, expected_LBHQM in zip(KINDS, kinds, strict=True):
            np.testing.assert_allclose(record.weights[kind], expected_LBHQM[:, 0], atol=2e-5)
            np.testing.assert_allclose(record.weights[kind].sum(-1), 1, atol=1e-5)
        probability_TV = reference.softmax(exact.logits_BTV[0])
        for probability_V, token in zip(probability_TV, record.tokens, strict=False):
            assert token.probability == pytest.approx(
                probability_V[translator.subwords._processor.piece_to_id(token.piece)], abs=1e-4
            )


def test_weights_outside_the_attention_window_are_zero(translator: Translator) -> None:
    (record,) = inspect(with_changes(translator, {}, {"attention_window": 6}), [SENTENCE])
    n = len(record.source)
    far_SS = 2 * np.abs(np.arange(n)[:, None] - np.arange(n)) > 6
    assert record.window == 6
    assert not record.weights["encoder"][:, :, far_SS].any()
    assert record.weights["memory"].all()


def test_a_record_agrees_with_the_translation(translator: Translator) -> None:
    (record,) = inspect(translator, [f" {SENTENCE}\t"])
    (translation,) = translator.translate([SENTENCE], with_details=True)
    assert (record.text, record.translation) == (SENTENCE, translation.text)
    assert record.tokens == translation.tokens
    assert record.alignment == translation.alignment
    assert record.source[-1] == record.tokens[-1].piece == "</s>"
    assert record.target == ("<s>", *[token.piece for token in record.tokens[:-1]])
    source, target = record.words
    assert ("Auto", "car") in {(source[s], target[t]) for s, t in record.alignment or ()}
    words = [word for word in record.source_words if word is not None]
    assert words == sorted(words)
    assert max(words) + 1 == len(source)
    assert record.source_words[record.source.index("▁Auto")] == source.index("Auto")
    assert record.target_words[record.target.index("▁car")] == target.index("car")


def test_a_long_text_gives_one_record_per_part(translator: Translator) -> None:
    records = list(inspect(translator, ["Ja.", "", LONG]))
    (translation,) = translator.translate([LONG])
    assert [record.part[0] for record in records] == [1, *range(1, len(records))]
    assert " ".join(record.translation for record in records[1:]) == translation.text.strip()
    assert all("split" in record.flags for record in records[1:])


def test_the_translation_starts_with_the_prefix(translator: Translator) -> None:
    (record,) = inspect(translator, [SENTENCE], prefix="Yesterday")
    assert record.translation.startswith("Yesterday")


def test_a_language_tag_is_a_mark_and_not_a_word() -> None:
    tagged = Translator.load(Path(__file__).parents[1] / "models" / "version-1", device="cpu")
    to = tagged.origin.tagged_languages[0]
    (record,) = inspect(tagged, ["Das ist gut."], to)
    assert (record.n_tags, record.source[0], record.source_words[0]) == (1, f"<2{to}>", None)
    assert len(record.source_words) == len(record.source)
    (translation,) = tagged.translate(["Das ist gut."], to, with_details=True)
    assert (record.translation, record.alignment) == (translation.text, translation.alignment)


def test_records_are_equal_after_writing_and_reading_json(translator: Translator) -> None:
    records = list(inspect(translator, ["Das ist gut.", SENTENCE]))
    read_records = from_document(json.loads(json.dumps(to_document(records, "a", "de-en"))))
    for record, read_record in zip(records, read_records, strict=True):
        for name in (
            "text",
            "translation",
            "source",
            "target",
            "source_words",
            "target_words",
            "alignment",
            "part",
            "window",
        ):
            assert getattr(record, name) == getattr(read_record, name)
        for token, read_token in zip(record.tokens, read_record.tokens, strict=True):
            assert read_token.probability == pytest.approx(token.probability, rel=1e-5)
            assert [piece for piece, _ in read_token.runners_up] == [piece for piece, _ in token.runners_up]
        for kind in KINDS:
            np.testing.assert_allclose(read_record.weights[kind], record.weights[kind], atol=2**-12)
            np.testing.assert_allclose(read_record.weights[kind].sum(-1), 1, atol=2e-3)
        assert [head.label for head in record.heads] == [head.label for head in read_record.heads]


def damaged(document: dict[str, Any], *path: str | int, value: Any) -> Any:
    document = container = json.loads(json.dumps(document))
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["format"], "another"),
        (["format_version"], 2),
        (["records"], None),
        (["records", 0, "source"], ["one"]),
        (["records", 0, "tokens"], []),
        (["records", 0, "tokens", 0], {"piece": "a"}),
        (["records", 0, "weights", "memory", "layers", 0], "AAAA"),
        (["records", 0, "weights", "memory", "layers", 0], "not base64"),
        (["records", 0, "weights", "encoder"], {"shape": [1, 1, 1, 1], "layers": ["AAA="]}),
        (["records", 0], []),
    ],
    ids=str,
)
def test_a_damaged_record_is_refused(hand_made: AttentionRecord, path: list[str | int], value: Any) -> None:
    document = to_document([hand_made])
    assert from_document(document)
    with pytest.raises(DataError, match="record of attention"):
        from_document(damaged(document, *path, value=value))


@pytest.fixture
def hand_made() -> AttentionRecord:
    return record_of(["▁That", "▁is", "."])


PIECES = ["▁Das", "▁Ha", "us", ",", "▁gut", "</s>"]
MARKS = [False] * 5 + [True]
PLACE_OF = {label: place for place, label in PLACES.items()}


def tendency(weight_QM: Any) -> Head:
    visible_QM = visibility("encoder", len(PIECES), len(PIECES), None)
    (head,) = tendencies("encoder", np.asarray(weight_QM)[None, None], visible_QM, self_places(PIECES, MARKS))
    return head


def test_words_punctuation_and_marks_are_distinguished() -> None:
    assert units(PIECES, MARKS) == [0, 1, 1, 2, 3, 4]
    assert [is_punctuation(piece) for piece in ("▁,", "?!", "▁", "a.", "€")] == [True, True, False, False, True]


def test_the_label_of_a_head_names_what_it_attends_to() -> None:
    n = len(PIECES)
    for columns, label in (
        (range(n), "same word"),
        ([1, 3, 3, 4, 5, 5], "next word"),
        ([0, 0, 0, 2, 3, 4], "previous word"),
        ([0] * n, "first token"),
        ([5] * n, "end mark"),
        ([3] * n, "punctuation"),
    ):
        head = tendency(np.eye(n)[columns])
        assert (head.label, head.number) == (label, f"{100 * head.shares[PLACE_OF[label]]:.0f}\u00a0%")
        assert label in MEANINGS
    even = tendency(np.full((n, n), 1 / n))
    assert (even.label, even.number) == ("all evenly", "100\u00a0%")


@pytest.mark.parametrize(
    ("kind", "share", "uniform_share", "distance", "expected"),
    [
        ("encoder", 0.33, 0.2, 1.0, ("next word", "33\u00a0%")),
        ("memory", 0.33, 0.2, 1.0, ("translated next", "33\u00a0%")),
        ("encoder", 0.32, 0.2, 2.5, ("nearby words", "2.5 tokens")),
        ("encoder", 0.32, 0.2, 2.6, ("mixed", "32\u00a0%")),
        ("memory", 0.32, 0.2, 1.0, ("mixed", "32\u00a0%")),
        ("memory", 0.4, 0.3, 1.0, ("mixed", "40\u00a0%")),
        ("memory", 0.95, 0.9, 1.0, ("translated next", "95\u00a0%")),
    ],
)
def test_a_label_has_the_number_that_gave_it(
    kind: Any, share: float, uniform_share: float, distance: float, expected: tuple[str, str]
) -> None:
    assert (
        describe(kind, {"next": share, "first": 0.1}, {"next": uniform_share, "first": 0.2}, distance, 0.5) == expected
    )
    assert expected[0] in MEANINGS


def test_the_parts_of_a_head_count_each_token_once_and_the_place_of_the_label_first() -> None:
    """All tokens attend to the comma: the next word of "Haus", the previous word of "gut", the same word as itself."""
    n = len(PIECES)
    head = tendency(np.eye(n)[[3] * n])
    assert head.label == "punctuation"
    assert sum(head.shares.values()) > 1
    assert head.parts == head.shares | {"punctuation": 1, "same": 0, "previous": 0, "next": 0}
    even = tendency(np.full((n, n), 1 / n))
    assert sum(even.parts.values()) <= 1 + 1e-3 < sum(even.shares.values())
    assert all(even.parts[place] <= share + 1e-4 for place, share in even.shares.items())


def test_distance_entropy_and_shares_equal_those_computed_by_hand() -> None:
    """Each token attends half to itself and half to the first token."""
    n = len(PIECES)
    head = tendency((np.eye(n) + np.eye(n)[[0] * n]) / 2)
    assert head.distance == pytest.approx(15 / 2 / 6)  # half of 0 + 1 + ... + 5, divided by 6 rows
    assert head.entropy == pytest.approx(5 / 6)  # one bit in each row except the first
    assert head.shares["first"] == pytest.approx((5 * 0.5 + 1) / 6)
    assert head.shares["punctuation"] == pytest.approx(0.5 / 6)
    even = tendency(np.full((n, n), 1 / n))
    assert even.entropy == pytest.approx(np.log2(n))
    assert even.evenness == pytest.approx(1)


def test_rows_with_a_single_visible_position_do_not_count() -> None:
    """In the decoder, the first token can attend only to itself."""
    places = self_places(["<s>", "▁a", "▁b"], [True, False, False])
    (head,) = tendencies("decoder", np.eye(3)[[0, 0, 1]][None, None], visibility("decoder", 3, 3, None), places)
    assert head.label == "previous word"
    assert head.shares["same"] == pytest.approx(0, abs=1e-6)
    assert "next" not in head.shares, "the next word is not visible"


def test_the_places_of_memory_attention_follow_the_alignment() -> None:
    """Target words 0 and 1 are aligned with source words 1 and 0."""
    source, marks = ["▁a", "▁b", "</s>"], [False, False, True]
    places = memory_places(source, marks, [0, 1, None], [None, 0, 1], [(1, 0), (0, 1)])
    assert places["same"].tolist() == [[False] * 3, [False, True, False], [True, False, False]]
    assert places["next"].tolist() == [[False, True, False], [True, False, False], [False] * 3]
    assert places["previous"].tolist() == [[False] * 3, [False] * 3, [False, True, False]]
    assert "same" not in memory_places(source, marks, [0, 1, None], [None, 0, 1], None)


# The page


class Scripts(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(("", {}))
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data

    def elements(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, text) for (name, attrs), text in zip(self.tags, self.texts, strict=True) if name == tag]


def test_a_page_contains_its_records_even_if_they_contain_html() -> None:
    record = record_of(HOSTILE, text=HOSTILE[0])
    html = to_page([record, record], "</script>", "<b>")
    parsed = Scripts(html)
    (attributes, data), (_, script) = parsed.elements("script")
    assert attributes == {"type": "application/json", "id": "records"}
    assert script == (WEB / "inspector.js").read_text()
    document = json.loads(data)
    assert document["records"][0]["target"][1:] == HOSTILE
    assert from_document(document)[0].target == record.target
    assert not set("<>&\u2028\u2029") & set(data)
    assert {tag for tag, _ in parsed.tags if tag} == {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "script",
    }


def test_the_policy_of_a_page_allows_only_its_own_script_and_style(hand_made: AttentionRecord) -> None:
    parsed = Scripts(to_page([hand_made]))
    (policy,) = [a["content"] for a, _ in parsed.elements("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in (policy or "").split("; "))
    for tag, text in (("script", parsed.elements("script")[1][1]), ("style", parsed.elements("style")[0][1])):
        assert rules[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert rules["default-src"] == "'none'"
    assert not any("src" in attributes or "href" in attributes for _, attributes in parsed.tags)


def test_the_script_uses_no_html_strings_and_no_requests() -> None:
    script, html, style = ((WEB / name).read_text() for name in ("inspector.js", "index.html", "style.css"))
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "import ",
        "fetch(",
    ):
        assert forbidden not in script
    assert not re.search(r"https?:", script + html + style)
    assert not re.search(r"\sstyle=|\son\w+=", html)
    assert "url(" not in style
    assert "@import" not in style


def test_the_package_contains_the_files_of_the_page() -> None:
    patterns = tomllib.loads((WEB.parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in WEB.iterdir():
        assert any(fnmatch(f"web/{path.name}", pattern) for pattern in patterns["transduce"]), path


def test_a_page_too_large_for_browsers_is_refused(hand_made: AttentionRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_WEIGHT_BYTES", 1000)
    with pytest.raises(DataError, match="fewer or shorter sentences"):
        to_page([hand_made] * 5)


# Pictures


def test_a_picture_shows_the_selected_heads(hand_made: AttentionRecord, tmp_path: Path) -> None:
    assert [(head.layer, head.head) for head in choose_heads(hand_made, "encoder", None, None)] == [
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert [(head.layer, head.head) for head in choose_heads(hand_made, "memory", 1, 3)] == [(0, 2)]
    assert len(choose_heads(hand_made, "memory", None, None)) == 1
    for layer, head in ((3, None), (1, 4)):
        with pytest.raises(ConfigError, match="this model has"):
            choose_heads(hand_made, "decoder", layer, head)
    record = record_of(["$x$", "🙂", "\u202ea"])
    for form in ("png", "svg"):
        draw(record, choose_heads(record, "decoder", 1, None), tmp_path / form, form)
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "svg").read_bytes()
    first = (tmp_path / "svg").read_bytes()
    draw(record, choose_heads(record, "decoder", 1, None), tmp_path / "svg", "svg")
    assert (tmp_path / "svg").read_bytes() == first


def test_without_matplotlib_the_message_names_the_package_to_install(
    hand_made: AttentionRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs the package matplotlib: .*pip install"):
        draw(hand_made, hand_made.heads[:1], tmp_path / "x.png", "png")


# The command


def test_the_first_argument_may_be_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "in.de").touch()
    assert split_arguments(["run", "Ja."]) == (Path("run"), ["Ja."])
    assert split_arguments(["tatoeba-de-en", "Ja."]) == (Path("tatoeba-de-en"), ["Ja."])
    assert split_arguments(["Das ist gut.", "Ja."]) == (None, ["Das ist gut.", "Ja."])
    assert split_arguments(["Ja."]) == (None, ["Ja."])
    assert split_arguments(["a " * 3000]) == (None, ["a " * 3000])
    for unknown in (["no-run", "Ja."], ["no/run"]):
        with pytest.raises(ModelFolderError, match="is not a model folder"):
            split_arguments(unknown)
    with pytest.raises(DataError, match=r"--source in\.de"):
        split_arguments(["in.de"])


def test_sentences_are_read_from_arguments_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "in.de").write_text("Ja.\n\nNein.\n")
    (tmp_path / "blank").write_text("\n \n")
    assert sentences_of(["Ja,\nnein."], None) == ["Ja, nein."]
    assert sentences_of([], str(tmp_path / "in.de")) == ["Ja.", "Nein."]
    with pytest.raises(DataError, match="sentence 2 is empty"):
        sentences_of(["Ja.", " "], None)
    with pytest.raises(DataError, match="contains no sentence"):
        sentences_of([], str(tmp_path / "blank"))
    with pytest.raises(DataError, match="cannot be read"):
        sentences_of([], str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="exclude each other"):
        sentences_of(["Ja."], "in.de")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "memories"}, "--kind is 'memories'"),
        ({"opens_page": True}, "add --html"),
        ({"head": 1, "png": Path("x")}, "add --layer"),
        ({"layer": 1}, "add --png"),
        ({"kind": "encoder", "html": Path("x")}, "add --png"),
    ],
    ids=str,
)
def test_invalid_output_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OutputOptions(**options)


def test_a_page_of_several_sentences_is_opened_if_requested(
    hand_made: AttentionRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    path = tmp_path / "a b.html"
    (message,) = write([hand_made] * 2, OutputOptions(html=path, opens_page=True), Console(), "run", "de-en")
    assert opened == [path.as_uri()]
    assert re.fullmatch(rf"{path}: 2 sentences, 18 heads, \d+ kB; open it in a browser", message)


def transduce(*arguments: str, stdin: str = "", cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transduce", "inspect", *arguments, "--device", "cpu"]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=cwd)


def test_the_command_writes_the_requested_files(tmp_path: Path) -> None:
    files = ["--html", "a.html", "--json", "a.json", "--png", "a.png", "--svg", "a.svg"]
    result = transduce("Das ist gut.", *files, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "a.html: 1 sentence, 36 heads" in result.stderr
    (record,) = from_document(json.loads((tmp_path / "a.json").read_text()))
    assert record.translation == "That's good."
    document = json.loads(Scripts((tmp_path / "a.html").read_text()).elements("script")[0][1])
    assert (document["model"], document["direction"]) == ("tatoeba-de-en", "de-en")
    assert (tmp_path / "a.png").stat().st_size > 2000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "a.png", "a.svg"]


def test_without_a_file_the_command_prints_a_summary(tmp_path: Path) -> None:
    result = transduce("-q", stdin="Das ist gut.\n\nIch bin müde.\n", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    for text in ("That's good.", "I'm tired.", "word alignment: ", "just translated"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-model", "Das ist gut."], "no-model is not a model folder"),
        ([""], "sentence 1 is empty"),
        (["Das ist gut.", "--html", "no/where.html"], "no/where.html cannot be written"),
        (["Das ist gut.", "--to", "fr"], "--to is 'fr'"),
        (["Das ist gut.", "--seed", "3"], "add --sample"),
        (["Das ist gut.", "Wo ist er?", "--png", "x.png"], "a picture shows one sentence"),
    ],
    ids=str,
)
def test_bad_input_gives_a_one_line_message_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = transduce("-q", *arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert message in result.stderr
    assert not list(tmp_path.iterdir())
