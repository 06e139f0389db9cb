"""What the model does with its context."""
