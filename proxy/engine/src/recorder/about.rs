//! What does not change of a queue pair, in the words of its slot.

use super::layout;

/// What does not change of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct About {
    /// The engine's number for it.
    pub number: u32,
    /// This end's rank.
    pub rank: u32,
    /// The peer's rank.
    pub peer: u32,
    /// The peer's process, if its number here is known.
    pub peer_pid: Option<u32>,
    /// The transport's name, "local" or "verbs"; at most 8 bytes.
    #[serde(serialize_with = "name")]
    pub transport: [u8; 8],
    /// What names this end's half of the link, and the peer's. The peer's end has them the other way round. Both 0: not
    /// known.
    #[serde(skip)]
    pub ends: [u64; 2],
    /// Logarithm to base 2 of this end's WQE slots.
    pub slots_log: u8,
    /// Logarithm to base 2 of this end's receives.
    pub receives_log: u8,
    /// Logarithm to base 2 of the peer's receives.
    pub peer_receives_log: u8,
    /// SENDs to this end land in receives that its device posts.
    pub posted_receives: bool,
    /// The ranks are the roles of a connection's ends, as in the NCCL plugin: 0 sends, 1 receives.
    pub roles: bool,
}

fn name<S: serde::Serializer>(transport: &[u8; 8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&text(transport))
}

impl About {
    /// The transport's name.
    pub fn transport_name(&self) -> String {
        text(&self.transport)
    }
}

/// The name in a field. Anybody may have written it (P8).
pub(super) fn text(name: &[u8; 8]) -> String {
    name.iter().filter(|b| b.is_ascii_graphic()).map(|b| *b as char).collect()
}

impl About {
    /// A transport's name as the field holds it.
    pub(crate) fn transport(name: &str) -> [u8; 8] {
        let mut field = [0; 8];
        field.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        field
    }

    /// The words of the slot: this, when the queue pair was added, and its first entry.
    pub(super) fn words(&self, added: u64, first: u64) -> [u64; layout::ABOUT] {
        [
            1,
            self.number as u64 | (self.rank as u64) << 32,
            self.peer as u64 | (self.peer_pid.unwrap_or(0) as u64) << 32,
            self.slots_log as u64
                | (self.receives_log as u64) << 8
                | (self.peer_receives_log as u64) << 16
                | (self.posted_receives as u64) << 24
                | (self.roles as u64) << 25,
            u64::from_le_bytes(self.transport),
            self.ends[0],
            self.ends[1],
            added,
            first,
        ]
    }

    /// What these words say, when the queue pair was added, and its first entry. `None`: the slot is free, or the words are
    /// none that an engine writes.
    pub(super) fn of(words: &[u64; layout::ABOUT]) -> Option<(About, u64, u64)> {
        let [used, number, peer, sizes, transport, own, other, added, first] = *words;
        let about = About {
            number: number as u32,
            rank: (number >> 32) as u32,
            peer: peer as u32,
            peer_pid: Some((peer >> 32) as u32).filter(|pid| *pid != 0),
            transport: transport.to_le_bytes(),
            ends: [own, other],
            slots_log: sizes as u8,
            receives_log: (sizes >> 8) as u8,
            peer_receives_log: (sizes >> 16) as u8,
            posted_receives: sizes >> 24 & 1 != 0,
            roles: sizes >> 25 & 1 != 0,
        };
        let logs = [about.slots_log, about.receives_log, about.peer_receives_log];
        (used == 1 && logs.iter().all(|log| *log <= 32)).then_some((about, added, first))
    }
}
