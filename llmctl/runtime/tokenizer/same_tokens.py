"""Whether two tokenizers give the same meaning to the same ids, as a draft and its target must."""

from __future__ import annotations

from llmctl.runtime.tokenizer.tokenizer import Tokenizer

_SPECIAL = ("bos_token_id", "eos_token_ids")


def first_difference(left: Tokenizer, right: Tokenizer) -> str | None:
    """The first id that means two things, or what else differs, in words; None where there is nothing. Unused ids at the end,
    which only pad a vocabulary to the rows of an embedding, do not count."""
    counts = left.num_used_tokens, right.num_used_tokens
    for token_id in range(min(counts)):
        texts = left.token_text(token_id), right.token_text(token_id)
        if texts[0] != texts[1]:
            return f"token {token_id} is {texts[0]!r} in the one and {texts[1]!r} in the other"
    if counts[0] != counts[1]:
        surplus = (left if counts[0] > counts[1] else right).token_text(min(counts))
        return f"the one has {counts[0]} tokens, the other {counts[1]}: only one of them knows {surplus!r}"
    for name in _SPECIAL:
        values = getattr(left, name), getattr(right, name)
        if values[0] != values[1]:
            return f"{name} is {values[0]} in the one and {values[1]} in the other"
    return None
