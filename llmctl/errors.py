"""The errors a user can cause. Each says what was expected, what was found, where, and what to do.

Imports nothing, so every layer can raise them. The command line prints the message as one line on stderr and exits with
`exit_code`: 1 the work failed, 2 the command was used wrongly.
"""


class LlmctlError(Exception):
    """Base of every error that is the input's or the machine's fault, not ours."""

    exit_code = 1


class UsageError(LlmctlError):
    """The command was asked for something that cannot be: a bad flag value, contradictory options."""

    exit_code = 2


class FormatError(LlmctlError):
    """A file is not what its kind requires: truncated, inconsistent, hostile."""


class UnsupportedError(LlmctlError):
    """The input is sound but names something this program does not handle (architecture, tensor type, rope type …)."""


class ModelNotFoundError(LlmctlError):
    """No model under the path, store name or source the user gave."""


class DownloadError(LlmctlError):
    """A model could not be fetched, or the bytes received are not the expected ones."""


class ContextLengthError(LlmctlError):
    """The prompt does not fit the context; the message names both numbers."""


class ChatTemplateError(LlmctlError):
    """The model has no chat template, or its template refused the conversation (with the template's own message)."""


class OutputError(LlmctlError):
    """The result could not be written: disk full, read-only folder, output equal to the input."""


class StandardOutputError(OutputError):
    """Standard output cannot be written: nobody sees what is still to come."""


class OutOfMemoryError(LlmctlError):
    """The model or its cache does not fit; the message names needed and available bytes."""
