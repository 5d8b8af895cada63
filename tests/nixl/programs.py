"""Programs over NIXL's own Python interface, each with agents in processes of their own."""

import os
import random
import time

from peers import HANG, Peer, content, free_port


def pair(backend, parameters, size=1 << 20):
    first = Peer("first", backend, parameters, size, 1)
    second = Peer("second", backend, parameters, size, 2)
    first.call("load", second.metadata)
    return first, second


def expect(what, got, wanted):
    if got != wanted:
        raise AssertionError(f"{what}: {str(got)[:200]} in place of {str(wanted)[:200]}")


def ended(*peers):
    for peer in peers:
        expect(f"exit status of {peer.name}", peer.end(), 0)


def sizes_both_ways(backend, parameters, _):
    """WRITE and READ of 1 byte to 64 MiB bring the bytes."""
    size = 64 << 20
    first, second = pair(backend, parameters, size)
    for length in [1, 8, 63, 4096, 65536, (1 << 20) + 1, size]:
        offset = (size - length) // 2
        for operation, source, target in [("WRITE", first, second), ("READ", second, first)]:
            source.call("fill", length)
            expect("outcome", first.call("transfer", operation, [(offset, length)], [(second.address + offset, length)], "second"), "DONE")
            got = target.call("bytes", offset, length)
            if got != content(size, length)[offset : offset + length].tobytes():
                raise AssertionError(f"{operation} of {length} bytes: wrong bytes")
    ended(first, second)


def random_lists(backend, parameters, seconds):
    """Lists of 1 to 100,000 descriptors of random lengths, both ways, byte for byte."""
    size, chance = 8 << 20, random.Random(5)
    first, second = pair(backend, parameters, size)
    models, end, rounds = [bytearray(content(size, 1)), bytearray(content(size, 2))], time.monotonic() + seconds, 0
    while time.monotonic() < end or rounds < 3:
        count = [1, 10, 1000, 20_000, 100_000][rounds % 5]
        # Targets do not overlap: each lies in a slot of its own.
        slot = size // count
        lengths = [chance.randint(1, slot) for _ in range(count)]
        to = [i * slot + chance.randint(0, slot - n) for i, n in zip(chance.sample(range(count), count), lengths)]
        of = [chance.randint(0, size - n) for n in lengths]
        write = chance.random() < 0.5
        here, there = (of, to) if write else (to, of)
        outcome = first.call("transfer", "WRITE" if write else "READ", list(zip(here, lengths)),
                             [(second.address + o, n) for o, n in zip(there, lengths)], "second")
        expect(f"outcome of {count} descriptors", outcome, "DONE")
        source, target = models if write else models[::-1]
        for o, t, n in zip(of, to, lengths):
            target[t : t + n] = source[o : o + n]
        for peer, model in zip((first, second), models):
            if peer.call("bytes", 0, size) != bytes(model):
                raise AssertionError(f"round {rounds}, {count} descriptors, write: {write}: wrong bytes at {peer.name}")
        rounds += 1
    ended(first, second)


def notifications(backend, parameters, _):
    """10,000 notifications come once each, in order, with empty and long ones; one of a transfer comes after its bytes."""
    first, second = pair(backend, parameters)
    texts = [b"%d" % i for i in range(10_000)]
    first.call("notify", "second", texts)
    expect("notifications", second.call("noted", len(texts)), [("first", text) for text in texts])
    long = content(1_000_000, 9).tobytes()
    first.call("notify", "second", [long])
    expect("a long one", second.call("noted", 1) == [("first", long)], True)
    for i in range(200):
        first.call("fill", i)
        first.ask("transfer", "WRITE", [(0, 300_000)], [(second.address, 300_000)], "second", b"note %d" % i)
        expect("the transfer's", second.call("noted", 1), [("first", b"note %d" % i)])
        expect("its bytes", second.call("bytes", 0, 300_000) == content(1 << 20, i)[:300_000].tobytes(), True)
        expect("outcome", first.answer(), "DONE")
    first.ask("transfer", "READ", [(0, 100)], [(second.address, 100)], "second", b"read")
    expect("a READ's", second.call("noted", 1), [("first", b"read")])
    expect("outcome", first.answer(), "DONE")
    # None comes twice.
    expect("more", second.call("noted", 1, 0.3), [])
    ended(first, second)


