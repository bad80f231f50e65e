"""--json-schema, --regex, --grammar: what an answer must be, checked before any model is looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from llmctl.commands import console
from llmctl.errors import UsageError


class Structure(NamedTuple):
    """The option that asks for it, and the grammar as llguidance takes it."""

    flag: str
    grammar: str


def structure(json_schema: str | None, regex: str | None, grammar: Path | None) -> Structure | None:
    """What the options ask for; None where none is given. Errors: UsageError, OSError for a file that cannot be read."""
    from llmctl.commands.prompt_input import read_text, text_argument

    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    flags = [flag for flag, value in given.items() if value is not None]
    if len(flags) > 1:
        raise UsageError(f"{flags[0]} and {flags[1]} exclude each other")
    if json_schema is not None:
        return _compiled("--json-schema", "json_schema", _schema(json_schema))
    if regex is not None:
        return _compiled("--regex", "regex", text_argument(regex, "--regex"))
    if grammar is not None:
        return _compiled(f"--grammar {grammar}", "grammar", read_text(grammar, "--grammar"))
    return None


def _schema(text: str) -> str:
    """The schema as JSON text: the argument itself where it begins with a brace, else the file of that name."""
    from llmctl.commands.prompt_input import read_text, text_argument

    is_literal = text.lstrip().startswith("{")
    source = text_argument(text, "--json-schema") if is_literal else read_text(Path(text), "--json-schema")
    where = "--json-schema" if is_literal else f"--json-schema {text}"
    try:
        schema = json.loads(source)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UsageError(f"{where}: a schema is a JSON object, found {type(schema).__name__}")
    return source


def _compiled(where: str, kind: str, source: str) -> Structure:
    from llmctl.runtime.constraints.grammar import compile_grammar

    if not source.strip():
        raise UsageError(f"{where}: there is nothing in it")
    try:
        grammar, warnings = compile_grammar(kind, source)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    for warning in warnings:
        console.warn(f"{where}: {warning}")
    return Structure(where, grammar)
