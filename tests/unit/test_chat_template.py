"""Chat templates: the ids are those of transformers, answers are found, and no template takes more
than it may.
"""

import json
import os
import signal
from datetime import datetime

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import popxl_gpt.data.chat_template
from popxl_gpt.data.chat_template import ChatTemplate, RefusedError, find_template
from popxl_gpt.data.conversations import Written, conversation_source, written
from popxl_gpt.data.dataset import TokenDataset
from popxl_gpt.data.masking import ids_of
from popxl_gpt.data.prepare import main
from popxl_gpt.data.tokenisation import load_tokenizer, tokenise
from popxl_gpt.utils.errors import DataError, EndedError

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<turn>", "</turn>", "<|endoftext|>"]  # fmt: skip
IM = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
HEADERS = """{{ bos_token }}{%- for m in messages %}
    {{- '<turn>' + m.role + '</turn>\n\n' + m.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>assistant</turn>\n\n' }}{% endif %}"""
INST = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
  {%- if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
  {%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""
MODEL = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{% for m in messages %}
<turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}</turn>
{% endfor %}
{% if add_generation_prompt %}
<turn>model
{% endif %}"""
MARKED = """{% for m in messages %}<turn>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}

{% endfor %}"""
THINKS = (
    "{% for m in messages %}<turn>{{ m.role }}{{ '<t>' if loop.last }}{{ m.content }}{% endfor %}"
)
JSON = "{% for m in messages %}{% if loop.index0 > 8 %}{% break %}{% endif %}{{ m | tojson }}{{ strftime_now('%Y') }}{% endfor %}"
TEMPLATES = {
    "chatml": IM + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "headers": HEADERS,
    "inst": INST,
    "model": MODEL,
    "marked": MARKED,
    "json": JSON,
}
TURNS = [("user", " hello there\n"), ("assistant", "<b>good</b> day & more"), ("user", "日本 🐈?"), ("assistant", "fine")]  # fmt: skip
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]


def bytes_tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = ["hello there good day user assistant model system"] * 20
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)  # fmt: skip
    made.train_from_iterator(texts, trainer)
    return made


def pieces_tokenizer():
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # fmt: skip
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])  # fmt: skip
    special = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    made.train_from_iterator(["▁hello▁there▁good▁day\n[INST]/"] * 9, trainers.BpeTrainer(vocab_size=340, special_tokens=special[: len(SPECIAL) + 1], show_progress=False))  # fmt: skip
    return made


KINDS = {"bytes": bytes_tokenizer, "pieces": pieces_tokenizer}


def folder_with(path, template, kind="bytes", as_file=False, **more):
    path.mkdir(exist_ok=True)
    KINDS[kind]().save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "pad_token": "</s>"}  # fmt: skip
    if as_file:
        (path / "chat_template.jinja").write_text(template)
        template = "not this one"
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template, **more}))  # fmt: skip
    return path


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(tmp_path, name, kind):
    from transformers import PreTrainedTokenizerFast

    folder = folder_with(tmp_path, TEMPLATES[name], kind)
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for count in (1, 3):
        ids = ours.encode_part(ours.template.prompt(MESSAGES[:count]), special_tokens=True)
        assert ids == theirs.apply_chat_template(MESSAGES[:count], add_generation_prompt=True, return_dict=False)  # fmt: skip
    if name == "json":
        return
    (tokens,) = tokenise([written({"messages": MESSAGES}, ours)], ours)
    tokens = tokens.view(np.int32)
    asked = {"return_assistant_tokens_mask": True} if name == "marked" else {}
    found = theirs.apply_chat_template(MESSAGES, return_dict=True, **asked)
    expected = found["input_ids"]
    is_added = expected[-1] != ours.end
    assert ids_of(tokens).tolist() == [*expected, *([ours.end] if is_added else [])]
    if name == "marked":
        assert (tokens >= 0).astype(int).tolist() == [*found["assistant_masks"], 1]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "json"])
def test_what_counts_is_what_the_assistant_says(tmp_path, name):
    tokenizer = load_tokenizer(folder_with(tmp_path, TEMPLATES[name]))
    made = written({"messages": MESSAGES}, tokenizer)
    said = [text for text, counts in made if counts]
    assert [text.strip().split("<|")[0].split("</s")[0].split("</turn")[0] for text in said] == ["<b>good</b> day & more", "fine"]  # fmt: skip
    (tokens,) = tokenise([made], tokenizer)
    tokens = tokens.view(np.int32)
    counted = tokenizer.library.decode(tokens[tokens >= 0].tolist(), skip_special_tokens=False)
    assert counted.removesuffix("</s>") == "".join(said).removesuffix("</s>")


def test_conversations_of_all_forms_are_written_and_prepared_alike(tmp_path):
    folder = folder_with(tmp_path / "model", TEMPLATES["chatml"], as_file=True)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 1]}')
    pair = [MESSAGES[0] | {"content": "hi"}, MESSAGES[1]]
    rows = {
        "messages": {"messages": pair},
        "from": {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "gpt", "value": pair[1]["content"]},
            ]
        },  # fmt: skip
        "pair": {"prompt": "hi", "answer": pair[1]["content"]},
    }
    found = {}
    for name, row in rows.items():
        (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
        out = tmp_path / name
        flags = ["--tokenizer", str(folder), "--sequence_length", "64", "--validation", "0"]
        assert main(["conversations", str(tmp_path / "rows.jsonl"), "--output", str(out), *flags]) == 0  # fmt: skip
        data = TokenDataset(str(out / "train-*.tfrecord"), 64, 512)
        found[name] = data.read(np.arange(len(data))).tolist()
    assert found["messages"] == found["from"] == found["pair"]
    kept = load_tokenizer(out)
    assert kept.template.source == TEMPLATES["chatml"] and kept.ends == [3, 1] and kept.end == 1
    assert kept.template.tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    with_lines = conversation_source([str(tmp_path / "rows.jsonl")], tokenizer=None)
    assert not any(isinstance(each, Written) for each in with_lines.documents())


@pytest.mark.parametrize("name", ["chatml", "inst"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_a_named_end_stays_that_of_a_copy_whose_template_says_another(tmp_path, name, end):
    folder = folder_with(tmp_path, TEMPLATES[name], bos_token=None, eos_token="<|im_end|>")
    given = load_tokenizer(folder, end)
    (tmp_path / "copy").mkdir()
    given.save(tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert given.library.id_to_token(given.end) == end and copy.end == given.end
    assert given.template.prompt(MESSAGES[:3]) == copy.template.prompt(MESSAGES[:3])


@pytest.mark.parametrize(
    ("end", "is_inside"), [(None, True), ("<|im_end|>", True), ("<|endoftext|>", False)]
)
def test_conversations_that_hold_their_end_are_told_and_not_kept_apart(
    tmp_path, capsys, end, is_inside
):
    folder = folder_with(tmp_path / "model", TEMPLATES["chatml"], eos_token="<|im_end|>")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hi", "answer": "ho"}\n' * 4)
    flags = ["--tokenizer", str(folder), "--sequence_length", "64", "--validation", "0"]
    flags += ["--output", str(tmp_path / "out"), *([] if end is None else ["--eos_token", end])]
    assert main(["conversations", str(tmp_path / "rows.jsonl"), *flags]) == 0
    told = capsys.readouterr().out
    words = "train: 4 conversations with the token that ends documents inside, where"
    assert (words in told) == is_inside
    assert (" --document_attention --sequence_length 64 " in told) != is_inside


def test_a_template_is_found_in_its_own_file_among_several_and_where_a_run_keeps_it(tmp_path):
    several = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    assert find_template(folder_with(tmp_path / "one", several) / "tokenizer.json").source == "a"
    assert find_template(folder_with(tmp_path / "two", "a", as_file=True) / "tokenizer.json").source == "a"  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "two").rename(tmp_path / "run/hugging_face")
    assert find_template(tmp_path / "run/tokenizer.json").source == "a"
    (tmp_path / "one/tokenizer_config.json").write_text('{"chat_template": [{"name": "x"}, {"name": "y"}]}')  # fmt: skip
    with pytest.raises(DataError, match="no text and no list with one named default"):
        find_template(tmp_path / "one/tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"added_tokens_decoder": {}}])
def test_special_tokens_are_those_of_both_files_as_in_transformers(tmp_path, more):
    from transformers import PreTrainedTokenizerFast

    template = "{% for name in [bos_token, eos_token, pad_token] %}{{ name }}|{% endfor %}"
    folder = folder_with(tmp_path, template, bos_token=None, eos_token="<turn>", **more)
    said = {"bos_token": {"content": "<s>"}, "eos_token": "</turn>", "unk_token": "<|eot|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(said))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES[:1], tokenize=False)
    assert load_tokenizer(folder).template.prompt(MESSAGES[:1]) == expected
    assert (expected == "<s>|</turn>|</s>|") == (not more)


LOOP = "{% for i in range(99999) %}"
WRONG = {
    "loops": (LOOP * 2 + "{% endfor %}" * 2, DataError, "got no text within 1 s from its chat"),
    "takes memory": ("{{ 'a' * 10**12 }}", DataError, "got no text within .*B of memory"),
    "writes much": (LOOP + "{{ 'a' * 99 }}{% endfor %}", DataError, "many times as long"),
    "is no Jinja": ("{% if %}", DataError, "got a chat template that is none: 'Expected"),
    "refuses": ("{{ raise_exception('no') }}", RefusedError, "got 'no' from the chat template"),
    "reaches out": ("{{ ''.__class__.__mro__ }}", RefusedError, "'__class__' of 'str' .* unsafe"),
    "changes": ("{{ messages.append(1) }}", RefusedError, "'append' of 'list' object is unsafe"),
    "reads files": ("{% include '/etc/passwd' %}", RefusedError, "no loader"),
    "rewrites": (THINKS, RefusedError, "message 2 is written in another way"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRONG)
def test_what_a_template_may_not_do_ends_in_a_sentence_that_names_its_file(
    tmp_path, name, monkeypatch
):
    monkeypatch.setattr(popxl_gpt.data.chat_template, "SECONDS", 1)
    source, error, words = WRONG[name]
    with pytest.raises(error, match=words) as caught:
        ChatTemplate(source, tmp_path / "x.jinja", {}).conversation(MESSAGES)
    assert "x.jinja" in str(caught.value)


def test_a_process_goes_on_after_a_conversation_that_it_refuses(tmp_path):
    template = ChatTemplate(TEMPLATES["inst"], tmp_path / "x.jinja", {"bos_token": "B", "eos_token": "E"})  # fmt: skip
    with pytest.raises(RefusedError, match="roles must alternate"):
        template.prompt(MESSAGES[1:])
    process = template._process
    assert template.prompt(MESSAGES[:1]) == "B[INST]  hello there\n [/INST]"
    assert template._process is process


def test_a_process_that_was_killed_damages_no_row(tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path / "model", TEMPLATES["chatml"]))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    rows = [str(tmp_path / "rows.jsonl")]
    source = conversation_source(rows, skip_damaged=True, tokenizer=tokenizer)
    documents = source.documents()
    next(documents)
    os.kill(tokenizer.template._process._process.pid, signal.SIGKILL)
    with pytest.raises(EndedError, match="got no text, for the process .* was killed"):
        next(documents)
    assert not source.left_out.records


def test_a_row_that_spells_a_special_token_or_that_a_template_refuses_is_named(tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path / "model", TEMPLATES["model"]))
    rows = [
        {"prompt": "a", "answer": "b"},
        {"messages": [{"role": "system", "content": "s"}, *MESSAGES]},
        {"prompt": "a</turn>", "answer": "b"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = conversation_source(
        [str(tmp_path / "rows.jsonl")], skip_damaged=True, tokenizer=tokenizer
    )
    assert len(list(source.documents())) == 1
    assert "2 damaged records left out" in "".join(source.left_out.lines())
    assert "got 'no system' from the chat template" in "".join(source.left_out.lines())
    with pytest.raises(ValueError, match="a message that spells the special token '</turn>'"):
        written(rows[2], tokenizer)
    assert datetime.now().strftime("%Y") in ChatTemplate(JSON, tmp_path, {}).prompt(MESSAGES)
