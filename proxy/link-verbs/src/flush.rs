//! Seeing to it that what RDMA writes bring into a GPU's memory is there before the GPU is
//! told of it (P3): a small read of that memory by the same RDMA device.
//!
//! Payload goes to the GPU's memory and its record to ours, by two ways over PCIe, and
//! nothing orders writes to two places: a program that has seen the record may tell the GPU of a
//! payload that is still on its way. A read after the record settles that. A device's read
//! request does not overtake the writes that it made before (PCI Express Base
//! Specification, "Ordering and Receive Buffer Flow Control": a non-posted request must
//! not pass a posted one), so the answer comes out of memory that has them. Any word of the
//! GPU's memory serves, for the order is that of the way. NCCL's own InfiniBand transport
//! does the same (`ncclIbIflush`, src/transport/net_ib.cc).
//!
//! The read goes over a queue pair that is connected to itself, in a protection domain of
//! its own, whose keys nobody else has (P8).

use std::sync::Arc;

use pushgate_driver_shim::memory::SharedMemory;
use pushgate_link::memory::Keep;
use pushgate_link::region::Exported;
use pushgate_rdma_core_sys as sys;

use super::VerbsError;
use super::config::{Config, chosen_gid};
use super::device::Device;
use super::objects::{Allocate, Cq, Mr, Pd, Rc};
use super::states::{PeerQp, States, first_packet};

/// Reads that may be under way.
const DEPTH: u64 = 16;
/// Bytes that one reads.
const BYTES: u32 = 8;

/// Memory of a device, at least eight bytes of it, that may be read at any time.
pub struct Word {
    /// The word's address on the device.
    pub address: u64,
    /// Bytes from there that are registered.
    pub bytes: usize,
    /// How RDMA devices reach it.
    pub exported: Exported,
    /// What keeps it allocated.
    pub keep: Keep,
}

/// Numbers of reads: which is the next, which of them are under way, which stands for a
/// wish. Without I/O.
#[derive(Debug, Default, PartialEq, Eq)]
struct Numbers {
    posted: u64,
    done: u64,
    wanted: u64,
}

impl Numbers {
    /// The read that stands for a wish made now: one that is not posted yet. Wishes for which
    /// there is no room share the next.
    fn wish(&mut self) -> u64 {
        self.wanted = self.posted + 1;
        self.wanted
    }

    /// The number of the read that is to be posted now, if there is one.
    fn due(&self) -> Option<u64> {
        (self.posted < self.wanted && self.posted - self.done < DEPTH).then_some(self.posted + 1)
    }
}

/// Completes what RDMA writes bring into a GPU's memory, by small reads of that memory through the
/// same RDMA device (P3). Belongs to one thread at a time.
pub struct Flusher {
    // The queue pair goes before registrations, those before their memory.
    rc: Rc,
    from: Mr,
    into: Mr,
    at: u64,
    target: SharedMemory,
    numbers: Numbers,
    /// Why reads have no end any more.
    broken: Option<String>,
    _keep: Keep,
}

impl Flusher {
    /// Registers `word` and makes the queue pair.
    ///
    /// # Safety
    /// `word.keep` keeps the memory allocated, and `word.exported` is of it.
    pub unsafe fn new(
        device: &Arc<Device>,
        config: &Config,
        word: Word,
        allocate: &mut Allocate<'_>,
    ) -> Result<Self, VerbsError> {
        use sys::ibv_access_flags as access;
        let pd = Pd::new(device)?;
        let read = access::IBV_ACCESS_REMOTE_READ.0;
        // SAFETY: the caller's promise; it is kept beside its registration.
        let from = unsafe { Mr::of_device(&pd, word.address, word.bytes, &word.exported, read)? };
        let target = allocate("flush", pushgate_driver_shim::abi::PUSHGATE_PAGE as usize)?;
        let remote = if device.kind.read_into_remote { access::IBV_ACCESS_REMOTE_WRITE.0 } else { 0 };
        let local = access::IBV_ACCESS_LOCAL_WRITE.0 | remote;
        // SAFETY: the mapping is kept beside its registration, and nobody looks at it.
        let into = unsafe {
            Mr::new(&pd, "what is read back", target.as_ptr().as_ptr() as usize, target.len(), local)?
        };
        let cq = Cq::new(device, DEPTH as u32 + 1, false)?;
        let rc = Rc::new(&pd, cq, DEPTH as u32, 1, &[0])?;
        let flusher = Flusher {
            rc,
            from,
            into,
            at: word.address,
            target,
            numbers: Numbers::default(),
            broken: None,
            _keep: word.keep,
        };
        flusher.connect(config)?;
        Ok(flusher)
    }