def a_target_that_calls_nothing(backend, parameters, _):
    """WRITE and READ end though the target's program does nothing."""
    first, second = pair(backend, parameters)
    second.ask("sleep", 6)
    for _ in range(3):
        for operation in ["WRITE", "READ"]:
            expect("outcome", first.call("transfer", operation, [(0, 1 << 20)], [(second.address, 1 << 20)], "second"), "DONE")
        time.sleep(1.1)
    second.answer()
    ended(first, second)


def cancelled(backend, parameters, _):
    """Transfers that are released at once hold up no other."""
    size = 64 << 20
    first, second = pair(backend, parameters, size)
    first.call("cancel", second.address, "second")
    expect("outcome", first.call("transfer", "READ", [(0, size)], [(second.address, size)], "second"), "DONE")
    ended(first, second)


def killed_and_back(backend, parameters, _):
    """An agent that is killed under traffic fails its peer's transfers, and comes back under its name with new metadata."""
    first, second = pair(backend, parameters, 16 << 20)
    # To connect may take longer than the sleep below.
    expect("outcome", first.call("transfer", "READ", [(0, 1 << 20)], [(second.address, 1 << 20)], "second"), "DONE")
    for round in range(3):
        first.ask("traffic", "WRITE" if round % 2 else "READ", second.address, "second", HANG)
        time.sleep(0.5)
        second.kill()
        done, outcome = first.answer()
        if done == 0 or outcome == "DONE":
            raise AssertionError(f"{done} transfers, then {outcome}")
        old = second
        second = Peer("second", backend, parameters, 16 << 20, 2)
        first.call("remove", "second")
        if backend == "PUSHGATE":
            # What the dead one published leads nowhere, and nowhere near the new one.
            first.call("load", old.metadata)
            outcome = first.call("try_transfer", "WRITE", [(0, 8)], [(old.address, 8)], "second")
            if outcome == "DONE":
                raise AssertionError("stale metadata was taken")
            first.call("remove", "second")
        first.call("load", second.metadata)
        expect("outcome", first.call("transfer", "READ", [(0, 1 << 20)], [(second.address, 1 << 20)], "second"), "DONE")
        expect("bytes", first.call("bytes", 0, 1 << 20) == content(16 << 20, 2)[: 1 << 20].tobytes(), True)
    ended(first, second)


def registered_again_under_traffic(backend, parameters, _):
    """A registration that ends under traffic ends the transfers into it; nothing lands afterwards, and a new one serves."""
    size = 8 << 20
    first, second = pair(backend, parameters, size)
    # To connect may take longer than the sleep below.
    expect("outcome", first.call("transfer", "WRITE", [(0, size)], [(second.address, size)], "second"), "DONE")
    for _ in range(5):
        first.ask("traffic", "WRITE", second.address, "second", HANG)
        time.sleep(0.3)
        second.call("deregister")
        second.call("fill", 77)
        done, outcome = first.answer()
        if done == 0 or outcome == "DONE":
            raise AssertionError(f"{done} transfers, then {outcome}")
        if second.call("bytes", 0, size) != content(size, 77).tobytes():
            raise AssertionError("bytes came after the registration had ended")
        first.call("remove", "second")
        second.end()
        second = Peer("second", backend, parameters, size, 2)
        first.call("load", second.metadata)
        expect("outcome", first.call("transfer", "WRITE", [(0, size)], [(second.address, size)], "second"), "DONE")
    ended(first, second)


