#!/usr/bin/env python3
"""What drafting brings: tokens per second with and without a draft, prompt by prompt, one after the other.

    python scripts/bench_speculation.py MODEL --draft self:Q4_0 --draft ngram
    python scripts/bench_speculation.py MODEL --draft self:Q4_0 --useless -n 512
    python scripts/bench_speculation.py MODEL.gguf --draft DRAFT.gguf --num-draft-tokens 4 \\
        --llama-speculative BUILD/bin/llama-speculative-simple

Greedy, through the chat template, 128 tokens each. Of every draft: the speedup over plain decoding of the same prompts in the
same minutes (median and range over the prompts), the share of drafted tokens that was accepted, and what its own parts predict,
E / (gamma c + v), so that nothing is lost between them. Load and prefill of the draft are reported apart. For ngram also the
share of accepted tokens that stand in the prompt. The text must be the same, or the run fails.

With --useless every drafted token is replaced by a wrong one, as sure of itself as before: what a draft costs that brings
nothing (`lost`: of plain decoding's time). With --llama-speculative the same two files run there beside, prompt by prompt, each
after plain llama-completion (--llama-completion, or beside it).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer_programs import PeerError, find_program, run_program

from llmctl.commands.draft import DraftRequest, OpenedDraft, open_draft
from llmctl.errors import LlmctlError
from llmctl.runtime.engine import Engine
from llmctl.runtime.engine.drafter import Drafter, Wish
from llmctl.runtime.engine.speculation import SpeculationStats
from llmctl.runtime.loading import LoadedModel, OpenedModel, open_model
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.rejection import Proposal
from llmctl.runtime.tokenizer.chat_template import encode_chat

PROMPTS = Path(__file__).with_name("prompts") / "speculation.json"


@dataclass
class Run:
    """One answer. seconds: after the first token, the draft's prefill left out."""

    token_ids: list[int]
    seconds: float
    stats: SpeculationStats | None = None
    copied: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return (len(self.token_ids) - 1) / self.seconds


class Useless:
    """A drafter that is wrong about every token, at the same cost."""

    def __init__(self, drafter: Drafter, num_tokens: int) -> None:
        self._drafter, self._num_tokens = drafter, num_tokens
        self.name, self.cost = f"{drafter.name}, wrong", drafter.cost
        self.forget, self.interrupt = drafter.forget, drafter.interrupt

    @property
    def prefill_s(self) -> float:
        """As `Drafter.prefill_s`."""
        return self._drafter.prefill_s

    def propose(self, wishes: list[Wish], chance: Callable[[float], float]) -> list[list[Proposal]]:
        """As `Drafter.propose`: the neighbour of every token."""
        drafts = self._drafter.propose(wishes, chance)
        return [[replace(each, token_id=(each.token_id + 1) % self._num_tokens) for each in draft] for draft in drafts]


