"""From a table of runs to laws: how loss falls with parameters, data and loops."""
