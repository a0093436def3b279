"""Searches with recorded turns give the same results as searches without. Here a recording simply runs its operations
again; `benchmarks/gpu_translation.py` compares real CUDA graphs with the model on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.primes import prime_config, random_model
from tests.support.search import by_number, rules_of, sentences_of
from transduce.config import DecodeConfig, ModelConfig
from transduce.engines.cached import CachedStepper
from transduce.engines.cuda import recorded
from transduce.engines.cuda.recorded import RecordedStepper
from transduce.search.candidates import Rules, free
from transduce.search.hypotheses import Hypothesis, Sentence
from transduce.search.loop import advance, search
from transduce.search.peaks import GROUP, Peaks


@pytest.fixture(autouse=True)
def many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOURCE_ROOM", "CELL_ROOM", "TOKEN_ROOM"):
        monkeypatch.setattr(recorded, name, 4)


def run_again(run: Callable[[], None]) -> Callable[[], None]:
    run()
    return run


def config_of(**changes: Any) -> ModelConfig:
    return prime_config(**{"tied_embeddings": "none", "target_vocab_size": 300} | changes)


def results_of(
    stepper: Any, config: ModelConfig, settings: DecodeConfig, rules: Rules, n: int = 31, seed: int = 5
) -> Iterator[tuple[Sentence, list[Hypothesis]]]:
    return search(stepper, config, sentences_of(n, seed), settings, rules, batch_size=11)


def assert_equal(results: Any, expected: Any) -> None:
    quick, slow = by_number(results), by_number(expected)
    assert quick.keys() == slow.keys()
    for number, hypotheses in slow.items():
        assert [h.ids for h in quick[number]] == [h.ids for h in hypotheses], number
        assert [h.has_ended for h in quick[number]] == [h.has_ended for h in hypotheses]
        for a, b in zip(quick[number], hypotheses, strict=True):
            assert (a.log_prob, a.score) == pytest.approx((b.log_prob, b.score), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"beam_size": 1}, 0.3),
        ({"beam_size": 4, "n_best": 3}, 0.3),
        ({"beam_size": 3, "min_length": 9}, 0),
        ({"beam_size": 3, "stop_early": False}, 0),
    ],
    ids=str,
)
def test_recorded_searches_give_the_same_results(settings: dict[str, Any], share: float) -> None:
    """`share`: the share of forbidden tokens."""
    config = config_of()
    model = random_model(config).eval()
    decode, rules = DecodeConfig(**{"max_extra_tokens": 9} | settings), rules_of(config, share)
    fast = RecordedStepper(model, run_again)
    for seed in (1, 2):  # the second search uses recordings of the first
        assert_equal(
            results_of(fast, config, decode, rules, seed=seed), results_of(model, config, decode, rules, seed=seed)
        )
    assert sum(map(len, fast.recordings.values())) > 5


def test_with_many_equal_tokens_all_logits_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    model = random_model(config).eval()
    with torch.no_grad():  # groups of five equal tokens
        table_VD = model.embedding.output_projection
        table_VD.copy_(table_VD[torch.arange(len(table_VD)) // 5 * 5])
    is_second: list[bool] = []

    def counted(*arguments: Any) -> Any:
        is_second.append(len(arguments) < 4)  # without conditions that are deferred
        return advance(*arguments)

    monkeypatch.setattr(recorded, "advance", counted)
    settings, rules = DecodeConfig(beam_size=4, max_extra_tokens=9), free(config)
    fast = RecordedStepper(model, run_again)
    assert_equal(results_of(fast, config, settings, rules), results_of(model, config, settings, rules))
    assert sum(is_second) > 3
    assert not all(is_second)


def test_searches_at_the_same_time_do_not_share_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MAX_RECORDINGS", 1000)
    config, settings = config_of(), DecodeConfig(beam_size=2, max_extra_tokens=9)
    model, rules = random_model(config).eval(), free(config)
    fast = RecordedStepper(model, run_again)
    searches = [results_of(fast, config, settings, rules, seed=seed) for seed in (1, 2, 3)]
    results: list[Any] = [[], [], []]
    for _ in range(31):
        for i in range(3):
            results[i].append(next(searches[i]))
    for i in range(3):
        assert_equal(results[i], results_of(model, config, settings, rules, seed=i + 1))
    assert max(map(len, fast.recordings.values())) > 1, "no two searches had the same shape, so this test shows nothing"


def test_the_number_of_recordings_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MAX_RECORDINGS", 3)
    config, settings = config_of(), DecodeConfig(beam_size=2, max_extra_tokens=9)
    fast, rules = RecordedStepper(random_model(config).eval(), run_again), free(config)
    n_recorded = 0
    for n in range(1, 8):
        before = sum(map(len, fast.recordings.values()))
        list(results_of(fast, config, settings, rules, n))
        n_recorded += max(0, sum(map(len, fast.recordings.values())) - before)
        assert sum(map(len, fast.recordings.values())) <= 3
    assert n_recorded > 3


def test_searches_that_are_not_plain_are_not_recorded() -> None:
    config = config_of()
    model, rules = random_model(config).eval(), free(config)
    fast = RecordedStepper(model, run_again)
    for settings in (
        DecodeConfig(beam_size=2, no_repeat_ngram=2, max_extra_tokens=9),
        DecodeConfig(method="sample", max_extra_tokens=9),
    ):
        assert_equal(results_of(fast, config, settings, rules), results_of(model, config, settings, rules))
    assert not fast.recordings


@pytest.mark.parametrize(
    ("n_kept", "n_cells", "n_source", "d_k", "d_v"),
    [(4, 150, 70, 8, 8), (1, 3, 1, 16, 16), (17, 64, 65, 24, 40), (3, 200, 33, 32, 16)],
)
def test_attention_kernels_equal_the_slow_twin(n_kept: int, n_cells: int, n_source: int, d_k: int, d_v: int) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    from transduce.engines.cuda import kernels

    n, n_heads = 3, 2
    slow = CachedStepper(random_model(config_of(d_model=8, n_heads=n_heads, d_k=d_k, d_v=d_v)))
    cell_BHCW = torch.randn(n, n_heads, n_cells, d_k + d_v)
    hidden_BKC = torch.zeros(n, n_kept, n_cells).masked_fill(torch.rand(n, n_kept, n_cells) < 0.5, -torch.inf)
    hidden_BKC[1] = -torch.inf  # as at the first token
    hidden_BKC[2, :, 20:140] = -torch.inf
    cell_BK = torch.stack([torch.randperm(n_cells)[:n_kept] for _ in range(n)])
    hidden_BKC.scatter_(2, cell_BK[:, None].expand(-1, n_kept, -1), torch.eye(n_kept).log().expand(n, -1, -1))
    place_BKH = torch.arange(0, n * n_heads * n_cells, n_cells).view(n, 1, n_heads) + cell_BK[..., None]
    query_new_RP = torch.randn(n * n_kept, n_heads * (2 * d_k + d_v))
    query_RP, new_RP = query_new_RP.tensor_split([n_heads * d_k], 1)
    after_BHCW = cell_BHCW.clone()
    expected = slow.attend_to_past(query_RP, new_RP, cell_BHCW, place_BKH, hidden_BKC)
    torch.testing.assert_close(
        kernels.attend_to_past(query_RP, new_RP, after_BHCW, place_BKH, hidden_BKC), expected, atol=1e-5, rtol=1e-5
    )
    assert torch.equal(after_BHCW, cell_BHCW)

    memory = torch.randn(n, n_heads, d_k, n_source + 5), torch.randn(n, n_heads, n_source + 5, d_v)
    unseen_B11S = torch.zeros(n, 1, 1, n_source).masked_fill(torch.arange(n_source) > n_source // 3, -torch.inf)
    expected = slow.attend_to_memory(query_RP, *memory, unseen_B11S)
    torch.testing.assert_close(kernels.attend_to_memory(query_RP, *memory, unseen_B11S), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_vocabulary", [300, 320, 4096, 9001])
def test_peaks_of_one_pass_equal_the_slow_twin(n_vocabulary: int) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux")
    from transduce.engines.cuda.kernels import peaks_of

    torch.manual_seed(0)
    logits_RV = torch.randn(3, n_vocabulary) * 9
    padded_RV = torch.nn.functional.pad(logits_RV, (0, -n_vocabulary % GROUP), value=1e3)
    peaks, expected = peaks_of(padded_RV, n_vocabulary), Peaks.of(logits_RV)
    torch.testing.assert_close(peaks.peak_RN, expected.peak_RN, atol=0, rtol=0)
    torch.testing.assert_close(peaks.log_sum_R1, expected.log_sum_R1)
    assert torch.equal(peaks.logits(), logits_RV)
    row, group = torch.tensor([[0, 2], [1, 1]]), torch.tensor([[0, 3], [n_vocabulary // GROUP - 1, 5]])
    assert torch.equal(peaks.read_groups(row, group), expected.read_groups(row, group))
