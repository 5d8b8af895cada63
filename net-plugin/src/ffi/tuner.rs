//! The tuner interfaces v4 to v6: NCCL asks for each collective, and `tuning.rs` says which protocols and how many
//! channels it may take.

#![allow(non_upper_case_globals)] // The symbol's name is NCCL's.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::tables::{R, call, hot};
use crate::log::{self, Logger};
use crate::tuning::{Collective, Protocols};
use crate::{path, plugin, tuning};

/// The protocol `NCCL_PROTO_LL`.
const LL: usize = 0;
/// The protocol `NCCL_PROTO_LL128`.
const LL128: usize = 1;
/// The protocol `NCCL_PROTO_SIMPLE`.
const SIMPLE: usize = 2;
/// The algorithm `NCCL_ALGO_TREE`.
const TREE: usize = 0;
/// The algorithm `NCCL_ALGO_RING`.
const RING: usize = 1;
/// A cost, in microseconds, that is chosen only where there is nothing else. NCCL's own mark for a choice that is out, -1,
/// does not do: NCCL 2.32 marks such choices elsewhere, and takes the least cost of the others, -1 too.
const DEAR: f32 = 1e9;

/// `getCollInfo`, alike in v4 to v6.
type Info =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut f32, c_int, c_int, c_int, *mut c_int) -> R;

/// The table `ncclTuner_v4_t`.
#[repr(C)]
pub struct TunerV4 {
    name: *const c_char,
    init: unsafe extern "C" fn(usize, usize, Logger, *mut *mut c_void) -> R,
    info: Info,
    destroy: unsafe extern "C" fn(*mut c_void) -> R,
}

/// `init` of v5 and v6. The last two arguments are what NCCL knows of NVLink domains, and the constants of
/// its model, which a tuner may change.
type InitV5 =
    unsafe extern "C" fn(*mut *mut c_void, u64, usize, usize, Logger, *const c_void, *mut c_void) -> R;

/// The table `ncclTuner_v5_t`.
#[repr(C)]
pub struct TunerV5 {
    name: *const c_char,
    init: InitV5,
    info: Info,
    finalize: unsafe extern "C" fn(*mut c_void) -> R,
}

/// The table `ncclTuner_v6_t`.
#[repr(C)]
pub struct TunerV6 {
    v5: TunerV5,
    /// `getChunkSize`. NULL: NCCL's own chunks.
    chunk: *const c_void,
}

const _: () = {
    assert!(size_of::<TunerV4>() == 32 && size_of::<TunerV5>() == 32 && size_of::<TunerV6>() == 40);
};

// SAFETY: a constant table, which is never written.
unsafe impl Sync for TunerV4 {}
// SAFETY: a constant table, which is never written.
unsafe impl Sync for TunerV5 {}
// SAFETY: a constant table, which is never written.
unsafe impl Sync for TunerV6 {}

/// What the tuner knows of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    ranks: usize,
    /// Each rank is a node by itself, so that all messages go over this plugin.
    alone_on_nodes: bool,
    /// LL128 may be taken for any collective of the communicator ([`lands_whole`]).
    ll128: bool,
    /// Messages of the protocol LL arrive in host memory ([`crate::calls`]).
    ll_on_host: bool,
    /// All connections are over TCP.
    over_tcp: bool,
    /// NCCL hands over GPU memory.
    gpu: bool,
}

impl Known {
    /// As a context, in place of an address. Never zero, because a communicator has a rank.
    fn to_word(self) -> usize {
        let flags = [self.over_tcp, self.gpu, self.alone_on_nodes, self.ll_on_host, self.ll128];
        flags.iter().fold(self.ranks, |word, flag| word << 1 | usize::from(*flag))
    }

    /// The context's meaning; `None` where the tuner says nothing.
    fn of_word(word: usize) -> Option<Self> {
        let flag = |bit: usize| word >> bit & 1 == 1;
        (word != 0).then(|| Known {
            ranks: word >> 5,
            over_tcp: flag(4),
            gpu: flag(3),
            alone_on_nodes: flag(2),
            ll_on_host: flag(1),
            ll128: flag(0),
        })
    }
}

