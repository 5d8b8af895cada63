//! Tests of messages: which way is best, why, and where that changes.

use pushgate_pcie_model::{Hop, Limit, Link, Parameters, Route, Way, Window, crossings, estimate};

fn route(hops: &[Hop], window: Window) -> Route {
    Route { hops: hops.to_vec(), window, ..Route::default() }
}

fn stream(way: Way, r: &Route, p: &Parameters) -> Limit {
    estimate(way, r, p, 1 << 30).unwrap().stream.limit
}

/// Every limit can be the one that binds, and is then named.
#[test]
fn the_binding_limit_is_named() {
    let p = Parameters::default();
    let through = route(&[Hop::RootComplex], Window::Nic);
    let tags = |tags| Route { link: Link { tags, ..Link::default() }, ..through.clone() };
    assert_eq!(stream(Way::Push, &through, &p), Limit::Link);
    assert_eq!(stream(Way::Pull, &tags(256), &p), Limit::Link);
    assert_eq!(stream(Way::Pull, &tags(32), &p), Limit::Tags);
    let few = Parameters { store_threads: 256, ..p.clone() };
    assert_eq!(stream(Way::Push, &through, &few), Limit::Issue);
    let room = Parameters { completion_buffer: Some(8192), ..p.clone() };
    assert_eq!(stream(Way::Pull, &through, &room), Limit::CompletionCredits);
    let shared = Route { sharers: 4, ..through.clone() };
    assert_eq!(stream(Way::Push, &shared, &p), Limit::UpLink);
    let desktop = Parameters { root_read_gbs: Some(0.0), root_write_gbs: Some(20.0), ..p.clone() };
    assert_eq!(stream(Way::Push, &through, &desktop), Limit::RootComplex);
    let never = estimate(Way::Pull, &through, &desktop, 4096).unwrap();
    assert!(never.time_ns.is_infinite() && never.reason() == "the root complex passes none of it");
    let slow = Parameters { copy_gbs: 20.0, ..p.clone() };
    assert_eq!(stream(Way::Bounce, &through, &slow), Limit::CopyEngine);
    let small = estimate(Way::Push, &through, &p, 8).unwrap();
    assert!(small.is_latency_bound() && small.reason().starts_with("latency"));
}

/// Over a switch only, the root complex's limit does not matter.
#[test]
fn a_root_complex_limits_only_what_passes_it() {
    let desktop = Parameters { root_read_gbs: Some(0.0), ..Parameters::default() };
    let below = estimate(Way::Pull, &route(&[Hop::Switch], Window::Nic), &desktop, 4096).unwrap();
    assert!(below.time_ns.is_finite());
}

/// At a crossing the times are equal to within a byte, and each way is the faster one on its side.
#[test]
fn crossings_are_where_the_order_changes() {
    let mut seen = 0;
    for window in [Window::Host, Window::Nic] {
        for hops in [&[][..], &[Hop::Switch], &[Hop::Switch, Hop::RootComplex, Hop::Socket]] {
            for tags in [32, 256] {
                let r = Route { link: Link { tags, ..Link::default() }, ..route(hops, window) };
                let p = Parameters::default();
                for c in crossings(&r, &p).unwrap() {
                    let time = |way, n| estimate(way, &r, &p, n).unwrap().time_ns;
                    assert!(time(c.below, c.bytes - 1) <= time(c.above, c.bytes - 1), "{c:?}");
                    assert!(time(c.above, c.bytes) <= time(c.below, c.bytes), "{c:?}");
                    seen += 1;
                }
            }
        }
    }
    assert!(seen >= 4, "{seen} crossings over all these ways");
}

#[test]
fn parameters_keep_through_toml_and_refuse_what_cannot_be() {
    let p = Parameters { completion_buffer: Some(65536), ..Parameters::default() };
    let text = toml::to_string(&p).unwrap();
    assert_eq!(toml::from_str::<Parameters>(&text).unwrap(), p);
    let some: Parameters = toml::from_str("rtt_ns = 700.0").unwrap();
    assert_eq!(some, Parameters { rtt_ns: 700.0, ..Parameters::default() });
    assert!(
        toml::from_str::<Parameters>("rtt = 700.0").unwrap_err().to_string().contains("unknown field `rtt`")
    );
    let r = Route::default();
    let why = |p: Parameters| estimate(Way::Push, &r, &p, 8).unwrap_err().to_string();
    assert_eq!(
        why(Parameters { store_tlp: 48, ..p.clone() }),
        "store_tlp is 48, expected a power of two from 4 to MPS (256)"
    );
    assert_eq!(why(Parameters { memory_ns: 900.0, ..p.clone() }), "memory_ns is 900, expected 0 to 550");
    assert_eq!(why(Parameters { rtt_ns: f64::NAN, ..p.clone() }), "rtt_ns is NaN, expected 1 to 1000000000");
    assert_eq!(
        why(Parameters { store_interval_ns: 0.0, ..p }),
        "store_interval_ns is 0, expected 0.01 to 1000000000"
    );
    assert_eq!(
        "root,bus".split(',').map(str::parse::<Hop>).collect::<Result<Vec<_>, _>>().unwrap_err().to_string(),
        "hops is bus, expected switch, root and socket, joined by commas, or none"
    );
}
