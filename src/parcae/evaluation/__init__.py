"""Measuring a trained model: loss, perplexity and bits per byte at every depth."""
