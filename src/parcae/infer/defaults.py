"""Defaults of every way to generate text: calls, commands, samples of a run, the server's page.

Requests to the server have the defaults of OpenAI's API, which are in `serving/protocol.py`.

Nothing is imported here, so that the help of a command is fast.
"""

TEMPERATURE = 0.8
NEW_TOKENS = 128
"""The largest number of tokens generated."""
DRAFT_TOKENS = 4
"""Tokens of a speculative draft."""
