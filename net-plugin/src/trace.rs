//! Traces of NCCL's calls, for `pushgate bench nccl-trace`: each end of a connection has a file while the setting `net-trace`
//! names a folder. A call of NCCL's thread that posts and tests adds records to the end's own memory, without a lock or a system
//! call; the end writes them when its memory is full, and when it is closed.

use std::cell::Cell;
use std::fs::{DirBuilder, File};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pushgate::settings::PluginSettings;
use pushgate_net_trace::layout::MAGIC;
use pushgate_net_trace::{Header, Kind, Memory, Record, VERSION, file_name};
use rustix::time::{ClockId, clock_gettime};
use zerocopy::IntoBytes as _;

use crate::error::{Code, Failure, Result};
use crate::exclusive::Exclusive;
use crate::handle::{Nonce, random};
use crate::identity::Identity;
use crate::join::Role;
use crate::log;
use crate::pool::REQUESTS;
use crate::registration::{Kind as MemoryKind, Wanted};

/// Records that an end holds in memory: 768 KiB.
const HELD: usize = 16 << 10;
/// The most records of an end's file: 192 MiB. Those that follow are left out.
const MOST: u64 = 4 << 20;

/// Nanoseconds of the monotonic clock, which all processes of a host share.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The number of this thread among those that make calls.
fn thread() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    thread_local! {
        static NUMBER: Cell<Option<u16>> = const { Cell::new(None) };
    }
    NUMBER.get().unwrap_or_else(|| {
        // Relaxed: only a number.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        NUMBER.set(Some(number));
        number
    })
}

/// The traces of a process.
pub struct Traces {
    folder: PathBuf,
    process: [u8; 16],
    boot: [u8; 16],
    cores: u32,
    next: AtomicU32,
}

impl Traces {
    /// Traces in the folder that the settings name, which is made if needed; `None` if they name none.
    pub fn of(settings: &PluginSettings, host: &Identity, cores: usize) -> Result<Option<Arc<Self>>> {
        if settings.net_trace == Path::new("none") {
            return Ok(None);
        }
        let folder = settings.net_trace.clone();
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|why| {
            settings.refused("net-trace", format!("none or a folder that can be made ({why})"))
        })?;
        let (process, boot) = (random()?, host.boot_id);
        log::init(&format!("each end of a connection writes a trace into {}", folder.display()));
        Ok(Some(Arc::new(Traces { folder, process, boot, cores: cores as u32, next: AtomicU32::new(0) })))
    }

    /// The trace of an end of the connection that `connection` names, over device `dev`.
    pub fn end(self: &Arc<Self>, role: Role, connection: Nonce, dev: usize) -> Result<Trace> {
        // Relaxed: only a number.
        let end = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.folder.join(file_name(&self.process, end));
        let header = Header {
            magic: MAGIC,
            version: VERSION,
            record: size_of::<Record>() as u32,
            process: self.process,
            connection,
            boot: self.boot,
            pid: std::process::id(),
            end,
            device: dev as u32,
            cores: self.cores,
            role: match role {
                Role::Send => pushgate_net_trace::Role::Send,
                Role::Receive => pushgate_net_trace::Role::Receive,
            },
            zero: [0; 7],
        };
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.and_then(|mut file| file.write_all(header.as_bytes()).map(|()| file));
        let file = file.map_err(|why| {
            let text = format!(
                "the trace {}: {why}; set PUSHGATE_NET_TRACE to another folder, or to none",
                path.display()
            );
            Failure::new(Code::System, text)
        })?;
        let calls = Calls {
            out: Out {
                file: Some(file),
                path,
                records: Vec::with_capacity(HELD),
                written: 0,
                most: MOST,
                left_out: 0,
            },
            posted: 0,
            numbers: Box::new([0; REQUESTS]),
            tests: Box::new([0; REQUESTS]),
            refused: None,
        };
        Ok(Trace { calls: Exclusive::new(calls), others: Mutex::default() })
    }
}

/// The trace of one end of a connection.
pub struct Trace {
    /// Of the thread that posts and tests.
    calls: Exclusive<Calls>,
    /// Calls of other threads, which are few.
    others: Mutex<Vec<Record>>,
}

