"""Hosts that are namespaces of this machine, joined by a switch: for drills of what otherwise needs several machines.

A host has its own processes, name, addresses, loopback, /tmp and /dev/shm; all other files are shared, as on a network
file system. There is no name server, its name means a loopback address, as Debian has it, and its first interface,
which has the default route, leads nowhere: who looks for "the" address of such a host finds one that no other host
reaches. The second interface is on the switch. A host ends with all of its processes when this process does, however
that ends. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOWHERE, LINK, SLOW = "eth0", "eth1", "slow0"
"""Interfaces of a host: the one that leads nowhere, that on the switch, and that of a SlowWire."""
BOOT = """
set -e
mount -t proc proc /proc
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
hostname "$1"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$1" > /tmp/.hosts
mount --bind /tmp/.hosts /etc/hosts
: > /tmp/.resolv.conf
mount --bind /tmp/.resolv.conf /etc/resolv.conf
trap '' CHLD
echo up
exec cat
"""
"""The first process of a host, with whose end the kernel ends all others. It ends when its standard input does."""


def why_not() -> str | None:
    """Why there can be no hosts here, in one line."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for network namespaces"
    missing = [one for one in ("ip", "nsenter", "unshare") if shutil.which(one) is None]
    if missing:
        return f"needs {' and '.join(missing)}, of the packages iproute2 and util-linux"
    hidden = [str(one) for one in (ROOT, Path(sys.prefix)) if one.is_relative_to("/tmp")]
    if hidden:
        return f"needs {' and '.join(hidden)} elsewhere: each host has a /tmp of its own"
    return None


class Namespace:
    """A process with a network of its own, from whose end on nothing of it is left."""

    def __init__(self, command: Sequence[str], *options: str) -> None:
        unshare = ["unshare", "--net", "--fork", "--kill-child", *options, *command]
        self._unshare = subprocess.Popen(unshare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "up\n":
            raise OSError("no namespaces can be made here; is this a container without CAP_SYS_ADMIN?")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self.pid = int(children.read_text())

    def ip(self, *arguments: str) -> None:
        """Run iproute2's ip with this network. Raises: CalledProcessError."""
        subprocess.run(self.inside("ip", *arguments), check=True)

    def inside(self, *command: str) -> list[str]:
        """A command with this network, and nothing else of it."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command]

    def kill(self) -> None:
        """End all of it at once, by SIGKILL; a second call does nothing."""
        self._unshare.kill()
        self._unshare.wait()


class Switch(Namespace):
    """What hosts are joined by: a bridge."""

    def __init__(self) -> None:
        super().__init__(["sh", "-c", "echo up; exec cat"])
        self.ip("link", "add", "bridge", "type", "bridge")
        self.ip("link", "set", "dev", "bridge", "up")

    def plug(self, host: Host) -> None:
        """Give a host its two interfaces, and connect the second one."""
        ports = {NOWHERE: f"void-{host.name}", LINK: host.name}
        for interface, port in ports.items():
            # What a host of this name had before may be there for a moment more: the kernel clears networks up later.
            subprocess.run(self.inside("ip", "link", "delete", "dev", port), stderr=subprocess.DEVNULL, check=False)
            ends = ("netns", str(host.pid), "type", "veth", "peer", "name", port, "netns", str(self.pid))
            # The same hardware address each time, since the others remember it when a host comes again.
            mac = f"02:00:00:00:{list(ports).index(interface):02}:{host.number:02}"
            subprocess.run(["ip", "link", "add", interface, "address", mac, *ends], check=True)
            self.ip("link", "set", "dev", port, "up")
        self.ip("link", "set", "dev", host.name, "master", "bridge")

    def cut(self, host: Host) -> None:
        """Pull a host's plug: nothing reaches it and nothing comes, and no connection is closed."""
        self.ip("link", "set", "dev", host.name, "down")

    def mend(self, host: Host) -> None:
        """Put it in again."""
        self.ip("link", "set", "dev", host.name, "up")


class Host(Namespace):
    """See the module. name: a letter or a word. number: the end of its address."""

    def __init__(self, switch: Switch, name: str, number: int) -> None:
        options = ("--mount", "--uts", "--ipc", "--pid")
        super().__init__(["sh", "-c", BOOT, "sh", name], *options)
        self.name, self.number, self.address = name, number, f"10.213.0.{number}"
        switch.plug(self)
        self.ip("link", "set", "lo", "up")
        for interface, address in ((NOWHERE, f"192.168.213.{number}/24"), (LINK, f"{self.address}/24")):
            self.ip("address", "add", address, "dev", interface)
            self.ip("link", "set", "dev", interface, "up")
        self.ip("route", "add", "default", "via", "192.168.213.254")

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """A process there, in this repository's folder, as subprocess.Popen gives it. env: beside this process's."""
        entered = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        return subprocess.Popen([*entered, "env", "-C", str(ROOT), *command], env=environ, text=True, **options)

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> Any:
        """The same to its end. Returns it with `stdout` and `stderr`."""
        with self.start(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                out, error = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, error)

    def enter(self, command: str) -> None:
        """Run a line of shell with this host's network, and nothing else of it. Raises: CalledProcessError."""
        subprocess.run(self.inside("sh", "-c", command), check=True)

    def processes(self, name: str) -> list[int]:
        """Ids, as this machine has them, of this host's processes whose command line begins so."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_here = os.readlink(folder / "ns/pid") == os.readlink(f"/proc/{self.pid}/ns/pid")
                if is_here and (folder / "cmdline").read_bytes().startswith(name.encode()):
                    found.append(int(folder.name))
        return found


class SlowWire:
    """In place of the switch: each packet between these hosts takes `delay_s` longer. In a thread, until `close`."""

    def __init__(self, hosts: Sequence[Host], delay_s: float) -> None:
        self._delay_s, self._files = delay_s, dict[str, int]()
        opening = threading.Thread(target=self._open, args=(hosts,))
        opening.start()
        opening.join()
        for host in hosts:
            host.ip("link", "set", "dev", SLOW, "up")
            for other in hosts:
                if other is not host:
                    host.ip("route", "add", f"{other.address}/32", "dev", SLOW, "src", host.address)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _open(self, hosts: Sequence[Host]) -> None:
        """Make an interface in each host, whose packets we get. In a thread that enters their networks and ends."""
        libc = ctypes.CDLL(None, use_errno=True)
        set_interface, is_tun, is_plain = 0x400454CA, 0x0001, 0x1000
        for host in hosts:
            with open(f"/proc/{host.pid}/ns/net") as network:
                if libc.setns(network.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(file, set_interface, struct.pack("16sH22x", SLOW.encode(), is_tun | is_plain))
            self._files[host.address] = file

    def _carry(self) -> None:
        under_way: list[tuple[float, int, str, bytes]] = []
        number = 0
        while not self._is_over.is_set():
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            for file in select.select(list(self._files.values()), [], [], min(wait_s, 0.1))[0]:
                with suppress(BlockingIOError):
                    while packet := os.read(file, 1 << 16):
                        number += 1
                        to = ".".join(map(str, packet[16:20]))
                        if packet[0] >> 4 == 4 and to in self._files:
                            heapq.heappush(under_way, (time.monotonic() + self._delay_s, number, to, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                *_, to, packet = heapq.heappop(under_way)
                with suppress(OSError):
                    os.write(self._files[to], packet)

    def close(self) -> None:
        """Have packets go over the switch again."""
        self._is_over.set()
        self._thread.join()
        for file in self._files.values():
            os.close(file)
