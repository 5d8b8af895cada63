//! The memory and the bells that a program hands over, checked where they enter (P8).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use pushgate_driver_shim::abi;
use pushgate_driver_shim::bell::{Bell, Ringer};
use pushgate_driver_shim::kmod::view_bytes;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::segment::{Geometry, Segment};
use pushgate_engine::endpoint::QpMemory;
use pushgate_engine::journal::{MOST_SESSION_BYTES, SESSION_BYTES};
use pushgate_engine::proxy::first_page;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::wire::{QP_FDS, Refusal};

/// The largest segments that the ABI knows: nothing larger is mapped.
const LARGEST: Geometry = Geometry {
    window_log: abi::PUSHGATE_MAX_UNITS_LOG,
    slots_log: abi::PUSHGATE_MAX_SLOTS_LOG,
    cq_log: abi::PUSHGATE_MAX_CQ_LOG,
    rx_log: abi::PUSHGATE_MAX_RX_LOG,
    link_log: abi::PUSHGATE_MAX_SLOTS_LOG,
    landing_log: abi::PUSHGATE_MAX_UNITS_LOG,
    signals: abi::PUSHGATE_MAX_SIGNALS,
    rank: 0,
};

/// What [`Request::AddQp`](crate::wire::Request::AddQp) brings, in order, and how large each may be.
const MEMORY: [(&str, usize); QP_FDS] = [
    ("work segment", LARGEST.bytes(Segment::Work)),
    ("control segment", LARGEST.bytes(Segment::Control)),
    ("link segment", LARGEST.bytes(Segment::Link)),
    ("peer's link segment", LARGEST.bytes(Segment::Link)),
    ("peer's window", LARGEST.window_bytes()),
];

/// The descriptors of a new queue pair. Their number and the sizes of their memory have been checked; nothing is
/// mapped yet.
#[derive(Debug)]
pub(super) struct QpDescriptors {
    memory: [OwnedFd; QP_FDS],
    sizes: [usize; QP_FDS],
    session: Option<OwnedFd>,
    session_bytes: usize,
    bell: Option<OwnedFd>,
    peer_bell: Option<OwnedFd>,
}

impl QpDescriptors {
    /// Takes the descriptors of a request. `there` says whether there is a session segment, a bell that the peer rings, and a
    /// ringer of the peer's bell.
    pub(super) fn take(mut fds: Vec<OwnedFd>, there: [bool; 3]) -> Result<Self, Refusal> {
        let (n, [session, bell, peer_bell]) = (fds.len(), there);
        let expected = QP_FDS + session as usize + bell as usize + peer_bell as usize;
        if n != expected {
            return Err(Refusal::Why(format!(
                "AddQp brings {expected} descriptors (those of its memory, and the session and the bells that it names), \
                 here are {n}"
            )));
        }
        let peer_bell = peer_bell.then(|| fds.pop()).flatten();
        let bell = bell.then(|| fds.pop()).flatten();
        let session = session.then(|| fds.pop()).flatten();
        let memory: [OwnedFd; QP_FDS] = exactly(fds, "AddQp", "those of its memory").map_err(Refusal::Why)?;
        let mut sizes = [0; QP_FDS];
        for ((size, fd), (name, largest)) in sizes.iter_mut().zip(&memory).zip(MEMORY) {
            *size = memory_size(fd).map_err(|why| Refusal::Why(format!("{name}: {why}")))?;
            if *size > largest {
                return Err(Refusal::Why(format!("{name}: {size} bytes, the largest has {largest}")));
            }
        }
        first_page("control", sizes[1])?;
        first_page("link", sizes[2])?;
        let mut session_bytes = 0;
        if let Some(fd) = &session {
            let size = memory_size(fd).map_err(|why| Refusal::Why(format!("session segment: {why}")))?;
            if !(SESSION_BYTES..=MOST_SESSION_BYTES).contains(&size) {
                let allowed = format!("{SESSION_BYTES} to {MOST_SESSION_BYTES}");
                return Err(Refusal::Why(format!("session segment: {size} bytes, expected {allowed}")));
            }
            session_bytes = size;
        }
        Ok(QpDescriptors { memory, sizes, session, session_bytes, bell, peer_bell })
    }

    /// Bytes that [`QpDescriptors::map`] and [`QpDescriptors::map_session`] will map.
    pub(super) fn bytes(&self) -> u64 {
        self.sizes.iter().chain([&self.session_bytes]).map(|size| *size as u64).sum()
    }

    /// Bytes of all segments that have rings, and of those among them that are links'.
    pub(super) fn rings(&self) -> (u64, u64) {
        let [work, control, link, peer_link, _] = self.sizes.map(|size| size as u64);
        (work + control + link + peer_link, link + peer_link)
    }

