//! What the file of one end says, checked: anybody may have written it.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use zerocopy::{FromBytes, IntoBytes as _, TryFromBytes};

use crate::EXTENSION;
use crate::layout::{Begin, Header, Kind, MAGIC, MOST_BUFFERS, Record, Role, VERSION};

/// The most bytes of a file that are read: over five million records.
const LONGEST: u64 = 256 << 20;

/// Why a trace can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It can't be read.
    #[error("reading {}: {why}", .path.display())]
    Read {
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// It is no trace, or a broken one.
    #[error("{} is no trace that can be replayed: {why}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        why: String,
    },
    /// There is nothing to replay.
    #[error("{} has no trace (no file *.{EXTENSION}): record with PUSHGATE_NET_TRACE={}", .0.display(), .0.display())]
    Empty(PathBuf),
}

/// The kind of memory that was registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Memory {
    /// The host's.
    Host = 1,
    /// A GPU's, by its address.
    Cuda = 2,
    /// A GPU's, by a dma-buf.
    DmaBuf = 3,
}

/// A stretch of memory of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Where it lay in the recorded process.
    pub address: u64,
    /// Its bytes.
    pub size: u64,
    /// NCCL's tag.
    pub tag: u32,
    /// The call named a registration of it.
    pub registered: bool,
}

/// What a call was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// `listen`.
    Listen,
    /// `connect` or `accept` handed the connection out.
    Made,
    /// Memory was registered.
    Register {
        /// Its address.
        address: u64,
        /// Its bytes.
        size: u64,
        /// Its kind.
        memory: Memory,
    },
    /// Memory was deregistered.
    Deregister {
        /// Its address.
        address: u64,
        /// Its bytes.
        size: u64,
    },
    /// A send or a receive was posted.
    Post {
        /// The number of the request.
        request: u32,
        /// How often the call was refused before.
        refused: u32,
        /// One for a send, one or more for a receive.
        buffers: Vec<Buffer>,
    },
    /// A flush was begun.
    Flush {
        /// The number of the request.
        request: u32,
    },
    /// A request was done.
    Done {
        /// The number of the request.
        request: u32,
        /// How often `test` said "not yet" before.
        tests: u32,
        /// The bytes of each buffer; of a flush none are told.
        sizes: Vec<u64>,
    },
    /// A call failed.
    Failed {
        /// NCCL's code of the failure.
        code: u32,
    },
    /// The connection was closed.
    Closed {
        /// Records that the recorder left out before, because the trace had become too long.
        left_out: u32,
    },
}

/// A call with its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// When the call began, in nanoseconds of the host's monotonic clock.
    pub time: u64,
    /// Nanoseconds until it returned.
    pub took: u32,
    /// The thread that called, numbered within its process.
    pub thread: u16,
    /// What it was.
    pub what: What,
}

/// One end of a connection, as it was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// What the file is of.
    pub header: Header,
    /// The calls in the order in which they returned.
    pub events: Vec<Event>,
}

impl End {
    /// The trace in this file.
    pub fn read(path: &Path) -> Result<End, TraceError> {
        let read = |why| TraceError::Read { path: path.into(), why };
        let length = std::fs::metadata(path).map_err(read)?.len();
        let malformed = |why| TraceError::Malformed { path: path.into(), why };
        if length > LONGEST {
            return Err(malformed(format!("{length} bytes, expected at most {LONGEST}")));
        }
        End::parse(&std::fs::read(path).map_err(read)?).map_err(malformed)
    }

    /// The trace in these bytes; or what is wrong with them.
    pub fn parse(bytes: &[u8]) -> Result<End, String> {
        let begin = Begin::read_from_prefix(bytes).ok().map(|(begin, _)| begin);
        let begin = begin.filter(|begin| begin.magic == MAGIC);
        let begin = begin.ok_or("it does not begin as one")?;
        if begin.version != VERSION {
            return Err(format!(
                "version {}, expected {VERSION}: record again with this build",
                begin.version
            ));
        }
        let (header, rest) = bytes.split_at_checked(size_of::<Header>()).ok_or("its header is cut off")?;
        let header = Header::try_read_from_bytes(header).map_err(|_| "its header has a role that is none")?;
        if header.record as usize != size_of::<Record>() || header.zero != [0; 7] {
            return Err(format!("records of {} bytes, expected {}", header.record, size_of::<Record>()));
        }
        if rest.len() % size_of::<Record>() != 0 {
            return Err("its last record is cut off".into());
        }
        let records = rest.chunks_exact(size_of::<Record>()).enumerate().map(|(number, bytes)| {
            let record = Record::try_read_from_bytes(bytes).map_err(|_| "of a kind that is none");
            let record = record
                .and_then(|r| if r.zero == [0; 3] { Ok(r) } else { Err("with bytes that are not zero") });
            record.map_err(|why| format!("record {number} is {why}"))
        });
        let mut reading = Reading::new(header.role);
        for (number, record) in records.enumerate() {
            reading.take(record?).map_err(|why| format!("record {number}: {why}"))?;
        }
        if !reading.pending.is_empty() {
            return Err("the buffers of its last call are cut off".into());
        }
        let mut events = reading.events;
        // Another thread makes the registrations: their records lie after those of posts that were made later.
        events.sort_by_key(|event| event.time.saturating_add(event.took.into()));
        Ok(End { header, events })
    }
}

