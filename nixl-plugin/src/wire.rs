//! Messages between two agents. Each is a SEND of their queue pair: the tag is the kind, and 32 bytes of four little-endian words
//! begin it. Pure: what a peer sent is checked here, as far as the message itself says.

/// Bytes before a message's table or payload.
pub const HEAD: usize = 32;
/// Bytes of a place in a message's table.
pub const PLACE: usize = 24;
/// The most places of a message.
pub const MOST_PLACES: usize = 2048;
/// The most payload of a message: two copies of it stay in a core's cache.
pub const CHUNK: usize = 256 << 10;
/// The most payload of a message from or to GPU memory: shorter copies leave gaps on the bus.
pub const GPU_CHUNK: usize = 2 << 20;
/// Payload begins at a multiple of this.
const ALIGN: usize = 64;
/// The longest message.
pub const LONGEST: usize = HEAD + MOST_PLACES * PLACE + ALIGN + GPU_CHUNK;
/// Bytes of the token by which an agent knows a process.
pub const TOKEN: usize = 16;

/// Why a message was refused.
pub type Refused = &'static str;

/// Bytes of a registration: its key, an address and a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The registration.
    pub key: u64,
    /// The first byte's address in its owner's process.
    pub address: u64,
    /// Bytes, at least 1.
    pub length: u64,
}

/// A region of a queue pair's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The region's rkey.
    pub rkey: u32,
    /// Address of the first byte in its owner's process.
    pub base: u64,
}

/// A message without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first message of each end: where its process has the page of its gate.
    Hello {
        /// Number of the page's descriptor; 0: there is none.
        place: u64,
        /// The token.
        token: [u8; TOKEN],
    },
    /// Payload of a WRITE, and where it goes, in order.
    Write {
        /// The sender's number of the transfer.
        transfer: u64,
        /// The transfer's last message.
        last: bool,
        /// Where the payload goes.
        places: Vec<Place>,
        /// Where the payload begins in the message.
        payload: usize,
    },
    /// Asks for the content of places.
    Read {
        /// The sender's number of the request.
        job: u64,
        /// What is read, in order.
        places: Vec<Place>,
        /// Nothing, or where each place's bytes may be put: `key` is the rkey of a region of the sender, `address` an offset in it.
        into: Vec<Place>,
    },
    /// All bytes of a request were put where it said.
    Landed {
        /// The request.
        job: u64,
    },
    /// Payload of a READ, in the order of its places.
    Data {
        /// The request.
        job: u64,
        /// The request's last message.
        last: bool,
        /// 0, or why the request has failed (a value of `nixl_status_t`).
        status: i32,
        /// Where the payload begins in the message.
        payload: usize,
    },
    /// A part of a notification, after what was posted before it.
    Note {
        /// The notification's last part.
        last: bool,
        /// Where the text begins in the message.
        payload: usize,
    },
    /// `count` WRITE transfers of the receiver are in place, since the connection began.
    Done {
        /// How many.
        count: u64,
    },
    /// A WRITE transfer of the receiver has failed; [`Message::Done`] counts it nevertheless.
    Failed {
        /// The receiver's number of the transfer.
        transfer: u64,
        /// Why, a value of `nixl_status_t`.
        status: i32,
    },
    /// Asks to write a registration's memory directly, until that is revoked; from process to process, to read it too.
    Ask {
        /// The registration.
        key: u64,
        /// By puts into a region of the queue pair; else from process to process.
        region: bool,
    },
    /// Answers [`Message::Ask`].
    Lease {
        /// The registration.
        key: u64,
        /// Whether its memory may be written directly.
        granted: bool,
        /// The region, if that was asked for and there is one.
        region: Option<Remote>,
    },
    /// The registration ends: nothing may touch its memory any more.
    Revoke {
        /// The registration.
        key: u64,
    },
    /// Answers [`Message::Revoke`]: nothing does.
    Revoked {
        /// The registration.
        key: u64,
    },
}

/// The kinds of messages, as tags.
mod kind {
    pub const HELLO: u32 = 1;
    pub const WRITE: u32 = 2;
    pub const READ: u32 = 3;
    pub const DATA: u32 = 4;
    pub const NOTE: u32 = 5;
    pub const DONE: u32 = 6;
    pub const FAILED: u32 = 7;
    pub const ASK: u32 = 8;
    pub const LEASE: u32 = 9;
    pub const REVOKE: u32 = 10;
    pub const REVOKED: u32 = 11;
    pub const LANDED: u32 = 12;
}

/// The word of a lease that names a region.
const LEASED_REGION: u64 = 2;

/// Where the payload of a message begins that has `places` places.
pub fn payload_after(places: usize) -> usize {
    (HEAD + places * PLACE).next_multiple_of(ALIGN)
}

impl Message {
    /// Whether messages of this tag answer what the peer sent, so that the peer chooses how many there are.
    pub fn answers(tag: u32) -> bool {
        use kind::*;
        matches!(tag, DATA | DONE | FAILED | LEASE | REVOKED | LANDED)
    }

