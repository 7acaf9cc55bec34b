"""Hookline over Ray on two hosts and a driver's: what is lost, cut, slow or different between them, and who is told.

`python tools/drill_two_hosts.py [CASE ...]`, as root on Linux with iproute2. The hosts are namespaces of this machine
(tools/namespace_hosts.py): `a` has the head node, `b` the second one, each with three CPUs by Ray's count, and `c` a
node without CPUs, for drivers. Prints a table, and exits with 1 if something went wrong. The hosts are gone with all
that ran on them when this script is, however it ends; no other Ray on this machine is touched.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from namespace_hosts import NOWHERE, ROOT, Host, SlowWire, Switch, why_not

LIMIT_S = 5.0
"""For every caller to be told."""
GONE_S = 30.0
"""For a host that was cut off to end its ranks, and for Ray to know it as lost."""
DELAY_S = 0.02
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORT = 6379
NAMED = re.compile(r"rank \d of 2 \(pid \d+ on node 10\.213\.0\.\d\)")
OPEN_PORTS = "40000-40999"
FIREWALL = """
nft add table inet drill
nft add chain inet drill input '{ type filter hook input priority 0; policy drop; }'
nft add rule inet drill input ct state established,related accept
nft add rule inet drill input iif lo accept
nft add rule inet drill input tcp dport '{ 6379-6999, 10002-10099 }' accept
"""
"""Of a host: others reach the ports that it gave to Ray, and no further ones."""
PLUGIN = """
from hookline.core.contracts import hookimpl

API_VERSION = 2


@hookimpl
def register_samplers(register):
    pass
