//! The layout of work, control and link segments, and the header that describes it. `abi.h` shows
//! both.

use std::fmt;
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ShimError;
use crate::abi;
use crate::memory::SharedMemory;
use crate::versions;

const PAGE: usize = abi::PUSHGATE_PAGE as usize;
const RECORD: usize = abi::PUSHGATE_RECORD_BYTES as usize;
const CQE: usize = abi::PUSHGATE_CQE_WORDS as usize * 8;
const RECV: usize = abi::PUSHGATE_RECV_WORDS as usize * 8;
const UNIT: usize = abi::PUSHGATE_UNIT as usize;

const HEADER_WORDS: usize = size_of::<abi::pushgate_header>() / 8;

// What `pack` and `check_header` assume about the header's words.
const _: () = {
    use abi::pushgate_header as h;
    assert!(cfg!(target_endian = "little") && size_of::<usize>() == 8);
    assert!(offset_of!(h, version) == 8 && offset_of!(h, kind) == 12 && offset_of!(h, bytes) == 16);
    assert!(offset_of!(h, window_log) == 24 && offset_of!(h, slots_log) == 28);
    assert!(offset_of!(h, cq_log) == 32 && offset_of!(h, rx_log) == 36);
    assert!(offset_of!(h, link_log) == 40 && offset_of!(h, landing_log) == 44);
    assert!(offset_of!(h, signals) == 48 && offset_of!(h, rank) == 52);
};

/// A segment that has a header. A window has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Segment {
    /// Written by the device, read by the engine: WQEs and posted receives.
    Work = abi::PUSHGATE_SEG_WORK,
    /// Written by the engine, read by the device: credits, statuses, signals, CQEs, receive
    /// records, the landing ring.
    Control = abi::PUSHGATE_SEG_CONTROL,
    /// Written by one engine, read by the peer's engine: link records and counts.
    Link = abi::PUSHGATE_SEG_LINK,
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Segment::Work => "work",
            Segment::Control => "control",
            Segment::Link => "link",
        })
    }
}

/// The sizes of one queue pair's rings. Logarithms are to base 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Logarithm of the payload ring's size in units of 64 bytes.
    pub window_log: u32,
    /// Logarithm of the number of WQE slots.
    pub slots_log: u32,
    /// Logarithm of the number of CQEs in the CQ.
    pub cq_log: u32,
    /// Logarithm of the number of receive records, and of posted receives.
    pub rx_log: u32,
    /// Logarithm of the number of link records.
    pub link_log: u32,
    /// Logarithm of the landing ring's size in units of 64 bytes.
    pub landing_log: u32,
    /// Number of signal words.
    pub signals: u32,
    /// Rank of the segment's owner.
    pub rank: u32,
}

/// A field of a [`Geometry`] outside its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}, expected {min} to {max}")]
pub struct GeometryError {
    /// The field's name.
    pub field: &'static str,
    /// The field's value.
    pub value: u32,
    /// The least value allowed.
    pub min: u32,
    /// The greatest value allowed.
    pub max: u32,
}

