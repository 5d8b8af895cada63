//! What two ends tell each other, out of band, to become a queue pair: each end an [`Offer`], then its [`Places`]. An end
//! that has sent its places is ready to receive. Plain data with checks (P8).

use pushgate_driver_shim::segment::Geometry;
use pushgate_driver_shim::versions::{ABI, Versions};
use serde::{Deserialize, Serialize};

use super::cm::CmOffer;
use super::device::mtu_bytes;
use super::gid::{Gid, MOST_TOLD, Told, meet};
use super::inbox::InboxLayout;

/// Versions of offers, places and of what crosses the wire that this build speaks.
pub const WIRE: Versions = Versions::new(3, 3);

/// What an end tells the peer first: who it is, what it can, and its queue pair's number and address.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Offer {
    pub(super) version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) newest: Option<u32>,
    pub(super) abi: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) newest_abi: Option<u32>,
    pub(super) rank: u32,
    pub(super) rings: [u32; 7],
    pub(super) link_log: u32,
    pub(super) qp: u32,
    pub(super) psn: u32,
    pub(super) lid: u16,
    pub(super) ethernet: bool,
    pub(super) gid: Gid,
    /// All addresses that packets may carry as their source, the one of `gid` first. Empty: that one, whatever the peer's are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) gids: Vec<Told>,
    pub(super) roce_v2: bool,
    pub(super) mtu: u32,
    pub(super) imm: bool,
    pub(super) in_order: bool,
    pub(super) events: bool,
    pub(super) posted_receives: bool,
    /// Its device speaks iWARP. An earlier release says nothing, and has no such device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) iwarp: bool,
    /// It replaces a link that breaks. An earlier release says nothing, and does not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) recovers: bool,
    /// Where it listens, if its queue pair comes up through rdma_cm. An earlier release says nothing, and has none that does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cm: Option<CmOffer>,
}

/// What both ends keep to.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) peer_geometry: Geometry,
    /// As an `ibv_mtu`.
    pub(super) mtu: u32,
    pub(super) imm: bool,
    /// WRITEs are placed in the order of their posting, at either end.
    pub(super) in_order: bool,
}

impl Offer {
    /// Checks that the peer's build speaks a version of the wire and one of the segments that this build speaks; a sentence
    /// if it does not.
    pub fn check_versions(&self) -> Result<(), String> {
        WIRE.agree(Versions::told(self.version, self.newest))
            .map_err(|e| format!("RDMA wire protocol: {e}"))?;
        ABI.agree(Versions::told(self.abi, self.newest_abi)).map_err(|e| format!("segments: {e}"))?;
        Ok(())
    }