    /// Whether a program of user `uid` may go on with the session of the segment, if there is one: the memory was made by that
    /// user. Root's programs may go on with any.
    pub(super) fn check_session(&self, uid: u32) -> Result<(), Refusal> {
        let Some(fd) = &self.session else { return Ok(()) };
        let owner = fstat(fd).map_err(|e| Refusal::Why(format!("session segment: fstat: {e}")))?.st_uid;
        if owner == uid || uid == 0 {
            return Ok(());
        }
        Err(Refusal::Why(format!(
            "session segment: it is user {owner}'s, the program user {uid}'s: a session goes on under the user that began it"
        )))
    }

    /// Maps the session segment, if there is one.
    pub(super) fn map_session(&mut self) -> Result<Option<Arc<SharedMemory>>, Refusal> {
        let Some(fd) = self.session.take() else { return Ok(None) };
        let memory = SharedMemory::from_strangers_fd(fd, self.session_bytes);
        memory.map(|m| Some(Arc::new(m))).map_err(|e| Refusal::Why(format!("session segment: {e}")))
    }

    /// Maps the memory and checks that the bells are bells.
    pub(super) fn map(self) -> Result<QpMemory, Refusal> {
        let QpDescriptors { memory, sizes, bell, peer_bell, .. } = self;
        let wrong = |name| move |e: io::Error| Refusal::Why(format!("{name}: {e}"));
        let bell = bell.map(Bell::from_fd).transpose().map_err(wrong("bell"))?;
        let peer_bell = peer_bell.map(Ringer::from_fd).transpose().map_err(wrong("peer's bell"))?;
        let [work, control, link, peer_link, peer_window] = memory;
        let why = |i: usize| move |e| Refusal::Why(format!("{}: {e}", MEMORY[i].0));
        let readable =
            |fd, i: usize| ReadOnlyMemory::from_strangers_fd(fd, sizes[i]).map(Arc::new).map_err(why(i));
        let writable =
            |fd, i: usize| SharedMemory::from_strangers_fd(fd, sizes[i]).map(Arc::new).map_err(why(i));
        Ok(QpMemory {
            work: readable(work, 0)?,
            control: writable(control, 1)?,
            link: writable(link, 2)?,
            peer_link: readable(peer_link, 3)?,
            peer_window: readable(peer_window, 4)?,
            bell,
            peer_bell: peer_bell.map(Ringer::into_ring),
            // The server reads no memory of the peer's process: the program may read there, this process need not.
            peer_pid: None,
            in_program: false,
        })
    }
}

/// Maps the memory of a new region, which has `bytes` bytes, the program says. `room` says whether that number of bytes
/// may be mapped.
pub(super) fn map_region(
    fds: Vec<OwnedFd>,
    bytes: u64,
    room: impl FnOnce(u64) -> Result<(), Refusal>,
) -> Result<Arc<SharedMemory>, Refusal> {
    let [fd] = exactly(fds, "AddRegion", "that of the memory").map_err(Refusal::Why)?;
    let size = memory_size(&fd).map_err(|why| Refusal::Why(format!("region: {why}")))?;
    if size as u64 != bytes {
        return Err(Refusal::Why(format!("region: {bytes} bytes were named, its memory has {size}")));
    }
    room(bytes)?;
    let memory =
        SharedMemory::from_strangers_fd(fd, size).map_err(|e| Refusal::Why(format!("region: {e}")))?;
    Ok(Arc::new(memory))
}

/// The bell of a program's engine, which comes with Hello.
pub(super) fn engine_bell(fds: Vec<OwnedFd>) -> Result<Bell, String> {
    let [bell] = exactly(fds, "Hello", "the engine's doorbell")?;
    Bell::from_fd(bell).map_err(|e| format!("doorbell: {e}"))
}

/// The descriptors of a request that brings `N` of them; `what` says which.
fn exactly<const N: usize>(fds: Vec<OwnedFd>, request: &str, what: &str) -> Result<[OwnedFd; N], String> {
    fds.try_into()
        .map_err(|fds: Vec<_>| format!("{request} brings {N} descriptors ({what}), here are {}", fds.len()))
}

