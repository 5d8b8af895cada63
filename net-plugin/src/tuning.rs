//! Which of NCCL's protocols, and how many channels, a collective over this plugin takes. Pure: figures in, choice out.
//!
//! NCCL's own model can't know what is slow here. A message costs the thread that drives the queue pairs about 2 us:
//! many channels with short messages are slower than few. The low-latency protocol (LL) sends twice the bytes, out
//! of host memory, by a CPU. LL128 sends one sixteenth more than the payload, out of GPU memory, and its kernels take what
//! arrives line by line, so a step of the ring begins before the message of the step before is complete.
//!
//! Over TCP, where a CPU copies all bytes at both ends, NCCL's model takes LL with eight channels up to 1 MiB.

/// Which of NCCL's protocols a collective may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocols {
    /// What NCCL takes, LL too, without LL128.
    All,
    /// LL128 on the ring, where NCCL has the ring for the collective.
    Ll128,
    /// What NCCL takes, without LL and LL128.
    WithoutLl,
}

/// Which collective it is, as far as the choice depends on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    AllReduce,
    /// `ncclAllGather` and `ncclReduceScatter`, for which NCCL has the algorithm PAT.
    Gathered,
    /// `ncclBroadcast` and `ncclReduce`.
    Other,
}

/// A row of the table: what collectives take whose steps are at most `step` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Bytes of one step: those of the collective divided by the ranks, or all of them where each rank passes on all. The row is for at
    /// most this number.
    pub step: usize,
    /// Which protocols may be taken.
    pub protocols: Protocols,
    /// Channels; 0: as many as NCCL takes, which takes few for short collectives.
    pub channels: i32,
}

/// The table, smallest first. Larger steps take what NCCL takes, without LL.
///
/// Measured with nccl-tests, NCCL 2.30.7, on two H100 of one host, by protocol and number of channels (docs/benchmarks.md). The table
/// goes by the step, because a step of four ranks costs about what a step of two costs; on four H100 a second channel saved up to a tenth
/// for steps of 32 to 256 KiB. Two ranks take one channel there: copies of several channels wait for one thread of the copier.
const ROWS: [Row; 6] = [
    Row { step: 8 << 10, protocols: Protocols::All, channels: 0 },
    Row { step: 16 << 10, protocols: Protocols::All, channels: 1 },
    Row { step: 256 << 10, protocols: Protocols::Ll128, channels: 1 },
    Row { step: 512 << 10, protocols: Protocols::Ll128, channels: 2 },
    Row { step: 2 << 20, protocols: Protocols::Ll128, channels: 4 },
    Row { step: 4 << 20, protocols: Protocols::Ll128, channels: 8 },
];

/// The table over TCP where NCCL's own kernels write host memory. Larger steps take what NCCL takes, without LL.
///
/// Measured with nccl-tests, NCCL 2.30.7, on two H200 of one host with 0 to 8 `net-tcp-threads`, by protocol and number of channels
/// (docs/benchmarks.md). All ranks go by one table, whatever threads their hosts have.
const OVER_TCP: [Row; 4] = [
    Row { step: 16 << 10, protocols: Protocols::All, channels: 1 },
    Row { step: 32 << 10, protocols: Protocols::WithoutLl, channels: 1 },
    Row { step: 512 << 10, protocols: Protocols::WithoutLl, channels: 2 },
    Row { step: 4 << 20, protocols: Protocols::WithoutLl, channels: 4 },
];

/// The table over TCP for collectives that pass all of their bytes from rank to rank, in one direction: broadcast and reduce.
///
/// Measured with nccl-tests' broadcast, NCCL 2.30.7, on one H200 with two ranks under MPS: above, no number of channels was faster than
/// NCCL's. Not measured with more ranks, whose links are as busy.
const CHAINED_OVER_TCP: [Row; 1] = [Row { step: 16 << 10, protocols: Protocols::All, channels: 1 }];

