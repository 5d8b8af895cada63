"""Runs programs over NIXL with a backend, in an environment that has NIXL's wheel.

run.py --plugin libplugin_PUSHGATE.so [--backend PUSHGATE] [--only NAME] [--way NAME] [--seconds 10] [--bench]"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time

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
SHAPES = [(1, 8), (1, 65536), (1, 1 << 20), (1, 64 << 20), (1024, 32768), (2048, 16384)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", type=pathlib.Path, required=True, help="the plugin's library")
    parser.add_argument("--backend", default="PUSHGATE", help="PUSHGATE, or UCX to see that a program is right")
    parser.add_argument("--only", help="one program")
    parser.add_argument("--way", choices=WAYS, help="one way; all ways otherwise")
    parser.add_argument("--seconds", type=float, default=10, help="of random lists, for each way")
    parser.add_argument("--bench", action="store_true", help="measures in place of testing, by turns with UCX")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        import nixl_cu13

        libraries = pathlib.Path(nixl_cu13.__file__).parent.parent / "nixl_cu13.libs"
        plugins = pathlib.Path(folder) / "nixl"
        plugins.mkdir()
        # The wheel's plugins look for their libraries in the folder above their own.
        for library in libraries.iterdir():
            if library.name != "nixl":
                (pathlib.Path(folder) / library.name).symlink_to(library)
        for library in [*(libraries / "nixl").glob("*.so"), options.plugin.resolve()]:
            (plugins / library.name).symlink_to(library)
        os.environ.update(NIXL_PLUGIN_DIR=str(plugins), NIXL_LOG_LEVEL=os.environ.get("NIXL_LOG_LEVEL", "ERROR"))
        return bench() if options.bench else test(options)


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


def bench():
    import programs

    rows = []
    for turn in range(3):
        for label, backend, parameters, tls in [("pushgate", "PUSHGATE", {}, None), ("ucx", "UCX", {}, None),
                                                ("pushgate tcp", "PUSHGATE", WAYS["tcp"], None), ("ucx tcp", "UCX", {}, "tcp")]:
            os.environ.pop("UCX_TLS", None)
            if tls:
                os.environ["UCX_TLS"] = tls
            first, second = programs.pair(backend, parameters, 64 << 20)
            for operation in ["WRITE", "READ"]:
                medians = first.call("rate", operation, SHAPES, second.address, "second", 0.7)
                rows += [(label, operation, shape, turn, median) for shape, median in zip(SHAPES, medians)]
            programs.ended(first, second)
    for operation in ["WRITE", "READ"]:
        for count, length in SHAPES:
            line = {}
            for label in ["pushgate", "ucx", "pushgate tcp", "ucx tcp"]:
                all = sorted(m for l, o, s, _, m in rows if (l, o, s) == (label, operation, (count, length)))
                line[label] = {"us": round(all[1] * 1e6, 1), "GB/s": round(count * length / all[1] / 1e9, 2)}
            print(json.dumps({"operation": operation, "shape": f"{count} x {length}", **line}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
