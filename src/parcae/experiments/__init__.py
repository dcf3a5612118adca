"""The experiments of the paper, one module each, and what they share.

reproduce      the library call: train, measure, decide, draw; the catalogue of experiments
experiment     what an experiment is: runs, measurements, claims, figure
scales         the sizes at which they run
store          runs by the content of their recipe
verdicts       rules that turn numbers and their spread into a verdict
page           docs/reproduction.md
figures        panels that several experiments draw
paper_runs     the paper's grid of budgets and loops; runs simulated from its published laws

The experiments:

training       ablation_ladder, choose_mu, lr_robustness, lr_sweep, per_sequence, prelude_norm,
               truncated_sampling
comparisons    main_table, rdm_comparison, transformer_comparison, tokenizer
scaling laws   isoflop, test_time, unified
not in the paper   discretisation, fixed_or_sampled, reasoning, release_sampler, tuned_rates, walks
"""
