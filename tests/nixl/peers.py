"""Processes with NIXL agents, and what the programs of this folder do with them.

A program runs in the parent, which asks its peers by pipes; a peer is a process of its own, so that it can be killed."""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import urllib.request

import numpy

# What a program lets pass before it calls a wait a hang.
HANG = 60


class Peer:
    """A process with an agent. Calls run there, one after the other, while `background` calls go on beside them."""

    made = 0

    def __init__(self, name, backend, parameters=None, size=1 << 20, seed=0, quiet=False):
        context = multiprocessing.get_context("spawn")
        self.name, self.pipe = name, None
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name, backend, parameters or {}, size, seed, quiet))
        # Each peer sees one of the GPUs, by turns.
        gpus = os.environ.get("NIXL_TEST_GPUS", "0").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[Peer.made % len(gpus)]
        Peer.made += 1
        self.process.start()
        theirs.close()
        self.metadata, self.address = self._answer()

    def _answer(self):
        if not self.pipe.poll(HANG):
            self.kill()
            raise TimeoutError(f"{self.name} does not answer")
        good, value = self.pipe.recv()
        if not good:
            raise RuntimeError(f"{self.name}: {value}")
        return value

    def ask(self, what, *arguments):
        """Asks for a call of `Served`, without waiting."""
        self.pipe.send((what, arguments))

    def call(self, what, *arguments):
        self.ask(what, *arguments)
        return self._answer()

    answer = _answer

    def kill(self):
        self.process.kill()
        self.process.join()

    def end(self):
        if self.process.is_alive():
            self.pipe.send(("end", ()))
        self.process.join(HANG)
        if self.process.exitcode is None:
            self.kill()
            raise TimeoutError(f"{self.name} does not end")
        return self.process.exitcode


def free_port():
    with socket.socket() as of:
        of.bind(("127.0.0.1", 0))
        return of.getsockname()[1]


def content(size, seed):
    return numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)


class HostMemory:
    """Host memory, registered as such, or as memory of a GPU that the CPU plays (`_PUSHGATE_NIXL_GPU=cpu`)."""

    def __init__(self, size):
        self.array = numpy.zeros(size, dtype=numpy.uint8)
        self.size, self.address = size, self.array.ctypes.data

    def write(self, content):
        self.array[:] = content

    def read(self, offset, length):
        return self.array[offset : offset + length].tobytes()


class GpuMemory:
    """Memory of the first GPU that the process sees."""

    def __init__(self, size):
        import torch

        self.torch, self.tensor = torch, torch.zeros(size, dtype=torch.uint8, device="cuda:0")
        self.size, self.address = size, self.tensor.data_ptr()
        torch.cuda.synchronize()

    def write(self, content):
        self.tensor.copy_(self.torch.from_numpy(content))
        self.torch.cuda.synchronize()

    def read(self, offset, length):
        return self.tensor[offset : offset + length].cpu().numpy().tobytes()