    /// What names this end to readers of the flight recorder, never 0: a hash (FNV-1a) of what no other queue pair of the
    /// network has at the time.
    pub(super) fn name(&self) -> u64 {
        let bytes = self.gid.0.into_iter().chain(self.lid.to_le_bytes());
        let bytes = bytes.chain(self.qp.to_le_bytes()).chain(self.psn.to_le_bytes());
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ byte as u64).wrapping_mul(0x0100_0000_01b3)
        }) | 1
    }

    /// Whether this end, and not the peer, sends rdma_cm's request: both ends say so alike.
    pub(super) fn connects(&self, peer: &Offer) -> bool {
        (self.rank, self.gid.0, self.qp) < (peer.rank, peer.gid.0, peer.qp)
    }

    /// Which of this end's addresses packets to the peer carry as their source, and to which of the peer's they go. Both ends
    /// say so alike.
    pub(super) fn way(&self, peer: &Offer) -> (usize, Gid) {
        if self.gids.is_empty() || peer.gids.is_empty() {
            return (0, peer.gid);
        }
        let (own, to) = match self.connects(peer) {
            true => meet(&self.gids, &peer.gids),
            false => {
                let (to, own) = meet(&peer.gids, &self.gids);
                (own, to)
            }
        };
        (own, peer.gids[to].gid)
    }

    /// Checks a peer's offer against `ours`; a sentence if they don't go together.
    pub(super) fn check(&self, ours: &Offer, peer: u32) -> Result<Agreed, String> {
        self.check_versions()?;
        if self.rank != peer {
            return Err(format!("it says that it is rank {}", self.rank));
        }
        let [window_log, slots_log, cq_log, rx_log, link_log, landing_log, signals] = self.rings;
        let peer_geometry =
            Geometry { window_log, slots_log, cq_log, rx_log, link_log, landing_log, signals, rank: peer };
        peer_geometry.validate().map_err(|e| format!("its rings: {e}"))?;
        if self.link_log < 1 || self.link_log > link_log {
            return Err(format!("its inbox has 2^{} slots, expected 2^1 to 2^{link_log}", self.link_log));
        }
        if self.gids.len() > MOST_TOLD {
            return Err(format!("it has {} addresses, expected {MOST_TOLD} at most", self.gids.len()));
        }
        if self.ethernet != ours.ethernet {
            let layer = |e: bool| if e { "Ethernet" } else { "InfiniBand" };
            return Err(format!("its port is {}, ours is {}", layer(self.ethernet), layer(ours.ethernet)));
        }
        if self.iwarp != ours.iwarp {
            let speaks = |o: &Offer| {
                if o.iwarp {
                    "iWARP"
                } else if o.roce_v2 {
                    "RoCE v2"
                } else {
                    "RoCE v1"
                }
            };
            return Err(format!(
                "its RDMA device speaks {}, ours {}: name devices of one kind by ib-dev at both",
                speaks(self),
                speaks(ours)
            ));
        }
        // The addresses of an iWARP device are of no kind.
        if !ours.iwarp && self.roce_v2 != ours.roce_v2 {
            let kind = |v2: bool| if v2 { "RoCE v2" } else { "IB or RoCE v1" };
            return Err(format!(
                "its address {} is {}, ours {} is {}; set gid-index on one of the two",
                self.gid,
                kind(self.roce_v2),
                ours.gid,
                kind(ours.roce_v2)
            ));
        }
        match (&ours.cm, &self.cm) {
            (None, None) => {}
            (Some(_), Some(theirs)) => theirs.check()?,
            (ours, _) => {
                let (with, without) = if ours.is_some() { ("ours", "its") } else { ("its", "ours") };
                return Err(format!(
                    "{with} RDMA queue pairs come up through rdma_cm, {without} do not; set rdma-cm alike at both \
                     ends (on where one of the devices is iWARP)"
                ));
            }
        }
        let mtu = (1..=5).find(|code| mtu_bytes(*code) == self.mtu.min(ours.mtu));
        let mtu =
            mtu.ok_or_else(|| format!("its MTU is {}, expected 256, 512, 1024, 2048 or 4096", self.mtu))?;
        let (imm, in_order) = (self.imm && ours.imm, self.in_order && ours.in_order);
        Ok(Agreed { peer_geometry, mtu, imm, in_order })
    }
}

/// What an end tells the peer second: memory of this end that the peer may write, and nothing else.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Places {
    /// A copy of the peer's window.
    pub(super) mirror: u64,
    pub(super) mirror_key: u32,
    /// Line, slots, table of regions, posted receives.
    pub(super) inbox: u64,
    pub(super) inbox_key: u32,
}

