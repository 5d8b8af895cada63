//! The memory of this end of a queue pair, the same for every transport: window, segments, and where inbound payload
//! lies.

use std::ops::RangeInclusive;
use std::sync::Arc;

use pushgate_driver_shim::ShimError;
use pushgate_driver_shim::abi;
use pushgate_driver_shim::memory::{ReadOnlyMemory, SharedMemory};
use pushgate_driver_shim::placed::{self, Placed};
use pushgate_driver_shim::segment::{Geometry, Segment, write_header};
use pushgate_driver_shim::window::{Piece, Window};
use pushgate_engine::endpoint::QpOptions;
use pushgate_engine::engine::QpId;
use pushgate_link::memory::Mapped;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::placement;
use crate::settings::RingsPlace;

/// Sizes of a queue pair that differ from the settings.
#[derive(Clone, Copy, Debug, Default)]
pub struct QpConfig {
    /// Size of the payload ring in bytes: a power of two, 64 to 512 Mi.
    pub window_size: Option<u64>,
    /// Number of WQE slots: a power of two, 2 to 65536.
    pub slots: Option<u64>,
    /// Number of receives: a power of two, 2 to 65536.
    pub receives: Option<u64>,
    /// Whether messages land in buffers that `post_recv` names.
    pub posted_receives: bool,
}

/// This end's own parts of a queue pair, the same for every transport.
pub(super) struct Own {
    pub(super) geometry: Geometry,
    pub(super) config: QpConfig,
    pub(super) window: Arc<dyn Window>,
    pub(super) work: Piece,
    pub(super) control: Piece,
    /// The work and control segments, if they lie in host memory.
    pub(super) memory: Option<[Arc<SharedMemory>; 2]>,
    /// All parts of the window, if the segments lie in the window.
    pub(super) placed: Option<Placed>,
}

/// Where inbound payload lies.
pub(super) enum InboundPayload {
    /// In the sender's window, where the sender's device put it.
    Window(Arc<ReadOnlyMemory>),
    /// In this host's memory, where the sender's transport put it.
    Mirror(Arc<SharedMemory>),
}

/// A queue pair that an engine drives, with the memory that its device needs mapped.
pub(super) struct DrivenEnd {
    pub(super) id: QpId,
    pub(super) own: Own,
    pub(super) inbound: InboundPayload,
    pub(super) peer_geometry: Geometry,
    /// It is over TCP, so that no device writes payload.
    pub(super) streams: bool,
}

/// What one end makes: window, work, control and link segment.
fn bytes(geometry: &Geometry) -> u64 {
    let segments = [Segment::Work, Segment::Control, Segment::Link].map(|kind| geometry.bytes(kind));
    (geometry.window_bytes() + segments.iter().sum::<usize>()) as u64
}

fn log2(name: &str, value: u64, allowed: RangeInclusive<u64>) -> Result<u32> {
    if !value.is_power_of_two() || !allowed.contains(&value) {
        let allowed = format!("a power of two, {} to {}", allowed.start(), allowed.end());
        return Err(Error::config(name, value, allowed));
    }
    Ok(value.trailing_zeros())
}

