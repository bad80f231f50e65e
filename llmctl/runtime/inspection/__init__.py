"""What `inspect-kv` looks at: a text's pages (live.py), where its attention goes (attention.py) and what its keys and values are
like (ranges.py), both through probe.py, and what a smaller cache would cost it (what_if.py)."""
