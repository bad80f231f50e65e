"""From logits to a token: what to ask for (params.py), what changes single logits (penalties.py), what cuts (steps.py, by
ranking.py), the draw (sampler.py)."""
