# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the wheel has installed, as its users see it: python -m unittest discover python/tests, with the wheel installed."""

import ctypes
import gc
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from pathlib import Path
from typing import Any, Callable, Optional

import pushgate

BYTES = 64 * 1024
LIMIT = 120
"""Seconds that guard against a hang."""

CPU = {"device": "cpu", "qp": "local"}

SOURCE = """
#include "pushgate/device.cuh"
using namespace pushgate;
struct params { u64 qp; u64 data; u64 result; u32 rkey; u32 bytes; };
PUSHGATE_KERNEL(put_to_peer, params)
{
    queue_pair qp(*reinterpret_cast<const pushgate_qp *>(p.qp));
    status s = put_signal<block>(qp, p.rkey, 0, reinterpret_cast<const void *>(p.data), p.bytes, 0, 1);
    if (s == status::ok)
        s = wait_signal<block>(qp, 0, 1);
    if (s == status::ok)
        s = flush<block>(qp);
    if (thread_index() == 0)
        *reinterpret_cast<u64 *>(p.result) = (u64)s;
}
"""


class Params(ctypes.Structure):
    _fields_ = [
        ("qp", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
    ]


def payload(rank: int) -> bytes:
    """What a rank sends; no two ranks' bytes are alike."""
    return bytes((i * 31 + i // 251 + rank * 7 + 1) % 256 for i in range(BYTES))


def put_by_kernels(comm: pushgate.Comm, context: pushgate.Context, module: pushgate.Module) -> bytes:
    """Puts this rank's bytes into the other rank's memory; returns what came from there."""
    peer = 1 - comm.rank
    with comm.queue_pair(peer) as qp, context.alloc_host(BYTES) as inbox, qp.region(inbox) as region:
        keys = [int.from_bytes(key, "little") for key in comm.all_gather(region.key.to_bytes(4, "little"))]
        with context.alloc_device(BYTES) as data, context.alloc_device(8) as result, context.stream() as stream:
            data.write(payload(comm.rank))
            assert data.read(16, 4) == payload(comm.rank)[16:20]
            params = Params(qp.device_address, data.address, result.address, keys[peer], BYTES)
            with stream.launch(module, "put_to_peer", params, block=64, cooperating=True, needs=(data, result, qp)) as kernel:
                kernel.wait()
            qp.check()
            status = int.from_bytes(result.read(), "little")
            assert status == 0, pushgate.status_name(status)
        view = inbox.view()
        came = bytes(view)
        del view
        # No rank leaves while the other one needs it.
        comm.barrier()
        return came


def in_threads(works: "list[Callable[[], Any]]") -> "list[Any]":
    """Runs each in a thread of its own; raises what one of them raises."""
    results: "list[Any]" = [None] * len(works)
    errors: "list[BaseException]" = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert errors or not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
    return results


class Files(unittest.TestCase):
    def test_no_rust_is_here(self) -> None:
        for program in ("cargo", "rustc"):
            self.assertIsNone(shutil.which(program))
        # Not the checkout's folder, which has no libraries.
        self.assertIn("site-packages", pushgate.__file__)

    def test_all_files_are_there_and_the_command_runs(self) -> None:
        for file in (pushgate.plugin(), pushgate.nixl_plugin(), pushgate.library(), pushgate.command()):
            self.assertTrue(file.is_file(), file)
        self.assertTrue(os.stat(pushgate.command()).st_mode & stat.S_IXUSR)
        for header in ("pushgate.h", "device.cuh", "abi.h", "arch.cuh"):
            self.assertTrue((pushgate.include() / "pushgate" / header).is_file())
        script = Path(sys.executable).with_name("pushgate")
        by_script = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        self.assertRegex(by_script, r"^pushgate \d+\.\d+\.\d+")
        self.assertEqual(by_script.split()[1], pushgate.version().split()[0])
        # Exit status and messages are the program's own.
        wrong = subprocess.run([script, "--nonsense"], capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual((wrong.returncode, wrong.stdout), (2, ""))
        self.assertIn("--nonsense", wrong.stderr)

    def test_the_glibc_that_the_name_says_is_enough(self) -> None:
        for file in (pushgate.plugin(), pushgate.nixl_plugin(), pushgate.library(), pushgate.command()):
            versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+\.\d+)", file.read_bytes())}
            self.assertTrue(versions)
            self.assertLessEqual(max(versions), (2, 28), file)

    def test_programs_in_c_are_built_by_pkg_config_and_find_the_library(self) -> None:
        if shutil.which("pkg-config") is None or shutil.which("cc") is None:
            self.skipTest("no pkg-config or no cc")
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "pushgate"],
            env={**os.environ, "PKG_CONFIG_PATH": str(pushgate.pkgconfig())},
            capture_output=True, text=True, timeout=LIMIT, check=True,
        ).stdout.split()
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "a.c")
            source.write_text(
                "#include <stdio.h>\n#include <pushgate/pushgate.h>\n"
                'int main(void) { printf("%s", pushgate_version()); return pushgate_interface() != PUSHGATE_INTERFACE; }\n'
            )
            subprocess.run(["cc", source, *flags, "-o", source.with_suffix("")], timeout=LIMIT, check=True)
            said = subprocess.run([source.with_suffix("")], capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        self.assertEqual(said, pushgate.version())


class Module(unittest.TestCase):
    """``python -m pushgate``."""

    def run_module(self, *arguments: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "pushgate", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        self.assertEqual(ended.returncode, status, ended.stdout + ended.stderr)
        return ended.stdout if status == 0 else ended.stderr

    def test_env_prints_lines_for_a_shell_and_json_prints_the_same(self) -> None:
        variables = json.loads(self.run_module("env", "--json"))
        self.assertEqual(variables, pushgate.nccl_environment())
        self.assertEqual(variables["NCCL_NET"], "pushgate")
        self.assertEqual(variables["NCCL_NET_PLUGIN_REF_COUNT"], "1")
        lines = self.run_module("env")
        shell = lines + "".join(f'echo "${name}"\n' for name in variables)
        said = subprocess.run(["sh", "-euc", shell], capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        self.assertEqual(said.splitlines(), list(variables.values()))

    def test_path_prints_where_a_file_is(self) -> None:
        self.assertEqual(self.run_module("path", "plugin").strip(), str(pushgate.plugin()))
        self.assertIn("invalid choice", self.run_module("path", "nothing", status=2))
        self.assertIn("unrecognized arguments: --nonsense", self.run_module("env", "--nonsense", status=2))

    def test_check_is_nccl_check_with_this_plugin_and_its_arguments(self) -> None:
        said = self.run_module("check", "--iters", "no number", status=2)
        self.assertIn("no number", said)
        if Path("/dev/nvidiactl").exists():
            self.skipTest("this host has a GPU, so the check would run")
        said = self.run_module("check", "--nccl", "/nonexistent/libnccl.so.2", status=2)
        self.assertIn("nccl-check needs what this host lacks", said)
        self.assertIn("/nonexistent/libnccl.so.2", said)
        # The plugin is what this host does not lack.
        self.assertNotIn("the plugin", said)

    def test_nccls_caller_drives_the_plugin_that_env_names(self) -> None:
        caller = os.environ.get("NCCL_CALLER")
        if caller is None:
            self.skipTest("no NCCL_CALLER: nccl-caller of the repository's tests")
        plugin = json.loads(self.run_module("env", "--json"))["NCCL_NET_PLUGIN"]
        for scenario in ("rules", "traffic"):
            command = [caller, scenario, "--groups", "40", "--max", "100000", "--plugin", plugin]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, "PUSHGATE_QP": "local"})
            self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)


