"""Without DALI: one sentence, and nothing else is touched."""

import subprocess
import sys


def test_without_dali_one_sentence_names_the_extra():
    code = """
import sys
sys.modules["nvidia"] = None
import h5feed
try:
    import h5feed.interop.dali
except ImportError as ex:
    print(ex)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        'nvidia is not installed, and this needs it: pip install "h5feed[dali]"\n'
    )
