#!/usr/bin/env python3
"""How soon an answer begins: in a chat with a long history, and from the start of a process.

    python scripts/bench_chat.py MODEL [--history 2000] [--rounds 7]

chat: seconds from Enter to the first token where the history is in the cache already, template and tokenizer included, beside
what cannot be saved: one decode step and the prefill of the new turn's tokens (those that close the answer before it, the
question, the opening of the reply), both measured at that depth. process: seconds
from the start of `llmctl run` to the first byte of its answer, the file being in the system's cache. One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peer_programs import PeerError

from llmctl.commands.chat import Conversation
from llmctl.commands.session import Request, open_session
from llmctl.errors import LlmctlError
from llmctl.runtime.engine import Engine
from llmctl.runtime.sampling.params import SamplingParams

ANSWER_TOKENS = 16
QUESTIONS = ("And what came after that?", "Say it in one sentence.", "Which of these is the longest?", "Who else was there?")
TURN = "The train to the north leaves at seven in the morning and stops at the river bridge, at the market and at the mill."
GREEDY = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS}


class FirstToken:
    """Stands for the terminal: notes when the first token comes."""

    def __init__(self) -> None:
        self.at: float | None = None

    def push(self, text: str) -> None:
        """A token and what can be shown of it."""
        self.at = self.at or time.perf_counter()

    def finish(self) -> None:
        """The answer has ended."""

    give_up = finish


class Timed(Conversation):
    """A chat without a screen. num_computed: tokens that were read, up to the one before the last answer's end."""

    num_computed = 0

    def _view(self, ids: list[int]) -> FirstToken:
        self.view = FirstToken()
        return self.view


def open_chat(model: Path, threads: int | None, history: int) -> Timed:
    """A chat in which about so many tokens were said, all of them in the cache."""
    loading = {"backend": "native", "ctx_size": None}
    session = open_session(Request(str(model), None, None, False, [], GREEDY, loading, threads, False))
    chat = Timed(session, session.opened.load(threads=threads))
    while len(chat.token_ids(chat.messages)) < history - ANSWER_TOKENS:
        roles = [{"role": "user", "content": f"{len(chat.messages)}: {TURN}"}, {"role": "assistant", "content": TURN}]
        chat.messages = [*chat.messages, *roles]
    stats = chat.reply_to(QUESTIONS[-1]).stats
    chat.num_computed = stats.prompt_tokens + stats.completion_tokens - 1
    return chat


def prefill_seconds(engine: Engine, ids: list[int], num_tokens: int) -> float:
    """Of the last `num_tokens` of a text whose beginning is in the cache."""
    begin = engine.reuse_stats.found_tokens
    sequence = engine.add(ids, SamplingParams(**GREEDY))
    start = time.perf_counter()
    engine.step()
    seconds = time.perf_counter() - start
    found = engine.reuse_stats.found_tokens - begin
    engine.abort(sequence)
    if len(ids) - found != num_tokens:
        raise LlmctlError(f"{len(ids) - found} tokens were computed where {num_tokens} were to be")
    return seconds


def time_turn(chat: Timed, question: str) -> dict[str, float]:
    """One question. `ratio`: to a decode step and the prefill of the tokens that the turn brought."""
    before, computed = len(chat.token_ids(chat.messages, reply=False)), chat.num_computed
    start = time.perf_counter()
    answer = chat.reply_to(question)
    first = chat.view.at - start
    stats = answer.stats
    num_new = stats.prompt_tokens - computed
    chat.num_computed = stats.prompt_tokens + stats.completion_tokens - 1
    sent = chat.token_ids(chat.messages[:-1])
    ids = sent[: stats.cached_tokens] + sent[1 : 1 + num_new]  # other tokens, since these are in the cache now
    prefill, step = prefill_seconds(chat.engine, ids, num_new), stats.decode_s / (stats.completion_tokens - 1)
    return {
        "history_tokens": before,
        "new_tokens": num_new,
        "computed_tokens": stats.prompt_tokens - stats.cached_tokens,
        "first_token_ms": 1e3 * first,
        "decode_step_ms": 1e3 * step,
        "prefill_ms": 1e3 * prefill,
        "ratio": first / (step + prefill),
    }


def time_process(model: Path, threads: int | None) -> float:
    """Seconds from the start of a one-shot run to the first byte of the answer."""
    options = ["-p", "Why is the sky blue?", "-n", str(ANSWER_TOKENS), "--temp", "0", "-q"]
    more = [] if threads is None else ["-t", str(threads)]
    start = time.perf_counter()
    command = [sys.executable, "-m", "llmctl", "run", str(model), *options, *more]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        _, said = process.communicate()
    if process.returncode or not first:
        raise PeerError(f"llmctl run ended with code {process.returncode}: {said.decode(errors='replace')[-300:]}")
    return seconds


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of every column."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main(arguments: list[str] | None = None) -> int:
    """Both lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--history", type=int, default=2000)
    parser.add_argument("--rounds", "-r", type=int, default=7)
    parser.add_argument("--threads", "-t", type=int, default=None)
    args = parser.parse_args(arguments)
    chat = open_chat(args.model, args.threads, args.history)
    rows = [time_turn(chat, QUESTIONS[number % len(QUESTIONS)]) for number in range(args.rounds)]
    ratios = [row["ratio"] for row in rows]
    show("chat", {**medians(rows), "ratio_range": [min(ratios), max(ratios)]})
    del chat
    seconds = [time_process(args.model, args.threads) for _ in range(args.rounds)]
    show("process", {"first_byte_s": statistics.median(seconds), "first_byte_range_s": [min(seconds), max(seconds)]})
    return 0


def show(what: str, row: dict[str, Any]) -> None:
    """One line."""
    print(json.dumps({"measured": what, **row}), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LlmctlError, PeerError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