struct Calls {
    out: Out,
    /// Requests so far.
    posted: u32,
    /// The number of the request at each place.
    numbers: Box<[u32; REQUESTS]>,
    /// How often the request at each place was tested without being done.
    tests: Box<[u32; REQUESTS]>,
    /// When the next post was refused first, and how often it was.
    refused: Option<(u64, u32)>,
}

/// What is written.
struct Out {
    /// Nothing once writing failed.
    file: Option<File>,
    path: PathBuf,
    records: Vec<Record>,
    written: u64,
    /// The most records of the file.
    most: u64,
    left_out: u32,
}

/// What a call posted.
#[derive(Clone, Copy)]
pub enum Posted<'a> {
    Send { data: usize, size: usize, tag: u32, registered: bool },
    Receive(&'a [Wanted<'a>]),
    Flush,
}

/// What became of a call that posts: the place of its request, none, or a failure.
pub type Outcome<'a> = std::result::Result<Option<u32>, &'a Failure>;

impl Trace {
    /// The end was handed out, and NCCL began to listen for it at `listened`.
    pub fn made(&self, listened: Option<u64>) {
        let time = now();
        let listen = listened.map(|at| Record::new(Kind::Listen, at, thread()));
        self.other(listen.into_iter().chain([Record::new(Kind::Made, time, thread())]));
    }

    /// Memory was registered.
    pub fn registered(&self, begun: u64, address: usize, bytes: usize, kind: &MemoryKind<'_>) {
        let memory = match kind {
            MemoryKind::Host => Memory::Host,
            MemoryKind::Cuda(None) => Memory::Cuda,
            MemoryKind::Cuda(Some(_)) => Memory::DmaBuf,
        };
        let record = Record { count: memory as u32, ..Record::new(Kind::Register, begun, thread()) };
        self.memory(record, address, bytes);
    }

    /// Memory was deregistered.
    pub fn deregistered(&self, begun: u64, address: usize, bytes: usize) {
        self.memory(Record::new(Kind::Deregister, begun, thread()), address, bytes);
    }

    fn memory(&self, record: Record, address: usize, bytes: usize) {
        let (address, size) = (address as u64, bytes as u64);
        self.other([Record { address, size, took: since(record.time), ..record }].into_iter());
    }

    fn other(&self, records: impl Iterator<Item = Record>) {
        self.others.lock().unwrap_or_else(PoisonError::into_inner).extend(records);
    }

    /// A call that posts was made at `begun`.
    pub fn posted(&self, begun: u64, what: Posted<'_>, outcome: Outcome<'_>) {
        self.calls.enter(|calls| calls.posted(begun, what, outcome));
    }

    /// The request at place `index` was tested at `begun`: whether it is done, with the bytes of its buffers.
    pub fn tested(
        &self,
        begun: u64,
        index: u32,
        ended: std::result::Result<bool, &Failure>,
        sizes: &[usize],
    ) {
        self.calls.enter(|calls| calls.tested(begun, index, ended, sizes));
    }

    /// NCCL closes the connection. Writes what there is; records that follow are left out.
    pub fn close(&self) {
        let mut others = std::mem::take(&mut *self.others.lock().unwrap_or_else(PoisonError::into_inner));
        self.calls.enter(|calls| {
            others.append(&mut calls.out.records);
            // In the order in which the calls returned: a post that was refused at first bears the time of its first call.
            others.sort_by_key(|record| record.time.saturating_add(record.took.into()));
            calls.out.records = others;
            let count = calls.out.left_out;
            calls.out.records.push(Record { count, ..Record::new(Kind::Closed, now(), thread()) });
            calls.out.write();
            calls.out.file = None;
        });
    }
}

/// Nanoseconds since a time, as many as a record holds.
fn since(begun: u64) -> u32 {
    now().saturating_sub(begun).try_into().unwrap_or(u32::MAX)
}

