"""From a table of runs to laws: how loss falls with parameters, data and loops.

table        the table of runs (runs.csv), checked; gap shares
model_runs   the runs of one model; which are fitted, which held out
forms        the laws: their formulas and derivatives
optimise     one law from many random starts: the objective and the search
lbfgs        L-BFGS for all starts at once
bootstrap    confidence intervals, held-out budgets, warnings
isoflop      parabolas at fixed FLOPs and the power laws of their optima
loop_curves  loss against the number of test loops
fit          `parcae.fit`: all of these for every model; fit.json
predict      `parcae.predict`: optima and losses from a fit
summary      summary.md and the tables of `parcae fit`
figures      the figures                        page    laws.html
"""

DEFAULT_STARTS = 500
"""Random starts of each law, as in the paper."""
DEFAULT_BOOTSTRAP_SAMPLES = 200
"""Bootstrap samples for confidence intervals."""
