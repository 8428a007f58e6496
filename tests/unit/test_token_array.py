"""What a session is given of tokens."""

from types import SimpleNamespace

import numpy as np
import pytest

from popxl_gpt.config.presets import preset
from popxl_gpt.execution.host import token_array
from popxl_gpt.utils.errors import UserError

CONFIG = preset("tiny", data_parallel=1, tensor_parallel_1=1, tensor_parallel_2=1)
VOCABULARY = CONFIG.model.vocabulary_size


@pytest.mark.parametrize("name, token", [("words", VOCABULARY), ("words", -1), ("labels", 10**6)])
def test_tokens_that_the_vocabulary_does_not_have_are_refused(name, token):
    size = CONFIG.training.global_batch_size, CONFIG.model.sequence_length
    tokens = np.zeros(size, np.int64)
    tokens[1, 2] = token
    with pytest.raises(UserError, match=f"^{name}: got token {token}; expected .* 0 to"):
        token_array(SimpleNamespace(), name, tokens, CONFIG)
