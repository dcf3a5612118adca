"""Defaults of every way to generate text: calls, commands, samples of a run, the server.

Nothing is imported here, so that the help of a command is fast.
"""

TEMPERATURE = 0.8
MAX_NEW_TOKENS = 128
"""The largest number of tokens generated."""
DRAFT_TOKENS = 4
"""Tokens of a speculative draft."""
