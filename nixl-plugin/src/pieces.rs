//! Lists of descriptors as a transfer needs them: neighbours joined, cut into parts of bounded size. Pure.

use crate::status::{Result, Status};
use crate::wire::{MOST_PLACES, Place};

/// Bytes here and as many at the peer, each within one registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Address in this process.
    pub here: u64,
    /// The registration of this process that it lies in.
    pub key: u64,
    /// The GPU whose memory is at `here`, if it is GPU memory.
    pub device: u32,
    /// The peer's registration and the address there.
    pub there: Place,
}

/// One element of a descriptor list.
#[derive(Clone, Copy, Debug)]
pub struct Element {
    /// Address in its owner's process.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// The key of its registration at its owner.
    pub key: u64,
    /// The GPU whose memory it is, if it is GPU memory of this process.
    pub device: u32,
}

/// A place within a list of pieces: the piece, and an offset in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Index of the piece.
    pub piece: usize,
    /// Bytes of the piece before the cursor.
    pub offset: u64,
}

/// Joins two lists of as many elements. Elements whose bytes follow each other on both sides, in the same registrations, become one
/// piece; elements without bytes go.
///
/// # Errors
/// *Mismatch* where two elements differ in length, *invalid* where one leaves the address space.
pub fn join(
    here: impl ExactSizeIterator<Item = Element>,
    there: impl ExactSizeIterator<Item = Element>,
) -> Result<Vec<Piece>> {
    if here.len() != there.len() {
        return Err(Status::Mismatch);
    }
    let mut all: Vec<Piece> = Vec::with_capacity(here.len());
    for (a, b) in here.zip(there) {
        if a.length != b.length {
            return Err(Status::Mismatch);
        }
        if a.address.checked_add(a.length).is_none() || b.address.checked_add(b.length).is_none() {
            return Err(Status::InvalidParam);
        }
        if a.length == 0 {
            continue;
        }
        match all.last_mut() {
            Some(Piece { here, key, there, .. })
                if *key == a.key
                    && there.key == b.key
                    && *here + there.length == a.address
                    && there.address + there.length == b.address =>
            {
                there.length += a.length;
            }
            _ => all.push(Piece {
                here: a.address,
                key: a.key,
                device: a.device,
                there: Place { key: b.key, address: b.address, length: b.length },
            }),
        }
    }
    Ok(all)
}

/// The next part of a list from `cursor` on, which moves: at most `bytes` bytes in at most `count` pieces. Nothing at the list's end.
pub fn part<'a>(
    pieces: &'a [Piece],
    cursor: &'a mut Cursor,
    bytes: u64,
    count: usize,
) -> impl Iterator<Item = Piece> + use<'a> {
    let (mut left, mut taken) = (bytes, 0);
    std::iter::from_fn(move || {
        let piece = pieces.get(cursor.piece)?;
        let length = (piece.there.length - cursor.offset).min(left);
        if length == 0 || taken == count {
            return None;
        }
        let from = cursor.offset;
        cursor.offset += length;
        if cursor.offset == piece.there.length {
            *cursor = Cursor { piece: cursor.piece + 1, offset: 0 };
        }
        (left, taken) = (left - length, taken + 1);
        let Place { key, address, .. } = piece.there;
        Some(Piece {
            here: piece.here + from,
            there: Place { key, address: address + from, length },
            ..*piece
        })
    })
}

/// The next part that fits into one message of `bytes` bytes.
pub fn message<'a>(
    pieces: &'a [Piece],
    cursor: &'a mut Cursor,
    bytes: usize,
) -> impl Iterator<Item = Piece> + use<'a> {
    part(pieces, cursor, bytes as u64, MOST_PLACES)
}

/// Where each part of at most `bytes` bytes in at most `count` pieces begins, and the list's end.
pub fn cuts(pieces: &[Piece], bytes: u64, count: usize) -> Vec<Cursor> {
    let mut cursor = Cursor::default();
    let mut all = vec![cursor];
    while part(pieces, &mut cursor, bytes, count).count() > 0 {
        all.push(cursor);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(address: u64, length: u64, key: u64) -> Element {
        Element { address, length, key, device: 0 }
    }

    fn piece(here: u64, key: u64, address: u64, length: u64) -> Piece {
        Piece { here, key: 1, device: 0, there: Place { key, address, length } }
    }

    #[test]
    fn neighbours_on_both_sides_become_one_piece() {
        let here = [
            element(100, 10, 1),
            element(110, 10, 1),
            element(120, 10, 1),
            element(130, 0, 1),
            element(130, 5, 1),
        ];
        let there = [
            element(500, 10, 7),
            element(510, 10, 7),
            element(530, 10, 7),
            element(9, 0, 7),
            element(540, 5, 7),
        ];
        let joined = join(here.into_iter(), there.into_iter()).unwrap();
        assert_eq!(joined, [piece(100, 7, 500, 20), piece(120, 7, 530, 15)]);
        // Other registrations, here or there, stay apart.
        let apart = |keys: [(u64, u64); 2]| {
            let here = [element(0, 4, keys[0].0), element(4, 4, keys[1].0)];
            let there = [element(0, 4, keys[0].1), element(4, 4, keys[1].1)];
            join(here.into_iter(), there.into_iter()).unwrap().len()
        };
        assert_eq!([apart([(1, 1), (1, 1)]), apart([(1, 1), (2, 1)]), apart([(1, 1), (1, 2)])], [1, 2, 2]);
    }

    #[test]
    fn lists_that_do_not_fit_together_are_refused() {
        let one = |length| [element(0, length, 0)].into_iter();
        assert_eq!(join(one(4), one(5)), Err(Status::Mismatch));
        assert_eq!(join(one(4), [].into_iter()), Err(Status::Mismatch));
        assert_eq!(join(one(2), [element(u64::MAX, 2, 0)].into_iter()), Err(Status::InvalidParam));
    }

    #[test]
    fn parts_cover_a_list_once_and_keep_both_limits() {
        let pieces: Vec<_> = (0..50u64).map(|i| piece(1000 * i, 1, 5000 * i, 1 + i * 37 % 101)).collect();
        for (bytes, count) in [(1, 1), (7, 3), (100, 2), (64, 100), (10_000, 7), (u64::MAX, usize::MAX)] {
            let (mut cursor, mut all) = (Cursor::default(), Vec::new());
            let cuts = cuts(&pieces, bytes, count);
            for cut in &cuts[1..] {
                let part: Vec<_> = part(&pieces, &mut cursor, bytes, count).collect();
                assert!(part.len() <= count && part.iter().map(|p| p.there.length).sum::<u64>() <= bytes);
                assert_eq!(cursor, *cut);
                all.extend(part);
            }
            assert_eq!(part(&pieces, &mut cursor, bytes, count).count(), 0);
            let list = |all: &[Piece], at: fn(&Piece) -> u64| -> Vec<u64> {
                all.iter().flat_map(|p| (0..p.there.length).map(move |i| at(p) + i)).collect()
            };
            for at in [|p: &Piece| p.here, |p: &Piece| p.there.address] {
                assert!(list(&all, at) == list(&pieces, at), "{bytes} bytes, {count} pieces");
            }
        }
    }
}