impl Calls {
    fn posted(&mut self, begun: u64, what: Posted<'_>, outcome: Outcome<'_>) {
        let index = match outcome {
            Ok(Some(index)) => index as usize,
            // A flush with nothing to wait for.
            Ok(None) if matches!(what, Posted::Flush) => return,
            Ok(None) => {
                let (first, times) = self.refused.unwrap_or((begun, 0));
                self.refused = Some((first, times.saturating_add(1)));
                return;
            }
            Err(failure) => return self.failed(begun, failure),
        };
        let request = self.posted;
        self.posted = self.posted.wrapping_add(1);
        (self.numbers[index], self.tests[index]) = (request, 0);
        let (kind, (time, count)) = match what {
            Posted::Flush => (Kind::Flush, (begun, 0)),
            Posted::Send { .. } => (Kind::Send, self.refused.take().unwrap_or((begun, 0))),
            Posted::Receive(_) => (Kind::Receive, self.refused.take().unwrap_or((begun, 0))),
        };
        let record = Record { request, count, took: since(time), ..Record::new(kind, time, thread()) };
        match what {
            Posted::Flush => self.out.add([record].into_iter()),
            Posted::Send { data, size, tag, registered } => {
                let (address, size, registered) = (data as u64, size as u64, registered.into());
                self.out.add([Record { address, size, tag, registered, ..record }].into_iter());
            }
            Posted::Receive(wanted) => self.out.add(wanted.iter().enumerate().map(|(i, w)| Record {
                address: w.data as u64,
                size: w.size as u64,
                tag: w.tag,
                registered: w.mr.is_some().into(),
                more: (wanted.len() - 1 - i) as u8,
                ..record
            })),
        }
    }

    fn tested(
        &mut self,
        begun: u64,
        index: u32,
        ended: std::result::Result<bool, &Failure>,
        sizes: &[usize],
    ) {
        let index = index as usize;
        match ended {
            Ok(false) => self.tests[index] = self.tests[index].saturating_add(1),
            Ok(true) => {
                let (request, count) = (self.numbers[index], self.tests[index]);
                let record =
                    Record { request, count, took: since(begun), ..Record::new(Kind::Done, begun, thread()) };
                // A flush has none.
                let sizes = if sizes.is_empty() { &[0] } else { sizes };
                self.out.add(sizes.iter().enumerate().map(|(i, size)| Record {
                    size: *size as u64,
                    more: (sizes.len() - 1 - i) as u8,
                    ..record
                }));
            }
            Err(failure) => self.failed(begun, failure),
        }
    }

    fn failed(&mut self, begun: u64, failure: &Failure) {
        self.out.add(std::iter::once(Record {
            count: failure.code as u32,
            ..Record::new(Kind::Failed, begun, thread())
        }));
    }
}

impl Out {
    /// Adds the records of one call, all or none.
    fn add(&mut self, records: impl ExactSizeIterator<Item = Record>) {
        let more = records.len();
        if self.records.len() + more > HELD {
            self.write();
        }
        if self.file.is_none() || self.written + (self.records.len() + more) as u64 > self.most {
            self.left_out = self.left_out.saturating_add(more as u32);
            return;
        }
        self.records.extend(records);
    }

    #[cold]
    fn write(&mut self) {
        let Some(file) = &mut self.file else { return };
        match file.write_all(self.records.as_bytes()) {
            Ok(()) => self.written += self.records.len() as u64,
            Err(why) => {
                log::warn(&format!("the trace {} ends: {why}", self.path.display()));
                self.file = None;
            }
        }
        if self.left_out > 0 && self.file.is_some() {
            let Out { path, left_out, .. } = self;
            log::info(&format!("the trace {} is full: {left_out} records are left out", path.display()));
        }
        self.records.clear();
    }
}

#[cfg(test)]
mod tests {
    use pushgate_net_trace::{Buffer, End, What, folder};

    use super::*;

