"""Training on `transformers.Trainer`: recipes, what differs from the ordinary trainer, exact resume, baselines."""
