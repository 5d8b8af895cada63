//! Who makes room at a full door: pure.
//!
//! If the oldest connection always made room, strangers that connect faster than a distant peer can answer would put every peer
//! out. So the network with the most connections makes room, and connections that have proved the secret have places of their own,
//! for which strangers do not compete.
//!
//! Strangers of many networks, with a connection each, would then put out a host from which several peers dial at once, however
//! slowly the strangers come. So the latest arrivals, as many as half of the places, never make room.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// What a listener has heard of a dialer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Heard {
    /// Not all of its hello.
    Nothing,
    /// Its hello, which takes no secret.
    Hello,
    /// Its first proof that it knows the secret.
    Proof,
}

/// Where a connection comes from: an IPv4 address, or the first 64 bits of an IPv6 address, as one host may have all addresses
/// that begin with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Network(IpAddr);

impl Network {
    fn of(ip: IpAddr) -> Network {
        Network(match ip.to_canonical() {
            IpAddr::V6(ip) => IpAddr::V6((ip.to_bits() & !u128::from(u64::MAX)).into()),
            ip => ip,
        })
    }
}

/// A connection on its way, as the crowd knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    network: Network,
    /// What was heard of it.
    heard: Heard,
    /// Counts all connections in the order of their arrival.
    pub(super) number: u64,
}

/// All connections on their way: strangers, and those that have proved the secret, with as many places each.
#[derive(Debug)]
pub(super) struct Crowd {
    places: usize,
    /// The number of the next connection.
    next: u64,
    strangers: Pool,
    proved: Pool,
}

#[derive(Debug, Default)]
struct Pool {
    /// Each network's connections, in the order in which they make room: those that have said less first, then older ones.
    networks: BTreeMap<Network, BTreeSet<(Heard, u64)>>,
    taken: usize,
}

impl Crowd {
    pub(super) fn new(places: usize) -> Crowd {
        Crowd { places: places.max(1), next: 0, strangers: Pool::default(), proved: Pool::default() }
    }

    /// A connection has arrived. Ask [`Crowd::makes_room`] afterwards.
    pub(super) fn comes(&mut self, from: IpAddr) -> Place {
        let place = Place { network: Network::of(from), heard: Heard::Nothing, number: self.next };
        self.next += 1;
        self.pool(place.heard).insert(place);
        place
    }

    /// So much was heard of a connection by now. Ask [`Crowd::makes_room`] afterwards.
    pub(super) fn hears(&mut self, place: &mut Place, heard: Heard) {
        if place.heard != heard {
            self.goes(*place);
            place.heard = heard;
            self.pool(heard).insert(*place);
        }
    }

    /// A connection has ended, or is through.
    pub(super) fn goes(&mut self, place: Place) {
        self.pool(place.heard).remove(place);
    }

    /// Which connection has to make room, if there are more than places.
    pub(super) fn makes_room(&self) -> Option<u64> {
        if self.strangers.taken > self.places {
            let latest = (self.places / 2).max(1) as u64;
            self.strangers.first_to_go(self.next.saturating_sub(latest))
        } else if self.proved.taken > self.places {
            self.proved.first_to_go(self.next)
        } else {
            None
        }
    }

    /// Which stranger makes room where no place, but something else is short.
    pub(super) fn stranger(&self) -> Option<u64> {
        self.strangers.first_to_go(self.next)
    }

    fn pool(&mut self, heard: Heard) -> &mut Pool {
        match heard {
            Heard::Nothing | Heard::Hello => &mut self.strangers,
            Heard::Proof => &mut self.proved,
        }
    }
}

impl Pool {
    fn insert(&mut self, place: Place) {
        self.taken += 1;
        self.networks.entry(place.network).or_default().insert((place.heard, place.number));
    }

    fn remove(&mut self, place: Place) {
        let Some(network) = self.networks.get_mut(&place.network) else { return };
        self.taken -= usize::from(network.remove(&(place.heard, place.number)));
        if network.is_empty() {
            self.networks.remove(&place.network);
        }
    }