impl End {
    /// The bytes of the file.
    pub fn bytes(&self) -> Vec<u8> {
        let records = self.events.iter().flat_map(|event| event.records(self.header.role));
        let mut bytes = self.header.as_bytes().to_vec();
        records.for_each(|record| bytes.extend_from_slice(record.as_bytes()));
        bytes
    }

    /// Writes the file, under the name of its process and end.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        std::fs::write(folder.join(file_name(&self.header.process, self.header.end)), self.bytes())
    }
}

/// The name of the file of an end.
pub fn file_name(process: &[u8; 16], end: u32) -> String {
    format!("{:032x}-{end:05}.{EXTENSION}", u128::from_be_bytes(*process))
}

impl Event {
    fn records(&self, role: Role) -> Vec<Record> {
        let record = |kind| Record { took: self.took, ..Record::new(kind, self.time, self.thread) };
        let one = |record| vec![record];
        match &self.what {
            What::Listen => one(record(Kind::Listen)),
            What::Made => one(record(Kind::Made)),
            What::Register { address, size, memory } => one(Record {
                address: *address,
                size: *size,
                count: *memory as u32,
                ..record(Kind::Register)
            }),
            What::Deregister { address, size } => {
                one(Record { address: *address, size: *size, ..record(Kind::Deregister) })
            }
            What::Post { request, refused, buffers } => {
                let kind = if role == Role::Send { Kind::Send } else { Kind::Receive };
                let buffers = buffers.iter().enumerate().map(|(i, b)| Record {
                    address: b.address,
                    size: b.size,
                    tag: b.tag,
                    request: *request,
                    count: *refused,
                    registered: b.registered.into(),
                    more: (buffers.len() - 1 - i) as u8,
                    ..record(kind)
                });
                buffers.collect()
            }
            What::Flush { request } => one(Record { request: *request, ..record(Kind::Flush) }),
            What::Done { request, tests, sizes } => {
                let sizes = sizes.iter().enumerate().map(|(i, size)| Record {
                    size: *size,
                    request: *request,
                    count: *tests,
                    more: (sizes.len() - 1 - i) as u8,
                    ..record(Kind::Done)
                });
                sizes.collect()
            }
            What::Failed { code } => one(Record { count: *code, ..record(Kind::Failed) }),
            What::Closed { left_out } => one(Record { count: *left_out, ..record(Kind::Closed) }),
        }
    }
}

/// The traces of a folder, in the order of process and end.
pub fn folder(path: &Path) -> Result<Vec<End>, TraceError> {
    let read = |why| TraceError::Read { path: path.into(), why };
    let mut ends = Vec::new();
    for entry in std::fs::read_dir(path).map_err(read)? {
        let file = entry.map_err(read)?.path();
        if file.extension().is_some_and(|end| end == EXTENSION) {
            ends.push(End::read(&file)?);
        }
    }
    if ends.is_empty() {
        return Err(TraceError::Empty(path.into()));
    }
    ends.sort_by_key(|end| (end.header.process, end.header.end));
    Ok(ends)
}

/// A file that is being read.
struct Reading {
    role: Role,
    events: Vec<Event>,
    /// The records of a call whose last one has not been read.
    pending: Vec<Record>,
    /// The requests that were posted.
    posted: u32,
    under_way: HashSet<u32>,
    /// When the last post or test ended.
    last: u64,
    closed: bool,
}

impl Reading {
    fn new(role: Role) -> Self {
        let (events, pending, under_way) = (Vec::new(), Vec::new(), HashSet::new());
        Reading { role, events, pending, posted: 0, under_way, last: 0, closed: false }
    }

