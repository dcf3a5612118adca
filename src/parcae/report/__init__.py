"""One self-contained page from one or several runs."""
