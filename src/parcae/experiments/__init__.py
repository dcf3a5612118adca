"""One module per table or figure: what to run, what to draw."""
