//! What goes in, and what must come out: inputs are a hash of rank, element and
//! iteration, so that every rank can recompute the inputs of all others, and the
//! reference is their reduction element by element, in another order and width
//! than the ring's.

use half::{bf16, f16};

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F64,
    F16,
    Bf16,
    I32,
    I64,
}

/// Reductions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Sum,
    Max,
    Min,
    Prod,
}

impl Dtype {
    pub const ALL: &'static str = "f32, f64, f16, bf16, i32 or i64";

    pub fn parse(s: &str) -> Option<Self> {
        use Dtype::*;
        [F32, F64, F16, Bf16, I32, I64].into_iter().find(|d| d.name() == s)
    }

    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F64 => "f64",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::I32 => "i32",
            Dtype::I64 => "i64",
        }
    }

    pub fn size(self) -> usize {
        match self {
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F64 | Dtype::I64 => 8,
        }
    }
}

impl Op {
    pub const ALL: &'static str = "sum, max, min or prod";

    pub fn parse(s: &str) -> Option<Self> {
        use Op::*;
        [Sum, Max, Min, Prod].into_iter().find(|o| o.name() == s)
    }

    pub fn name(self) -> &'static str {
        match self {
            Op::Sum => "sum",
            Op::Max => "max",
            Op::Min => "min",
            Op::Prod => "prod",
        }
    }

    /// The operation's number in the kernel.
    pub fn code(self) -> u32 {
        self as u32
    }
}

/// A wrong element.
pub struct Wrong {
    pub index: usize,
    pub got: String,
    pub expected: String,
}

