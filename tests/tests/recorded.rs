//! What programs of earlier releases say, byte for byte as it was recorded, is still understood, and what this release
//! says to them is what they understand.
//!
//! A release whose bytes differ from the release before on purpose adds its own recording here; the old ones stay as long
//! as their versions are spoken (docs/protocol.md, Versions).

use pushgate_driver_shim::versions::ABI;
use pushgate_engine::connect::LocalOffer;
use pushgate_link_verbs::{Offer, Places, WIRE};
use pushgate_service::wire::{Reply, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Release 0.1.0: `allreduce --proxy process` on two ranks, the program's side. Key seeds are the process's.
const PROGRAM_0_1_0: &[&str] = &[
    r#"{"Hello":{"version":2,"name":"pushgate"}}"#,
    r#"{"AddQp":{"options":{"peer":0,"posted_receives":false,"reader_flushes":false,"stuck_ns":2000000000,"in_place_share":192,"slow_ns":20000000,"ungated":false,"key_seed":3752534851},"wake":"Doorbell","bell":true,"peer_bell":true}}"#,
    r#"{"RemoveQp":{"qp":0}}"#,
];

/// Release 0.1.0: the proxy's side.
const PROXY_0_1_0: &[&str] = &[
    r#"{"Ok":{"Welcome":{"version":2}}}"#,
    r#"{"Ok":{"Qp":0}}"#,
    r#"{"Ok":{"Counters":{"released":4,"released_bytes":131072,"retired":4,"delivered":4,"delivered_bytes":131072,"nops":0,"copies":0,"copied_bytes":0,"placed":0,"bounced":0,"bounced_bytes":0,"copied_out":0,"stall_send_queue":0,"stall_completion_queue":0,"stall_receive":0,"stall_bytes":0,"rnr":0,"dropped":0,"refused":0,"stuck":0,"rings":5,"sleeps":7,"interrupts":0}}}"#,
    r#"{"Ok":"Done"}"#,
];

/// Release 0.1.0: a rank's offer of a `local` queue pair.
const LOCAL_OFFER_0_1_0: &[&str] =
    &[r#"{"abi":2,"link":69632,"window":1048576,"posted_receives":false,"rings":true}"#];

/// Release 0.1.0: ranks' offers of a `verbs` queue pair, over RoCE v2 with immediate data, and over InfiniBand without.
const VERBS_OFFERS_0_1_0: &[&str] = &[
    r#"{"version":3,"abi":2,"rank":1,"rings":[14,10,10,10,10,14,64],"link_log":9,"qp":17,"psn":11206655,"lid":0,"ethernet":true,"gid":[0,0,0,0,0,0,0,0,0,0,255,255,10,9,0,1],"roce_v2":true,"mtu":4096,"imm":true,"in_order":true,"events":false,"posted_receives":false}"#,
    r#"{"version":3,"abi":2,"rank":1,"rings":[14,10,10,10,10,14,64],"link_log":10,"qp":17,"psn":11206655,"lid":5,"ethernet":false,"gid":[0,0,0,0,0,0,0,0,0,0,255,255,10,9,0,1],"roce_v2":false,"mtu":2048,"imm":false,"in_order":false,"events":false,"posted_receives":true}"#,
];

/// Release 0.1.0: what a rank says second, where the peer may write.
const VERBS_PLACES_0_1_0: &[&str] =
    &[r#"{"mirror":139872113860608,"mirror_key":4660,"inbox":139872112795648,"inbox_key":4917}"#];

/// Each text is understood, and this release would write the same bytes.
fn holds<T: Serialize + DeserializeOwned>(texts: &[&str]) {
    for text in texts {
        let understood: T = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!(serde_json::to_string(&understood).unwrap(), *text);
    }
}

#[test]
fn a_program_and_a_proxy_of_release_0_1_0_are_understood_and_understand() {
    holds::<Request>(PROGRAM_0_1_0);
    holds::<Reply>(PROXY_0_1_0);
}

#[test]
fn a_rank_of_release_0_1_0_is_understood_and_understands() {
    holds::<LocalOffer>(LOCAL_OFFER_0_1_0);
}

/// What this release says of the versions in an offer over RDMA, one of release 0.1.0 with `from` replaced by `to`.
fn versions(from: &str, to: &str) -> Result<(), String> {
    let text = VERBS_OFFERS_0_1_0[0].replacen(from, to, 1);
    let offer: Offer = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    offer.check_versions()
}

#[test]
fn a_rank_of_release_0_1_0_over_rdma_is_understood_and_understands() {
    holds::<Offer>(VERBS_OFFERS_0_1_0);
    holds::<Places>(VERBS_PLACES_0_1_0);
    assert_eq!(versions("", ""), Ok(()));
    // One that speaks later versions too says so, and is understood in those that both speak.
    assert_eq!(versions(r#""version":3"#, r#""version":3,"newest":9"#), Ok(()));
    assert_eq!(versions(r#""abi":2"#, r#""abi":1,"newest_abi":9"#), Ok(()));
}

#[test]
fn a_rank_over_rdma_that_is_too_far_apart_is_refused_with_both_ranges() {
    let remedy = "run releases that are closer to each other, best the same";
    for (to, theirs) in [(r#""version":1"#, "1"), (r#""version":77,"newest":78"#, "77 to 78")] {
        let why = versions(r#""version":3"#, to).unwrap_err();
        assert_eq!(why, format!("RDMA wire protocol: it speaks version {theirs}, expected {WIRE}: {remedy}"));
    }
    let why = versions(r#""abi":2"#, r#""abi":77"#).unwrap_err();
    assert_eq!(why, format!("segments: it speaks version 77, expected {ABI}: {remedy}"));
    // An offer that lacks a field is none.
    assert!(serde_json::from_str::<Offer>(&VERBS_OFFERS_0_1_0[0].replacen(r#""mtu":4096,"#, "", 1)).is_err());
}

#[test]
fn a_reply_that_counts_less_than_this_release_is_understood() {
    let earlier = r#"{"Ok":{"Counters":{"released":4,"retired":4}}}"#;
    let Reply::Ok(pushgate_service::wire::Answer::Counters(counts)) = serde_json::from_str(earlier).unwrap()
    else {
        panic!("no counts")
    };
    assert_eq!((counts.released, counts.retired, counts.sleeps), (4, 4, 0));
}
