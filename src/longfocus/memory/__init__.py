"""Where additional keys live: one store a file, one contract (`contract.py`)."""
