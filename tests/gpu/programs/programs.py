#!/usr/bin/env python3
"""Programs that nobody wrote for pushgate, each over the NCCL plugin and over NCCL's own transports.

  programs.py [--plugin FILE] [--gpus N] [--only NAME,...] [--over NAME,...] [--packages DIR] [--jobs N]

Needs a host with GPUs, and what each program needs (programs.toml); a program whose modules are missing is named as
skipped. Every rank is a process. A program passes if it ends in its time over each transport, and its numbers agree with
those over NCCL's own transports. One that does not end is stopped, with what `pushgate inspect --all` says of it. Exit
status 0: all that ran passed.
"""

import argparse
import concurrent.futures
import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib

HERE = os.path.dirname(os.path.abspath(__file__))
# NCCL's own transports, in the order in which they serve to compare with.
OWN = ["shm", "socket"]
# Seconds that a program has to end once it was asked to, before it is killed.
GRACE = 5
KEYS = {"file", "program", "needs", "env", "over", "ranks", "least", "multiple", "bound", "limit", "launcher", "dying", "long", "says"}


class Failed(Exception):
    pass


def transport(name, rank, options):
    """The environment of one rank over a transport."""
    apart = {"NCCL_HOSTID": f"host{rank // options.per_host}"}
    # Without the last one NCCL 2.28.9 forgets the plugin's name when a program has destroyed all of its communicators.
    plugin = {"NCCL_NET_PLUGIN": options.plugin, "NCCL_NET": "pushgate", "NCCL_NET_PLUGIN_REF_COUNT": "1", **apart}
    none = {"NCCL_NET_PLUGIN": "none"}
    socket4 = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    return {
        "local": plugin,
        "tcp": {**plugin, "PUSHGATE_QP": "tcp"},
        "shm": {**none, "NCCL_P2P_DISABLE": "1"},
        "socket": {**none, **socket4, **apart},
        "none": {},
    }[name]


def read_text(path):
    with open(path, errors="replace") as file:
        return file.read()


def tail(path, lines=8):
    text = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    return " | ".join(text[-lines:])[-1500:]


def free_port(taken=itertools.count(20000 + os.getpid() % 10000)):
    """A port below those that the kernel gives to connecting sockets: a rank listens there only seconds later."""
    for port in taken:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


class Runner:
    def __init__(self, options):
        self.options = options
        self.alive = {}
        self.ended = False
        self.lock = threading.Lock()

    def start(self, command, env, log):
        with self.lock:
            # Once all are ended, another job's thread must begin nothing.
            if self.ended:
                raise Failed("the runner ends")
            with open(log, "w") as file:
                process = subprocess.Popen(command, env=env, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
            self.alive[process.pid] = process
        return process

    def end(self, processes):
        """Ends processes and their children: first asked, then killed. Each is the leader of a session of its own."""
        for sign, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
            until = time.time() + patience
            for p in processes:
                try:
                    os.killpg(p.pid, sign)
                except ProcessLookupError:
                    pass
            for p in processes:
                try:
                    p.wait(max(until - time.time(), 0.01))
                except subprocess.TimeoutExpired:
                    pass
        with self.lock:
            for p in processes:
                self.alive.pop(p.pid, None)

    def end_all(self):
        with self.lock:
            self.ended = True
            processes = list(self.alive.values())
        self.end(processes)

    def inspect(self):
        """What the engines of this host wait for."""
        try:
            said = subprocess.run([self.options.pushgate, "inspect", "--all"], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"pushgate inspect --all: {e}"
        return "pushgate inspect --all:\n" + (said.stdout + said.stderr)[-8000:]

    def run(self, name, program, over, world):
        """One program over one transport: the results of its ranks. Raises Failed."""
        folder = tempfile.mkdtemp(prefix=f"{name}-{over}-", dir=self.options.out)
        port, environments, processes = free_port(), [], []
        dying = [rank % world for rank in program.get("dying", [])]
        command = [sys.executable, os.path.join(self.options.folder, program["file"]), program.get("program", name)]
        launcher = program.get("launcher")
        if launcher == "torchrun":
            command[1:1] = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=2"]
        if launcher == "mpirun":
            # All ranks are of this host, and share its cores.
            command[:0] = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(world)]
        for rank in range(1 if launcher else world):
            env = {**os.environ, **transport(over, rank, self.options), **program.get("env", {})}
            env.update(RESULTS=folder, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{folder}/nccl-%p.log", PYTHONUNBUFFERED="1", NCCL_NVLS_ENABLE="0", OMP_NUM_THREADS="2")
            if self.options.packages:
                env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), self.options.packages]))
            if launcher:
                # Its ranks name their hosts themselves: they share an environment.
                env.pop("NCCL_HOSTID", None)
                env["PER_HOST"] = str(self.options.per_host if over != "shm" else 0)
            else:
                env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            environments.append(env)
        until = time.time() + program.get("limit", 120)
        try:
            for rank, env in enumerate(environments):
                processes.append(self.start(command, env, f"{folder}/{rank}.log"))
            while any(p.poll() is None for p in processes):
                broken = [r for r, p in enumerate(processes) if p.poll() and r not in dying]
                if broken:
                    # The others may only now say what they miss.
                    for p in processes:
                        try:
                            p.wait(GRACE)
                        except subprocess.TimeoutExpired:
                            pass
                    break
                if time.time() > until:
                    text = f"still ran after {program.get('limit', 120)} s; logs in {folder}\n" + self.inspect()
                    raise Failed(text)
                time.sleep(0.05)
            for rank, p in enumerate(processes):
                if p.poll() and rank not in dying:
                    raise Failed(f"rank {rank} ended with {p.poll()}; logs in {folder}: {tail(f'{folder}/{rank}.log')}")
        finally:
            self.end(processes)
        results = []
        for rank in range(world):
            if rank in dying:
                continue
            try:
                with open(f"{folder}/{rank}.json") as file:
                    results.append(json.load(file))
            except OSError:
                raise Failed(f"rank {rank} left no result; logs in {folder}") from None
        if over in ("local", "tcp"):
            for wanted in ["NET/pushgate", *([program["says"]] if "says" in program else [])]:
                if not any(wanted in read_text(f"{folder}/{log}") for log in os.listdir(folder) if log.startswith("nccl-")):
                    raise Failed(f"NCCL's log does not say '{wanted}'; logs in {folder}")
        return results


