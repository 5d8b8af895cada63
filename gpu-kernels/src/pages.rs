//! Copies of lists of pieces, as the pages of a cache are: between a device's memory and registered host memory, and within the
//! device's memory.
//!
//! Two ways lead over a GPU's bus. Copy engines need no SM and no call that waits for the program's kernels (they run in a context
//! beside the primary one), but each piece costs the CPU a call's time. A kernel copies pieces of any size at the bus's rate, but waits
//! for SMs where kernels of the program fill the GPU. [`Pace`] chooses for each list.

use std::sync::Arc;
use std::time::Instant;
use std::{fmt, mem};

use crate::cuda::{Copy, CopyMark, CopyStream, PageKernel, PiecesEntry, PiecesTable};
use crate::error::Result;
use crate::executor::Executor;

/// A piece of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Where the bytes go: an address of the device.
    pub dst: u64,
    /// Where the bytes are: an address of the device.
    pub src: u64,
    /// Bytes, at least one.
    pub length: u64,
}

/// Between which memories a list copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageWay {
    /// From the device's memory to registered host memory.
    Out,
    /// From registered host memory to the device's memory.
    In,
    /// Within the device's memory.
    Within,
    /// Between any memories: of this process that are not registered too, and of other devices. The call may wait for a copy to or from
    /// memory that is not registered.
    Any,
}

/// A list that was started ([`PageCopies::start`]).
#[must_use = "its copies are complete when PageCopies::is_done says so"]
pub struct PageTicket(Begun);

/// On the CPU a list is copied after this number of questions.
const LATE: u32 = 8;

enum Begun {
    Engine(CopyMark),
    Kernel {
        mark: CopyMark,
        table: PiecesTable,
        bytes: u64,
        begin: Instant,
    },
    /// A list of the CPU, and how often it was asked for.
    Cpu {
        pieces: Vec<PageCopy>,
        asked: u32,
    },
    Done,
}

/// Lists of copies of one device.
///
/// A ticket, and the memories of its list, must stay until [`PageCopies::is_done`] has returned true. On the CPU the copies are made by
/// that call, so that a program that does not wait for them is seen to be wrong.
pub struct PageCopies(Kind);

enum Kind {
    Cuda(Box<Cuda>),
    Cpu,
}

struct Cuda {
    executor: Arc<dyn Executor>,
    engines: CopyStream,
    engine_marks: Vec<CopyMark>,
    kernel: Option<PageKernel>,
    kernel_marks: Vec<CopyMark>,
    tables: Vec<PiecesTable>,
    pace: Pace,
    copies: Vec<Copy>,
    entries: Vec<PiecesEntry>,
}

impl PageCopies {
    /// Makes the queues of a device. A GPU for which no kernel can be compiled copies by its copy engines alone. `own_context`: these are
    /// driven in a context of their own, if the GPU has the memory for one (523 MiB on H200), and not in the program's, in which calls of
    /// the driver wait for each other.
    pub fn new(executor: &Arc<dyn Executor>, own_context: bool) -> Result<PageCopies> {
        let Some(cuda) = executor.as_cuda() else { return Ok(PageCopies(Kind::Cpu)) };
        let kernel = PageKernel::new(cuda)
            .inspect_err(|e| tracing::warn!("no kernel copies pages, so that small ones are slow: {e}"))
            .ok();
        let own = own_context.then(|| cuda.beside()).transpose().unwrap_or_else(|e| {
            tracing::warn!("copies share the program's CUDA context: {e}");
            None
        });
        let context = own.unwrap_or_else(|| cuda.context().clone());
        Ok(PageCopies(Kind::Cuda(Box::new(Cuda {
            executor: executor.clone(),
            engines: CopyStream::new(&context)?,
            engine_marks: Vec::new(),
            kernel,
            kernel_marks: Vec::new(),
            tables: Vec::new(),
            pace: Pace::default(),
            copies: Vec::new(),
            entries: Vec::new(),
        }))))
    }

