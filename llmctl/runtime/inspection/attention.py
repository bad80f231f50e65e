"""Where the attention of a text goes, layer by layer and head by head.

The weights are computed from the queries of the model's own run and its keys as the cache keeps them, a few rows at a time; only
sums of them are kept, so memory grows with the text's length and not with its square. Sinks: Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmctl.errors import LlmctlError
from llmctl.kernels.kv_types import sides_of
from llmctl.kernels.store_kv.rounding import as_kept
from llmctl.runtime.inspection.probe import AttentionRule, Seen, probe
from llmctl.runtime.inspection.ranges import HeadRange, RangeCounter
from llmctl.runtime.loading import LoadedModel

NUM_SINKS = 4
"""First tokens that count as sinks."""
NUM_RECENT = 32
"""A query's own token and those just before it that count as recent, but for the sinks among them."""
NUM_LAST = 32
"""Queries at the end of the text: what an answer is about to be read from."""
MOST_BINS = 48
_MOST_WEIGHTS = 1 << 22
"""At once, of a thread."""
_TILE, _UNSHARED = 64, 1 << 18
"""Keys of a product, and its most multiplications that OpenBLAS leaves to one thread."""
_UNSEEN = np.float32(-1e30)


@dataclass
class AttentionSurvey:
    """Means over all queries of a text of T tokens; every array begins with [layers, heads].

    entropy: nats. sink, recent: shares of the first NUM_SINKS and of the last NUM_RECENT tokens. learned: share of the model's
    own sink, which is no token. received [T]: share that each token has, all queries taken together. last [T]: the same for the
    last NUM_LAST queries. maps [bins, bins]: share of ranges of tokens (columns) for ranges of queries (rows). edges: the bins +
    1 positions where they begin and end. keys, values: layer by layer, head by head.
    """

    num_tokens: int
    entropy: np.ndarray
    sink: np.ndarray
    recent: np.ndarray
    learned: np.ndarray
    received: np.ndarray
    last: np.ndarray
    maps: np.ndarray
    edges: np.ndarray
    keys: list[list[HeadRange]]
    values: list[list[HeadRange]]


def survey_attention(
    model: LoadedModel, token_ids: list[int], progress: Callable[[int, int], None] | None = None
) -> AttentionSurvey:
    """Run the text, with a full cache of the model's own type, and look. progress: called with (done, total) parts of the work.

    Errors: LlmctlError where the model computes something that is not a number.
    """
    config, length = model.config, len(token_ids)
    survey = _empty(config.num_layers, config.num_heads, length)
    layers: dict[int, _Layer] = {}
    with ThreadPoolExecutor(model.ops.threads) as pool:
        for seen in probe(model, token_ids, progress):
            layer = layers.setdefault(seen.layer, _Layer(survey, model, seen))
            layer.add(seen, pool)
            if seen.first + len(seen.queries) == length:
                layers.pop(seen.layer).finish()
    return survey


def _empty(num_layers: int, num_heads: int, length: int) -> AttentionSurvey:
    shape, bins = (num_layers, num_heads), min(MOST_BINS, length)
    edges = np.linspace(0, length, bins + 1).round().astype(np.int64)
    scalars = [np.zeros(shape) for _ in range(4)]
    lists: list[list[list[HeadRange]]] = [[[] for _ in range(num_layers)] for _ in range(2)]
    tokens = [np.zeros((*shape, length), np.float32) for _ in range(2)]
    return AttentionSurvey(length, *scalars, *tokens, np.zeros((*shape, bins, bins), np.float32), edges, *lists)


