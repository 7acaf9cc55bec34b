"""docs/models.md says what is registered."""

import pytest

from tools.model_table import PAGE, page


@pytest.mark.slow
def test_the_table_of_models_is_what_the_tool_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "models or presets have changed: python tools/model_table.py"