    /// Starts the copies of a list, in any order.
    ///
    /// # Safety
    /// The memories are valid for the copies, the targets do not overlap each other or a source, and all stay, and are left alone, until
    /// [`PageCopies::is_done`] has returned true for the ticket. Host memory is registered with the executor, but for
    /// [`PageWay::Any`].
    pub unsafe fn start(&mut self, pieces: &[PageCopy], way: PageWay) -> Result<PageTicket> {
        match &mut self.0 {
            Kind::Cpu => Ok(PageTicket(Begun::Cpu { pieces: pieces.to_vec(), asked: 0 })),
            // SAFETY: the caller's promise.
            Kind::Cuda(cuda) => unsafe { cuda.start(pieces, way) }.map(PageTicket),
        }
    }

    /// Whether the copies of a list are complete. Never waits. An error is the device's, which has failed.
    pub fn is_done(&mut self, ticket: &mut PageTicket) -> Result<bool> {
        match &mut ticket.0 {
            Begun::Done => return Ok(true),
            Begun::Cpu { asked, .. } if *asked < LATE => {
                *asked += 1;
                return Ok(false);
            }
            Begun::Cpu { pieces, .. } => pieces.iter().for_each(|piece| {
                // SAFETY: the promise of `start`'s caller; on the CPU, device addresses are host addresses.
                unsafe {
                    std::ptr::copy(piece.src as *const u8, piece.dst as *mut u8, piece.length as usize)
                };
            }),
            Begun::Engine(mark) | Begun::Kernel { mark, .. } => {
                if !mark.passed()? {
                    return Ok(false);
                }
            }
        }
        let begun = mem::replace(&mut ticket.0, Begun::Done);
        if let Kind::Cuda(cuda) = &mut self.0 {
            cuda.recycle(begun);
        }
        Ok(true)
    }
}

impl Cuda {
    unsafe fn start(&mut self, pieces: &[PageCopy], way: PageWay) -> Result<Begun> {
        let bytes = pieces.iter().map(|p| p.length).sum();
        let entries: u64 = pieces.iter().map(|p| p.length.div_ceil(PageKernel::LONGEST)).sum();
        if let Some(kernel) = &self.kernel
            && entries <= PageKernel::MOST as u64
            && self.pace.takes_kernel(way, pieces.len(), bytes)
        {
            let table = match self.tables.pop() {
                Some(table) => table,
                None => PageKernel::table(self.executor.as_cuda().expect("it was one"))?,
            };
            let mark = match self.kernel_marks.pop() {
                Some(mark) => mark,
                None => kernel.mark()?,
            };
            self.entries.clear();
            self.entries.extend(pieces.iter().flat_map(cut));
            // SAFETY: the caller's promise; the table was free.
            unsafe { kernel.start(&self.entries, &table, &mark)? };
            return Ok(Begun::Kernel { mark, table, bytes, begin: Instant::now() });
        }
        let mark = match self.engine_marks.pop() {
            Some(mark) => mark,
            None => self.engines.spare_mark()?,
        };
        match way {
            PageWay::Within | PageWay::Any => {
                for &PageCopy { dst, src, length } in pieces {
                    // SAFETY: the caller's promise.
                    unsafe { self.engines.copy(dst, src, length as usize)? };
                }
                self.engines.mark_again(&mark)?;
            }
            PageWay::Out | PageWay::In => {
                let out = way == PageWay::Out;
                self.copies.clear();
                self.copies.extend(pieces.iter().map(|&PageCopy { dst, src, length }| Copy {
                    dst,
                    src,
                    length: length as usize,
                    out,
                }));
                // SAFETY: the caller's promise.
                unsafe { self.engines.group(&self.copies, &mark)? };
            }
        }
        Ok(Begun::Engine(mark))
    }

