"""Decoding with a trained model.

engine     steps: which prompts are read (chunked prefill), which sequences decode
request    what was asked for, checked           sequence   one text while it is generated
rows       admission: which waiting sequence gets which row of the cache; reused prefixes
cache      keys and values by layer and loop
decode     a pass for each purpose: prompts, next tokens, speculative drafts and their verification
batch      the tokens of one pass, what each attends to
network    prelude, loops, coda and head over the cache; chooses PyTorch, C++ or static shapes
layers     weights and layers in the form used for decoding
quantise   storage of weights: float32, bfloat16, int8
static     steps with static shapes, for accelerators
native     passes of a few tokens in C++, on CPUs
exit       when a token stops looping            sampling   from logits to a token
"""

TEMPERATURE = 0.8
"""The default of calls, commands and samples of a run. The server has the defaults of OpenAI's API,
such as temperature 1 (serving/protocol.py)."""
MAX_NEW_TOKENS = 128
"""The largest number of tokens generated."""
DRAFT_TOKENS = 4
"""Tokens of a speculative draft."""
