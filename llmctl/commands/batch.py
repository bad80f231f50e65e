"""--batch: many prompts, answered several at once, in the order of their lines; a run that was stopped is gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmctl.commands import answer_json, console
from llmctl.commands.answer import describe_model, describe_sampling, load_weights
from llmctl.commands.batch_input import Task, read_tasks
from llmctl.commands.draft import describe_loss, describe_speculation
from llmctl.commands.one_shot import INTERRUPTED, tell_missing_template
from llmctl.commands.signals import on_interrupt
from llmctl.errors import LlmctlError, OutputError

if TYPE_CHECKING:
    from llmctl.commands.session import Session
    from llmctl.runtime.checkpoint.output_file import OutputFile
    from llmctl.runtime.engine.speculation import SpeculationStats
    from llmctl.runtime.generation import Completion


def answer_batch(session: Session, file: Path, output: Path | None, *, parallel: int, force: bool) -> None:
    """Answer every line of a file, to `output` or to stdout.

    Errors: LlmctlError, at the end, if a line has no answer; OSError, UsageError, OutputError. Ctrl-C exits with 130.
    """
    if output is not None:
        _check_output(file, output, force)
    tell_missing_template(session)
    tasks = read_tasks(session, file)
    for task in tasks:
        if task.error:
            console.warn(f"{file}:{task.line}: {task.error}")
    answers = Answers(output, tasks)
    try:
        is_done = answers.remaining == [] or _answer(session, file, tasks, answers, parallel)
        if is_done:
            answers.finish()
    finally:
        answers.suspend()
    if not is_done:
        console.info(_stopped(answers, output))
        raise typer.Exit(INTERRUPTED)
    if answers.failed:
        places = ", ".join(map(str, answers.failed[:5])) + (" …" if answers.failed[5:] else "")
        raise LlmctlError(f"{len(answers.failed)} of {len(tasks)} lines of {file} have no whole answer: lines {places}")


def _check_output(file: Path, output: Path, force: bool) -> None:
    from llmctl.runtime.checkpoint.output_file import refuse_same_file

    refuse_same_file([file], output)
    if output.exists() and not force:
        raise OutputError(f"{output}: exists already; --force replaces it, -o names another file")


def _stopped(answers: Answers, output: Path | None) -> str:
    done = f"Stopped after {answers.written} of {len(answers.tasks)} lines"
    return f"{done}; the same command goes on from there." if output else f"{done}."


class Answers:
    """The lines written so far and those still to come. Answers may come in any order; they are written in that of the lines.

    remaining: tasks without an answer. failed: numbers of lines whose answer is an error or incomplete. Errors: OutputError if
    what an earlier run left is of other prompts or options.
    """

    def __init__(self, output: Path | None, tasks: list[Task]) -> None:
        from llmctl.runtime.checkpoint.output_file import OutputFile

        self.tasks, self.written, self.failed = tasks, 0, []
        self._early: dict[int, dict[str, Any]] = {}
        self._file: OutputFile | None = None if output is None else OutputFile(output, resume=True)
        if self._file is not None:
            self._resume(self._file, output)
        begun = self.written
        self.remaining = [task for task in tasks[begun:] if task.request is not None]
        for index, task in enumerate(tasks[begun:], begun):
            if task.error is not None:
                self.add(index, {"error": task.error})

    def _resume(self, file: OutputFile, output: Path | None) -> None:
        whole = file.kept[: file.kept.rfind(b"\n") + 1]
        for line in whole.splitlines():
            entry = _entry(line)
            expected = self.tasks[self.written] if self.written < len(self.tasks) else None
            if expected is None or entry.get("fingerprint") != expected.fingerprint:
                raise OutputError(
                    f"{output}: an earlier run left answers to other prompts, or by another model or other options "
                    f"(line {entry.get('line')}): remove {file.temporary} or name another file with -o"
                )
            self._count(entry)
        file.cut(len(whole))
        if self.written:
            console.info(f"Going on after {self.written} of {len(self.tasks)} lines that an earlier run answered.")

    def add(self, index: int, answer: dict[str, Any]) -> None:
        """Take the answer to a task; it is written when all before it are."""
        self._early[index] = answer
        while self.written in self._early:
            task, found = self.tasks[self.written], self._early.pop(self.written)
            own_id = {} if task.id is None else {"id": task.id}
            self._write({"line": task.line, **own_id, **found, "fingerprint": task.fingerprint})

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            console.print_json(entry, indent=None)
        else:
            self._file.write(console.json_line(entry).encode() + b"\n")
        self._count(entry)

    def _count(self, entry: dict[str, Any]) -> None:
        self.written += 1
        if "error" in entry or not entry.get("is_complete", True):
            self.failed.append(entry["line"])

    def finish(self) -> None:
        """All is written: the file takes its name."""
        if self._file is not None:
            self._file.commit()

    def suspend(self) -> None:
        """Leave what there is for the next run."""
        if self._file is not None:
            self._file.suspend()


def _entry(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _answer(session: Session, file: Path, tasks: list[Task], answers: Answers, parallel: int) -> bool:
    """Answer what remains; False if Ctrl-C came before the end."""
    from llmctl.runtime.generation import Batch

    model, _ = load_weights(session.opened, session.request.threads)
    for line in [*describe_model(session.request.name, model), *describe_sampling(session.params, session.from_file)]:
        console.detail(line)
    width = min(parallel, len(answers.remaining))
    engine = session.engine(model, width)
    places = _places(tasks, answers)
    batch = Batch(engine, model.tokenizer, _requests(answers.remaining), width)
    done = 0
    with on_interrupt(batch.cancel), console.progress("Answering", len(places), unit="answer") as bar:
        for number, completion in batch:
            if completion.error is not None:
                console.warn(f"{file}:{answers.remaining[number].line}: {completion.error}")
            answers.add(places[number], _fields(session, model.tokenizer, answers.remaining[number], completion))
            done += 1
            bar.update_to(done)
    if engine.speculation:
        _report_drafting(engine.speculation.stats)
    return done == len(places)


def _report_drafting(stats: SpeculationStats) -> None:
    """What it did for all answers together."""
    for line in describe_speculation(stats):
        console.detail(line)
    if hint := describe_loss(stats, "these answers"):
        console.info(hint)


def _places(tasks: list[Task], answers: Answers) -> list[int]:
    """Of every remaining task, its index among all."""
    lines = {task.line: index for index, task in enumerate(tasks)}
    return [lines[task.line] for task in answers.remaining]


def _requests(tasks: list[Task]) -> Iterator[Any]:
    from dataclasses import replace

    for task in tasks:
        assert task.request is not None
        yield replace(task.request, prompt_token_ids=list(task.request.prompt_token_ids))


def _fields(session: Session, tokenizer: Any, task: Task, completion: Completion) -> dict[str, Any]:
    assert task.request is not None
    said = answer_json.answer_fields(tokenizer, task.request.params, completion)
    if completion.error is not None:
        said = {"error": str(completion.error), **said}
    complete = {} if session.request.structure is None else {"is_complete": completion.is_complete}
    return {**said, **complete, "usage": answer_json.usage(completion.stats), "seed": completion.seed}