class Served:
    """What a peer's process does."""

    def __init__(self, name, backend, parameters, size, seed, quiet):
        from nixl_cu13 import nixl_agent, nixl_agent_config

        self.backend, self.quiet = backend, quiet
        self.agent = nixl_agent(name, nixl_agent_config(backends=[]))
        self.agent.create_backend(backend, parameters)
        self.kind = os.environ.get("NIXL_TEST_MEMORY", "DRAM")
        played = self.kind == "DRAM" or os.environ.get("_PUSHGATE_NIXL_GPU") == "cpu"
        self.memory = HostMemory(size) if played else GpuMemory(size)
        self.memory.write(content(size, seed))
        self.registered = self.agent.register_memory([(self.address(), size, 0, "")], self.kind)
        self.known, self.notes = {}, []

    def address(self):
        return self.memory.address

    def metadata(self):
        return self.agent.get_agent_metadata()

    def load(self, metadata):
        name = self.agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def remove(self, name):
        self.agent.remove_remote_agent(name)

    def bytes(self, offset, length):
        return self.memory.read(offset, length)

    def fill(self, seed):
        self.memory.write(content(self.memory.size, seed))

    def register_again(self):
        """Ends the registration and makes a new one; the new metadata."""
        self.agent.deregister_memory(self.registered)
        self.registered = self.agent.register_memory([(self.address(), self.memory.size, 0, "")], self.kind)
        return self.metadata()

    def deregister(self):
        self.agent.deregister_memory(self.registered)

    def prepare(self, operation, here, there, peer, note=b""):
        """A handle for lists of (address, length)."""
        own = self.agent.get_xfer_descs([(a, n, 0) for a, n in here], self.kind)
        theirs = self.agent.get_xfer_descs([(a, n, 0) for a, n in there], self.kind)
        return self.agent.initialize_xfer(operation, own, theirs, peer, note, [self.backend])

    def wait(self, handle, note=b""):
        """Posts and waits; how it ended."""
        state, begin = self.agent.transfer(handle, note), time.monotonic()
        while state == "PROC":
            if time.monotonic() - begin > HANG:
                raise TimeoutError("a transfer hangs")
            state = self.agent.check_xfer_state(handle)
        return state

    def transfer(self, operation, here, there, peer, note=b""):
        """Prepares, runs and releases a transfer between offsets here and addresses there."""
        handle = self.prepare(operation, [(self.address() + o, n) for o, n in here], there, peer, note)
        try:
            return self.wait(handle, note)
        finally:
            self.agent.release_xfer_handle(handle)

    def try_transfer(self, *arguments):
        """As `transfer`; an error is an answer too."""
        try:
            return self.transfer(*arguments)
        except TimeoutError:
            raise
        except Exception as error:  # NIXL's own classes, one for each status.
            return type(error).__name__

    def traffic(self, operation, there, peer, seconds):
        """Transfers of all of the memory, one after the other; how often each outcome came, until one is no success."""
        done, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            outcome = self.try_transfer(operation, [(0, self.memory.size)], [(there, self.memory.size)], peer)
            if outcome != "DONE":
                return done, outcome
            done += 1
        return done, "DONE"

    def cancel(self, there, peer):
        """Releases transfers that have just been posted."""
        size = self.memory.size
        for _ in range(50):
            handle = self.prepare("WRITE", [(self.address(), size)], [(there, size)], peer)
            self.agent.transfer(handle)
            self.agent.release_xfer_handle(handle)

    def notify(self, peer, texts):
        for text in texts:
            self.agent.send_notif(peer, text)

    def noted(self, count, seconds=HANG):
        """Waits for notifications: all that came, as (agent, text)."""
        end = time.monotonic() + seconds
        while len(self.notes) < count and time.monotonic() < end:
            for name, texts in self.agent.get_new_notifs().items():
                self.notes += [(name.decode() if isinstance(name, bytes) else name, text) for text in texts]
        notes, self.notes = self.notes, []
        return notes

    def sleep(self, seconds):
        time.sleep(seconds)

    def measured(self, operation, lengths, there, peer):
        """A transfer of pieces that follow each other, as NIXL measured it: pieces, bytes, microseconds to the post's and the transfer's end."""
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        handle = self.prepare(operation, [(self.address() + o, n) for o, n in zip(starts, lengths)],
                              [(there + o, n) for o, n in zip(starts, lengths)], peer)
        begin, outcome = time.monotonic(), self.wait(handle)
        lasted = (time.monotonic() - begin) * 1e6
        said = self.agent.get_xfer_telemetry(handle)
        self.agent.release_xfer_handle(handle)
        return outcome, said.descCount, said.totalBytes, said.postDuration, said.xferDuration, lasted

    def counted(self, port, wanted, seconds=HANG):
        """Waits until NIXL's exporter has counted what is wanted: the counts that it has then."""
        end, counts = time.monotonic() + seconds, {}
        while counts != wanted and time.monotonic() < end:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG) as answer:
                lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line.startswith("agent_")]
            counts = {name: int(float(value)) for text, value in lines if (name := text.partition("{")[0]) in wanted}
        return counts

    def fork(self, there, peer):
        """The exit status of a child of `fork` whose calls fail, and which ends its copy of the agent then, with the registrations."""
        child = os.fork()
        if child == 0:
            signal.alarm(HANG)
            size = self.memory.size
            for call in [self.agent.get_new_notifs, lambda: self.agent.send_notif(peer, b"of the child"),
                         lambda: self.transfer("WRITE", [(0, size)], [(there, size)], peer)]:
                try:
                    call()
                    os._exit(1)
                except Exception:
                    pass
            del self.agent
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _serve(pipe, name, backend, parameters, size, seed, quiet):
    # The parent's end is another process's: this one ends with it.
    ctypes.CDLL(None).prctl(1, 9)
    try:
        served = Served(name, backend, parameters, size, seed, quiet)
        pipe.send((True, (served.metadata(), served.address())))
    except Exception as error:
        pipe.send((False, repr(error)))
        return
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            break
        if what == "end":
            break
        try:
            pipe.send((True, getattr(served, what)(*arguments)))
        except Exception as error:
            pipe.send((False, f"{what}: {error!r}"))
    # Agents end before the interpreter does.
    del served
    sys.stdout.flush()
    os._exit(0)
