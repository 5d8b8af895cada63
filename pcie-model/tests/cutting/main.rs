//! Compares the closed forms of links with requests and answers that are cut into TLPs one by one.

mod pieces;

use pieces::Piece;
use proptest::prelude::*;
use pushgate_pcie_model::link::PAYLOADS;
use pushgate_pcie_model::{Completions, Dllps, Link};

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
        let requests: Vec<Piece> = pieces::requests(&link, address, bytes).collect();
        let answers: Vec<Piece> = requests.iter().flat_map(|r| pieces::completions(&link, *r)).collect();
        let read = link.read_wire(address, bytes);
        prop_assert_eq!(read.requests, requests.len() as u64);
        prop_assert_eq!(read.completions, answers.len() as u64);
        prop_assert_eq!(read.payload, answers.iter().map(Piece::payload).sum::<u64>());
        prop_assert_eq!(answers.iter().map(|p| p.bytes).sum::<u64>(), bytes);
        prop_assert_eq!(read.request_wire, requests.iter().map(|_| pieces::on_wire(&link, true, 0)).sum::<u64>());
        prop_assert_eq!(read.wire, answers.iter().map(|p| pieces::on_wire(&link, false, p.payload())).sum::<u64>());
        for p in &answers {
            prop_assert!(p.bytes <= link.mps.into());
        }

        let tlp = (1u32 << tlp).min(link.mps);
        let writes: Vec<Piece> = pieces::writes(tlp, address, bytes).collect();
        let wire = writes.iter().map(|p| pieces::on_wire(&link, true, p.payload())).sum::<u64>();
        prop_assert_eq!(link.write_wire(address, bytes, tlp).unwrap(), wire);
    }
}

/// 512 bytes answered by two completions of 256 bytes with 20 bytes each around them: 512 of 552.
#[test]
fn a_read_of_512_has_92_75_percent() {
    let link = Link::default();
    let model = link.read_wire(0, 512);
    let answers = pieces::completions(&link, Piece { address: 0, bytes: 512 });
    let wire: u64 = answers.map(|p| pieces::on_wire(&link, false, p.payload())).sum();
    assert_eq!((model.completions, model.wire, wire), (2, 552, 552));
    assert_eq!(format!("{:.2}", 512.0 / wire as f64 * 100.0), "92.75");
}
