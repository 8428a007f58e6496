"""The reference page of ops is what the declarations, kernels and samples say today, and names
every op of the API.
"""

import re

import pytest
from helpers.ops_page import NAMES, PAGE, page


@pytest.mark.slow
def test_the_page_of_ops_is_up_to_date():
    assert page() == PAGE.read_text(encoding="utf-8"), "run: make docs"


def test_the_page_has_every_function_of_the_api():
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    for module in ("popxl.ops", "popxl.ops.collectives", "popxl.ops.var_updates"):
        functions = {
            name for name, signature in NAMES[module].items() if isinstance(signature, str)
        }
        assert functions <= named, f"{module}: {sorted(functions - named)}"
