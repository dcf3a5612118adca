"""From documents to batches.

corpus.py      where documents come from, and which of them are held out
hub.py         datasets of the Hugging Face hub as local, verified files
tokenizer.py   text to ids: train, load, bytes per token
shards.py      tokenised documents on disk: memory-mapped, checksummed
prepare.py     corpus + tokenizer -> shards, in parallel, interruptible
documents.py   what packing needs to know of any store of tokenised documents
packing.py     documents -> rows, as pure functions
loader.py      rows -> batches, deterministic and resumable
"""
