"""The one forward pass (decoder.py) and, per family, one small file of choices."""