impl Places {
    /// Checks that no address wraps which this end will write to; a sentence if one does. What lies at these addresses
    /// concerns the peer and the peer's RDMA device alone.
    pub(super) fn check(&self, geometry: &Geometry, link_log: u32) -> Result<(), String> {
        let inbox = InboxLayout::new(link_log, geometry.rx_log).bytes;
        let ends = [(self.mirror, geometry.window_bytes()), (self.inbox, inbox)];
        match ends.iter().find(|(address, bytes)| address.checked_add(*bytes as u64).is_none()) {
            None => Ok(()),
            Some((address, bytes)) => Err(format!("{bytes} bytes at {address:#x} are no place")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(rank: u32) -> Offer {
        Offer {
            version: WIRE.oldest(),
            newest: WIRE.newest(),
            abi: ABI.oldest(),
            newest_abi: ABI.newest(),
            rank,
            rings: [14, 10, 10, 10, 10, 14, 64],
            link_log: 9,
            qp: 17,
            psn: 3,
            lid: 0,
            ethernet: true,
            gid: Gid([0; 16]),
            gids: Vec::new(),
            roce_v2: true,
            mtu: 4096,
            imm: true,
            in_order: true,
            events: false,
            posted_receives: false,
            iwarp: false,
            recovers: false,
            cm: None,
        }
    }

    #[test]
    fn two_ends_agree_on_the_least_that_both_have() {
        let agreed = Offer { mtu: 1024, imm: false, ..offer(1) }.check(&offer(0), 1).unwrap();
        assert_eq!((mtu_bytes(agreed.mtu), agreed.imm, agreed.in_order), (1024, false, true));
        for (ours, theirs) in [(true, false), (false, true), (false, false)] {
            let theirs = Offer { in_order: theirs, ..offer(1) };
            let agreed = theirs.check(&Offer { in_order: ours, ..offer(0) }, 1).unwrap();
            assert!(!agreed.in_order, "P3: each end places what the other writes");
        }
        assert_eq!((agreed.peer_geometry.rank, agreed.peer_geometry.window_log), (1, 14));
        let agreed = offer(1).check(&offer(0), 1).unwrap();
        assert_eq!((mtu_bytes(agreed.mtu), agreed.imm), (4096, true));
    }

    #[test]
    fn ends_whose_devices_speak_iwarp_and_roce_refuse_each_other_and_name_both() {
        let iwarp = |rank| Offer { iwarp: true, roce_v2: false, ..offer(rank) };
        let why = iwarp(1).check(&offer(0), 1).unwrap_err();
        assert!(
            why.starts_with("its RDMA device speaks iWARP, ours RoCE v2: name devices of one kind"),
            "{why}"
        );
        let why = offer(1).check(&iwarp(0), 1).unwrap_err();
        assert!(
            why.starts_with("its RDMA device speaks RoCE v2, ours iWARP: name devices of one kind"),
            "{why}"
        );
        iwarp(1).check(&iwarp(0), 1).unwrap();
        // RoCE as an earlier release reads and writes it.
        let written = serde_json::to_string(&offer(1)).unwrap();
        assert!(!written.contains("iwarp"), "{written}");
        assert!(!serde_json::from_str::<Offer>(&written).unwrap().iwarp);
    }

    #[test]
    fn p8_an_offer_that_does_not_fit_is_refused_with_a_sentence() {
        let good = || offer(1);
        let wrong: [(Offer, &str); 9] = [
            (Offer { version: 77, ..good() }, "RDMA wire protocol: it speaks version 77, expected 3"),
            (Offer { abi: 77, ..good() }, "segments: it speaks version 77, expected 2"),
            (Offer { rank: 2, ..good() }, "says that it is rank 2"),
            (Offer { rings: [24, 10, 10, 10, 10, 14, 64], ..good() }, "window_log is 24"),
            (Offer { link_log: 11, ..good() }, "2^11 slots"),
            (Offer { link_log: 0, ..good() }, "2^0 slots"),
            (Offer { ethernet: false, ..good() }, "its port is InfiniBand, ours is Ethernet"),
            (Offer { roce_v2: false, ..good() }, "set gid-index"),
            (Offer { mtu: 100, ..good() }, "its MTU is 100"),
        ];
        for (offer_, said) in wrong {
            let why = offer_.check(&offer(0), 1).unwrap_err();
            assert!(why.contains(said), "{why:?} says nothing of {said:?}");
        }
        let geometry = Geometry { rank: 0, ..offer(0).check(&offer(1), 0).unwrap().peer_geometry };
        let places = |mirror, inbox| Places { mirror, mirror_key: 1, inbox, inbox_key: 2 };
        places(1 << 40, 1 << 41).check(&geometry, 9).unwrap();
        for wrong in [places(u64::MAX, 0), places(0, u64::MAX - 4096)] {
            assert!(wrong.check(&geometry, 9).unwrap_err().contains("are no place"));
        }
        // Anything else that a peer may send is no offer at all.
        assert!(serde_json::from_str::<Offer>("{\"version\": 1}").is_err());
    }
}
