//! What users are told about an address that is missing, wrong or not reached: the words of all such messages.

use std::fmt;

/// What to do about it, on the host that the message names.
pub const REMEDY: &str = "set PUSHGATE_HOST to an address of this host that the other hosts reach";

/// A message about an address. It says what was looked at or tried, and what to set on which host.
#[derive(Clone, Copy, Debug)]
pub enum Message<'a> {
    /// The kernel does not say what addresses this host has.
    Unknown {
        /// What it says instead.
        why: &'a str,
    },
    /// No interface has an address of the kind that is wanted.
    None {
        /// The interfaces, and what each has.
        looked_at: &'a str,
    },
    /// Only this host reaches the addresses that there are. It follows those addresses.
    OnlyHere {
        /// The interfaces, and what each has.
        looked_at: &'a str,
    },
    /// The address that the setting `host` names.
    Named {
        /// The address.
        host: &'a str,
        /// What is wrong with it.
        why: &'a str,
    },
    /// This process can't listen there.
    Listening {
        /// Where.
        at: &'a str,
        /// What the system says.
        why: &'a str,
    },
    /// Another process is reached at none of its addresses.
    Unreached {
        /// The process, in words.
        whom: &'a str,
        /// What came of each address.
        tried: &'a str,
        /// The process's host.
        host: &'a str,
    },
    /// Another rank, which is to dial, does not come.
    NotDialled {
        /// The rank's number.
        rank: u32,
        /// Where this process waits for it.
        at: &'a str,
    },
    /// No transport leads to another process.
    NoWay {
        /// What speaks against each of them, and what to set about that.
        why: &'a str,
    },
}

impl fmt::Display for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Message::Unknown { why } => write!(f, "no address of this host is known: {why}; {REMEDY}"),
            Message::None { looked_at } => write!(
                f,
                "no interface has an IP address, by which ranks of several hosts meet, over InfiniBand too: {looked_at}; \
                 {REMEDY}"
            ),
            Message::OnlyHere { looked_at } => write!(f, "{looked_at}; {REMEDY}"),
            Message::Named { host, why } => {
                write!(f, "the address {host} that PUSHGATE_HOST names: {why}; {REMEDY}")
            }
            Message::Listening { at, why } => {
                write!(f, "listening for connections at {at}: {why}; {REMEDY}")
            }
            Message::Unreached { whom, tried, host } => {
                write!(f, "connecting to {whom} ({tried}); on {host} {REMEDY}")
            }
            Message::NotDialled { rank, at } => write!(
                f,
                "waiting at {at} for streams of rank {rank}, which perhaps does not reach this host there; {REMEDY}"
            ),
            Message::NoWay { why } => write!(f, "{why}; on each host {REMEDY}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How the message begins, and on which host something is to be set.
    fn expected(message: Message<'_>) -> (&'static str, &'static str) {
        // A message that is added here gets a row below.
        match message {
            Message::Unknown { .. } => ("no address of this host is known: TRIED", ""),
            Message::None { .. } => ("no interface has an IP address", ""),
            Message::OnlyHere { .. } => ("TRIED", ""),
            Message::Named { .. } => ("the address 10.0.0.1 that PUSHGATE_HOST names: TRIED", ""),
            Message::Listening { .. } => ("listening for connections at 10.0.0.1: TRIED", ""),
            Message::Unreached { .. } => ("connecting to rank 3 (TRIED)", "on rank 3's host "),
            Message::NotDialled { .. } => ("waiting at TRIED for streams of rank 3", ""),
            Message::NoWay { .. } => ("TRIED", "on each host "),
        }
    }

    #[test]
    fn each_message_about_an_address_says_what_was_tried_and_what_to_set_on_which_host() {
        let (tried, at) = ("TRIED", "10.0.0.1");
        for message in [
            Message::Unknown { why: tried },
            Message::None { looked_at: tried },
            Message::OnlyHere { looked_at: tried },
            Message::Named { host: at, why: tried },
            Message::Listening { at, why: tried },
            Message::Unreached { whom: "rank 3", tried, host: "rank 3's host" },
            Message::NotDialled { rank: 3, at: tried },
            Message::NoWay { why: tried },
        ] {
            let (begins, on) = expected(message);
            let said = message.to_string();
            let ends =
                format!("; {on}set PUSHGATE_HOST to an address of this host that the other hosts reach");
            assert!(said.starts_with(begins) && said.contains("TRIED") && said.ends_with(&ends), "{said}");
        }
    }
}