    fn recycle(&mut self, begun: Begun) {
        match begun {
            Begun::Engine(mark) => self.engine_marks.push(mark),
            Begun::Kernel { mark, table, bytes, begin } => {
                self.pace.note(begin, Instant::now(), bytes);
                self.kernel_marks.push(mark);
                self.tables.push(table);
            }
            Begun::Cpu { .. } | Begun::Done => {}
        }
    }
}

/// A piece as entries of the kernel's list. Cut where the target is aligned, so that each entry takes wide stores.
fn cut(piece: &PageCopy) -> impl Iterator<Item = PiecesEntry> + use<> {
    let PageCopy { dst, src, length } = *piece;
    (0..length.div_ceil(PageKernel::LONGEST)).map(move |i| {
        let at = i * PageKernel::LONGEST;
        PiecesEntry { dst: dst + at, src: src + at, bytes: (length - at).min(PageKernel::LONGEST) }
    })
}

/// Which way a list takes, from what the ways cost. All figures are of an H200 with driver 580 (docs/nixl.md).
struct Pace {
    /// Microseconds that the kernel has taken for a byte, of late.
    kernel: f64,
    /// When the kernel's last list was seen complete.
    last: Option<Instant>,
}

/// Microseconds for a byte: of copy engines, and of the kernel where the program leaves SMs to it.
const ENGINE: f64 = 1.0 / 53e3;
const KERNEL: f64 = 1.0 / 42e3;
/// Microseconds that a piece costs the CPU: within a call for many, and alone. Half of it is the driver's; the other half is what a
/// program gets less for its time.
const TOGETHER: f64 = 1.5;
const ALONE: f64 = 3.0;
/// Into the device, shorter pieces are handed to the driver alone.
const IN_TOGETHER: u64 = 32 << 10;
/// What a launch takes longer than a copy, in microseconds.
const LAUNCH: f64 = 4.0;
/// Lists of fewer bytes say nothing of the kernel's rate.
const TELLING: u64 = 128 << 10;
/// What the kernel's last list counts. Once in a while a list waits for a thread that looks late; where the GPU's time is shared between
/// processes, many lists are fast and some wait for milliseconds.
const LAST: f64 = 1.0 / 16.0;
/// Lists by the engines after which a third of what the kernel took too long counts still.
const FORGETS: f64 = 300.0;

impl Default for Pace {
    fn default() -> Self {
        Pace { kernel: KERNEL, last: None }
    }
}

impl Pace {
    /// Whether the kernel is to copy a list.
    fn takes_kernel(&mut self, way: PageWay, pieces: usize, bytes: u64) -> bool {
        let (count, all) = (pieces as f64, bytes as f64);
        let each = match way {
            PageWay::Within => return true,
            PageWay::Any => return false,
            PageWay::In if bytes < IN_TOGETHER * pieces as u64 => ALONE,
            _ if pieces > 1 => TOGETHER,
            _ => ALONE,
        };
        let engine = (count * each).max(all * ENGINE);
        let kernel = LAUNCH + all * self.kernel;
        let takes = kernel < engine;
        if !takes {
            self.kernel += (KERNEL - self.kernel) / FORGETS;
        }
        takes
    }

    /// Notes how long the kernel took.
    fn note(&mut self, begin: Instant, end: Instant, bytes: u64) {
        // It began when the list before it was complete.
        let began = self.last.replace(end).map_or(begin, |last| last.max(begin));
        if bytes >= TELLING {
            let took = (end - began).as_secs_f64() * 1e6 / bytes as f64;
            self.kernel += (took.max(KERNEL) - self.kernel) * LAST;
        }
    }
}

impl fmt::Debug for PageCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageCopies")
    }
}

