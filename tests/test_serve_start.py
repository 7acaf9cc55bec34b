"""What a server's processes import while others wait for them: modules are counted, as seconds vary."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.core.checkpoint.locate import locate
from hookline.core.testing.engine_client import bundled_checkpoint

ROOT = Path(__file__).parent.parent
MAIN = """
import json, sys
from hookline.core.serve.command import main
from hookline.core.serve.processes import server_process

def begin(*arguments, **options):
    print(json.dumps(sorted(sys.modules)))
    raise SystemExit(0)

server_process.subprocess.Popen = begin
main(["serve.processes=1", "serve.port=0"])
"""
FRONT_END = """
import asyncio, json, os, socket, sys
from hookline.core.serve.processes.front_main import _FrontEnd, run_loop

class Parent:
    def __init__(self, facts):
        self.facts, self.bound = facts, socket.create_server(("127.0.0.1", 0))
        self.task = {"serve": {}, "config": {}, "socket": self.bound.fileno(), "folder": "nowhere"}

    def follow(self, obey):
        asyncio.get_running_loop().call_soon(self.introduce, obey)  # once the front end waits

    def introduce(self, obey):
        self.before = set(sys.modules)
        obey({"engine": {"replica": 0, "address": "inproc://none", "name": "front", "facts": self.facts}})

    def tell(self, **message):
        assert message.get("ready"), message
        print(json.dumps(sorted(set(sys.modules) - self.before)), flush=True)
        os._exit(0)

run_loop(_FrontEnd(Parent(json.loads(sys.argv[1]))).serve())
"""


def modules(code: str, *arguments: str) -> set[str]:
    """The modules whose names another process prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.slow
def test_an_engine_s_process_is_begun_before_the_server_imports_what_front_ends_need() -> None:
    found = modules(MAIN)
    assert "hookline.core.serve.processes.supervisor" in found
    large = {"prometheus_client", "starlette", "tokenizers", "uvicorn"}
    assert found & large == set()


@pytest.mark.slow
def test_once_the_engine_is_ready_a_front_end_imports_nothing_of_ours_nor_for_templates() -> None:
    """It took three fifths of its processor time behind the engine's start, transformers' import above all."""
    folder = str(locate(bundled_checkpoint()))
    facts = {"root": "", "folder": folder, "max_model_len": 9, "vocab_size": 9, "created_s": 0, "model": "qwen3"}
    found = modules(FRONT_END, json.dumps(facts))
    assert {name.partition(".")[0] for name in found} <= {"uvicorn"}
