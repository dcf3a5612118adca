"""Fine-tune a trained model on other text with a plain PyTorch loop.

python examples/train_from_python.py --out runs/example
python examples/fine_tune.py runs/example docs/*.md --out out/fine-tuned
parcae generate out/fine-tuned "A looped model"
"""

import argparse
from pathlib import Path

import torch

import parcae

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("checkpoint", help="folder of a run or of a model")
parser.add_argument("texts", nargs="+", type=Path, help="text files")
parser.add_argument("--out", default="out/fine-tuned", help="folder (default: out/fine-tuned)")
parser.add_argument("--steps", type=int, default=50, help="optimiser steps (default: 50)")
parser.add_argument("--learning-rate", type=float, default=3e-4, help="of AdamW (default: 3e-4)")
args = parser.parse_args()

checkpoint = parcae.open_checkpoint(args.checkpoint)
model, tokenizer = checkpoint.model, checkpoint.tokenizer
text = "\n".join(path.read_text(encoding="utf-8") for path in args.texts)
ids = torch.tensor(tokenizer.encode(text))
context = model.config.context_length
if len(ids) <= 10 * context:
    parser.error(f"the texts have {len(ids)} tokens. Give at least {10 * context + 1}: ten rows.")
windows = ids.unfold(0, context + 1, context)
held_out, training = windows[::10], windows[torch.arange(len(windows)) % 10 != 0]
generator = torch.Generator().manual_seed(0)  # draws batches, depths and initial states


@torch.no_grad()
def loss_at(loops):
    return model(held_out[:, :-1], targets=held_out[:, 1:], loops=loops, state="zero").loss.item()


before = {loops: loss_at(loops) for loops in (1, 2, 4, 8)}
optimiser = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
for _ in range(args.steps):
    rows = training[torch.randint(len(training), (8,), generator=generator)]
    loss = model(rows[:, :-1], targets=rows[:, 1:], loops="sample", generator=generator).loss
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()

for loops, loss in before.items():
    print(f"T = {loops}: held-out loss {loss:.3f} before, {loss_at(loops):.3f} after")
parcae.save(model, args.out)
tokenizer.save(Path(args.out) / "tokenizer.json")