def differs(ours, theirs, bound):
    """How the numbers of two runs differ by more than `bound` allows; None: they do not."""
    for rank, (a, b) in enumerate(zip(ours, theirs)):
        for key in sorted(a["exact"].keys() | b["exact"].keys()):
            if a["exact"].get(key) != b["exact"].get(key):
                return f"rank {rank}: {key} is {str(a['exact'].get(key))[:80]}, over the other {str(b['exact'].get(key))[:80]}"
        for key in sorted(a["near"].keys() | b["near"].keys()):
            x, y = a["near"].get(key, []), b["near"].get(key, [])
            if len(x) != len(y):
                return f"rank {rank}: {len(x)} numbers of {key}, over the other {len(y)}"
            for at, (p, q) in enumerate(zip(x, y)):
                # Written so that a NaN differs.
                if not abs(p - q) <= bound * max(abs(p), abs(q), 1e-6):
                    return f"rank {rank}: {key}[{at}] is {p}, over the other {q}, allowed {bound} of it"
    return None


def present(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # What it would be a part of is missing.
        return False


def one(runner, name, program):
    """A program over all transports. Returns a row: what failed, and milliseconds by transport."""
    options = runner.options
    missing = [module for module in program.get("needs", []) if not present(module)]
    if program.get("launcher") == "mpirun" and not shutil.which("mpirun"):
        missing.append("mpirun")
    if missing:
        return {"name": name, "skipped": f"no {', '.join(missing)} here"}
    world = min(program.get("ranks", options.gpus), options.gpus)
    world -= world % program.get("multiple", 1)
    if world < program.get("least", 2):
        return {"name": name, "skipped": f"needs {program.get('least', 2)} GPUs"}
    results, failed, times = {}, {}, {}
    ways = [over for over in options.over if over in program.get("over", options.over)]
    if not ways:
        return {"name": name, "skipped": f"is for {', '.join(program['over'])} alone"}
    for over in ways:
        try:
            results[over] = runner.run(name, program, over, world)
            spent = [r["ms"] for r in results[over] if r["ms"] is not None]
            if spent:
                times[over] = max(spent)
        except Failed as e:
            failed[over] = str(e)
    beside = next((o for o in OWN if o in results), None)
    for over in results:
        if beside and over != beside and (said := differs(results[over], results[beside], program.get("bound", 1e-4))):
            failed[over] = f"{said} ({beside})"
    return {"name": name, "failed": failed, "ms": times, "compared": beside, "ran": list(results)}


def say(row, options):
    if "skipped" in row:
        return f"SKIP  {row['name']:<24} {row['skipped']}"
    times = ", ".join(f"{over} {row['ms'][over]:.2f}" for over in options.over if over in row["ms"])
    lines = [f"{'FAIL' if row['failed'] else 'PASS'}  {row['name']:<24} {'ms: ' + times if times else 'ended over ' + (', '.join(row['ran']) or 'none')}"]
    if row["compared"] is None and not row["failed"]:
        lines[0] += "; compared with nothing, because it ran over none of NCCL's own transports"
    lines += [f"      {row['name']} over {over}: {text}" for over, text in row["failed"].items()]
    return "\n".join(lines)


def read(path):
    with open(path, "rb") as file:
        programs = tomllib.load(file)
    for name, program in programs.items():
        if unknown := program.keys() - KEYS:
            raise SystemExit(f"{path}: {name} has {', '.join(sorted(unknown))}; known are {', '.join(sorted(KEYS))}")
    return programs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", default=f"{HERE}/../libnccl-net-pushgate.so", help="the plugin's file [default: beside this folder]")
    beside = f"{HERE}/../pushgate"
    parser.add_argument("--pushgate", default=beside if os.path.exists(beside) else "pushgate", help="the command, for what it says of a program that hangs [default: beside this folder, or else in PATH]")
    parser.add_argument("--programs", default=f"{HERE}/programs.toml", help="the programs; their files lie beside it")
    parser.add_argument("--packages", help="a folder of Python packages that this host lacks, as `pip install --no-deps --target` makes it")
    parser.add_argument("--gpus", type=int, help="GPUs, and ranks of a program [default: all]")
    parser.add_argument("--per-host", type=int, default=1, help="ranks that NCCL takes for one host [default: 1]")
    parser.add_argument("--only", help="programs, separated by commas [default: all but the long ones]")
    parser.add_argument("--over", default="local,shm,socket", help="transports: local and tcp are the plugin's, shm and socket NCCL's; none changes nothing, for a try without GPUs [default: local,shm,socket]")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time; times are then those beside the others [default: 1]")
    parser.add_argument("--out", default=tempfile.gettempdir(), help="logs go there")
    parser.add_argument("--json", help="write the rows to this file")
    options = parser.parse_args()
    options.folder = os.path.dirname(os.path.abspath(options.programs))
    options.plugin = os.path.abspath(options.plugin)
    options.over = options.over.split(",")
    if options.packages:
        options.packages = os.path.abspath(options.packages)
        if not os.path.isdir(options.packages):
            parser.error(f"--packages names {options.packages}, which is no folder")
        sys.path.append(options.packages)
    for over in options.over:
        if over not in ("local", "tcp", "shm", "socket", "none"):
            parser.error(f"--over names {over}: local, tcp, shm, socket, none")
    if {"local", "tcp"} & set(options.over) and not os.path.exists(options.plugin):
        parser.error(f"no plugin at {options.plugin}: build it with cargo xtask plugin")
    if options.per_host < 1 or options.jobs < 1:
        parser.error("--per-host and --jobs are 1 or more")
    if options.gpus is None:
        try:
            options.gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
        except OSError as e:
            parser.error(f"nvidia-smi, which counts the GPUs, can't be run ({e.strerror}): give --gpus")
    if options.gpus < 2:
        parser.error(f"{options.gpus} GPUs: these programs need 2 or more")
    programs = read(options.programs)
    wanted = options.only.split(",") if options.only else [name for name in programs if not programs[name].get("long")]
    if unknown := [name for name in wanted if name not in programs]:
        parser.error(f"--only names {', '.join(unknown)}; there are {', '.join(programs)}")
    os.makedirs(options.out, exist_ok=True)
    runner, rows = Runner(options), []
    # As `timeout` ends a program: with what it has started, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A look at what hangs sees all programs of the host, so that the report of one may name another.
    pool = concurrent.futures.ThreadPoolExecutor(options.jobs)
    try:
        for row in concurrent.futures.as_completed([pool.submit(one, runner, name, programs[name]) for name in wanted]):
            rows.append(row.result())
            print(say(rows[-1], options), flush=True)
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        runner.end_all()
        print("ended by a signal; no program is left running", file=sys.stderr)
        os._exit(130)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    failed = [row["name"] for row in rows if row.get("failed")]
    skipped = sum("skipped" in row for row in rows)
    print(f"{len(rows) - len(failed) - skipped} passed, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}, {skipped} skipped")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
