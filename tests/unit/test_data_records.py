"""TFRecord framing and the wire format of examples, against the `tfrecord` package in both
directions.
"""

import errno
import os
import struct

import crc32c
import numpy as np
import pytest
import tfrecord
from hypothesis import given, settings
from hypothesis import strategies as st
from tfrecord import example_pb2
from tfrecord.tools.tfrecord2idx import create_index

from popxl_gpt.data import example
from popxl_gpt.data.records import BLOCK, RecordFile, RecordWriter, index_path, masked_crc
from popxl_gpt.utils.errors import DataError, failure_number

IDS = st.integers(0, example.MAXIMUM_ID)


def serialised(**features) -> memoryview:
    return memoryview(tfrecord.TFRecordWriter.serialize_tf_example(features))


def write_ours(path, rows) -> None:
    with RecordWriter(path) as writer:
        for payload in example.encode(np.array(rows)):
            writer.write(payload)


def write_theirs(path, rows) -> None:
    writer = tfrecord.TFRecordWriter(str(path))
    for row in rows:
        writer.write({"input_ids": (row, "int")})
    writer.close()


@settings(deadline=None)
@given(st.lists(st.lists(IDS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_encoded_examples_are_what_protobuf_reads(rows):
    for row, payload in zip(rows, example.encode(np.array(rows))):
        message = example_pb2.Example.FromString(payload)
        assert list(message.features.feature) == ["input_ids"]
        assert list(message.features.feature["input_ids"].int64_list.value) == row


@settings(deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.dictionaries(st.text(max_size=4), IDS, max_size=3),
)
def test_decode_reads_what_protobuf_writes_among_other_features(ids, others):
    features = {name: (value, "int") for name, value in others.items()}
    features |= {"weight": ([0.5], "float"), "text": ([b"a"], "byte"), "input_ids": (ids, "int")}
    payload = serialised(**features)
    assert example.decode(payload, "here")[0].tolist() == ids


def test_decode_reads_values_that_are_not_packed():
    values = b"".join(b"\x08" + bytes([value]) for value in (5, 6, 7))
    feature = b"\x1a" + bytes([len(values)]) + values
    entry = b"\x0a\x09input_ids\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    payload = b"\x0a" + bytes([len(features)]) + features
    assert list(
        example_pb2.Example.FromString(payload).features.feature["input_ids"].int64_list.value
    ) == [5, 6, 7]
    assert example.decode(memoryview(payload), "here")[0].tolist() == [5, 6, 7]


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_decode_refuses_or_reads_any_bytes_but_never_fails_otherwise(content):
    try:
        example.decode(memoryview(content), "here")
    except DataError as error:
        assert str(error).startswith("here: got")


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"tokens": ([1], "int")}, "no feature 'input_ids' (features found: 'tokens')"),
        ({}, "no feature 'input_ids' (features found: none)"),
        ({"input_ids": ([1.0], "float")}, "feature 'input_ids' of type float"),
        ({"input_ids": ([b"1"], "byte")}, "feature 'input_ids' of type bytes"),
    ],
)
def test_decode_names_what_it_found_instead_of_ids(features, words):
    with pytest.raises(DataError) as caught:
        example.decode(serialised(**features), "a.tfrecord, record 3")
    assert str(caught.value).startswith("a.tfrecord, record 3: got")
    assert words in str(caught.value)


def test_masked_crc_is_the_published_formula():
    crc = crc32c.crc32c(b"123456789")
    # The check value of CRC-32C in RFC 3720, appendix B.4, for these digits.
    assert crc == 0xE3069283
    assert masked_crc(b"123456789") == (((crc >> 15) | ((crc << 17) % 2**32)) + 0xA282EAD8) % 2**32


def test_the_tfrecord_package_reads_our_files_with_our_index(tmp_path):
    rows = np.arange(60).reshape(12, 5) * 1000
    path = tmp_path / "ours.tfrecord"
    write_ours(path, rows)
    records = tfrecord.tfrecord_loader(
        str(path), str(index_path(path)), {"input_ids": "int"}, shard=(0, 1)
    )
    assert np.array_equal([record["input_ids"] for record in records], rows)
    create_index(str(path), str(tmp_path / "theirs.tfindex"))
    assert index_path(path).read_text() == (tmp_path / "theirs.tfindex").read_text()


@pytest.mark.parametrize("index", ["none", "theirs"])
def test_we_read_files_of_the_tfrecord_package(tmp_path, index):
    rows = (np.arange(60).reshape(12, 5) * 1000).tolist()
    path = tmp_path / "theirs.tfrecord"
    write_theirs(path, rows)
    if index == "theirs":
        create_index(str(path), str(index_path(path)))
    file = RecordFile(path)
    opened = file.open()
    assert file.has_index == (index == "theirs")
    assert [
        example.decode(file.payload(opened, record), "")[0].tolist() for record in range(len(file))
    ] == rows


@pytest.mark.parametrize(
    "content", ["", "junk", "0", "0 x\n", "0 20\n20 99999999999999999999999\n", "5 20\n"]
)
def test_an_index_that_does_not_fit_is_refused_and_without_it_made_again(tmp_path, content):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[1, 2], [3, 4]])
    right = index_path(path).read_text()
    index_path(path).write_text(content)
    with pytest.raises(
        DataError, match="a.tfindex: got an index .*expected 2 records.*delete the index"
    ):
        RecordFile(path)
    index_path(path).unlink()
    file = RecordFile(path)
    assert (len(file), file.has_index) == (2, False)
    file.save_index()
    assert index_path(path).read_text() == right
    assert RecordFile(path).has_index