"""
BUNDLED = ROOT / "plugins/models/qwen3_tiny"


class Wrong(Exception):
    """What a case saw is not as it should be."""


def check(is_right: bool, told: object) -> None:
    """Raises: Wrong with `told`."""
    if not is_right:
        raise Wrong(str(told))


class Drill:
    """The three hosts, and the cases, which are the methods named `case_...`; each returns what it saw."""

    def __init__(self) -> None:
        self.shared = Path(tempfile.mkdtemp(prefix="two_hosts_", dir="/var/tmp"))
        self.switch = Switch()
        self.hosts: dict[str, Host] = {}
        self.ports = itertools.count(PORT + 1)
        self.pool = ThreadPoolExecutor()

    def start(self) -> None:
        """Start the hosts, and note what one rank answers."""
        self.renew("a")
        list(self.pool.map(self.renew, "bc"))
        self.expected: Any = self.events("c", "alone", {})["tokens"]["tokens"]

    def close(self) -> None:
        """End the hosts."""
        for host in (*self.hosts.values(), self.switch):
            host.kill()
        shutil.rmtree(self.shared, ignore_errors=True)

    def renew(self, name: str, env: Mapping[str, str] | None = None) -> Host:
        """A host as it is after it was switched on, with its node of Ray; what was there before is gone."""
        if name in self.hosts:
            self.hosts[name].kill()
        self.hosts[name] = host = Host(self.switch, name, "abc".index(name) + 1)
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if name == "a" else [f"--address={self.head}"]
        options = [f"--node-ip-address={host.address}", f"--num-cpus={0 if name == 'c' else 3}"]
        # New ports at each start: on those of a node that was cut off, Ray's head would speak to its successor over the
        # dead connection until TCP gives that up, within two minutes, and count what it tried to place there as taken.
        taken = ("node-manager", "object-manager", "runtime-env-agent")
        options += [f"--{one}-port={next(self.ports)}" for one in taken]
        options += ["--min-worker-port=10002", "--max-worker-port=10099"]
        options += ["--object-store-memory=100000000", "--disable-usage-stats"]
        # Ray runs actors at a niceness of 15, by which they start late on a machine with other work.
        calm = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
        started = host.run([*RAY, "start", *where, *options], {**calm, **(env or {})})
        if "timed out during startup" in started.stderr:  # Ray gives a node 30 s, however busy the machine is
            return self.renew(name, env)
        check(started.returncode == 0, f"ray start on {name}: {started.stdout[-500:]} {started.stderr[-500:]}")
        return host

    def again(self, name: str, env: Mapping[str, str] | None = None) -> None:
        """Renew a host of a running cluster, once Ray knows it as lost."""
        self.hosts[name].kill()
        self.events("a", "nodes", {"count": 2})
        self.renew(name, env)

    @property
    def head(self) -> str:
        """The cluster's address."""
        return f"{self.hosts['a'].address}:{PORT}"

    # ------------------------------------------------------------------------------------------------- drivers

    def drive(self, name: str, what: str, given: dict[str, Any], env: Mapping[str, str] | None = None) -> Any:
        """A driver on a host, while it runs."""
        command = [sys.executable, "tools/two_hosts_driver.py", what, json.dumps(given)]
        return self.hosts[name].start(
            command,
            {"RAY_ADDRESS": self.head, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=(self.shared / f"{what}.stderr").open("w"),
        )

    def events(
        self, name: str, what: str, given: dict[str, Any], env: Mapping[str, str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """What a driver said by its end, by event."""
        with self.drive(name, what, given, env) as driver:
            found = {one["event"]: one for one in said(driver)}
        if not found:
            raise Wrong(f"{what} said nothing: {(self.shared / f'{what}.stderr').read_text()[-500:]}")
        return found

    def refused(self, name: str, given: dict[str, Any], env: Mapping[str, str] | None = None) -> str:
        """The one line by which an engine does not start."""
        found = self.events(name, "start", given, env)
        check("failed" in found, f"the engine started: {found}")
        text: str = found["failed"]["text"]
        check("\n" not in text, f"more than one line: {text}")
        return text

    def check_reserved(self, patience_s: float = 20.0) -> None:
        """Make sure that nothing of the cluster is reserved any more."""
        found = self.events("a", "reserved", {"patience_s": patience_s})
        check("reserved" in found, found)
        check(not found["reserved"]["groups"] and not found["reserved"]["cpus"], found["reserved"])

    def ranks(self) -> dict[str, list[int]]:
        """The processes of ranks on each host."""
        return {name: found for name, host in self.hosts.items() if (found := host.processes("ray::RankActor"))}

    def lose(self, given: dict[str, Any], lose: Any, living: str, cut_off: str = "") -> str:
        """Start an engine for a driver on c, lose something in the middle of its answers, and look who is told, and
        what is left.

        lose: does it. living, cut_off: hosts on which no rank may be left, soon, or once they know that they are alone.
        """
        with self.drive("c", "serve", given) as driver:
            ready = next((one for one in said(driver) if one["event"] in ("ready", "failed")), None)
            if ready is None or ready["event"] == "failed":
                raise Wrong(f"{ready} {(self.shared / 'serve.stderr').read_text()[-500:]}")
            check(len(set(ready["places"])) == 2, f"the ranks share a node: {ready}")
            time.sleep(1.5)
            lost = time.time()
            lose()
            gone = {hosts: self.pool.submit(self.await_gone, hosts, lost) for hosts in (living, cut_off) if hosts}
            *told, closed = [one for one in said(driver) if one["event"] in ("told", "closed")]
        check(len(told) == 4, f"{len(told)} of 4 callers were told")
        latest_s, text = max(one["at"] - lost for one in told), told[0]["text"]
        check(bool(NAMED.search(text)) and "\n" not in text, f"no rank is named: {text}")
        where = [f"on {' and '.join(hosts)} after {found.result():.1f} s" for hosts, found in gone.items()]
        where += [f"the engine closed in {closed['seconds']:.1f} s"]
        seen = f"told after {latest_s:.2f} s; ranks gone {', '.join(where)}; {text.partition('. The engine')[0]}"
        check(latest_s < LIMIT_S, seen)
        return seen

    def await_gone(self, living: str, since: float) -> float:
        """Wait until there are no ranks on these hosts; returns how long that took since then."""
        while left := {name: found for name, found in self.ranks().items() if name in living}:
            check(time.time() - since < GONE_S, f"ranks are left: {left}")
            time.sleep(0.1)
        return time.time() - since

    # --------------------------------------------------------------------------------------------------- cases

    def case_tokens(self) -> str:
        """tp=2 and pp=2 across the hosts, the driver on the head or on a node of its own: the tokens of one rank."""
        seen = []
        for name, given in (("a", {"tp": 2}), ("c", {"tp": 2}), ("c", {"pp": 2})):
            found = self.events(name, "start", given)
            check("tokens" in found, found)
            check(sorted(found["ready"]["places"]) == ["10.213.0.1", "10.213.0.2"], found["ready"])
            check(found["tokens"]["tokens"] == self.expected, f"{given}: other tokens than one rank's")
            times = [f"{what} in {found[what]['seconds']:.1f} s" for what in ("ready", "closed")]
            seen.append(f"{given} from {name}: {', '.join(times)}")
        self.check_reserved()
        return "; ".join(seen)

    def case_together(self) -> str:
        """Two engines at once, both across the hosts."""
        found = self.events("c", "together", {})
        check("tokens" in found, found)
        check(sorted(found["ready"]["places"]) == ["10.213.0.1"] * 2 + ["10.213.0.2"] * 2, found["ready"])
        check(found["tokens"]["tokens"] == [self.expected] * 2, "other tokens than one rank's")
        self.check_reserved()
        return "both with the tokens of one rank"

    def case_interfaces(self) -> str:
        """GLOO_SOCKET_IFNAME names the interface that leads nowhere, as the default route does."""
        self.again("b", {"GLOO_SOCKET_IFNAME": NOWHERE})
        found = self.events("c", "start", {"tp": 2}, {"GLOO_SOCKET_IFNAME": NOWHERE})
        self.again("b")
        check("tokens" in found and found["tokens"]["tokens"] == self.expected, found)
        return "the ranks meet by the addresses that Ray was given"

    def case_slow(self) -> str:
        """Every packet takes 20 ms longer: the same tokens, and nobody is taken for dead."""
        wire = SlowWire([*self.hosts.values()], DELAY_S)
        try:
            seen = []
            for given in ({"tp": 2}, {"pp": 2}):
                found = self.events("c", "start", given)
                check("tokens" in found and found["tokens"]["tokens"] == self.expected, found)
                seen.append(f"{given}: {found['tokens']['seconds'] / 24 * 1000:.0f} ms a step")
        finally:
            wire.close()
        self.check_reserved()
        return "; ".join(seen)

    def case_firewall(self) -> str:
        """Nothing but Ray's own ports may be reached: an error. With those of a range, too, all is well."""
        for host in self.hosts.values():
            host.enter(f"sysctl -q net.ipv4.ip_local_port_range='{OPEN_PORTS.replace('-', ' ')}'")
            host.enter(FIREWALL)
        try:
            text = self.refused("c", {"tp": 2})
            check(bool(NAMED.search(text)) and "it cannot reach the engine at 10.213.0.3:" in text, text)
            self.check_reserved()
            for host in self.hosts.values():
                host.enter(f"nft add rule inet drill input tcp dport {OPEN_PORTS} accept")
            found = self.events("c", "start", {"tp": 2})
            check("tokens" in found and found["tokens"]["tokens"] == self.expected, found)
        finally:
            for host in self.hosts.values():
                host.enter("nft delete table inet drill")
        return f"{text}; with ports {OPEN_PORTS} open: ready in {found['ready']['seconds']:.1f} s"

    def case_closed_ranks(self) -> str:
        """The ranks' hosts a and b reach the driver's, but each other only on Ray's own ports."""
        for name in "ab":
            self.hosts[name].enter(FIREWALL)
        try:
            began = time.monotonic()
            text = self.refused("c", {"tp": 2})
            seconds = time.monotonic() - began
            named = re.findall(r"rank \d (?:of 2 )?\(pid \d+ on node 10\.213\.0\.(\d)\)", text)
            check(sorted(named) == ["1", "2"] and "cannot reach rank" in text, text)
            self.check_reserved()
        finally:
            for name in "ab":
                self.hosts[name].enter("nft delete table inet drill")
        return f"in {seconds:.1f} s, the start of the driver included: {text}"

    def case_cut_rank(self) -> str:
        """The plug of b is pulled while tp=2 generates for a driver on c."""
        return self._cut("b", {"tp": 2}, "a", "b")

    def case_cut_stage(self) -> str:
        """The same with pp=2."""
        return self._cut("b", {"pp": 2}, "a", "b")

    def case_cut_driver(self) -> str:
        """The plug of the driver's own host is pulled: to its ranks, it is the driver that is lost."""
        return self._cut("c", {"tp": 2}, "", "ab")

    def _cut(self, name: str, given: dict[str, Any], living: str, cut_off: str) -> str:
        seen = self.lose(given, lambda: self.switch.cut(self.hosts[name]), living, cut_off)
        self.check_reserved(60)
        self.switch.mend(self.hosts[name])
        self.again(name)
        return seen

    def case_killed_host(self) -> str:
        """Host b is gone with all of its processes, whose connections the kernel closes."""
        seen = self.lose({"tp": 2}, self.hosts["b"].kill, "a")
        self.check_reserved(60)
        self.again("b")
        return seen

    def case_dead_host(self) -> str:
        """Host b is gone like one without power: nothing says so."""

        def lose() -> None:
            self.switch.cut(self.hosts["b"])
            self.hosts["b"].kill()

        seen = self.lose({"pp": 2}, lose, "a")
        self.check_reserved(60)
        self.again("b")
        return seen

    def case_no_token(self) -> str:
        """A driver that has not the cluster's token."""
        text = self.refused("c", {"tp": 2}, {"RAY_AUTH_MODE": "disabled"})
        check("RAY_AUTH_MODE=token" in text and self.head in text, text)
        return text

    def case_no_checkpoint(self) -> str:
        """The checkpoint is on a and c alone."""
        for name in "ac":
            copied = self.hosts[name].run(["cp", "-r", str(BUNDLED), "/tmp/checkpoint"])
            check(copied.returncode == 0, copied.stderr)
        text = self.refused("c", {"tp": 2, "checkpoint": "/tmp/checkpoint"})
        check("10.213.0.2" in text and "/tmp/checkpoint" in text, text)
        self.check_reserved()
        return text

    def case_other_version(self) -> str:
        """Another version of Hookline on b."""
        self._pretend_installed("other", "hookline", "9.9.9")
        self.again("b", {"PYTHONPATH": f"{self.shared}/other:{ROOT}"})
        text = self.refused("c", {"tp": 2})
        check("10.213.0.2" in text and "hookline is 9.9.9 there" in text, text)
        self.again("b")
        self.check_reserved()
        return text

    def case_no_plugin(self) -> str:
        """A plugin that is installed for the driver alone."""
        self._pretend_installed("plugin", "hookline-extra", "1.0", "[hookline]\nextra = hookline_extra\n")
        (self.shared / "plugin/hookline_extra.py").write_text(PLUGIN)
        text = self.refused("c", {"tp": 2}, {"PYTHONPATH": f"{self.shared}/plugin:{ROOT}"})
        check("on node 10.213.0." in text and "its plugins are without plugin 'extra'" in text, text)
        self.check_reserved()
        return text

    def _pretend_installed(self, folder: str, package: str, version: str, entry_points: str = "") -> None:
        """A folder for PYTHONPATH by which a package is installed in a version, as far as its metadata says."""
        info = self.shared / folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)

    def case_data(self) -> str:
        """Ray Data with an engine on each host."""
        found = self.events("c", "data", {"rows": 80})
        check("rows" in found, found)
        rows = found["rows"]
        check(rows["ids"] == [*range(80)] and rows["equal"] == 80 and not rows["errors"], rows)
        check(len(rows["hosts"]) == 2, rows)
        return f"each of 80 rows once, with the text of one rank; answered by {rows['hosts']}"

    def case_batch(self) -> str:
        """A folder on a file system that all see, answered by an engine on each host."""
        folder = self._questions(self.shared / "batch")
        done = self._batch(folder / "in", folder / "out")
        check(done.returncode == 0, done.stderr[-800:])
        answers = [json.loads(line) for line in (folder / "out/a.jsonl").read_text().splitlines()]
        check([one["custom_id"] for one in answers] == [str(number) for number in range(40)], answers)
        self.check_reserved()
        return "40 rows answered, in their order"

    def case_batch_input(self) -> str:
        """The questions are on c alone."""
        check(
            self.hosts["c"].run(["cp", "-r", str(self._questions(self.shared / "own")), "/tmp/own"]).returncode == 0,
            "cp",
        )
        return self._refused_batch(Path("/tmp/own/in"), self.shared / "own/out")

    def case_batch_output(self) -> str:
        """The folder of the answers is on c alone."""
        return self._refused_batch(self._questions(self.shared / "far") / "in", Path("/tmp/far"))

    def _questions(self, folder: Path) -> Path:
        body = {"prompt": "def f(", "max_tokens": 16, "ignore_eos": True}
        line = {"method": "POST", "url": "/v1/completions", "body": body}
        (folder / "in").mkdir(parents=True)
        lines = [json.dumps({"custom_id": str(number), **line}) for number in range(40)]
        (folder / "in/a.jsonl").write_text("\n".join(lines))
        return folder

    def _batch(self, input: Path, output: Path) -> Any:
        keys = "batch.executor=ray batch.replicas=2 batch.num_cpus=2 batch.part_rows=5 device=cpu engine.num_blocks=400"
        command = [sys.executable, "-m", "hookline", "batch", str(input), str(output), *keys.split()]
        return self.hosts["c"].run(command, {"RAY_ADDRESS": self.head})

    def _refused_batch(self, input: Path, output: Path) -> str:
        done = self._batch(input, output)
        told: str = next((line for line in done.stderr.splitlines() if line.startswith("hookline: error")), "")
        check(done.returncode != 0 and "10.213.0." in told and "/tmp/" in told, done.stderr[-1500:])
        self.check_reserved()
        return told

    def case_sweep(self) -> str:
        """A sweep of two jobs at once, one on each host."""
        keys = "workload.num_prompts=2 workload.output_len=[1,2] repeats=1 device=cpu scheduler=prefill_first,chunked"
        ray = [f"hydra.launcher.ray.init.address={self.head}", "+hydra.launcher.ray.remote.num_cpus=2"]
        command = [sys.executable, "-m", "core.bench", "-m", "hydra/launcher=ray", *ray, *keys.split()]
        done = self.hosts["c"].run([*command, f"hydra.sweep.dir={self.shared}/sweep"], timeout_s=240)
        check(done.returncode == 0, done.stderr[-1500:])
        check(done.stdout.count(" done ") == 2, done.stdout)
        self.check_reserved()
        return "both done"

    def case_serve(self) -> str:
        """Ray Serve with a replica on each host, of which one is cut off: what clients of the other one's proxy see."""
        config = {
            "proxy_location": "EveryNode",
            "http_options": {"host": "0.0.0.0", "port": 8000},
            "applications": [{"name": "hookline", "import_path": "hookline.serve.ray:app", "route_prefix": "/"}],
        }
        engine = {"num_blocks": 400, "max_num_seqs": 8}
        args = {"device": "cpu", "engine": engine, "ray": {"min_replicas": 2, "num_cpus": 2, "sticky": False}}
        config["applications"][0]["args"] = args  # type: ignore[index]
        (self.shared / "serve.json").write_text(json.dumps(config))
        options = [f"--address={self.head}", f"{self.shared}/serve.json"]
        log = (self.shared / "serve.log").open("w")
        self.hosts["a"].start([sys.executable, "-m", "ray.serve.scripts", "run", *options], stdout=log, stderr=log)
        urls = [f"http://10.213.0.{number}:8000" for number in (1, 2)]
        whole = self.events("c", "ask", {"urls": urls, "seconds": 5})
        if "asked" not in whole:
            raise Wrong(f"{whole} {(self.shared / 'serve.log').read_text()[-800:]}")
        check(len(whole["asked"]["answers"]) == 2 and not whole["asked"]["faults"], whole)
        with self.drive("c", "ask", {"urls": urls[:1], "seconds": 60}) as driver:
            next(one for one in said(driver) if one["event"] == "ready")
            time.sleep(10)
            self.switch.cut(self.hosts["b"])
            lost = {one["event"]: one for one in said(driver)}
        check("asked" in lost, lost)
        self.events("a", "stop_serving", {})
        self.again("b")
        seen = [{key: one["asked"][key] for key in ("answers", "faults", "slowest_s")} for one in (whole, lost)]
        return f"both hosts: {seen[0]}; a's proxy, with b cut off after 10 of 60 s: {seen[1]}"


def said(driver: Any) -> Iterator[dict[str, Any]]:
    """What a driver says until it ends; Ray prints beside it."""
    for line in iter(driver.stdout.readline, ""):
        if line.startswith('{"at"'):
            yield json.loads(line)


def main() -> None:
    """Drill as the command line says; exit code 1 if something went wrong."""
    cases = [name.removeprefix("case_") for name in vars(Drill) if name.startswith("case_")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("case", nargs="*", choices=[[], *cases], help=f"of {', '.join(cases)}; else all")
    chosen = parser.parse_args().case or cases
    if (why := why_not()) is not None:
        sys.exit(f"tools/drill_two_hosts.py {why}")
    # Without these, Ray from 2.60 on may ask for a token on the head alone: see docs/cluster_failures.md.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SystemExit would wait for the drivers to end
    drill, wrong = Drill(), 0
    try:
        drill.start()
        for name in chosen:
            began = time.monotonic()
            try:
                verdict, seen = "ok", getattr(drill, f"case_{name}")()
            except (Wrong, LookupError, ValueError, OSError, subprocess.SubprocessError) as fault:
                wrong, verdict, seen = wrong + 1, "WRONG", f"{type(fault).__name__}: {fault}"
            print(f"{name:14} {verdict:5} {time.monotonic() - began:5.1f} s  {seen}", flush=True)
            if verdict != "ok" and name != chosen[-1]:
                drill.start()  # hosts may be cut, gone or busy
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        with suppress(KeyboardInterrupt):
            drill.close()
    print(f"{len(chosen) - wrong} of {len(chosen)} cases went well")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