/// `bytes`, rounded up to whole pages.
const fn pages(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

impl Geometry {
    /// Refuses a geometry outside the limits of the ABI. The layout functions below need a valid
    /// geometry; with another one they may overflow and panic.
    pub fn validate(&self) -> Result<(), GeometryError> {
        for (field, value, min, max) in [
            ("window_log", self.window_log, 0, abi::PUSHGATE_MAX_UNITS_LOG),
            ("slots_log", self.slots_log, 1, abi::PUSHGATE_MAX_SLOTS_LOG),
            ("cq_log", self.cq_log, 0, abi::PUSHGATE_MAX_CQ_LOG),
            ("rx_log", self.rx_log, 1, abi::PUSHGATE_MAX_RX_LOG),
            // Link records carry the laps of WQEs, so the limit of WQEs applies.
            ("link_log", self.link_log, 1, abi::PUSHGATE_MAX_SLOTS_LOG),
            ("landing_log", self.landing_log, 0, abi::PUSHGATE_MAX_UNITS_LOG),
            ("signals", self.signals, 1, abi::PUSHGATE_MAX_SIGNALS),
            // A status word has 24 bits for a rank; all of them set means none.
            ("rank", self.rank, 0, abi::PUSHGATE_NO_RANK - 1),
        ] {
            if !(min..=max).contains(&value) {
                return Err(GeometryError { field, value, min, max });
            }
        }
        Ok(())
    }

    /// Bytes of the window: the payload ring, rounded up to whole pages.
    pub const fn window_bytes(&self) -> usize {
        pages(UNIT << self.window_log)
    }

    /// Offset of the posted receives in the work segment.
    pub const fn work_receives_offset(&self) -> usize {
        pages(abi::PUSHGATE_WORK_RING as usize + (RECORD << self.slots_log))
    }

    /// Bytes of the work segment, in whole pages.
    pub const fn work_bytes(&self) -> usize {
        pages(self.work_receives_offset() + (RECV << self.rx_log))
    }

    /// Offset of the CQ in the control segment.
    pub const fn control_cq_offset(&self) -> usize {
        pages(abi::PUSHGATE_CTL_SIGNALS as usize + self.signals as usize * 8)
    }

    /// Offset of the receive ring in the control segment.
    pub const fn control_rx_offset(&self) -> usize {
        pages(self.control_cq_offset() + (CQE << self.cq_log))
    }

    /// Offset of the landing ring in the control segment.
    pub const fn control_landing_offset(&self) -> usize {
        pages(self.control_rx_offset() + (RECORD << self.rx_log))
    }

    /// Bytes of the control segment, in whole pages.
    pub const fn control_bytes(&self) -> usize {
        pages(self.control_landing_offset() + (UNIT << self.landing_log))
    }

    /// Bytes of the link segment, in whole pages.
    pub const fn link_bytes(&self) -> usize {
        pages(abi::PUSHGATE_LINK_RING as usize + (RECORD << self.link_log))
    }

    /// Bytes of `segment`, in whole pages.
    pub const fn bytes(&self, segment: Segment) -> usize {
        match segment {
            Segment::Work => self.work_bytes(),
            Segment::Control => self.control_bytes(),
            Segment::Link => self.link_bytes(),
        }
    }
}

/// Why a segment's header was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// There are too few words for a header.
    #[error("a header has {HEADER_WORDS} words, here are {words}")]
    Short {
        /// How many words there are.
        words: usize,
    },
    /// The memory is not a segment of pushgate, or its header is not written yet.
    #[error("segment begins with {found:#018x}, not with {:#018x} (\"PUSHGATE\")", abi::PUSHGATE_MAGIC)]
    Magic {
        /// The first word.
        found: u64,
    },
    /// The segment has another ABI version.
    #[error(
        "segment has ABI version {found}, expected {}: run releases that are closer to each other, best the same",
        versions::ABI
    )]
    Version {
        /// The version found.
        found: u32,
    },
    /// The segment is of another kind than was agreed on.
    #[error("segment is of kind {found}, expected {expected} ({})", *expected as u32)]
    Kind {
        /// The kind found, `PUSHGATE_SEG_*`.
        found: u32,
        /// The kind expected.
        expected: Segment,
    },
    /// The geometry is outside its limits.
    #[error("segment header: {0}")]
    Geometry(#[from] GeometryError),
    /// The size in the header differs from the size that its rings take.
    #[error("segment header names {found} bytes, but its rings take {expected}")]
    Bytes {
        /// The size in the header, in bytes.
        found: u64,
        /// The size that the header's geometry takes, in bytes.
        expected: usize,
    },
    /// Two segments, each valid, that do not belong to one queue pair.
    #[error(
        "the control segment says {control:?}, the work segment {work:?}: they are not of one queue pair"
    )]
    Disagree {
        /// The control segment's geometry.
        control: Geometry,
        /// The work segment's geometry.
        work: Geometry,
    },
    /// The memory's size differs from the size of the segment in it.
    #[error("segment takes {expected} bytes, its memory has {found}")]
    Size {
        /// The size of the memory, in bytes.
        found: usize,
        /// The size that the header's geometry takes, in bytes.
        expected: usize,
    },
}

