"""What runs: checkpoints, tokenizers, the one forward pass, the cache, the engine."""
