"""Sentences as vectors: the encoder's output, pooled over the tokens."""

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

from transduce.data.batches import batches_within_tokens, pad_right
from transduce.data.subword import check_several
from transduce.errors import ConfigError, DataError
from transduce.translation.translator import Translator

__all__ = ["embed", "embed_stream", "similarity"]

Pool = Literal["mean", "max", "first"]
POOLS: tuple[Pool, ...] = get_args(Pool)
BATCH_TOKENS = 2000
WINDOW_TEXTS = 2000
"""The number of texts of a stream that are sorted by length together and held in memory."""


def check_pool(pool: str) -> Pool:
    for known in POOLS:
        if pool == known:
            return known
    raise ConfigError(f"--pool is {pool!r}, must be one of {', '.join(POOLS)}: mean is the default")


def embed(
    translator: Translator, texts: Sequence[str], pool: Pool = "mean", to: str | None = None
) -> NDArray[np.float32]:
    """Return vector_ND, in which row i is the vector of text i. A blank text gives zeros.

    The pool covers all positions that the decoder would see: the text, its end mark and its language tag (if the model
    has tags), but no padding. A text longer than the model was trained on is encoded in parts, as for translation, and
    pooled over all parts.

    >>> from transduce import Translator
    >>> from transduce.insight.embed import embed
    >>> translator = Translator.load(device="cpu")
    >>> vector_ND = embed(translator, ["Das ist gut.", "Wo ist der Bahnhof?", ""])
    >>> vector_ND.shape == (3, translator.config.model.d_model), bool(vector_ND[2].any())
    (True, False)
    """
    check_pool(pool)
    check_several(texts, "texts", "[text]")
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
    for batch in batches_within_tokens(sorted(parts, key=_length), _length, BATCH_TOKENS):
        source_BS = torch.from_numpy(pad_right([ids for _, _, ids in batch], config.pad_id)).to(translator.device)
        pooled_BD = _encode_and_pool(translator, source_BS, pool)
        for (row, _, ids), vector_D in zip(batch, pooled_BD.float().cpu().numpy(), strict=True):
            # Add the sums of the parts and divide once: a mean of means would give short parts too much weight.
            is_later_max = pool == "max" and n_tokens_N[row] > 0
            vector_ND[row] = np.maximum(vector_ND[row], vector_D) if is_later_max else vector_ND[row] + vector_D
            n_tokens_N[row] += len(ids)
    if pool == "mean":
        vector_ND /= np.maximum(n_tokens_N, 1)[:, None]
    return vector_ND


def _length(part: tuple[int, int, list[int]]) -> int:
    return len(part[2])


@torch.no_grad()
def _encode_and_pool(translator: Translator, source_BS: Tensor, pool: Pool) -> Tensor:
    """Returns the sum for "mean"; the caller divides it."""
    memory_BSD, token_BS, _ = translator.model.encode(source_BS)
    if pool == "first":
        return memory_BSD[:, 0]
    if pool == "max":
        return memory_BSD.masked_fill(~token_BS[..., None], -torch.inf).amax(1)
    return (memory_BSD * token_BS[..., None]).sum(1)


def embed_stream(
    translator: Translator, texts: Iterable[str], pool: Pool = "mean", to: str | None = None
) -> Iterator[NDArray[np.float32] | None]:
    """Yield one vector per text, in order and in bounded memory. A blank text gives None.

    >>> from transduce import Translator
    >>> from transduce.insight.embed import embed_stream
    >>> translator = Translator.load(device="cpu")
    >>> lines = (line for line in ["Das ist gut.", ""])  # for example the lines of a large file
    >>> [None if vector_D is None else len(vector_D) for vector_D in embed_stream(translator, lines)]
    [256, None]
    """
    remaining = iter(texts)
    while window := list(islice(remaining, WINDOW_TEXTS)):
        for text, vector_D in zip(window, embed(translator, window, pool, to), strict=True):
            yield vector_D if text.strip() else None


def similarity(translator: Translator, one: str, other: str, pool: Pool = "mean", to: str | None = None) -> float:
    """Return the cosine similarity of two sentences, from -1 to 1.

    >>> from transduce import Translator
    >>> from transduce.insight.embed import similarity
    >>> translator = Translator.load(device="cpu")
    >>> near = similarity(translator, "Das ist gut.", "Das ist sehr gut.")
    >>> far = similarity(translator, "Das ist gut.", "Wo ist der Bahnhof?")
    >>> near > far
    True
    """
    if not (one.strip() and other.strip()):
        raise DataError("--similarity compares two sentences, and one of them is blank: give two sentences with text")
    a_D, b_D = embed(translator, [one, other], pool, to).astype(np.float64)
    return float(a_D @ b_D / (np.linalg.norm(a_D) * np.linalg.norm(b_D)))


def as_npy(vector_ND: NDArray[np.float32]) -> bytes:
    """The content of a .npy file."""
    content = io.BytesIO()
    np.save(content, vector_ND)
    return content.getvalue()
