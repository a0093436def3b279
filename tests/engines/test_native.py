"""The compiled engine: exact products, the same results as its slow twins, and an error that says why it is missing."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import transduce.engines.native.library as native
from tests.support.bundled import heldout
from tests.support.primes import prime_config, random_model
from tests.support.search import by_number, rules_of, sentences_of, sources
from transduce import Translator
from transduce.config import DecodeConfig
from transduce.engines.cached import CachedStepper
from transduce.engines.cells import Cells
from transduce.engines.layers import Precision
from transduce.engines.native.stepper import COLUMNS, DTYPES, INPUTS, ROWS, NativeStepper
from transduce.errors import DataError
from transduce.model import Transformer
from transduce.search.candidates import SearchSettings, best, free
from transduce.search.hypotheses import Beams, Hypothesis, Sentence
from transduce.search.loop import limit_of, padded, search, sentences_at_a_time
from transduce.search.peaks import GROUP, Peaks

pytestmark = pytest.mark.skipif(
    "AVX512" in str(native.unsupported("int8")), reason="this processor cannot run the compiled engine"
)
PRECISIONS: list[Precision] = ["int8", "float32"]


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@pytest.fixture(scope="module", params=[(), ("-mno-amx-int8",)], ids=["all instructions", "without AMX"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("native") / "native.so"
    flags = [*native.FLAGS, *native.WIDE, *request.param, "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *flags, "-o", str(path), str(native.SOURCE), "-lm"], check=True)
    return native.load(path)


SHAPES = [
    (1, 64, 32),
    (2, 70, 160),
    (37, 130, 75),
    (4, 256, 768),
    (3, 100, 300),
    (128, 1024, 256),
    (19, 4100, 32),
    (141, 700, 70),
]


def with_padding(x_RN: Tensor) -> Tensor:
    """Rows and inputs padded to the multiples that products require."""
    n_rows, n_in = x_RN.shape
    return F.pad(x_RN, (0, round_up(n_in, INPUTS) - n_in, 0, round_up(n_rows, ROWS) - n_rows))


def product_by(library: ctypes.CDLL, W_FN: Tensor, dtype: torch.dtype) -> Callable[[Tensor, int], Tensor]:
    """A function that multiplies the first rows of a padded tensor by W. `dtype`: the dtype of its result."""
    n_out, n_in = W_FN.shape
    packed = torch.empty(round_up(n_in, INPUTS) * round_up(n_out, COLUMNS), dtype=W_FN.dtype)
    sums = torch.empty(round_up(n_out, COLUMNS), dtype=torch.int32)
    library.pack(W_FN.data_ptr(), n_in, n_out, packed.data_ptr(), sums.data_ptr())
    matrix = native.Matrix(packed.data_ptr(), sums.data_ptr(), None, None, n_in, n_out)

    def product(x_RN: Tensor, n_rows: int, _keep_alive: tuple[Tensor, Tensor] = (packed, sums)) -> Tensor:
        result_RF = torch.empty(round_up(n_rows, ROWS), round_up(n_out, COLUMNS), dtype=dtype)
        library.multiply(x_RN.data_ptr(), n_rows, ctypes.byref(matrix), result_RF.data_ptr())
        return result_RF[:n_rows, :n_out]

    return product


@pytest.mark.parametrize(("n_rows", "n_in", "n_out"), SHAPES)
def test_int8_products_are_exact(library: ctypes.CDLL, n_rows: int, n_in: int, n_out: int) -> None:
    torch.manual_seed(0)
    x_RN, W_FN = (torch.randint(-127, 128, (n, n_in), dtype=torch.int8) for n in (n_rows, n_out))
    result_RF = product_by(library, W_FN, torch.int32)(with_padding(x_RN), n_rows)
    assert torch.equal(result_RF, x_RN.int() @ W_FN.int().T)


@pytest.mark.parametrize(("n_rows", "n_in", "n_out"), SHAPES)
def test_in_float32_a_row_has_the_same_result_alone_and_among_others(n_rows: int, n_in: int, n_out: int) -> None:
    torch.manual_seed(0)
    x_RN, W_FN = (torch.randn(n, n_in) for n in (n_rows, n_out))
    product, padded_RN = product_by(native.library("float32"), W_FN, torch.float32), with_padding(x_RN)
    result_RF = product(padded_RN, n_rows)
    expected = x_RN.double() @ W_FN.double().T
    torch.testing.assert_close(result_RF.double(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(result_RF, torch.cat([product(padded_RN[row:], 1) for row in range(n_rows)]))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weighted_sums_of_a_query_are_the_same_alone_and_together(precision: Precision) -> None:
    """Attention multiplies rows by the weights of up to four queries at once."""
    torch.manual_seed(0)
    weighted_sums = native.library(precision).weighted_sums
    for width, n_rows in itertools.product((13, 16, 29, 32, 41, 64, 70), range(1, 50)):
        rows_RW, weight_QR = torch.randn(n_rows, width).to(DTYPES[precision][1]), torch.randn(4, n_rows)
        lengths = n_rows, n_rows, rows_RW.data_ptr(), width, 0, width
        together = {n: torch.full((n, width), torch.nan) for n in (2, 3, 4)}
        alone_QW = torch.full((4, width), torch.nan)
        for n, out_QW in together.items():
            weighted_sums(n, weight_QR.data_ptr(), *lengths, out_QW.data_ptr(), width)
        for query in range(4):
            weighted_sums(1, weight_QR[query].data_ptr(), *lengths, alone_QW[query].data_ptr(), width)
        torch.testing.assert_close(alone_QW, weight_QR @ rows_RW.float(), rtol=1e-4, atol=1e-4)
        assert all(torch.equal(out_QW, alone_QW[:n]) for n, out_QW in together.items()), (width, n_rows)


def test_a_product_of_no_rows_writes_nothing() -> None:
    for precision, (dtype, _) in DTYPES.items():
        library, sum_dtype = native.library(precision), torch.float32 if precision == "float32" else torch.int32
        packed, sums = torch.zeros(64 * 64, dtype=dtype), torch.zeros(64, dtype=torch.int32)
        matrix = native.Matrix(packed.data_ptr(), sums.data_ptr(), None, None, 64, 64)
        x_RN, out_RF = torch.ones(32, 64).to(dtype), torch.full((32, 64), 7, dtype=sum_dtype)
        library.multiply(x_RN.data_ptr(), 0, ctypes.byref(matrix), out_RF.data_ptr())
        assert bool((out_RF == 7).all())


CHANGES: list[dict[str, Any]] = [
    {},
    {"positions": "learned", "max_positions": 60},
    {"attention_bias": True, "output_bias": True},
    {"tied_embeddings": "none", "target_vocab_size": 1103},
    {"d_model": 64, "d_ff": 600, "n_heads": 4},
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_steps_equal_those_of_the_slow_twin(changes: dict[str, Any], precision: Precision) -> None:
    """The two rows of each sentence are reordered at every step; sentences join and leave. In int8 a value halfway
    between two integers may be rounded differently, which changes its row: most rows are close, and none is far off."""
    config = prime_config(**changes)
    model = random_model(config, torch.float32).eval()
    exact, slow, fast = CachedStepper(model), CachedStepper(model, "int8"), NativeStepper(model, precision)
    if precision == "float32":
        exact, slow = slow, exact
    steppers: list[Any] = [exact, slow, fast]
    first, second = (sources(n, longest, n, config.pad_id) for n, longest in ((3, 11), (2, 17)))
    states = [stepper.start(first).select(torch.arange(3).repeat_interleave(2)) for stepper in steppers]
    torch.manual_seed(1)
    errors: list[Tensor] = []
    int8_errors: list[Tensor] = []
    for i in range(30):
        n = states[0].n_sentences
        last_R = torch.randint(3, 30, (2 * n,))
        results: list[Peaks] = []
        for place, stepper in enumerate(steppers):
            peaks, states[place] = stepper.step(last_R, states[place])
            results.append(peaks)
        errors.append((results[2].logits() - results[1].logits()).abs().amax(1))
        int8_errors.append((results[1].logits() - results[0].logits()).abs().amax(1))
        check_peaks(results[2])
        rows_R = torch.randint(0, 2, (2 * n,)) + 2 * torch.arange(n).repeat_interleave(2)
        kept = torch.randperm(n)[: n - 1] if i % 9 == 5 else None
        rows_R = rows_R if kept is None else rows_R.view(n, 2)[kept].flatten()
        states = [state.select(rows_R, kept) for state in states]
        if i % 9 == 6:
            new = [stepper.start(second).select(torch.arange(2).repeat_interleave(2)) for stepper in steppers]
            states = [state.join(other) for state, other in zip(states, new, strict=True)]
    error_R, int8_error_R = torch.cat(errors), torch.cat(int8_errors)
    assert float(error_R.median()) < 1e-3 * float(int8_error_R.median())
    assert float(error_R.max()) < (2 if precision == "int8" else 1e-3) * float(int8_error_R.max())


def check_peaks(peaks: Peaks) -> None:
    """The peaks, the sum and the groups that can be read agree with the logits."""
    logits_RV = peaks.logits()
    expected = Peaks.of(logits_RV)
    torch.testing.assert_close(peaks.peak_RN, expected.peak_RN)
    torch.testing.assert_close(peaks.log_sum_R1, expected.log_sum_R1, atol=2e-5, rtol=0)
    n_rows, n_groups = peaks.peak_RN.shape
    row, group = torch.arange(n_rows)[:, None].expand(-1, n_groups), torch.arange(n_groups).expand(n_rows, -1)
    read_RV = peaks.read_groups(row.contiguous(), group.contiguous()).flatten(1)[:, : logits_RV.shape[1]]
    torch.testing.assert_close(read_RV, logits_RV)
    last = peaks.read_groups(row[:, -1:].contiguous(), group[:, -1:].contiguous()).flatten(1)
    assert bool((last[:, logits_RV.shape[1] - (n_groups - 1) * GROUP :] < -1e38).all()), "columns past the vocabulary"


class StepsOnly:
    """The same steps, without `turn` and `enter`: the search uses those of search/loop.py."""

    def __init__(self, stepper: NativeStepper) -> None:
        self.start, self.step = stepper.start, stepper.step


def model_that_ends(bias: float) -> Transformer:
    """A random model with a bias for the end mark: without it, all hypotheses would be cut at the limit."""
    config = prime_config(target_vocab_size=300, tied_embeddings="none", output_bias=True)
    model = random_model(config, torch.float32).eval()
    assert model.embedding.output_bias is not None
    with torch.no_grad():
        model.embedding.output_bias[config.eos_id] += bias
    return model


SEARCHES: list[tuple[dict[str, Any], float]] = [
    ({"beam_size": 1}, 0.3),
    ({"beam_size": 4, "n_best": 3}, 0.3),
    ({"beam_size": 3, "min_length": 9}, 0),
    ({"beam_size": 3, "stop_early": False}, 0),
    ({"beam_size": 4, "length_penalty": "length", "length_alpha": 1.0}, 0),
    ({"beam_size": 4, "n_best": 4}, 0.99),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("settings", "forbidden"), SEARCHES, ids=str)
def test_compiled_turns_give_the_results_of_the_turns_in_python(
    settings: dict[str, Any], forbidden: float, precision: Precision
) -> None:
    """Past tokens may be summed in another order, so scores differ slightly. In int8 a value may then be rounded to
    another integer, and a few searches choose differently. `forbidden`: the share of forbidden tokens."""
    decode, n_different = DecodeConfig(**settings), 0
    fast = NativeStepper(model_that_ends(8 if decode.beam_size == 1 else 6), precision)
    config, rules = fast.config, rules_of(fast.config, forbidden)
    rules = rules._replace(penalty_AV=rules.penalty_AV.float())
    sentences, n_turns = sentences_of(61, 5), Counter[bool]()

    def results_of(is_fast: bool) -> dict[int, list[Hypothesis]]:
        stepper: Any = fast if is_fast else StepsOnly(fast)
        count = lambda _: n_turns.update([is_fast]) or ()  # noqa: E731
        return by_number(search(stepper, config, sentences, decode, rules, batch_size=11, cancelled=count))

    results, expected = results_of(True), results_of(False)
    assert results.keys() == expected.keys()
    assert n_turns[True] == pytest.approx(n_turns[False], rel=0.05), "only close choices may change the number of turns"
    if forbidden < 0.9:
        assert {True, False} == {h.has_ended for hypotheses in expected.values() for h in hypotheses}
    for number, slow in expected.items():
        quick = results[number]
        is_same = [(h.ids, h.has_ended) for h in quick] == [(h.ids, h.has_ended) for h in slow]
        tolerance = 1e-4 if precision == "float32" else 0.05
        is_near = is_same and all(
            (a.log_prob, a.score, a.margin) == pytest.approx((b.log_prob, b.score, b.margin), rel=1e-5, abs=tolerance)
            for a, b in zip(quick, slow, strict=True)
        )
        n_different += not is_near and slow[0].margin > tolerance
    assert n_different <= (0 if precision == "float32" else 3)


@pytest.mark.parametrize(("beam_size", "max_sentences"), [(1, 24), (4, 6), (30, 1)])
def test_a_small_model_searches_at_most_max_rows_hypotheses_at_a_time(
    beam_size: int, max_sentences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transduce.engines.native.stepper.MAX_ROWS", 24)
    stepper, settings = NativeStepper(model_that_ends(6), "int8"), DecodeConfig(beam_size=beam_size)
    n_running: list[int] = []

    def count(running: Sequence[Sentence]) -> Iterable[int]:
        n_running.append(len(running))
        return ()

    results = by_number(search(stepper, stepper.config, sentences_of(61, 5), settings, batch_size=50, cancelled=count))
    assert len(results) == 61
    assert max(n_running) == max_sentences


def test_a_large_model_has_no_limit_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are read from memory at each step, for few rows as for many."""
    monkeypatch.setattr("transduce.engines.native.stepper.CACHED", 1000)
    stepper = NativeStepper(model_that_ends(6), "int8")
    assert stepper.n_bytes > 1000
    assert sentences_at_a_time(stepper, 1000, 4) == 1000
    assert sentences_at_a_time(CachedStepper(model_that_ends(6)), 1000, 4) == 1000
    assert NativeStepper(model_that_ends(6), "float32").max_rows is None