    /// Of the network with the most connections the one that has said least, of these the oldest. Among networks with as many the
    /// same decides. One whose number is `before` or more does not go.
    fn first_to_go(&self, before: u64) -> Option<u64> {
        let of = |network: &BTreeSet<(Heard, u64)>| {
            let (heard, number) = *network.iter().find(|(_, number)| *number < before)?;
            Some((std::cmp::Reverse(network.len()), heard, number))
        };
        self.networks.values().filter_map(of).min().map(|(_, _, number)| number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_network_is_an_ipv4_address_or_half_of_an_ipv6_one() {
        let network = |text| Network::of(ip(text));
        assert_eq!(network("2001:db8:1:2::1"), network("2001:db8:1:2:ffff::9"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
    }

    #[test]
    fn the_largest_network_makes_room_with_the_connection_that_said_least_and_then_the_oldest() {
        let mut crowd = Crowd::new(4);
        let [mut a, mut b, c, d] =
            ["192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.3"].map(|from| crowd.comes(ip(from)));
        assert_eq!((crowd.makes_room(), crowd.stranger()), (None, Some(b.number)));
        crowd.hears(&mut b, Heard::Hello);
        let e = crowd.comes(ip("192.0.2.4"));
        assert_eq!(crowd.makes_room(), Some(c.number));
        crowd.goes(c);
        assert_eq!(crowd.makes_room(), None);
        // All networks have one.
        assert_eq!(crowd.stranger(), Some(a.number));
        crowd.hears(&mut a, Heard::Hello);
        assert_eq!(crowd.stranger(), Some(d.number));
        [b, d, e].into_iter().for_each(|place| crowd.goes(place));
        assert_eq!(crowd.stranger(), Some(a.number));
        crowd.hears(&mut a, Heard::Proof);
        assert_eq!(crowd.stranger(), None);
        crowd.goes(a);
        assert!(crowd.strangers.networks.is_empty() && crowd.proved.networks.is_empty());
        assert_eq!((crowd.strangers.taken, crowd.proved.taken), (0, 0));
    }

    #[test]
    fn with_one_place_the_one_that_comes_takes_it() {
        let mut crowd = Crowd::new(0);
        let mut first = crowd.comes(ip("192.0.2.1"));
        crowd.hears(&mut first, Heard::Hello);
        assert_eq!(crowd.makes_room(), None);
        crowd.comes(ip("192.0.2.1"));
        assert_eq!(crowd.makes_room(), Some(first.number));
    }

    #[test]
    fn one_that_has_proved_the_secret_makes_room_only_for_others_that_have() {
        let mut crowd = Crowd::new(2);
        let prove = |crowd: &mut Crowd| {
            let mut place = crowd.comes(ip("192.0.2.1"));
            crowd.hears(&mut place, Heard::Proof);
            place
        };
        let proved = [0; 2].map(|_| prove(&mut crowd));
        for n in 0..100 {
            let stranger = crowd.comes(ip("192.0.2.2"));
            assert_eq!(crowd.makes_room(), (n >= 2).then(|| stranger.number - 2));
            if n >= 2 {
                crowd.goes(Place { number: stranger.number - 2, ..stranger });
            }
        }
        prove(&mut crowd);
        assert_eq!(crowd.makes_room(), Some(proved[0].number));
    }

    const PEERS: usize = 20;

    /// How many of 20 peers, which all come at one time and prove the secret 20 ms later, keep their places at a door with 64.
    /// `connects`: of strangers, each second. Each stranger says so much at once.
    fn left(
        peers: impl Fn(u32) -> IpAddr,
        connects: u32,
        strangers: impl Fn(u32) -> IpAddr,
        says: Heard,
    ) -> usize {
        let mut crowd = Crowd::new(64);
        let mut all = BTreeMap::new();
        let mut come = |from, says| {
            let mut place = crowd.comes(from);
            crowd.hears(&mut place, says);
            all.insert(place.number, place);
            while let Some(number) = crowd.makes_room() {
                crowd.goes(all.remove(&number).unwrap());
            }
            place.number
        };
        (0..1000).for_each(|n| _ = come(strangers(n), says));
        let numbers: Vec<_> = (0..PEERS as u32).map(|n| come(peers(n), Heard::Hello)).collect();
        (1000..1000 + connects / 50).for_each(|n| _ = come(strangers(n), says));
        numbers.iter().filter(|number| all.contains_key(number)).count()
    }

    fn one(_: u32) -> IpAddr {
        ip("192.0.2.1")
    }

    fn other(_: u32) -> IpAddr {
        ip("192.0.2.2")
    }

    fn many(n: u32) -> IpAddr {
        IpAddr::V4(0x0a00_0000_u32.wrapping_add(n).into())
    }

    #[test]
    fn p7_p8_20_000_connects_a_second_from_one_address_keep_none_of_20_peers_out_that_are_20_ms_away() {
        let half = |n| IpAddr::V6(((0x2001_0db8 << 96) + u128::from(n)).into());
        let other_half = |_| ip("2001:db8:0:1::1");
        for says in [Heard::Nothing, Heard::Hello] {
            assert_eq!(left(one, 20_000, other, says), PEERS);
            assert_eq!(left(other_half, 20_000, half, says), PEERS);
            assert_eq!(left(one, 20_000, half, says), PEERS);
        }
    }

    #[test]
    fn p7_p8_20_000_silent_connects_a_second_from_the_peers_own_address_keep_none_out_that_is_20_ms_away() {
        assert_eq!(left(one, 20_000, one, Heard::Nothing), PEERS);
    }

    #[test]
    fn p7_p8_strangers_of_many_addresses_keep_no_peer_out_whose_proof_comes_within_half_as_many_arrivals_as_places()
     {
        // 20 peers and 12 strangers.
        assert_eq!(left(one, 600, many, Heard::Hello), PEERS);
    }

    /// The limits that the page of the protocol names.
    #[test]
    fn floods_that_look_like_peers_put_out_those_that_are_far() {
        // Eight addresses leave each address a ninth of the places.
        assert_eq!(left(one, 20_000, |n| many(n % 8), Heard::Hello), 64 / 9);
        // With 20 peers and 44 strangers each has a place.
        assert_eq!([2_200, 20_000].map(|connects| left(one, connects, one, Heard::Hello)), [PEERS, 0]);
        let apart = |n: u32| many(!n);
        assert_eq!([2_200, 20_000].map(|connects| left(apart, connects, many, Heard::Hello)), [PEERS, 0]);
        assert_eq!(left(one, 20_000, many, Heard::Hello), 0);
    }
}