    /// A folder of a test's own, with the traces in it.
    fn traces(name: &str) -> Arc<Traces> {
        let folder = std::env::temp_dir().join(format!("pushgate-traces-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let mut settings = PluginSettings::default();
        assert!(Traces::of(&settings, &Identity::here(), 1).unwrap().is_none());
        settings.net_trace = folder.clone();
        Traces::of(&settings, &Identity::here(), 1).unwrap().unwrap()
    }

    fn read(traces: &Traces) -> Vec<End> {
        let ends = folder(&traces.folder).unwrap();
        std::fs::remove_dir_all(&traces.folder).unwrap();
        ends
    }

    fn send(trace: &Trace, size: usize, outcome: Outcome<'_>) {
        trace.posted(now(), Posted::Send { data: 4096, size, tag: 7, registered: true }, outcome);
    }

    #[test]
    fn calls_are_read_back_as_they_were_made_with_refused_posts_and_reused_places() {
        let traces = traces("calls");
        let trace = traces.end(Role::Send, [5; 16], 2).unwrap();
        trace.made(None);
        trace.registered(now(), 4096, 8192, &MemoryKind::Host);
        send(&trace, 10, Ok(None));
        send(&trace, 10, Ok(None));
        send(&trace, 10, Ok(Some(3)));
        trace.tested(now(), 3, Ok(false), &[]);
        trace.tested(now(), 3, Ok(true), &[10]);
        send(&trace, 20, Ok(Some(3)));
        let failure = Failure::new(Code::Remote, "the peer is gone");
        trace.tested(now(), 3, Err(&failure), &[]);
        trace.deregistered(now(), 4096, 8192);
        trace.close();
        let ends = read(&traces);
        let [end] = &ends[..] else { panic!("{} ends", ends.len()) };
        assert_eq!(
            (end.header.connection, end.header.device, end.header.pid),
            ([5; 16], 2, std::process::id())
        );
        let what: Vec<_> = end.events.iter().map(|event| event.what.clone()).collect();
        let post = |request, refused, size| What::Post {
            request,
            refused,
            buffers: vec![Buffer { address: 4096, size, tag: 7, registered: true }],
        };
        let expected = [
            What::Made,
            What::Register { address: 4096, size: 8192, memory: Memory::Host },
            post(0, 2, 10),
            What::Done { request: 0, tests: 1, sizes: vec![10] },
            post(1, 0, 20),
            What::Failed { code: Code::Remote as u32 },
            What::Deregister { address: 4096, size: 8192 },
            What::Closed { left_out: 0 },
        ];
        assert_eq!(what, expected);
    }

    #[test]
    fn a_post_that_was_refused_before_another_request_was_done_is_read_back_after_it() {
        let traces = traces("refused");
        let trace = traces.end(Role::Send, [5; 16], 2).unwrap();
        send(&trace, 10, Ok(Some(0)));
        send(&trace, 20, Ok(None));
        trace.tested(now(), 0, Ok(true), &[10]);
        send(&trace, 20, Ok(Some(1)));
        trace.close();
        let ends = read(&traces);
        let posts = ends[0].events.iter().filter_map(|event| match event.what {
            What::Post { request, refused, .. } => Some((request, refused)),
            What::Done { request, .. } => Some((request, u32::MAX)),
            _ => None,
        });
        assert_eq!(posts.collect::<Vec<_>>(), [(0, 0), (0, u32::MAX), (1, 1)]);
    }

    #[test]
    fn a_trace_that_is_full_leaves_later_calls_out_and_says_how_many() {
        let traces = traces("full");
        let trace = traces.end(Role::Send, [5; 16], 0).unwrap();
        let most = HELD as u64 + 10;
        trace.calls.enter(|calls| calls.out.most = most).unwrap();
        let posts = most as usize / 2 + 5;
        for _ in 0..posts {
            send(&trace, 1, Ok(Some(0)));
            trace.tested(now(), 0, Ok(true), &[1]);
        }
        let held = trace.calls.enter(|calls| (calls.out.records.capacity(), calls.out.written)).unwrap();
        // The memory has not grown, and was written once.
        assert_eq!(held, (HELD, HELD as u64));
        trace.close();
        let ends = read(&traces);
        let events = &ends[0].events;
        assert_eq!(events.len() as u64, most + 1);
        assert_eq!(events.last().unwrap().what, What::Closed { left_out: 10 });
    }

    #[test]
    fn a_disk_that_takes_no_more_ends_the_trace_and_no_call() {
        let traces = traces("disk");
        let trace = traces.end(Role::Send, [5; 16], 0).unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        trace.calls.enter(|calls| calls.out.file = Some(full)).unwrap();
        for _ in 0..HELD {
            send(&trace, 1, Ok(Some(0)));
            trace.tested(now(), 0, Ok(true), &[1]);
        }
        let out = trace.calls.enter(|calls| (calls.out.file.is_none(), calls.out.left_out)).unwrap();
        assert_eq!(out, (true, HELD as u32));
        trace.close();
        std::fs::remove_dir_all(&traces.folder).unwrap();
    }

    #[test]
    fn a_folder_that_can_not_be_made_is_refused_with_the_setting() {
        let mut settings = PluginSettings::default();
        settings.net_trace = "/proc/none/traces".into();
        let said = Traces::of(&settings, &Identity::here(), 1).err().unwrap().to_string();
        assert!(said.contains("net-trace") && said.contains("/proc/none/traces"), "{said}");
    }
}
