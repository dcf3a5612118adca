"""Training: from a recipe to a run folder.

settings            the tables of a recipe
run                 `parcae.train`, its result, starting and resuming a run folder
start               weights of another run or model to start from
trainer             the training loop: steps, validation, checkpoints, logging, stop signals
learner             model, optimiser and data: one optimiser step, one validation
optim               parameter groups, optimisers by name (the names: parcae.registry)
muon, adamw_atan2   two optimisers
schedule            length of a run, learning rates over it
corpora, data_use   data of a run; what it uses of it
distributed         devices and processes: one, DDP, FSDP2
checkpoint_writer   writing checkpoints and reading them back
log, telemetry      measurements, progress display
messages            what a run prints when it starts and ends
divergence          when a run stops as diverged
plan                `parcae.plan`: parameters, FLOPs, memory and time before a run
memory_estimate     its memory
"""
