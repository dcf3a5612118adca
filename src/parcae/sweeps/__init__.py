"""Plan a grid of training runs, run it, and gather one table."""
