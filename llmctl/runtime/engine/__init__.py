"""The engine: token ids in, token ids out. Text is a layer above (runtime/generation.py).

Four nouns: Sequence (one request), Scheduler (whose tokens run next), ModelRunner (one forward pass), Engine (the loop).
"""

from llmctl.runtime.engine.engine import Engine, TokenOutput
from llmctl.runtime.engine.sequence import FinishReason, Sequence

__all__ = ["Engine", "FinishReason", "Sequence", "TokenOutput"]
