"""Decoding with a trained model: cache, layers, sampling, early exit, speculation, engine."""
