"""Print what each loop does to the predictions of a text: loss, change of the state, tokens.

    python examples/train_from_python.py --out runs/example
    python examples/look_at_every_loop.py runs/example "import os" --loops 12

`parcae depth runs/example "import os"` draws the same numbers for every token.
"""

import argparse

import parcae

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("checkpoint", help="folder of a run or of a model")
parser.add_argument("text", nargs="?", default="class Reader:\n    def __init__(self, path):\n")
parser.add_argument("--loops", type=int, default=8, help="number of loops (default: 8)")
args = parser.parse_args()

model, tokenizer, _ = parcae.open_checkpoint(args.checkpoint)
ids = [tokenizer.bos, *tokenizer.encode(args.text)]
trace = parcae.trace_loops(model, ids, loops=args.loops)  # tensors of shape [loops, tokens]

print("loop  loss (nats)  change of state  correct tokens")
for loop in range(args.loops):
    loss = trace.loss[loop].mean()
    change = trace.change[loop].mean()  # ||h_t - h_(t-1)|| / ||h_t||
    correct = (trace.predicted[loop] == trace.targets).sum()
    print(f"{loop + 1:4}  {loss:11.3f}  {change:15.4f}  {correct:4} of {len(trace.targets)}")

print("\ntoken          loss after 1 loop  after all  settled after loop")
for index, token in enumerate(trace.targets.tolist()):
    text = repr(tokenizer.decode([token]))
    first, last = trace.loss[0, index], trace.loss[-1, index]
    print(f"{text:14} {first:17.3f} {last:10.3f} {trace.settled[index]:19}")