    /// With itself.
    fn connect(&self, config: &Config) -> Result<(), VerbsError> {
        let device = &self.rc.pd.device;
        let gid = &chosen_gid(device, config)?;
        let psn = first_packet();
        let states = States { rc: &self.rc, name: "the queue pair that flushes", config, gid, psn };
        states.initialise(sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0)?;
        let itself = PeerQp { number: self.rc.number, psn, gid: gid.gid, lid: self.rc.port.lid };
        // A packet of each read, of any size that the port takes.
        states.ready_to_receive(&itself, sys::ibv_mtu::IBV_MTU_256)?;
        states.ready_to_send()
    }

    /// Begins a flush of all that RDMA writes had brought when their records were seen. The
    /// number is for [`Flusher::done`].
    pub fn begin(&mut self) -> Result<u64, VerbsError> {
        let number = self.numbers.wish();
        self.post()?;
        Ok(number)
    }

    fn post(&mut self) -> Result<(), VerbsError> {
        let Some(number) = self.numbers.due() else { return Ok(()) };
        let mut to =
            sys::ibv_sge { addr: self.target.as_ptr().as_ptr() as u64, length: BYTES, lkey: self.into.lkey };
        // SAFETY: plain data, for which zeroes are "nothing".
        let mut wr: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = number;
        wr.sg_list = &mut to;
        wr.num_sge = 1;
        wr.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_READ;
        wr.send_flags = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
        wr.wr.rdma.remote_addr = self.at;
        wr.wr.rdma.rkey = self.from.rkey;
        // SAFETY: one request; both stretches are registered as long as the queue pair is
        // there, and nobody minds what is written into the second.
        unsafe { self.rc.post_send(&mut wr) }.map_err(|error| self.failed("posting a flush", error))?;
        self.numbers.posted = number;
        Ok(())
    }

    /// Whether a flush is complete. Numbers may be asked for in any order, and again.
    pub fn done(&mut self, number: u64) -> Result<bool, VerbsError> {
        let mut completions = [sys::ibv_wc::default(); DEPTH as usize];
        let n = self.rc.cq.poll(&mut completions).map_err(|e| self.failed("polling for a flush", e))?;
        for wc in &completions[..n] {
            if wc.status == sys::ibv_wc_status::IBV_WC_SUCCESS {
                self.numbers.done = self.numbers.done.max(wc.wr_id);
            } else if self.broken.is_none() {
                // SAFETY: the library's own text for any value.
                let text =
                    unsafe { std::ffi::CStr::from_ptr(self.rc.pd.device.verbs.ibv_wc_status_str(wc.status)) };
                self.broken = Some(text.to_string_lossy().into_owned());
            }
        }
        // P7: there a read may have no end, which elsewhere retries bound.
        if self.broken.is_none() && self.rc.pd.device.is_fatal() {
            self.broken = Some("the device has failed".into());
        }
        let done = self.numbers.done >= number;
        match &self.broken {
            None => self.post()?,
            Some(_) if done => {}
            // Whichever is asked for: the read that failed has taken those after it along.
            Some(why) => {
                let error = std::io::Error::other(why.clone());
                return Err(self.failed("reading the GPU's memory back", error));
            }
        }
        Ok(done)
    }

