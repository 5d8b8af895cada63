//! A few addresses at which one process listens, as it tells them to others.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Addresses at which one socket's owner is dialled, in the order in which they are to be tried: 1 to [`Places::MOST`].
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<SocketAddr>", into = "Vec<SocketAddr>")]
pub struct Places {
    first: SocketAddr,
    more: [Option<SocketAddr>; Places::MOST - 1],
}

impl Places {
    /// The most addresses that are told.
    pub const MOST: usize = 4;

    /// The places of these addresses, as many as there is room for; `None` without any.
    pub fn of(all: &[SocketAddr]) -> Option<Places> {
        let (first, rest) = all.split_first()?;
        let mut more = [None; Places::MOST - 1];
        more.iter_mut().zip(rest).for_each(|(to, at)| *to = Some(*at));
        Some(Places { first: *first, more })
    }

    /// The address to be tried first.
    pub fn first(&self) -> SocketAddr {
        self.first
    }

    /// All addresses, in the order in which they are to be tried.
    pub fn all(&self) -> Vec<SocketAddr> {
        [Some(self.first)].into_iter().chain(self.more).flatten().collect()
    }
}

impl From<SocketAddr> for Places {
    fn from(first: SocketAddr) -> Self {
        Places { first, more: [None; Places::MOST - 1] }
    }
}

impl From<Places> for Vec<SocketAddr> {
    fn from(places: Places) -> Self {
        places.all()
    }
}

impl TryFrom<Vec<SocketAddr>> for Places {
    type Error = String;

    fn try_from(all: Vec<SocketAddr>) -> Result<Self, String> {
        match all.len() {
            1..=Places::MOST => Ok(Places::of(&all).expect("there is one")),
            n => Err(format!("{n} addresses, expected 1 to {}", Places::MOST)),
        }
    }
}

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.all().iter().map(SocketAddr::to_string).collect();
        f.write_str(&all.join(", "))
    }
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_addresses_are_read_back_and_none_or_too_many_are_refused() {
        let at = |n: u16| SocketAddr::from(([10, 0, 0, 1], n));
        let all: Vec<_> = (1..=4).map(at).collect();
        let text = serde_json::to_string(&Places::of(&all).unwrap()).unwrap();
        assert_eq!(serde_json::from_str::<Places>(&text).unwrap().all(), all);
        assert_eq!(
            Places::of(&[all.clone(), vec![at(9)]].concat()).unwrap().all(),
            all,
            "the last one has no room"
        );
        for wrong in [vec![], (0..5).map(at).collect::<Vec<_>>()] {
            let text = serde_json::to_string(&wrong).unwrap();
            assert!(
                serde_json::from_str::<Places>(&text).unwrap_err().to_string().contains("expected 1 to 4")
            );
        }
    }
}