@pytest.mark.parametrize("records", [None, 2], ids=["alone", "described"])
def test_an_index_larger_than_its_file_can_have_is_not_read(tmp_path, records):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[1, 2], [3, 4]])
    with open(index_path(path), "r+b") as index:
        index.truncate(2**42)  # more than any memory, and nothing of the disk
    with pytest.raises(DataError, match="a.tfindex: got an index of more than .*delete the index"):
        RecordFile(path, records).check()


def test_an_index_may_be_as_large_as_its_records_ask_for(tmp_path):
    path = tmp_path / "a.tfrecord"
    with RecordWriter(path) as writer:
        for _ in range(1000):
            writer.write(b"")  # the smallest records there are
    index_path(path).write_bytes(index_path(path).read_bytes().replace(b"\n", b"\r\n"))
    assert RecordFile(path).has_index and len(RecordFile(path)) == 1000


def test_an_index_that_a_disk_does_not_give_is_told_as_such(tmp_path, monkeypatch):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[1, 2], [3, 4]])

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("popxl_gpt.data.records.read_bounded", failing)
    with pytest.raises(DataError, match="a.tfindex: got 'Input/output error' while") as told:
        RecordFile(path)
    assert failure_number(told.value) == errno.EIO


def test_an_open_file_that_a_network_does_not_tell_of_is_told_as_such(tmp_path, monkeypatch):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[1, 2], [3, 4]])
    found = RecordFile(path)
    file = found.open()

    def stale(number):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match="a.tfrecord: got 'Stale file handle' while") as told,
    ):
        patch.setattr("popxl_gpt.data.records.os.fstat", stale)
        found.payload(file, 0)
    assert failure_number(told.value) == errno.ESTALE


def test_a_file_cut_off_between_records_is_found_by_its_index(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[1, 2], [3, 4]])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(
        DataError, match="expected 1 records in .* bytes. Restore a.tfrecord if records are missing"
    ):
        RecordFile(path)


def test_an_index_that_cannot_be_written_is_done_without(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_theirs(path, [[1, 2]])
    file = RecordFile(path)
    index_path(path).mkdir()  # Stands for a folder that takes no file: tests may run as root.
    file.save_index()
    assert len(file) == 1
    assert sorted(found.name for found in tmp_path.iterdir()) == ["a.tfindex", "a.tfrecord"]


@pytest.mark.parametrize("with_index", [True, False])
def test_a_flipped_bit_in_any_byte_is_found(tmp_path, with_index):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[7, 300, 5], [1, 2, 300]])
    if not with_index:
        index_path(path).unlink()
    content = path.read_bytes()
    for byte in range(len(content)):
        damaged = bytearray(content)
        damaged[byte] ^= 1 << byte % 8
        path.write_bytes(damaged)
        record = int(byte >= len(content) // 2)
        with pytest.raises(DataError, match=rf"a.tfrecord, record {record}: got"):
            raise next(RecordFile(path).damaged())


def test_each_damaged_record_of_a_file_is_found(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[number] for number in range(3 * BLOCK)])
    content, damaged = bytearray(path.read_bytes()), [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 7]
    for record in damaged:
        content[RecordFile(path).offsets[record + 1] - 1] ^= 1
    path.write_bytes(content)
    found = [str(error) for error in RecordFile(path).damaged()]
    assert [f"{path}, record {record}" for record in damaged] == [
        text.partition(":")[0] for text in found
    ]


@pytest.mark.parametrize("with_index", [True, False])
def test_a_file_cut_off_anywhere_but_between_records_is_refused(tmp_path, with_index):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[7, 300, 5], [1, 2, 3]])
    content = path.read_bytes()
    starts = set(RecordFile(path).offsets.tolist())
    if not with_index:
        index_path(path).unlink()
    for size in set(range(1, len(content))) - starts:
        path.write_bytes(content[:size])
        with pytest.raises(
            DataError, match=r"a.tfrecord, record [01]: got \d+ bytes before the file ends"
        ):
            RecordFile(path)


def test_an_index_with_other_boundaries_is_named(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[7, 8], [1, 2]])
    size = path.stat().st_size
    index_path(path).write_text(f"0 {size}\n")
    with pytest.raises(
        DataError, match=r"a.tfrecord, record 0: got a record of .*delete the .tfindex file"
    ):
        list(RecordFile(path).damaged())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_bytes(b""), "an empty file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (
            lambda path: path.write_text("no TFRecord at all, but some text"),
            "record 0: got a length with checksum",
        ),
        (
            lambda path: path.write_bytes(struct.pack("<Q", 4)),
            "record 0: got 8 bytes before the file ends",
        ),
    ],
)
def test_files_that_are_no_records_are_refused(tmp_path, make, words):
    path = tmp_path / "a.tfrecord"
    make(path)
    with pytest.raises(DataError, match=words) as caught:
        RecordFile(path)
    assert str(path) in str(caught.value)


def test_a_file_that_changes_after_opening_is_an_error(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_ours(path, [[1, 2], [3, 4]])
    file = RecordFile(path)
    write_ours(path, [[1, 2]])
    with pytest.raises(DataError, match="changed the file"):
        file.open()
