"""The vocabulary that nanoGPT keeps beside its token files, in a pickle that is not unpickled."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from popxl_gpt.data.dataset_info import read_info
from popxl_gpt.data.prepare import main
from popxl_gpt.utils.errors import DataError


class Runs:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("run",)


META = {
    "characters": ({"vocab_size": 65, "itos": {0: "a"}, "stoi": {"a": 0}}, 65),
    "numbers of two bytes": ({"vocab_size": 300}, 300),
    "numbers of four bytes": ({"vocab_size": 65536}, 65536),
    "another order": ({**{"stoi": {chr(n): n for n in range(900)}}, "vocab_size": 900}, 900),
    "no size": ({"itos": {}, "stoi": {}}, None),
    "a size that is none": ({"vocab_size": "65"}, None),
    "no vocabulary": ({"vocab_size": 0}, None),
    "more than 16 bits": ({"vocab_size": 65537}, None),
    "two sizes": ([{"vocab_size": 65}, {"".join(["vocab_", "size"]): 66}], None),
    "a program": ({"itos": Runs()}, None),
    "a program beside the size": ({"vocab_size": 65, "itos": Runs()}, 65),
}


@pytest.mark.parametrize("meta", META)
def test_the_vocabulary_of_nanogpts_files_is_that_of_the_dictionary_beside_them(
    tmp_path, monkeypatch, meta
):
    monkeypatch.chdir(tmp_path)
    content, size = META[meta]
    np.arange(40, dtype="<u2").tofile(tmp_path / "train.bin")
    for protocol in range(2, 6):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(content, protocol))
        out = Path(f"out{protocol}")
        command = ["from_bins", ".", "--sequence_length", "8", "--output", str(out)]
        if size is None:
            with pytest.raises(DataError, match="meta.pkl: got no vocab_size .* --vocabulary_size"):
                main(command)
            assert not out.exists()
            assert main([*command, "--vocabulary_size", "40"]) == 0
        else:
            assert main(command) == 0
        info = read_info(out)
        assert info["vocabulary_size"] == (size or 40) and "end_of_text" not in info
    assert not Path("run").exists()
