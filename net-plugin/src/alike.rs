//! What NCCL was told at an end, and must be told alike at all ends of a job.
//!
//! NCCL chooses algorithm, protocol, channels and lengths of pieces at each rank by itself, by what the plugin, the tuner and some
//! variables say there, and never compares. Ranks that were told different things send messages that do not fit each other, and the
//! received bytes are wrong. So each end says in its greeting what NCCL was told, and ends that differ refuse each other.

use std::collections::BTreeMap;

use pushgate::settings::PluginSettings;
use pushgate_driver_shim::log::Foreign;
use serde::{Deserialize, Serialize};

use crate::props::Network;
use crate::{path, taken, tuning};

/// Variables of NCCL's on which the choices of the plugin's tuner depend, beside those that the plugin sets.
const READ: [&str; 2] = ["NCCL_ALGO", "NCCL_PROTO"];

/// What the devices are named by that NCCL was told of.
const DEVICES: &str = "devices";

/// Values by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Alike(BTreeMap<String, String>);

impl Alike {
    /// What NCCL was told in this process. To be called once the plugin's variables are set.
    pub fn here(settings: &PluginSettings, network: &Network) -> Self {
        let properties = network.first();
        let memory =
            if properties.takes_gpu_memory() { "handed over" } else { "stays with NCCL (path bounce)" };
        let said = [
            ("plugin", env!("CARGO_PKG_VERSION").to_owned()),
            ("qp", settings.qp.to_string()),
            (DEVICES, network.compared()),
            ("buffers of a receive", properties.max_recvs.to_string()),
            ("GPU memory", memory.to_owned()),
            ("tuner", taken::tuner()),
            ("tuner's table", format!("{:016x}", tuning::revision())),
        ];
        let variables = path::VARIABLES.into_iter().chain(READ).map(|name| {
            let value = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
            (name, value.unwrap_or_else(|| "unset".into()))
        });
        Alike(said.into_iter().chain(variables).map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// A process that told NCCL these values, for tests.
    #[cfg(test)]
    pub fn of_a_test(values: &[(&str, &str)]) -> Self {
        Alike(values.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
    }

    /// Values of the two ends that differ, as a sentence; `None`: there are none. What the other end says may be anything.
    pub fn differs(&self, theirs: &Alike) -> Option<String> {
        let names = self.0.keys().chain(theirs.0.keys().filter(|name| !self.0.contains_key(*name)));
        let of = |end: &Alike, name: &String| {
            end.0.get(name).map_or("not known".into(), |value| Foreign::word(value).to_string())
        };
        let differing = names.filter(|name| self.0.get(*name) != theirs.0.get(*name)).take(self.0.len());
        let list: Vec<String> = differing
            .map(|name| {
                format!("{} is {} here and {} there", Foreign::word(name), of(self, name), of(theirs, name))
            })
            .collect();
        let devices = match self.0.get(DEVICES) == theirs.0.get(DEVICES) {
            true => "",
            false => {
                "; where hosts differ in their RDMA devices, let PUSHGATE_IB_DEV name as many of one speed on each, or set \
                 PUSHGATE_QP=tcp on all ranks"
            }
        };
        (!list.is_empty()).then(|| {
            format!(
                "NCCL was told different things at the two ends, which would exchange wrong bytes: {}; let all ranks have the same \
                 plugin, settings and variables (NCCL's log of each rank says at init what was chosen and why){devices}",
                list.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_differ_are_named_with_both() {
        let ours = Alike::of_a_test(&[("devices", "4"), ("NCCL_MIN_NCHANNELS", "8"), ("tuner", "ours")]);
        assert_eq!(ours.differs(&ours.clone()), None);
        let theirs = Alike::of_a_test(&[("devices", "1"), ("NCCL_MIN_NCHANNELS", "8"), ("more", "a\nb")]);
        let said = ours.differs(&theirs).unwrap();
        for part in [
            "devices is 4 here and 1 there",
            "; where hosts differ in their RDMA devices, let PUSHGATE_IB_DEV name as many of one speed on each",
            "tuner is ours here and not known there",
            "more is not known here and a\\nb there",
        ] {
            assert!(said.contains(part), "{said}");
        }
        assert!(!said.contains("NCHANNELS"), "{said}");
        let theirs = Alike::of_a_test(&[("devices", "4"), ("NCCL_MIN_NCHANNELS", "4"), ("tuner", "ours")]);
        assert!(!ours.differs(&theirs).unwrap().contains("RDMA"), "of what does not differ");
    }

    #[test]
    fn a_peer_that_says_much_makes_no_long_sentence() {
        let many: Vec<_> = (0..10_000).map(|n| (format!("{n:0200}"), "x".repeat(1000))).collect();
        let theirs = Alike(many.into_iter().collect());
        let said = Alike::of_a_test(&[("devices", "4"), ("qp", "auto")]).differs(&theirs).unwrap();
        assert!(said.len() < 1000, "{}", said.len());
    }
}
