"""Runs programs over NIXL with a backend, in an environment that has NIXL's wheel.

run.py --plugin libplugin_PUSHGATE.so [--backend PUSHGATE] [--only NAME] [--way NAME] [--seconds 10]"""

import argparse
import os
import pathlib
import sys
import tempfile
import time

# The package is not installed here, and this file of it needs no other one.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python/src/pushgate"))
import _nixl

# How bytes go between two agents of this host.
WAYS = {
    "direct": {},
    "messages": {"qp": "local", "direct": "false"},
    "tcp": {"qp": "tcp", "host": "127.0.0.1"},
    "played gpu": {},
    "played gpu, tcp": {"qp": "tcp", "host": "127.0.0.1"},
    "gpu": {},
}
# What a way needs in the environment. The CPU plays a GPU where a way says so; `gpu` needs PyTorch and a GPU, and runs when it is named.
ENVIRONMENTS = {
    "played gpu": {"NIXL_TEST_MEMORY": "VRAM", "_PUSHGATE_NIXL_GPU": "cpu"},
    "played gpu, tcp": {"NIXL_TEST_MEMORY": "VRAM", "_PUSHGATE_NIXL_GPU": "cpu"},
    "gpu": {"NIXL_TEST_MEMORY": "VRAM"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", type=pathlib.Path, required=True, help="the plugin's library")
    parser.add_argument("--backend", default="PUSHGATE", help="PUSHGATE, or UCX to see that a program is right")
    parser.add_argument("--only", help="one program")
    parser.add_argument("--way", choices=WAYS, help="one way; all ways otherwise")
    parser.add_argument("--seconds", type=float, default=10, help="of random lists, for each way")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plugins = _nixl.make_folder(_nixl.newest_wheel()[0], options.plugin.resolve(), folder)
        os.environ.update(NIXL_PLUGIN_DIR=str(plugins), NIXL_LOG_LEVEL=os.environ.get("NIXL_LOG_LEVEL", "ERROR"))
        return test(options)


def test(options):
    import programs

    failed = 0
    ways = {"ucx": {}} if options.backend == "UCX" else {
        n: p for n, p in WAYS.items() if options.way == n or options.way is None and n != "gpu"
    }
    for program in programs.PROGRAMS:
        if options.only not in (None, program.__name__):
            continue
        for way, parameters in ways.items():
            begin = time.monotonic()
            environment = ENVIRONMENTS.get(way, {})
            os.environ.update(environment)
            try:
                program(options.backend, parameters, options.seconds)
                outcome = "ok"
            except (AssertionError, RuntimeError, TimeoutError, OSError, EOFError) as error:
                outcome, failed = f"FAILED: {error}", failed + 1
            for name in environment:
                del os.environ[name]
            print(f"{program.__name__}, {way}: {outcome} ({time.monotonic() - begin:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
