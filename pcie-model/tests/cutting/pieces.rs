//! Cuts requests and answers into TLPs one by one, as hardware does.

use pushgate_pcie_model::link::PAGE;
use pushgate_pcie_model::{Completions, Link};

/// A piece of a request or an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Address of the first byte.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl Piece {
    /// Payload of the piece as a TLP: the words of 4 bytes that it touches.
    pub fn payload(&self) -> u64 {
        let (first, end) = (self.address / 4, (self.address + self.bytes).div_ceil(4));
        4 * (end - first)
    }
}

/// Bytes that a TLP has on the wire, put together as the data link layer does. Generations 1 and 2:
/// STP, two bytes of sequence number, LCRC, END; later ones: a token of four bytes that holds
/// length and sequence number, and LCRC. Between these the header (three double words, or four in a
/// request with a 64-bit address), the data, and a digest. Base Specification 5.0, sections 2.2.1,
/// 3.6.2, 4.2.2.
pub fn on_wire(link: &Link, request: bool, payload: u64) -> u64 {
    let (start, end) = if link.generation <= 2 { (1 + 2, 4 + 1) } else { (4, 4) };
    let header_words = if request && link.addr64 { 4 } else { 3 };
    let digest_words = u64::from(link.ecrc);
    start + 4 * (header_words + digest_words) + payload + end
}

/// An iterator over pieces; `length` gives the length of each from its address and what is left.
struct Pieces<F> {
    at: u64,
    left: u64,
    length: F,
}

impl<F: Fn(u64, u64) -> u64> Iterator for Pieces<F> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.left == 0 {
            return None;
        }
        let bytes = (self.length)(self.at, self.left).min(self.left);
        let piece = Piece { address: self.at, bytes };
        self.at += bytes;
        self.left -= bytes;
        Some(piece)
    }
}

/// Cuts a read into requests: up to MRRS bytes each, none across 4 KiB.
pub fn requests(link: &Link, address: u64, bytes: u64) -> impl Iterator<Item = Piece> + use<> {
    let mrrs = u64::from(link.mrrs);
    Pieces { at: address, left: bytes, length: move |at, _| mrrs.min(PAGE - at % PAGE) }
}

/// Cuts a write into TLPs: each ends at a multiple of `tlp`, as coalesced lines do.
pub fn writes(tlp: u32, address: u64, bytes: u64) -> impl Iterator<Item = Piece> + use<> {
    let tlp = u64::from(tlp);
    Pieces { at: address, left: bytes, length: move |at, _| tlp - at % tlp }
}

/// Cuts the answer to one read request into completions. If the request is unaligned, the first
/// completion ends at the read completion boundary; the others have MPS bytes, or end at every
/// boundary. Base Specification 5.0, section 2.3.1.1, lets a completer choose.
pub fn completions(link: &Link, request: Piece) -> impl Iterator<Item = Piece> + use<> {
    let (rcb, mps, cut) = (u64::from(link.rcb), u64::from(link.mps), link.completions);
    let length = move |at: u64, _| match (at % rcb, cut) {
        (0, Completions::Mps) => mps,
        (odd, _) => rcb - odd,
    };
    Pieces { at: request.address, left: request.bytes, length }
}

mod tests {
    use super::*;

    fn sizes(pieces: impl Iterator<Item = Piece>) -> Vec<u64> {
        pieces.map(|p| p.bytes).collect()
    }

    #[test]
    fn an_aligned_answer_has_pieces_of_mps() {
        let all = |cut| {
            let link = Link { completions: cut, ..Link::default() };
            sizes(completions(&link, Piece { address: 0, bytes: 512 }))
        };
        assert_eq!(all(Completions::Mps), [256, 256]);
        assert_eq!(all(Completions::Rcb), [64; 8]);
    }

    #[test]
    fn an_unaligned_answer_reaches_the_boundary_first() {
        let link = Link::default();
        assert_eq!(sizes(completions(&link, Piece { address: 4, bytes: 512 })), [60, 256, 196]);
        assert_eq!(sizes(completions(&link, Piece { address: 4, bytes: 32 })), [32]);
    }

    #[test]
    fn requests_end_at_pages() {
        assert_eq!(sizes(requests(&Link::default(), 4000, 700)), [96, 512, 92]);
    }

    #[test]
    fn a_tlp_is_framed() {
        let link = Link::default();
        assert_eq!(
            [on_wire(&link, true, 256), on_wire(&link, false, 256), on_wire(&link, true, 0)],
            [280, 276, 24]
        );
        let old = Link { generation: 1, addr64: false, ecrc: true, ..link };
        assert_eq!([on_wire(&old, true, 64), on_wire(&old, false, 64)], [88, 88]);
    }

    #[test]
    fn writes_end_at_their_lines() {
        assert_eq!(sizes(writes(128, 100, 300)), [28, 128, 128, 16]);
        assert_eq!(Piece { address: 3, bytes: 2 }.payload(), 8);
    }
}