/// Whether every message of a communicator lands in GPU memory, in lines of 128 bytes that arrive whole.
///
/// All connections must go over this plugin, so no two ranks may be on one node: NCCL has reasons of its own against LL128
/// between GPUs of a node. And NCCL must hand over GPU memory, which it does of its own accord only near the device, so at the
/// level that the plugin sets (`path.rs`): lines in host memory are two cache lines, and a GPU may see the second one first.
/// `v5`: NCCL has the tuner interface v5. Earlier releases were also built with CUDA 11, whose LL128 they avoid on some GPUs.
fn lands_whole(ranks: usize, nodes: usize, v5: bool, gdr_level: Option<&OsStr>) -> bool {
    v5 && nodes == ranks && gdr_level.is_some_and(|level| level == "SYS")
}

/// Makes the context of a communicator. `comm`: its number, which NCCL says since v5 of the interface.
fn begin(comm: Option<u64>, ranks: usize, nodes: usize, logger: Logger, context: *mut *mut c_void) -> R {
    log::set_logger(logger);
    call("tuner init", || {
        // A context that is not NULL means that the tuner speaks, which it does where it was measured alone.
        let properties = plugin::properties(0).ok();
        let over_tcp = properties.is_some_and(|p| p.is_in_order());
        let gpu = properties.is_some_and(|p| p.takes_gpu_memory());
        // A communicator may have another network (`netName`), and has this tuner nevertheless.
        let is_served = comm.is_none_or(plugin::serves);
        let speaks = is_served && tuning::is_measured(ranks, nodes) && (gpu || over_tcp);
        let level = std::env::var_os("NCCL_NET_GDR_LEVEL");
        let ll128 = lands_whole(ranks, nodes, comm.is_some(), level.as_deref());
        let ll_on_host = path::ll_lands_on_host();
        let known = Known { ranks, alone_on_nodes: nodes == ranks, ll128, ll_on_host, over_tcp, gpu };
        let word = if speaks { known.to_word() } else { 0 };
        // SAFETY: NCCL gives a place that can be written.
        unsafe { *context = std::ptr::without_provenance_mut(word) };
        Ok(())
    })
}

unsafe extern "C" fn init_v4(ranks: usize, nodes: usize, logger: Logger, context: *mut *mut c_void) -> R {
    begin(None, ranks, nodes, logger, context)
}

unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    comm: u64,
    ranks: usize,
    nodes: usize,
    logger: Logger,
    _domains: *const c_void,
    _constants: *mut c_void,
) -> R {
    begin(Some(comm), ranks, nodes, logger, context)
}

unsafe extern "C" fn info(
    context: *mut c_void,
    function: c_int,
    bytes: usize,
    _operations: c_int,
    costs: *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    channels: *mut c_int,
) -> R {
    hot("tuner getCollInfo", || {
        let (algorithms, protocols) = (algorithms.max(0) as usize, protocols.max(0) as usize);
        let Some(known) = Known::of_word(context.addr()) else { return Ok(()) };
        let free = !pinned();
        let costs = match costs.is_null() {
            true => &mut [],
            // SAFETY: NCCL's table of algorithms by protocols, which is ours until the call returns.
            false => unsafe { std::slice::from_raw_parts_mut(costs, algorithms * protocols) },
        };
        let collective = collective(function);
        let around_nodes = free && known.alone_on_nodes;
        if known.over_tcp && around_nodes && tuning::ll_takes_the_tree(collective, bytes, known.ranks) {
            take(costs, protocols, TREE, LL);
        }
        let mut choice = match known.gpu {
            true => tuning::choose(bytes, known.ranks),
            false => tuning::choose_over_tcp(collective, bytes, known.ranks),
        };
        match choice.protocols {
            Protocols::All => {
                let around = around_nodes
                    && (known.ll_on_host || !known.gpu)
                    && tuning::ll_goes_around(collective, bytes, known.ranks);
                if around && take(costs, protocols, RING, LL) {
                    choice.channels = 1;
                }
            }
            Protocols::Ll128 if free && known.ll128 => {
                shun(costs, protocols, LL);
                take_ll128(costs, protocols);
            }
            Protocols::Ll128 | Protocols::WithoutLl => {
                shun(costs, protocols, LL);
                let ring = tuning::pair_takes_the_ring(collective, bytes, known.ranks);
                if let Some(channels) = ring.filter(|_| !known.gpu && around_nodes)
                    && take(costs, protocols, RING, SIMPLE)
                {
                    choice.channels = channels;
                }
            }
        }
        // NCCL's model, which knows nothing of the copier's copies, takes LL128 for more where it is told a near place of the device.
        if free && choice.protocols != Protocols::Ll128 {
            shun(costs, protocols, LL128);
        }
        if choice.channels > 0 && !channels.is_null() {
            // SAFETY: NCCL gives a place that can be written.
            unsafe { *channels = choice.channels };
        }
        Ok(())
    })
}

