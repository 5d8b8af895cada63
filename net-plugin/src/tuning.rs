//! Which of NCCL's protocols, and how many channels, a collective over this plugin takes. Pure: figures in, choice out.
//!
//! NCCL's own model can't know what is slow here. A message costs the thread that drives the queue pairs about 2 us:
//! many channels with short messages are slower than few. The low-latency protocol (LL) sends twice the bytes, out
//! of host memory, by a CPU. LL128 sends one sixteenth more than the payload, out of GPU memory, and its kernels take what
//! arrives line by line, so a step of the ring begins before the message of the step before is complete.
//!
//! Over TCP, where a CPU copies all bytes at both ends, NCCL's model takes LL with eight channels up to 1 MiB, and the tree for two ranks.

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
/// Measured with nccl-tests, NCCL 2.30.7, on two H200 of one host: two ranks, and under MPS four ranks as two and as four nodes
/// (docs/benchmarks.md). With one or two channels in place of NCCL's number, collectives of 128 KiB to 2 MiB took up to twice the time.
const OVER_TCP: [Row; 1] = [Row { step: 16 << 10, protocols: Protocols::All, channels: 1 }];

/// Allreduces of two ranks over TCP with longer steps than those of [`OVER_TCP`] and at most this number of bytes take the ring with
/// [`PAIR_CHANNELS`]. NCCL takes the tree, on which each rank waits for the whole way up and down, or more channels.
const PAIR: usize = 1 << 20;

/// Channels of the ring for [`PAIR`]: two to eight took the same time.
const PAIR_CHANNELS: i32 = 4;

/// A number that differs between builds that choose differently.
pub fn revision() -> u64 {
    let text = format!(
        "{ROWS:?} {OVER_TCP:?} {PAIR} {PAIR_CHANNELS} {MEASURED:?} {AROUND:?} {TREE} LL128 in its rows alone"
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
    // A broadcast passes all of its bytes from rank to rank, in one direction.
    row_of(&OVER_TCP, bytes, if collective == Collective::Other { 1 } else { ranks })
}

/// Channels with which a collective over TCP is fastest on the ring without LL, if it is that. `ranks`: each a node.
pub fn pair_takes_the_ring(collective: Collective, bytes: usize, ranks: usize) -> Option<i32> {
    let is_long = choose_over_tcp(collective, bytes, ranks).protocols == Protocols::WithoutLl;
    (collective == Collective::AllReduce && ranks == 2 && is_long && bytes / 2 <= PAIR)
        .then_some(PAIR_CHANNELS)
}

fn row_of(rows: &[Row], bytes: usize, ranks: usize) -> Row {
    let step = bytes / ranks.max(1);
    let found = rows.iter().copied().find(|row| step <= row.step);
    found.unwrap_or(Row { step: usize::MAX, protocols: Protocols::WithoutLl, channels: 0 })
}

/// Ranks for which LL goes around the ring. Two ranks leave NCCL nothing else to choose. With four ranks a step of the ring takes 6
/// to 10 us and PAT, which has Simple alone, 60 us in all. Over TCP an allreduce on the tree takes up to twice as long as on the ring.
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
    fn over_tcp_short_collectives_take_ll_with_one_channel_and_longer_ones_what_nccl_takes_without_ll() {
        use Protocols::{All, WithoutLl};
        let of = |collective, bytes, ranks| {
            let row = choose_over_tcp(collective, bytes, ranks);
            (row.protocols, row.channels)
        };
        for ranks in [2, 4] {
            for collective in [Collective::AllReduce, Collective::Gathered] {
                assert_eq!([8, (16 << 10) * ranks].map(|bytes| of(collective, bytes, ranks)), [(All, 1); 2]);
                let long = [(16 << 10) * ranks + ranks, 1 << 30];
                assert_eq!(long.map(|bytes| of(collective, bytes, ranks)), [(WithoutLl, 0); 2]);
            }
            let chained = |bytes| of(Collective::Other, bytes, ranks);
            assert_eq!([8, 16 << 10].map(chained), [(All, 1); 2]);
            assert_eq!([(16 << 10) + 1, 1 << 30].map(chained), [(WithoutLl, 0); 2]);
        }
    }

    #[test]
    fn allreduces_of_middle_length_between_two_ranks_over_tcp_take_the_ring() {
        use Collective::{AllReduce, Gathered, Other};
        let (above_ll, longest) = ((32 << 10) + 2, 2 << 20);
        assert_eq!([above_ll, longest].map(|bytes| pair_takes_the_ring(AllReduce, bytes, 2)), [Some(4); 2]);
        assert_eq!(
            [8, 32 << 10, longest + 2].map(|bytes| pair_takes_the_ring(AllReduce, bytes, 2)),
            [None; 3]
        );
        assert_eq!([Gathered, Other].map(|other| pair_takes_the_ring(other, 1 << 20, 2)), [None; 2]);
        assert_eq!([0, 1, 3, 4].map(|ranks| pair_takes_the_ring(AllReduce, 1 << 20, ranks)), [None; 4]);
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
        assert!(ROWS.is_sorted_by_key(|row| row.step));
    }
}
