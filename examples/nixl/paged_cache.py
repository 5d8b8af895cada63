# SPDX-License-Identifier: MIT OR Apache-2.0
"""Two workers move pages of a KV cache over NIXL: one fills pages for a prompt (prefill), the other pulls them and goes on (decode).

python paged_cache.py [REQUESTS]     starts both on this host, with numpy, a wheel of NIXL, and the wheel of pushgate or NIXL_PLUGIN_DIR

A cache has pages for each layer. A request takes blocks of it wherever some are free, in each worker others: a transfer is a list."""

import importlib.util
import json
import multiprocessing
import os
import random
import sys
import time
import zlib
from multiprocessing.connection import wait

import numpy

LAYERS, BLOCKS = 4, 64
# What a block has of a layer: keys and values of 16 tokens, two bytes each.
PAGE = (2, 16, 256)
PAGE_BYTES = 2 * 2 * 16 * 256


def keys_and_values(prompt, blocks):
    """What a model would compute for a prompt."""
    return numpy.random.default_rng(prompt).random((LAYERS, blocks, *PAGE), numpy.float32).astype(numpy.float16)


def answer_to(pages):
    """What a model would make of the pages."""
    return zlib.crc32(pages.tobytes())


class Worker:
    """An agent of NIXL with a cache."""

    def __init__(self, name, pipe):
        modules = (m for m in ("nixl_cu13", "nixl_cu12", "nixl") if importlib.util.find_spec(m))
        nixl = importlib.import_module(f"{next(modules)}._api")
        self.agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["PUSHGATE"]))
        self.cache = numpy.zeros((LAYERS, BLOCKS, *PAGE), numpy.float16)
        self.free = set(range(BLOCKS))
        self.agent.register_memory([(self.cache.ctypes.data, self.cache.nbytes, 0, "")], "DRAM")
        # A router or a store would carry this between hosts.
        pipe.send((self.agent.get_agent_metadata(), self.cache.ctypes.data))
        metadata, self.peers_cache = pipe.recv()
        self.peer = self.agent.add_remote_agent(metadata).decode()
        self.end = time.monotonic() + 60

    def take(self, count):
        """Some blocks that are free; an empty list where too few are."""
        taken = random.sample(sorted(self.free), count) if count <= len(self.free) else []
        self.free.difference_update(taken)
        return taken

    def prepare(self, whose, cache):
        """All pages of a cache, once: transfers name them by their numbers."""
        pages = [(cache + page * PAGE_BYTES, PAGE_BYTES, 0) for page in range(LAYERS * BLOCKS)]
        return self.agent.prep_xfer_dlist(whose, pages, "DRAM")

    def tell(self, **message):
        self.agent.send_notif(self.peer, json.dumps(message).encode())

    def told(self):
        """The messages that have come."""
        assert time.monotonic() < self.end, f"{self.peer} says nothing"
        return [json.loads(text) for texts in self.agent.get_new_notifs().values() for text in texts]


def numbers(blocks):
    """The numbers of the pages of blocks, in all layers."""
    return [layer * BLOCKS + block for layer in range(LAYERS) for block in blocks]


def prefill(pipe, requests):
    worker = Worker("prefill", pipe)
    waiting, held, expected, answers = list(range(requests)), {}, {}, {}
    while len(answers) < requests or held:
        while waiting and (blocks := worker.take(4 + waiting[0] % 13)):
            request, prompt = waiting.pop(0), random.getrandbits(32)
            computed = keys_and_values(prompt, len(blocks))
            worker.cache[:, blocks] = computed
            held[request], expected[request] = blocks, answer_to(computed)
            worker.tell(request=request, prompt=prompt, blocks=blocks)
        for message in worker.told():
            if "pulled" in message:
                # The notification of the READ: the pages may be written again.
                worker.free.update(held.pop(message["pulled"]))
            else:
                answers[message["request"]] = message["answer"]
    worker.tell(end=True)
    pipe.recv()  # That the peer has read it.
    if answers != expected:
        raise SystemExit(f"wrong answers: {answers}, expected {expected}")
    print(f"{requests} requests: every answer is right")


def decode(pipe, _):
    worker = Worker("decode", pipe)
    own = worker.prepare("NIXL_INIT_AGENT", worker.cache.ctypes.data)
    theirs = worker.prepare(worker.peer, worker.peers_cache)
    asked, pulls, pages, ended = [], [], 0, False
    while not ended:
        for message in worker.told():
            ended |= "end" in message
            asked += [message] if "blocks" in message else []
        while asked and (blocks := worker.take(len(asked[0]["blocks"]))):
            message = asked.pop(0)
            pulled = json.dumps({"pulled": message["request"]}).encode()
            handle = worker.agent.make_prepped_xfer("READ", own, numbers(blocks), theirs, numbers(message["blocks"]), pulled)
            worker.agent.transfer(handle)
            pulls.append((handle, message, blocks))
        for pull in pulls[:]:
            handle, message, blocks = pull
            if worker.agent.check_xfer_state(handle) == "PROC":
                continue
            pulls.remove(pull)
            worker.agent.release_xfer_handle(handle)
            got = worker.cache[:, blocks]
            # A transfer that failed has left other pages there.
            if not numpy.array_equal(got, keys_and_values(message["prompt"], len(blocks))):
                raise SystemExit(f"request {message['request']} has wrong pages")
            pages += len(numbers(blocks))
            worker.tell(request=message["request"], answer=answer_to(got))
            worker.free.update(blocks)
    print(f"{pages} pages of {PAGE_BYTES} bytes pulled into other blocks and checked", flush=True)
    pipe.send("read")


if __name__ == "__main__":
    if "NIXL_PLUGIN_DIR" not in os.environ:
        import pushgate

        os.environ["NIXL_PLUGIN_DIR"] = str(pushgate.nixl_folder())
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe()
    workers = [context.Process(target=run, args=(end, requests)) for run, end in zip((prefill, decode), ends)]
    for worker in workers:
        worker.start()
    while running := [worker for worker in workers if worker.is_alive()]:
        # One that failed leaves the other one waiting.
        if any(worker.exitcode for worker in workers):
            for worker in running:
                worker.terminate()
        wait([worker.sentinel for worker in running])
    raise SystemExit(any(worker.exitcode for worker in workers))