/// The collective that NCCL names by its number, `ncclFunc_t`.
fn collective(function: c_int) -> Collective {
    match function {
        2 | 3 => Collective::Gathered,
        4 => Collective::AllReduce,
        _ => Collective::Other,
    }
}

/// Makes a protocol the last choice in a table of costs.
fn shun(costs: &mut [f32], protocols: usize, which: usize) {
    let its = costs.iter_mut().enumerate().filter(|(at, _)| at % protocols == which);
    // A negative cost is a choice that is out.
    its.filter(|(_, cost)| **cost >= 0.0).for_each(|(_, cost)| *cost = DEAR);
}

/// Makes a protocol on an algorithm the first choice in a table of costs, if it is there for the collective. False: it is not, and
/// the table is as before.
fn take(costs: &mut [f32], protocols: usize, algorithm: usize, protocol: usize) -> bool {
    let row = costs.chunks_exact_mut(protocols.max(1)).nth(algorithm);
    let Some(cost) = row.and_then(|row| row.get_mut(protocol)).filter(|cost| **cost >= 0.0) else {
        return false;
    };
    *cost = 0.0;
    true
}

/// Makes LL128 on the ring the first choice in a table of costs, if the ring is there for the collective.
///
/// NCCL marks LL128 as out where it is told no place of the device on PCIe, or a far one (`props.rs`); NCCL 2.31 and later then take no
/// protocol that is marked, whatever it costs. On the ring NCCL has kernels of every
/// protocol for each collective that has a ring; other algorithms have none of LL128 in part, so they stay as they are.
fn take_ll128(costs: &mut [f32], protocols: usize) {
    let Some(ring) = costs.chunks_exact_mut(protocols.max(1)).nth(RING) else { return };
    let there = ring.iter().any(|cost| *cost >= 0.0);
    if let (true, Some(cost)) = (there, ring.get_mut(LL128)) {
        *cost = 0.0;
    }
}

/// Whether the user chose algorithm or protocol. NCCL marks what the user excluded as it marks what is impossible.
///
/// Read once: NCCL has put its configuration file's variables into the environment by then, and reads its variables once too.
fn pinned() -> bool {
    static PINNED: OnceLock<bool> = OnceLock::new();
    *PINNED.get_or_init(|| ["NCCL_PROTO", "NCCL_ALGO"].iter().any(|name| std::env::var_os(name).is_some()))
}

unsafe extern "C" fn end(_context: *mut c_void) -> R {
    0
}

const NAME: *const c_char = c"pushgate".as_ptr();
const V5: TunerV5 = TunerV5 { name: NAME, init: init_v5, info, finalize: end };

/// The symbol that NCCL 2.21 and later looks up.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v4: TunerV4 = TunerV4 { name: NAME, init: init_v4, info, destroy: end };

/// The symbol of v5, which NCCL takes in place of v4 where it knows both.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v5: TunerV5 = V5;

