"""The options of `llmctl run` that shape the choice of tokens, and what SamplingParams makes of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from llmctl.errors import UsageError

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
TypicalOption = Annotated[
    float | None,
    typer.Option(
        "--typical",
        help="Keep the tokens of about the expected surprise that reach this probability; 1: off.",
        show_default="1.0",
    ),
]
RepeatPenaltyOption = Annotated[
    float | None,
    typer.Option("--repeat-penalty", help="Divides the logits of the last tokens; 1: off.", show_default="1.0"),
]
RepeatLastNOption = Annotated[
    int | None,
    typer.Option("--repeat-last-n", help="How many tokens the penalties look back; 0: off, -1: all.", show_default="64"),
]
PresencePenaltyOption = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Subtracted from tokens among the last ones.", show_default="0.0"),
]
FrequencyPenaltyOption = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="Subtracted for each time among the last ones.", show_default="0.0"),
]
DryMultiplierOption = Annotated[
    float | None,
    typer.Option("--dry-multiplier", help="Penalty for going on with a repetition; 0: off.", show_default="0.0"),
]
DryBaseOption = Annotated[
    float | None, typer.Option("--dry-base", help="How that penalty grows with each token repeated.", show_default="1.75")
]
DryAllowedLengthOption = Annotated[
    int | None, typer.Option("--dry-allowed-length", help="Tokens that may be repeated free of it.", show_default="2")
]
DryLastNOption = Annotated[
    int | None, typer.Option("--dry-penalty-last-n", help="How many tokens it looks back; -1: all.", show_default="-1")
]
DryBreakerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dry-sequence-breaker",
        metavar="TEXT",
        help="A token that holds this ends a repetition. Repeatable; none: no text does.",
        show_default='line break : " *',
    ),
]
XtcProbabilityOption = Annotated[
    float | None,
    typer.Option("--xtc-probability", help="How often all likely tokens but the least likely go; 0: off.", show_default="0.0"),
]
XtcThresholdOption = Annotated[
    float | None, typer.Option("--xtc-threshold", help="What probability XTC calls likely.", show_default="0.1")
]
MirostatOption = Annotated[
    int | None,
    typer.Option(
        "--mirostat", metavar="0|2", help="2: keep the surprise of the text even, in place of all cuts.", show_default="0"
    ),
]
MirostatEntOption = Annotated[
    float | None, typer.Option("--mirostat-ent", help="The surprise it aims at, in bits.", show_default="5.0")
]
MirostatLrOption = Annotated[float | None, typer.Option("--mirostat-lr", help="How fast it gets there.", show_default="0.1")]
SamplersOption = Annotated[
    str | None,
    typer.Option(
        "--samplers",
        metavar="STEP;STEP…",
        help="Which steps are taken, in this order; one left out is off.",
        show_default="penalties;dry;top_k;typical;top_p;min_p;xtc;temperature",
    ),
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to a token's logit; -inf forbids it. Repeatable."),
]
BanOption = Annotated[
    list[str] | None,
    typer.Option("--ban", metavar="TEXT", help="A text the answer must not hold, letter by letter. Repeatable."),
]

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
FLAGS = {
    "temperature": ("--temp", "temperature"),
    "top_k": ("--top-k", "top_k"),
    "top_p": ("--top-p", "top_p"),
    "min_p": ("--min-p", "min_p"),
    "typical_p": ("--typical", "typical"),
    "repetition_penalty": ("--repeat-penalty", "penalties"),
    "repetition_window": ("--repeat-last-n", "penalties"),
    "presence_penalty": ("--presence-penalty", "penalties"),
    "frequency_penalty": ("--frequency-penalty", "penalties"),
    "dry_multiplier": ("--dry-multiplier", "dry"),
    "dry_base": ("--dry-base", "dry"),
    "dry_allowed_length": ("--dry-allowed-length", "dry"),
    "dry_window": ("--dry-penalty-last-n", "dry"),
    "xtc_probability": ("--xtc-probability", "xtc"),
    "xtc_threshold": ("--xtc-threshold", "xtc"),
}
"""Field of SamplingParams → its option and the step it belongs to."""
_NEEDS = {
    "dry_base": "dry_multiplier",
    "dry_allowed_length": "dry_multiplier",
    "dry_window": "dry_multiplier",
    "xtc_threshold": "xtc_probability",
}
_OTHER_NAMES = {"temp": "temperature", "typ_p": "typical", "typical_p": "typical"}


def sampling_values(given: Mapping[str, Any], *, mirostat: int | None, ent: float | None, lr: float | None) -> dict[str, Any]:
    """Fields of SamplingParams that the command line sets: `given`, without what is None, and mirostat's.

    Errors: UsageError for what cannot be or would have no effect.
    """
    from llmctl.runtime.sampling.params import SamplingParams

    values = {name: value for name, value in given.items() if value is not None}
    if mirostat not in (None, 0, 2):
        raise UsageError(f"--mirostat must be 0 or 2, found {mirostat}" + (" (2 replaces version 1)" if mirostat == 1 else ""))
    if mirostat == 2:
        values |= {"mirostat_tau": 5.0 if ent is None else ent, "mirostat_eta": 0.1 if lr is None else lr}
    elif ent is not None or lr is not None:
        raise UsageError(f"{'--mirostat-lr' if ent is None else '--mirostat-ent'} needs --mirostat 2")
    SamplingParams(**values)
    _refuse_without_effect(values)
    return values


def _refuse_without_effect(values: Mapping[str, Any]) -> None:
    from llmctl.runtime.sampling.params import MIROSTAT_STEPS, STEPS

    has_mirostat = "mirostat_tau" in values
    if has_mirostat and "samplers" in values:
        raise UsageError("--samplers has no effect with --mirostat, which has its own order")
    steps = MIROSTAT_STEPS if has_mirostat else values.get("samplers", STEPS)
    why = "with --mirostat, which makes its own cut" if has_mirostat else "since --samplers leaves out {}"
    for name in values.keys() & FLAGS.keys():
        flag, step = FLAGS[name]
        if step not in steps:
            raise UsageError(f"{flag} has no effect {why.format(step)}")
        if name in _NEEDS and not values.get(_NEEDS[name]):
            raise UsageError(f"{flag} has no effect without {FLAGS[_NEEDS[name]][0]}")


def sampler_order(text: str | None) -> tuple[str, ...] | None:
    """--samplers as names of steps; None where it was not given."""
    if text is None:
        return None
    names = (name.strip().replace("-", "_") for name in re.split("[;,]", text) if name.strip())
    return tuple(_OTHER_NAMES.get(name, name) for name in names)


def biases(options: list[str] | None) -> dict[int, float] | None:
    """--logit-bias options as {id: bias}; None where there are none. Errors: UsageError."""
    found: dict[int, float] = {}
    for option in options or []:
        token_id, _, bias = option.partition("=")
        try:
            key, value = int(token_id), float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias {option}: expected ID=BIAS, as in 128=-inf") from None
        if key in found:
            raise UsageError(f"--logit-bias names token {key} twice")
        found[key] = value
    return found or None


def breakers(options: list[str] | None, *, is_on: bool) -> list[str]:
    """--dry-sequence-breaker, else the usual ones. Errors: UsageError where DRY is off."""
    if options and not is_on:
        raise UsageError("--dry-sequence-breaker has no effect without --dry-multiplier")
    texts = list(DEFAULT_BREAKERS) if options is None else [text for text in options if text != "none"]
    if "" in texts:
        raise UsageError("--dry-sequence-breaker needs some text, found an empty one")
    return texts
