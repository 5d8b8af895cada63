//! Bytes of a stranger for a parser: valid ones, changed again and again.
//!
//! [`fuzz`] starts from valid inputs and keeps those changed ones for which the target answers something new, so that it
//! gets further than bytes that are changed once. It needs no other compiler than stable Rust, so it sees no branches:
//! what the target answers stands in for them.

use std::collections::HashSet;
use std::fmt::Display;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::hang;

/// Seconds that each target runs.
const SECONDS: &str = "_PUSHGATE_TEST_FUZZ_SECONDS";
/// The number that all changes follow from.
const SEED: &str = "_PUSHGATE_TEST_FUZZ_SEED";
/// A file with the one input that the target is to be given.
const INPUT: &str = "_PUSHGATE_TEST_FUZZ_INPUT";

/// The most that resident memory may grow above what the process had before, bytes.
const MOST_MEMORY: u64 = 64 << 20;
/// The most that the address space may grow, which shows memory that was asked for and never written. The arenas of
/// threads' allocators take a part of it.
const MOST_ADDRESSES: u64 = 1 << 30;
/// Inputs after which memory is looked at.
const BATCH: usize = 64;
/// The most inputs that are kept.
const MOST_KEPT: usize = 1024;
/// The least bound on an input's length, bytes.
const LENGTH: usize = 16 << 10;

/// What numbers in a stranger's bytes are tried.
const NUMBERS: [u64; 16] = [
    0,
    1,
    2,
    3,
    0x7f,
    0x80,
    0xff,
    0x100,
    0x7fff,
    0xffff,
    0x10000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 32,
    u64::MAX,
];
/// What stretches of text are tried.
const TEXTS: [&str; 24] = [
    "[",
    "]",
    "{",
    "}",
    "\"",
    ",",
    ":",
    "-",
    "<",
    ">",
    "/",
    "&#0;",
    "%",
    "\\u0000",
    "\\ud800",
    "\u{fffd}",
    "null",
    "0",
    "-1",
    "1e999",
    "65536",
    "4294967296",
    "18446744073709551615",
    "18446744073709551616",
];

/// A step of an input that is a conversation with descriptors.
pub struct Step<'a> {
    /// The high bits say what is done. The low bits: how many descriptors come along.
    pub flags: u8,
    /// The kinds of descriptors.
    pub kinds: &'a [u8],
    /// What is sent with them.
    pub frame: &'a [u8],
}

impl<'a> Step<'a> {
    /// The bytes of a step: the number of descriptors, their kinds, the length of the frame, the frame.
    pub fn bytes(flags: u8, kinds: &[u8], frame: &[u8]) -> Vec<u8> {
        [&[kinds.len() as u8 | flags], kinds, &(frame.len() as u16).to_le_bytes(), frame].concat()
    }

    /// Takes the next step of an input. `number`: the bits that say how many descriptors there are.
    pub fn next(rest: &mut &'a [u8], number: u8) -> Option<Step<'a>> {
        let (&flags, after) = rest.split_first()?;
        let (kinds, after) = after.split_at_checked((flags & number).into())?;
        let (length, after) = after.split_first_chunk()?;
        let frame;
        (frame, *rest) = after.split_at(after.len().min(u16::from_le_bytes(*length).into()));
        Some(Step { flags, kinds, frame })
    }
}

/// A text of JSON after its length.
pub fn part(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u16).to_le_bytes(), text].concat()
}

/// Splits what [`part`] put in front.
pub fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = bytes.split_first_chunk()?;
    Some(rest.split_at(rest.len().min(u16::from_le_bytes(*length).into())))
}