class Ranks(unittest.TestCase):
    def test_kernels_of_two_threads_put_into_each_others_memory(self) -> None:
        with pushgate.Context(CPU) as context, context.load_text("put.cu", SOURCE) as module:
            self.assertIs(context.device, pushgate.DeviceKind.CPU)
            self.assertEqual(context.setting("qp"), "local")
            self.assertTrue(context.describe())
            self.assertGreaterEqual(module.resident_blocks("put_to_peer", 64), 1)
            comms = context.local(2)
            came = in_threads([lambda c=c: put_by_kernels(c, context, module) for c in comms])  # type: ignore[misc]
            self.assertEqual([comm.rank for comm in comms], [0, 1])
            self.assertIs(comms[0].transport(1), pushgate.Transport.LOCAL)
            for comm in comms:
                comm.check()
                comm.close()
            self.assertEqual(came, [payload(1), payload(0)])
            self.assertGreater(sum(context.counters().values()), 0)

    def test_an_image_is_loaded_on_the_device_that_it_is_for_and_refused_on_others(self) -> None:
        with tempfile.TemporaryDirectory() as folder, pushgate.Context(CPU) as context:
            source, image = Path(folder, "put.cu"), Path(folder, "put.so")
            source.write_text(SOURCE)
            flags = ["-x", "c++", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-I", str(pushgate.include())]
            subprocess.run(["c++", *flags, "-o", str(image), str(source)], check=True)
            with context.load_image_file(image) as module:
                self.assertGreaterEqual(module.resident_blocks("put_to_peer", 64), 1)
            with context.load_image("put.so", image.read_bytes()) as module:
                self.assertGreaterEqual(module.resident_blocks("put_to_peer", 64), 1)
            with self.assertRaisesRegex(pushgate.Error, "is for PTX of sm_80, and the device `cpu` takes"):
                context.load_image("put.ptx", b".version 8.5\n.target sm_80\n")

    def processes(self, how: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                subprocess.Popen([sys.executable, __file__, how, str(rank), folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for rank in range(2)
            ]
            try:
                for rank, process in enumerate(ranks):
                    said, errors = process.communicate(timeout=LIMIT)
                    self.assertEqual((process.returncode, said), (0, f"rank {rank}: all bytes are right\n"), errors)
            finally:
                for process in ranks:
                    process.kill()
                    process.communicate()

    def test_kernels_of_two_processes_put_into_each_others_memory(self) -> None:
        self.processes("kernel")

    def test_two_processes_meet_by_an_id_and_send_from_the_host(self) -> None:
        self.processes("host")


class HostEnds(unittest.TestCase):
    def pair(self, work: "list[Callable[[pushgate.Comm, pushgate.Context], Any]]", settings: "Optional[dict[str, str]]" = None) -> "list[Any]":
        with pushgate.Context({**CPU, **(settings or {})}) as context:
            comms = context.local(2)
            results = in_threads([lambda c=c, w=w: w(c, context) for c, w in zip(comms, work)])  # type: ignore[misc]
            for comm in comms:
                comm.close()
            return results

    def test_messages_arrive_with_their_tags_from_any_buffer(self) -> None:
        parts = [b"bytes", bytearray(b"bytearray"), memoryview(b"a view of it")[2:6], memoryview(bytearray(b"0123456789"))[::2], b""]

        def send(comm: pushgate.Comm, _: pushgate.Context) -> None:
            with comm.queue_pair(1) as qp, qp.host_end() as end:
                for tag, part in enumerate(parts):
                    end.send(part, tag)
                end.flush()
                comm.barrier()

        def receive(comm: pushgate.Comm, _: pushgate.Context) -> "list[tuple[bytes, int]]":
            with comm.queue_pair(0) as qp, qp.host_end() as end:
                came = [end.recv(4096) for _ in parts]
                assert end.try_recv(4096) is None
                comm.barrier()
                return came

        self.assertEqual(self.pair([send, receive])[1], [(bytes(part), tag) for tag, part in enumerate(parts)])

    def test_puts_land_in_a_buffer_of_the_program_before_their_signal(self) -> None:
        def put(comm: pushgate.Comm, _: pushgate.Context) -> None:
            with comm.queue_pair(1) as qp, qp.host_end() as end:
                key = int.from_bytes(comm.all_gather(bytes(4))[1], "little")
                end.put(key, 16, b"behind sixteen", signal=3, value=7)
                end.signal(4, 9)
                end.flush()
                comm.barrier()

        def take(comm: pushgate.Comm, context: pushgate.Context) -> bytes:
            buffer = bytearray(4096)
            with comm.queue_pair(0) as qp, context.use_host(buffer) as memory, qp.region(memory) as region, qp.host_end() as end:
                comm.all_gather(region.key.to_bytes(4, "little"))
                end.wait_signal(3, 7)
                came = bytes(buffer[:32])
                end.wait_signal(4, 9)
                assert end.signal_value(4) == 9 and end.signal_value(5) == 0
                # Python would move the bytes under the peer.
                try:
                    buffer.extend(b"more")
                    raise AssertionError("a buffer that a peer may put into was resized")
                except BufferError:
                    pass
                comm.barrier()
            buffer.extend(b"more")
            return came

        self.assertEqual(self.pair([put, take])[1], bytes(16) + b"behind sixteen" + bytes(2))

    def test_no_credit_is_false_and_a_wait_ends_with_timed_out(self) -> None:
        # Not a barrier, which the short timeout would end.
        done = threading.Event()

        def send(comm: pushgate.Comm, _: pushgate.Context) -> int:
            try:
                with comm.queue_pair(1, receives=2, slots=4) as qp, qp.host_end() as end:
                    count = 0
                    while end.try_send(b"x"):
                        count += 1
                    try:
                        end.recv(64)
                        raise AssertionError("nothing was sent here")
                    except pushgate.TimedOut as error:
                        assert error.code is pushgate.ErrorCode.TIMED_OUT and isinstance(error, TimeoutError)
                    return count
            finally:
                done.set()

        def idle(comm: pushgate.Comm, _: pushgate.Context) -> None:
            with comm.queue_pair(0, receives=2, slots=4):
                assert done.wait(LIMIT)

        count = self.pair([send, idle], {"timeout": "2s"})[0]
        # Two are received, and four hold the slots.
        self.assertTrue(1 <= count <= 6, count)

    def test_a_message_longer_than_the_room_stays_the_next_one(self) -> None:
        def send(comm: pushgate.Comm, _: pushgate.Context) -> None:
            with comm.queue_pair(1) as qp, qp.host_end() as end:
                end.send(b"ten bytes.")
                comm.barrier()

        def receive(comm: pushgate.Comm, _: pushgate.Context) -> bytes:
            with comm.queue_pair(0) as qp, qp.host_end() as end:
                try:
                    end.recv(4)
                    raise AssertionError("a message was cut")
                except pushgate.Error as error:
                    assert error.code == pushgate.ErrorCode.CONFIG, error
                came = end.recv(64)[0]
                comm.barrier()
                return came

        self.assertEqual(self.pair([send, receive])[1], b"ten bytes.")

    def test_p7_an_abort_ends_the_peers_wait(self) -> None:
        def abort(comm: pushgate.Comm, _: pushgate.Context) -> None:
            with comm.queue_pair(1) as qp:
                comm.barrier()
                qp.abort()
                comm.barrier()

        def wait(comm: pushgate.Comm, _: pushgate.Context) -> None:
            with comm.queue_pair(0) as qp, qp.host_end() as end:
                comm.barrier()
                try:
                    end.recv(64)
                    raise AssertionError("nothing was sent here")
                except (pushgate.Aborted, pushgate.PeerLost):
                    pass
                comm.barrier()

        self.pair([abort, wait], {"timeout": "60s"})


class Errors(unittest.TestCase):
    def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(self) -> None:
        with self.assertRaises(pushgate.Error) as caught:
            pushgate.Context({"qp": "smoke"})
        error = caught.exception
        self.assertIs(error.code, pushgate.ErrorCode.CONFIG)
        for part in ("qp", "smoke", "expected"):
            self.assertIn(part, error.message)
        self.assertEqual(str(error), f"CONFIG: {error.message}")
        with self.assertRaises(pushgate.Error) as caught:
            pushgate.Context({"windowsize": 4096})
        self.assertIs(caught.exception.code, pushgate.ErrorCode.UNKNOWN_SETTING)

    def test_the_numbers_and_calls_are_those_of_the_header(self) -> None:
        header = (pushgate.include() / "pushgate" / "pushgate.h").read_text()
        numbers = {name: int(value) for name, value in re.findall(r"#define PUSHGATE_E_(\w+) (\d+)", header)}
        self.assertEqual(numbers.pop("OK"), 0)
        self.assertEqual(numbers, {code.name: code.value for code in pushgate.ErrorCode})
        from pushgate import _library

        self.assertIn(f"#define PUSHGATE_INTERFACE {_library.INTERFACE}\n", header)
        functions = header.split('extern "C" {')[1]
        functions = re.sub(r"/\*.*?\*/", "", functions, flags=re.DOTALL)
        declared = {m[1]: m[2] for m in re.finditer(r"pushgate_(\w+)\(([^)]*)\);", functions)}
        bound = {**_library._CALLS, **{name: arguments for name, (arguments, _) in _library._OTHERS.items()}}
        self.assertEqual(set(bound), set(declared))
        for name, arguments in bound.items():
            wanted = [a for a in declared[name].split(",") if a.strip() != "void"]
            self.assertEqual(len(arguments), len(wanted), name)
            for bound_type, text in zip(arguments, wanted):
                size = 8 if "*" in text or "size_t" in text or "uint64_t" in text or any(word in text for word in ("log_write", "pushgate_interrupt", "pushgate_all_gather")) else 4
                self.assertEqual(ctypes.sizeof(bound_type), size, f"{name}: {text}")

    def test_structures_are_laid_out_as_the_header_has_them(self) -> None:
        from pushgate import _library as c

        structures = {
            "pushgate_setting": c.Setting, "pushgate_context_options": c.ContextOptions, "pushgate_counter": c.Counter,
            "pushgate_unique_id": c.UniqueIdBytes, "pushgate_queue_pair_options": c.QueuePairOptions,
            "pushgate_launch_options": c.LaunchOptions,
        }  # fmt: skip
        if shutil.which("cc") is None:
            self.skipTest("no cc")
        lines = []
        expected = []
        for name, structure in structures.items():
            lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
            expected.append(ctypes.sizeof(structure))
            for field in structure._fields_:
                lines.append(f'printf("%zu\\n", offsetof(struct {name}, {field[0]}));')
                expected.append(getattr(structure, field[0]).offset)
        program = "#include <stddef.h>\n#include <stdio.h>\n#include <pushgate/pushgate.h>\nint main(void) {" + "".join(lines) + "return 0; }\n"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "a.c")
            source.write_text(program)
            subprocess.run(["cc", "-I", pushgate.include(), source, "-o", source.with_suffix("")], timeout=LIMIT, check=True)
            said = subprocess.run([source.with_suffix("")], capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        self.assertEqual([int(line) for line in said.split()], expected)

    def test_p8_numbers_and_texts_that_c_would_cut_are_refused(self) -> None:
        with pushgate.Context(CPU) as context:
            comms = context.local(2)
            for peer in (-1, 2**32 + 1):
                with self.assertRaises(ValueError):
                    comms[0].queue_pair(peer)
            with self.assertRaises(ValueError):
                context.alloc_host(-1)
            with self.assertRaises(ValueError):
                context.setting("qp\0x")
            with self.assertRaises(ValueError):
                context.connect_id(b"short", 0, 2)
            with self.assertRaises(BufferError):
                context.use_host(b"read-only")
            for comm in comms:
                comm.close()

    def test_ranks_meet_by_an_exchange_of_the_programs_own(self) -> None:
        table, both, came = [b""] * 2, threading.Barrier(2), [False] * 2

        def rank(number: int) -> None:
            def all_gather(data: bytes) -> list[bytes]:
                table[number] = data
                both.wait()
                return list(table)

            with pushgate.Context(CPU) as context, context.bootstrap(number, 2, all_gather) as comm:
                came[number] = comm.all_gather(bytes([number])) == [b"\0", b"\1"]
                comm.barrier()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(came, [True, True])

    def test_p8_an_exchange_of_the_program_that_fails_is_the_cause_of_the_error(self) -> None:
        def fails(_: bytes) -> list[bytes]:
            raise RuntimeError("no network")

        with pushgate.Context(CPU) as context:
            for all_gather, cause in ((fails, RuntimeError), (lambda data: [data], ValueError)):
                with self.assertRaises(pushgate.Error) as caught:
                    context.bootstrap(0, 2, all_gather)
                self.assertIs(caught.exception.code, pushgate.ErrorCode.IO)
                self.assertIsInstance(caught.exception.__cause__, cause)

    def test_p8_closed_handles_are_refused_and_closing_twice_does_nothing(self) -> None:
        context = pushgate.Context(CPU)
        memory = context.alloc_host(64)
        with self.assertRaises(pushgate.Busy):
            context.close()
        self.assertFalse(context.closed)
        memory.close()
        memory.close()
        with self.assertRaises(pushgate.Error) as caught:
            len(memory)
        self.assertIs(caught.exception.code, pushgate.ErrorCode.HANDLE)
        context.close()
        self.assertTrue(context.closed)

    def test_memory_is_not_freed_under_a_view(self) -> None:
        with pushgate.Context(CPU) as context:
            memory = context.alloc_host(64)
            part = memory.view()[8:16]
            part[0] = 7
            self.assertEqual(memory.view()[8], 7)
            with self.assertRaises(BufferError):
                memory.close()
            part.release()
            del part
            gc.collect()
            memory.close()
            with context.alloc_device(64) as device, self.assertRaises(BufferError):
                device.view()
            with context.alloc_device(64) as device:
                for offset, size in ((0, 65), (-1, None)):
                    with self.assertRaises(ValueError):
                        device.read(offset, size)
                with self.assertRaises(pushgate.Error):
                    device.write(bytes(65))

    def test_a_handle_that_is_dropped_open_warns_and_keeps_its_buffer(self) -> None:
        from pushgate import _api
        from pushgate._library import call

        with pushgate.Context(CPU) as context:
            buffer = bytearray(64)
            memory = context.use_host(buffer)
            handle = memory._handle
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                del memory
                gc.collect()
            self.assertTrue(any(issubclass(w.category, ResourceWarning) for w in caught))
            # The warning names the object, and so keeps it.
            caught.clear()
            gc.collect()
            with self.assertRaises(BufferError):
                buffer.append(1)
            call("memory_close", handle)
            _api._never_closed.clear()

    def test_a_sentence_belongs_to_the_thread_whose_call_failed(self) -> None:
        def fail(value: str) -> str:
            for _ in range(200):
                try:
                    pushgate.Context({"qp": value})
                except pushgate.Error as error:
                    assert f"`{value}`" in error.message, error
            return value

        in_threads([lambda v=v: fail(v) for v in ("smoke", "mirrors")])  # type: ignore[misc]


def rank_by_kernel(rank: int, folder: Path) -> None:
    with pushgate.Context(CPU) as context, context.load_text("put.cu", SOURCE) as module:
        with context.connect(f"python-test-{os.path.basename(folder)}", rank, 2) as comm:
            assert put_by_kernels(comm, context, module) == payload(1 - rank)


def rank_by_host(rank: int, folder: Path) -> None:
    file = folder / "id"
    with pushgate.Context(CPU) as context:
        if rank == 0:
            (folder / "new").write_bytes(context.unique_id())
            (folder / "new").rename(file)
        while not file.exists():
            threading.Event().wait(0.01)
        with context.connect_id(file.read_bytes(), rank, 2) as comm, comm.queue_pair(1 - rank) as qp, qp.host_end() as end:
            end.send(payload(rank)[:1000], rank)
            assert end.recv(1000) == (payload(1 - rank)[:1000], 1 - rank)
            comm.barrier()


class Interrupted(Exception):
    """What the handler of the tests' signal raises."""


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Stops a process; it has stopped when this returns."""
    process.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


class Interrupts(unittest.TestCase):
    """Calls that wait end when Python has an exception for their thread."""

    def setUp(self) -> None:
        def handler(_number: int, _frame: object) -> None:
            raise Interrupted

        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, handler))
        self.addCleanup(signal.setitimer, signal.ITIMER_REAL, 0)

    def ends(self, call: Callable[[], object]) -> str:
        """The call would wait for seconds, for the setting ``timeout``, LIMIT, or for ever. Returns what the library says of its end: an
        exception that came after the call has no cause."""
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with self.assertRaises(Interrupted) as raised:
            call()
        self.assertIsInstance(raised.exception.__cause__, pushgate.Error)
        return str(raised.exception.__cause__)

    def test_a_signal_ends_each_call_that_waits_for_a_peer(self) -> None:
        with pushgate.Context({**CPU, "timeout": f"{LIMIT}s"}) as context:
            self.ends(lambda: context.connect(f"interrupted-{os.getpid()}", 1, 2))
            self.ends(lambda: context.connect(f"interrupted-{os.getpid()}", 0, 2))
            calls: list[Callable[[pushgate.Comm], object]] = [
                lambda comm: comm.queue_pair(1), lambda comm: comm.barrier(), lambda comm: comm.all_gather(b"1"),
            ]
            for call in calls:
                comms = context.local(2)
                self.ends(lambda: call(comms[0]))
                for comm in comms:
                    comm.close()

    def test_a_signal_ends_each_call_of_a_host_end_that_waits(self) -> None:
        with pushgate.Context({**CPU, "timeout": f"{LIMIT}s"}) as context:
            comms = context.local(2)
            made: list[pushgate.QueuePair] = []
            other = threading.Thread(target=lambda: made.append(comms[1].queue_pair(0)))
            other.start()
            with comms[0].queue_pair(1) as qp, qp.host_end() as end:
                other.join()
                self.ends(lambda: end.recv(100))
                self.ends(lambda: end.wait_signal(0, 1))

                def send_without_credit() -> None:
                    while True:
                        end.send(b"x" * 100)

                self.ends(send_without_credit)
                # The queue pair is as good as before.
                with made[0].host_end() as peer:
                    self.assertEqual(peer.recv(100), (b"x" * 100, 0))
            for handle in (*made, *comms):
                handle.close()


    def test_a_signal_ends_calls_and_the_close_of_a_context_while_the_proxy_is_stopped(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder, "proxy")
            proxy = subprocess.Popen([pushgate.command(), "proxy", "--proxy-socket", at], stderr=subprocess.DEVNULL)
            self.addCleanup(proxy.wait, LIMIT)
            self.addCleanup(proxy.kill)
            deadline = time.monotonic() + LIMIT
            while not at.exists():
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            context = pushgate.Context({**CPU, "proxy": "process", "proxy-socket": str(at)})
            stop(proxy)
            self.ends(context.counters)
            # The handle stays open, and the proxy is as good as before.
            proxy.send_signal(signal.SIGCONT)
            context.counters()
            stop(proxy)
            self.assertIn("is it stopped?", self.ends(context.close))
            self.assertTrue(context.closed)

    def test_a_signal_ends_the_closes_of_a_queue_pair_and_a_communicator_whose_peer_is_stopped(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            rendezvous = "127.0.0.1:%d" % free.getsockname()[1]
        settings = {"device": "cpu", "qp": "tcp", "timeout": f"{LIMIT}s", "window-size": "64M", "rendezvous": rendezvous}
        other = "import os, signal, pushgate\n"
        other += f"comm = pushgate.Context({settings!r}).connect('interrupted', 1, 2)\n"
        other += "qp = comm.queue_pair(0)\nqp.host_end().recv(8)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
        rank = subprocess.Popen([sys.executable, "-c", other])
        self.addCleanup(rank.wait, LIMIT)
        self.addCleanup(rank.kill)
        with pushgate.Context(settings) as context:
            comm = context.connect("interrupted", 0, 2)
            qp = comm.queue_pair(1)
            with qp.host_end() as end:
                # This needs a receive of the rank, so its receives are known before it stops.
                end.send(b"first")
                self.assertTrue(os.WIFSTOPPED(os.waitpid(rank.pid, os.WUNTRACED)[1]))
                # More than the sockets hold.
                while end.try_send(b"x" * (1 << 20)):
                    pass
            # Each takes a pass of the engine, so that the sockets are full.
            for _ in range(1000):
                context.counters()
            self.assertIn("messages have not arrived there", self.ends(qp.close))
            self.assertTrue(qp.closed)
            self.ends(lambda: comm.all_gather(b"x" * (15 << 20)))
            self.assertIn("ranks [1] have not taken all", self.ends(comm.close))
            self.assertTrue(comm.closed)

    def test_a_signal_ends_the_close_of_a_kernel_which_stays_open(self) -> None:
        with pushgate.Context({**CPU, "timeout": f"{LIMIT}s"}) as context:
            comms = context.local(2)
            first, second = in_threads([lambda: comms[0].queue_pair(1), lambda: comms[1].queue_pair(0)])
            source = SOURCE.replace("put_signal<block>(qp, p.rkey, 0, reinterpret_cast<const void *>(p.data), p.bytes, 0, 1)", "status::ok")
            with context.load_text("waits.cu", source) as module, context.stream() as stream, context.alloc_device(8) as result:
                params = Params(first.device_address, 0, result.address, 0, 0)
                kernel = stream.launch(module, "put_to_peer", params, block=1, needs=(result, first))
                self.ends(kernel.close)
                self.assertFalse(kernel.closed)
                first.abort()
                kernel.close()
            for handle in (first, second, *comms):
                handle.close()


class Sentences(unittest.TestCase):
    """What errors say."""

    def test_a_handle_that_is_closed_and_one_that_is_in_use_are_named(self) -> None:
        context = pushgate.Context(CPU)
        stream = context.stream()
        with self.assertRaisesRegex(pushgate.Busy, "the last ones that are open: .*stream 0x"):
            context.close()
        stream.close()
        context.close()
        with self.assertRaisesRegex(pushgate.Error, "this Context is closed"):
            context.stream()

    def test_env_into_a_pipe_that_is_closed_says_nothing(self) -> None:
        script = f"{sys.executable} -m pushgate env | true"
        for _ in range(5):
            run = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=LIMIT)
            self.assertEqual(run.stderr, "")

    def test_a_refused_put_says_why_at_both_ends_and_a_later_send_fails(self) -> None:
        with pushgate.Context(CPU) as context:
            comms = context.local(2)
            made: list[pushgate.QueuePair] = []
            other = threading.Thread(target=lambda: made.append(comms[1].queue_pair(0)))
            other.start()
            with comms[0].queue_pair(1) as qp, qp.host_end() as end:
                other.join()
                end.put(77, 0, b"12345678")
                for ends in (qp, made[0]):
                    why = "no error"
                    deadline = time.monotonic() + LIMIT
                    while why == "no error" and time.monotonic() < deadline:
                        try:
                            ends.check()
                        except pushgate.Error as error:
                            why = str(error)
                    self.assertRegex(why, "rank 0 was refused: the peer has registered no region of this rkey")
                with self.assertRaisesRegex(pushgate.Error, "rkey"):
                    end.send(b"gone")
            for handle in (*made, *comms):
                handle.close()


if __name__ == "__main__":
    {"kernel": rank_by_kernel, "host": rank_by_host}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
    print(f"rank {sys.argv[2]}: all bytes are right")