fn pack(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

fn unpack(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Makes `mem` a segment of this kind: writes its header, the magic last.
///
/// The geometry must be valid, and `mem` must have exactly [`Geometry::bytes`].
pub fn write_header(mem: &SharedMemory, kind: Segment, geometry: &Geometry) -> Result<(), ShimError> {
    write_header_words(mem.words(0, HEADER_WORDS.min(mem.len() / 8)), mem.len(), kind, geometry)
}

/// Writes the header of a segment of `len` bytes to its first `words`, the magic last.
pub fn write_header_words(
    words: &[AtomicU64],
    len: usize,
    kind: Segment,
    geometry: &Geometry,
) -> Result<(), ShimError> {
    geometry.validate()?;
    let g = geometry;
    let bytes = g.bytes(kind);
    if len != bytes {
        return Err(HeaderError::Size { found: len, expected: bytes }.into());
    }
    let header = &words[..HEADER_WORDS];
    for (word, value) in header[1..].iter().zip([
        pack(abi::PUSHGATE_ABI_VERSION, kind as u32),
        bytes as u64,
        pack(g.window_log, g.slots_log),
        pack(g.cq_log, g.rx_log),
        pack(g.link_log, g.landing_log),
        pack(g.signals, g.rank),
    ]) {
        word.store(value, Ordering::Relaxed);
    }
    // Release: a process that sees the magic sees the whole header.
    header[0].store(abi::PUSHGATE_MAGIC, Ordering::Release);
    Ok(())
}

/// Checks the header of a peer's segment of `len` bytes. `words` are its first words, at least 7.
/// Each is loaded once and never stored to, so they may be those of a read-only mapping.
///
/// The geometry returned keeps all limits and takes exactly `len` bytes. The peer may change the
/// header afterwards; only this copy counts.
pub fn check_header(words: &[AtomicU64], kind: Segment, len: usize) -> Result<Geometry, HeaderError> {
    let header: &[AtomicU64; HEADER_WORDS] =
        words.first_chunk().ok_or(HeaderError::Short { words: words.len() })?;
    let magic = header[0].load(Ordering::Relaxed);
    // An acquire that is sound on read-only pages, where only relaxed loads are sound.
    std::sync::atomic::fence(Ordering::Acquire);
    if magic != abi::PUSHGATE_MAGIC {
        return Err(HeaderError::Magic { found: magic });
    }
    let [id, bytes, a, b, c, d] = [1, 2, 3, 4, 5, 6].map(|i| header[i].load(Ordering::Relaxed));
    let (version, found) = unpack(id);
    if !versions::ABI.contains(version) {
        return Err(HeaderError::Version { found: version });
    }
    if found != kind as u32 {
        return Err(HeaderError::Kind { found, expected: kind });
    }
    let (window_log, slots_log) = unpack(a);
    let (cq_log, rx_log) = unpack(b);
    let (link_log, landing_log) = unpack(c);
    let (signals, rank) = unpack(d);
    let geometry = Geometry { window_log, slots_log, cq_log, rx_log, link_log, landing_log, signals, rank };
    geometry.validate()?;
    let expected = geometry.bytes(kind);
    if bytes != expected as u64 {
        return Err(HeaderError::Bytes { found: bytes, expected });
    }
    if len != expected {
        return Err(HeaderError::Size { found: len, expected });
    }
    Ok(geometry)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Segment; 3] = [Segment::Work, Segment::Control, Segment::Link];

    fn geometry() -> Geometry {
        Geometry {
            window_log: 10,
            slots_log: 7,
            cq_log: 9,
            rx_log: 8,
            link_log: 7,
            landing_log: 11,
            signals: 513,
            rank: 3,
        }
    }

    fn largest() -> Geometry {
        Geometry {
            window_log: 23,
            slots_log: 16,
            cq_log: 15,
            rx_log: 16,
            link_log: 16,
            landing_log: 23,
            signals: 65536,
            rank: 0xfffffe,
        }
    }

    fn segment(kind: Segment) -> SharedMemory {
        let mem = SharedMemory::builder("segment", geometry().bytes(kind)).create().unwrap();
        write_header(&mem, kind, &geometry()).unwrap();
        mem
    }

    #[test]
    fn rings_begin_on_pages_one_after_the_other() {
        let g = geometry();
        assert_eq!(g.window_bytes(), 64 << 10);
        assert_eq!(g.work_receives_offset(), 4096 + 128 * 64);
        assert_eq!(g.work_bytes(), g.work_receives_offset() + 256 * 32);
        assert_eq!(g.control_cq_offset(), 4096 + 2 * 4096, "513 signals are a page and a word");
        assert_eq!(g.control_rx_offset(), g.control_cq_offset() + 512 * 16);
        assert_eq!(g.control_landing_offset(), g.control_rx_offset() + 256 * 64);
        assert_eq!(g.control_bytes(), g.control_landing_offset() + (64 << 11));
        assert_eq!(g.link_bytes(), 4096 + 128 * 64);
    }

    #[test]
    fn the_smallest_rings_have_a_page_each() {
        let g = Geometry {
            window_log: 0,
            slots_log: 1,
            cq_log: 0,
            rx_log: 1,
            link_log: 1,
            landing_log: 0,
            signals: 1,
            rank: 0,
        };
        g.validate().unwrap();
        assert_eq!(g.window_bytes(), 4096);
        assert_eq!((g.work_receives_offset(), g.work_bytes()), (2 * 4096, 3 * 4096));
        assert_eq!((g.control_landing_offset(), g.control_bytes()), (4 * 4096, 5 * 4096));
        assert_eq!(g.link_bytes(), 2 * 4096);
    }

    #[test]
    fn limits_are_kept_and_named() {
        largest().validate().unwrap();
        assert_eq!(largest().window_bytes(), 512 << 20);
        assert_eq!(largest().control_bytes(), 4096 + (512 << 10) + (512 << 10) + (4 << 20) + (512 << 20));
        type Set = fn(&mut Geometry, u32);
        let fields: [(&str, u32, u32, Set); 8] = [
            ("window_log", 0, 23, |g, v| g.window_log = v),
            ("slots_log", 1, 16, |g, v| g.slots_log = v),
            ("cq_log", 0, 15, |g, v| g.cq_log = v),
            ("rx_log", 1, 16, |g, v| g.rx_log = v),
            ("link_log", 1, 16, |g, v| g.link_log = v),
            ("landing_log", 0, 23, |g, v| g.landing_log = v),
            ("signals", 1, 65536, |g, v| g.signals = v),
            ("rank", 0, 0xfffffe, |g, v| g.rank = v),
        ];
        for (field, min, max, set) in fields {
            for (value, valid) in
                [(min, true), (max, true), (max + 1, false), (u32::MAX, false), (min.wrapping_sub(1), false)]
            {
                let mut g = geometry();
                set(&mut g, value);
                let expected = if valid { Ok(()) } else { Err(GeometryError { field, value, min, max }) };
                assert_eq!(g.validate(), expected);
            }
        }
        let text = Geometry { slots_log: 17, ..geometry() }.validate().unwrap_err().to_string();
        assert_eq!(text, "slots_log is 17, expected 1 to 16");
    }

    #[test]
    fn a_header_is_read_back() {
        for kind in KINDS {
            let mem = segment(kind);
            assert_eq!(check_header(mem.words(0, 8), kind, mem.len()), Ok(geometry()));
            // The ABI's own struct agrees about where the fields lie.
            // SAFETY: the header's 56 bytes lie in the mapping, aligned; this thread is the only
            // one with the memory.
            let h = unsafe { mem.as_ptr().cast::<abi::pushgate_header>().read() };
            let g = geometry();
            assert_eq!((h.magic, h.version), (u64::from_le_bytes(*b"PUSHGATE"), abi::PUSHGATE_ABI_VERSION));
            assert_eq!((h.kind, h.bytes), (kind as u32, mem.len() as u64));
            assert_eq!((h.window_log, h.slots_log, h.cq_log), (g.window_log, g.slots_log, g.cq_log));
            assert_eq!((h.rx_log, h.link_log, h.landing_log), (g.rx_log, g.link_log, g.landing_log));
            assert_eq!((h.signals, h.rank), (g.signals, g.rank));
        }
    }

    #[test]
    fn a_header_is_not_written_where_it_does_not_fit() {
        let mem = SharedMemory::builder("segment", geometry().work_bytes() + 4096).create().unwrap();
        let wrong = write_header(&mem, Segment::Work, &geometry());
        assert!(matches!(wrong, Err(ShimError::Header(HeaderError::Size { .. }))));
        let wrong = write_header(&mem, Segment::Work, &Geometry { signals: 0, ..geometry() });
        assert!(matches!(wrong, Err(ShimError::Geometry(GeometryError { field: "signals", .. }))));
        assert_eq!(
            check_header(mem.words(0, 8), Segment::Work, mem.len()),
            Err(HeaderError::Magic { found: 0 })
        );
    }

    #[test]
    fn every_wrong_field_is_refused() {
        for kind in KINDS {
            let mem = segment(kind);
            let words = mem.words(0, HEADER_WORDS);
            let check = || check_header(words, kind, mem.len());
            let with = |i: usize, value: u64| {
                let good = words[i].swap(value, Ordering::Relaxed);
                let result = check();
                words[i].store(good, Ordering::Relaxed);
                assert_eq!(check(), Ok(geometry()));
                result.expect_err("a wrong header")
            };
            let k = kind as u32;
            assert!(matches!(with(0, 0), HeaderError::Magic { found: 0 }));
            let (now, next) = (abi::PUSHGATE_ABI_VERSION, abi::PUSHGATE_ABI_VERSION + 1);
            assert!(matches!(with(1, pack(next, k)), HeaderError::Version { found } if found == next));
            for wrong in [0, 1, k % 3 + 2, 5, u32::MAX] {
                assert_eq!(with(1, pack(now, wrong)), HeaderError::Kind { found: wrong, expected: kind });
            }
            let bytes = mem.len() as u64;
            for wrong in [0, bytes - 1, bytes + 4096, bytes | 1 << 63, u64::MAX] {
                assert_eq!(with(2, wrong), HeaderError::Bytes { found: wrong, expected: mem.len() });
            }
            for (i, low, high) in [
                (3, "window_log", "slots_log"),
                (4, "cq_log", "rx_log"),
                (5, "link_log", "landing_log"),
                (6, "signals", "rank"),
            ] {
                let (l, h) = unpack(words[i].load(Ordering::Relaxed));
                for (value, field) in [(pack(1 << 24, h), low), (pack(l, 1 << 24), high), (u64::MAX, low)] {
                    match with(i, value) {
                        HeaderError::Geometry(e) => assert_eq!(e.field, field),
                        other => panic!("{other}"),
                    }
                }
            }
            // Within the limits, but for another size.
            let ring = match kind {
                Segment::Work => with(3, pack(10, 8)),
                Segment::Control => with(5, pack(7, 12)),
                Segment::Link => with(5, pack(8, 11)),
            };
            assert!(matches!(ring, HeaderError::Bytes { .. }), "{ring}");

            assert_eq!(
                check_header(words, kind, mem.len() - 4096),
                Err(HeaderError::Size { found: mem.len() - 4096, expected: mem.len() })
            );
            assert_eq!(check_header(&words[..6], kind, mem.len()), Err(HeaderError::Short { words: 6 }));
        }
    }
}
