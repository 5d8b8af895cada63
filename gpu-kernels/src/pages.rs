//! Copies of lists of pieces, as the pages of a cache are: between a device's memory and registered host memory, and within the
//! device's memory.
//!
//! Two ways lead over a GPU's bus. Copy engines need no SM and no call that waits for the program's kernels (they run in a context
//! beside the primary one), but each piece costs the CPU a call's time. A kernel copies pieces of any size at the bus's rate, but waits
//! for SMs where kernels of the program fill the GPU. [`Pace`] chooses for each list.

use std::sync::Arc;
use std::time::{Duration, Instant};
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
    Kernel { mark: CopyMark, table: PiecesTable, bytes: u64, begin: Instant },
    /// A list of the CPU, and how often it was asked for.
    Cpu { pieces: Vec<PageCopy>, asked: u32 },
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
    /// Makes the queues of a device. A GPU for which no kernel can be compiled copies by its copy engines alone.
    pub fn new(executor: &Arc<dyn Executor>) -> Result<PageCopies> {
        let Some(cuda) = executor.as_cuda() else { return Ok(PageCopies(Kind::Cpu)) };
        let kernel = PageKernel::new(cuda)
            .inspect_err(|e| tracing::warn!("no kernel copies pages, so that small ones are slow: {e}"))
            .ok();
        Ok(PageCopies(Kind::Cuda(Box::new(Cuda {
            executor: executor.clone(),
            engines: CopyStream::new(&cuda.beside()?)?,
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
                unsafe { std::ptr::copy(piece.src as *const u8, piece.dst as *mut u8, piece.length as usize) };
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
                self.copies.extend(
                    pieces
                        .iter()
                        .map(|&PageCopy { dst, src, length }| Copy { dst, src, length: length as usize, out }),
                );
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
    /// Bytes that the kernel has copied a microsecond, of late.
    kernel: f64,
    /// When the kernel's last list was seen complete.
    last: Option<Instant>,
}

/// Bytes a microsecond: of copy engines, and of the kernel where the program leaves SMs to it.
const ENGINE_RATE: f64 = 53e3;
const KERNEL_RATE: f64 = 42e3;
/// Microseconds that a piece costs the CPU: within a call for many, and alone.
const TOGETHER: f64 = 0.75;
const ALONE: f64 = 2.5;
/// Into the device, shorter pieces are handed to the driver alone.
const IN_TOGETHER: u64 = 32 << 10;
/// What a launch takes longer than a copy, in microseconds.
const LAUNCH: f64 = 4.0;
/// Lists of fewer bytes say nothing of the kernel's rate.
const TELLING: u64 = 128 << 10;
/// After this number of lists by the engines the kernel is tried again.
const FORGETS: f64 = 300.0;

impl Default for Pace {
    fn default() -> Self {
        Pace { kernel: KERNEL_RATE, last: None }
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
        let engine = (count * each).max(all / ENGINE_RATE);
        let kernel = LAUNCH + all / self.kernel;
        let takes = kernel < engine;
        if !takes {
            self.kernel += (KERNEL_RATE - self.kernel) / FORGETS;
        }
        takes
    }

    /// Notes how long the kernel took.
    fn note(&mut self, begin: Instant, end: Instant, bytes: u64) {
        // It began when the list before it was complete.
        let began = self.last.replace(end).map_or(begin, |last| last.max(begin));
        if bytes >= TELLING {
            let took = (end - began).max(Duration::from_micros(1)).as_secs_f64() * 1e6;
            self.kernel += ((bytes as f64 / took).min(KERNEL_RATE) - self.kernel) / 4.0;
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