def many_agents(backend, parameters, _):
    """Five agents, each with all others, both ways at once."""
    peers = [Peer(f"agent {i}", backend, parameters, 1 << 20, i) for i in range(5)]
    for a in peers:
        for b in peers:
            if a is not b:
                a.call("load", b.metadata)
    for i in range(1, 5):
        for k, a in enumerate(peers):
            b = peers[(k + i) % 5]
            # From the peer's second half, which nobody writes, into a slot of the own first half.
            slot = i * 100_000
            a.ask("transfer", "READ", [(slot, 100_000)], [(b.address + 600_000, 100_000)], b.name)
        for a in peers:
            expect("outcome", a.answer(), "DONE")
        for k, a in enumerate(peers):
            wanted = content(1 << 20, (k + i) % 5)[600_000:700_000].tobytes()
            expect("bytes", a.call("bytes", i * 100_000, 100_000) == wanted, True)
    for a in peers:
        for b in peers:
            if a is not b:
                a.call("notify", b.name, [a.name.encode()])
    for a in peers:
        others = sorted(b.name for b in peers if b is not a)
        expect("notifications", sorted(name for name, _ in a.call("noted", 4)), others)
    ended(*peers)


def to_itself(backend, parameters, _):
    """An agent's transfers within its own memory."""
    only = Peer("only", backend, parameters, 32 << 20, 1)
    size = 8 << 20
    expect("outcome", only.call("transfer", "WRITE", [(0, size)], [(only.address + 2 * size, size)], "only"), "DONE")
    expect("bytes", only.call("bytes", 2 * size, size) == content(32 << 20, 1)[:size].tobytes(), True)
    ended(only)


def telemetry(backend, parameters, _):
    """NIXL's telemetry has the bytes and times of transfers, for each of them and in what its Prometheus exporter counts."""
    port, size = free_port(), 8 << 20
    environment = {"NIXL_TELEMETRY_ENABLE": "y", "NIXL_TELEMETRY_EXPORTER": "prometheus",
                   "NIXL_TELEMETRY_PROMETHEUS_PORT": str(port), "NIXL_TELEMETRY_PROMETHEUS_LOCAL": "y"}
    second = Peer("second", backend, parameters, size, 2)
    os.environ.update(environment)
    try:
        first = Peer("first", backend, parameters, size, 1)
    finally:
        for name in environment:
            del os.environ[name]
    first.call("load", second.metadata)
    for operation, lengths in [("WRITE", [8]), ("READ", [1000, 65536, 1]), ("WRITE", [size // 2] * 2), ("READ", [size])]:
        outcome, pieces, bytes, post, transfer, lasted = first.call("measured", operation, lengths, second.address, "second")
        expect("what was transferred", (outcome, pieces, bytes), ("DONE", len(lengths), sum(lengths)))
        # In whole microseconds, and by another clock.
        if not (0 <= post <= transfer <= 2 * (lasted + 1) and (transfer > 0 or sum(lengths) < size)):
            raise AssertionError(f"{post} and {transfer} us, of {lasted}")
    counts = {"agent_tx_bytes_total": 8 + size, "agent_rx_bytes_total": 66537 + size, "agent_tx_requests_num_total": 2,
              "agent_rx_requests_num_total": 2, "agent_memory_registered_total": size}
    expect("counts", first.call("counted", port, counts), counts)
    ended(first, second)


def forked(backend, parameters, _):
    """Calls of a child of `fork` fail there, and neither they nor the end of its agent disturb the parent's."""
    if backend != "PUSHGATE":
        # UCX says nothing of children.
        return
    first, second = pair(backend, parameters)
    for _ in range(3):
        expect("outcome", first.call("transfer", "WRITE", [(0, 1 << 20)], [(second.address, 1 << 20)], "second"), "DONE")
        expect("exit status of the child", first.call("fork", second.address, "second"), 0)
        expect("outcome", first.call("transfer", "READ", [(0, 1 << 20)], [(second.address, 1 << 20)], "second"), "DONE")
    expect("the child's notifications", second.call("noted", 1, 0.3), [])
    ended(first, second)


PROGRAMS = [
    sizes_both_ways,
    random_lists,
    notifications,
    a_target_that_calls_nothing,
    cancelled,
    killed_and_back,
    registered_again_under_traffic,
    many_agents,
    to_itself,
    telemetry,
    forked,
]
