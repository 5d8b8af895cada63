//! The memory that a client and the copier share: rings of commands, how far each has come, and the copier's state.
//!
//! The client makes the memory. Each word has one writer:
//!
//! | word | writer | says |
//! | --- | --- | --- |
//! | `tail` of a ring | client | commands posted so far |
//! | `mark` of a ring | copier | commands complete so far |
//! | `asleep` | copier | 1: ring the bell after a post |
//! | `state`, text | copier | whether it copies, and why not |
//!
//! P8: the copier reads each word of a command once, into a copy of its own, and checks the copy. It keeps its cursors to itself,
//! and what a client writes elsewhere in the memory can only spoil the client's own copies.

use std::sync::atomic::{AtomicU64, Ordering};

use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::memory::SharedMemory;

/// Rings of a client: one for each direction, each with a stream of its own.
pub(super) const RINGS: usize = 2;
/// Commands that a ring holds.
pub(super) const SLOTS: u64 = 256;
/// Words of one writer have a pair of cache lines to themselves.
const LINE: usize = 128;
const PAGE: usize = 4096;

const TAILS: usize = 0;
const COPIERS: usize = PAGE;
const ASLEEP: usize = COPIERS;
const STATE: usize = COPIERS + LINE;
const TEXT: usize = COPIERS + 2 * LINE;
/// Bytes of the sentence that says why the copier does not copy.
const TEXT_BYTES: usize = 1024;
const MARKS: usize = 2 * PAGE;
const COMMANDS: usize = 3 * PAGE;
/// Bytes of a command's slot: a cache line.
const SLOT: usize = 64;
/// Words of a command.
const WORDS: usize = 5;
/// Where the client's own part begins, which short payloads pass through.
pub(super) const ASIDE: usize = COMMANDS + RINGS * SLOTS as usize * SLOT;

/// What `state` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The copier copies.
    Running,
    /// It has stopped for this client: the text says why.
    Stopped,
}

/// A copy, as a client posts it: between `length` bytes of a device memory and of a host memory that it has registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// From the device to the host.
    pub out: bool,
    /// The keys of both memories.
    pub device: u32,
    pub host: u32,
    pub device_offset: u64,
    pub host_offset: u64,
    pub length: u64,
}

impl Command {
    fn to_words(self) -> [u64; WORDS] {
        let keys = u64::from(self.device) << 32 | u64::from(self.host);
        [u64::from(self.out), keys, self.device_offset, self.host_offset, self.length]
    }

    fn of_words([out, keys, device_offset, host_offset, length]: [u64; WORDS]) -> Self {
        let (device, host) = ((keys >> 32) as u32, keys as u32);
        Command { out: out != 0, device, host, device_offset, host_offset, length }
    }
}

/// The shared memory, by its words.
pub(super) struct Layout<'a>(pub &'a SharedMemory);

impl<'a> Layout<'a> {
    /// Bytes of a memory whose client's part has `aside` bytes.
    pub const fn bytes(aside: usize) -> usize {
        ASIDE + aside
    }

    fn word(&self, at: usize) -> &'a AtomicU64 {
        &self.0.words(at, 1)[0]
    }

    /// Commands that the client has posted to a ring.
    pub fn tail(&self, ring: usize) -> &'a AtomicU64 {
        self.word(TAILS + ring * LINE)
    }

    /// Commands of a ring that are complete.
    pub fn mark(&self, ring: usize) -> &'a AtomicU64 {
        self.word(MARKS + ring * LINE)
    }

    /// Not 0: the copier sleeps, and a client that has posted rings.
    pub fn asleep(&self) -> &'a AtomicU64 {
        self.word(ASLEEP)
    }

    fn slot(&self, ring: usize, number: u64) -> &'a [AtomicU64] {
        self.0.words(COMMANDS + (ring * SLOTS as usize + (number % SLOTS) as usize) * SLOT, WORDS)
    }

    /// Writes command `number` of a ring. `tail` publishes it.
    pub fn write(&self, ring: usize, number: u64, command: Command) {
        for (word, value) in self.slot(ring, number).iter().zip(command.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Reads command `number` of a ring: each word once.
    pub fn read(&self, ring: usize, number: u64) -> Command {
        let words = self.slot(ring, number);
        Command::of_words(std::array::from_fn(|n| words[n].load(Ordering::Relaxed)))
    }

    /// Says why the copier copies no more for this client.
    pub fn stop(&self, why: &str) {
        let mut bytes = [0; TEXT_BYTES];
        let why = shortened(why, TEXT_BYTES - 1);
        bytes[..why.len()].copy_from_slice(why.as_bytes());
        for (word, eight) in self.0.words(TEXT, TEXT_BYTES / 8).iter().zip(bytes.chunks_exact(8)) {
            word.store(u64::from_ne_bytes(eight.try_into().expect("eight bytes")), Ordering::Relaxed);
        }
        // Release: a client that sees the state sees the text.
        self.word(STATE).store(1, Ordering::Release);
    }

    /// Whether the copier copies, and if not, why.
    pub fn state(&self) -> (State, String) {
        // Acquire: pairs with the release in `stop`, so that the text is the state's.
        if self.word(STATE).load(Ordering::Acquire) == 0 {
            return (State::Running, String::new());
        }
        let words = self.0.words(TEXT, TEXT_BYTES / 8);
        let bytes: Vec<u8> = words
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
            .take_while(|b| *b != 0)
            .collect();
        (State::Stopped, Foreign::sentence(String::from_utf8_lossy(&bytes)).to_string())
    }
}

/// The beginning of a text, at most `most` bytes of it.
pub(super) fn shortened(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_read_as_it_was_written_and_a_text_as_long_as_there_is_room() {
        let memory = SharedMemory::builder("test", Layout::bytes(0)).create().unwrap();
        let layout = Layout(&memory);
        let (device, host) = (u32::MAX - 1, 7);
        let command =
            Command { out: true, device, host, device_offset: 1 << 40, host_offset: 3, length: 1 << 31 };
        for ring in 0..RINGS {
            layout.write(ring, SLOTS + 3, command);
            assert_eq!(layout.read(ring, 3), command);
        }
        assert_eq!(layout.state(), (State::Running, String::new()));
        layout.stop("the GPU has failed");
        assert_eq!(layout.state(), (State::Stopped, "the GPU has failed".to_owned()));
        layout.stop(&"ä".repeat(TEXT_BYTES));
        assert_eq!(layout.state().1, "ä".repeat((TEXT_BYTES - 1) / 2));
        // The parts do not overlap.
        const { assert!(RINGS * LINE <= PAGE && TEXT + TEXT_BYTES <= MARKS && MARKS + RINGS * LINE <= COMMANDS) };
    }
}
