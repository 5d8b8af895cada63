//! Which of NCCL's protocols, and how many channels, a collective over this plugin takes. Pure: figures in, choice out.
//!
//! NCCL's own model can't know what is slow here. A message costs the thread that drives the queue pairs about 2 us, so
//! many channels with short messages are slower than few. And the low-latency protocol (LL) sends twice the bytes, out
//! of host memory, by a CPU.

/// A row of the table: what collectives of up to so many bytes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Bytes of one step around the ring: those of the collective divided by the ranks. The row is for at most so many.
    pub step: usize,
    /// The low-latency protocol may be taken.
    pub ll: bool,
    /// Channels; 0: as many as NCCL takes, which takes few for short collectives.
    pub channels: i32,
}

/// The table, smallest first. Larger steps take what NCCL takes, without LL.
///
/// Measured with nccl-tests, allreduce on two H200 of one host, NCCL 2.30.7, by protocol and number of channels
/// (docs/benchmarks.md). A step of more ranks costs what a step of two costs, so the table goes by the step.
const ROWS: [Row; 4] = [
    Row { step: 8 << 10, ll: true, channels: 0 },
    Row { step: 32 << 10, ll: true, channels: 1 },
    Row { step: 512 << 10, ll: false, channels: 2 },
    Row { step: 2 << 20, ll: false, channels: 4 },
];

/// What a collective of `bytes` over `ranks` ranks takes.
pub fn choose(bytes: usize, ranks: usize) -> Row {
    let step = bytes / ranks.max(1);
    let found = ROWS.into_iter().find(|row| step <= row.step);
    found.unwrap_or(Row { step: usize::MAX, ll: false, channels: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_collectives_take_ll_and_few_channels_and_long_ones_what_nccl_takes() {
        let of = |bytes| {
            let row = choose(bytes, 2);
            (row.ll, row.channels)
        };
        assert_eq!([8, 16 << 10].map(of), [(true, 0); 2]);
        assert_eq!([(16 << 10) + 2, 64 << 10].map(of), [(true, 1); 2]);
        assert_eq!([(64 << 10) + 2, 1 << 20].map(of), [(false, 2); 2]);
        assert_eq!([(1 << 20) + 2, 4 << 20].map(of), [(false, 4); 2]);
        assert_eq!([(4 << 20) + 2, 1 << 30].map(of), [(false, 0); 2]);
        assert!(choose(128 << 10, 4).ll, "the step is what counts");
        assert_eq!(choose(0, 0), ROWS[0]);
    }

    #[test]
    fn the_table_ascends() {
        assert!(ROWS.is_sorted_by_key(|row| row.step));
    }
}
