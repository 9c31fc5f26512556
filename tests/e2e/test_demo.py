"""The demo model answers its held-out questions through the HTTP API."""

import subprocess
import sys

from conftest import ROOT


def test_held_out_questions(start):
    bundle = start(None, {"attention.workers": 2, "ffn.workers": 1},
                   config=ROOT / "config" / "demo.json")
    done = subprocess.run(
        [sys.executable, ROOT / "config" / "demo_train" / "evaluate.py", "--min", "90",
         "--base-url", bundle.url + "/v1"], capture_output=True, text=True, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
