# SPDX-License-Identifier: MIT OR Apache-2.0
"""One of the two agents of `pushgate nixl-check`: it answers requests, each a line of JSON, until they end.

agent.py prepare PLUGIN FOLDER makes the folder for NIXL_PLUGIN_DIR; agent.py serve TASK is an agent."""

import base64
import ctypes
import importlib
import json
import os
import sys
import time
from pathlib import Path

# Begins each answer: libraries may print to standard output too.
MARK = "pushgate-nixl-check "
SIZE = 64 << 20
# Content moves by a prime for each row, so that what an earlier row left is not taken for this row's.
SHIFT = 4099


def say(answer):
    print(f"{MARK}{json.dumps(answer)}", flush=True)


def prepare(plugin, folder):
    import _nixl

    try:
        wheel, chosen = _nixl.newest_wheel()
        plugins = _nixl.make_folder(wheel, Path(plugin), folder)
    except _nixl.NixlError as error:
        return {"Failed": str(error)}
    try:
        # NIXL's module needs it.
        import numpy  # noqa: F401
    except ImportError as error:
        return {"Failed": f"{error}: pip install numpy"}
    return {"Good": {
        "wheel": f"{wheel.name} {wheel.text}", "module": wheel.module, "libraries": str(wheel.libraries), "plugins": str(plugins),
        "python": sys.version.split()[0], "chosen": chosen,
    }}


class Host:
    """Memory of this process."""

    kind, name = "DRAM", "host memory (DRAM)"
    device = None

    def __init__(self):
        import numpy

        self.bytes = numpy.empty(SIZE, numpy.uint8)
        self.address = self.bytes.ctypes.data

    def write(self, content):
        self.bytes[:] = content

    def read(self):
        return self.bytes


class Played(Host):
    """Memory of a GPU that the CPU plays, for tests of the check."""

    kind, name = "VRAM", "GPU memory (VRAM)"
    device = "the CPU"


class Gpu:
    """Memory of the first GPU that this process sees, in the context that CUDA's runtime and PyTorch use too."""

    kind, name = "VRAM", "GPU memory (VRAM)"

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context, address, name = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(100)
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDeviceGetName", name, len(name), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(SIZE))
        self.address, self.device = address.value, name.value.decode()

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'').decode() or status}")

    def write(self, content):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(SIZE))
        self.call("cuCtxSynchronize")

    def read(self):
        import numpy

        content = numpy.empty(SIZE, numpy.uint8)
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(content.ctypes.data), ctypes.c_uint64(self.address), ctypes.c_size_t(SIZE))
        return content


class Agent:
    """Requests are its methods. A row is a number, an operation, a count of pages and their bytes."""

    def __init__(self, task):
        import numpy

        api = importlib.import_module(f"{task['module']}._api")
        self.numpy, self.side, self.seed, self.backend = numpy, task["side"], task["seed"], task["backend"]
        self.memory = {"gpu": Gpu, "played": Played, "host": Host}[task["memory"]]()
        self.agent = api.nixl_agent(task["name"], api.nixl_agent_config(backends=[]))
        if self.backend not in self.agent.plugin_list:
            raise RuntimeError(f"NIXL finds no backend {self.backend}: it has {', '.join(sorted(self.agent.plugin_list))}")
        self.agent.create_backend(self.backend, task["parameters"])
        kinds = [kind.removesuffix("_SEG") for kind in self.agent.get_backend_mem_types(self.backend)]
        if self.memory.kind not in kinds:
            raise RuntimeError(f"the backend {self.backend} does not serve {self.memory.name} here: it serves {', '.join(kinds)}")
        self.agent.register_memory([(self.memory.address, SIZE, 0, "")], self.memory.kind, [self.backend])
        self.contents = [numpy.frombuffer(numpy.random.default_rng([self.seed, side]).bytes(SIZE), numpy.uint8) for side in range(2)]
        self.peer, self.handle = None, None

    def begin(self):
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self.memory.address, "device": self.memory.device}

    def load(self, peer):
        self.agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        self.peer = peer["address"]

    def content(self, side, row):
        return self.numpy.roll(self.contents[side], SHIFT * row["number"])

    def order(self, row):
        """Where the second agent has each page of the first one: scattered, as blocks of a cache."""
        return self.numpy.random.default_rng([self.seed, row["number"]]).permutation(row["pages"])

    def fill(self, row):
        content = self.content(self.side, row)
        # For tests of the check: a byte that it does not expect.
        content[0] ^= self.side == 1 and "_PUSHGATE_NIXL_CHECK_SPOIL" in os.environ
        self.memory.write(content)

    def wait(self):
        state = self.agent.transfer(self.handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(self.handle)
        if state != "DONE":
            raise RuntimeError(f"it ended with {state}")

    def transfer(self, row):
        """Makes the transfer once; the backend that NIXL chose."""
        pages, length, step = row["pages"], row["bytes"], SIZE // row["pages"]
        here = [(self.memory.address + i * step, length, 0) for i in range(pages)]
        there = [(self.peer + int(i) * step, length, 0) for i in self.order(row)]
        own, theirs = (self.agent.get_xfer_descs(list, self.memory.kind) for list in (here, there))
        self.handle = self.agent.initialize_xfer(row["operation"], own, theirs, "second", b"", [self.backend])
        self.wait()
        return self.agent.query_xfer_backend(self.handle)

    def wrong(self, row):
        """How many bytes are not what they must be after one transfer: of the target, and of what was to stay as it was."""
        content = self.content(self.side, row)
        if self.side == (1 if row["operation"] == "WRITE" else 0):
            pages, length, order = row["pages"], row["bytes"], self.order(row)
            other, own = self.content(1 - self.side, row).reshape(pages, -1), content.reshape(pages, -1)
            if self.side == 1:
                own[order, :length] = other[:, :length]
            else:
                own[:, :length] = other[order, :length]
        return int(self.numpy.count_nonzero(self.memory.read() != content))

    def time(self, row, seconds):
        """The median of transfers, in seconds; the first two do not count."""
        times, end = [], time.monotonic() + seconds
        while len(times) < 3 or (time.monotonic() < end and len(times) < 1000):
            begin = time.perf_counter()
            self.wait()
            times.append(time.perf_counter() - begin)
        self.agent.release_xfer_handle(self.handle)
        times = sorted(times[2:])
        return times[len(times) // 2]


def serve(task):
    # It ends with the command.
    ctypes.CDLL(None).prctl(1, 9)
    agent = None
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            # It fails as requests do.
            agent = agent or Agent(task)
            say({"Good": getattr(agent, what)(*arguments)})
        except Exception as error:
            # NIXL's own errors are classes, one for each status.
            say({"Failed": f"{error}" if type(error) is RuntimeError else f"{type(error).__name__}: {error}"})
    # Agents end before the interpreter does.
    del agent
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        say(prepare(*sys.argv[2:]))
    else:
        serve(json.loads(sys.argv[2]))
