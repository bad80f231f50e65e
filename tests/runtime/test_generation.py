"""Text over the engine: stop strings over token borders, end tokens, cancelling, counts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmctl.runtime.engine import Engine
from llmctl.runtime.generation import GenerationStats, StopFinder, generate_text
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.tokenizer import StreamingDetokenizer

# --- StopFinder -------------------------------------------------------------------------------------------------------


def feed(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    finder, shown = StopFinder(stop), []
    for piece in pieces:
        text, found = finder.push(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, finder.flush()], None


def by_definition(stop: list[str], text: str) -> tuple[str, str | None]:
    """Read one character after another: the first moment at which the text ends with a stop string, the longest one then."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


words = st.text(alphabet="abc", min_size=1, max_size=5)


@given(st.lists(words, max_size=4), st.lists(st.text(alphabet="abc", max_size=4), max_size=12))
@example(["bc", "abcd"], ["abcd"])  # the shorter one is complete first, however it arrives
@example(["bc", "abcd"], ["a", "b", "c", "d"])
@example(["abc", "c"], ["ab", "c"])
@example(["aab"], ["a", "a", "a", "b"])
@example(["abab"], ["aba", "ab", "b"])
def test_streamed_equals_whole(stop, pieces):
    shown, found = feed(stop, pieces)
    assert ("".join(shown), found) == by_definition(stop, "".join(pieces))


@given(st.lists(words, min_size=1, max_size=3), st.lists(st.text(alphabet="abc", max_size=3), max_size=12))
def test_only_what_may_become_a_stop_string_is_held_back(stop, pieces):
    finder, sent, shown = StopFinder(stop), "", ""
    for piece in pieces:
        text, found = finder.push(piece)
        sent, shown = sent + piece, shown + text
        if found is not None:
            return
        held = sent[len(shown) :]
        assert sent == shown + held
        assert held == "" or any(s.startswith(held) for s in stop)


def test_without_stop_strings_nothing_is_held_back():
    assert feed([], ["ab", "c"]) == (["ab", "c", ""], None)


# --- streams ----------------------------------------------------------------------------------------------------------

PIECES = [b"zero", b"<end>", b"Hello", b" wor", b"ld", b"\xf0\x9f", b"\x99\x82", b"!", b"\n", b"User", b":", b"\xe2\x82"]
TOKENIZER = SimpleNamespace(
    stream=lambda *, strip_space: StreamingDetokenizer(lambda i: PIECES[i], strip_space=strip_space)
)


def saying(*script: int):
    """Logits that make a greedy model say these ids after a prompt of one token, and the last one for ever."""
    return lambda ids: np.eye(len(PIECES))[script[min(len(ids) - 1, len(script) - 1)]]


@pytest.fixture
def talk(stub_model):
    """Runs a script through an engine: (events, stream)."""

    def run(*script: int, stop: list[str] | None = None, eos: tuple[int, ...] = (1,), **params: object):
        model = stub_model(saying(*script), vocab_size=len(PIECES), eos_token_ids=eos)
        stream = generate_text(Engine(model), TOKENIZER, [0], SamplingParams(temperature=0, **params), stop)
        events = list(stream)
        assert free_pages(stream) == total_pages(stream)
        return events, stream

    return run


def free_pages(stream) -> int:
    return stream._engine._blocks.num_free


def total_pages(stream) -> int:
    return sum(stream._engine._blocks.plan.num_pages)


def text_of(events) -> str:
    return "".join(event.text for event in events)


def test_the_end_token_ends_and_is_not_shown(talk):
    events, stream = talk(2, 3, 4, 1)
    assert text_of(events) == "Hello world"
    assert [e.finish_reason for e in events] == [None, None, None, "stop"]
    assert [e.token_id for e in events] == [2, 3, 4, 1]
    assert stream.sequence.completion_token_ids == [2, 3, 4, 1]


def test_an_ignored_end_token_is_text(talk):
    events, _ = talk(2, 1, 7, max_tokens=3, ignore_eos=True)
    assert text_of(events) == "Hello<end>!"
    assert events[-1].finish_reason == "length"


def test_every_token_is_shown_at_once(talk):
    events, _ = talk(2, 3, 4, 7, 1)
    assert [e.text for e in events] == ["Hello", " wor", "ld", "!", ""]


def test_a_character_over_two_tokens_comes_whole(talk):
    events, _ = talk(5, 6, 1)
    assert [e.text for e in events] == ["", "🙂", ""]


def test_an_incomplete_character_is_replaced_at_the_end(talk):
    events, _ = talk(2, 11, max_tokens=2)
    assert text_of(events) == "Hello�"
    events, _ = talk(2, 11, 1)
    assert text_of(events) == "Hello�"


def test_the_first_space_is_kept(talk):
    events, _ = talk(3, 4, 1)
    assert text_of(events) == " world"


@pytest.mark.parametrize(
    ("stop", "shown", "found"),
    [
        (["\nUser:"], "Hello world!", "\nUser:"),
        (["User"], "Hello world!\n", "User"),
        (["lo wor"], "Hel", "lo wor"),
        (["orl", "world!\nUser:"], "Hello w", "orl"),
        (["nowhere", "!\nU"], "Hello world", "!\nU"),
        (["Hello"], "", "Hello"),
    ],
)
def test_stop_strings_over_token_borders_are_never_shown(talk, stop, shown, found):
    events, stream = talk(2, 3, 4, 7, 8, 9, 10, 2, 1, stop=stop)
    assert text_of(events) == shown
    assert (events[-1].finish_reason, events[-1].stop_string) == ("stop", found)
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    assert stream.stats.completion_tokens == len(events)