impl Own {
    pub(super) fn new(context: &Context, rank: u32, config: QpConfig) -> Result<Self> {
        let s = context.settings();
        let window = config.window_size.unwrap_or(s.window_size);
        let unit = abi::PUSHGATE_UNIT as u64;
        let window_log = log2("window-size", window, unit..=unit << abi::PUSHGATE_MAX_UNITS_LOG)?;
        let window_log = window_log - abi::PUSHGATE_UNIT_LOG;
        let slots_log = log2("slots", config.slots.unwrap_or(s.slots), 2..=1 << abi::PUSHGATE_MAX_SLOTS_LOG)?;
        let geometry = Geometry {
            window_log,
            slots_log,
            cq_log: slots_log.min(abi::PUSHGATE_MAX_CQ_LOG),
            rx_log: log2(
                "receives",
                config.receives.unwrap_or(s.receives),
                2..=1 << abi::PUSHGATE_MAX_RX_LOG,
            )?,
            link_log: slots_log,
            landing_log: window_log,
            signals: s.signals as u32,
            rank,
        };
        geometry.validate().map_err(|e| Error::Memory(e.into()))?;
        let needed = bytes(&geometry);
        if needed > s.peer_memory {
            let allowed = format!(
                "{needed} or more, which window-size {window}, slots {} and receives {} take; or smaller ones of these",
                1u64 << geometry.slots_log,
                1u64 << geometry.rx_log
            );
            return Err(s.refused("peer_memory", allowed));
        }
        let name = format!("pushgate-window-{rank}");
        if s.rings == RingsPlace::Window {
            let all = context.window(&name, placed::bytes(&geometry))?;
            let placed = Placed::write(all, &geometry)?;
            let Placed { control, work, payload, .. } = placed.clone();
            let window = Arc::new(payload);
            return Ok(Own { work, control, memory: None, placed: Some(placed), window, geometry, config });
        }
        let memory =
            [segment(context, &geometry, Segment::Work)?, segment(context, &geometry, Segment::Control)?];
        let [work, control] = memory.clone().map(|m| Piece::whole(m));
        let window = context.window(&name, geometry.window_bytes())?;
        Ok(Own { work, control, memory: Some(memory), placed: None, window, geometry, config })
    }

    /// The work segment as the engine maps it, for reading only. In host memory this is a mapping
    /// of its own that can't be written.
    pub(super) fn work_to_read(&self) -> Result<Mapped> {
        let Some([work, _]) = &self.memory else { return Ok(self.work.clone().into()) };
        let fd = work.fd().try_clone_to_owned().map_err(Error::io("work segment"))?;
        Ok(Arc::new(ReadOnlyMemory::from_fd(fd, work.len())?).into())
    }

    /// The options with which the engine drives this queue pair.
    pub(super) fn options(&self, context: &Context, peer: u32) -> QpOptions {
        QpOptions {
            peer,
            roles: false,
            posted_receives: self.config.posted_receives,
            reader_flushes: false,
            stuck_ns: context.settings().stuck.as_nanos() as u64,
            // A quarter of the sender's window stays free for its next messages.
            in_place_share: 192,
            // Long for a kernel that keeps receiving, short for one that computes meanwhile.
            slow_ns: 20_000_000,
            ungated: cfg!(feature = "test-ungated") && std::env::var_os("_PUSHGATE_UNGATED").is_some(),
            key_seed: std::process::id().wrapping_mul(2654435761) ^ peer,
        }
    }
}

/// Makes a segment with its header.
pub(super) fn segment(context: &Context, geometry: &Geometry, kind: Segment) -> Result<Arc<SharedMemory>> {
    let memory =
        context.memory(&format!("pushgate-{kind}-{}", geometry.rank), geometry.bytes(kind), false)?;
    write_header(&memory, kind, geometry)?;
    Ok(Arc::new(memory))
}

/// An allocator of memory for the transport; the device reads the mirror.
pub(super) fn allocator(
    context: &Context,
) -> impl FnMut(&str, usize) -> std::result::Result<SharedMemory, ShimError> {
    let (settings, executor) = (context.settings(), &context.inner.executor);
    move |name, bytes| {
        placement::memory(settings, executor, &format!("pushgate-{name}"), bytes, name == "mirror")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;

    #[test]
    fn an_end_that_needs_more_than_the_setting_peer_memory_is_refused_with_what_it_needs() {
        let mut settings = Settings::default();
        settings.set("device", "cpu").unwrap();
        settings.set("peer_memory", "1M").unwrap();
        let context = Context::builder().settings(settings).build().unwrap();
        let new = |window_size| {
            let config = QpConfig {
                window_size: Some(window_size),
                slots: Some(64),
                receives: Some(64),
                ..QpConfig::default()
            };
            Own::new(&context, 0, config).map(|own| bytes(&own.geometry))
        };
        assert!(new(64 << 10).expect("it is small") < 1 << 20);
        let said = new(1 << 20).expect_err("the window alone takes all").to_string();
        assert!(said.starts_with("invalid peer-memory `1M`"), "{said}");
        assert!(said.contains("window-size 1048576, slots 64 and receives 64"), "{said}");
    }
}
