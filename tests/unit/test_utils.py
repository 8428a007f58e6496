"""Helpers of `utils`."""

import logging
from types import SimpleNamespace

import popxl
import pytest

from imgs.write_tables import KEYWORDS, PAGES, SETTINGS, keywords, with_generated_parts
from popxl_gpt.utils import runtime
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.log import set_up_logging
from popxl_gpt.utils.units import bytes_text, duration, si


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (0, "", "0.00"),
        (124_439_808, "", "124 M"),
        (2.65e12, "FLOP/s", "2.65 TFLOP/s"),
        (999.6, "B", "1.00 kB"),
        (100, "", "100"),
        (12.345, "s", "12.3 s"),
        (-1500, "", "-1.50 k"),
    ],
)
def test_si_has_three_figures_and_a_prefix(value, unit, text):
    assert si(value, unit) == text


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**30, "3.00 GiB")]
)
def test_bytes_have_binary_prefixes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.5, "0.50 s"),
        (0, "0.00 s"),
        (0.0123, "12.3 ms"),
        (2e-5, "20.0 µs"),
        (43, "43 s"),
        (59.6, "1 min 0 s"),
        (320, "5 min 20 s"),
        (11100, "3 h 5 min"),
        (187200, "2 d 4 h"),
    ],
)
def test_durations_show_their_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_precision_names_a_data_type():
    assert runtime.data_type("float32") == popxl.float32
    assert runtime.data_type("float16") == popxl.float16
    assert runtime.data_type("bfloat16").name == "bfloat16"


def test_sessions_on_processors_are_expected(monkeypatch):
    expected = []
    extensions = SimpleNamespace(expect_session=lambda bfloat16: expected.append(bfloat16))
    monkeypatch.setattr(runtime, "extensions", extensions)
    runtime.expect_session("cuda:1", "float32")
    assert not expected
    runtime.expect_session("auto", "float32")
    runtime.expect_session("cpu", "bfloat16")
    assert expected == [False, True]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_of_pages_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert with_generated_parts(text, page) == text, "run: make docs"


def test_the_types_of_settings_by_keyword_are_up_to_date():
    assert keywords() == KEYWORDS.read_text(encoding="utf-8"), "run: make docs"


def test_a_lost_mark_in_a_page_is_named():
    with pytest.raises(UserError, match="settings.md: got generated parts .* Restore the marks"):
        with_generated_parts("no parts here", SETTINGS)


def test_a_setting_is_one_line_of_its_table():
    for line in PAGES[SETTINGS]["settings"]().splitlines():
        assert not line.startswith("|") or line.endswith("|"), line


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    yield root
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.mark.parametrize(
    "name, is_leader, level",
    [
        ("debug", True, "DEBUG"),
        ("info", False, "WARNING"),
        ("ERROR", False, "ERROR"),
        (None, True, "INFO"),
    ],
)
def test_the_environment_sets_the_log_level_and_followers_are_quiet(
    monkeypatch, root_logger, name, is_leader, level
):
    if name is None:
        monkeypatch.delenv("MODEL_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("MODEL_LOG_LEVEL", name)
    set_up_logging(is_leader)
    assert logging.getLevelName(root_logger.level) == level
    assert all(logging.getLogger(name).level == logging.WARNING for name in ("torch", "matplotlib"))


def test_an_unknown_log_level_is_refused(monkeypatch):
    monkeypatch.setenv("MODEL_LOG_LEVEL", "loud")
    with pytest.raises(UserError, match="MODEL_LOG_LEVEL: got 'LOUD'; expected one of TRACE"):
        set_up_logging()