/// A number that differs between builds that choose differently.
pub fn revision() -> u64 {
    let text = format!(
        "{ROWS:?} {OVER_TCP:?} {CHAINED_OVER_TCP:?} {MEASURED:?} {AROUND:?} {TREE} LL128 in its rows alone"
    );
    crate::handle::sum(text.as_bytes())
}

/// Communicators that the tuner was measured with, by ranks and nodes: GPUs that are nodes by themselves, and two nodes of two.
///
/// The table goes by the bytes of a step alone. With 1,024 ranks an allreduce of 16 MiB would take one channel by it.
const MEASURED: [(usize, usize); 4] = [(2, 2), (3, 3), (4, 4), (4, 2)];

/// Whether the tuner was measured with communicators of `ranks` ranks on `nodes` nodes. The tuner leaves other communicators to NCCL.
pub fn is_measured(ranks: usize, nodes: usize) -> bool {
    MEASURED.contains(&(ranks, nodes))
}

/// What a collective of `bytes` over `ranks` ranks takes where GPUs push and pull.
pub fn choose(bytes: usize, ranks: usize) -> Row {
    row_of(&ROWS, bytes, ranks)
}

/// What it takes over TCP through host memory.
pub fn choose_over_tcp(collective: Collective, bytes: usize, ranks: usize) -> Row {
    match collective {
        Collective::Other => row_of(&CHAINED_OVER_TCP, bytes, 1),
        _ => row_of(&OVER_TCP, bytes, ranks),
    }
}

fn row_of(rows: &[Row], bytes: usize, ranks: usize) -> Row {
    let step = bytes / ranks.max(1);
    let found = rows.iter().copied().find(|row| step <= row.step);
    found.unwrap_or(Row { step: usize::MAX, protocols: Protocols::WithoutLl, channels: 0 })
}

/// Ranks for which LL goes around the ring. Two ranks leave NCCL nothing else to choose. With four ranks a step of the ring takes 6
/// to 10 us and PAT, which has Simple alone, 60 us in all.
const AROUND: std::ops::RangeInclusive<usize> = 3..=4;

/// Allreduces with steps of at most this number of bytes are faster on the tree than on the ring.
const TREE: usize = 512;

/// Whether a collective for which [`choose`] allows all protocols is fastest with LL on the ring and one channel, if LL arrives in host
/// memory.
pub fn ll_goes_around(collective: Collective, bytes: usize, ranks: usize) -> bool {
    let short = match collective {
        Collective::AllReduce => bytes / ranks.max(1) > TREE,
        Collective::Gathered => true,
        Collective::Other => false,
    };
    short && AROUND.contains(&ranks) && choose(bytes, ranks).protocols == Protocols::All
}