/// Gives `target` changed `seeds` for `_PUSHGATE_TEST_FUZZ_SECONDS` (3 if unset). What `target` answers tells what became of an
/// input; an input with a new answer is changed further. [`kind`] makes an answer of a text.
///
/// All changes follow from `_PUSHGATE_TEST_FUZZ_SEED`, a fixed number if unset. With `_PUSHGATE_TEST_FUZZ_INPUT`, the name of a file that
/// a failure left, the target is given that input alone.
///
/// # Panics
///
/// If the target panics, or if memory grows by more than 64 MiB. The message names the input and how to try it again. A target that
/// goes on for longer than [`hang`] ends the process; the input's file is left then too, and after a crash.
#[track_caller]
pub fn fuzz(seeds: &[Vec<u8>], mut target: impl FnMut(&[u8]) -> u64) {
    if let Some(file) = std::env::var_os(INPUT) {
        let input = read(Path::new(&file));
        println!("{} bytes of {}: answered {:#x}", input.len(), file.display(), target(&input));
        return;
    }
    let number = |name: &str, unset: u64| match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("invalid {name} `{text}`: expected a number")),
        Err(_) => unset,
    };
    let seed = number(SEED, 2026);
    let time = Duration::from_secs(number(SECONDS, 3));
    let at = Location::caller();
    let name = format!("pushgate-fuzz-{}-{}-{}", std::process::id(), at.file().replace('/', "-"), at.line());
    let last = Last::new(std::env::temp_dir().join(name));
    println!("{at}: seed {seed}, {} seconds, {} inputs to begin with", time.as_secs(), seeds.len());

    let mut random = Random(seed);
    let mut kept = seeds.to_vec();
    let mut answers: HashSet<u64> = seeds.iter().map(|input| target(input)).collect();
    let bound = LENGTH.max(2 * seeds.iter().map(Vec::len).max().expect("there is an input to begin with"));
    reset_peak();
    let before = Memory::now();
    let (done, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let begin = Instant::now();
    thread::scope(|scope| {
        let watch = scope.spawn(|| watch(&done, &ended, &last.path, seed));
        let _ends = Ends(&ended, watch.thread().clone());
        let mut batch: Vec<Vec<u8>> = Vec::with_capacity(BATCH);
        while begin.elapsed() < time {
            batch.clear();
            for _ in 0..BATCH {
                let n = done.load(Ordering::Relaxed);
                let mut input = kept[random.below(kept.len())].clone();
                for _ in 0..1 << random.below(4) {
                    change(&mut input, &kept, bound, &mut random);
                }
                last.write(&input);
                let again = || again(&last.path, seed, n, &input);
                match catch_unwind(AssertUnwindSafe(|| target(&input))) {
                    // Texts that quote the input could give an answer each.
                    Ok(answer) if answers.len() < 1 << 16 && answers.insert(answer) => {
                        if kept.len() < MOST_KEPT {
                            kept.push(input.clone());
                        } else {
                            let place = seeds.len() + random.below(MOST_KEPT - seeds.len());
                            kept[place] = input.clone();
                        }
                    }
                    Ok(_) => {}
                    Err(panic) => {
                        eprintln!("the target panicked; {}", again());
                        resume_unwind(panic);
                    }
                }
                batch.push(input);
                done.store(n + 1, Ordering::Relaxed);
            }
            let now = Memory::now();
            if now.is_above(&before) {
                let n = done.load(Ordering::Relaxed);
                let worst = batch.iter().max_by_key(|input| {
                    reset_peak();
                    let before = Memory::now();
                    target(input);
                    let now = Memory::now();
                    now.addresses
                        .saturating_sub(before.addresses)
                        .max(now.resident.saturating_sub(before.resident))
                });
                let input = worst.expect("a batch is not empty");
                last.write(input);
                panic!(
                    "memory grew from {before:?} to {now:?}; the input that takes most of the last {BATCH}: {}",
                    again(&last.path, seed, n, input)
                );
            }
        }
    });
    last.remove();
    let (done, took) = (done.into_inner(), begin.elapsed());
    let (each, now) = (done as f64 / took.as_secs_f64(), Memory::now());
    println!(
        "{at}: {done} inputs, {each:.0} a second, {} answers, memory grew by {} KiB",
        answers.len(),
        now.resident.saturating_sub(before.resident) >> 10
    );
}

/// An answer of [`fuzz`]'s target: what kind of text this is, by its first words that are no numbers or names and do not stand in quotes.
pub fn kind(text: impl Display) -> u64 {
    let mut text = text.to_string();
    for quote in ['"', '`'] {
        if let (Some(first), Some(last)) = (text.find(quote), text.rfind(quote)) {
            text.replace_range(first..=last, "");
        }
    }
    let mut hasher = DefaultHasher::new();
    let plain = |word: &&str| word.bytes().all(|byte| byte.is_ascii_lowercase());
    text.split_ascii_whitespace().filter(plain).take(16).for_each(|word| word.hash(&mut hasher));
    hasher.finish()
}

/// A part of an answer of [`fuzz`]'s target: how many there are of something, roughly.
pub fn depth(n: usize) -> u64 {
    (usize::BITS - n.leading_zeros()).into()
}

