//! Statuses in words.

use pushgate_core::refusal::Refusal;
use pushgate_core::session::Status;
use pushgate_driver_shim::abi;

/// A status in words: its name, the rank at fault, and the detail where a detail says more.
pub fn status_text(status: Status) -> String {
    let name = status_name(status.code.into());
    let rank = status.rank.map(|rank| format!(" (rank {rank})")).unwrap_or_default();
    match (status.code.into(), status.detail) {
        (abi::PUSHGATE_LINK_DOWN, cause) => format!("{name}{rank}: {}", link_cause(cause)),
        (abi::PUSHGATE_REFUSED, detail) => {
            let (refusal, slot) = Refusal::of(detail);
            let slot = slot.map(|slot| format!(", slot {slot}")).unwrap_or_default();
            format!("{name}{rank}{slot}: {}", refusal.words())
        }
        (abi::PUSHGATE_STUCK, slot) => format!("{name}{rank}, slot {slot}"),
        _ => format!("{name}{rank}"),
    }
}

/// The name of a status code.
pub fn status_name(code: u64) -> &'static str {
    match code as u32 {
        abi::PUSHGATE_OK => "ok",
        abi::PUSHGATE_AGAIN => "again",
        abi::PUSHGATE_PEER_LOST => "peer lost",
        abi::PUSHGATE_ABORTED => "aborted",
        abi::PUSHGATE_TIMED_OUT => "timed out",
        abi::PUSHGATE_REFUSED => "refused",
        abi::PUSHGATE_STUCK => "stuck",
        abi::PUSHGATE_OVERRUN => "overrun",
        abi::PUSHGATE_INVALID => "invalid",
        abi::PUSHGATE_LINK_DOWN => "link down",
        _ => "unknown",
    }
}

/// Why a link is down, in words, by the detail of its status.
pub fn link_cause(detail: u32) -> String {
    match detail {
        abi::PUSHGATE_DOWN_PORT => "its port is down".into(),
        abi::PUSHGATE_DOWN_ADDRESS => "its address was removed".into(),
        abi::PUSHGATE_DOWN_DEVICE => "its device or network interface was removed".into(),
        abi::PUSHGATE_DOWN_RETRY => "it does not answer (retries exceeded)".into(),
        abi::PUSHGATE_DOWN_RNR => "it had no receive posted (RNR)".into(),
        abi::PUSHGATE_DOWN_ACCESS => "it refused access to its memory".into(),
        abi::PUSHGATE_DOWN_STREAM => "it sent over TCP what is no frame".into(),
        n if n >= abi::PUSHGATE_DOWN_WC => {
            format!("work completion status {}", n - abi::PUSHGATE_DOWN_WC)
        }
        n => format!("cause {n}"),
    }
}
