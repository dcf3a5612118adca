"""Decoding with a trained model: cache, layers, sampling, early exit, speculation, engine."""

DEFAULT_TEMPERATURE = 0.8
"""Of every way to generate text: calls, commands, samples of a run. Evaluation tasks set theirs."""
