"""What an answer must be or must not say, as `Constraint`s of the sampler: grammars (grammar.py), banned strings (banned.py)."""
