"""The tokenizers' library is imported in a thread while an engine starts."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
from hookline.core.checkpoint.checkpoint import import_tokenizers_aside
import_tokenizers_aside()
for one in threading.enumerate():
    if one.daemon:
        one.join()
print("PreTrainedTokenizerFast" in vars(sys.modules["transformers"]))
"""


@pytest.mark.slow
def test_a_thread_imports_what_tokenizers_are_loaded_with():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
