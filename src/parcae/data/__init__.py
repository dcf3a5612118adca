"""From documents to batches; a document goes through these files in this order.

corpus.py       where documents come from, and which of them are held out
hub.py          datasets of the Hugging Face hub as local, verified files
readers.py      one file of any format to its documents, as a stream
tokenizer.py    text to ids: train, load, bytes per token
compression.py  bytes per token of several tokenizers, side by side
encoding.py     corpus and tokenizer to tokenised documents, on all cores
shards.py       tokenised documents on disk: memory-mapped, checksummed
prepare.py      tokenised documents to shards, interruptible at any moment
documents.py    what packing needs to know of any store of tokenised documents
packing.py      documents to rows, as pure functions
plan.py         which documents are packed together, as a pure function of the seed
loader.py       rows to batches, deterministic and resumable
inspect.py      a look at all of it
"""
