"""Sweeps: a grid of training runs, planned, trained and collected in one table.

run        parcae.sweep, the library call
grid       the runs of a grid             estimate   how long they take
folder     files of a sweep, run states   progress   terminal output
launch     local processes                slurm      cluster jobs        worker   one run
"""
