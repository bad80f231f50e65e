"""--num-completions: several answers to one prompt, which is computed once and whose cache pages they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from llmctl.commands import answer_json, console
from llmctl.commands.answer import printable
from llmctl.commands.one_shot import INTERRUPTED, describe_model_and_sampling, encode_prompt
from llmctl.commands.signals import on_interrupt
from llmctl.errors import LlmctlError

if TYPE_CHECKING:
    from llmctl.commands.session import Session
    from llmctl.runtime.generation import Completion
    from llmctl.runtime.loading import LoadedModel


def answer_several(session: Session, prompt: str, count: int) -> None:
    """Print `count` answers, with --json all in one document. With a seed each has the one after the last one's.

    Ctrl-C exits with 130; the answers that are whole by then are printed. Errors: LlmctlError for the first one that could not be
    made.
    """
    from llmctl.commands.answer import load_weights

    token_ids = encode_prompt(session, prompt)
    model, load_s = load_weights(session.opened, session.request.threads)
    describe_model_and_sampling(session, model)
    answers = _answers(session, model, token_ids, count)
    if session.request.json:
        console.print_json(_document(session, model, answers, load_s))
    else:
        _show(answers, count)
    failed = next((answer.error for answer in answers if answer.error is not None), None)
    if failed is not None:
        raise failed
    if len(answers) < count:
        raise typer.Exit(INTERRUPTED)


def _answers(session: Session, model: LoadedModel, token_ids: list[int], count: int) -> list[Completion]:
    """Those that were done when nobody stopped it, in order."""
    from llmctl.runtime.generation import Batch, TextRequest

    engine = session.engine(model, max_num_seqs=count)
    request = TextRequest(token_ids, session.params, session.request.stop, count)
    batch = Batch(engine, model.tokenizer, [request], count)
    with on_interrupt(batch.cancel):
        return [answer for _, answer in sorted(batch, key=lambda each: each[0])]


def _show(answers: list[Completion], count: int) -> None:
    import sys

    shown = printable if console.is_terminal(sys.stdout) else str
    for number, answer in enumerate(answers, 1):
        seed = "" if answer.seed is None else f", seed {answer.seed}"
        console.info(f"Answer {number} of {count}{seed}:")
        console.result(shown(answer.text))


def _document(session: Session, model: LoadedModel, answers: list[Completion], load_s: float) -> dict[str, Any]:
    """That of the first answer, with all of them under "completions"."""
    if not answers:
        raise LlmctlError("none of the answers was done")
    completions = [
        {
            "index": index,
            "seed": answer.seed,
            **answer_json.answer_fields(model.tokenizer, session.params, answer),
            "usage": answer_json.usage(answer.stats),
        }
        for index, answer in enumerate(answers)
    ]
    return {**answer_json.document(session, model, answers[0], load_s), "completions": completions}
