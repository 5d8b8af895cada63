//! One PCIe link: what its wire carries a second, and how much of that is payload.
//!
//! Bandwidths are in GB/s, 10^9 bytes a second, which equals bytes a nanosecond.

use serde::{Deserialize, Serialize};

use crate::error::{ParameterError, Result, one_of, within};

/// Framing (2 or 4 bytes), sequence number (2) and LCRC (4) of a TLP: together 8, whether of the 8b/10b
/// generations (STP, END) or the later ones (a token of 4 bytes that holds the sequence number).
/// PCIe Base Specification 5.0, section 4.2; `DLLP_Hdr` in pcie-bench's `model/pcie.py`.
pub const FRAMING: u64 = 8;
/// Bytes on the wire of a DLLP (ACK, flow control): 2 of framing, 4, and 2 of CRC. Base Specification 5.0,
/// section 3.5; `Ack_Size`, `FC_Size` in pcie.py.
pub const DLLP: u64 = 8;
/// No request crosses a multiple of this many bytes. Base Specification 5.0, section 2.2.7.
pub const PAGE: u64 = 4096;

/// How a completer cuts its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Completions {
    /// Pieces of up to MPS bytes; the first of an unaligned request ends at the next read completion boundary.
    #[default]
    Mps,
    /// Every piece ends at the next read completion boundary, as older root complexes do (`rcb_chunks` in pcie.py).
    Rcb,
}

/// What share of the link ACKs and flow-control updates take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dllps {
    /// The share that pcie-bench counts: one DLLP of each kind for every `AckLimit` *bytes*. Conservative, and
    /// near what machines reach with TLPs of MPS bytes.
    #[default]
    PcieBench,
    /// In the unit of the specification's tables, *symbol times*, which is one byte on every lane:
    /// the share is smaller by the number of lanes.
    SymbolTimes,
}

/// A link, with the settings of the requests that pass it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Link {
    /// Generation, 1 to 6.
    pub generation: u32,
    /// Number of lanes: 1, 2, 4, 8 or 16.
    pub lanes: u32,
    /// Maximum payload size, bytes: a power of two from 128 to 4096.
    pub mps: u32,
    /// Maximum read request size, bytes: a power of two from 128 to 4096.
    pub mrrs: u32,
    /// Read completion boundary, bytes: 64 or 128.
    pub rcb: u32,
    /// Read requests that one requester may have outstanding: 32 with 5-bit tags, 256 with extended ones, 768 with
    /// 10-bit ones.
    pub tags: u32,
    /// Whether TLPs carry an end-to-end CRC of 4 bytes.
    pub ecrc: bool,
    /// Whether requests carry 64-bit addresses (a header of 16 bytes) or 32-bit ones (12).
    pub addr64: bool,
    /// How completers cut their answers.
    pub completions: Completions,
    /// How ACKs and flow control are counted.
    pub dllps: Dllps,
}

impl Default for Link {
    /// The default link: generation 5, 16 lanes, MPS 256, MRRS 512, RCB 64, 256 tags, 64-bit
    /// addresses, no ECRC.
    fn default() -> Self {
        Link {
            generation: 5,
            lanes: 16,
            mps: 256,
            mrrs: 512,
            rcb: 64,
            tags: 256,
            ecrc: false,
            addr64: true,
            completions: Completions::Mps,
            dllps: Dllps::PcieBench,
        }
    }
}

/// Payload sizes that the specification allows for MPS and MRRS.
pub const PAYLOADS: [u32; 6] = [128, 256, 512, 1024, 2048, 4096];

impl Link {
    /// A link of this generation and width; everything else is the default.
    pub fn new(generation: u32, lanes: u32) -> Result<Self> {
        let link = Link { generation, lanes, ..Link::default() };
        link.check().map(|()| link)
    }

