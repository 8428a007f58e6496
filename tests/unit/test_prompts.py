"""Prompts become the tokens that training data have of the same text."""

import pytest

from popxl_gpt.data.tokenisation import END_OF_TEXT, load_tokenizer, tokenise, train_tokenizer
from popxl_gpt.demo import generate
from popxl_gpt.demo.job.text import read_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture
def path(tmp_path):
    """A tokenizer that cuts texts, and fills short ones."""
    made = train_tokenizer([TEXT] * 20, 300)
    made.enable_truncation(4)
    made.enable_padding(length=64, pad_id=5)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("text", [TEXT, "fox", f"fox{END_OF_TEXT}dog"])
def test_a_prompt_has_the_tokens_of_training_data(path, text):
    (trained,) = tokenise([text], load_tokenizer(path))
    found = read_tokenizer(path).encode(text)
    assert found == trained.tolist()[:-1]


def test_a_prompt_spells_special_tokens_where_that_is_asked_for(path, monkeypatch):
    monkeypatch.setattr(generate, "find_tokenizer", lambda saved, config: read_tokenizer(path))
    as_text, as_tokens = (
        generate.Trained(None, None, special).tokens(f"fox{END_OF_TEXT}", "")  # type: ignore
        for special in (False, True)
    )
    assert 0 not in as_text and as_tokens[-1] == 0 and as_tokens.count(0) == 1
