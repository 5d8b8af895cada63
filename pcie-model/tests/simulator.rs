//! Compares the simulator with the formulas, and tests what only the simulator shows.

use proptest::prelude::*;
use pushgate_pcie_model::cost::{self, read_rate, read_time, write_time};
use pushgate_pcie_model::link::PAYLOADS;
use pushgate_pcie_model::simulator::split::{self, Piece};
use pushgate_pcie_model::simulator::{Buffers, Kind, Load, Machine};
use pushgate_pcie_model::{Completions, Dllps, Hop, Link, Parameters, Route};

fn link() -> impl Strategy<Value = Link> {
    (
        (1u32..=6, 0u32..=4, 0usize..6, 0usize..6, any::<bool>(), 1u32..=512),
        (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
    )
        .prop_map(|((generation, lanes, mps, mrrs, rcb, tags), (ecrc, addr64, chunks, symbols))| Link {
            generation,
            lanes: 1 << lanes,
            mps: PAYLOADS[mps],
            mrrs: PAYLOADS[mrrs],
            rcb: if rcb { 128 } else { 64 },
            tags,
            ecrc,
            addr64,
            completions: if chunks { Completions::Rcb } else { Completions::Mps },
            dllps: if symbols { Dllps::SymbolTimes } else { Dllps::PcieBench },
        })
}

fn hops() -> impl Strategy<Value = Vec<Hop>> {
    prop::collection::vec(prop::sample::select(vec![Hop::Switch, Hop::RootComplex, Hop::Socket]), 0..=6)
}

fn parameters() -> impl Strategy<Value = Parameters> {
    (
        100.0..3000.0f64,
        0.0..0.9f64,
        20.0..200.0f64,
        100.0..600.0f64,
        any::<bool>(),
        prop::option::of(4096u64..1 << 20),
    )
        .prop_map(|(rtt_ns, memory, switch_ns, root_ns, store_and_forward, completion_buffer)| {
            Parameters {
                rtt_ns,
                memory_ns: rtt_ns * memory,
                switch_ns,
                root_ns,
                store_and_forward,
                completion_buffer,
                ..Parameters::default()
            }
        })
}

/// Room for everything that any of these links has on its way.
const AMPLE: Buffers =
    Buffers { posted: (1 << 20, 1 << 30), non_posted: 1 << 20, completion: (1 << 20, 1 << 30) };

fn machine(route: &Route, p: &Parameters) -> Machine {
    Machine { buffers: AMPLE, ..Machine::of(route, &route.hops, p) }
}

fn near(got: f64, want: f64, part: f64) -> Result<(), TestCaseError> {
    let off = (got / want - 1.0).abs();
    prop_assert!(off <= part, "simulator {got}, formula {want}: {:.2} % apart", off * 100.0);
    Ok(())
}

/// Runs this many random cases, unless PROPTEST_CASES asks for another number.
fn cases(usual: u32) -> ProptestConfig {
    let all = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_some() { all } else { ProptestConfig { cases: usual, ..all } }
}

proptest! {
    #![proptest_config(cases(256))]

    /// The closed forms count the TLPs and bytes that cutting one by one produces.
    #[test]
    fn closed_forms_count_what_cutting_makes(link in link(), address in 0u64..10_000, bytes in 0u64..40_000, tlp in 2u32..=12) {
        let requests: Vec<Piece> = split::requests(&link, address, bytes).collect();
        let answers: Vec<Piece> = requests.iter().flat_map(|r| split::completions(&link, *r)).collect();
        let read = link.read_wire(address, bytes);
        prop_assert_eq!(read.requests, requests.len() as u64);
        prop_assert_eq!(read.completions, answers.len() as u64);
        prop_assert_eq!(read.payload, answers.iter().map(Piece::payload).sum::<u64>());
        prop_assert_eq!(answers.iter().map(|p| p.bytes).sum::<u64>(), bytes);
        prop_assert_eq!(read.request_wire, requests.iter().map(|_| split::on_wire(&link, true, 0)).sum::<u64>());
        prop_assert_eq!(read.wire, answers.iter().map(|p| split::on_wire(&link, false, p.payload())).sum::<u64>());
        for p in &answers {
            prop_assert!(p.bytes <= link.mps.into());
        }

        let tlp = (1u32 << tlp).min(link.mps);
        let writes: Vec<Piece> = split::writes(tlp, address, bytes).collect();
        let wire = writes.iter().map(|p| split::on_wire(&link, true, p.payload())).sum::<u64>();
        prop_assert_eq!(link.write_wire(address, bytes, tlp).unwrap(), wire);
    }

}

// Each of these simulates up to 100,000 TLPs over up to six hops.
proptest! {
    #![proptest_config(cases(40))]

    /// A read of any size takes as long as `read_time` says.
    #[test]
    fn reads_take_the_time_of_the_formula(
        link in link(), hops in hops(), p in parameters(), address in 0u64..8192, bytes in 1u64..2_000_000,
    ) {
        let route = Route { link, hops, ..Route::default() };
        let out = machine(&route, &p).run(&Load { kind: Kind::Read, address, bytes }).unwrap();
        let rtt = cost::round_trip(&route.hops, &p);
        near(out.time_ns, read_time(&route, &p, rtt, address, bytes, f64::INFINITY), 0.05)?;
    }

    /// A stream of reads reaches the least of what the wire, the tags and the room for completions
    /// allow.
    #[test]
    fn reads_reach_the_rate_of_the_formula(link in link(), tags in 1u32..64, hops in hops(), p in parameters()) {
        let link = Link { tags, ..link };
        let route = Route { link, hops, ..Route::default() };
        let rate = read_rate(&route, &p, cost::round_trip(&route.hops, &p));
        // Many times what is in flight.
        let mrrs = u64::from(link.mrrs);
        let flight = p.completion_buffer.map_or(u64::MAX, |b| b / mrrs).min(link.tags.into()) * mrrs;
        // Whole rounds, and quarters of them: a round arrives in a burst.
        let bytes = flight * (1u64 << 16).div_ceil(flight).max(20).next_multiple_of(4);
        let out = machine(&route, &p).run(&Load::read(bytes)).unwrap();
        near(out.gbs, rate.gbs, 0.05)?;
    }

    /// Posted writes take one way plus the wire's time, whatever their alignment and width.
    #[test]
    fn writes_take_the_time_of_the_formula(
        link in link(), hops in hops(), p in parameters(), address in 0u64..8192, bytes in 1u64..1_000_000, tlp in 2u32..=12,
    ) {
        let route = Route { link, hops, ..Route::default() };
        let tlp = (1u32 << tlp).min(link.mps);
        // As many TLPs as a long run of wide ones has.
        let bytes = bytes.min(u64::from(tlp) * 4000);
        let load = Load { kind: Kind::Write { tlp, interval_ns: 0.0 }, address, bytes };
        let out = machine(&route, &p).run(&load).unwrap();
        near(out.time_ns, write_time(&route, &p, address, bytes, tlp).unwrap(), 0.05)?;
    }

    /// A seed always gives the same run; another seed gives another run.
    #[test]
    fn one_seed_is_one_run(seed in any::<u64>()) {
        let route = Route { hops: vec![Hop::Switch], ..Route::default() };
        let m = Machine { jitter_ns: 90.0, seed, ..machine(&route, &Parameters::default()) };
        let load = Load::read(1 << 16);
        let first = m.run(&load).unwrap();
        prop_assert_eq!(&first, &m.run(&load).unwrap());
        let other = Machine { seed: !seed, ..m }.run(&load).unwrap();
        prop_assert_ne!(first.delay_ns, other.delay_ns);
    }
}

/// 512 bytes answered by two completions of 256 bytes with 20 bytes each around them: 512 of 552.
#[test]
fn a_read_of_512_has_92_75_percent() {
    let link = Link::default();
    let model = link.read_wire(0, 512);
    assert_eq!((model.completions, model.wire), (2, 552));
    let out = machine(&Route::default(), &Parameters::default()).run(&Load::read(512)).unwrap();
    assert_eq!((out.data_tlps, out.data_wire), (2, 552));
    for wire in [model.wire, out.data_wire] {
        assert_eq!(format!("{:.2}", 512.0 / wire as f64 * 100.0), "92.75");
    }
}

/// Few credits limit a stream of posted writes to what they cover: `room / (hop + wire + update)`.
#[test]
fn credits_bound_posted_writes() {
    let route = Route { hops: vec![Hop::RootComplex], ..Route::default() };
    let p = Parameters::default();
    let full = Load::write(1 << 20, 256);
    for tlps in [4u32, 16, 64] {
        let m = Machine {
            buffers: Buffers { posted: (tlps, 1 << 20), ..AMPLE },
            credit_ns: 50.0,
            ..machine(&route, &p)
        };
        let round = p.root_ns + 280.0 / route.link.tlp() + m.credit_ns;
        let bound = (f64::from(tlps) * 256.0 / round).min(route.link.write_rate(256).unwrap());
        let got = m.run(&full).unwrap().gbs;
        assert!((got / bound - 1.0).abs() < 0.05, "{tlps} TLPs of room: {got} for {bound}");
        // Data credits limit in the same way.
        let by_data = Machine { buffers: Buffers { posted: (1 << 20, tlps * 256), ..AMPLE }, ..m };
        assert!((by_data.run(&full).unwrap().gbs / bound - 1.0).abs() < 0.05);
    }
}

/// Few credits limit completions and requests in a hop. A reader has room for everything that it
/// asked for, so nothing is limited there.
#[test]
fn credits_bound_reads_in_hops_and_not_at_ends() {
    let route = Route { hops: vec![Hop::RootComplex], ..Route::default() };
    let p = Parameters::default();
    let load = Load::read(1 << 20);
    let link = &route.link;
    let run = |buffers, hops: &[Hop]| {
        let m = Machine { buffers, credit_ns: 50.0, ..Machine::of(&route, hops, &p) };
        m.run(&load).unwrap().gbs
    };
    for tlps in [4u32, 16] {
        let bound = |payload: f64, wire: f64| {
            let round = p.root_ns + wire / link.tlp() + 50.0;
            (f64::from(tlps) * payload / round).min(link.read_rate())
        };
        for (buffers, bound) in [
            (Buffers { completion: (tlps, 1 << 20), ..AMPLE }, bound(256.0, 276.0)),
            (Buffers { completion: (1 << 20, tlps * 256), ..AMPLE }, bound(256.0, 276.0)),
            (Buffers { non_posted: tlps, ..AMPLE }, bound(512.0, 24.0)),
        ] {
            let got = run(buffers, &route.hops);
            assert!((got / bound - 1.0).abs() < 0.05, "{buffers:?}: {got} for {bound}");
        }
        let tight = Buffers { completion: (tlps, 256), ..AMPLE };
        assert_eq!(run(tight, &[]), run(AMPLE, &[]));
    }
}

/// Writers that share a link share it evenly and lose none of it; only the delay grows.
#[test]
fn writers_share_a_link_evenly() {
    let route = Route { hops: vec![Hop::Switch, Hop::RootComplex], ..Route::default() };
    let p = Parameters::default();
    let whole = route.link.write_rate(256).unwrap();
    let mut before = 0.0;
    for writers in [1, 2, 4, 8] {
        let m = Machine { requesters: writers, ..Machine::of(&route, &route.hops, &p) };
        let out = m.run(&Load::write(1 << 19, 256)).unwrap();
        assert!((out.gbs / whole - 1.0).abs() < 0.05, "{writers} writers: {} of {whole}", out.gbs);
        let (least, most) = (out.each_ns.iter().copied().fold(f64::MAX, f64::min), out.time_ns);
        assert!(most / least < 1.02, "{writers} writers end between {least} and {most}");
        assert!(out.delay_ns.0 >= before, "{writers} writers: {} after {before}", out.delay_ns.0);
        before = out.delay_ns.0;
    }
    assert!(before > 1e4, "eight writers fill the switch's buffers: {before} ns");
}

/// The published case of two GPUs below one switch that write to two root ports: a tenth or less of
/// one GPU's rate, with reads unaffected. Arbitration and finite buffers do not cause that. A root
/// complex does that lets no posted write go to a second target before the first has it, because
/// the switch's turns make every TLP a change of target.
#[test]
fn only_an_ordering_host_collapses() {
    let route = Route { hops: vec![Hop::Switch, Hop::RootComplex], ..Route::default() };
    let p = Parameters::default();
    let whole = route.link.write_rate(256).unwrap();
    let run = |requesters, targets, drain_ns, load| {
        let m = Machine { requesters, targets, drain_ns, ..Machine::of(&route, &route.hops, &p) };
        m.run(&load).unwrap().gbs
    };
    let write = Load::write(1 << 20, 256);
    assert!(run(2, 2, 0.0, write) / whole > 0.95);
    assert!(run(1, 1, 95.0, write) / whole > 0.95);
    assert!(run(2, 1, 95.0, write) / whole > 0.95);
    assert!(run(1, 2, 95.0, write) / whole > 0.4, "one writer changes with every page only");
    let collapsed = run(2, 2, 95.0, write);
    assert!((collapsed / (256.0 / 95.0) - 1.0).abs() < 0.1, "{collapsed} GB/s");
    let reads = |drain| run(2, 2, drain, Load::read(1 << 20));
    assert_eq!(reads(0.0), reads(95.0));
    assert!(reads(95.0) / route.link.read_rate() > 0.95);
}

#[test]
fn a_machine_that_cannot_be_says_why() {
    let m = machine(&Route::default(), &Parameters::default());
    let why = |m: Machine, load| m.run(&load).unwrap_err().to_string();
    let load = Load::read(4096);
    assert_eq!(
        why(Machine { requesters: 2, ..m.clone() }, load),
        "hops is none, expected at least one with several requesters or targets"
    );
    let tight = Buffers { posted: (1, 64), ..AMPLE };
    assert_eq!(
        why(Machine { buffers: tight, ..m.clone() }, load),
        "buffers.posted bytes is 64, expected 256 to 4000000000"
    );
    assert_eq!(why(m, Load::read(0)), "bytes is 0, expected 1 to 10000000000");
}
