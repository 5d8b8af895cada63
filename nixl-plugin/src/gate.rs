//! A page that an agent shares with a peer of its host, by which it closes its memory to the peer's copies, and knows when none goes on.
//!
//! The peer finds the page as a descriptor of the agent's process, so it needs what copying needs: the right to trace that process. The
//! page's token shows that the process is the agent's, as this process numbers processes.

use std::fs::OpenOptions;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::memory::{HugePages, SharedMemory};
use pushgate_link::HostProcess;

use crate::wire::TOKEN;

const BYTES: usize = 4096;
/// Words of the page: whether it is open, how many batches go on, the token.
const OPEN: usize = 0;
const BUSY: usize = 1;
const SECRET: usize = 2;
/// A batch takes less than a millisecond; a peer that was stopped in one, longer.
const CLOSES: Duration = Duration::from_secs(1);

fn halves(token: &[u8; TOKEN]) -> [u64; 2] {
    [0, 8].map(|i| u64::from_ne_bytes(token[i..i + 8].try_into().expect("8 bytes")))
}

/// The owner's side.
pub struct Gate(SharedMemory);

impl Gate {
    /// A page that is open.
    pub fn new(token: &[u8; TOKEN]) -> Result<Gate, ShimError> {
        let memory = SharedMemory::builder("pushgate-nixl", BYTES).huge_pages(HugePages::Never).create()?;
        let words = memory.words(0, SECRET + 2);
        // Relaxed: nobody has the page yet.
        words
            .iter()
            .zip([1, 0].into_iter().chain(halves(token)))
            .for_each(|(w, v)| w.store(v, Ordering::Relaxed));
        Ok(Gate(memory))
    }

    /// Where the peer finds it: the number of a descriptor of this process.
    pub fn place(&self) -> u64 {
        use std::os::fd::AsRawFd;
        self.0.fd().as_raw_fd() as u64
    }

    /// Closes it, and waits until no batch goes on. False: one still does, after a limit.
    pub fn close(&self) -> bool {
        let words = self.0.words(0, 2);
        // With `Reached::enter` in one order: the peer sees that the page is closed, or this sees the peer's batch.
        words[OPEN].store(0, Ordering::SeqCst);
        let begin = Instant::now();
        while words[BUSY].load(Ordering::SeqCst) != 0 {
            if begin.elapsed() >= CLOSES {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }
}

/// The peer's side: a process whose memory this one may touch while the page is open.
pub struct Reached {
    process: HostProcess,
    page: SharedMemory,
}

/// A batch that goes on.
pub struct Open<'a>(&'a AtomicU64);

impl Reached {
    /// The process that has this number, if it has the page at this place.
    pub fn find(pid: u32, place: u64, token: &[u8; TOKEN]) -> Option<Reached> {
        let file = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/fd/{place}")).ok()?;
        let page = SharedMemory::from_fd(file.into(), BYTES).ok()?;
        let is_its = page.words(8 * SECRET, 2).iter().map(|w| w.load(Ordering::Relaxed)).eq(halves(token));
        is_its.then(|| Reached { process: HostProcess::of(pid), page })
    }

    /// The process.
    pub fn process(&self) -> &HostProcess {
        &self.process
    }

    /// Begins a batch. `None`: the peer has closed its memory.
    pub fn enter(&self) -> Option<Open<'_>> {
        let words = self.page.words(0, 2);
        words[BUSY].fetch_add(1, Ordering::SeqCst);
        let open = Open(&words[BUSY]);
        // See `Gate::close`.
        (words[OPEN].load(Ordering::SeqCst) == 1).then_some(open)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // Release: what the batch has written comes before.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_a_gate_that_is_closed_lets_no_batch_begin_and_waits_for_those_that_go_on() {
        let token = *b"0123456789abcdef";
        let gate = Gate::new(&token).unwrap();
        let own = std::process::id();
        assert!(Reached::find(own, gate.place(), b"another token...").is_none());
        assert!(
            Reached::find(own, 1 << 20, &token).is_none() && Reached::find(u32::MAX / 2, 0, &token).is_none()
        );
        let reached = Reached::find(own, gate.place(), &token).unwrap();
        drop(reached.enter().unwrap());
        let batch = reached.enter().unwrap();
        assert!(!gate.close(), "a batch goes on");
        drop(batch);
        assert!(gate.close());
        assert!(reached.enter().is_none());
        assert!(gate.close(), "what was refused goes on no more");
    }
}