/// Whether an allreduce is fastest with LL on the tree, over TCP. In a step of the ring each rank sends a message, and on the tree one
/// rank of two does. A message takes about 5 us of a CPU at its sender, and that is most of the time of so short an allreduce. NCCL's
/// model knows nothing of that, and takes the ring for two ranks.
pub fn ll_takes_the_tree(collective: Collective, bytes: usize, ranks: usize) -> bool {
    collective == Collective::AllReduce && bytes / ranks.max(1) <= TREE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_collectives_take_ll_middle_ones_ll128_and_long_ones_what_nccl_takes_without_ll() {
        use Protocols::{All, Ll128, WithoutLl};
        let of = |bytes| {
            let row = choose(bytes, 2);
            (row.protocols, row.channels)
        };
        assert_eq!([8, 16 << 10].map(of), [(All, 0); 2]);
        assert_eq!([(16 << 10) + 2, 32 << 10].map(of), [(All, 1); 2]);
        assert_eq!([(32 << 10) + 2, 512 << 10].map(of), [(Ll128, 1); 2]);
        assert_eq!([(512 << 10) + 2, 1 << 20].map(of), [(Ll128, 2); 2]);
        assert_eq!([(1 << 20) + 2, 4 << 20].map(of), [(Ll128, 4); 2]);
        assert_eq!([(4 << 20) + 2, 8 << 20].map(of), [(Ll128, 8); 2]);
        assert_eq!([(8 << 20) + 2, 1 << 30].map(of), [(WithoutLl, 0); 2]);
        assert_eq!(choose(64 << 10, 4).protocols, All, "the step is what counts");
        assert_eq!(choose(0, 0), ROWS[0]);
    }

    #[test]
    fn over_tcp_short_collectives_take_ll_and_longer_ones_few_channels_without_it_a_broadcast_nccls() {
        use Protocols::{All, WithoutLl};
        let of = |bytes| {
            let row = choose_over_tcp(Collective::AllReduce, bytes, 2);
            (row.protocols, row.channels)
        };
        assert_eq!([8, 32 << 10].map(of), [(All, 1); 2]);
        assert_eq!([(32 << 10) + 2, 64 << 10].map(of), [(WithoutLl, 1); 2]);
        assert_eq!([(64 << 10) + 2, 1 << 20].map(of), [(WithoutLl, 2); 2]);
        assert_eq!([(1 << 20) + 2, 8 << 20].map(of), [(WithoutLl, 4); 2]);
        assert_eq!([(8 << 20) + 2, 1 << 30].map(of), [(WithoutLl, 0); 2]);
        // Of a broadcast all bytes pass each link, in one direction.
        let chained = |bytes| {
            [2, 4].map(|ranks| {
                let row = choose_over_tcp(Collective::Other, bytes, ranks);
                (row.protocols, row.channels)
            })
        };
        assert_eq!([8, 16 << 10].map(chained), [[(All, 1); 2]; 2]);
        assert_eq!([(16 << 10) + 1, 1 << 30].map(chained), [[(WithoutLl, 0); 2]; 2]);
    }

    #[test]
    fn short_steps_of_three_or_four_ranks_go_around_the_ring_with_ll() {
        use Collective::{AllReduce, Gathered, Other};
        for ranks in [3, 4] {
            assert!(ll_goes_around(Gathered, 8, ranks));
            assert!(ll_goes_around(Gathered, (16 << 10) * ranks, ranks));
            assert!(!ll_goes_around(Gathered, (17 << 10) * ranks, ranks), "LL128");
            assert!(!ll_goes_around(AllReduce, TREE * ranks, ranks), "the tree");
            assert!(ll_goes_around(AllReduce, (TREE + 1) * ranks, ranks));
            assert!(!ll_goes_around(Other, (16 << 10) * ranks, ranks));
        }
        for ranks in [0, 1, 2, 5, 64] {
            assert!(!ll_goes_around(Gathered, 1 << 10, ranks), "{ranks} ranks");
        }
    }

    #[test]
    fn short_allreduces_over_tcp_take_the_tree() {
        use Collective::{AllReduce, Gathered};
        for ranks in [2, 4, 64] {
            assert!(ll_takes_the_tree(AllReduce, TREE * ranks, ranks));
            assert!(!ll_takes_the_tree(AllReduce, (TREE + 1) * ranks, ranks));
            assert!(!ll_takes_the_tree(Gathered, 8, ranks));
        }
    }

    #[test]
    fn the_tuner_says_nothing_to_communicators_that_it_was_not_measured_with() {
        for (ranks, nodes) in [(1, 1), (2, 1), (4, 1), (8, 8), (16, 2), (16, 16), (128, 16), (1024, 128)] {
            assert!(!is_measured(ranks, nodes), "{ranks} ranks on {nodes} nodes");
        }
        assert!(is_measured(2, 2) && is_measured(4, 4) && is_measured(4, 2));
    }

    #[test]
    fn the_table_ascends() {
        assert!(
            [&ROWS[..], &OVER_TCP, &CHAINED_OVER_TCP]
                .iter()
                .all(|rows| rows.is_sorted_by_key(|row| row.step))
        );
    }
}
