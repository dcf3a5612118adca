"""The experiments of the paper, one module each, and what they share.

reproduce      the library call: train, measure, decide, draw; the catalogue of experiments
experiment     what an experiment is: runs, measurements, claims, figure
scales         the sizes at which they run
store          runs by the content of their recipe
verdicts       rules that turn numbers and their spread into a verdict
tasks          pointer chasing and modular arithmetic
page           docs/reproduction.md

Every other module is an experiment, but for `paper_runs`, which
simulates runs from the paper's laws.
"""
