"""Files and the named tensors in them: GGUF and safetensors, mapped, never trusted."""

from llmctl.runtime.checkpoint.checkpoint import Checkpoint, TensorEntry, open_checkpoint

__all__ = ["Checkpoint", "TensorEntry", "open_checkpoint"]
