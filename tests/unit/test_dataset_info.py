"""What a run takes from a folder that preparation made."""

import json
import shlex
from pathlib import Path

import pytest

from popxl_gpt.data.dataset_info import split_files
from popxl_gpt.data.token_files import find_files
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.utils.errors import ConfigError, DataError, UserError


def prepared(folder: Path, vocabulary: int, **facts: object) -> Path:
    """A folder with a description, a tokenizer and a file of each split, none of which is read."""
    folder.mkdir()
    splits = {}
    for split in ("train", "validation"):
        name = f"{split}-00000.tfrecord"
        (folder / name).touch()
        splits[split] = {"files": [{"name": name, "bytes": 1, "records": 1}]}
    (folder / "tokenizer.json").touch()
    info = {"vocabulary_size": vocabulary, "tokenizer": "tokenizer.json", "splits": splits, **facts}
    (folder / "dataset.json").write_text(json.dumps(info))
    return folder


def data_of(*words: object):
    """Names of the files to train on and to validate on, the tokenizer, and the vocabulary."""
    config = parse_training(["--config", "demo", *map(str, words)]).config
    train, validation = (
        [str(path.relative_to(path.parent.parent)) for path in find_files(patterns)]
        for patterns in (config.data.input_files, config.data.validation_files)
    )
    return train, validation, config.data.tokenizer, config.model.vocabulary_size


@pytest.mark.parametrize("name", ["mine", "it's [a] *", "-"])
def test_a_prepared_folder_alone_says_what_to_train_and_to_validate_on(name, tmp_path):
    folder = prepared(tmp_path / name, 321)
    assert data_of("--input_files", folder) == (
        [f"{name}/train-00000.tfrecord"],
        [f"{name}/validation-00000.tfrecord"],
        str(folder / "tokenizer.json"),
        321,
    )


def test_a_folder_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = prepared(tmp_path / "mine", 321)
    assert data_of("--input_files", "~/mine") == data_of("--input_files", folder)


def test_what_a_flag_says_is_not_taken_from_the_folder(tmp_path):
    folder, other = prepared(tmp_path / "mine", 321), prepared(tmp_path / "other", 400)
    flags = ["--vocabulary_size", 512, "--validation_files", other / "train-*.tfrecord"]
    assert data_of("--input_files", folder, *flags, "--tokenizer", other / "tokenizer.json") == (
        ["mine/train-00000.tfrecord"],
        ["other/train-00000.tfrecord"],
        str(other / "tokenizer.json"),
        512,
    )


def test_several_folders_are_validated_on_together(tmp_path):
    folders = [prepared(tmp_path / name, 321) for name in ("first", "second")]
    validation = [f"{folder.name}/validation-00000.tfrecord" for folder in folders]
    tokenizer = str(folders[0] / "tokenizer.json")
    train, *others = data_of("--input_files", *folders)
    assert train == [f"{folder.name}/train-00000.tfrecord" for folder in folders]
    assert others == [validation, tokenizer, 321]
    config = parse_training(["--mix", *(f"{folder}=0.5" for folder in folders)]).config
    assert config.data.mixed() == {str(folder): 0.5 for folder in folders}
    assert [str(p.relative_to(tmp_path)) for p in find_files(config.data.validation_files)] == (
        validation
    )
    assert (config.data.tokenizer, config.model.vocabulary_size) == (tokenizer, 321)


def test_a_model_that_is_there_keeps_its_tokenizer_and_vocabulary(tmp_path):
    """Another tokenizer's data would be trained on in silence."""
    folder = prepared(tmp_path / "mine", 321)
    assert data_of("--input_files", folder, "--init_from", tmp_path / "model")[2:] == (None, 4096)


def test_a_run_that_goes_on_has_the_vocabulary_that_it_began_with(tmp_path):
    words = "--input_files", prepared(tmp_path / "mine", 321)
    assert data_of(*words, "--checkpoint.load", "auto") == data_of(*words)


def test_what_a_configuration_file_says_is_kept_but_of_other_data(tmp_path):
    mine, other = prepared(tmp_path / "mine", 321), prepared(tmp_path / "other", 400)
    file = tmp_path / "run.yml"
    file.write_text(f"data: {{input_files: [{mine}]}}")
    config = parse_training(["--config", str(file)]).config
    assert config.data.input_files == (f"{mine}/train-*.tfrecord",)
    assert config.data.validation_files == (f"{mine}/validation-*.tfrecord",)
    assert config.model.vocabulary_size == 321
    file.write_text(
        "model: {vocabulary_size: 512}\n"
        f"data: {{tokenizer: t, validation_files: [{other}], input_files: [{mine}]}}"
    )
    config = parse_training(["--config", str(file)]).config
    assert (config.data.tokenizer, config.model.vocabulary_size) == ("t", 512)
    assert config.data.validation_files == (str(other),)
    config = parse_training(["--config", str(file), "--input_files", str(mine)]).config
    assert (config.data.tokenizer, config.model.vocabulary_size) == ("t", 512)
    assert config.data.validation_files == (f"{mine}/validation-*.tfrecord",)


