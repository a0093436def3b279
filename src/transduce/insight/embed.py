"""Sentences as vectors: what the encoder makes of them, pooled over their tokens."""

# Axes: N texts, B sentences, S source positions, D = d_model.

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transduce.data.batches import pad_right, within_tokens
from transduce.errors import ConfigError, DataError
from transduce.translation.translator import Translator

Pool = Literal["mean", "max", "first"]
POOLS: tuple[Pool, ...] = get_args(Pool)
BATCH_TOKENS = 2000
WINDOW = 2000
"""Texts that are sorted by length together, and held at once where they come as a stream."""


def check_pool(pool: str) -> Pool:
    for known in POOLS:
        if pool == known:
            return known
    raise ConfigError(f"--pool is {pool!r}, must be one of {', '.join(POOLS)}: mean is usual")


def embed(
    translator: Translator, texts: Sequence[str], pool: Pool = "mean", to: str | None = None
) -> NDArray[np.float32]:
    """vector_ND: row i is of text i, and a blank text gives zeros.

    Pooled is what the decoder would see: the text, its end mark and, where the model has such, its tag; no padding.
    What is longer than anything the model was trained on is encoded in parts, as it would be translated, and pooled
    over all of them.
    """
    check_pool(pool)
    config, tag = translator.config.model, translator.tag_for(to)
    vector_ND = np.zeros((len(texts), config.d_model), dtype=np.float32)
    n_tokens_N = np.zeros(len(texts), dtype=np.int64)
    parts = [
        (row, place, [*tag, *ids, config.eos_id])
        for row, text in enumerate(texts)
        for place, ids in enumerate(translator.prepare(text, tag, []).ids)
    ]
    if pool == "first":
        parts = [part for part in parts if part[1] == 0]
    for some in within_tokens(sorted(parts, key=_length), _length, BATCH_TOKENS):
        source_BS = torch.from_numpy(pad_right([ids for _, _, ids in some], config.pad_id)).to(translator.device)
        pooled_BD = pooled(translator, source_BS, pool)
        for (row, _, ids), vector_D in zip(some, pooled_BD.float().cpu().numpy(), strict=True):
            # Sums of parts are added up and divided once: a mean of means would weigh short parts too much.
            is_more = pool == "max" and n_tokens_N[row] > 0
            vector_ND[row] = np.maximum(vector_ND[row], vector_D) if is_more else vector_ND[row] + vector_D
            n_tokens_N[row] += len(ids)
    if pool == "mean":
        vector_ND /= np.maximum(n_tokens_N, 1)[:, None]
    return vector_ND


def _length(part: tuple[int, int, list[int]]) -> int:
    return len(part[2])


@torch.no_grad()
def pooled(translator: Translator, source_BS: Tensor, pool: Pool) -> Tensor:
    """For "mean" the sum, which the caller divides."""
    memory_BSD, token_BS, _ = translator.model.encode(source_BS)
    if pool == "first":
        return memory_BSD[:, 0]
    if pool == "max":
        return memory_BSD.masked_fill(~token_BS[..., None], -torch.inf).amax(1)
    return (memory_BSD * token_BS[..., None]).sum(1)


def embed_stream(
    translator: Translator, texts: Iterable[str], pool: Pool = "mean", to: str | None = None
) -> Iterator[NDArray[np.float32] | None]:
    """A vector for each text, in order, in bounded memory; None for a blank one."""
    lines = iter(texts)
    while window := list(islice(lines, WINDOW)):
        for text, vector_D in zip(window, embed(translator, window, pool, to), strict=True):
            yield vector_D if text.strip() else None


def similarity(translator: Translator, one: str, other: str, pool: Pool = "mean", to: str | None = None) -> float:
    """The cosine of the angle between two sentences."""
    if not (one.strip() and other.strip()):
        raise DataError("--similarity is of two sentences, and one is blank: give text")
    a_D, b_D = embed(translator, [one, other], pool, to).astype(np.float64)
    return float(a_D @ b_D / (np.linalg.norm(a_D) * np.linalg.norm(b_D)))


def as_npy(vector_ND: NDArray[np.float32]) -> bytes:
    """The content of a .npy file."""
    content = io.BytesIO()
    np.save(content, vector_ND)
    return content.getvalue()
