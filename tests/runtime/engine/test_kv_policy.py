"""Policies of the cache against a slow definition: every key kept, and for every query a list of those it may look at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model

from llmctl.errors import UsageError
from llmctl.runtime.cache.memory import BLOCK_SIZE
from llmctl.runtime.cache.policy import FULL, KvPolicy, parse_kv_policy
from llmctl.runtime.engine import Engine
from llmctl.runtime.engine.model_drafter import ModelDrafter
from llmctl.runtime.engine.model_runner import LogitsReader
from llmctl.runtime.engine.speculation import Speculation
from llmctl.runtime.loading import LoadedModel, load_model
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.saved_cache import put_back, read_cache, save_cache

IDS = np.random.default_rng(5).integers(3, 384, 120).tolist()
PROMPT = 90
SNAP = KvPolicy("snapkv", 40, window=8, kernel=5)
POLICIES = {
    "sliding": KvPolicy("sliding", 21),
    "sinks": KvPolicy("sinks", 21),
    "max": SNAP,
    "average": replace(SNAP, pooling="average"),
    "share": replace(SNAP, budget=0.5, kernel=7),
}
FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v2")
WHOLE = {"llama": [0, 1, 2], "gemma2": [1, 3], "gemma3": [1, 3], "gpt_oss": [1, 3], "deepseek_v2": [0, 1, 2, 3]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp(family) / "model", family, tokenizer="bpe")
        return made[family]

    return folder


def native(path: Path, policy: KvPolicy = FULL, **choices: Any) -> LoadedModel:
    return load_model(path, backend="native", activations="float", kv_policy=policy, **{"kv_type": "f32", **choices})


class Slowly:
    """Attention by the policies' definition, over a cache that keeps all tokens; of the layers without a window."""

    def __init__(self, model: LoadedModel, policy: KvPolicy, prompt: int) -> None:
        self.policy, self.prompt, self.layers = policy, prompt, model.config.kv_layers()
        self.calls, self.queries = 0, [torch.zeros(0)] * len(self.layers)
        self.kept: list[list[set[int]] | None] = [None] * len(self.layers)
        model.ops.attention = self.attention

    def attention(self, queries, pages, batch, scale, window=None, softcap=None, sinks=None, anchors=0):
        layer, length, table = self.calls % len(self.layers), batch.context_lens[0], batch.block_tables[0]
        self.calls += 1
        assert anchors == 0
        first = 0 if window is None else max(0, length - len(queries) - window + 1)
        slots = [int(table[t // BLOCK_SIZE]) * BLOCK_SIZE + t % BLOCK_SIZE for t in range(first, length)]
        keys, values = pages.keys.read(torch.tensor(slots)), pages.values.read(torch.tensor(slots))
        group = queries.shape[1] // keys.shape[1]
        out = torch.zeros(*queries.shape[:2], values.shape[-1])
        for row, position in enumerate(range(length - len(queries), length)):
            for head in range(queries.shape[1]):
                seen = [t - first for t in range(first, position + 1) if self._sees(layer, head // group, position, t, window)]
                scores = self._scores(queries[row, head], keys[seen, head // group], scale, softcap)
                out[row, head] = self._weights(scores, sinks, head) @ values[seen, head // group]
        if window is None:
            self._watch(layer, queries, keys, length, scale, softcap, sinks)
        return out

    @staticmethod
    def _scores(query, keys, scale, softcap):
        scores = keys @ query * scale
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    @staticmethod
    def _weights(scores, sinks, head):
        return (scores if sinks is None else torch.cat([scores, sinks[head : head + 1]])).softmax(0)[: len(scores)]

    def _sees(self, layer: int, head: int, position: int, t: int, window: int | None) -> bool:
        policy = self.policy
        if window is not None:
            return position - t < window
        if policy.kind == "sliding":
            return position - t < policy.budget
        if policy.kind == "sinks":
            return t < 4 or position - t < policy.budget - 4
        kept = self.kept[layer]
        return kept is None or position < self.prompt or t >= self.prompt or t in kept[head]

    def _watch(self, layer, queries, keys, length, scale, softcap, sinks) -> None:
        """When the prompt is done: what is kept, by the paper's listing, one number after the other."""
        self.queries[layer] = torch.cat([self.queries[layer].reshape(-1, *queries.shape[1:]), queries])
        if self.policy.kind != "snapkv" or length != self.prompt:
            return
        observed, size = self.queries[layer][-self.policy.window :], self.policy.kernel // 2
        budget = self.policy.budget
        before = length - self.policy.window
        wanted = (budget if isinstance(budget, int) else int(np.ceil(budget * length))) - self.policy.window
        kept = []
        for head in range(keys.shape[1]):
            votes, group = np.zeros(length), queries.shape[1] // keys.shape[1]
            for row, query in enumerate(observed):
                seen = before + row + 1
                for each in range(head * group, (head + 1) * group):
                    weights = self._weights(self._scores(query[each], keys[:seen, head], scale, softcap), sinks, each)
                    votes[:seen] += weights.double().numpy()
            pooled = []
            for t in range(before):
                around = votes[max(0, t - size) : min(before, t + size + 1)]
                pooled.append(around.max() if self.policy.pooling == "max" else around.sum() / self.policy.kernel)
            best = sorted(range(before), key=lambda t: (-np.float32(pooled[t]), t))[:wanted]
            kept.append({*best, *range(before, length)})
        self.kept[layer] = kept


def logits(model: LoadedModel, chunk: int = 43) -> tuple[np.ndarray, LogitsReader]:
    reader = LogitsReader(model, len(IDS), chunk)
    return np.concatenate([np.array(rows) for rows in reader.rows(IDS, PROMPT, 7)]), reader


@pytest.fixture(scope="module")
def slow(folders: Any) -> Any:
    """Logits of the slow definition, and what it kept, for a family and the name of a policy."""
    done: dict[tuple[str, str], Any] = {}

    def compute(family: str, name: str) -> Any:
        if (family, name) not in done:
            model = load_model(folders(family), backend="reference", kv_type="f32")
            definition = Slowly(model, POLICIES[name], PROMPT)
            done[family, name] = logits(model)[0], definition.kept
        return done[family, name]

    return compute


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_definition(folders, slow, family: str, name: str, backend: str) -> None:
    expected, kept = slow(family, name)
    model = native(folders(family)) if backend == "native" else load_model(folders(family), backend="reference", kv_type="f32")
    model = replace(model, kv_policy=POLICIES[name])
    found, reader = logits(model)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)
    without, _ = logits(replace(model, kv_policy=FULL))
    assert np.abs(without - expected).max() > 0.02, "the policy changes nothing here"
    if name not in ("sliding", "sinks"):
        for layer, heads in enumerate(kept):
            positions = reader.kept.positions(layer)
            assert heads is None or [set(row[row < PROMPT].tolist()) for row in positions] == heads
        assert sum(heads is not None for heads in kept) == len(WHOLE[family])


def run(engine: Engine, ids: list[int], count: int = 25, **params: Any) -> Any:
    sequence = engine.add(ids, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params))
    while engine.has_work:
        engine.step()
    return sequence


def stepwise(model: LoadedModel, ids: list[int], count: int = 25) -> list[int]:
    """A greedy answer, every token of it from a prompt that is computed and compressed anew."""
    answer: list[int] = []
    while len(answer) < count:
        rows = list(LogitsReader(model, len(ids) + count, 64).rows([*ids, *answer], len(ids) if answer else 0))
        answer.append(int(np.array(rows[-1])[-1].argmax()))
    return answer


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2"])
@pytest.mark.parametrize("name", ["sliding", "sinks", "max"])
def test_the_engine_says_what_step_by_step_says(folders, family: str, name: str) -> None:
    model = native(folders(family), POLICIES[name])
    if name == "max":
        first = run(Engine(replace(model, kv_policy=FULL)), IDS[:PROMPT], 1).completion_token_ids  # of the whole prompt
        expected = first + _after(model, IDS[:PROMPT], first, 24)
    else:
        expected = stepwise(model, IDS[:PROMPT])
    assert run(Engine(model), IDS[:PROMPT]).completion_token_ids == expected


def _after(model: LoadedModel, prompt: list[int], answer: list[int], count: int) -> list[int]:
    ids = list(answer)
    for _ in range(count):
        rows = list(LogitsReader(model, 128, 64).rows([*prompt, *ids], len(prompt)))
        ids.append(int(np.array(rows[-1])[-1].argmax()))
    return ids[len(answer) :]


@pytest.mark.parametrize("name", ["sliding", "sinks", "max"])
def test_a_second_prompt_with_the_same_beginning_is_answered_as_without_the_cache(folders, name: str) -> None:
    model = native(folders("gemma3"), POLICIES[name])
    engine, longer = Engine(model), [*IDS[:PROMPT], *IDS[:20]]
    first = run(engine, IDS[:PROMPT], 10)
    again, then = run(engine, IDS[:PROMPT], 10), run(engine, longer, 10)
    fresh = Engine(model, prefix_cache=False)
    assert again.completion_token_ids == first.completion_token_ids == run(fresh, IDS[:PROMPT], 10).completion_token_ids
    assert then.completion_token_ids == run(fresh, longer, 10).completion_token_ids
    assert then.num_cached_tokens > 0
    answered = [*IDS[:PROMPT], *first.completion_token_ids, *IDS[:8]]  # what was said after a compression is computed again
    assert run(engine, answered, 6).completion_token_ids == run(fresh, answered, 6).completion_token_ids


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0", "q4_0", "k=q8_0,v=q5_1", "fp8"])
def test_rows_move_as_they_are_stored(folders, kv_type: str, family: str) -> None:
    """All but the first token are kept, so the next one sees what it would see with a window of 90: the same numbers, in pages
    of every type, though they were moved."""
    if family == "deepseek_v2" and kv_type not in ("f16", "bf16", "fp8"):
        kv_type = "fp8"  # rows of 56 are no blocks of 32
    snapkv = native(folders(family), KvPolicy("snapkv", PROMPT - 1, window=PROMPT - 1), kv_type=kv_type)
    moved, reader = logits(snapkv)
    assert reader.kept.positions(0)[:, :3].tolist() == [[1, 2, 3]] * snapkv.config.kv_layers()[0].num_kv_heads
    full, _ = logits(replace(snapkv, kv_policy=FULL))
    expected, _ = logits(replace(snapkv, kv_policy=KvPolicy("sliding", PROMPT)))
    np.testing.assert_allclose(moved[0], expected[0], atol=1e-3)
    assert np.abs(full[0] - expected[0]).max() > 0.01


def test_pages_go_back_to_the_pool(folders) -> None:
    engine = Engine(native(folders("llama"), SNAP), prefix_cache=False)
    sequence = engine.add(IDS[:PROMPT], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.step()
    stats, kept = engine.group_stats[0], engine.kept(sequence)
    assert stats.pages_held == 3
    assert stats.tokens_held == 40
    assert kept.num_kept(0) == 40
    assert kept.num_dropped(0) == 50
    assert kept.nbytes * 90 == kept.full_bytes * 40
    while engine.has_work:
        engine.step()
    assert engine.kept(sequence).num_kept(1) == 40 + 29
    assert engine.group_stats[0].pages_held == 0


def test_several_answers_share_what_is_kept(folders) -> None:
    model = native(folders("llama"), SNAP)
    engine, params = Engine(model, max_num_seqs=3), SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    several = engine.add_several(IDS[:PROMPT], params, 3)
    engine.step()
    assert engine.group_stats[0].pages_held == 3
    while engine.has_work:
        engine.step()
    for offset, sequence in enumerate(several):
        alone = Engine(model)
        single = alone.add(IDS[:PROMPT], replace(params, seed=3 + offset))
        while alone.has_work:
            alone.step()
        assert sequence.completion_token_ids == single.completion_token_ids


@pytest.mark.parametrize("name", ["sinks", "max"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sequences_that_give_way_say_the_same(folders, family: str, name: str) -> None:
    model = native(folders(family), POLICIES[name])
    prompts = [IDS[i : i + PROMPT - 3 * i] for i in range(4)]
    alone = [run(Engine(model, prefix_cache=False), ids).completion_token_ids for ids in prompts]
    engine = Engine(model, max_num_seqs=4, num_blocks=9, prefill_chunk=48)
    sequences = [engine.add(ids, SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)) for ids in prompts]
    while engine.has_work:
        engine.step()
    assert [s.completion_token_ids for s in sequences] == alone


@pytest.mark.parametrize("name", ["sliding", "sinks", "max"])
def test_drafts_change_no_token(folders, name: str) -> None:
    path = folders("gemma3")
    model = native(path, POLICIES[name])
    plain = run(Engine(model), IDS[:PROMPT], 30).completion_token_ids
    drafter = ModelDrafter(native(path, POLICIES[name], kv_type="bf16"), num_tokens=384, cost=0.1, longest=4)
    speculation = Speculation(drafter, longest=4, fixed=True)
    assert run(Engine(model, speculation=speculation), IDS[:PROMPT], 30).completion_token_ids == plain
    assert 0 < speculation.stats.accepted < speculation.stats.drafted


def test_saved_caches_hold_whole_prompts_or_are_of_one_policy(folders, tmp_path: Path) -> None:
    path, file = folders("gemma3"), tmp_path / "cache"
    model, plain = native(path, SNAP), native(path)
    engine = Engine(model, num_blocks=16)  # with room for the prompt beside what is kept of it
    said = run(engine, IDS[:PROMPT], 10)
    assert save_cache(file, engine, said.token_ids, "m") == PROMPT // BLOCK_SIZE * BLOCK_SIZE
    for other in (model, plain):
        fresh = Engine(other)
        assert put_back(file, read_cache(file), fresh, "m") == PROMPT // BLOCK_SIZE * BLOCK_SIZE
        again = run(fresh, IDS[:PROMPT], 10)
        assert again.num_cached_tokens > 0
        assert again.completion_token_ids == run(Engine(other), IDS[:PROMPT], 10).completion_token_ids
    sinks = native(path, POLICIES["sinks"])
    engine = Engine(sinks)
    said = run(engine, IDS[:PROMPT], 10)
    saved = save_cache(file, engine, said.token_ids, "m")
    assert saved == (PROMPT + 9) // BLOCK_SIZE * BLOCK_SIZE
    fresh = Engine(sinks)
    assert put_back(file, read_cache(file), fresh, "m") == saved
    longer = [*said.token_ids, 7, 8, 9]
    then = run(fresh, longer, 5)
    assert then.num_cached_tokens == saved
    assert then.completion_token_ids == run(Engine(sinks, prefix_cache=False), longer, 5).completion_token_ids
    with pytest.raises(Exception, match="made with"):
        put_back(file, read_cache(file), Engine(plain), "m")


def test_windows_need_fewer_pages(folders) -> None:
    """The plan counts what the policy keeps: pages of its window, and one of the sinks."""
    path = folders("llama")
    full = Engine(native(path), max_num_seqs=4).cache_plan
    policies = (KvPolicy("sliding", 8), KvPolicy("sinks", 8))
    sliding, sinks = (Engine(native(path, each), max_num_seqs=4, prefill_chunk=16).cache_plan for each in policies)
    assert sliding.nbytes < sinks.nbytes < full.nbytes
    assert sinks.groups[0].anchors == 4


def test_short_prompts_stay_whole(folders) -> None:
    model = native(folders("llama"), SNAP)
    engine = Engine(model)
    sequence = run(engine, IDS[:40], 5)
    assert engine.kept(sequence).num_dropped(0) == 0
    assert sequence.completion_token_ids == run(Engine(replace(model, kv_policy=FULL)), IDS[:40], 5).completion_token_ids


@pytest.mark.parametrize(
    ("kind", "budget", "message"),
    [
        ("h2o", "3", "expected full, sliding, sinks, snapkv"),
        ("snapkv", None, "needs a --kv-budget"),
        (None, "100", "full takes no --kv-budget"),
        ("snapkv", "31", "keeps at least 32 tokens"),
        ("sinks", "4", "keeps at least 5 tokens"),
        ("sliding", "0", "keeps at least 1 token"),
        ("sliding", "1.5", "above 0 and at most 1"),
        ("sliding", "0.0", "above 0 and at most 1"),
        ("sliding", "nan", "above 0 and at most 1"),
        ("sliding", "many", "expected a number of tokens, or a share"),
        ("sliding", "-3", "above 0 and at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(kind: str | None, budget: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_kv_policy(kind, budget)


def test_a_model_of_windows_is_refused(folders) -> None:
    with pytest.raises(UsageError, match="all layers of this model have windows"):
        native(folders("mistral"), SNAP)


def test_budgets() -> None:
    assert parse_kv_policy("SnapKV", "0.25").tokens(4000) == 1000
    assert parse_kv_policy("snapkv", "512").tokens(4000) == 512
    assert parse_kv_policy("snapkv", "0.25").tokens(40) == 32
    assert FULL.tokens(77) == 77
