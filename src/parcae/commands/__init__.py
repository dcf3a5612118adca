"""One module per subcommand of `parcae`; see `parcae.cli` for the two functions each one has."""
