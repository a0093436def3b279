"""The arguments of a translation: texts and keywords in Python, files and sentences on the command line."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bundled import transduce
from transduce import ConfigError, DataError, DecodeConfig, ModelFolderError, Translation, Translator
from transduce.cli.model import flag_of
from transduce.model_folder.format import BUNDLED
from transduce.translation.arguments import is_sentence, split_arguments
from transduce.translation.keywords import SearchKeywords, search_settings
from transduce.translation.result import Alternative

GOOD, TIRED = "That's good.", "I'm tired."


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(device="cpu")


# Texts


def test_one_text_gives_one_translation_and_several_give_a_list(translator: Translator) -> None:
    one = translator.translate("Das ist gut.")
    assert isinstance(one, Translation)
    assert one.text == GOOD
    several = ["Das ist gut.", "Ich bin müde."]
    for texts in (several, tuple(several), iter(several)):
        assert [translation.text for translation in translator.translate(texts)] == [GOOD, TIRED]
    assert translator.translate([]) == []
    assert translator.translate("").text == ""


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts is None, must be a string or a list of strings"),
        (b"Das ist gut.", "texts is b'Das ist gut.', must be a string or a list of strings"),
        (3, "texts is 3, must be a string or a list of strings"),
        ({"q": "Ja."}, "texts is {'q': 'Ja.'}, must be a string or a list of strings"),
        ({"Ja."}, "texts is {'Ja.'}, must be a string or a list of strings"),
        (["Ja.", "Nein.", None], "item 3 of texts is None, must be a string: the first item is item 1"),
        (("Ja.", b"Nein."), "item 2 of texts is b'Nein.', must be a string"),
        (iter([3.5]), "item 1 of texts is 3.5, must be a string"),
        ([["Ja."]], "item 1 of texts is ['Ja.'], must be a string"),
    ],
    ids=str,
)
def test_what_is_not_text_is_a_type_error_that_names_it(translator: Translator, texts: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        translator.translate(texts)


@pytest.mark.parametrize("method", ["stream", "explain"])
def test_a_stream_refuses_one_string_before_it_is_read(translator: Translator, method: str) -> None:
    start: Any = getattr(translator, method)
    with pytest.raises(TypeError, match=r"^texts is one string, must be a list of strings: write \[text\]"):
        start("Das ist gut.")
    with pytest.raises(TypeError, match=r"^texts is None, must be a list of strings"):
        start(None)
    with pytest.raises(ConfigError, match=r"^beam is 0"):
        start(["Das ist gut."], beam=0)


@pytest.mark.parametrize("as_list", [True, False])
def test_a_wrong_item_of_a_stream_is_an_error_after_the_lines_before_it(translator: Translator, as_list: bool) -> None:
    texts: Any = ["Das ist gut.", "", None, "Ich bin müde."]
    stream = translator.stream(texts if as_list else iter(texts))
    assert [next(stream).text for _ in range(2)] == [GOOD, ""]
    with pytest.raises(TypeError, match=r"^item 3 of texts is None, must be a string"):
        next(stream)


# Keywords


def test_keywords_change_the_search_of_one_call(translator: Translator) -> None:
    engine, stepper, settings = translator.engine, translator.stepper, translator.settings
    text = "Wo ist mein Buch?"
    three = translator.translate(text, n_best=3)
    assert len(three.alternatives) == 3
    assert len(translator.translate([text] * 2, beam=8, n_best=8)[1].alternatives) == 8
    assert len(translator.translate(text).alternatives) == 1
    greedy_search = Translator.load(device="cpu", settings=replace(settings, beam_size=1))
    long = "Gestern habe ich meinen Freund gesehen, aber er hat mich nicht erkannt."
    assert translator.translate(long, beam=1) == greedy_search.translate(long)
    assert greedy_search.translate(long, beam=4) == translator.translate(long)
    samples = [translator.translate(text, sample=True, temperature=2.0, seed=seed).text for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert translator.translate(text, sample=True, top_k=1).text == translator.translate(text, beam=1).text
    cut = translator.translate(text, sample=True, temperature=9.0, max_extra_tokens=0, with_details=True)
    assert "limit" in cut.flags
    (streamed,) = translator.stream([text], "en", n_best=2)
    ((explained, _),) = translator.explain([text], "en", n_best=2)
    assert len(streamed.alternatives) == len(explained.alternatives) == 2
    assert (translator.engine, translator.stepper, translator.settings) == (engine, stepper, settings)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"beam": 0}, "beam is 0, must be at least 1: raise it", "--beam is 0, must be at least 1: raise it"),
    ({"beam": 2.5}, "beam is 2.5, must be a whole number", "--beam is 2.5, must be a whole number"),
    ({"beam": 2, "n_best": 4}, "n_best is 4, must be at most beam, 2", "--nbest is 4, must be at most --beam, 2"),
    ({"beam": 2, "sample": True}, "beam and sample exclude each other", "--beam and --sample exclude each other"),
    (
        {"top_p": 0.5},
        "top_p has an effect only when sampling: add sample=True",
        "--top-p has an effect only when sampling: add --sample",
    ),
    ({"seed": 5, "sample": False}, "seed has an effect only when sampling", "--seed has an effect only when sampling"),
    ({"sample": True, "temperature": 0}, "temperature is 0.0, must be above 0", "--temperature is 0.0, must be above"),
    ({"sample": True, "top_k": -1}, "top_k is -1, must be at least 0", "--top-k is -1, must be at least 0"),
    ({"max_extra_tokens": -1}, "max_extra_tokens is -1, must be", "--max-extra-tokens is -1, must be"),
]


@pytest.mark.parametrize(("keywords", "message", "with_dashes"), REFUSED, ids=str)
def test_keywords_are_refused_as_flags_are(
    translator: Translator, keywords: dict[str, Any], message: str, with_dashes: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        translator.translate("Ja.", **keywords)
    with pytest.raises(ConfigError, match=f"^{re.escape(with_dashes)}"):
        search_settings(DecodeConfig(), keywords, flag_of)


def test_an_unknown_keyword_is_refused(translator: Translator) -> None:
    with pytest.raises(
        TypeError, match=r"'bean' is not a keyword of a translation: choose from beam, n_best, .* seed$"
    ):
        translator.translate("Ja.", bean=3)  # type: ignore[call-overload]
    names = {field.name for field in fields(DecodeConfig)} | {"beam", "sample"}
    assert SearchKeywords.__annotations__.keys() <= names


def test_a_sampler_takes_the_keywords_of_sampling_and_may_search_for_one_call() -> None:
    sampler = DecodeConfig(method="sample", n_best=9)
    assert search_settings(sampler, {"temperature": 0.5}) == replace(sampler, temperature=0.5)
    assert search_settings(sampler, {"beam": 9}) == DecodeConfig(beam_size=9, n_best=9)
    assert search_settings(sampler, {"sample": False}) == DecodeConfig(beam_size=9, n_best=9)
    assert search_settings(sampler, {"n_best": 2, "sample": None}) == replace(sampler, n_best=2)


def test_messages_of_the_python_api_have_no_dashes_and_those_of_the_command_have(translator: Translator) -> None:
    refused: list[dict[str, Any]] = [{"to": "fr"}, {"prefix": "a\tb"}]
    for keywords in refused:
        with pytest.raises(ConfigError) as error:
            translator.translate("Ja.", **keywords)
        assert "--" not in str(error.value)
        (name, value) = next(iter(keywords.items()))
        done = transduce("translate", "-q", "Ja.", f"--{name}", value)
        assert done.stderr == f"transduce: --{error.value}\n"


# Objects at a prompt


def test_translators_and_translations_are_short_at_a_prompt(translator: Translator, tmp_path: Path) -> None:
    assert re.fullmatch(
        r"<Translator: tatoeba-de-en; de-en; 7\.6 M parameters; (native|cached) engine in float32; cpu>",
        repr(translator),
    )
    (tmp_path / "copy").symlink_to(BUNDLED)
    assert repr(str(tmp_path / "copy")) in repr(Translator.load(str(tmp_path / "copy"), device="cpu"))
    unused = Translator(translator.model, translator.config, translator.subwords)
    assert repr(unused) == "<Translator: 7.6 M parameters; cpu>"
    assert "engine" not in unused.__dict__, "showing it does not compile"
    many = replace(translator.origin, directions=tuple(("de", f"x{i}") for i in range(9)))
    shown = repr(Translator(translator.model, translator.config, translator.subwords, many))
    assert "de-x0, de-x1, de-x2, de-x3, 5 more;" in shown

    translation = translator.translate("Das ist gut.", n_best=3, with_details=True)
    assert str(translation) == f"{translation}" == GOOD
    assert repr(translation) == f'Translation("{GOOD}", score={translation.score:.2f}, 3 alternatives, 6 tokens)'
    flagged = Translation("a", -1.0, -2.0, ("split",), (Alternative("a", -1.0, -2.0),))
    assert repr(flagged) == "Translation('a', score=-1.00, flags=('split',))"


@pytest.mark.parametrize("name", ["load", "translate", "stream", "explain"])
def test_examples_in_the_docstrings_of_methods_run(translator: Translator, name: str) -> None:
    text = inspect.getdoc(getattr(Translator, name)) or ""
    code = [part for part in re.findall(r"`([^`]+)`", text) if "ranslator." in part]
    assert code
    for example in code:
        if name == "load":  # there is no folder with this name
            (statement,) = ast.parse(example).body
            assert isinstance(statement, ast.Expr)
            assert isinstance(statement.value, ast.Call)
            inspect.signature(Translator.load).bind(
                *statement.value.args, **{str(k.arg): k for k in statement.value.keywords}
            )
        else:
            exec(example, {"translator": translator})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "tpu"}, ConfigError, "device is 'tpu', must be cpu or cuda: leave it out"),
        ({"device": ""}, ConfigError, "device is '', must be cpu or cuda"),
        (
            {"folder": "nowhere"},
            ModelFolderError,
            "nowhere/config.json cannot be read (No such file or directory): give",
        ),
        ({"folder": __file__}, ModelFolderError, f"{__file__}/config.json cannot be read (Not a directory): give"),
        ({"folder": str(Path(__file__).parent)}, ModelFolderError, str(Path(__file__).parent / "config.json")),
        ({"precision": "int4"}, ConfigError, "precision is 'int4', must be float32 or int8: choose one"),
        ({"dtype": "bfloat16"}, ConfigError, "dtype is 'bfloat16', must be a dtype of PyTorch: give torch.float32"),
    ],
    ids=str,
)
def test_loading_refuses_wrong_arguments_in_one_line(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}") as refused:
        Translator.load(**{"device": "cpu", **arguments})
    assert "\n" not in str(refused.value)


def test_a_gpu_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(
            ConfigError, match=r"^device is cuda, but PyTorch finds no GPU: leave it out to use the CPU"
        ):
            Translator.load(device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("cuda:1", "cuda:x"):
        with pytest.raises(ConfigError, match=f"^device is {device}, must be below cuda:1"):
            Translator.load(device=device)


# The command line


SENTENCES = [
    "Das ist gut.",
    "Das ist gut",
    "Danke!",
    "Wo?",
    '"Danke."',
    "これは家です。",
    "Er und/oder sie kommt.",
    "a " * 3000,
]
PATHS = ["run", "modle/", "in.de", "no/run", "/no/in.de", "Hallo", "my dir/in.de", "...", "in.de.gz", "no/run.", "-x"]


def test_sentences_differ_from_paths() -> None:
    assert [text for text in SENTENCES if not is_sentence(text)] == []
    assert [text for text in PATHS if is_sentence(text)] == []


def test_arguments_are_a_model_then_files_or_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("in.de", "my file.de", "Ja."):
        (tmp_path / name).touch()
    assert split_arguments([]) == (None, [], [])
    assert split_arguments(["run"]) == (Path("run"), [], [])
    assert split_arguments(["tatoeba-de-en", "in.de", "-"]) == (Path("tatoeba-de-en"), ["in.de", "-"], [])
    assert split_arguments(["-"]) == (None, ["-"], [])
    assert split_arguments(["my file.de", "Ja."]) == (None, ["my file.de", "Ja."], [])
    assert split_arguments(["run", "Nein.", "Das\nist gut"]) == (Path("run"), [], ["Nein.", "Das ist gut"])
    assert split_arguments(["Das ist gut.", "Wo?"]) == (None, [], ["Das ist gut.", "Wo?"])
    for arguments in (["rnu"], ["rnu", "in.de"], ["in.fr"], ["rnu/"], ["Hallo"]):
        with pytest.raises(ModelFolderError, match=f"{arguments[0]} is neither a model folder nor a file: correct its"):
            split_arguments(arguments)
    with pytest.raises(DataError, match=r"in\.fr is not a file: correct its name, or end it with a full stop"):
        split_arguments(["run", "in.de", "in.fr"])
    with pytest.raises(DataError, match="argument 2 is empty"):
        split_arguments(["run", " "])
    with pytest.raises(ConfigError, match=r"in\.de is a file, 'Das ist gut\.' is not: give only"):
        split_arguments(["in.de", "Das ist gut."])


@pytest.mark.parametrize("model", [[], ["tatoeba-de-en"]], ids=str)
def test_sentences_on_the_command_line_are_translated(model: list[str]) -> None:
    done = transduce("translate", *model, "Das ist gut.", "Ich bin müde.", "--device", "cpu", stdin="Ja.\n")
    assert (done.returncode, done.stdout) == (0, f"{GOOD}\n{TIRED}\n"), done.stderr
    assert "2 lines in" in done.stderr
    table = transduce("translate", *model, "-q", "1\tDas ist gut.", "--column", "2", "--scores", "--device", "cpu")
    assert re.fullmatch(r"1\tDas ist gut\.\tThat's good\.\t-\d\.\d{4}\n", table.stdout)
    refused = transduce("translate", *model, "-q", "Das ist gut.", "--column", "2")
    assert refused.stderr == "transduce: sentence 1: has 1 columns, must have 2: correct the line\n"
