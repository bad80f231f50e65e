"""llmctl run --draft: the same answers, statistics that add up, and refusals that say why."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from llmctl.commands.draft import DraftRequest, open_draft
from llmctl.errors import OutOfMemoryError
from llmctl.runtime.cache.memory import bytes_per_token
from llmctl.runtime.loading import open_model

RAW = ("--no-chat", "-n", "40", "--temp", "0")


def answer(call, model: Path, *arguments: object, prompt: str = "RRM") -> dict:
    done = call("run", model, "-p", prompt, "--json", *RAW, *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("draft", ["ngram", "self:Q8_0", "model"])
@pytest.mark.parametrize("number", [[], ["--num-draft-tokens", "3"]])
def test_the_answer_is_that_without_a_draft(call, scripted: Path, draft: str, number: list[str]) -> None:
    plain = answer(call, scripted)
    drafted = answer(call, scripted, "--draft", scripted if draft == "model" else draft, *number)
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["speculation"] is None
    found = drafted["speculation"]
    # A draft as slow as the model is not worth asking, unless it must be.
    assert found["accepted"] <= found["drafted"]
    assert found["accepted"] > 0 or not (number or draft == "ngram")
    assert found["round_tokens"] + found["plain_steps"] == len(plain["token_ids"]) - 1  # the first comes with the prompt


def test_a_batch_with_a_draft_gives_the_same_answers(call, scripted: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("R", "xyM", "A", "RRR", "M")))
    outputs = []
    for extra in ([], ["--draft", "ngram"], ["--draft", str(scripted), "--num-draft-tokens", "2"]):
        done = call("run", scripted, "--batch", prompts, "--parallel", "3", *RAW, *extra, "--verbose")
        for said in ("drafted tokens accepted", "passes of the model for", "x the speed of plain decoding"):
            assert (said in done.err) == bool(extra)
        assert done.code == 0, done.err
        outputs.append([json.loads(line)["text"] for line in done.out.splitlines()])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_a_stop_string_inside_a_draft_ends_an_answer_of_a_batch(call, scripted: Path, tmp_path: Path, draft: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "MM", "stop": ["e more more"]}, {"prompt": "A"}, {"prompt": "MM", "max_tokens": 9}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = scripted if draft == "model" else draft
    done = call("run", scripted, "--batch", prompts, *RAW, "--draft", spec, "--num-draft-tokens", "4")
    assert done.code == 0, done.err
    assert [json.loads(line)["text"] for line in done.out.splitlines()] == [" mor", "Paris is the answer.", " more" * 9]


def test_what_comes_behind_a_stop_string_is_not_counted(call, scripted: Path) -> None:
    run = ("run", scripted, "-p", "M", "--draft", scripted, "--num-draft-tokens", "7", "--json", *RAW)
    found = json.loads(call(*run, "--stop", "more more more").out)
    stats, counted = found["speculation"], found["usage"]["completion_tokens"]
    assert counted == stats["round_tokens"] + stats["plain_tokens"] == 3
    assert (stats["drafted"], stats["accepted"]) == (7, 2)


def test_a_seed_draws_the_same_text_with_a_draft_as_without(call, scripted: Path) -> None:
    run = ("run", scripted, "-p", "R", "--no-chat", "-n", "40", "--json")
    plain = json.loads(call(*run, "--seed", "5").out)
    for draft in ("ngram", "self:Q8_0", scripted):
        found = json.loads(call(*run, "--seed", "5", "--draft", draft, "--num-draft-tokens", "4").out)
        assert (found["token_ids"], found["sampling"]["seed"]) == (plain["token_ids"], 5)


def test_the_seed_that_is_told_makes_the_answer_again_or_none_is_told(call, scripted: Path) -> None:
    run = ("run", scripted, "-p", "R", "--no-chat", "-n", "40", "--json")
    number = ("--num-draft-tokens", "4")
    found = json.loads(call(*run, "--draft", "ngram", *number).out)
    again = json.loads(call(*run, "--seed", found["sampling"]["seed"]).out)
    assert again["token_ids"] == found["token_ids"]
    assert json.loads(call(*run, "--draft", scripted, *number).out)["sampling"]["seed"] is None
    assert "seed: " not in call(*run, "--draft", scripted, *number, "--verbose").err


STRUCTURES = {
    "--regex": "( one| two| three){6}!",
    "--json-schema": '{"type":"array","items":{"enum":["a","bb"]},"minItems":2,"maxItems":4}',
}


@pytest.mark.parametrize("draft", ["ngram", "self:Q8_0", "model"])
@pytest.mark.parametrize("flag", STRUCTURES)
def test_answers_keep_their_structure_with_a_draft(call, scripted: Path, draft: str, flag: str) -> None:
    spec = scripted if draft == "model" else draft
    run = ("run", scripted, "-p", "R", "--no-chat", "--json", flag, STRUCTURES[flag], "--ban", " two two")
    number = ("--draft", spec, "--num-draft-tokens", "3")
    plain, drafted = (json.loads(call(*run, "--temp", "0", *more).out) for more in ((), number))
    assert drafted["token_ids"] == plain["token_ids"]
    for seed in ("1", "2", "3"):
        again = [json.loads(call(*run, "--seed", seed, *number).out) for _ in range(2)]
        assert again[0]["token_ids"] == again[1]["token_ids"]
        text = again[0]["text"]
        assert " two two" not in text
        if flag == "--regex":
            assert re.fullmatch(STRUCTURES[flag], text)
        else:
            assert 2 <= len(json.loads(text)) <= 4


def test_without_a_model_the_default_one_is_drafted_for(call, scripted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCTL_MODEL", str(scripted))
    done = call("run", "--draft", scripted, "--num-draft-tokens", "3", "-p", "A", *RAW, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["text"] == "Paris is the answer."
    assert found["speculation"]["accepted"] > 0


def test_statistics_are_shown_for_people(call, scripted: Path) -> None:
    done = call("run", scripted, "-p", "M", *RAW, "--draft", "ngram", "--num-draft-tokens", "4", "--verbose")
    assert "drafted tokens accepted" in done.err
    assert "passes of the model for 40 tokens" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--draft", "3"], "--num-draft-tokens 3"),
        (["--draft", "self:F16"], "fewer bits than the model"),
        (["--draft", "self:Q9"], "there is no type"),
        (["--num-draft-tokens", "3"], "--num-draft-tokens is for --draft"),
        (["--draft", "no-such-model"], "no-such-model"),
    ],
)
def test_what_cannot_draft_is_refused(call, scripted: Path, arguments: list[str], says: str) -> None:
    done = call("run", scripted, "-p", "M", *RAW, *arguments)
    assert done.code != 0
    assert says in done.err
    assert not done.out


def test_a_draft_of_another_vocabulary_is_refused_by_the_token(call, scripted: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(scripted, other)
    file = other / "tokenizer.json"
    content, others = json.loads(file.read_text(encoding="utf-8")), {" seven": " eight", " eight": " seven"}
    seven = next(token["id"] for token in content["added_tokens"] if token["content"] == " seven")
    for token in content["added_tokens"]:
        token["content"] = others.get(token["content"], token["content"])
    file.write_text(json.dumps(content), encoding="utf-8")
    done = call("run", scripted, "-p", "M", *RAW, "--draft", other)
    assert done.code == 1
    assert f"token {seven} is ' seven' in the one and ' eight' in the other" in done.err


def test_bench_drafts_what_it_generates(call, scripted: Path) -> None:
    done = call("bench", scripted, "-p", "0", "-n", "16", "-r", "2", "--draft", "ngram", "-o", "json", "--seed", "4")
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)
    stats = row["speculation"]
    assert row["n_gen"] == 16
    assert stats["round_tokens"] + stats["plain_steps"] == 2 * 16 + 1  # and that of the warm-up
    assert json.loads(call("bench", scripted, "-p", "0", "-n", "1", "-r", "1", "-o", "json").out)[0]["speculation"] is None


def memory(opened, nbytes: int):
    return dataclasses.replace(opened, max_cache_bytes=nbytes)


def test_a_draft_and_its_model_share_the_memory_for_caches(scripted: Path) -> None:
    opened = open_model(scripted, backend="native")
    loading = {"backend": "native", "ctx_size": None}
    alone = bytes_per_token(opened.config.kv_layers(), opened.compute.kv_type) * opened.context_length
    for draft in (scripted, "self:Q8_0"):
        beside = open_draft(DraftRequest(str(draft)), memory(opened, alone), loading)
        sizes = [each.max_cache_bytes for each in (beside.target, beside.opened)]
        assert 0.1 * alone < sizes[0] == sizes[1] < 0.5 * alone
        assert beside.target.context_length == beside.opened.context_length < opened.context_length / 2
    with pytest.raises(OutOfMemoryError, match=r"about .* tokens fit"):
        open_draft(DraftRequest(str(scripted)), memory(opened, alone), {**loading, "ctx_size": opened.context_length})
    with pytest.raises(OutOfMemoryError, match="weights to draft with"):
        open_draft(DraftRequest(str(scripted)), memory(opened, 1000), loading)
    assert open_draft(DraftRequest("ngram"), opened, loading).target is opened