    /// The tag, and the bytes before the payload.
    pub fn encode(&self) -> (u32, Vec<u8>) {
        use Message::*;
        let (tag, words, places): (u32, [u64; 4], &[Place]) = match self {
            Hello { place, token } => {
                let half = |i: usize| u64::from_le_bytes(token[i..i + 8].try_into().expect("8 bytes"));
                (kind::HELLO, [*place, half(0), half(8), 0], &[])
            }
            Write { transfer, last, places, payload } => {
                (kind::WRITE, [*transfer, places.len() as u64, *payload as u64, (*last).into()], places)
            }
            Read { job, places, into } => {
                (kind::READ, [*job, places.len() as u64, (!into.is_empty()).into(), 0], places)
            }
            Landed { job } => (kind::LANDED, [*job, 0, 0, 0], &[]),
            Data { job, last, status, payload } => {
                (kind::DATA, [*job, *status as u32 as u64, *payload as u64, (*last).into()], &[])
            }
            Note { last, payload } => (kind::NOTE, [0, 0, *payload as u64, (*last).into()], &[]),
            Done { count } => (kind::DONE, [*count, 0, 0, 0], &[]),
            Failed { transfer, status } => (kind::FAILED, [*transfer, *status as u32 as u64, 0, 0], &[]),
            Ask { key, region } => (kind::ASK, [*key, (*region).into(), 0, 0], &[]),
            Lease { key, granted, region: None } => (kind::LEASE, [*key, (*granted).into(), 0, 0], &[]),
            Lease { key, region: Some(Remote { rkey, base }), .. } => {
                (kind::LEASE, [*key, LEASED_REGION, (*rkey).into(), *base], &[])
            }
            Revoke { key } => (kind::REVOKE, [*key, 0, 0, 0], &[]),
            Revoked { key } => (kind::REVOKED, [*key, 0, 0, 0], &[]),
        };
        let mut bytes = Vec::with_capacity(HEAD + places.len() * PLACE);
        words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        let into: &[Place] = if let Read { into, .. } = self { into } else { &[] };
        for Place { key, address, length } in places.iter().chain(into) {
            [key, address, length].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        }
        (tag, bytes)
    }