/// The size of memory that a program hands over. The size is sealed, so it is final.
fn memory_size(fd: &OwnedFd) -> Result<usize, String> {
    // The seals are read first: what has no seals is not memory, and asking a file of some file systems for its size
    // could take as long as the program likes. A staging area of the kernel module has a view in place of seals.
    let seals = match fcntl_get_seals(fd) {
        Ok(seals) => seals,
        Err(e) => {
            let bytes = view_bytes(fd.as_fd());
            let none =
                || format!("descriptor is no memory that can be sealed ({e}), and no view of a staging area");
            return bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(none);
        }
    };
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err("its size is not sealed: hand over a memfd with F_SEAL_SHRINK and F_SEAL_GROW".into());
    }
    let size = fstat(fd).map_err(|e| format!("fstat: {e}"))?.st_size;
    usize::try_from(size).map_err(|_| format!("{size} bytes"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use pushgate_driver_shim::eventfd::EventFd;
    use pushgate_driver_shim::memory::HugePages;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    fn sealed(bytes: usize) -> OwnedFd {
        let memory = SharedMemory::builder("test", bytes).huge_pages(HugePages::Never).create().unwrap();
        memory.fd().try_clone_to_owned().unwrap()
    }

    fn sentence<T: std::fmt::Debug>(refused: Result<T, Refusal>) -> String {
        match refused {
            Err(Refusal::Why(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn p8_a_queue_pair_with_a_descriptor_too_few_or_too_many_is_refused() {
        for (n, there) in [
            (4, [false, false, false]),
            (6, [false, false, false]),
            (5, [false, true, false]),
            (6, [true, true, false]),
            (7, [true, true, true]),
        ] {
            let fds = (0..n).map(|_| sealed(4096)).collect();
            let why = sentence(QpDescriptors::take(fds, there));
            assert!(why.ends_with(&format!("here are {n}")), "{why}");
        }
        let whole = QpDescriptors::take((0..5).map(|_| sealed(4096)).collect(), [false; 3]).unwrap();
        assert_eq!(whole.bytes(), 5 * 4096);
        for bytes in [4095, MOST_SESSION_BYTES + 4096] {
            let mut fds: Vec<_> = (0..5).map(|_| sealed(4096)).collect();
            fds.push(sealed(bytes));
            let why = sentence(QpDescriptors::take(fds, [true, false, false]));
            assert!(why.starts_with(&format!("session segment: {bytes} bytes")), "{why}");
        }
    }

    #[test]
    fn p8_memory_that_is_no_memory_or_has_no_room_for_a_header_is_refused_by_name() {
        for (at, (name, _)) in MEMORY.iter().enumerate() {
            let mut fds: Vec<_> = (0..5).map(|_| sealed(4096)).collect();
            fds[at] = EventFd::new().unwrap().as_fd().try_clone_to_owned().unwrap();
            let why = sentence(QpDescriptors::take(fds, [false; 3]));
            assert!(why.starts_with(name), "{why}");
        }
        for at in [1, 2] {
            let mut fds: Vec<_> = (0..5).map(|_| sealed(4096)).collect();
            fds[at] = sealed(100);
            let why = sentence(QpDescriptors::take(fds, [false; 3]));
            assert!(why.contains("100 bytes hold no header"), "{why}");
        }
    }

    #[test]
    fn p8_memory_with_holes_is_refused_by_name_and_stays_as_it_is() {
        const BYTES: usize = 1 << 20;
        let sparse = || {
            let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&fd, BYTES as u64).unwrap();
            fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
            fd
        };
        for (at, name) in [(0, "work segment"), (4, "peer's window")] {
            let mut fds: Vec<_> = (0..5).map(|_| sealed(4096)).collect();
            let kept = sparse();
            fds[at] = kept.try_clone().unwrap();
            let why = sentence(QpDescriptors::take(fds, [false; 3]).unwrap().map().map(drop));
            assert!(why.starts_with(&format!("{name}: the memory has holes")), "{why}");
            assert_eq!(fstat(&kept).unwrap().st_blocks, 0);
        }
        let kept = sparse();
        let why = sentence(map_region(vec![kept.try_clone().unwrap()], BYTES as u64, |_| Ok(())));
        assert!(why.starts_with("region: the memory has holes: 0 of its 1048576 bytes"), "{why}");
        assert_eq!(fstat(&kept).unwrap().st_blocks, 0);
    }

    #[test]
    fn p8_a_regions_memory_is_mapped_only_in_its_own_size_and_where_there_is_room() {
        let room = |_| Ok(());
        let full = |bytes| Err(Refusal::Why(format!("no room for {bytes}")));
        assert_eq!(map_region(vec![sealed(100)], 100, room).unwrap().len(), 100);
        assert!(sentence(map_region(vec![sealed(100)], 101, room)).contains("its memory has 100"));
        assert_eq!(sentence(map_region(vec![sealed(100)], 100, full)), "no room for 100");
        assert!(sentence(map_region(vec![], 100, room)).ends_with("here are 0"));
    }
}
