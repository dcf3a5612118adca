"""Print what each loop does to the predictions of a text: loss, change of the state, next token.

python examples/train_from_python.py --out runs/example
python examples/look_at_every_loop.py runs/example "import os" --loops 12
"""

import argparse

import torch
import torch.nn.functional as F

import parcae

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("checkpoint", help="folder of a run or of a model")
parser.add_argument("text", nargs="?", default="class Reader:\n    def __init__(self, path):\n")
parser.add_argument("--loops", type=int, default=8, help="number of loops (default: 8)")
args = parser.parse_args()

checkpoint = parcae.open_checkpoint(args.checkpoint)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(args.text)]])
inputs, targets = ids, ids[0, 1:]

with torch.no_grad():
    trajectory = model(inputs, depths=args.loops, state="zero", trajectory=True).trajectory

print("loop  loss (nats)  change of state  next token")
for loop in range(1, args.loops + 1):
    logits = trajectory.logits[loop - 1, 0]  # [positions, vocabulary]
    loss = F.cross_entropy(logits[:-1], targets)
    # ||h_t - h_(t-1)|| / ||h_t||, mean over the positions
    change = trajectory.residuals[loop - 1, 0] / trajectory.states[loop, 0].norm(dim=-1)
    token = tokenizer.decode([int(logits[-1].argmax())])
    print(f"{loop:4}  {loss:11.3f}  {change.mean():15.4f}  {token!r}")
