//! Speed and width of PCIe links.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Speed and width of a link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkState {
    /// Gigatransfers a second of each lane: 2.5, 5, 8, 16, 32 or 64.
    pub gts: f64,
    /// Number of lanes.
    pub width: u8,
}

impl LinkState {
    /// GB/s (10^9 bytes) that the lanes carry each way after the line code: 8 of 10 bits up to 5
    /// GT/s, 128 of 130 up to 32 GT/s, 236 of 256 bytes of a flit from 64 GT/s on (PCI Express Base
    /// Specification 6.0, sections 4.2.1 to 4.2.3). Packet headers are part of this figure.
    pub fn gigabytes(self) -> f64 {
        let code = match self.gts {
            s if s <= 5.0 => 0.8,
            s if s <= 32.0 => 128.0 / 130.0,
            _ => 236.0 / 256.0,
        };
        self.gts * f64::from(self.width) * code / 8.0
    }

    /// The PCIe generation of this speed.
    pub fn generation(self) -> u8 {
        [2.5, 5.0, 8.0, 16.0, 32.0].iter().take_while(|s| self.gts > **s).count() as u8 + 1
    }

    /// The best link that both ends support.
    pub fn lesser(self, other: Self) -> Self {
        Self { gts: self.gts.min(other.gts), width: self.width.min(other.width) }
    }
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GT/s x{}", self.gts, self.width)
    }
}

/// The link that a function reports. An endpoint or a switch's upstream port reports the link above
/// it, a root port or a switch's downstream port the link below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The link as trained now. GPUs lower the speed while idle.
    pub now: Option<LinkState>,
    /// The best link that this end supports.
    pub best: Option<LinkState>,
}

/// Parses the speed from sysfs's `current_link_speed` ("32.0 GT/s PCIe", "8 GT/s", "Unknown") or
/// from a bare number.
pub fn parse_speed(text: &str) -> Option<f64> {
    let number = text.split_whitespace().next()?;
    let gts: f64 = number.parse().ok()?;
    let rest = text.trim()[number.len()..].trim();
    let known = rest.is_empty() || rest.starts_with("GT/s");
    (known && (2.0..=256.0).contains(&gts)).then_some(gts)
}

/// Parses the width from sysfs's `current_link_width`: 1 to 32; 0 and 255 mean that no link is up.
pub fn parse_width(text: &str) -> Option<u8> {
    text.trim().parse().ok().filter(|w| (1..=32).contains(w))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_of_all_kernels_are_read() {
        assert_eq!(parse_speed("32.0 GT/s PCIe\n"), Some(32.0));
        assert_eq!(parse_speed("2.5 GT/s"), Some(2.5));
        assert_eq!(parse_speed("8"), Some(8.0));
        for wrong in ["Unknown", "Unknown speed", "", "NaN", "-8 GT/s", "inf GT/s", "8 parsecs", "1e300 GT/s"]
        {
            assert_eq!(parse_speed(wrong), None, "{wrong}");
        }
        assert_eq!((parse_width("16\n"), parse_width("0"), parse_width("255")), (Some(16), None, None));
    }

    #[test]
    fn bandwidth_follows_the_line_code() {
        let gb = |gts, width| (LinkState { gts, width }.gigabytes() * 100.0).round() / 100.0;
        assert_eq!((gb(2.5, 4), gb(8.0, 8), gb(16.0, 16), gb(32.0, 16)), (1.0, 7.88, 31.51, 63.02));
        assert_eq!(gb(64.0, 16), 118.0);
        assert_eq!(LinkState { gts: 32.0, width: 16 }.generation(), 5);
        assert_eq!(LinkState { gts: 2.5, width: 16 }.generation(), 1);
    }
}
