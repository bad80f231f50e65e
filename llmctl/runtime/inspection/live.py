"""What the cache of a text looks like while it is used: pages, who holds them, how full they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from llmctl.runtime.cache.block_manager import GroupStats, PageUse, ReuseStats
from llmctl.runtime.cache.kept import KeptTokens
from llmctl.runtime.cache.memory import BLOCK_SIZE, layer_bytes_per_token
from llmctl.runtime.engine import Engine, Sequence
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.sampling.params import SamplingParams


@dataclass(frozen=True)
class LivePage:
    """A page of a sequence's block table. first: the position of its first token; None where every head has tokens of its own
    choice in it. tokens: how many it has. holders: sequences whose tables have it. is_known: a text that begins alike would find
    it."""

    page: int
    first: int | None
    tokens: int
    holders: int
    is_known: bool


@dataclass(frozen=True)
class LiveGroup:
    """Layers that keep the same tokens. tables: of each sequence, without the pages given back because no query sees them any
    more. page_bytes: of a page in all its layers together."""

    layers: tuple[int, ...]
    window: int | None
    stats: GroupStats
    tables: list[list[LivePage]]
    page_bytes: int


@dataclass(frozen=True)
class LiveCache:
    """The cache after a text, and tokens generated from it. lengths: tokens computed of each sequence. found: tokens of the
    prompt that were in the cache before it began. layer_bytes: held by each layer. kept: what the first sequence still has."""

    page_tokens: int
    lengths: list[int]
    found: int
    reuse: ReuseStats
    groups: list[LiveGroup]
    layer_bytes: list[int]
    token_ids: list[list[int]]
    kept: KeptTokens

    @property
    def bytes_held(self) -> int:
        """Of all layers; a shared page counts once."""
        return sum(self.layer_bytes)


def look_at_cache(
    model: LoadedModel,
    token_ids: list[int],
    *,
    sequences: int = 1,
    new_tokens: int = 0,
    prepare: Callable[[Engine], None] | None = None,
) -> LiveCache:
    """Run the text in an engine, let each of so many sequences go on from it for `new_tokens` tokens, and look.

    prepare: called with the engine before anything runs. Errors: as `Engine.add`.
    """
    new_tokens = min(new_tokens, model.context_length - len(token_ids))
    # With room for a token more than are looked at, no sequence ends and gives its pages back.
    engine = Engine(replace(model, context_length=model.context_length + 2), max_num_seqs=sequences)
    if prepare is not None:
        prepare(engine)
    params = SamplingParams(temperature=1.0 if sequences > 1 else 0.0, seed=0, ignore_eos=True)
    running = engine.add_several(token_ids, params, sequences)
    while any(len(sequence.completion_token_ids) <= new_tokens for sequence in running):
        engine.step()
    return _describe(engine, running)


def _describe(engine: Engine, running: list[Sequence]) -> LiveCache:
    plan, layers = engine.cache_plan, engine.model.config.kv_layers()
    sizes = [(layer_bytes_per_token(layer, engine.model.kv_type) or 0) * BLOCK_SIZE for layer in layers]
    tables = [engine.page_uses(sequence) for sequence in running]
    groups = [
        LiveGroup(
            group.layers,
            group.window,
            stats,
            [_table(sequence, own[number], group.window) for sequence, own in zip(running, tables, strict=True)],
            sum(sizes[layer] for layer in group.layers),
        )
        for number, (group, stats) in enumerate(zip(plan.groups, engine.group_stats, strict=True))
    ]
    held = {layer: group.stats.pages_held * sizes[layer] for group in groups for layer in group.layers}
    return LiveCache(
        page_tokens=BLOCK_SIZE,
        lengths=[sequence.num_computed for sequence in running],
        found=running[0].num_cached_tokens,
        reuse=engine.reuse_stats,
        groups=groups,
        layer_bytes=[held[layer] for layer in range(len(layers))],
        token_ids=[list(sequence.token_ids[: sequence.num_computed]) for sequence in running],
        kept=engine.kept(running[0]),
    )


def _table(sequence: Sequence, table: list[PageUse], window: int | None) -> list[LivePage]:
    pages = []
    chosen, dropped = _compressed(sequence) if window is None else (0, 0)
    for use in table:
        place = use.index * BLOCK_SIZE
        tokens = min(BLOCK_SIZE, max(0, sequence.num_computed - dropped - place))
        pages.append(LivePage(use.page, None if place < chosen else place + dropped, tokens, use.holders, use.is_known))
    return pages


def _compressed(sequence: Sequence) -> tuple[int, int]:
    """Tokens at the beginning of a sequence's tables that its heads have chosen, and how many there are no more."""
    done = sequence.compression
    return (done.num_kept, done.num_dropped) if done is not None and done.is_done else (0, 0)
