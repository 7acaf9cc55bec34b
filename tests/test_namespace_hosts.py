"""tools/namespace_hosts.py says in one line why it can make no hosts; tools/drill_two_hosts.py makes them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_pages import ROOT
from tools import namespace_hosts
from tools.namespace_hosts import why_not


@pytest.fixture
def rooted(monkeypatch):
    """As root, with all commands there, and this repository where hosts see it."""
    monkeypatch.setattr(namespace_hosts.sys, "platform", "linux")
    monkeypatch.setattr(namespace_hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespace_hosts.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(namespace_hosts, "ROOT", Path("/repository"))
    monkeypatch.setattr(namespace_hosts.sys, "prefix", "/python")
    return monkeypatch


def test_root_with_iproute2_can_have_hosts(rooted):
    assert why_not() is None


def test_what_is_missing_is_one_line(rooted):
    rooted.setattr(namespace_hosts, "ROOT", Path("/tmp/clone"))
    assert why_not() == "needs /tmp/clone elsewhere: each host has a /tmp of its own"
    rooted.setattr(namespace_hosts.shutil, "which", lambda name: None if name == "ip" else name)
    assert why_not() == "needs ip, of the packages iproute2 and util-linux"
    rooted.setattr(namespace_hosts.os, "geteuid", lambda: 1000)
    assert why_not() == "needs root on Linux, for network namespaces"


def test_the_drill_says_so_and_starts_nothing():
    blind = {"PATH": "/nowhere"}
    command = [sys.executable, "tools/drill_two_hosts.py"]
    done = subprocess.run(command, cwd=ROOT, env=blind, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("tools/drill_two_hosts.py needs ")
    assert done.stderr.count("\n") == 1 and not done.stdout