    /// Checks that the link is possible.
    ///
    /// # Errors
    /// The first field that is not allowed, with the allowed values.
    pub fn check(&self) -> Result<()> {
        one_of("generation", self.generation, &[1, 2, 3, 4, 5, 6])?;
        one_of("lanes", self.lanes, &[1, 2, 4, 8, 16])?;
        one_of("mps", self.mps, &PAYLOADS)?;
        one_of("mrrs", self.mrrs, &PAYLOADS)?;
        one_of("rcb", self.rcb, &[64, 128])?;
        within("tags", self.tags.into(), 1.0, 16384.0)
    }

    /// Bits for each lane and nanosecond before encoding (GT/s). Base Specification, chapter 8.
    pub fn transfers(&self) -> f64 {
        2.5 * f64::from(1u32 << (self.generation - 1)) * if self.generation >= 3 { 0.8 } else { 1.0 }
    }

    /// The fraction of the bits that encoding leaves: 8/10 (generations 1, 2), 128/130 (3 to 5).
    /// Generation 6 sends flits of 256 bytes, 242 of them TLPs and DLLPs: 242/256, as in pcie.py.
    pub fn encoding(&self) -> f64 {
        match self.generation {
            1 | 2 => 0.8,
            3..=5 => 128.0 / 130.0,
            _ => 242.0 / 256.0,
        }
    }

    /// GB/s that the wire carries, all overhead included (`Raw` in pcie.py).
    pub fn raw(&self) -> f64 {
        self.transfers() * f64::from(self.lanes) * self.encoding() / 8.0
    }

    /// Symbol times after which an ACK or an update of flow control is due. Base Specification 5.0,
    /// sections 2.6.1.2 and 3.6.3.1 (tables 2-46 to 2-48, 3-7 to 3-9): `(MPS + 28) * factor / lanes
    /// + delay`.
    pub fn ack_limit(&self) -> u64 {
        let tenths = match (self.lanes, self.mps <= 256) {
            (1 | 2 | 4, true) => 14,
            (8, true) => 25,
            (1 | 2 | 4 | 8, false) => 10,
            (_, true) => 30,
            (_, false) => 20,
        };
        let delay = match self.generation {
            1 => 19,
            2 => 70,
            _ => 115,
        };
        (u64::from(self.mps) + 28) * tenths / (10 * u64::from(self.lanes)) + delay
    }

    /// GB/s left for TLPs: raw, less ACKs, flow control and clock compensation (4 of 1538 symbols).
    /// With [`Dllps::PcieBench`] this is `TLP_bw` in pcie.py.
    pub fn tlp(&self) -> f64 {
        let due = match self.dllps {
            Dllps::PcieBench => self.ack_limit(),
            Dllps::SymbolTimes => self.ack_limit() * u64::from(self.lanes),
        };
        self.raw() * (1.0 - 2.0 * DLLP as f64 / due as f64 - 4.0 / 1538.0)
    }

    fn digest(&self) -> u64 {
        if self.ecrc { 4 } else { 0 }
    }

    /// Bytes of a memory request, read or write, on the wire besides its payload: 24, or 20 with a
    /// 32-bit address, and 4 for ECRC. Base Specification 5.0, section 2.2.4.1; `TLP_MWr_Hdr_Szs`
    /// in pcie.py.
    pub fn request_overhead(&self) -> u64 {
        FRAMING + if self.addr64 { 16 } else { 12 } + self.digest()
    }

    /// Bytes of a completion on the wire besides its payload: 20, and 4 for ECRC. Base
    /// Specification 5.0, section 2.2.9; `TLP_CplD_Hdr_Szs` in pcie.py.
    pub fn completion_overhead(&self) -> u64 {
        FRAMING + 12 + self.digest()
    }

    /// Bytes on the wire of a write of `bytes` at `address`, in TLPs of up to `tlp` bytes that end at multiples of
    /// `tlp`. `mem_bw.write` in pcie-bench, for unaligned writes too.
    ///
    /// # Errors
    /// `store_tlp`, if `tlp` is not a power of two from 4 to MPS.
    pub fn write_wire(&self, address: u64, bytes: u64, tlp: u32) -> Result<u64> {
        self.check_tlp(tlp)?;
        if bytes == 0 {
            return Ok(0);
        }
        let tlp = u64::from(tlp);
        let count = (address % tlp + bytes).div_ceil(tlp);
        Ok(count * self.request_overhead() + dwords(address, bytes))
    }

