"""From logits to a token: what to ask for (params.py), what shapes the logits (processors.py), the draw (sampler.py)."""
