"""Sweeps: a grid of training runs, planned, trained and collected in one table.

run        parcae.sweep, the library call
grid       budgets, loops, seeds and models to runs; their tokens follow from training.schedule
estimate   how long they take
folder     files of a sweep, run states   progress   terminal output
launch     local processes                slurm      cluster jobs        worker   one run
"""