def test_keys_out_of_the_range_of_float16_are_clamped() -> None:
    config = prime_config(attention_bias=True)
    model = random_model(config, torch.float32).eval()
    with torch.no_grad():
        for layer in model.decoder:
            assert layer.memory_attention.W_KV.b is not None
            layer.memory_attention.W_KV.b[: config.n_heads * config.d_k : 2] = 1e6
            layer.memory_attention.W_KV.b[1 : config.n_heads * config.d_k : 2] = -1e6
    steppers: list[Any] = [CachedStepper(model, "int8"), NativeStepper(model, "int8")]
    source_BS = sources(3, 11, 1, config.pad_id)
    states = [stepper.start(source_BS) for stepper in steppers]
    key_LBHK = states[1].memory_key_LBHKS[..., 0]
    assert (float(key_LBHK.max()), float(key_LBHK.min())) == (65504, -65504)
    (expected, _), (peaks, _) = (
        stepper.step(torch.tensor([5, 6, 7]), state) for stepper, state in zip(steppers, states, strict=True)
    )
    torch.testing.assert_close(peaks.logits(), expected.logits(), atol=0.2, rtol=0)


def test_compiled_turns_and_turns_in_python_can_alternate_in_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prefix is forced, turns are those of search/loop.py; before and after that they are compiled."""
    fast, decode = NativeStepper(model_that_ends(6), "float32"), DecodeConfig(beam_size=3)
    config = fast.config
    prefixes = {4: [5], 5: [6] * 15}
    sentences = [s._replace(prefix=prefixes.get(s.number % 9, ())) for s in sentences_of(61, 3)]
    turns: list[bool] = []
    is_plain = SearchSettings.is_plain

    def recorded(self: SearchSettings, beams: Beams) -> bool:
        turns.append(is_plain(self, beams))
        return turns[-1]

    monkeypatch.setattr(SearchSettings, "is_plain", recorded)
    results = by_number(search(fast, config, sentences, decode, batch_size=7, batch_tokens=80))
    n_changes = sum(before != after for before, after in pairwise(turns))
    assert n_changes > 6, "turns hardly alternated, so this test shows nothing"
    expected = by_number(search(StepsOnly(fast), config, sentences, decode, batch_size=7, batch_tokens=80))
    assert results.keys() == expected.keys()
    for number, slow in expected.items():
        assert [h.ids for h in results[number]] == [h.ids for h in slow]
        assert results[number][0].log_prob == pytest.approx(slow[0].log_prob, rel=1e-5)
    assert all(results[number][0].ids[:15] == [6] * 15 for number in range(5, 61, 9))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_entering_in_one_call_equals_entering_in_several(precision: Precision) -> None:
    """Compares every tensor of hypotheses and state, except parts that are never read: hidden cells, lanes past the end
    of a source."""
    config = prime_config(target_vocab_size=300, tied_embeddings="none")
    stepper, settings = NativeStepper(random_model(config, torch.float32).eval(), precision), DecodeConfig(beam_size=3)
    search_settings = SearchSettings(settings, free(config), config.eos_id, best)
    first = [Sentence(i, [*range(3, 20 - i)]) for i in range(5)]
    new, places = [Sentence(7, [4, 5, 6]), Sentence(8, [*range(8, 21)])], [3, 1]

    def started(sentences: list[Sentence]) -> tuple[Beams, Cells]:
        source_BS = padded([sentence.source for sentence in sentences], config.pad_id, torch.device("cpu"))
        state = stepper.start(source_BS).select(torch.arange(len(sentences)).repeat_interleave(3))
        limits = [limit_of(sentence, settings, None) for sentence in sentences]
        return Beams.start(sentences, settings, limits, config.bos_id, torch.device("cpu")), state

    def some_turns() -> tuple[Beams, Cells]:
        beams, state = started(first)
        for _ in range(4):
            beams, state, _ = stepper.turn(beams, state, search_settings)
        return beams, state

    beams, state = some_turns()
    entered = stepper.enter(beams, state, places, new, [limit_of(sentence, settings, None) for sentence in new])
    assert entered is not None
    beams, state = some_turns()
    new_beams, new_state = started(new)
    expected = beams.put(torch.tensor(places), new_beams), state.put(torch.tensor(places), new_state)
    for f in fields(Beams):
        assert torch.equal(getattr(entered[0], f.name), getattr(expected[0], f.name)), f.name
    for name in ("unseen_B11S", "source_B", "hidden_BKC", "length_B"):
        assert torch.equal(getattr(entered[1], name), getattr(expected[1], name)), name
    assert entered[1].longest == expected[1].longest == 4
    is_seen_1B11S = entered[1].unseen_B11S[None] == 0
    for name, seen in (("memory_key_LBHKS", is_seen_1B11S), ("memory_value_LBHSU", is_seen_1B11S.transpose(3, 4))):
        a, b = (getattr(state, name).where(seen, torch.zeros(())) for state in (entered[1], expected[1]))
        assert torch.equal(a, b), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_live_hypothesis_sees_as_many_cells_as_it_has_tokens(precision: Precision) -> None:
    """One sentence at a time, so that cells of finished sentences do not hide an error."""
    translator = Translator.load(device="cpu", precision=precision, batch_size=1)
    translator.settings = replace(translator.settings, beam_size=8, n_best=5)
    turn, n_checked = translator.stepper.turn, 0  # type: ignore[attr-defined]

    def checked_turn(beams: Beams, state: Cells, settings: SearchSettings) -> tuple[Beams, Cells, list[bool]]:
        nonlocal n_checked
        beams, state, is_over = turn(beams, state, settings)
        is_live_BK = (beams.log_prob_BK > -torch.inf) & ~torch.tensor(is_over)[:, None]
        n_seen_BK = (state.hidden_BKC == 0).sum(2)
        assert torch.equal(n_seen_BK[is_live_BK], beams.length_B[:, None].expand_as(n_seen_BK)[is_live_BK])
        n_checked += int(is_live_BK.sum())
        return beams, state, is_over

    translator.stepper.turn = checked_turn  # type: ignore[attr-defined]
    for text in heldout()[0][:100]:
        translator.translate([text])
    assert n_checked > 1000


def test_positions_and_token_ids_past_the_end_of_a_table_are_refused() -> None:
    config = prime_config(positions="learned", max_positions=41)
    fast, decode = NativeStepper(random_model(config, torch.float32).eval(), "float32"), DecodeConfig(min_length=60)
    with pytest.raises(DataError, match="a text has 42 tokens, learned positions end at 41"):
        fast.start(torch.full((1, 42), 5))
    with pytest.raises(DataError, match="a text has 42 tokens, learned positions end at 41"):
        by_number(search(fast, config, [Sentence(0, [5, 6, 7])], decode))
    with pytest.raises(DataError, match="token ids are from 5 to 50000, must be from 0 to"):
        fast.start(torch.tensor([[5, 50_000]]))
    sentences = [Sentence(0, [5]), Sentence(1, [5, 50_000])]
    with pytest.raises(DataError, match="token ids are from 5 to 50000, must be from 0 to"):
        by_number(search(fast, config, sentences, decode, batch_size=1, longest=5))


def test_a_sentence_that_needs_more_room_or_a_prefix_does_not_enter_in_one_call() -> None:
    config = prime_config(target_vocab_size=300, tied_embeddings="none")
    stepper, settings = NativeStepper(random_model(config, torch.float32).eval(), "int8"), DecodeConfig()
    beams = Beams.start([Sentence(0, [3] * 9)], settings, [20], config.bos_id, torch.device("cpu"))
    state = stepper.start(torch.full((1, 9), 3)).select(torch.arange(1).repeat_interleave(settings.beam_size))
    for sentence, limit in (
        (Sentence(1, [3] * 17), 20),
        (Sentence(1, [3] * 9), 21),
        (Sentence(1, [3] * 9, prefix=[4]), 20),
    ):
        assert stepper.enter(beams, state, [0], [sentence], [limit]) is None
    forced = replace(beams, forced_BT=torch.tensor([[4]]))  # by a sentence already in the search
    assert stepper.enter(forced, state, [0], [Sentence(1, [3] * 9)], [20]) is None
    assert stepper.enter(beams, state, [0], [Sentence(1, [3] * 9)], [20]) is not None


def test_cells_in_use_are_not_taken() -> None:
    torch.manual_seed(0)
    library = native.library("int8")
    for _ in range(50):
        n, n_kept, n_cells = 5, 3, 16
        hidden_BKC = torch.where(torch.rand(n, n_kept, n_cells) < 0.2, 0.0, -torch.inf)
        before_BKC, cell_BK = hidden_BKC.clone(), torch.full((n, n_kept), -7)
        end = library.take_cells(hidden_BKC.data_ptr(), n, n_kept, n_cells, cell_BK.data_ptr())
        is_needed_BC = (before_BKC == 0).any(1)
        if int((~is_needed_BC).sum(1).min()) < n_kept:
            assert end == -1
            assert torch.equal(hidden_BKC, before_BKC)
            continue
        assert not bool(is_needed_BC.gather(1, cell_BK).any())
        assert all(len(set(cells)) == n_kept for cells in cell_BK.tolist())
        is_seen_BKC = hidden_BKC == 0
        assert torch.equal(is_seen_BKC.sum(2), (before_BKC == 0).sum(2) + 1)
        assert bool(is_seen_BKC.gather(2, cell_BK[..., None]).all())
        assert end == int(is_seen_BKC.flatten(0, 1).any(0).nonzero().max()) + 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_batch_size_changes_no_bit_of_a_score(precision: Precision) -> None:
    """Rows are computed independently, and the sums of each are accumulated in the same order."""
    texts = heldout()[0][:200]
    translator = Translator.load(device="cpu", precision=precision, batch_size=64)
    assert isinstance(translator.stepper, NativeStepper)
    expected = translator.translate(texts)
    for batch_size in (1, 7):
        translator.batch_size = batch_size
        results = translator.translate(texts)
        assert [(result.text, result.log_prob) for result in results] == [(e.text, e.log_prob) for e in expected]


def test_int8_scores_are_close_to_those_of_float32() -> None:
    texts = heldout()[0][:200]
    translations, exact = (
        Translator.load(device="cpu", precision=precision).translate(texts) for precision in ("int8", "float32")
    )
    differences = [abs(a.log_prob - b.log_prob) for a, b in zip(translations, exact, strict=True) if a.text == b.text]
    assert len(differences) > 150
    assert len(differences) < 200, "all texts are equal: these are float32 results"
    assert sum(differences) / len(differences) < 0.1


# When it is missing


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(native.CompilerError, match="there is no C compiler 'no-such-compiler'"):
        native.built("int8")


def test_a_failing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "bad-cc"
    bad.write_text("#!/bin/sh\necho it is broken >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("CC", str(bad))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(native.CompilerError, match="failed: it is broken"):
        native.built("int8")
    assert list((tmp_path / "transduce").iterdir()) == []


def test_a_library_that_cannot_be_loaded_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache folder may forbid programs, or another system may have filled it. PyTorch must still be usable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.built("float32").write_bytes(b"no program")
    with pytest.raises(native.CompilerError, match="the compiled library cannot be used"):
        native.library.__wrapped__("float32")


def test_the_library_is_compiled_once_for_each_set_of_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native.built("int8")
    made = first.stat().st_mtime_ns
    assert (native.built("int8"), first.stat().st_mtime_ns) == (first, made)
    assert [path.name for path in (tmp_path / "transduce").iterdir()] == [first.name]
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DOTHER"))
    assert native.built("int8") != first


def test_the_command_translates_without_a_compiler_and_reports_the_fallback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "transduce", "translate", "--dtype", "int8"]
    environment = {"CC": "no-such-compiler", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, input="Ich bin müde.\n", capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "I'm tired.\n"
    assert "slower engine: cached (" in done.stderr
    assert "int8: there is no C compiler 'no-such-compiler'" in done.stderr
