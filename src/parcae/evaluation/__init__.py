"""Evaluation of trained models at any number of loops.

run          `parcae.evaluate`, the library call           compare   `parcae.compare`
suites       the suites by name                            jobs      what is scored, item by item
in_context   CORE and CORE-Extended: tasks, items (files), prompts (text to tokens)
zero_shot    the zero-shot tasks                           perplexity   WikiText, LAMBADA, texts
loss         loss on rows of tokens; the suite `val`       scorer, hf_scorer, branches   the models
results      the folder of an evaluation                   tables    tables and figure
item_scores  the items of a folder, read back for `compare`
harness      parcae models in lm-evaluation-harness        download  task files
"""