def generate(engine: Engine, prompt: list[int], num_tokens: int) -> Run:
    """Greedy tokens, end tokens and all."""
    before = None if engine.speculation is None else engine.speculation.stats.since(SpeculationStats())
    sequence = engine.add(prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    while not sequence.completion_token_ids:
        engine.step()
    begin, copied = time.perf_counter(), 0
    while sequence.finish_reason is None:
        draft_before = len(sequence.token_ids)
        engine.step()
        copied += _copied(sequence.token_ids, draft_before, len(prompt))
    seconds = time.perf_counter() - begin
    stats = None if before is None else engine.speculation.stats.since(before)
    return Run(sequence.completion_token_ids, seconds - (stats.prefill_s if stats else 0.0), stats, copied)


def _copied(ids: list[int], start: int, num_prompt: int) -> int:
    """Of the tokens that a step accepted, those that stand in the prompt behind the same two tokens."""
    prompt = {tuple(ids[i - 2 : i + 1]) for i in range(2, num_prompt)}
    return sum(tuple(ids[i - 2 : i + 1]) in prompt for i in range(start, len(ids) - 1))


def predicted(plain: Run, run: Run) -> float | None:
    """The speedup that follows from acceptance, draft cost and verify cost as measured in the run itself."""
    stats = run.stats
    if stats is None or not stats.rounds:
        return None
    step = plain.seconds / (len(plain.token_ids) - 1)
    tokens = stats.round_tokens + stats.plain_steps
    return tokens * step / (stats.draft_s + stats.verify_s + stats.plain_steps * step)


def bench(
    target: LoadedModel, draft: OpenedDraft, prompts: list[list[int]], num_tokens: int, rounds: int, *, useless: bool = False
) -> dict[str, Any]:
    """Plain and drafted in turn, every prompt `rounds` times; of each prompt the median ratio counts."""
    plain_engine = Engine(target, prefix_cache=False)
    begin = time.perf_counter()
    engine = Engine(target, prefix_cache=False, speculation=draft.load(target))
    load_s = time.perf_counter() - begin
    if useless:
        engine.speculation.drafter = Useless(engine.speculation.drafter, target.num_tokens)
    ratios, predictions, rates, plain_rates, total, copied = [], [], [], [], SpeculationStats(), 0
    for prompt in prompts:
        pairs = [(generate(plain_engine, prompt, num_tokens), generate(engine, prompt, num_tokens)) for _ in range(rounds)]
        for plain, drafted in pairs:
            if plain.token_ids != drafted.token_ids:
                raise LlmctlError("the draft changed a greedy answer")
            copied += drafted.copied
        total = engine.speculation.stats
        ratios.append(statistics.median(d.rate / p.rate for p, d in pairs))
        predictions += [d.rate / p.rate / q for p, d in pairs if (q := predicted(p, d)) is not None]
        rates.append(statistics.median(d.rate for _, d in pairs))
        plain_rates.append(statistics.median(p.rate for p, _ in pairs))
    return {
        "speedup": statistics.median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        **({"lost": 1 / statistics.median(ratios) - 1} if useless else {}),
        "tokens_per_step": (total.round_tokens + total.plain_steps) / max(1, total.rounds + total.plain_steps),
        "tokens_per_s": statistics.median(rates),
        "plain_tokens_per_s": statistics.median(plain_rates),
        "acceptance_rate": total.acceptance_rate,
        "share_of_prediction": statistics.median(predictions) if predictions else None,
        "copied_share": copied / total.accepted if total.accepted else None,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "draft_prefill_s": total.prefill_s,
        "draft_load_s": load_s,
    }


_SPEED = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds, speed:\s+([\d.]+) t/s")
_EVAL = re.compile(r"eval time =\s+([\d.]+) ms /\s+(\d+) runs.*?([\d.]+) tokens per second")


_ACCEPT = re.compile(r"accept\s+=\s+([\d.]+)%")
_LIMITS = {
    "--spec-draft-n-max": ["--spec-type", "draft-simple", "--spec-draft-n-max", "{}", "--spec-draft-n-min", "0"],
    "--draft-max": ["--draft-max", "{}", "--draft-min", "0", "--draft-p-min", "0.0"],
}
"""How llama.cpp is told the number of drafted tokens: since 2026, and before. The newer help names both."""


def draft_options(speculative: Path, count: int) -> list[str]:
    """What this build of llama-speculative-simple understands. Errors: PeerError."""
    said = _said([str(speculative), "--help"])
    for name, options in _LIMITS.items():
        if name in said:
            return [option.format(count) for option in options]
    raise PeerError(f"{speculative}: its --help names neither {' nor '.join(_LIMITS)}")


def llama_cpp(programs: tuple[Path, Path], draft: str, text: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """Tokens per second of llama.cpp without and with the draft, for a raw prompt, and the share of drafted tokens accepted."""
    speculative, completion = programs
    sizes = ["-n", str(args.tokens), "-t", str(args.threads), "-c", "2048"]
    common = ["-m", str(args.model), "-p", text, *sizes, "--temp", "0", "--ignore-eos"]
    plain = _found(_EVAL, completion, _said([str(completion), *common, "-no-cnv", "--no-warmup"]))
    limits = draft_options(speculative, args.num_draft_tokens)
    said = _said([str(speculative), *common, "-md", draft, "-td", str(args.threads), *limits])
    accepted = float(_found(_ACCEPT, speculative, said)[1]) / 100
    return float(plain[3]), float(_found(_SPEED, speculative, said)[3]), accepted


def _said(command: list[str]) -> str:
    done = run_program(command)
    return done.stdout + done.stderr


def _found(pattern: re.Pattern[str], program: Path, said: str) -> re.Match[str]:
    """The last match."""
    found = list(pattern.finditer(said))
    if not found:
        raise PeerError(f"{program.name} printed no {pattern.pattern!r}: {said[-300:]!r}")
    return found[-1]


def read_prompts(opened: OpenedModel, kinds: list[str]) -> dict[str, list[list[int]]]:
    """Kind → prompts as ids, through the chat template."""
    texts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    template = opened.tokenizer.chat_templates.get("default")
    message = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    return {kind: [encode_chat(opened.tokenizer, message(t), template=template) for t in texts[kind]] for kind in kinds}


def main(arguments: list[str] | None = None) -> int:
    """A JSON line for every draft and kind of prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", action="append", required=True, metavar="DRAFT", help="as of llmctl run; repeatable")
    parser.add_argument("--num-draft-tokens", type=int, default=None)
    parser.add_argument("--prompts", nargs="+", default=["plain"], choices=["plain", "summarise", "edit"])
    parser.add_argument("--tokens", "-n", type=int, default=128)
    parser.add_argument("--rounds", "-r", type=int, default=3)
    parser.add_argument("--threads", "-t", type=int, default=2)
    parser.add_argument("--useless", action="store_true", help="replace every drafted token by a wrong one")
    parser.add_argument("--llama-speculative", type=Path)
    parser.add_argument("--llama-completion", type=Path)
    args = parser.parse_args(arguments)
    if args.llama_speculative and args.num_draft_tokens is None:
        parser.error("--llama-speculative needs --num-draft-tokens: both are to draft as many")
    loading = {"backend": "native", "ctx_size": 2048}
    opened = open_model(args.model, **loading)
    target, prompts = opened.load(threads=args.threads), read_prompts(opened, args.prompts)
    for spec in args.draft:
        draft = open_draft(DraftRequest(spec, args.num_draft_tokens), opened, loading)
        for kind, ids in prompts.items():
            row = {"draft": spec, "prompts": kind, **bench(target, draft, ids, args.tokens, args.rounds, useless=args.useless)}
            if args.llama_speculative and Path(spec).is_file():
                row["llama.cpp"] = _peer(args, spec, opened, ids)
            print(json.dumps(row), flush=True)
    return 0


def _peer(args: argparse.Namespace, draft: str, opened: OpenedModel, prompts: list[list[int]]) -> dict[str, float]:
    """Medians over the prompts."""
    speculative = find_program("llama-speculative-simple", args.llama_speculative, "LLAMA_SPECULATIVE")
    completion = find_program("llama-completion", args.llama_completion, "LLAMA_COMPLETION", beside=speculative)
    texts = [opened.tokenizer.decode(ids) for ids in prompts]
    pairs = [llama_cpp((speculative, completion), draft, text, args) for text in texts]
    return {
        "plain_tokens_per_s": statistics.median(plain for plain, _, _ in pairs),
        "tokens_per_s": statistics.median(drafted for _, drafted, _ in pairs),
        "speedup": statistics.median(drafted / plain for plain, drafted, _ in pairs),
        "acceptance_rate": statistics.median(accepted for _, _, accepted in pairs),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LlmctlError, PeerError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
