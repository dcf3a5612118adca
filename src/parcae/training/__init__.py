"""Training: recipe, optimisers, the loop, checkpoints, telemetry, many devices."""
