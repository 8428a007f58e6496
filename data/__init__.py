"""Token files and batches.

`prepare.py` turns text into TFRecords; `TokenDataset` reads them; `BatchLoader` gives the batch of
any step. May import `config`, units of `utils`, the standard library, numpy, crc32c and, for
preparation only, tokenizers, jinja2, tiktoken, tqdm, zstandard and pyarrow. A new kind of input: a
function in `sources.py` that returns a `Source`, and a command in `config/preparing.py` and
`prepare.py`.
"""