    pub(crate) fn check_tlp(&self, tlp: u32) -> Result<()> {
        if tlp.is_power_of_two() && (4..=self.mps).contains(&tlp) {
            return Ok(());
        }
        Err(ParameterError::new("store_tlp", tlp, format!("a power of two from 4 to MPS ({})", self.mps)))
    }

    /// What a read of `bytes` at `address` puts on the wire. Requests have MRRS bytes and end at
    /// multiples of 4 KiB; their answers are cut as [`Link::completions`] says. `mem_bw.read` in
    /// pcie-bench, with the rules of Base Specification 5.0, section 2.3.1.1, for unaligned reads.
    pub fn read_wire(&self, address: u64, bytes: u64) -> ReadWire {
        let mut sum = ReadWire::default();
        if bytes == 0 {
            return sum;
        }
        // The first page may begin anywhere; all later ones begin aligned.
        let head = bytes.min(PAGE - address % PAGE);
        self.add_page(&mut sum, address, head, 1);
        let rest = bytes - head;
        self.add_page(&mut sum, 0, PAGE, rest / PAGE);
        self.add_page(&mut sum, 0, rest % PAGE, 1);
        sum.wire = sum.completions * self.completion_overhead() + sum.payload;
        sum.request_wire = sum.requests * self.request_overhead();
        sum
    }

    fn add_page(&self, sum: &mut ReadWire, address: u64, bytes: u64, times: u64) {
        let mrrs = u64::from(self.mrrs);
        let mut add = |address, bytes, times| {
            if bytes > 0 {
                sum.requests += times;
                sum.completions += times * self.completions_of(address, bytes);
                sum.payload += times * dwords(address, bytes);
            }
        };
        // All boundaries are multiples of RCB, so all whole requests are misaligned in the same
        // way.
        add(address, mrrs, times * (bytes / mrrs));
        add(address, bytes % mrrs, times);
    }

    /// How many completions answer one request.
    pub fn completions_of(&self, address: u64, bytes: u64) -> u64 {
        let rcb = u64::from(self.rcb);
        match self.completions {
            Completions::Rcb => (address % rcb + bytes).div_ceil(rcb),
            Completions::Mps => {
                let first = (rcb - address % rcb) % rcb;
                u64::from(first > 0) + bytes.saturating_sub(first).div_ceil(self.mps.into())
            }
        }
    }

    /// GB/s of payload of writes in aligned TLPs of `tlp` bytes, if only the wire limits them.
    ///
    /// # Errors
    /// A `tlp` that [`Link::write_wire`] refuses.
    pub fn write_rate(&self, tlp: u32) -> Result<f64> {
        Ok(self.tlp() * f64::from(tlp) / self.write_wire(0, tlp.into(), tlp)? as f64)
    }

    /// GB/s of payload that no stream of writes in TLPs of MPS bytes exceeds: the wire without any
    /// DLLP, because ACKs go the other way.
    pub fn ceiling(&self) -> f64 {
        let mps = f64::from(self.mps);
        self.raw() * (1.0 - 4.0 / 1538.0) * mps / (mps + self.request_overhead() as f64)
    }

    /// GB/s of payload that no stream of reads exceeds: the completions on a wire without any DLLP.
    pub fn read_ceiling(&self) -> f64 {
        let cut = match self.completions {
            Completions::Mps => self.mps,
            Completions::Rcb => self.rcb,
        };
        let payload = f64::from(cut.min(self.mrrs));
        self.raw() * (1.0 - 4.0 / 1538.0) * payload / (payload + self.completion_overhead() as f64)
    }

