"""What is evaluated: one interface over plain and focused models and OpenAI-compatible endpoints."""
