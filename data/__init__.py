"""Token files and batches.

`prepare.py` turns text into TFRecords; `TokenDataset` reads them; `BatchLoader` gives the batch of
any step. May import `config`, units of `utils`, the standard library, numpy, crc32c and, for
preparation only, tokenizers, tiktoken, tqdm, zstandard and pyarrow. A new kind of input: a function
in `sources.py` that returns a `Source`, and a command in `config/preparing.py` and `prepare.py`.
"""

from popxl_gpt.data.dataset import Dataset, TokenDataset
from popxl_gpt.data.errors import DataError
from popxl_gpt.data.in_memory import SyntheticDataset, TokenArray
from popxl_gpt.data.loader import BatchLoader
from popxl_gpt.data.mixture import MixedDataset
from popxl_gpt.data.sampling import BatchSampler
from popxl_gpt.data.token_files import find_files

__all__ = [
    "BatchLoader",
    "BatchSampler",
    "DataError",
    "Dataset",
    "MixedDataset",
    "SyntheticDataset",
    "TokenArray",
    "TokenDataset",
    "find_files",
]
