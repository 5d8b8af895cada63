//! Checks that the latencies by hops shown in docs/ are those that the code computes.

use pushgate_pcie_model::{Hop, Link, Parameters, Route, Way, Window, estimate, hops, transfers};

fn docs(name: &str) -> String {
    let path = format!("{}/../docs/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn rows() -> Vec<hops::Latency> {
    hops::by_hops(&Link::default(), &Parameters::default(), Hop::Switch, 6).unwrap()
}

#[test]
fn the_committed_plot_is_what_the_code_makes() {
    let made = hops::plot(&rows(), Hop::Switch).svg();
    assert!(
        docs("pcie-latency-by-hops.svg") == made,
        "make the plot again: pushgate model --plot docs/pcie-latency-by-hops.svg"
    );
}

#[test]
fn the_table_by_hops_is_what_the_code_makes() {
    let page = docs("pcie-model.md");
    for r in rows() {
        let row =
            format!("| {} | {:.0} | {:.0} | {:.2} |", r.hops, r.push_ns, r.pull_ns, r.pull_ns / r.push_ns);
        assert!(page.contains(&row), "docs/pcie-model.md lacks:\n{row}");
    }
}

/// What the page says about one message with a fence of its own over one switch, and about avoiding
/// it.
#[test]
fn the_page_says_what_a_fence_costs() {
    let (p, page) = (Parameters::default(), docs("pcie-model.md"));
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let fence = transfers::fence(&[Hop::Switch], &p);
    let said = format!("a fence of its own takes {:.0} ns, the push {:.0}", fence, fence + rows()[0].push_ns);
    assert!(page.contains(&said), "docs/pcie-model.md lacks: {said}");
    let route = Route { hops: vec![Hop::Switch], ..Route::default() };
    let bare = Parameters { fence: false, ..p.clone() };
    let us = |way, p| estimate(way, &route, p, 64).unwrap().time_ns / 1e3;
    let said = format!(
        "push {:.2} us, without a fence {:.2}, pull {:.2}, bounce {:.2}",
        us(Way::Push, &p),
        us(Way::Push, &bare),
        us(Way::Pull, &p),
        us(Way::Bounce, &p)
    );
    assert!(page.contains(&said), "docs/pcie-model.md lacks: {said}");
    let nic = Route { window: Window::Nic, ..route.clone() };
    let us = |p| estimate(Way::Push, &nic, p, 64).unwrap().time_ns / 1e3;
    let said = format!("into the NIC {:.2} and {:.2}", us(&p), us(&bare));
    assert!(page.contains(&said), "docs/pcie-model.md lacks: {said}");
}

/// A write travels the way once and a read twice, over 1 to 6 hops of each kind.
#[test]
fn a_push_takes_half_of_a_pull() {
    for hop in [Hop::Switch, Hop::RootComplex, Hop::Socket] {
        for r in hops::by_hops(&Link::default(), &Parameters::default(), hop, 6).unwrap() {
            let ratio = r.pull_ns / r.push_ns;
            assert!((2.0..2.5).contains(&ratio), "{} {hop} hops: {} of {}", r.hops, r.pull_ns, r.push_ns);
        }
    }
}
