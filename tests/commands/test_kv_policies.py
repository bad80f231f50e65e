"""--kv-policy, --kv-budget and --num-completions on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from make_tiny_model import make_tiny_model

from llmctl.runtime.cache.policy import KvPolicy
from llmctl.runtime.engine import Engine
from llmctl.runtime.loading import load_model
from llmctl.runtime.sampling.params import SamplingParams

TEXT = "the house stands where the river turns and the road to the town begins, " * 12
PROMPT = TEXT[:300]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policies") / "llama", "llama", tokenizer="bpe")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize(("kind", "budget"), [("sliding", "20"), ("sinks", "0.2"), ("snapkv", "34")])
def test_run_answers_as_the_engine_with_that_policy(call, model, kind, budget):
    options = ("-p", PROMPT, "--no-chat", "-n", 8, "--temp", 0, "--json")
    done = call("run", model, *options, "--kv-policy", kind, "--kv-budget", budget)
    report = json.loads(done.out)
    policy = KvPolicy(kind, float(budget) if "." in budget else int(budget))
    loaded = load_model(model, backend="native", kv_policy=policy)
    engine = Engine(loaded)
    ids = loaded.tokenizer.encode(PROMPT, parse_special=True)
    sequence = engine.add(ids, SamplingParams(temperature=0, max_tokens=8))
    while engine.has_work:
        engine.step()
    assert report["token_ids"] == sequence.completion_token_ids
    assert report["kv_policy"] == str(policy)
    full = json.loads(call("run", model, *options).out)
    assert full["kv_policy"] == "full"
    assert full["token_ids"] != report["token_ids"]


def test_verbose_says_what_is_kept(call, model):
    done = call("run", model, "-p", PROMPT, "--no-chat", "-n", 3, "--kv-policy", "snapkv", "--kv-budget", "34", "-v", "--temp", 0)
    assert "cache: layers keep 36 of " in done.err
    assert "(snapkv, 34 tokens)" in done.err


def test_eval_measures_the_policy_against_the_full_cache(call, model, text):
    def kl(*options: object) -> float:
        done = call("eval", model, "--text", text, "--ctx", 100, "--chunks", 1, "--against", model, "--json", "-q", *options)
        report = json.loads(done.out)
        assert report["against"]["kv_policy"] == "full"
        return report["comparison"]["kl"]["value"]

    assert kl() == 0
    assert kl("--kv-policy", "snapkv", "--kv-budget", "1.0") == 0
    assert kl("--kv-policy", "snapkv", "--kv-budget", "34") > 0.001
    assert kl("--kv-policy", "sinks", "--kv-budget", "10") > 0.001


def test_bench_names_the_policy(call, model):
    options = ("-p", 0, "-n", 2, "-d", 60, "-r", 1, "--no-warmup", "-q", "--kv-policy", "snapkv", "--kv-budget", "40")
    done = call("bench", model, *options)
    assert "kv_policy" in done.out.splitlines()[0]
    assert "snapkv, 40 tokens" in done.out.splitlines()[2]
    assert json.loads(call("bench", model, *options, "-o", "json").out)[0]["kv_policy"] == "snapkv, 40 tokens"


@pytest.mark.parametrize("command", ["run", "bench", "eval"])
def test_a_policy_without_a_budget_is_refused(call, model, command):
    done = call(command, model, "--kv-policy", "sinks", *(["-p", "hi"] if command == "run" else []), *_text(command))
    assert done.code == 2
    assert "--kv-policy sinks needs a --kv-budget" in done.err


def _text(command: str) -> list[str]:
    return ["--text", "x"] if command == "eval" else []


def test_several_answers_are_those_of_their_seeds(call, model):
    options = ("-p", PROMPT, "--no-chat", "-n", 6, "--temp", 1)
    report = json.loads(call("run", model, *options, "--seed", 7, "--num-completions", 3, "--json").out)
    answers = report["completions"]
    assert [answer["seed"] for answer in answers] == [7, 8, 9]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    for answer in answers:
        alone = json.loads(call("run", model, *options, "--seed", answer["seed"], "--json").out)
        assert answer["token_ids"] == alone["token_ids"]
    assert answers[1]["usage"]["cached_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert report["token_ids"] == answers[0]["token_ids"]
    plain = call("run", model, *options, "--seed", 7, "--num-completions", 3)
    assert [plain.out.find(answer["text"]) >= 0 for answer in answers] == [True] * 3


@pytest.mark.parametrize("other", [("--json-lines",), ("--batch", "x"), ("--prompt-cache", "x")])
def test_several_answers_are_for_one_prompt(call, model, other):
    prompt = () if other[0] == "--batch" else ("-p", "hi")
    done = call("run", model, *prompt, "--num-completions", 2, *other)
    assert done.code == 2
    assert "--num-completions is for a single prompt" in done.err
