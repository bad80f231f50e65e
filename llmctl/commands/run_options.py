"""The options that only `llmctl run` has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmctl.commands.options import complete_model

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
        help="What to say to the model. Piped stdin and then --file are put before it. Without any prompt, on a terminal: "
        "a chat.",
        show_default=False,
    ),
]
PromptOption = Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, as an option.")]
FileOption = Annotated[Path | None, typer.Option("--file", "-f", help="A UTF-8 file, put before the prompt.")]
SystemOption = Annotated[str | None, typer.Option("--system", help="The system message.")]
NoChatOption = Annotated[
    bool, typer.Option("--no-chat", help="Complete the prompt as raw text, without a chat template.")
]
ChatTemplateOption = Annotated[
    Path | None, typer.Option("--chat-template", help="A Jinja file instead of the model's own template.")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", min=-1, help="Most tokens to generate.", show_default="-1, until the end token"),
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before this text. Repeatable.")
]
TempOption = Annotated[
    float | None, typer.Option("--temp", help="Flattens the choice; 0 takes the likeliest token.", show_default="0.8")
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Keep this many of the likeliest tokens; 0: all.", show_default="40")
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", help="Keep the likeliest tokens that reach this probability.", show_default="0.95"),
]
MinPOption = Annotated[
    float | None,
    typer.Option("--min-p", help="Drop tokens below this share of the likeliest one.", show_default="0.05"),
]
RepeatPenaltyOption = Annotated[
    float | None,
    typer.Option("--repeat-penalty", help="Divides the logits of the last 64 tokens; 1: off.", show_default="1.0"),
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Subtracted from tokens among the last 64.", show_default="0.0"),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="Subtracted for each time among the last 64.", show_default="0.0"),
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to a token's logit; -inf forbids it. Repeatable."),
]