/// SplitMix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom
/// number generators, OOPSLA 2014): every bit depends on every bit.
fn hash(seed: u64, rank: u32, index: usize) -> u64 {
    let mut z = seed ^ (rank as u64) << 48 ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

trait Element: Copy + Send + Sync + PartialEq + std::fmt::Debug + 'static {
    /// What reductions are computed in.
    type Wide: Copy;
    fn make(hash: u64, op: Op) -> Self;
    fn widen(self) -> Self::Wide;
    fn reduce(op: Op, a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// Sum of magnitudes, for the bound.
    fn magnitude(w: Self::Wide) -> f64;
    /// Is `self` the rounded `reference`, given n terms whose magnitudes sum up to `sum`?
    fn close(self, reference: Self::Wide, op: Op, n: u32, sum: f64) -> bool;
    fn show(w: Self::Wide) -> String;
}

macro_rules! float {
    ($t:ty, $from:expr, $to:expr, $eps:expr) => {
        impl Element for $t {
            type Wide = f64;
            fn make(hash: u64, op: Op) -> Self {
                let unit = (hash >> 11) as f64 / (1u64 << 53) as f64;
                // Products stay near 1, whatever the number of ranks.
                let v = if op == Op::Prod { 0.75 + 0.5 * unit } else { 2.0 * unit - 1.0 };
                ($from)(v)
            }
            fn widen(self) -> f64 {
                ($to)(self)
            }
            fn reduce(op: Op, a: f64, b: f64) -> f64 {
                match op {
                    Op::Sum => a + b,
                    Op::Max => a.max(b),
                    Op::Min => a.min(b),
                    Op::Prod => a * b,
                }
            }
            fn magnitude(w: f64) -> f64 {
                w.abs()
            }
            fn close(self, reference: f64, op: Op, n: u32, sum: f64) -> bool {
                let got = ($to)(self);
                match op {
                    Op::Max | Op::Min => got == reference,
                    Op::Sum => (got - reference).abs() <= n as f64 * $eps * sum,
                    Op::Prod => (got - reference).abs() <= n as f64 * $eps * reference.abs(),
                }
            }
            fn show(w: f64) -> String {
                format!("{w:?}")
            }
        }
    };
}

float!(f32, |v: f64| v as f32, |v: f32| v as f64, f32::EPSILON as f64);
float!(f64, |v: f64| v, |v: f64| v, f64::EPSILON);
float!(f16, f16::from_f64, f16::to_f64, f16::EPSILON.to_f64());
float!(bf16, bf16::from_f64, bf16::to_f64, bf16::EPSILON.to_f64());

macro_rules! int {
    ($t:ty) => {
        impl Element for $t {
            type Wide = $t;
            fn make(hash: u64, _: Op) -> Self {
                hash as $t
            }
            fn widen(self) -> $t {
                self
            }
            fn reduce(op: Op, a: $t, b: $t) -> $t {
                match op {
                    Op::Sum => a.wrapping_add(b),
                    Op::Max => a.max(b),
                    Op::Min => a.min(b),
                    Op::Prod => a.wrapping_mul(b),
                }
            }
            fn magnitude(_: $t) -> f64 {
                0.0
            }
            fn close(self, reference: $t, _: Op, _: u32, _: f64) -> bool {
                self == reference
            }
            fn show(w: $t) -> String {
                format!("{w:?}")
            }
        }
    };
}
int!(i32);
int!(i64);

/// Splits `bytes` among `threads` and calls `f(first element, its bytes)` on each.
fn parallel<R: Send>(
    bytes: &mut [u8],
    size: usize,
    threads: usize,
    f: impl Fn(usize, &mut [u8]) -> R + Sync,
) -> Vec<R> {
    let each = (bytes.len() / size).div_ceil(threads).max(1);
    std::thread::scope(|s| {
        let f = &f;
        let handles: Vec<_> =
            bytes.chunks_mut(each * size).enumerate().map(|(i, c)| s.spawn(move || f(i * each, c))).collect();
        handles.into_iter().map(|h| h.join().expect("no panic in a check")).collect()
    })
}

fn fill_as<T: Element>(bytes: &mut [u8], seed: u64, rank: u32, op: Op, threads: usize) {
    let size = size_of::<T>();
    parallel(bytes, size, threads, |first, part| {
        for (i, out) in part.chunks_exact_mut(size).enumerate() {
            let v = T::make(hash(seed, rank, first + i), op);
            // SAFETY: `out` is size_of::<T>() bytes, written unaligned.
            unsafe { out.as_mut_ptr().cast::<T>().write_unaligned(v) };
        }
    });
}

fn check_as<T: Element>(
    bytes: &mut [u8],
    seed: u64,
    ranks: u32,
    op: Op,
    threads: usize,
) -> (usize, Option<Wrong>) {
    let size = size_of::<T>();
    let parts = parallel(bytes, size, threads, |first, part| {
        let (mut wrong, mut found) = (0, None);
        for (i, bytes) in part.chunks_exact(size).enumerate() {
            let index = first + i;
            // SAFETY: `bytes` is size_of::<T>() bytes, and every pattern is a T.
            let got = unsafe { bytes.as_ptr().cast::<T>().read_unaligned() };
            let mut reference = T::make(hash(seed, ranks - 1, index), op).widen();
            let mut sum = T::magnitude(reference);
            // From the last rank down: not the order of the ring.
            for rank in (0..ranks - 1).rev() {
                let v = T::make(hash(seed, rank, index), op).widen();
                reference = T::reduce(op, reference, v);
                sum += T::magnitude(v);
            }
            if !got.close(reference, op, ranks, sum) {
                wrong += 1;
                found.get_or_insert_with(|| Wrong {
                    index,
                    got: T::show(got.widen()),
                    expected: T::show(reference),
                });
            }
        }
        (wrong, found)
    });
    let count = parts.iter().map(|(n, _)| n).sum();
    (count, parts.into_iter().find_map(|(_, w)| w))
}

macro_rules! by_type {
    ($dtype:expr, $f:ident($($arg:expr),*)) => {
        match $dtype {
            Dtype::F32 => $f::<f32>($($arg),*),
            Dtype::F64 => $f::<f64>($($arg),*),
            Dtype::F16 => $f::<f16>($($arg),*),
            Dtype::Bf16 => $f::<bf16>($($arg),*),
            Dtype::I32 => $f::<i32>($($arg),*),
            Dtype::I64 => $f::<i64>($($arg),*),
        }
    };
}

/// Fills a rank's input.
pub fn fill(bytes: &mut [u8], dtype: Dtype, seed: u64, rank: u32, op: Op, threads: usize) {
    by_type!(dtype, fill_as(bytes, seed, rank, op, threads))
}

/// Checks a result: wrong elements, and the first of them.
pub fn check(
    bytes: &mut [u8],
    dtype: Dtype,
    seed: u64,
    ranks: u32,
    op: Op,
    threads: usize,
) -> (usize, Option<Wrong>) {
    by_type!(dtype, check_as(bytes, seed, ranks, op, threads))
}