    fn take(&mut self, record: Record) -> Result<(), String> {
        if self.closed {
            return Err("it follows the connection's close".into());
        }
        if let Some(first) = self.pending.first() {
            let same = |r: &Record| (r.kind, r.request, r.time, r.thread);
            let left = first.more as usize - self.pending.len();
            if same(first) != same(&record) || record.more as usize != left {
                return Err("it is no other buffer of the call before".into());
            }
        }
        self.pending.push(record);
        if record.more > 0 {
            let most = match record.kind {
                Kind::Receive | Kind::Done if self.role == Role::Receive => MOST_BUFFERS,
                _ => 1,
            };
            return match self.pending[0].more as usize >= most {
                true => {
                    Err(format!("{} buffers, expected at most {most}", self.pending[0].more as usize + 1))
                }
                false => Ok(()),
            };
        }
        let records = std::mem::take(&mut self.pending);
        let what = self.call(&records)?;
        let r = &records[0];
        if matches!(what, What::Post { .. } | What::Flush { .. } | What::Done { .. }) {
            // A post that was refused at first is recorded when it is taken. Of a call that took too long for the record the end
            // is not known.
            let end = r.time.saturating_add(r.took.into());
            if end < self.last && r.took < u32::MAX {
                return Err(format!(
                    "it ended {} ns before the post or test that it follows",
                    self.last - end
                ));
            }
            self.last = self.last.max(end);
        }
        self.events.push(Event { time: r.time, took: r.took, thread: r.thread, what });
        Ok(())
    }

    /// What the records of one call say.
    fn call(&mut self, records: &[Record]) -> Result<What, String> {
        let r = &records[0];
        Ok(match r.kind {
            Kind::Listen => What::Listen,
            Kind::Made => What::Made,
            Kind::Register => {
                let memory =
                    [Memory::Host, Memory::Cuda, Memory::DmaBuf].into_iter().find(|m| *m as u32 == r.count);
                let memory = memory.ok_or_else(|| format!("memory of kind {}", r.count))?;
                What::Register { address: r.address, size: r.size, memory }
            }
            Kind::Deregister => What::Deregister { address: r.address, size: r.size },
            Kind::Send | Kind::Receive => {
                if (r.kind == Kind::Send) != (self.role == Role::Send) {
                    return Err(format!("{:?} at the other end", r.kind));
                }
                self.post(r.request)?;
                let buffers = records.iter().map(buffer).collect::<Result<_, _>>()?;
                What::Post { request: r.request, refused: r.count, buffers }
            }
            Kind::Flush => {
                if self.role == Role::Send {
                    return Err("a flush at the sending end".into());
                }
                self.post(r.request)?;
                What::Flush { request: r.request }
            }
            Kind::Done => {
                if !self.under_way.remove(&r.request) {
                    return Err(format!("request {} is done, which was not under way", r.request));
                }
                let sizes = records.iter().map(|r| r.size).collect();
                What::Done { request: r.request, tests: r.count, sizes }
            }
            Kind::Failed => What::Failed { code: r.count },
            Kind::Closed => {
                self.closed = true;
                What::Closed { left_out: r.count }
            }
        })
    }

    fn post(&mut self, request: u32) -> Result<(), String> {
        if request != self.posted {
            return Err(format!("request {request}, expected {}", self.posted));
        }
        self.posted += 1;
        self.under_way.insert(request);
        Ok(())
    }
}