def test_the_start_of_a_stop_string_that_does_not_come_is_shown_in_the_end(talk):
    events, _ = talk(2, 8, 9, 1, stop=["\nUser:"])
    assert [e.text for e in events] == ["Hello", "", "", "\nUser"]
    assert events[-1].stop_string is None
    events, _ = talk(2, 8, 9, max_tokens=3, stop=["\nUser:"])
    assert text_of(events) == "Hello\nUser"
    assert events[-1].finish_reason == "length"


def test_a_stop_string_that_the_last_allowed_token_completes(talk):
    events, _ = talk(2, 8, 9, 10, max_tokens=4, stop=["\nUser:"])
    assert (text_of(events), events[-1].finish_reason) == ("Hello", "stop")


def test_the_limit_of_zero_tokens_gives_one_last_event(talk):
    events, stream = talk(2, max_tokens=0)
    assert [(e.text, e.token_id, e.finish_reason) for e in events] == [("", None, "length")]
    assert stream.stats == GenerationStats(prompt_tokens=1)


def test_leaving_the_loop_frees_the_pages(stub_model):
    engine = Engine(stub_model(saying(2), vocab_size=len(PIECES)))
    stream = generate_text(engine, TOKENIZER, [0], SamplingParams(temperature=0))
    for event in stream:
        assert event.text == "Hello"
        break
    assert free_pages(stream) < total_pages(stream)
    stream.close()
    assert free_pages(stream) == total_pages(stream)
    assert stream.sequence.finish_reason == "abort"
    assert list(stream) == []


def test_closing_before_the_first_event(stub_model):
    engine = Engine(stub_model(saying(2), vocab_size=len(PIECES)))
    stream = generate_text(engine, TOKENIZER, [0], SamplingParams(temperature=0))
    stream.close()
    assert not engine.has_work


def test_cancelling_brings_what_was_held_back(stub_model):
    engine = Engine(stub_model(saying(2, 8, 9), vocab_size=len(PIECES)))
    stream = generate_text(engine, TOKENIZER, [0], SamplingParams(temperature=0), ["\nUser:"])
    events = []
    for event in stream:
        events.append(event)
        if len(events) == 3:
            stream.cancel()
    assert text_of(events) == "Hello\nUser"
    assert (events[-1].token_id, events[-1].finish_reason, len(events)) == (None, "abort", 4)
    assert free_pages(stream) == total_pages(stream)
    assert not engine.has_work


def test_cancelling_inside_a_long_prompt_does_not_wait_for_its_end(stub_model):
    model = stub_model(saying(2), vocab_size=len(PIECES))
    stream = generate_text(Engine(model, prefill_chunk=10), TOKENIZER, [0] * 200, SamplingParams(temperature=0))
    stream.cancel()
    assert [(e.text, e.finish_reason) for e in stream] == [("", "abort")]
    assert model.decoder.steps == [[10]]


def test_a_sequence_aborted_elsewhere_ends_its_stream(stub_model):
    engine = Engine(stub_model(saying(2), vocab_size=len(PIECES)))
    stream = generate_text(engine, TOKENIZER, [0], SamplingParams(temperature=0))
    engine.abort(stream.sequence)
    assert [(e.text, e.finish_reason) for e in stream] == [("", "abort")]


def test_an_engine_can_be_used_again_after_any_end(stub_model):
    engine = Engine(stub_model(saying(2, 3, 4, 1), vocab_size=len(PIECES), eos_token_ids=(1,)))
    for stop, expected in ((["wor"], "Hello "), ([], "Hello world"), (["He"], ""), ([], "Hello world")):
        stream = generate_text(engine, TOKENIZER, [0], SamplingParams(temperature=0), stop)
        assert text_of(stream) == expected
        assert not engine.has_work


def test_logprobs_pass_through(talk):
    events, _ = talk(2, 3, 1, num_logprobs=2)
    assert all(e.logprob is not None and len(e.top_logprobs) == 2 for e in events)
    assert events[0].logprob == pytest.approx(np.log(np.e / (np.e + len(PIECES) - 1)))


def test_counts(talk):
    _, stream = talk(2, 3, 4, 1)
    stats = stream.stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens) == (1, 0, 4)
    assert stats.prefill_s > 0
    assert stats.decode_s > 0
    assert stats.ttft_ms == pytest.approx(stats.prefill_s * 1e3)
    assert stats.prefill_tokens_per_s == pytest.approx(1 / stats.prefill_s)
    assert stats.decode_tokens_per_s == pytest.approx(3 / stats.decode_s)


def test_time_the_reader_takes_is_not_counted(stub_model, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("llmctl.runtime.generation.time.perf_counter", lambda: clock.now)
    model = stub_model(saying(*[2] * 7, 3, 4, 1), vocab_size=len(PIECES), eos_token_ids=(1,))
    forward = model.decoder.forward

    def slow(*arguments):
        clock.now += 2.0
        return forward(*arguments)

    model.decoder.forward = slow
    stream = generate_text(Engine(model, prefill_chunk=3), TOKENIZER, [0] * 7, SamplingParams(temperature=0))
    for _ in stream:
        clock.now += 100.0
    assert stream.stats.prefill_s == pytest.approx(6.0)  # three chunks
    assert stream.stats.completion_tokens == 4
    assert stream.stats.decode_s == pytest.approx(6.0)


def test_rates_of_nothing_are_none():
    stats = GenerationStats()
    assert (stats.prefill_tokens_per_s, stats.decode_tokens_per_s, stats.ttft_ms) == (None, None, None)
    assert GenerationStats(prompt_tokens=4, cached_tokens=4, prefill_s=1.0).prefill_tokens_per_s is None
    assert GenerationStats(completion_tokens=1, decode_s=0.0).decode_tokens_per_s is None
