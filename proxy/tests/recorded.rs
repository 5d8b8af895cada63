//! What programs of earlier releases say, byte for byte as it was recorded, is still understood, and what this release
//! says to them is what they understand.
//!
//! A release whose bytes differ from the release before on purpose adds its own recording here; the old ones stay as long
//! as their versions are spoken (docs/protocol.md, Versions).

use pushgate_proxy::connect::LocalOffer;
use pushgate_proxy::wire::{Reply, Request};
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

#[test]
fn a_reply_that_counts_less_than_this_release_is_understood() {
    let earlier = r#"{"Ok":{"Counters":{"released":4,"retired":4}}}"#;
    let Reply::Ok(pushgate_proxy::wire::Answer::Counters(counts)) = serde_json::from_str(earlier).unwrap()
    else {
        panic!("no counts")
    };
    assert_eq!((counts.released, counts.retired, counts.sleeps), (4, 4, 0));
}
