"""Answers as JSON: the document of --json, the events of --json-lines, log-probabilities."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from llmctl.commands.answer import order
from llmctl.commands.draft import speculation_fields

if TYPE_CHECKING:
    from llmctl.commands.session import Request, Session
    from llmctl.runtime.generation import Completion, GenerationStats, TextEvent
    from llmctl.runtime.loading import LoadedModel
    from llmctl.runtime.sampling.params import SamplingParams
    from llmctl.runtime.sampling.sampler import SampledToken
    from llmctl.runtime.tokenizer import Tokenizer


def document(session: Session, model: LoadedModel, answer: Completion, load_s: float) -> dict[str, Any]:
    """Everything there is to say about an answer."""
    from llmctl.runtime.machine import peak_memory

    ops = model.ops
    return {
        "model": session.request.name,
        "path": model.checkpoint.path,
        "family": model.config.family,
        "backend": ops.name,
        "device": ops.device,
        "dtype": ops.dtype,
        "kv_type": model.kv_type,
        "kv_policy": str(model.kv_policy),
        "activations": model.activations,
        "threads": ops.threads,
        "context_length": model.context_length,
        "chat_template": session.template is not None,
        **answer_fields(model.tokenizer, session.params, answer),
        "usage": usage(answer.stats),
        "timings": timings(answer.stats, load_s),
        "speculation": answer.stats.speculation and speculation_fields(answer.stats.speculation),
        "peak_memory_bytes": peak_memory(),
        "sampling": sampling_fields(session.params, session.request, answer.seed),
    }


def answer_fields(tokenizer: Tokenizer, params: SamplingParams, answer: Completion) -> dict[str, Any]:
    """What was said and why it ended; log-probabilities where they were asked for."""
    said = {
        "text": answer.text,
        "token_ids": [token.token_id for token in answer.tokens],
        "finish_reason": answer.finish_reason,
        "stop_string": answer.stop_string,
    }
    if params.num_logprobs is not None:
        said["logprobs"] = [logprob_entry(tokenizer, token) for token in answer.tokens]
    return said


def logprob_entry(tokenizer: Tokenizer, token: SampledToken) -> dict[str, Any]:
    """A token, its log-probability and the likeliest ones at its place."""
    top = [_scored(tokenizer, token_id, logprob) for token_id, logprob in token.top_logprobs.items()]
    return {**_scored(tokenizer, token.token_id, token.logprob), "top_logprobs": top}


def _scored(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    """A token need not be whole characters: its text may hold U+FFFD, its bytes are what it really is."""
    data = tokenizer.token_bytes(token_id)
    return {"token_id": token_id, "token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}


def token_event(tokenizer: Tokenizer, params: SamplingParams, event: TextEvent) -> dict[str, Any]:
    """One line of --json-lines: a token and the text that can be shown now."""
    from llmctl.runtime.sampling.sampler import SampledToken

    line = {"event": "token", "token_id": event.token_id, "text": event.text}
    if params.num_logprobs is None:
        return line
    entry = logprob_entry(tokenizer, SampledToken(event.token_id, event.logprob, event.top_logprobs))
    return {**line, **{name: entry[name] for name in ("bytes", "logprob", "top_logprobs")}}


def usage(stats: GenerationStats) -> dict[str, int]:
    """Counts of tokens."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    }


def timings(stats: GenerationStats, load_s: float) -> dict[str, float | None]:
    """Times and rates."""
    return {
        "load_s": load_s,
        "ttft_ms": stats.ttft_ms,
        "prefill_s": stats.prefill_s,
        "decode_s": stats.decode_s,
        "constraint_s": stats.constraint_s,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
    }


def sampling_fields(params: SamplingParams, request: Request, seed: int | None) -> dict[str, Any]:
    """How tokens were chosen, in JSON's own types."""
    left_out = ("constraints", "dry_breakers", "samplers")  # functions, ids of the texts below, and what "order" says
    values = {field.name: getattr(params, field.name) for field in fields(params) if field.name not in left_out}
    texts = {"stop": request.stop, "banned": request.banned, "dry_breakers": request.breakers if params.dry_multiplier else []}
    must = request.structure.flag if request.structure else None
    return {**values, "seed": seed, **texts, "structure": must, "order": ["logit_bias", *order(params)]}