    /// Reads a message of `length` bytes; `copy` gives bytes of it, from an offset on. Each byte is copied once at most, because
    /// the peer may change them.
    pub fn decode(tag: u32, length: usize, copy: impl Fn(usize, &mut [u8])) -> Result<Message, Refused> {
        if !(HEAD..=LONGEST).contains(&length) {
            return Err("a message of no length that there is");
        }
        let mut head = [0; HEAD];
        copy(0, &mut head);
        let word =
            |bytes: &[u8], i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().expect("8 bytes"));
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| word(&head, i));
        let flag = |word: u64| match word {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err("a flag that is neither 0 nor 1"),
        };
        let payload = || {
            usize::try_from(c)
                .ok()
                .filter(|at| (HEAD..=length).contains(at))
                .ok_or("payload outside of its message")
        };
        let status = |word: u64| match word as u32 as i32 {
            status @ -32..=0 if word >> 32 == 0 => Ok(status),
            _ => Err("no status that there is"),
        };
        let places = |tables: usize| {
            let count = usize::try_from(b).ok().filter(|n| *n <= MOST_PLACES).ok_or("too many places")?;
            let count = tables * count;
            if HEAD + count * PLACE > length {
                return Err("a table outside of its message");
            }
            let mut table = vec![0; count * PLACE];
            copy(HEAD, &mut table);
            let mut total = 0u64;
            let all = table.chunks_exact(PLACE).map(|bytes| {
                let [key, address, length] = [0, 1, 2].map(|i| word(bytes, i));
                total = total.checked_add(length).ok_or("more bytes than there are")?;
                match length > 0 && address.checked_add(length).is_some() {
                    true => Ok(Place { key, address, length }),
                    false => Err("a place without bytes, or outside of the address space"),
                }
            });
            Ok((all.collect::<Result<Vec<_>, _>>()?, total))
        };
        let alone = |message| if length == HEAD { Ok(message) } else { Err("bytes behind the message") };
        match tag {
            kind::HELLO => {
                let mut token = [0; TOKEN];
                token.copy_from_slice(&head[8..24]);
                alone(Message::Hello { place: a, token })
            }
            kind::WRITE => {
                let ((places, total), payload) = (places(1)?, payload()?);
                if payload < HEAD + places.len() * PLACE || total != (length - payload) as u64 {
                    return Err("a payload that is not as long as its places");
                }
                Ok(Message::Write { transfer: a, last: flag(d)?, places, payload })
            }
            kind::READ => {
                let straight = flag(c)?;
                let mut places = places(1 + usize::from(straight))?.0;
                let into = if straight { places.split_off(places.len() / 2) } else { Vec::new() };
                let fit = |(place, to): (&Place, &Place)| {
                    place.length == to.length && to.key <= u64::from(u32::MAX)
                };
                match !straight || !into.is_empty() && places.iter().zip(&into).all(fit) {
                    true => Ok(Message::Read { job: a, places, into }),
                    false => Err("a request whose bytes have no place to go"),
                }
            }
            kind::LANDED => alone(Message::Landed { job: a }),
            kind::DATA => {
                Ok(Message::Data { job: a, last: flag(d)?, status: status(b)?, payload: payload()? })
            }
            kind::NOTE => Ok(Message::Note { last: flag(d)?, payload: payload()? }),
            kind::DONE => alone(Message::Done { count: a }),
            kind::FAILED => alone(Message::Failed { transfer: a, status: status(b)? }),
            kind::ASK => alone(Message::Ask { key: a, region: flag(b)? }),
            kind::LEASE if b == LEASED_REGION => {
                let rkey = c.try_into().map_err(|_| "no key of a region")?;
                alone(Message::Lease { key: a, granted: true, region: Some(Remote { rkey, base: d }) })
            }
            kind::LEASE => alone(Message::Lease { key: a, granted: flag(b)?, region: None }),
            kind::REVOKE => alone(Message::Revoke { key: a }),
            kind::REVOKED => alone(Message::Revoked { key: a }),
            _ => Err("a kind of message that there is not"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(tag: u32, bytes: &[u8]) -> Result<Message, Refused> {
        Message::decode(tag, bytes.len(), |from, to| to.copy_from_slice(&bytes[from..from + to.len()]))
    }

    fn all() -> Vec<(Message, usize)> {
        let places =
            vec![Place { key: 7, address: 4096, length: 3 }, Place { key: 8, address: 1, length: 4 }];
        vec![
            (Message::Hello { place: 5, token: *b"0123456789abcdef" }, 0),
            (
                Message::Write { transfer: 1, last: true, places: places.clone(), payload: payload_after(2) },
                7,
            ),
            (Message::Write { transfer: 1, last: false, places: vec![], payload: HEAD }, 0),
            (Message::Read { job: 9, places: places.clone(), into: vec![] }, 0),
            (Message::Read { job: 9, into: places.clone(), places }, 0),
            (Message::Landed { job: 9 }, 0),
            (Message::Data { job: 9, last: false, status: 0, payload: 64 }, 100),
            (Message::Data { job: 9, last: true, status: -4, payload: HEAD }, 0),
            (Message::Note { last: true, payload: HEAD }, 11),
            (Message::Done { count: 3 }, 0),
            (Message::Failed { transfer: 4, status: -3 }, 0),
            (Message::Ask { key: 1, region: false }, 0),
            (Message::Ask { key: 1, region: true }, 0),
            (Message::Lease { key: 1, granted: true, region: None }, 0),
            (Message::Lease { key: 1, granted: true, region: Some(Remote { rkey: 5, base: 4096 }) }, 0),
            (Message::Revoke { key: 1 }, 0),
            (Message::Revoked { key: 1 }, 0),
        ]
    }

    fn bytes(message: &Message, payload: usize) -> (u32, Vec<u8>) {
        let (tag, mut bytes) = message.encode();
        let at = match message {
            Message::Write { payload, .. }
            | Message::Data { payload, .. }
            | Message::Note { payload, .. } => *payload,
            _ => bytes.len(),
        };
        bytes.resize(at + payload, 0);
        (tag, bytes)
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        for (message, payload) in all() {
            let (tag, bytes) = bytes(&message, payload);
            assert_eq!(decode(tag, &bytes), Ok(message));
        }
    }

    #[test]
    fn p8_messages_that_are_cut_or_changed_are_refused_or_stay_within_their_length() {
        for (message, payload) in all() {
            let (tag, bytes) = bytes(&message, payload);
            for cut in 0..HEAD {
                assert!(decode(tag, &bytes[..cut]).is_err());
            }
            for at in 0..bytes.len().min(HEAD + 2 * PLACE) {
                for bit in 0..8 {
                    let mut bytes = bytes.clone();
                    bytes[at] ^= 1 << bit;
                    // `copy` panics if it is asked for what is outside.
                    match decode(tag, &bytes) {
                        Ok(Message::Write { places, payload, .. }) => {
                            let total: u64 = places.iter().map(|p| p.length).sum();
                            assert_eq!(total as usize, bytes.len() - payload);
                        }
                        Ok(Message::Data { payload, .. } | Message::Note { payload, .. }) => {
                            assert!(payload <= bytes.len())
                        }
                        _ => {}
                    }
                }
            }
        }
        assert!(decode(0, &[0; HEAD]).is_err() && decode(99, &[0; HEAD]).is_err());
        assert!(decode(kind::READ, &vec![0xff; LONGEST + 1]).is_err());
    }
}