    /// GB/s of payload of aligned reads, if only the wire limits them, by completions one way or
    /// requests the other.
    pub fn read_rate(&self) -> f64 {
        let r = self.read_wire(0, PAGE);
        self.tlp() * PAGE as f64 / r.wire.max(r.request_wire) as f64
    }
}

/// What a read puts on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ReadWire {
    /// Number of read requests.
    pub requests: u64,
    /// Bytes of the requests on the wire, towards the memory.
    pub request_wire: u64,
    /// Number of completions.
    pub completions: u64,
    /// Bytes of data in the completions, in whole double words.
    pub payload: u64,
    /// Bytes of the completions on the wire, headers included, towards the reader.
    pub wire: u64,
}

/// Bytes of payload in whole words of 4 bytes. Base Specification 5.0, section 2.2.1.
fn dwords(address: u64, bytes: u64) -> u64 {
    (address % 4 + bytes).next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The specification's tables, as pcie-bench prints them (`Ack_Limits` in pcie.py).
    #[test]
    fn ack_limits_are_those_of_the_specification() {
        let limit = |generation, lanes, mps| Link { generation, lanes, mps, ..Link::default() }.ack_limit();
        assert_eq!(
            [128, 256, 512, 1024, 2048, 4096].map(|m| limit(1, 1, m)),
            [237, 416, 559, 1071, 2095, 4143]
        );
        assert_eq!([128, 256, 512, 1024, 2048, 4096].map(|m| limit(2, 8, m)), [118, 158, 137, 201, 329, 585]);
        assert_eq!(
            [128, 256, 512, 1024, 2048, 4096].map(|m| limit(3, 4, m)),
            [169, 214, 250, 378, 634, 1146]
        );
        assert_eq!(
            [128, 256, 512, 1024, 2048, 4096].map(|m| limit(5, 16, m)),
            [144, 168, 182, 246, 374, 630]
        );
    }

    #[test]
    fn what_pcie_bench_gets_for_generation_3_x8() {
        let link = Link { generation: 3, lanes: 8, ..Link::default() };
        assert!((link.raw() * 8.0 - 63.015).abs() < 0.001, "{}", link.raw() * 8.0);
        assert!((link.tlp() * 8.0 - 57.88).abs() < 0.01, "{}", link.tlp() * 8.0);
    }

    #[test]
    fn generations_double() {
        let raw = [1, 2, 3, 4, 5, 6].map(|g| Link { generation: g, ..Link::default() }.raw());
        for (got, want) in raw.into_iter().zip([4.0, 8.0, 15.754, 31.508, 63.015, 121.0]) {
            assert!((got - want).abs() < 0.001, "{got} for {want}");
        }
    }

    #[test]
    fn headers() {
        let link = Link::default();
        assert_eq!((link.request_overhead(), link.completion_overhead()), (24, 20));
        let short = Link { addr64: false, ecrc: true, ..link };
        assert_eq!((short.request_overhead(), short.completion_overhead()), (24, 24));
    }

    #[test]
    fn a_wrong_link_says_what_is_allowed() {
        let why = |l: Link| l.check().unwrap_err().to_string();
        assert_eq!(why(Link { lanes: 0, ..Link::default() }), "lanes is 0, expected one of 1, 2, 4, 8, 16");
        assert_eq!(
            why(Link { mps: 300, ..Link::default() }),
            "mps is 300, expected one of 128, 256, 512, 1024, 2048, 4096"
        );
        assert_eq!(why(Link { tags: 0, ..Link::default() }), "tags is 0, expected 1 to 16384");
        assert_eq!(why(Link { rcb: 32, ..Link::default() }), "rcb is 32, expected one of 64, 128");
        assert_eq!(
            Link::new(7, 16).unwrap_err().to_string(),
            "generation is 7, expected one of 1, 2, 3, 4, 5, 6"
        );
        let wide = Link::default().write_rate(512).unwrap_err().to_string();
        assert_eq!(wide, "store_tlp is 512, expected a power of two from 4 to MPS (256)");
    }
}