class _Layer:
    """One layer while its text comes in: its keys so far, and its rows of the survey."""

    def __init__(self, survey: AttentionSurvey, model: LoadedModel, seen: Seen) -> None:
        shape = model.config.kv_layers()[seen.layer]
        self._survey, self._index, self._side = survey, seen.layer, sides_of(model.kv_type)[0]
        self._latent = (shape.latent,) if shape.latent else ()
        self._keys = np.empty((shape.num_kv_heads, survey.num_tokens, shape.head_dim), np.float32)
        self._ranges = RangeCounter(), RangeCounter()

    def add(self, seen: Seen, pool: ThreadPoolExecutor) -> None:
        """The next tokens."""
        end = seen.first + len(seen.keys)
        if not (np.isfinite(seen.keys).all() and np.isfinite(seen.queries).all()):
            raise LlmctlError(f"layer {seen.layer} computed keys or queries that are not numbers: its weights are broken")
        self._keys[:, seen.first : end] = as_kept(seen.keys, self._side, *self._latent).transpose(1, 0, 2)
        for counter, rows in zip(self._ranges, (seen.keys, seen.values), strict=True):
            counter.add(rows)
        list(pool.map(lambda part: self._look(seen, *part), self._parts(seen)))

    def _parts(self, seen: Seen) -> list[tuple[slice, int, int]]:
        """Heads that share a key, and the positions they are looked at in at once."""
        end, num_heads, num_keys = seen.first + len(seen.queries), seen.queries.shape[1], len(self._keys)
        group = min(num_heads // num_keys, max(1, _MOST_WEIGHTS // end))
        rows = max(1, _MOST_WEIGHTS // (end * group))
        sharing = num_heads // num_keys
        ends = range(sharing, num_heads + 1, sharing)
        heads = [slice(h, min(h + group, n)) for n in ends for h in range(n - sharing, n, group)]
        return [(h, i, min(i + rows, end)) for h in heads for i in range(seen.first, end, rows)]

    def _look(self, seen: Seen, heads: slice, begin: int, end: int) -> None:
        """Add the weights of some heads' queries to the survey."""
        keys = self._keys[heads.start * len(self._keys) // seen.queries.shape[1]]
        queries = seen.queries[begin - seen.first : end - seen.first, heads].transpose(1, 0, 2)
        sinks = None if seen.rule.sinks is None else seen.rule.sinks[heads]
        self._count(heads, begin, attention_weights(queries, keys[:end], seen.rule, sinks, begin))

    def _count(self, heads: slice, begin: int, found: HeadWeights) -> None:
        survey, place, weights, first_key = self._survey, (self._index, heads), found.weights, found.first_key
        length, end = survey.num_tokens, begin + weights.shape[1]
        sinks = weights[..., : max(0, NUM_SINKS - first_key)].sum((1, 2), dtype=np.float64)
        survey.entropy[place] += found.entropy.sum(1) / length
        survey.sink[place] += sinks / length
        survey.recent[place] += _recent(weights, first_key, begin) / length
        survey.learned[place] += found.learned.sum(1) / length
        self._count_tokens(place, begin, weights, slice(first_key, end))
        if (skipped := length - min(NUM_LAST, length) - begin) < weights.shape[1]:
            rows = weights[:, max(0, skipped) :].sum(1)
            survey.last[place][:, first_key:end] += rows / np.float32(min(NUM_LAST, length))

    def _count_tokens(self, place: tuple[int, slice], begin: int, weights: np.ndarray, columns: slice) -> None:
        """What every token receives, in all and from the queries of each bin."""
        survey, edges = self._survey, self._survey.edges
        first, last = np.searchsorted(edges, [begin, columns.stop - 1], "right") - 1
        starts = np.maximum(edges[first : last + 1] - begin, 0)
        whole = np.zeros((len(weights), len(starts), survey.num_tokens), np.float32)
        whole[..., columns] = np.add.reduceat(weights, starts, axis=1)
        survey.received[place] += whole.sum(1) / np.float32(survey.num_tokens)
        counts = np.diff(edges)[first : last + 1].astype(np.float32)
        survey.maps[place][:, first : last + 1] += np.add.reduceat(whole, edges[:-1], axis=2) / counts[:, None]

    def finish(self) -> None:
        """The text's end."""
        for lists, counter in zip((self._survey.keys, self._survey.values), self._ranges, strict=True):
            lists[self._index] = counter.heads()


@dataclass(frozen=True)
class HeadWeights:
    """Attention weights of n queries of some heads. weights [heads, n, keys] for the keys from first_key on. entropy, learned
    [heads, n]: as in AttentionSurvey."""

    weights: np.ndarray
    first_key: int
    entropy: np.ndarray
    learned: np.ndarray


def attention_weights(
    queries: np.ndarray, keys: np.ndarray, rule: AttentionRule, sinks: np.ndarray | None, first: int
) -> HeadWeights:
    """The weights of the queries [heads, n, head_dim] at positions first … first + n − 1 over the keys [first + n, head_dim] that
    the heads share. sinks [heads]: the heads' own of the rule's."""
    first_key = 0 if rule.window is None else max(0, first - rule.window + 1)
    scores = _products(queries, keys[first_key:])
    scores *= np.float32(rule.scale)
    if rule.softcap is not None:
        scores = np.float32(rule.softcap) * np.tanh(scores / np.float32(rule.softcap))
    _hide(scores, first, first_key, rule.window)
    sink = np.full((len(scores), 1, 1), _UNSEEN) if sinks is None else sinks[:, None, None]
    largest = np.maximum(scores.max(2, keepdims=True), sink)
    scores -= largest
    sink = sink - largest
    weights, learned = np.exp(scores), np.exp(sink)
    total = weights.sum(2, keepdims=True) + learned
    # −Σ p log p with p = exp(s) / total, s ≤ 0; what is unseen has p = 0 and adds none.
    expected = np.einsum("hnk,hnk->hn", weights, scores)[..., None] + learned * sink
    weights /= total
    return HeadWeights(weights, first_key, (np.log(total) - expected / total)[..., 0], (learned / total)[..., 0])


def _products(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """queries [heads, n, head_dim] · keysᵀ [head_dim, keys]. In pieces that BLAS does not share among threads of its own: this
    runs in threads already, and on a busy machine BLAS's wait for each other far longer than they compute."""
    (heads, count, width), num_keys = queries.shape, len(keys)
    products = np.empty((heads, count, num_keys), np.float32)
    rows, whole = max(1, _UNSHARED // (_TILE * width)), num_keys // _TILE * _TILE
    tiles, rest = keys[:whole].reshape(-1, _TILE, width).swapaxes(1, 2), keys[whole:].T
    for begin in range(0, count, rows):
        part = slice(begin, min(begin + rows, count))
        into = products[:, part, :whole].reshape(heads, part.stop - begin, len(tiles), _TILE)  # a view: an axis is cut
        np.matmul(queries[:, None, part], tiles, out=into.swapaxes(1, 2))
        np.matmul(queries[:, part], rest, out=products[:, part, whole:])
    return products


def _hide(scores: np.ndarray, first: int, first_key: int, window: int | None) -> None:
    """Put _UNSEEN where a query may not see a key: scores [heads, n, first + n − first_key]."""
    count = scores.shape[1]
    later = ~np.tri(count, dtype=bool)
    scores[..., first - first_key :][:, later] = _UNSEEN
    if window is not None:
        distances = np.arange(first, first + count)[:, None] - np.arange(first_key, first + count)[None, :]
        scores[:, distances >= window] = _UNSEEN


def _recent(weights: np.ndarray, first_key: int, begin: int) -> np.ndarray:
    """The sum over all queries of the weights of recent tokens, [heads]."""
    low = max(first_key, NUM_SINKS, begin - NUM_RECENT + 1)
    part = weights[..., max(0, low - first_key) :]
    distances = np.arange(begin, begin + part.shape[1])[:, None] - np.arange(low, low + part.shape[2])[None, :]
    return np.einsum("hnk,nk->h", part, (distances < NUM_RECENT).astype(np.float32))
