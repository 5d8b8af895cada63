"""Runs `pushgate nixl-check` with this Python's NIXL, as it stands and with planted faults, and the example over NIXL.

check.py --command pushgate --plugin libplugin_PUSHGATE.so"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python/src/pushgate"))
import _nixl

# What a run may take before it is called a hang.
HANG = 300
ROWS = 12


def expect(what, holds, ended):
    if not holds:
        raise AssertionError(f"{what}: exit status {ended.returncode}\n{ended.stdout}\n{ended.stderr}")


def agents(command):
    """The processes of the agents."""
    children = pathlib.Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()

    def words(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            # A child that has ended meanwhile.
            return b""

    return [int(pid) for pid in children if b"serve" in words(pid)]


def made_beside(make):
    """Makes a folder, and the same one whole once more before the first link has its name, as another process would."""
    replace = os.replace

    def beside(*arguments):
        os.replace = replace
        make()
        replace(*arguments)

    os.replace = beside
    return make()


def interrupted(options, *arguments):
    """An agent that is killed is named, and Ctrl-C ends the command; neither leaves a process or a file."""
    for kill in [True, False]:
        with tempfile.TemporaryDirectory() as folder:
            given = ["--python", sys.executable, "--plugin", options.plugin, "--turns", "1000", *arguments]
            command = subprocess.Popen([options.command.resolve(), "nixl-check", *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True, env={**os.environ, "TMPDIR": folder})
            end = time.monotonic() + HANG
            while len(found := agents(command)) < 2:
                if time.monotonic() > end or command.poll() is not None:
                    raise AssertionError("no agents")
                time.sleep(0.01)
            os.kill(*((found[1], signal.SIGKILL) if kill else (command.pid, signal.SIGINT)))
            ended = subprocess.CompletedProcess([], None, *command.communicate(timeout=HANG))
            ended.returncode = command.returncode
            if kill:
                expect("a killed agent", ended.returncode == 1 and f"agent second (pid {found[1]}): ended: signal: 9" in ended.stderr, ended)
            else:
                expect("Ctrl-C", ended.returncode == 130 and ended.stderr == "pushgate: interrupted; the agents were ended\n", ended)
            expect("nothing is left", not any(os.path.exists(f"/proc/{pid}") for pid in found) and not os.listdir(folder), ended)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", type=pathlib.Path, required=True, help="the program pushgate")
    parser.add_argument("--plugin", type=pathlib.Path, required=True, help="the plugin's library")
    options = parser.parse_args()

    def check(*arguments, **variables):
        given = ["--python", sys.executable, "--plugin", options.plugin, "--turns", "1", "--seconds", "0.1", "--json", *arguments]
        command = [options.command.resolve(), "nixl-check", *given]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env={**os.environ, **variables})
        expect("JSON", ended.stdout.startswith("{"), ended)
        return ended, json.loads(ended.stdout)

    ended, said = check()
    print(ended.stdout)
    expect("a right run", ended.returncode == 0 and "# right: no wrong byte, nothing failed" in ended.stderr, ended)
    ours = [row for row in said["rows"] if row["backend"] == "PUSHGATE"]
    expect("rows", len(ours) == ROWS and len(said["rows"]) == 2 * ROWS, ended)
    expect("ratios", all(row["ratio"] > 0 and row["beside"] == "UCX" and row["us"] > 0 for row in ours), ended)
    expect("bytes", all(row["wrong"] == 0 for row in said["rows"]), ended)
    expect("the way", said["used"]["PUSHGATE"].startswith("bytes go directly from process to process"), ended)

    for way, parameters in [("local", ["direct=false"]), ("tcp", ["qp=tcp", "host=127.0.0.1"])]:
        ended, said = check("--backend", "PUSHGATE", *(word for parameter in parameters for word in ("--set", parameter)))
        expect(way, ended.returncode == 0 and said["used"] == {"PUSHGATE": f"bytes go by messages of a `{way}` queue pair"}, ended)

    ended, said = check("--backend", "PUSHGATE", "--memory", "gpu", _PUSHGATE_NIXL_GPU="cpu")
    expect("memory of a GPU that the CPU plays", ended.returncode == 0 and len(said["rows"]) == ROWS, ended)
    expect("its way", said["used"] == {"PUSHGATE": "bytes go by messages of a `local` queue pair"}, ended)

    ended, said = check("--backend", "NOPE,PUSHGATE")
    expect("a backend that is not there", ended.returncode == 1 and "NIXL finds no backend NOPE: it has " in said["failed"][0], ended)
    expect("the other one", len(said["rows"]) == ROWS, ended)

    ended, said = check("--backend", "PUSHGATE", "--set", "qp=smoke")
    expect("a wrong parameter", ended.returncode == 1 and "invalid qp `smoke`: expected auto" in said["failed"][0], ended)

    ended, said = check("--backend", "PUSHGATE", _PUSHGATE_NIXL_CHECK_SPOIL="1")
    wrong = sum(row["wrong"] for row in said["rows"])
    expect("wrong bytes", ended.returncode == 1 and wrong > 0 and f"pushgate: {wrong} wrong bytes by PUSHGATE" in ended.stderr, ended)

    interrupted(options, "--backend", "PUSHGATE")

    with tempfile.TemporaryDirectory() as folder:
        plugins = made_beside(lambda: _nixl.make_folder(_nixl.newest_wheel()[0], options.plugin.resolve(), folder))
        command = [sys.executable, ROOT / "examples/nixl/paged_cache.py"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env={**os.environ, "NIXL_PLUGIN_DIR": str(plugins)})
    expect("the example", ended.returncode == 0 and "40 requests: every answer is right" in ended.stdout, ended)
    print(ended.stdout)


if __name__ == "__main__":
    main()