    #[cold]
    fn failed(&self, what: &str, error: std::io::Error) -> VerbsError {
        let what = format!("{what} over {}", self.rc.pd.device.name());
        VerbsError::Call { what, error, remedy: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::mock::{self, Mock};
    use super::*;

    const WORD: u64 = 0x7f00_0000_0000;

    fn flusher(mock: &Mock) -> Result<Flusher, VerbsError> {
        let word = Word { address: WORD, bytes: 4096, exported: Exported::Address, keep: Arc::new(()) };
        // SAFETY: the mock touches no memory.
        unsafe { Flusher::new(&mock.device, &Config::default(), word, &mut mock::allocate) }
    }

    fn posted() -> Vec<Vec<u64>> {
        mock::take().into_iter().filter(|(name, _)| *name == "post_send").map(|(_, with)| with).collect()
    }

    const READ: u64 = sys::ibv_wr_opcode::IBV_WR_RDMA_READ.0 as u64;
    const SUCCESS: sys::ibv_wc_status = sys::ibv_wc_status::IBV_WC_SUCCESS;

    #[test]
    fn p3_a_flush_is_done_when_its_read_is() {
        let mock = Mock::new(0);
        let mut flusher = flusher(&mock).unwrap();
        assert_eq!(posted(), [[0; 0]; 0], "nobody asked");
        let [first, second] = [flusher.begin().unwrap(), flusher.begin().unwrap()];
        assert_eq!(posted(), [1, 2].map(|id| vec![id, READ, WORD, mock::RKEY.into()]));
        assert!(!flusher.done(first).unwrap());
        mock::complete(1, SUCCESS);
        assert!(!flusher.done(second).unwrap() && flusher.done(first).unwrap());
        mock::complete(2, SUCCESS);
        assert!(flusher.done(second).unwrap());
    }

    #[test]
    fn p7_a_flush_ends_with_its_device() {
        let mock = Mock::new(0);
        let mut flusher = flusher(&mock).unwrap();
        let [first, second] = [flusher.begin().unwrap(), flusher.begin().unwrap()];
        // Others are no end of it.
        mock::say(sys::ibv_event_type::IBV_EVENT_PORT_ERR);
        mock.device.take_events(|_| {});
        assert!(!flusher.done(first).unwrap());
        mock::complete(1, SUCCESS);
        mock::say(sys::ibv_event_type::IBV_EVENT_DEVICE_FATAL);
        mock.device.take_events(|_| {});
        // What is complete is so.
        assert!(flusher.done(first).unwrap());
        // The device will never say more of the other.
        let why = flusher.done(second).unwrap_err().to_string();
        assert!(why.contains("reading the GPU's memory back over mock0: the device has failed"), "{why}");
    }

    #[test]
    fn p7_a_read_that_failed_ends_the_flush() {
        let mock = Mock::new(0);
        let mut flusher = flusher(&mock).unwrap();
        let numbers = [(); 3].map(|()| flusher.begin().unwrap());
        mock::complete(1, SUCCESS);
        mock::complete(2, sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
        mock::complete(3, sys::ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        // Whichever is asked for first takes all of their ends.
        for number in [2, 1, 2, 0].map(|i| numbers[i]) {
            match flusher.done(number) {
                Ok(done) => assert!(done && number == 1, "{number}"),
                Err(why) => {
                    let why = why.to_string();
                    assert!(why.contains("reading the GPU's memory back over mock0: a status"), "{why}");
                    assert_ne!(number, 1);
                }
            }
        }
    }

    #[test]
    fn its_queue_pair_is_connected_to_itself_and_only_read_through() {
        let mock = Mock::new(0);
        drop(flusher(&mock).unwrap());
        let calls = mock::take();
        let moves: Vec<_> = calls.iter().filter(|(name, _)| *name == "modify_qp").collect();
        let [init, receive, send] = &moves[..] else { panic!("{moves:?}") };
        // State, access, peer, its first packet, our first, RNR retries.
        assert_eq!(init.1[..2], [1, sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0.into()]);
        assert_eq!((receive.1[0], receive.1[2], send.1[0]), (2, mock::QP.into(), 3));
        assert_eq!(receive.1[3], send.1[4], "its own first packet");
        let access: Vec<u64> =
            calls.iter().filter(|(n, _)| *n == "reg_mr").map(|(_, with)| with[2]).collect();
        assert_eq!(access, [4, 1], "the GPU's word is read by others, ours written by us");

        mock::refuse("modify_qp");
        let why = flusher(&mock).err().unwrap().to_string();
        assert!(why.contains("moving the queue pair that flushes to INIT"), "{why}");
    }

    #[test]
    fn p3_a_flush_is_a_read_that_is_posted_after_the_wish() {
        let mut n = Numbers::default();
        assert_eq!(n.due(), None, "nobody asked");
        for i in 1..=DEPTH {
            assert_eq!((n.wish(), n.due()), (i, Some(i)));
            n.posted = i;
            assert_eq!(n.due(), None, "one read for each");
        }
        // No room: these share the next one, which is posted when there is.
        assert_eq!((n.wish(), n.wish(), n.due()), (DEPTH + 1, DEPTH + 1, None));
        n.done = 1;
        assert_eq!(n.due(), Some(DEPTH + 1));
        n.posted = DEPTH + 1;
        assert_eq!((n.due(), n.wish()), (None, DEPTH + 2));
    }
}
