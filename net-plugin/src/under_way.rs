//! How many bytes a process has under way in its windows, and how the connections that send share them.
//!
//! A GPU's stores to host memory go into the processor's last-level cache, but into a part of it alone: Intel's data direct
//! I/O takes two of the cache's ways unless it is set up otherwise. While all windows of a host that are in use fit into that
//! part, the other GPU's loads find the bytes there. Beyond that every byte crosses the memory bus twice more. Two GPUs do
//! not notice; four GPUs that send and receive at once lose a quarter of their speed (docs/benchmarks.md).
//!
//! So a connection keeps its payload among the first bytes of its window ([`Producer::use_window`]), as many as are its
//! share. The share is computed when a message is sent, from how many connections send at that time.
//!
//! [`Producer::use_window`]: pushgate_proxy::producer::Producer::use_window

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pushgate::Membership;
use pushgate::settings::{AutoOr, PluginSettings};
use pushgate_driver_shim::abi;
use pushgate_topology::Sysfs;

const UNIT: u64 = abi::PUSHGATE_UNIT as u64;

/// The part of the last-level cache that devices write into: one of so many. Two ways of sixteen.
const PART: u64 = 8;

/// The bound of a process, and which of its connections send.
pub struct UnderWay {
    /// Units of 64 bytes in all windows of this process together; `None`: no bound.
    most: Option<u64>,
    /// Connections that have payload in their windows. Nothing is read or written by way of this count, so its accesses are
    /// relaxed: a connection that sees it late takes a share of a moment ago.
    sending: AtomicU32,
}

impl UnderWay {
    /// A process whose connections may have `most` bytes under way; `None`: as many as their windows have.
    pub fn new(most: Option<u64>) -> Arc<Self> {
        Arc::new(UnderWay { most: most.map(|bytes| bytes / UNIT), sending: AtomicU32::new(0) })
    }
}

/// Whether a connection sends, and what its share is then.
pub struct Share {
    of: Arc<UnderWay>,
    counted: bool,
}

impl Share {
    /// The share of a connection that does not send yet.
    pub fn new(of: Arc<UnderWay>) -> Self {
        Share { of, counted: false }
    }

    /// The connection sends a message of `units` through its window. Returns how many units of its window it uses: its
    /// share, but at least two messages of this length, so that one can be pushed while the other is pulled.
    #[inline]
    pub fn begin(&mut self, units: u64) -> u64 {
        let Some(most) = self.of.most else { return u64::MAX };
        if !self.counted {
            self.counted = true;
            self.of.sending.fetch_add(1, Ordering::Relaxed);
        }
        let sending = self.of.sending.load(Ordering::Relaxed);
        (most / u64::from(sending.max(1))).max(2 * units)
    }

    /// The connection has nothing in its window any more.
    #[inline]
    pub fn end(&mut self) {
        if std::mem::take(&mut self.counted) {
            self.of.sending.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.end();
    }
}

/// The bound for this process, and a sentence for the log.
pub fn bound(settings: &PluginSettings) -> (Option<u64>, String) {
    match settings.net_under_way {
        AutoOr::Is(bytes) => {
            (Some(bytes), format!("{bytes} bytes under way in all windows, as net-under-way says"))
        }
        AutoOr::None => (None, "no bound of what is under way in all windows, as net-under-way says".into()),
        AutoOr::Auto => {
            let told = Membership::of_process(&settings.common).ok().flatten().and_then(|m| m.local_size);
            // Without a launcher's word each GPU has a rank.
            let ranks = told.unwrap_or_else(|| Sysfs::host().read().gpus.len() as u32);
            of_cache(Sysfs::host().last_level_cache(), ranks)
        }
    }
}

/// The bound where `ranks` ranks share a last-level cache of so many bytes.
fn of_cache(cache: Option<u64>, ranks: u32) -> (Option<u64>, String) {
    let Some(cache) = cache else {
        let why = "no bound of what is under way in all windows: the last-level cache's size is not known";
        return (None, why.into());
    };
    let ranks = ranks.max(1);
    let most = cache / PART / u64::from(ranks);
    let why = format!(
        "{most} bytes under way in all windows: an eighth of the last-level cache of {cache} bytes, shared by {ranks} \
         rank{} of this host",
        if ranks == 1 { "" } else { "s" }
    );
    (Some(most), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_send_share_the_bound_and_give_their_share_back() {
        let all = UnderWay::new(Some(8 << 20));
        let mut shares: Vec<Share> = (0..4).map(|_| Share::new(all.clone())).collect();
        let units = |bytes: u64| bytes / UNIT;
        assert_eq!(shares[0].begin(1), units(8 << 20), "alone");
        assert_eq!(shares[0].begin(1), units(8 << 20), "counted once");
        for (others, share) in shares[1..].iter_mut().enumerate() {
            assert_eq!(share.begin(1), units(8 << 20) / (others as u64 + 2));
        }
        assert_eq!(shares[0].begin(1), units(2 << 20));
        assert_eq!(shares[0].begin(units(3 << 20)), units(6 << 20), "two messages, whatever the share is");
        shares[1].end();
        shares[1].end();
        shares.truncate(3);
        assert_eq!(shares[0].begin(1), units(4 << 20), "one has ended, one is dropped");
    }

    #[test]
    fn without_a_bound_the_window_is_the_bound() {
        let mut share = Share::new(UnderWay::new(None));
        assert_eq!(share.begin(7), u64::MAX);
        share.end();
    }

    #[test]
    fn the_bound_is_an_eighth_of_the_cache_for_all_ranks_of_the_host() {
        let (most, why) = of_cache(Some(320 << 20), 4);
        assert_eq!(most, Some(10 << 20));
        assert!(why.contains("10485760 bytes") && why.contains("4 ranks"), "{why}");
        assert_eq!(of_cache(Some(320 << 20), 0).0, Some(40 << 20));
        assert_eq!(of_cache(None, 4).0, None);
    }

    #[test]
    fn a_setting_is_the_bound_of_the_process() {
        let of = |under_way| {
            let mut settings = PluginSettings::default();
            settings.net_under_way = under_way;
            bound(&settings).0
        };
        assert_eq!(of(AutoOr::Is(3 << 20)), Some(3 << 20));
        assert_eq!(of(AutoOr::None), None);
    }
}