def test_data_of_a_flag_take_the_place_of_those_of_a_file_however_they_are_named(tmp_path):
    mine, other = prepared(tmp_path / "mine", 321), prepared(tmp_path / "other", 321)
    file, kinds = tmp_path / "run.yml", {"mix": f"{other}=1", "input_files": f"{other}"}
    for flag, value in kinds.items():
        named = f"input_files: [{mine}]" if flag == "mix" else f"mix: [{mine}=1]"
        file.write_text(f"data: {{{named}, validation_files: [{mine}]}}")
        for given in (value, value.replace("other", "nothing")):
            config = parse_training(["--config", str(file), f"--{flag}", given]).config
            found = {"mix": config.data.mix, "input_files": config.data.input_files}
            assert given in "".join(found.pop(flag)).replace("/train-*.tfrecord", "")
            assert list(found.values()) == [()]
    with pytest.raises(ConfigError, match="mix: got some while there are input_files"):
        parse_training(["--mix", "a=1", "--input_files", "b", "--validate_every", "0"])


def test_where_documents_are_kept_apart_the_folder_says_what_ends_one(tmp_path):
    folder = prepared(tmp_path / "mine", 321, end_of_text=320)

    def end(*words: object) -> int:
        return parse_training(["--input_files", str(folder), *map(str, words)])[0].model.end_of_text

    assert end() == 0 and end("--document_attention") == 320
    assert end("--document_attention", "--end_of_text", 7) == 7
    began = ("--vocabulary_size", 400, "--init_from", tmp_path / "model")
    assert end("--document_attention", *began) == 320


@pytest.mark.parametrize("value", ["5", "x", "[5]", "{a: b}", "null"])
def test_files_of_another_form_are_refused_as_settings(value, tmp_path):
    file = tmp_path / "run.yml"
    file.write_text(f"data: {{input_files: {value}, mix: {value}}}")
    with pytest.raises(ConfigError, match="input_files: got"):
        parse_training(["--config", str(file)])


def test_data_of_conversations_bring_no_tokenizer(tmp_path):
    """Of a run that trains on: it has its own."""
    assert data_of("--input_files", prepared(tmp_path / "mine", 321, masked=True))[2] is None


def test_patterns_are_taken_as_they_are(tmp_path):
    folder = prepared(tmp_path / "mine", 321)
    files = ["mine/train-00000.tfrecord", "mine/validation-00000.tfrecord"]
    assert data_of("--input_files", folder / "*.tfrecord", "--validate_every", 0) == (
        files, [], None, 4096,
    )  # fmt: skip


def test_what_is_held_out_is_not_taken_together_with_the_rest(tmp_path):
    folder = prepared(tmp_path / "it's [a]", 321)
    (folder / "dataset.json").unlink()
    config = parse_training(["--input_files", str(folder), "--validate_every", "0"]).config
    with pytest.raises(DataError, match="has files to train on and files to validate on") as told:
        find_files(config.data.input_files)
    named = shlex.split(str(told.value).partition("Give ")[2])[0]
    assert [path.name for path in find_files(named)] == ["train-00000.tfrecord"]
    assert len(find_files(folder, of_all_splits=True)) == 2
    (folder / "validation-00000.tfrecord").unlink()
    assert len(find_files(folder)) == 1


def test_a_description_that_cannot_be_read_is_refused_by_name(tmp_path):
    folder = prepared(tmp_path / "mine", 321)
    (folder / "dataset.json").write_text("{")
    with pytest.raises(UserError, match="mine/dataset.json: got no valid description"):
        data_of("--input_files", folder)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "tokenizer\n.json"])
@pytest.mark.parametrize("what", ["tokenizer", "file"])
def test_names_that_no_file_can_have_are_refused_with_the_description(what, name, tmp_path):
    folder = prepared(tmp_path / "mine", 321)
    info = json.loads((folder / "dataset.json").read_text())
    if what == "tokenizer":
        info["tokenizer"] = name
    else:
        info["splits"]["train"]["files"][0]["name"] = name
    (folder / "dataset.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="mine/dataset.json: got no valid description"):
        data_of("--input_files", folder)


@pytest.mark.parametrize("name", ["~", "~nosuchuser"])
@pytest.mark.parametrize("flag", ["--input_files", "--mix"])
def test_a_tilde_that_does_not_begin_what_is_given_is_a_name(flag, name, tmp_path, monkeypatch):
    home = prepared(tmp_path / "home", 123)
    monkeypatch.setenv("HOME", str(home))
    prepared(tmp_path / name, 321)
    monkeypatch.chdir(tmp_path)
    config = parse_training(
        ["--config", "demo", flag, f"./{name}{'=1' * (flag == '--mix')}"]
    ).config
    data = config.data
    assert config.model.vocabulary_size == 321 and data.tokenizer == f"./{name}/tokenizer.json"
    trained = data.input_files or [split_files(Path(name), "train")]
    for patterns in (trained, data.validation_files):
        assert [path.parent for path in find_files(patterns)] == [Path(name)]
    if flag == "--input_files":
        assert find_files(f"./{name}", of_all_splits=True)[0].parent == Path(name)