impl fmt::Debug for PageTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PageTicket")
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::time::Duration;

    use super::*;
    use crate::cpu::CpuExecutor;
    use crate::cuda::CudaExecutor;
    use crate::error::DeviceError;
    use crate::executor::{Access, DeviceBuffer, Launch, WaitOutcome};

    const BYTES: usize = 4 << 20;

    /// Pieces of many lengths, each with its source and target at any alignment, none over another.
    fn pieces(dst: u64, src: u64, seed: u64) -> Vec<PageCopy> {
        let lengths = [1, 2, 15, 16, 17, 64, 100, 4095, 4096, 4097, 16 << 10, 70_001];
        let (mut all, mut at, mut state) = (Vec::new(), [0u64; 2], seed);
        for i in 0.. {
            let length = lengths[i % lengths.len()];
            for at in &mut at {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Half of them aligned alike.
                *at = at.next_multiple_of(16) + if i % 2 == 0 { 0 } else { state >> 59 };
            }
            if at.iter().any(|at| at + length > BYTES as u64) {
                break;
            }
            all.push(PageCopy { dst: dst + at[0], src: src + at[1], length });
            at = at.map(|at| at + length);
        }
        all
    }

    fn content(seed: usize) -> Vec<u8> {
        (0..BYTES).map(|i| (i * 31 + i / 253 + seed) as u8).collect()
    }

    /// What the target's bytes are after the copies.
    fn copied(pieces: &[PageCopy], (dst, before): (u64, &[u8]), (src, from): (u64, &[u8])) -> Vec<u8> {
        let mut all = before.to_vec();
        for p in pieces {
            let (to, at) = ((p.dst - dst) as usize, (p.src - src) as usize);
            all[to..to + p.length as usize].copy_from_slice(&from[at..at + p.length as usize]);
        }
        all
    }

    fn held(buffer: &DeviceBuffer) -> Vec<u8> {
        let mut bytes = vec![0; BYTES];
        buffer.copy_to_host(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn the_kernel_copies_pieces_of_any_length_and_alignment() {
        let executor = CpuExecutor::new();
        let module = executor.load_embedded().unwrap();
        let [from, to] = [0, 1].map(|_| executor.alloc(BYTES).unwrap());
        from.copy_from_host(&content(1)).unwrap();
        to.copy_from_host(&content(2)).unwrap();
        let list = pieces(to.addr(), from.addr(), 3);
        let entries: Vec<_> = list.iter().flat_map(cut).collect();
        assert!(entries.iter().all(|e| (1..=PageKernel::LONGEST).contains(&e.bytes)));
        let params: Vec<u8> =
            [entries.as_ptr() as u64, entries.len() as u64].iter().flat_map(|w| w.to_ne_bytes()).collect();
        let stream = executor.stream().unwrap();
        // SAFETY: buffers and entries outlive the launch.
        let run =
            unsafe { executor.launch(&stream, &module, "copy_pages", Launch::new(2, 64), &params) }.unwrap();
        assert_eq!(run.wait(None).unwrap(), WaitOutcome::Done);
        let expected = copied(&list, (to.addr(), &content(2)), (from.addr(), &content(1)));
        assert!(held(&to) == expected);
    }

    fn wait(copies: &mut PageCopies, mut ticket: PageTicket) {
        let begin = Instant::now();
        while !copies.is_done(&mut ticket).unwrap() {
            assert!(begin.elapsed() < pushgate_tests::hang());
            std::thread::yield_now();
        }
    }

    #[test]
    fn on_a_gpu_lists_arrive_whole_by_the_kernel_and_by_copy_engines() {
        const NAME: &str = "on_a_gpu_lists_arrive_whole_by_the_kernel_and_by_copy_engines";
        let executor: Arc<dyn Executor> = match CudaExecutor::new(0) {
            Err(DeviceError::CudaUnavailable { reason }) => {
                return pushgate_tests::skip(&format!("no GPU for {NAME}: {reason}"));
            }
            opened => Arc::new(opened.unwrap()),
        };
        let cuda = executor.as_cuda().unwrap();
        let host = CpuExecutor::new().alloc(BYTES).unwrap();
        let at = NonNull::new(host.addr() as *mut u8).unwrap();
        let seen = executor.register(at, BYTES, Access::ReadWrite, false).unwrap();
        let [device, other] = [0, 1].map(|_| executor.alloc(BYTES).unwrap());
        assert!(cuda.holds(device.addr(), BYTES as u64) && !cuda.holds(host.addr(), BYTES as u64));
        assert!(!cuda.holds(device.addr(), 1 << 50));
        let ways = [
            (PageWay::Out, &device, device.addr(), &host, seen.device_addr()),
            (PageWay::In, &host, seen.device_addr(), &device, device.addr()),
            (PageWay::Within, &device, device.addr(), &other, other.addr()),
            (PageWay::Any, &device, device.addr(), &host, seen.device_addr()),
        ];
        for kernel in [true, false] {
            let mut copies = PageCopies::new(&executor, kernel).unwrap();
            for (round, (way, from, src, to, dst)) in ways.into_iter().enumerate() {
                if let Kind::Cuda(cuda) = &mut copies.0 {
                    assert!(cuda.kernel.is_some(), "the kernel is compiled here");
                    cuda.pace.kernel = if kernel { 0.0 } else { 1.0 };
                }
                from.copy_from_host(&content(round)).unwrap();
                to.copy_from_host(&content(round + 7)).unwrap();
                let list = pieces(dst, src, round as u64);
                // SAFETY: the memories outlive the copies, which are waited for.
                let ticket = unsafe { copies.start(&list, way) }.unwrap();
                let by_kernel = matches!(ticket.0, Begun::Kernel { .. });
                assert_eq!(by_kernel, way == PageWay::Within || kernel && way != PageWay::Any, "{way:?}");
                wait(&mut copies, ticket);
                let expected = copied(&list, (dst, &content(round + 7)), (src, &content(round)));
                assert!(held(to) == expected, "{way:?}, kernel: {kernel}");
            }
        }
    }

    #[test]
    fn the_kernel_is_taken_for_short_pieces_and_is_left_while_the_program_fills_the_gpu() {
        let mut pace = Pace::default();
        let chunk = 2 << 20;
        for way in [PageWay::Out, PageWay::In] {
            assert!(pace.takes_kernel(way, 512, chunk) && pace.takes_kernel(way, 64, chunk), "{way:?}");
            assert!(!pace.takes_kernel(way, 1, chunk) && !pace.takes_kernel(way, 1, 8), "{way:?}");
        }
        // Each launch takes a millisecond: 2 GB/s.
        let mut now = Instant::now();
        for _ in 0..100 {
            let end = now + Duration::from_millis(1);
            pace.note(now, end, chunk);
            now = end;
        }
        assert!(!pace.takes_kernel(PageWay::Out, 64, chunk), "engines copy these in 96 microseconds");
        assert!(pace.takes_kernel(PageWay::In, 512, chunk), "engines take longer for these");
        let tried = (0..1000).position(|_| pace.takes_kernel(PageWay::Out, 64, chunk));
        assert!(tried.is_some_and(|n| n > 50), "{tried:?}");
        // One list that a late look makes long does not count for much; where every eighth one waits, the engines are faster.
        let (mut pace, at) = (Pace::default(), |us| now + Duration::from_micros(us));
        pace.note(at(0), at(300), chunk);
        assert!(pace.takes_kernel(PageWay::Out, 64, chunk));
        let (mut us, mut taken) = (300, 0);
        for i in 0..400 {
            let took = if i % 8 == 0 { 2000 } else { 50 };
            if pace.takes_kernel(PageWay::Out, 64, chunk) {
                pace.note(at(us), at(us + took), chunk);
                taken += 1;
            }
            us += took;
        }
        assert!(taken < 100, "{taken}");
        // A short list says nothing.
        let before = pace.kernel;
        pace.note(now, now + Duration::from_secs(1), 8);
        assert_eq!(pace.kernel, before);
    }
}