/// The symbol of v6, which NCCL takes in place of the earlier ones where it knows it.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v6: TunerV6 = TunerV6 { v5: V5, chunk: std::ptr::null() };

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether LL is the choice that NCCL makes from a table of costs, the least of those that are not out.
    fn takes_ll(costs: &[f32], protocols: usize) -> bool {
        let least = |ll: bool| {
            let of = costs.iter().enumerate().filter(|(at, _)| (at % protocols == LL) == ll);
            of.map(|(_, cost)| *cost).filter(|cost| *cost >= 0.0).fold(f32::INFINITY, f32::min)
        };
        least(true) < least(false)
    }

    #[test]
    fn ll_is_the_last_choice_and_what_is_out_stays_out() {
        let mut costs = [1.0, 2.0, 3.0, 4.0, -1.0, 5.0, -1.0, 0.0, 0.0];
        shun(&mut costs, 3, LL);
        assert_eq!(costs, [DEAR, 2.0, 3.0, DEAR, -1.0, 5.0, -1.0, 0.0, 0.0]);
        // A user who has pinned LL keeps it: nothing else can be chosen.
        let mut pinned = [1.0, -1.0, -1.0, 4.0, -1.0, -1.0];
        shun(&mut pinned, 3, LL);
        assert!(pinned.iter().all(|cost| *cost == DEAR || *cost == -1.0));
        shun(&mut [], 3, LL);
    }

    #[test]
    fn nccl_takes_ll_where_it_alone_costs_least() {
        assert!(takes_ll(&[2.0, -1.0, 3.0, 1.0, -1.0, 5.0], 3));
        assert!(!takes_ll(&[2.0, -1.0, 1.0, 4.0, -1.0, 5.0], 3));
        assert!(!takes_ll(&[2.0, -1.0, 2.0], 3), "a tie");
        assert!(!takes_ll(&[-1.0, -1.0, 2.0], 3), "out");
        assert!(!takes_ll(&[], 3) && !takes_ll(&[], 0));
        let mut shunned = [1.0, -1.0, 2.0];
        shun(&mut shunned, 3, LL);
        assert!(!takes_ll(&shunned, 3));
    }

    /// The costs of an allreduce after the choice, tree and ring by LL, LL128 and Simple, of 1 each before; and the channels, -1 before.
    fn chosen(known: Known, bytes: usize) -> ([f32; 6], c_int) {
        let (mut costs, mut channels) = ([1.0f32; 6], -1);
        let context = std::ptr::without_provenance_mut(known.to_word());
        // SAFETY: a table of two algorithms by three protocols, and a place for the channels.
        let said = unsafe { info(context, 4, bytes, 1, costs.as_mut_ptr(), 2, 3, 0, &mut channels) };
        assert_eq!(said, 0);
        (costs, channels)
    }

    #[test]
    fn over_tcp_allreduces_take_tree_and_ring_where_each_rank_is_a_node() {
        let known = |ranks, alone_on_nodes| Known {
            ranks,
            alone_on_nodes,
            ll128: false,
            ll_on_host: true,
            over_tcp: true,
            gpu: false,
        };
        let [pair, four] = [2, 4].map(|ranks| known(ranks, true));
        assert_eq!(chosen(pair, 8), ([0.0, DEAR, 1.0, 1.0, DEAR, 1.0], 1));
        assert_eq!(chosen(pair, 256 << 10), ([DEAR, DEAR, 1.0, DEAR, DEAR, 0.0], 4));
        assert_eq!(chosen(pair, 64 << 20), ([DEAR, DEAR, 1.0, DEAR, DEAR, 1.0], -1));
        assert_eq!(chosen(four, 16 << 10), ([1.0, DEAR, 1.0, 0.0, DEAR, 1.0], 1));
        assert_eq!(chosen(four, 256 << 10), ([DEAR, DEAR, 1.0, DEAR, DEAR, 1.0], -1));
        // Two nodes of two.
        assert_eq!(chosen(known(4, false), 16 << 10), ([1.0, DEAR, 1.0, 1.0, DEAR, 1.0], 1));
        assert_eq!(chosen(known(2, false), 256 << 10), ([DEAR, DEAR, 1.0, DEAR, DEAR, 1.0], -1));
    }

    #[test]
    fn ll128_is_taken_in_its_rows_alone_though_nccl_allows_it_because_a_device_is_near() {
        let known = Known {
            ranks: 2,
            alone_on_nodes: true,
            ll128: true,
            ll_on_host: true,
            over_tcp: false,
            gpu: true,
        };
        let costs_of = |bytes: usize| chosen(known, bytes).0;
        assert_eq!(costs_of(8), [1.0, DEAR, 1.0, 1.0, DEAR, 1.0]);
        assert_eq!(costs_of(256 << 10), [DEAR, 1.0, 1.0, DEAR, 0.0, 1.0]);
        assert_eq!(costs_of(64 << 20), [DEAR, DEAR, 1.0, DEAR, DEAR, 1.0]);
    }

    /// In a process of its own, because variables say which network it is.
    #[test]
    #[ignore = "runs in a process of the test of communicators of another network"]
    fn a_process_whose_network_is_over_tcp() {
        let speaks = |comm: u64| {
            let mut context = std::ptr::null_mut();
            // SAFETY: a place that can be written; the rest is not read.
            let said =
                unsafe { init_v5(&mut context, comm, 2, 2, None, std::ptr::null(), std::ptr::null_mut()) };
            assert_eq!(said, 0);
            !context.is_null()
        };
        let [net, again] = [plugin::Table::Net; 2].map(|table| plugin::open(None, 7, table).unwrap());
        let rma = plugin::open(None, 8, plugin::Table::Rma).unwrap();
        assert!(speaks(7) && !speaks(8) && !speaks(9));
        plugin::close(net);
        assert!(speaks(7), "it has another context");
        plugin::close(again);
        assert!(!speaks(7));
        plugin::close(rma);
    }

    #[test]
    fn p3_communicators_of_another_network_are_left_to_nccl() {
        let mut process = std::process::Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", "ffi::tuner::tests::a_process_whose_network_is_over_tcp", "--ignored"]);
        let ended = process.env("PUSHGATE_QP", "tcp").env("PUSHGATE_DEVICE", "cpu").output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&ended.stderr));
    }

    #[test]
    fn a_context_keeps_the_ranks_and_all_flags() {
        for flags in 0..32 {
            let [over_tcp, gpu, alone_on_nodes, ll128, ll_on_host] =
                [16, 8, 4, 2, 1].map(|bit| flags & bit != 0);
            let known = Known { ranks: 64, alone_on_nodes, ll128, ll_on_host, over_tcp, gpu };
            assert_eq!(Known::of_word(known.to_word()), Some(known));
        }
        assert_eq!(Known::of_word(0), None);
    }

    #[test]
    fn p3_ll128_is_taken_only_where_everything_lands_in_gpu_memory_over_this_plugin() {
        let level = |name: &'static str| Some(OsStr::new(name));
        assert!(lands_whole(2, 2, true, level("SYS")));
        assert!(!lands_whole(4, 2, true, level("SYS")), "two ranks of a node");
        assert!(!lands_whole(2, 2, false, level("SYS")), "an earlier NCCL");
        for other in [None, level("LOC"), level("PIX"), level("PHB"), level("")] {
            assert!(!lands_whole(2, 2, true, other), "{other:?}: host memory");
        }
    }

    #[test]
    fn ll_is_the_first_choice_on_the_ring_or_on_the_tree_where_it_is_there() {
        // Tree, ring, another: LL, LL128, Simple.
        let mut costs = [1.0, -1.0, 3.0, 4.0, -1.0, 5.0, -1.0, -1.0, 2.0];
        assert!(take(&mut costs, 3, RING, LL));
        assert_eq!(costs, [1.0, -1.0, 3.0, 0.0, -1.0, 5.0, -1.0, -1.0, 2.0]);
        assert!(takes_ll(&costs, 3));
        assert!(take(&mut costs, 3, TREE, LL));
        assert_eq!(costs[..4], [0.0, -1.0, 3.0, 0.0]);
        let mut out = [1.0, -1.0, 3.0, -1.0, -1.0, 5.0, -1.0, -1.0, 2.0];
        let before = out;
        assert!(!take(&mut out, 3, RING, LL) && out == before, "{out:?}");
        assert!(
            !take(&mut [], 3, RING, LL) && !take(&mut [], 0, RING, LL) && !take(&mut [1.0], 1, RING, SIMPLE)
        );
    }

    #[test]
    fn collectives_are_told_apart_by_their_numbers() {
        use Collective::{AllReduce, Gathered, Other};
        // Broadcast, Reduce, AllGather, ReduceScatter, AllReduce, SendRecv.
        let all: Vec<Collective> = (0..6).map(collective).collect();
        assert_eq!(all, [Other, Other, Gathered, Gathered, AllReduce, Other]);
        assert_eq!(collective(-1), Other);
    }

    #[test]
    fn ll128_is_the_first_choice_on_the_ring_alone_and_only_where_the_ring_is_there() {
        // Tree, ring, another: LL, LL128, Simple.
        let mut costs = [1.0, -1.0, 3.0, 4.0, -1.0, 5.0, -1.0, -1.0, 2.0];
        take_ll128(&mut costs, 3);
        assert_eq!(costs, [1.0, -1.0, 3.0, 4.0, 0.0, 5.0, -1.0, -1.0, 2.0]);
        let mut without = [1.0, -1.0, 3.0, -1.0, -1.0, -1.0];
        take_ll128(&mut without, 3);
        assert_eq!(without, [1.0, -1.0, 3.0, -1.0, -1.0, -1.0]);
        // Tables of no or other shapes are left alone.
        take_ll128(&mut [], 3);
        take_ll128(&mut [], 0);
        let mut narrow = [1.0, 2.0];
        take_ll128(&mut narrow, 1);
        assert_eq!(narrow, [1.0, 2.0]);
    }
}
