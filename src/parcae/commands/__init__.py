"""One module per subcommand of `parcae`; see `parcae.cli` for the two functions each one has.

models         presets, show, export, import_model
data           data, tokenizer
training       demo, plan, train, report, sweep
inference      generate, depth, serve
evaluation     eval, compare, lm_eval
scaling laws   fit, predict, reproduce

Parts of commands: generation_output and repl (of generate), text_argument.
"""
