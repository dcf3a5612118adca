"""Defaults of generated text: calls, commands, samples of a run. The server has those of OpenAI's
API, such as temperature 1 (serving/protocol.py).

Nothing is imported here, so that the help of a command is fast.
"""

TEMPERATURE = 0.8
MAX_NEW_TOKENS = 128
"""The largest number of tokens generated."""
DRAFT_TOKENS = 4
"""Tokens of a speculative draft."""
