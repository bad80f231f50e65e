"""Text to token ids and back, for the vocabularies of GGUF files and Hugging Face folders; chat templates."""

from llmctl.runtime.tokenizer.detokenize import StreamingDetokenizer
from llmctl.runtime.tokenizer.load import load_tokenizer
from llmctl.runtime.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamingDetokenizer", "Tokenizer", "load_tokenizer"]