/// Changes an input in one way.
fn change(input: &mut Vec<u8>, kept: &[Vec<u8>], bound: usize, random: &mut Random) {
    let at = random.below(input.len() + 1);
    let stretch = at..at + random.below((input.len() - at).min(64) + 1);
    match random.below(13) {
        0 | 1 if at < input.len() => input[at] ^= 1 << random.below(8),
        2 if at < input.len() => input[at] = random.next_u64() as u8,
        3 if at < input.len() => input[at] = NUMBERS[random.below(8)] as u8,
        // A number of 1, 2, 4 or 8 bytes, or one near it.
        4 | 5 => {
            let number =
                NUMBERS[random.below(NUMBERS.len())].wrapping_add(random.below(3) as u64).wrapping_sub(1);
            let width = 1 << random.below(4);
            let mut bytes = number.to_le_bytes()[..width].to_vec();
            if random.below(2) == 0 {
                bytes.reverse();
            }
            let end = (at + width).min(input.len());
            input.splice(at..end, bytes);
        }
        6 => _ = input.splice(at..at, TEXTS[random.below(TEXTS.len())].bytes()),
        7 => _ = input.splice(stretch, TEXTS[random.below(TEXTS.len())].bytes()),
        8 => _ = input.drain(stretch),
        // A stretch once more, or very often.
        9 => {
            let most = if random.below(8) == 0 { 12 } else { 5 };
            let times = 1 << random.below(most);
            let more = input[stretch].repeat(times);
            input.splice(at..at, more);
        }
        // What another input has there, or elsewhere.
        10 => {
            let other = &kept[random.below(kept.len())];
            let from = random.below(other.len() + 1);
            input.truncate(at);
            input.extend(&other[from..]);
        }
        11 => {
            let other = &kept[random.below(kept.len())];
            let from = random.below(other.len() + 1);
            let to = from + random.below(other.len() - from + 1);
            input.splice(stretch, other[from..to].iter().copied());
        }
        12 if random.below(4) == 0 => input.truncate(at),
        _ => {
            let bytes: Vec<u8> = (0..random.below(16)).map(|_| random.next_u64() as u8).collect();
            input.splice(at..at, bytes);
        }
    }
    input.truncate(bound);
    // The stretches of a batch's inputs would count as memory of the target.
    input.shrink_to(bound);
}

/// How to try an input again.
fn again(file: &Path, seed: u64, n: u64, input: &[u8]) -> String {
    let shown: String = input.iter().take(4096).map(|byte| format!("{byte:02x}")).collect();
    format!(
        "input {n} of seed {seed}, {} bytes: {shown}{}\nTry it again by running this test with {INPUT}={}",
        input.len(),
        if input.len() > 4096 { "..." } else { "" },
        file.display()
    )
}

/// The input that the target has, in a file that is still there when the process has crashed: its length, its bytes.
struct Last {
    file: File,
    path: PathBuf,
}

impl Last {
    fn new(path: PathBuf) -> Last {
        let file = File::create(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Last { file, path }
    }

    fn write(&self, input: &[u8]) {
        let all = [&(input.len() as u64).to_le_bytes()[..], input].concat();
        self.file.write_all_at(&all, 0).unwrap_or_else(|e| panic!("{}: {e}", self.path.display()));
    }

    /// Removes the file; without this call it stays.
    fn remove(self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn read(file: &Path) -> Vec<u8> {
    let all = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let (length, rest) = all.split_first_chunk::<8>().expect("a file that a failure has left");
    rest[..u64::from_le_bytes(*length) as usize].to_vec()
}

/// Ends the process when the target stays with one input. `done` counts inputs.
fn watch(done: &AtomicU64, ended: &AtomicBool, file: &Path, seed: u64) {
    let (mut seen, mut since) = (0, Instant::now());
    // Acquire and Release: for the flag alone.
    while !ended.load(Ordering::Acquire) {
        thread::park_timeout(Duration::from_secs(1));
        let n = done.load(Ordering::Relaxed);
        if n != seen {
            (seen, since) = (n, Instant::now());
        } else if since.elapsed() > hang() {
            eprintln!("the target does not end; {}", again(file, seed, n, &read(file)));
            std::process::abort();
        }
    }
}

/// Lets [`watch`] end when it is dropped, also when the target has panicked.
struct Ends<'a>(&'a AtomicBool, thread::Thread);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        self.1.unpark();
    }
}

/// What the process has of memory, and had at most, bytes.
#[derive(Debug)]
struct Memory {
    resident: u64,
    addresses: u64,
}

impl Memory {
    fn now() -> Memory {
        let status = std::fs::read_to_string("/proc/self/status").expect("/proc/self/status");
        let peak = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("Linux has it");
            line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
                << 10
        };
        Memory { resident: peak("VmHWM"), addresses: peak("VmPeak") }
    }

    fn is_above(&self, before: &Memory) -> bool {
        self.resident > before.resident + MOST_MEMORY || self.addresses > before.addresses + MOST_ADDRESSES
    }
}

/// Lets the peak of resident memory begin anew. Where the kernel refuses that, the peak counts that was before.
fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// A random generator (splitmix64) with its seed.
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }
}
