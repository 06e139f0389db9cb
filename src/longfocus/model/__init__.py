"""Meeting transformers: attaching to its models, windows, caches, loading and reading."""
