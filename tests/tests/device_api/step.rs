//! A step of a script: a call of the device API, as tests/kernels/script.cu plays it.

use std::time::Duration;

use pushgate::abi;

/// Mirrors `struct step` of script.cu. The numbers of steps and flags are those of script.cu.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    pub what: u64,
    pub flags: u64,
    pub a: u64,
    pub b: u64,
    pub c: u64,
    pub d: u64,
    pub wr_id: u64,
    pub lkey: u64,
    pub local: u64,
    pub rkey: u64,
    pub remote: u64,
    pub signal: u64,
    pub value: u64,
}

const TRY: u64 = 1;
const SIGNALED: u64 = 2;
const REGION: u64 = 4;
const WITH_SIGNAL: u64 = 8;
const CANCEL: u64 = 16;

impl Step {
    pub fn words(&self) -> [u64; 14] {
        let s = self;
        [
            s.what, s.flags, s.a, s.b, s.c, s.d, s.wr_id, s.lkey, s.local, s.rkey, s.remote, s.signal,
            s.value, 0,
        ]
    }

    pub fn post(opcode: u32, payload: u64, length: usize) -> Step {
        Step { a: opcode.into(), b: payload, c: length as u64, ..Step::default() }
    }

    pub fn send(payload: u64, length: usize, tag: u32) -> Step {
        Step { d: tag.into(), ..Step::post(abi::PUSHGATE_OP_SEND, payload, length) }
    }

    pub fn put(rkey: u32, remote: u64, payload: u64, length: usize) -> Step {
        Step { rkey: rkey.into(), remote, ..Step::post(abi::PUSHGATE_OP_PUT, payload, length) }
    }

    pub fn and_signal(self, signal: u64, value: u64) -> Step {
        Step { signal, value, flags: self.flags | WITH_SIGNAL, ..self }
    }

    pub fn signal(signal: u64, value: u64) -> Step {
        Step { signal, value, ..Step::post(abi::PUSHGATE_OP_SIGNAL, 0, 0) }
    }

    pub fn nop() -> Step {
        Step::post(abi::PUSHGATE_OP_NOP, 0, 0)
    }

    pub fn signaled(self, wr_id: u32) -> Step {
        Step { wr_id: wr_id.into(), flags: self.flags | SIGNALED, ..self }
    }

    pub fn trying(self) -> Step {
        Step { flags: self.flags | TRY, ..self }
    }

    pub fn out_of_region(self, lkey: u32, local: u64) -> Step {
        Step { lkey: lkey.into(), local, flags: self.flags | REGION, ..self }
    }

    pub fn cancelled(self) -> Step {
        Step { flags: self.flags | CANCEL, ..self }
    }

    /// Repeats the step as long as there is room.
    pub fn filling(self) -> Step {
        Step { what: 11, ..self }
    }

    pub fn call(what: u64, args: [u64; 4]) -> Step {
        let [a, b, c, d] = args;
        Step { what, a, b, c, d, ..Step::default() }
    }

    pub fn recv(to: u64, room: usize) -> Step {
        Step::call(1, [to, room as u64, 0, 0])
    }

    pub fn release(messages: u64) -> Step {
        Step::call(2, [messages, 0, 0, 0])
    }

    pub fn wait_signal(signal: u64, value: u64) -> Step {
        Step::call(3, [signal, value, 0, 0])
    }

    pub fn flush() -> Step {
        Step::call(4, [0; 4])
    }

    pub fn poll(at_most: Duration) -> Step {
        Step::call(5, [at_most.as_nanos() as u64, 0, 0, 0])
    }

    pub fn post_recv(lkey: u32, offset: u64, length: usize, tag: u32) -> Step {
        Step::call(6, [lkey.into(), offset, length as u64, tag.into()])
    }

    pub fn reserve(messages: u64, bytes: u64) -> Step {
        Step::call(7, [messages, bytes, 0, 0])
    }

    pub fn raw(words: u64, slot: u64) -> Step {
        Step::call(8, [words, slot, 0, 0])
    }

    pub fn consumed(count: u64) -> Step {
        Step::call(9, [count, 0, 0, 0])
    }

    pub fn batch(messages: u64, bytes: usize, tag: u32, from: u64) -> Step {
        Step::call(10, [messages, bytes as u64, tag.into(), from])
    }

    pub fn copy(to: u64, from: u64, bytes: usize) -> Step {
        Step::call(12, [to, from, bytes as u64, 0])
    }
}
