"""llmctl completion: the script that lets a shell complete commands, options, models and presets."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from llmctl.commands import console


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
) -> None:
    """Print the script that lets a shell complete commands, options, models and presets.

    bash: eval "$(llmctl completion bash)" in ~/.bashrc; zsh: the same in ~/.zshrc, after compinit; fish: llmctl completion
    fish > ~/.config/fish/completions/llmctl.fish
    """
    from typer._completion_shared import get_completion_script  # --show-completion knows the shell it runs in only

    console.result(get_completion_script(prog_name="llmctl", complete_var="_LLMCTL_COMPLETE", shell=shell))
