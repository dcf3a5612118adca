"""Evaluation of trained models at any number of loops.

run          `parcae.evaluate`, the library call
suites       the suites by name
tasks        the tasks of CORE: their table (tasks.csv), files and downloads
core_suite   CORE and CORE-Extended: few-shot prompts, mean loss from the first differing token
zero_shot    the zero-shot tasks: sums of log-probabilities of the choices
perplexity   WikiText, LAMBADA, files of texts
loss         loss on rows of tokens; the suite `val` on a run
jobs         what every measurement has: items, records, metrics
prompts      what is scored: token sequences and the spans in them
metrics      formulas: perplexity, bits per byte, right answers, ties, standard errors
scorer       losses of a parcae model
shared_prefix   a prefix that alternatives share is computed once (tree attention)
hf_scorer    losses of a transformers model
results      the folder of an evaluation; `item_scores` reads it back
tables       tables and figure of a result
loop_trace   what each loop does to the prediction of each token of a text
task_accuracy   right answers of a model of a synthetic task
paired       two evaluations item by item: differences, intervals, sign test
harness      parcae models in lm-evaluation-harness
"""