fn buffer(r: &Record) -> Result<Buffer, String> {
    r.address.checked_add(r.size).ok_or("a buffer that ends beyond the last address")?;
    if r.registered > 1 {
        return Err(format!("registered is {}, expected 0 or 1", r.registered));
    }
    Ok(Buffer { address: r.address, size: r.size, tag: r.tag, registered: r.registered == 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::Ring;

    const RING: Ring = Ring { hosts: 2, gpus: 2, channels: 2, bytes: 4096, rounds: 2 };

    /// A receiving end and a sending end, with receives of several buffers and flushes at the first one.
    fn ends() -> [End; 2] {
        let all = RING.ends();
        let find = |role| all.iter().find(|end| end.header.role == role).unwrap().clone();
        let (mut receive, send) = (find(Role::Receive), find(Role::Send));
        let last = receive.events.len() - 2;
        let time = receive.events[last].time;
        let request = receive.events.iter().filter(|e| matches!(e.what, What::Post { .. })).count() as u32;
        let buffer = |tag| Buffer { address: 4096, size: 100, tag, registered: tag == 7 };
        let more = [
            What::Post { request, refused: 3, buffers: vec![buffer(7), buffer(8), buffer(9)] },
            What::Done { request, tests: 5, sizes: vec![100, 0, 1] },
            What::Flush { request: request + 1 },
            What::Done { request: request + 1, tests: 0, sizes: vec![0] },
            What::Failed { code: 6 },
        ];
        let more = more.into_iter().map(|what| Event { time, took: 50, thread: 3, what });
        receive.events.splice(last..last, more);
        [receive, send]
    }

    #[test]
    fn what_is_written_is_read_back_equal() {
        for end in ends() {
            assert_eq!(End::parse(&end.bytes()), Ok(end));
        }
        for end in RING.ends() {
            assert_eq!(End::parse(&end.bytes()), Ok(end));
        }
    }

    #[test]
    fn a_file_that_is_cut_off_anywhere_is_refused_or_ends_at_a_call() {
        let [receive, _] = ends();
        let (bytes, header) = (receive.bytes(), size_of::<Header>());
        for length in 0..bytes.len() {
            let parsed = End::parse(&bytes[..length]);
            if length < header || (length - header) % size_of::<Record>() != 0 {
                assert!(parsed.is_err(), "{length} bytes");
            } else if let Ok(end) = parsed {
                assert!(receive.events.starts_with(&end.events), "{length} bytes");
            }
        }
    }

    #[test]
    fn no_changed_byte_makes_the_reader_panic_and_what_can_not_be_is_refused() {
        for end in ends() {
            let right = end.bytes();
            for at in 0..right.len() {
                for bit in [0, 3, 7] {
                    let mut bytes = right.clone();
                    bytes[at] ^= 1 << bit;
                    // Some of it can't be told from another trace.
                    let _ = End::parse(&bytes);
                }
            }
        }
        let [receive, send] = ends();
        let says = |end: &End, change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = end.bytes();
            change(&mut bytes);
            End::parse(&bytes).unwrap_err()
        };
        let record = |number: usize| size_of::<Header>() + number * size_of::<Record>();
        let kind = std::mem::offset_of!(Record, kind);
        let request = std::mem::offset_of!(Record, request);
        let post = send.events.iter().position(|e| matches!(e.what, What::Post { .. })).unwrap();
        let done = send.events.iter().position(|e| matches!(e.what, What::Done { .. })).unwrap();
        for (change, expected) in [
            (&(|b: &mut Vec<u8>| b[0] = b'X') as &dyn Fn(&mut Vec<u8>), "it does not begin as one"),
            (&|b| b[8] = 2, "version 2, expected 1"),
            (&|b| b[12] = 47, "records of 47 bytes"),
            (&|b| b[80] = 3, "a role that is none"),
            (&|b| b.truncate(b.len() - 1), "its last record is cut off"),
            (&|b| b[record(1) + kind] = 11, "record 1 is of a kind that is none"),
            (&|b| b[record(1) + 47] = 1, "record 1 is with bytes that are not zero"),
            (&|b| b[record(post) + kind] = Kind::Receive as u8, "Receive at the other end"),
            (&|b| b[record(post) + kind] = Kind::Flush as u8, "a flush at the sending end"),
            (&|b| b[record(post) + request] = 9, "request 9, expected 0"),
            (&|b| b[record(done) + request] = 9, "request 9 is done, which was not under way"),
            (&|b| b[record(post) + kind + 1] = 1, "2 buffers, expected at most 1"),
            (
                &|b| (b[record(post) + 15], b[record(post) + 23]) = (0xff, 0xff),
                "ends beyond the last address",
            ),
            (&|b| b.extend_from_slice(&send.bytes()[record(0)..]), "it follows the connection's close"),
            (&|b| b[record(done) + 3] = 0, "before the post or test that it follows"),
        ] {
            let said = says(&send, change);
            assert!(said.contains(expected), "{said}, expected: {expected}");
        }
        let many =
            receive.events.iter().position(|e| matches!(e.what, What::Post { refused: 3, .. })).unwrap();
        let said = says(&receive, &|b| b[record(many) + kind + 1] = 8);
        assert!(said.contains("9 buffers, expected at most 8"), "{said}");
        let said = says(&receive, &|b| b[record(many + 1) + kind] = Kind::Done as u8);
        assert!(said.contains("it is no other buffer of the call before"), "{said}");
    }

    #[test]
    fn a_folder_without_traces_is_refused_with_the_setting_that_makes_some() {
        let folder = std::env::temp_dir().join(format!("pushgate-no-trace-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("other"), "").unwrap();
        let said = super::folder(&folder).unwrap_err().to_string();
        assert!(said.contains("PUSHGATE_NET_TRACE"), "{said}");
        let ends = RING.ends();
        ends.iter().for_each(|end| end.write(&folder).unwrap());
        assert_eq!(super::folder(&folder).unwrap().len(), ends.len());
        std::fs::write(folder.join(file_name(&[9; 16], 0)), "PGNTRACE").unwrap();
        let said = super::folder(&folder).unwrap_err().to_string();
        assert!(said.contains(&file_name(&[9; 16], 0)), "{said}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
